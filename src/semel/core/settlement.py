"""Turn the end of a handler into a settlement for its record, and an outcome for the caller."""

from collections.abc import Callable
from functools import partial
from typing import Any

from msgspec import Struct

from semel.codec import decode, decode_error, encode, encode_reason, reason_in
from semel.core.backoff import backoff_s
from semel.core.commands import Claim, Granted, Known, Raised, Ran, Returned
from semel.core.error_info import DeadLetterUnwritten, describe, encode_failure, handlers_error
from semel.core.ids import idempotency_key
from semel.errors import AttemptsExhausted, NotApplied, ValueInvalid
from semel.policy import Policy
from semel.types import (
    CannotTell,
    Completed,
    DidNotHappen,
    Done,
    Errored,
    ErrorInfo,
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
DEAD_LETTER_DELAY_MAX_S = 30.0
"""A dead letter that was not written is tried again within this time: its place may be repaired meanwhile."""

RESOLVED_MEANWHILE = "the record was resolved as done while the handler ran; duplicates get that value"
"""Why the value of a late handler is not stored."""


class NotStarted(NotApplied):
    """A stop came before the handler was called: the delivery is returned, and no attempt counts."""

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
    """Called before the record becomes `failed`; if it raises, the claim is released instead."""
    worker: Callable[[], str] = str
    """Returns the name of the process, for kept errors."""


class Settlement(Struct, frozen=True, gc=False):
    """The settlement of a record after its handler."""

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
    """Return the outcome of a duplicate: the stored value or failure, or the store's answer."""
    if not isinstance(answer, Known):
        return answer  # type: ignore[no-any-return]  # Busy, Mismatch, Late, Unknown, Unavailable
    if answer.state == "failed":
        return Failed(decode_error(answer.value), replayed=True)
    if answer.value is None or answer.value[:1] == b"x":
        return Done(None, replayed=True, kept=False, reason=reason_in(answer.value))
    return Done(decode(answer.value, returns), replayed=True)


def settlement_for(ran: Ran, task: Task, attempt: int) -> Settlement:
    """Return the settlement. A handler that returned is always `done`, with or without its value."""
    policy = task.policy
    if isinstance(ran, Returned):
        try:
            kept = encode(ran.value, task.returns, policy.value_bytes_max) if policy.keep_value else None
        except ValueInvalid as error:  # the effect has happened, so it is completed anyway
            if getattr(ran.value, "never_kept", False):  # as intended
                return Settlement("done")
            return Settlement("done", encode_reason(error), reason=str(error))
        return Settlement("done", kept)
    final = isinstance(ran.error, (AttemptsExhausted, *policy.permanent))
    if final and not ran.lost and not isinstance(ran.error, DeadLetterUnwritten):
        return Settlement("failed", encode_failure(ran.error, policy))
    if task.claim.quarantine and not isinstance(ran.error, NotApplied):
        return Settlement("unknown")
    if ran.interrupted or isinstance(ran.error, NotStarted):
        # What a started handler did is not known: the attempt counts where a probe is to be asked about it.
        started = not isinstance(ran.error, NotApplied)
        return Settlement("released", count_attempt=started and policy.probe is not None)
    return (retry_dead_letter if isinstance(ran.error, DeadLetterUnwritten) else retry_later)(policy, attempt)


def kept_error(ran: Ran, task: Task, verdict: Settlement) -> ErrorInfo | None:
    """Return what the record keeps of the attempt's error. An attempt that did not start has none."""
    if isinstance(ran, Returned) or isinstance(ran.error, NotStarted):
        return None
    if verdict.to == "released" and isinstance(handlers_error(ran.error), AttemptsExhausted):
        return None  # only its dead letter was tried again: the handler's own error stays
    return describe(ran.error, task.policy, task.worker)


def attempts_exhausted(error: BaseException | None, attempt: int, limit: int) -> AttemptsExhausted:
    """Return the error after the last attempt, with the handler's error as its cause."""
    if error is None:
        return AttemptsExhausted(
            f"attempt {attempt} of {limit} allowed: no end of the earlier ones was recorded"
        )
    found = AttemptsExhausted(f"attempt {attempt} of {limit} failed: {type(error).__name__}: {error}")
    found.__cause__ = error
    return found


def is_last(ran: Ran, verdict: Settlement, attempt: int, policy: Policy) -> bool:
    """Whether this failed attempt is the last one. With a probe one more follows, which asks it."""
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
    """Return the settlement, or a failure if this was the last attempt."""
    if not is_last(ran, verdict, attempt, task.policy):
        return ran, verdict
    assert isinstance(ran, Raised)
    ran = Raised(attempts_exhausted(ran.error, attempt, task.policy.max_attempts))
    return ran, settlement_for(ran, task, attempt)


def retry_later(policy: Policy, attempt: int) -> Settlement:
    """Return a release with a delay that grows with each attempt."""
    return Settlement("released", delay_s=backoff_s(attempt - 1, policy.retry_delay_s, RETRY_DELAY_MAX_S))


def retry_dead_letter(policy: Policy, attempt: int) -> Settlement:
    """Return a release after which the dead letter is written, if that is possible then."""
    delay_s = min(retry_later(policy, attempt).delay_s, DEAD_LETTER_DELAY_MAX_S)
    return Settlement("released", delay_s=delay_s)


def outcome_without_claim(ran: Ran) -> Outcome[Any]:
    """Return the outcome of a handler that ran while the store was unavailable."""
    if isinstance(ran, Returned):
        return Done(ran.value, kept=False, recorded=False, guarded=False)
    return Errored(ran.error, 1)


def inquiry(
    task: Task, attempt: int, first_seen: int, steps: tuple[tuple[str, bytes | None], ...]
) -> Inquiry:
    """Build the inquiry for the probe."""
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
    """Return a probe's answer. One that raises, or returns something else, cannot tell."""
    if isinstance(ran, Raised):
        return CannotTell(f"the probe raised {ran.error!r}")
    if isinstance(ran.value, Happened | DidNotHappen | CannotTell):
        return ran.value
    return CannotTell(
        f"the probe returned {ran.value!r:.100}; it must return Happened(value), DidNotHappen() or CannotTell()"
    )


def outcome_of(ran: Ran, verdict: Settlement, settled: SettleAnswer, attempt: int) -> Outcome[Any]:
    """Return the caller's outcome, from the handler's end and the store's answer."""
    if isinstance(ran, Returned):
        kept = verdict.value is not None and not verdict.reason
        if isinstance(settled, Completed):
            if not settled.kept:
                return Done(ran.value, kept=False, reason=RESOLVED_MEANWHILE)
            return Done(ran.value, kept=kept, reason=verdict.reason)
        if isinstance(settled, Lost):
            return Lost(ran.value)
        return Done(ran.value, kept=kept, recorded=False, reason=verdict.reason)
    if ran.lost:
        return Lost()
    if verdict.to == "failed" and not isinstance(settled, Unavailable):
        return Lost() if isinstance(settled, Lost) else Failed(ran.error)
    if verdict.to == "unknown" and isinstance(ran.error, Exception) and not isinstance(settled, Unavailable):
        return Unknown(settled.at_us, ran.error) if isinstance(settled, Completed) else Lost()
    return Errored(ran.error, attempt, verdict.delay_s)


def is_interrupted(outcome: Outcome[Any]) -> bool:
    """Whether the handler was stopped from outside, so that no further work starts."""
    return isinstance(outcome, Errored) and not isinstance(outcome.error, Exception)
