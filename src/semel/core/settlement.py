"""What the end of a handler means: for its record, and for the caller."""

from collections.abc import Callable
from functools import partial
from typing import Any

from msgspec import Struct

from semel.codec import decode, decode_error, encode, encode_error, encode_reason, reason_in
from semel.core.backoff import backoff_s
from semel.core.commands import Claim, Granted, Known, Raised, Ran, Returned
from semel.core.ids import idempotency_key
from semel.errors import AttemptsExhausted, NotApplied, ValueInvalid
from semel.policy import Policy
from semel.types import (
    CannotTell,
    Completed,
    DidNotHappen,
    Done,
    Errored,
    Failed,
    Happened,
    Inquiry,
    Lost,
    Outcome,
    ProbeAnswer,
    SettleAnswer,
    Unavailable,
    Unknown,
)

RETRY_DELAY_MAX_S = 300.0


class NotStarted(NotApplied):
    """A stop came before the handler was called: the delivery is to be given back, and no attempt counts."""

    def __init__(self) -> None:
        super().__init__("stopped before it started")


class Task(Struct, frozen=True):
    """One delivery to be handled: what to claim, what to call, and by which policy."""

    claim: Claim
    call: Callable[[], Any]
    policy: Policy
    returns: Any = None
    """The handler's return annotation, for values that are objects."""
    before_fail: Callable[[BaseException, Granted], Any] | None = None
    """Called before the record is closed as `failed`; where it raises, the claim is released instead."""


class Settlement(Struct, frozen=True, gc=False):
    """What a handler's end means for its record."""

    to: Any
    value: bytes | None = None
    delay_s: float = 0.0
    count_attempt: bool = True
    reason: str = ""
    """Why the value is not kept."""


def plain(ran: Ran) -> Outcome[Any]:
    """The outcome of a handler that ran without a claim of its own."""
    return Done(ran.value, kept=False) if isinstance(ran, Returned) else Errored(ran.error, 1)


def replay(answer: Any, returns: Any) -> Outcome[Any]:
    """What a duplicate gets: the stored value or failure, or the store's own answer."""
    if not isinstance(answer, Known):
        return answer  # type: ignore[no-any-return]  # Busy, Mismatch, Late, Unknown, Unavailable
    if answer.state == "failed":
        return Failed(decode_error(answer.value), replayed=True)
    if answer.value is None or answer.value[:1] == b"x":
        return Done(None, replayed=True, kept=False, reason=reason_in(answer.value))
    return Done(decode(answer.value, returns), replayed=True)


def settlement_for(ran: Ran, task: Task, attempt: int) -> Settlement:
    """What the record shall say. A finished handler is always `done`, with or without its value."""
    policy = task.policy
    if isinstance(ran, Returned):
        try:
            kept = encode(ran.value, task.returns, policy.value_bytes_max) if policy.keep_value else None
        except ValueInvalid as error:  # the effect has happened, so it is completed all the same
            if getattr(ran.value, "never_kept", False):  # as it is meant
                return Settlement("done")
            return Settlement("done", encode_reason(error), reason=str(error))
        return Settlement("done", kept)
    if isinstance(ran.error, (AttemptsExhausted, *policy.permanent)) and not ran.lost:
        return Settlement("failed", encode_error(ran.error))
    if task.claim.quarantine and not isinstance(ran.error, NotApplied):
        return Settlement("unknown")
    if ran.interrupted or isinstance(ran.error, NotStarted):
        # What a started handler did is not known: the attempt counts where a probe is to be asked about it.
        started = not isinstance(ran.error, NotApplied)
        return Settlement("released", count_attempt=started and policy.probe is not None)
    return retry_later(policy, attempt)


def attempts_exhausted(error: BaseException | None, attempt: int, limit: int) -> AttemptsExhausted:
    """The error of a message that is given up after its last attempt, with the handler's own error as its cause."""
    if error is None:
        return AttemptsExhausted(
            f"attempt {attempt} of {limit} allowed: no end of the earlier ones was recorded"
        )
    found = AttemptsExhausted(f"attempt {attempt} of {limit} failed: {type(error).__name__}: {error}")
    found.__cause__ = error
    return found


