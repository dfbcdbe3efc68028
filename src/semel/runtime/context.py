"""The context of a running handler: `current()` and `step()`."""

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from functools import partial
from time import monotonic
from typing import Any, ParamSpec, TypeVar, overload

from msgspec import Struct, field

from semel.codec import decode, encode, encode_reason, reason_in
from semel.core import flows
from semel.core.commands import Granted, Raised, Ran, Renew, RenewAnswer
from semel.core.ids import idempotency_key
from semel.errors import (
    ClaimLost,
    NotInHandler,
    NotRecorded,
    StepRepeated,
    UsageError,
    ValueInvalid,
    ValueNotKept,
    ValueTooLarge,
)
from semel.runtime.handlers import return_type
from semel.runtime.keeper import LiveClaim
from semel.runtime.process import inspect
from semel.types import Id, Lost, Record, Unavailable

__all__ = [
    "Context",
    "HandlerRun",
    "check_own",
    "current",
    "enter_by_hand",
    "held_owners",
    "leave_by_hand",
    "running",
    "step",
]

P = ParamSpec("P")
T = TypeVar("T")

STEPS_MAX = 64
"""Each step rewrites the record, so the cost of n steps grows with n squared."""
STEP_NAME_BYTES_MAX = 128


class HandlerRun(Struct, eq=False):
    """One run of a handler: its claim, its steps, and the run that it was called from."""

    kept: LiveClaim
    granted: Granted
    executor: Any
    value_bytes_max: int
    steps: dict[str, bytes | None] = field(default_factory=dict)
    """Values recorded by earlier attempts and by this one."""
    named: set[str] = field(default_factory=set)
    """Names of the steps of this attempt."""
    published: set[str] = field(default_factory=set[str])
    """Names of the messages that this attempt wrote into an outbox."""
    unclaimed: bool = False
    """Whether no claim is held: marks, observed duplicates, windows that are off. Steps run and are not recorded."""
    outer: "HandlerRun | None" = None
    """The handler that called this one."""

    def begin_step(self, name: str) -> None:
        """Check the name of a step and reserve it. Raises `UsageError` or `StepRepeated`."""
        if self.granted.steps and not self.steps:
            self.steps.update(self.granted.steps)
        if not 0 < len(name.encode()) <= STEP_NAME_BYTES_MAX:
            raise UsageError(f"a step's name takes 1 to {STEP_NAME_BYTES_MAX} bytes, not {name!r}")
        if name in self.named:
            raise StepRepeated(f"step {name!r} was already used in this attempt; give each step its own name")
        if name not in self.steps and len(self.steps.keys() | self.named) >= STEPS_MAX:
            raise UsageError(f"a handler has at most {STEPS_MAX} steps; put several effects into one")
        self.named.add(name)

    def stored_value(self, name: str, returns: Any) -> Any:
        """Return the value of a step that an earlier attempt recorded. Raises `ValueNotKept` if it has none."""
        value = self.steps[name]
        if value is None or (reason := reason_in(value)):
            why = "" if value is None else f": {reason}"
            raise ValueNotKept(f"step {name!r} ran on an earlier attempt, but its value was not kept{why}")
        return decode(value, returns)

    def step_flow(self, name: str, call: Callable[[], Any], returns: Any) -> Any:
        """Return the flow that runs a step and records its value."""
        return flows.step(partial(self._renew, name), call, partial(self._encode, returns))

    def step_value(self, name: str, noted: tuple[Ran, RenewAnswer | None]) -> Any:
        """Return the value of a step that ran. Raises its error, `ClaimLost`, or `NotRecorded`."""
        ran, answer = noted
        if isinstance(ran, Raised):
            raise ran.error
        if isinstance(answer, Lost):
            self.kept.lost = True  # the handler gets the error below; it is not cancelled as well
            raise ClaimLost(f"the claim was lost while step {name!r} ran")
        if isinstance(answer, Unavailable):
            raise NotRecorded(
                f"step {name!r} ran, but the store could not record it", ran.value
            ) from answer.error
        return ran.value

    def _encode(self, returns: Any, value: Any) -> bytes:
        """Encode the value, or the reason why it is not kept: the effect has happened, so the step is recorded."""
        try:
            encoded = encode(value, returns, self.value_bytes_max)
            held = sum(len(each) for each in self.steps.values() if each and not reason_in(each))
            if len(encoded) + held > self.value_bytes_max:
                raise ValueTooLarge("the steps of one record share one value limit")
        except ValueInvalid as error:
            return encode_reason(error)
        return encoded

    def _renew(self, name: str, encoded: bytes | None) -> Renew:
        claim = self.kept.claim
        self.steps[name] = encoded
        return Renew(claim.id, claim.owner, self.granted.fence, claim.lease_us, (name, encoded))


