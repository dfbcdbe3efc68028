"""Every error semel raises, under one root.

::

    SemelError
    ├── UsageError                 the call is wrong; repeating it cannot help
    │   ├── KeyInvalid             too long, empty, control characters (also a ValueError)
    │   ├── KeyMissing             no key was found in the event
    │   ├── PolicyInvalid          a setting is out of its bounds (also a ValueError)
    │   ├── ModeMismatch           the consumer works in another mode
    │   ├── IdsMismatch            the consumer is recorded with another kind of ids
    │   ├── StepRepeated           one step name used twice in one attempt
    │   ├── NotInHandler           current() or step() outside a handler
    │   ├── NoTransaction          inbox() without an open transaction
    │   ├── WrongDatabase          inbox() on a connection to another database
    │   ├── StoreUnknown           no store for that URL, or its extra is not installed
    │   ├── SinkUnknown            no sink for that URL, or its extra is not installed
    │   ├── SinkRefused            a relay's broker refuses for good: credentials, rights, a missing exchange
    │   └── SourceRefused          the broker refuses for good: credentials, rights, a missing topic
    │       └── Fenced             another instance has this one's transactional or instance id
    ├── StoreError
    │   ├── StoreUnavailable       no answer; whether it acted is not known, try again
    │   │   ├── StoreUncertain     a mark without an answer: it may or may not be written
    │   │   └── StoreFull          no space for new records; existing ones still answer
    │   ├── StoreRefused           damaged, foreign, too new, or on a network file system
    │   │   └── StoreMoved         the consumer is moving to another store, or has moved there
    │   ├── StoreClosed            used after close()
    │   └── RecordCorrupt          stored data breaks the table of states
    ├── SourceUnavailable          the broker gave no answer; it will deliver again
    │   └── MessageTooLarge        the broker does not accept a message of this size
    ├── GiveUp                     raised BY a runner's handler: dead-letter the message now
    │   └── MessageInvalid         a message is not what its handler's annotation says
    ├── SinkUnavailable            a relay's broker gave no answer; its messages stay in the outbox
    ├── ValueInvalid               a value cannot be stored as it is
    │   ├── ValueNotEncodable
    │   └── ValueTooLarge
    └── OutcomeError               what guard() raises instead of returning an outcome
        ├── HandlerFailed          the handler failed for good, earlier
        ├── AttemptsExhausted      more attempts than policy.max_attempts
        ├── StillRunning           another attempt holds the claim and waiting ran out
        ├── ClaimLost              another attempt took over
        ├── PayloadMismatch        the key was used before with another payload
        ├── LateEvent              older than the window, so nobody can tell
        ├── OutcomeUnknown         quarantined: an operator must resolve it
        ├── NotRecorded            the handler ran, but the store could not record it
        └── ValueNotKept           the handler ran earlier, its value was not stored

    NotApplied                     raised BY a handler: "nothing happened, run me again"
    EventLoopBlocked               a warning: a sync client is used inside a running event loop
"""

from typing import Any

__all__ = [
    "AttemptsExhausted",
    "ClaimLost",
    "EventLoopBlocked",
    "Fenced",
    "GiveUp",
    "HandlerFailed",
    "IdsMismatch",
    "KeyInvalid",
    "KeyMissing",
    "LateEvent",
    "MessageInvalid",
    "MessageTooLarge",
    "ModeMismatch",
    "NoTransaction",
    "NotApplied",
    "NotInHandler",
    "NotRecorded",
    "OutcomeError",
    "OutcomeUnknown",
    "PayloadMismatch",
    "PolicyInvalid",
    "RecordCorrupt",
    "SemelError",
    "SinkRefused",
    "SinkUnavailable",
    "SinkUnknown",
    "SourceRefused",
    "SourceUnavailable",
    "StepRepeated",
    "StillRunning",
    "StoreClosed",
    "StoreError",
    "StoreFull",
    "StoreMoved",
    "StoreRefused",
    "StoreUnavailable",
    "StoreUncertain",
    "StoreUnknown",
    "UsageError",
    "ValueInvalid",
    "ValueNotEncodable",
    "ValueNotKept",
    "ValueTooLarge",
    "WrongDatabase",
]


class SemelError(Exception):
    """The root of everything semel raises."""


class UsageError(SemelError):
    """The call is wrong; repeating it cannot help."""


class KeyInvalid(UsageError, ValueError):
    """A key or consumer name breaks its limits."""


class KeyMissing(UsageError):
    """No key was found; semel never invents one."""


