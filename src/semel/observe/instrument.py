"""Report the events of a flow, a verb or a store to hooks.

A `FlowObserver` wraps a flow: it sees each command and each answer and passes them on. So the protocol
does not depend on it, it works for sync and async, and without hooks it costs nothing.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from semel.codec import decode_error
from semel.core.commands import (
    Answer,
    Ask,
    Claim,
    Command,
    Count,
    Flow,
    Granted,
    Invoke,
    Item,
    Known,
    Lookup,
    Purge,
    Purged,
    Settle,
)
from semel.core.protocols import AsyncStore, Store
from semel.core.settlement import NotStarted, answer_of
from semel.errors import RecordCorrupt, StoreUnavailable
from semel.observe import events
from semel.observe.events import Hooks, Reason
from semel.types import (
    Busy,
    CannotTell,
    Completed,
    Delivery,
    DidNotHappen,
    Done,
    Errored,
    Failed,
    Happened,
    Id,
    Late,
    Lost,
    Mismatch,
    Outcome,
    Record,
    Stats,
    Unavailable,
    Unknown,
)

__all__ = [
    "FlowObserver",
    "TimedAsyncStore",
    "TimedStore",
    "name_of",
    "report_claimed",
    "report_copies",
    "report_marked",
    "report_settled",
]


def name_of(handler: Any) -> str:
    """Return a handler's name for labels and spans; follows `__wrapped__`."""
    handler = getattr(handler, "__wrapped__", handler)
    handler = getattr(handler, "func", handler)
    return getattr(handler, "__qualname__", "") or type(handler).__name__


class FlowObserver:
    """Reports the events of one delivery."""

    def __init__(
        self,
        hooks: Hooks,
        claim: Claim,
        handler: str = "",
        source: str = "",
        redelivered: bool | None = None,  # noqa: FBT001 - as it stands in a Delivery
        *,
        again: bool = False,
        parks: bool = False,
    ) -> None:
        self._hooks = hooks
        self._claim = claim
        self._who = (*claim.id, claim.owner, handler, source)
        self._redelivered = redelivered
        self._again = again
        self._parks = parks
        """Whether a busy delivery is held back and retried."""
        self._answer: Any = None
        self._waited = False
        self._origin: dict[str, str] | None = None

    def watch(self, flow: Flow[Outcome[Any]], *, awaits: bool, observes: bool) -> Flow[Outcome[Any]]:
        """Return the flow with reports. `awaits`: its handler is awaited. `observes`: nothing is suppressed."""
        hooks = self._hooks
        received = events.Received(
            *self._who, self._claim.event_type, _read_meta(self._claim.meta), self._again
        )
        hooks(received)
        carried = hooks.record_metadata(received) if hooks.carries else None
        try:
            answer: Any = None
            while True:
                try:
                    command = flow.send(answer)
                except StopIteration as end:
                    self._came_to(end.value, observes=observes)
                    return end.value  # type: ignore[no-any-return]
                kind = type(command)
                if kind is Claim:
                    answer = yield self._carrying(command, carried)
                    if self.note_claim_answer(answer) and hooks.carries:
                        self._origin = _words((yield Lookup(self._claim.id)))
                elif kind is Invoke:
                    answer = yield self._around(command, awaits=awaits)
                elif kind is Ask:
                    began = time.perf_counter()
                    answer = yield command
                    self._note_probe(answer, time.perf_counter() - began)
                else:
                    answer = yield command
        except BaseException:
            hooks(events.Dropped(*self._who))
            raise

    @staticmethod
    def _carrying(command: Command[Any], carried: dict[str, str] | None) -> Command[Any]:
        assert isinstance(command, Claim)
        if not carried:
            return command
        mine = {} if command.meta is None else msgspec.json.decode(command.meta, type=dict[str, str])
        return replace(command, meta=msgspec.json.encode({**mine, **carried}))

    def note_claim_answer(self, answer: Any) -> bool:
        """Report the answer to a claim. Returns whether to read the metadata of an earlier delivery."""
        self._answer = answer
        kind = type(answer)
        if kind is Granted:
            self._hooks.note_time(answer.lease_until_us - self._claim.lease_us)
            self._hooks(
                events.ClaimedEvent(
                    *self._who, answer.attempt, answer.first_seen_us, self._claim.window_us / 1e6
                )
            )
        elif kind is Busy and not self._waited:
            self._waited = True
            self._hooks(events.BusyEvent(*self._who, answer.retry_after_s))
        return kind is Known

    def _around(self, command: Command[Any], *, awaits: bool) -> Command[Any]:
        """Wrap the handler, to report its call in its own thread and context."""
        assert isinstance(command, Invoke)
        if command.claim is None:
            return command
        call, attempt = command.call, 1 if command.granted is None else command.granted.attempt

        def around() -> Any:
            began = self._began(attempt)
            try:
                value = call()
            except BaseException as error:
                self._note_end(began, error)
                raise
            self._note_end(began, None)
            return value

        async def aaround() -> Any:
            began = self._began(attempt)
            try:
                value = await call()
            except BaseException as error:
                self._note_end(began, error)
                raise
            self._note_end(began, None)
            return value

        return Invoke(aaround if awaits else around, command.claim, command.granted)

    def _note_probe(self, ran: Any, duration_s: float) -> None:
        told = answer_of(ran)
        text = told.reason if isinstance(told, CannotTell) else ""
        self._hooks(events.Probed(*self._who, _ANSWERS[type(told)], text, duration_s))

    def _began(self, attempt: int) -> float:
        self._hooks(events.Began(*self._who, attempt))
        return time.perf_counter()

    def _note_end(self, began: float, error: BaseException | None) -> None:
        self._hooks(events.EndedEvent(*self._who, time.perf_counter() - began, error))

    def _came_to(self, outcome: Outcome[Any], *, observes: bool) -> None:
        answer, hooks, who = self._answer, self._hooks, self._who
        if observes and answer is not None and not isinstance(answer, Granted | Unavailable):
            self.duplicate(answer, suppressed=False)
        match outcome:
            case Done(replayed=True) | Failed(replayed=True) | Mismatch() | Busy():
                self.duplicate(outcome if answer is None else answer)
            case Done(recorded=False, guarded=guarded):
                hooks(events.Unrecorded(*who) if guarded else events.Unguarded(*who))
            case Done():
                hooks(events.CompletedEvent(*who))
            case Failed(error):
                hooks(events.FailedEvent(*who, error))
            case Errored(error, _, retry_after_s):
                started = not isinstance(error, NotStarted)
                hooks(events.Released(*who, error, retry_after_s) if started else events.Dropped(*who))
            case Lost():
                hooks(events.LostEvent(*who))
            case Late(age_s):
                hooks(events.LateArrivalEvent(*who, age_s))
            case Unknown(_, error) if isinstance(answer, Granted):
                hooks(events.Quarantined(*who, error))
            case Unknown():
                self.duplicate(outcome)
            case Unavailable(error):
                hooks(events.Unreachable(*who, error))

    def duplicate(self, answer: Any, *, suppressed: bool = True) -> None:
        """Report a duplicate and its reason."""
        lag_s = self._hooks.since_s(answer.first_seen_us) if isinstance(answer, Known) else None
        self._hooks(
            events.Duplicate(
                *self._who,
                self._reason(answer),
                _state(answer),
                lag_s,
                suppressed,
                self._origin,
                self._parks and isinstance(answer, Busy),
            )
        )

    def _reason(self, answer: Any) -> Reason:
        if isinstance(answer, Mismatch):
            return "reuse"
        if self._redelivered is not None:
            return "redelivery" if self._redelivered else "producer"
        return "race" if self._waited or isinstance(answer, Busy) else "redelivery"