running: ContextVar[HandlerRun | None] = ContextVar("semel.current", default=None)
"""The run of the current handler."""


class Context(Struct, frozen=True):
    """The claim that the running handler holds."""

    _run: HandlerRun

    @property
    def fence(self) -> int:
        """A number that grows with every claim of this key: a sink that remembers it can refuse stale workers."""
        return self._run.granted.fence

    @property
    def attempt(self) -> int:
        """The number of the attempt; 1 for the first."""
        return self._run.granted.attempt

    @property
    def first_seen_us(self) -> int:
        """When the event was first claimed: store clock, microseconds."""
        return self._run.granted.first_seen_us

    @property
    def key(self) -> str:
        """The event's key."""
        return self._run.kept.claim.id[2]

    @property
    def consumer(self) -> str:
        """The name of the consumer."""
        return self._run.kept.claim.id[1]

    @property
    def idempotency_key(self) -> str:
        """A key for the systems that the handler calls: the same on every attempt."""
        return idempotency_key(self._run.kept.claim.id)

    @property
    def deadline_s(self) -> float:
        """Seconds until the claim ends if it is not renewed."""
        return self._run.kept.deadline - monotonic()

    @property
    def lost(self) -> bool:
        """Whether the claim is lost: the handler must stop and have no more effects."""
        return self._run.kept.lost

    def step_key(self, name: str) -> str:
        """Return the idempotency key of one step."""
        return idempotency_key(self._run.kept.claim.id, name)


_by_hand: ContextVar[tuple[LiveClaim, ...]] = ContextVar("semel.by_hand", default=())
"""The claims whose `with` blocks are open in this context."""


def enter_by_hand(kept: LiveClaim) -> None:
    """Note the begin of a `with claim:` block."""
    kept.ended = False
    _by_hand.set((*_by_hand.get(), kept))


def leave_by_hand(kept: LiveClaim) -> None:
    """Note the end of a `with claim:` block."""
    kept.ended = True
    _by_hand.set(tuple(each for each in _by_hand.get() if each is not kept))


def held_owners(record_id: Id) -> set[bytes]:
    """Return the owners of this record's claims that the calling code itself holds, in any store.

    Tasks and threads that were started inside a handler share its context. Claims whose handler has ended, and
    lost ones, do not count: waiting for those ends.
    """
    held = list(_by_hand.get())
    run = running.get()
    while run is not None:
        if not run.unclaimed:
            held.append(run.kept)
        run = run.outer
    return {
        kept.claim.owner for kept in held if kept.claim.id == record_id and not kept.ended and not kept.lost
    }


def check_own(found: Any, owners: set[bytes]) -> None:
    """Raise `UsageError` if the record is claimed by one of these owners: the caller itself."""
    if isinstance(found, Record) and found.owner in owners:
        raise UsageError(
            f"{found.key!r} is claimed by the very code that calls this, which would wait for itself; call the plain"
            " function inside the handler (of a guarded function: its __wrapped__), or give the inner call its own key"
        )


def current() -> Context:
    """Return the claim of the running handler. Raises `NotInHandler` elsewhere."""
    return Context(_current_run())


def _current_run() -> HandlerRun:
    run = running.get()
    if run is None:
        raise NotInHandler("current() and step() work inside a handler that semel runs under a claim")
    return run


@overload
def step(name: str, fn: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> Awaitable[T]: ...


@overload
def step(name: str, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T: ...


def step(name: str, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run one effect inside a handler so that a later attempt does not repeat it.

    Its value is recorded in the event's record: one round trip. A crash between the effect and the write
    repeats it; pass `current().step_key(name)` to the other system to make that harmless. An `async def`
    is awaited. Raises `StepRepeated`, `ClaimLost`, `NotRecorded`, and the errors of `fn`.
    """
    run = _current_run()
    returns = return_type(fn)
    run.begin_step(name)
    call = partial(fn, *args, **kwargs)
    if run.unclaimed:
        return call()
    if inspect.iscoroutinefunction(fn):
        return _astep(run, name, call, returns)
    if name in run.steps:
        return run.stored_value(name, returns)
    return run.step_value(name, run.executor.step(run.step_flow(name, call, returns)))


async def _astep(run: HandlerRun, name: str, call: Callable[[], Any], returns: Any) -> Any:
    if name in run.steps:
        return run.stored_value(name, returns)
    return run.step_value(name, await run.executor.astep(run.step_flow(name, call, returns)))