class PolicyInvalid(UsageError, ValueError):
    """A setting is out of its bounds."""


class ModeMismatch(UsageError):
    """The consumer is recorded with another mode than the one asked for."""


class IdsMismatch(UsageError):
    """The consumer is recorded with another kind of ids than the one declared, or with none."""


class StepRepeated(UsageError):
    """A step name was used twice in one attempt, so the next attempt could not distinguish them."""


class NotInHandler(UsageError):
    """`current()` or `step()` was called outside a handler that semel runs."""


class NoTransaction(UsageError):
    """The inbox joins the caller's transaction, and there is none."""


class WrongDatabase(UsageError):
    """The connection given to the inbox is not to the database that holds the store."""


class StoreUnknown(UsageError):
    """No store has this URL scheme, or its package is not installed."""


class SinkUnknown(UsageError):
    """No sink has this URL scheme, or its package is not installed."""


class SinkRefused(UsageError):
    """The broker of a relay refuses permanently; the messages stay in the outbox."""


class SinkUnavailable(SemelError):
    """The broker of a relay did not answer; the messages stay in the outbox."""


class StoreError(SemelError):
    """Something is wrong with the store."""


class StoreUnavailable(StoreError):
    """The store did not answer; whether it acted is not known."""


class StoreUncertain(StoreUnavailable):
    """A mark got no answer: it may be written or not, and guessing would lose or repeat the event."""


class StoreFull(StoreUnavailable):
    """The store has no space for a new record; existing records still answer."""


class StoreRefused(StoreError):
    """The store exists but must not be used as it is; it was not touched."""


class StoreMoved(StoreRefused):
    """The consumer is moving to another store, or has moved there: this store alone does not know all its events."""


class StoreClosed(StoreError):
    """The client or store was used after `close()`."""


class RecordCorrupt(StoreError):
    """A stored record breaks the table of states; it is never guessed at."""


class SourceUnavailable(SemelError):
    """The broker cannot be reached, or did not confirm; it redelivers unacknowledged messages."""


class MessageTooLarge(SourceUnavailable):
    """The broker does not accept a message of this size."""


class SourceRefused(UsageError):
    """The broker refuses permanently: a right or a setting is missing."""


class Fenced(SourceRefused):
    """Another instance has taken over this one's transactional or group instance id: this one must stop."""


class GiveUp(SemelError):
    """Raised by a handler of a runner: a retry cannot help, so the message is dead-lettered."""


class MessageInvalid(GiveUp):
    """A message cannot be decoded as its handler's annotation; a retry cannot help."""


class ValueInvalid(SemelError):
    """A value cannot be stored as it is."""


class ValueNotEncodable(ValueInvalid):
    """The value has a type that cannot be stored without loss."""


class ValueTooLarge(ValueInvalid):
    """The encoded value is larger than `policy.value_bytes_max`."""


class OutcomeError(SemelError):
    """What `guard` raises where the other verbs return an outcome."""


class HandlerFailed(OutcomeError):
    """The handler failed for good on an earlier delivery; this is the stored failure."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(kind, message)
        self.kind = kind
        self.message = message

    def __str__(self) -> str:
        return f"the handler failed for good earlier: {self.kind}: {self.message}"


class AttemptsExhausted(OutcomeError):
    """The event was tried more often than `policy.max_attempts` allows."""


class StillRunning(OutcomeError):
    """Another attempt holds the claim, and waiting for it ran out."""

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ClaimLost(OutcomeError):
    """Another attempt took over while this one ran."""


class PayloadMismatch(OutcomeError):
    """The key was used before with another payload."""


class LateEvent(OutcomeError):
    """The event is older than its window, so whether it ran is not known."""

    def __init__(self, message: str, age_s: float = 0.0) -> None:
        super().__init__(message)
        self.age_s = age_s


class OutcomeUnknown(OutcomeError):
    """The record is quarantined: an effect may or may not have happened; resolve it."""


class NotRecorded(OutcomeError):
    """The handler ran, but the store could not record it; `value` is its result."""

    def __init__(self, message: str, value: Any = None) -> None:
        super().__init__(message)
        self.value = value


class ValueNotKept(OutcomeError):
    """The handler ran on an earlier delivery, but its value was not stored."""


class NotApplied(Exception):
    """Raised by a handler: nothing happened, so even a claim in mode quarantine is released."""


class EventLoopBlocked(RuntimeWarning):
    """A sync client is used inside a running event loop: each call blocks all tasks of the loop."""