_ANSWERS: dict[type, str] = {
    Happened: "happened",
    DidNotHappen: "did_not_happen",
    CannotTell: "cannot_tell",
}


def _state(answer: Any) -> str:
    if isinstance(answer, Known):
        return answer.state
    match answer:
        case Busy():
            return "claimed"
        case Unknown():
            return "unknown"
        case Mismatch():
            return ""
        case _:
            return "marked"


def _words(answer: Any) -> dict[str, str] | None:
    """Read the metadata of a record."""
    return _read_meta(answer.meta) if isinstance(answer, Record) else None


def _read_meta(meta: bytes | None) -> dict[str, str] | None:
    if meta is None:
        return None
    try:
        return msgspec.json.decode(meta, type=dict[str, str])
    except msgspec.MsgspecError:
        return None


# --- the plain verbs ----------------------------------------------------------------------------


def report_claimed(hooks: Hooks, claims: Sequence[Claim], answers: Sequence[Answer]) -> None:
    """Report the answers to claims by hand."""
    for claim, answer in zip(claims, answers, strict=True):
        tap = FlowObserver(hooks, claim)
        who = (*claim.id, claim.owner)
        hooks(events.Received(*who, "", "", claim.event_type, _read_meta(claim.meta)))
        tap.note_claim_answer(answer)
        match answer:
            case Granted():
                pass
            case Late(age_s):
                hooks(events.LateArrivalEvent(*who, age_s=age_s))
            case Unavailable(error):
                hooks(events.Unreachable(*who, error=error))
            case _:
                tap.duplicate(answer)


_SETTLED: dict[str, type[events.DeliveryEvent]] = {
    "done": events.CompletedEvent,
    "released": events.Released,
    "unknown": events.Quarantined,
}


def report_settled(hooks: Hooks, items: Iterable[Item], verdicts: Iterable[Answer]) -> None:
    """Report the settlement of claims by hand."""
    for item, verdict in zip(items, verdicts, strict=True):
        if not isinstance(item, Settle):
            continue
        who = (*item.id, item.owner)
        if isinstance(verdict, Completed) and item.to == "failed":
            hooks(events.FailedEvent(*who, error=_kind(item.value)))
        elif isinstance(verdict, Completed):
            hooks(_SETTLED[item.to](*who))
        elif isinstance(verdict, Lost):
            hooks(events.LostEvent(*who))
        else:
            hooks(events.Unrecorded(*who))