def is_last(ran: Ran, verdict: Settlement, attempt: int, policy: Policy) -> bool:
    """Whether an attempt failed after which no other is allowed; a probe is asked about it first, at the next one."""
    return (
        isinstance(ran, Raised)
        and isinstance(ran.error, Exception)
        and not ran.lost
        and verdict.to == "released"
        and verdict.count_attempt
        and attempt >= policy.max_attempts
        and policy.probe is None
    )


def fail_if_last_attempt(ran: Ran, verdict: Settlement, task: Task, attempt: int) -> tuple[Ran, Settlement]:
    """The same, or for the last attempt that is allowed a failure with the handler's error as its cause."""
    if not is_last(ran, verdict, attempt, task.policy):
        return ran, verdict
    assert isinstance(ran, Raised)
    ran = Raised(attempts_exhausted(ran.error, attempt, task.policy.max_attempts))
    return ran, settlement_for(ran, task, attempt)


def retry_later(policy: Policy, attempt: int) -> Settlement:
    """Try again, later with each attempt."""
    return Settlement("released", delay_s=backoff_s(attempt - 1, policy.retry_delay_s, RETRY_DELAY_MAX_S))


def unguarded_outcome(ran: Ran) -> Outcome[Any]:
    """The outcome of a handler that ran although the store could not be reached."""
    if isinstance(ran, Returned):
        return Done(ran.value, kept=False, recorded=False, guarded=False)
    return Errored(ran.error, 1)


def inquiry(
    task: Task, attempt: int, first_seen: int, steps: tuple[tuple[str, bytes | None], ...]
) -> Inquiry:
    """What the probe is asked."""
    tenant, consumer, key = task.claim.id
    call = task.call
    args, kwargs = (call.args, call.keywords) if isinstance(call, partial) else ((), {})
    return Inquiry(
        tenant=tenant,
        consumer=consumer,
        key=key,
        idempotency_key=idempotency_key(task.claim.id),
        attempt=attempt,
        first_seen_us=first_seen,
        event_type=task.claim.event_type,
        steps=tuple(name for name, _ in steps),
        args=args,
        kwargs=kwargs,
    )


def answer_of(ran: Ran) -> ProbeAnswer[Any]:
    """What a probe says. One that raises, or returns something else, cannot tell."""
    if isinstance(ran, Raised):
        return CannotTell(f"the probe raised {ran.error!r}")
    if isinstance(ran.value, Happened | DidNotHappen | CannotTell):
        return ran.value
    return CannotTell(
        f"the probe returned {ran.value!r:.100}; it must return Happened(value), DidNotHappen() or CannotTell()"
    )


def outcome_of(ran: Ran, verdict: Settlement, settled: SettleAnswer, attempt: int) -> Outcome[Any]:
    """What the caller gets, from how the handler ended and what the store said to it."""
    if isinstance(ran, Returned):
        if isinstance(settled, Lost):
            return Lost(ran.value)
        kept = verdict.value is not None and not verdict.reason
        return Done(
            ran.value, kept=kept, recorded=not isinstance(settled, Unavailable), reason=verdict.reason
        )
    if ran.lost:
        return Lost()
    if verdict.to == "failed" and not isinstance(settled, Unavailable):
        return Lost() if isinstance(settled, Lost) else Failed(ran.error)
    if verdict.to == "unknown" and isinstance(ran.error, Exception) and not isinstance(settled, Unavailable):
        return Unknown(settled.at_us, ran.error) if isinstance(settled, Completed) else Lost()
    return Errored(ran.error, attempt, verdict.delay_s)


def is_interrupted(outcome: Outcome[Any]) -> bool:
    """Whether the handler was stopped from outside: what remains to be done is not begun."""
    return isinstance(outcome, Errored) and not isinstance(outcome.error, Exception)