def _kind(failure: bytes | None) -> str:
    """Return the kind of error of a stored failure."""
    try:
        return decode_error(failure).kind
    except RecordCorrupt:
        return "undecodable"


def report_marked(
    hooks: Hooks,
    tenant: str,
    consumer: str,
    keys: Sequence[str],
    firsts: Sequence[bool],
    handler: str = "",
    *,
    event_type: str = "",
    meta: Mapping[str, str] | None = None,
) -> None:
    """Report marked keys, of mode mark or of an inbox transaction."""
    for key, first in zip(keys, firsts, strict=True):
        who = (tenant, consumer, key, b"", handler)
        hooks(events.Received(*who, event_type=event_type, meta=meta))
        hooks(events.MarkedEvent(*who) if first else events.Duplicate(*who, state="marked"))


def report_copies(
    hooks: Hooks,
    id: Id,  # noqa: A002
    handler: str,
    delivery: Delivery[Any],
    outcome: Outcome[Any],
    *,
    parks: bool = False,
) -> None:
    """Report a later copy of a key in one batch: it came while the first one ran.

    `parks`: if the first did not finish, both are held back and retried.
    """
    who = (*id, b"", handler, delivery.source)
    hooks(events.Received(*who, delivery.event_type, delivery.meta, delivery.again))
    reason: Reason = "reuse" if isinstance(outcome, Mismatch) else "race"
    parked = parks and isinstance(outcome, Busy | Errored | Unavailable | Lost)
    hooks(events.Duplicate(*who, reason, "claimed", parked=parked))


# --- stores -------------------------------------------------------------------------------------


class _Timed:
    """Wraps a store and reports its round trips; everything else is passed on."""

    def __init__(self, store: Any, hooks: Hooks) -> None:
        self._store = store
        self._hooks = hooks
        self._stores_lost: int = getattr(store, "stores_lost", 0)

    @property
    def name(self) -> str:
        name: str = self._store.name
        return name

    @property
    def capabilities(self) -> Any:
        return self._store.capabilities

    def watch(self, listener: Any, /) -> Callable[[], None]:
        stop: Callable[[], None] = self._store.watch(listener)
        return stop

    def _note_sent(self, items: Sequence[Item], answers: Sequence[Answer], began: float) -> None:
        hooks = self._hooks
        op = _op(items)
        hooks(events.StoreSent(op, len(items), time.perf_counter() - began))
        failed: BaseException | None = None
        for item, answer in zip(items, answers, strict=True):
            kind = type(answer)
            if kind is Completed:
                if answer.recreated:
                    hooks(events.StoreLost())
            elif kind is Unavailable:
                failed = failed or answer.error
            elif kind is Purged and not (isinstance(item, Purge) and item.dry_run):
                hooks(events.PurgedEvent(answer.count, answer.lag_s, answer.partitions))
            elif kind is Stats and isinstance(item, Count) and item.tenant is None:
                hooks(events.Counted(answer))
        if failed is not None:
            hooks(events.StoreFailed(op, failed))
        lost = getattr(self._store, "stores_lost", 0)
        if lost > self._stores_lost:
            self._stores_lost = lost
            hooks(events.StoreLost())


def _op(items: Sequence[Item]) -> str:
    kinds = {type(items[0])} if len(items) == 1 else {type(item) for item in items}
    return kinds.pop().__struct_config__.tag if len(kinds) == 1 else "mixed"  # type: ignore[return-value]


class TimedStore(_Timed):
    """A store that blocks."""

    def open(self) -> None:
        """Connect."""
        self._store.open()

    def close(self) -> None:
        """Close."""
        self._store.close()

    def send(self, items: Sequence[Item], /) -> list[Answer]:
        """Execute the items."""
        began = time.perf_counter()
        try:
            answers: list[Answer] = self._store.send(items)
        except StoreUnavailable as error:
            self._hooks(events.StoreFailed(_op(items), error))
            raise
        self._note_sent(items, answers, began)
        return answers


class TimedAsyncStore(_Timed):
    """A store for an event loop."""

    async def aopen(self) -> None:
        """Connect."""
        await self._store.aopen()

    async def aclose(self) -> None:
        """Close."""
        await self._store.aclose()

    async def asend(self, items: Sequence[Item], /) -> list[Answer]:
        """Execute the items."""
        began = time.perf_counter()
        try:
            answers: list[Answer] = await self._store.asend(items)
        except StoreUnavailable as error:
            self._hooks(events.StoreFailed(_op(items), error))
            raise
        self._note_sent(items, answers, began)
        return answers


def instrument_store(store: Store | AsyncStore, hooks: Hooks) -> Store | AsyncStore:
    """Return the store, wrapped to report its round trips."""
    return TimedStore(store, hooks) if isinstance(store, Store) else TimedAsyncStore(store, hooks)
