"""semel (Latin: once): events arrive many times; their effect happens once.

once = semel.open("sqlite:///events.db", consumer="billing")

@once.guard(key="order.id")
def charge(order): ...

charge(order)      # runs once; a duplicate returns the first receipt
"""

from typing import TYPE_CHECKING

from semel import errors, keys
from semel.client.base import ClaimOutcome
from semel.client.claims import Claimed
from semel.client.cleaner import AsyncCleaner, Cleaner, PurgeResult
from semel.client.client import Semel, aopen, open
from semel.client.client_async import AsyncSemel
from semel.client.guard import AsyncGuarded, Guarded, unwrap
from semel.client.items import ObserveCounts
from semel.core.commands import Purged, StoreSettings
from semel.core.protocols import AsyncStore, Capabilities, Store
from semel.errors import (
    AttemptsExhausted,
    ClaimLost,
    EventLoopBlocked,
    Fenced,
    GiveUp,
    HandlerFailed,
    IdsMismatch,
    KeyInvalid,
    KeyMissing,
    LateEvent,
    MessageInvalid,
    MessageTooLarge,
    ModeMismatch,
    NotApplied,
    NotInHandler,
    NoTransaction,
    NotRecorded,
    OutcomeError,
    OutcomeUnknown,
    PayloadMismatch,
    PolicyInvalid,
    RecordCorrupt,
    SemelError,
    SinkRefused,
    SinkUnavailable,
    SinkUnknown,
    SourceRefused,
    SourceUnavailable,
    StepRepeated,
    StillRunning,
    StoreClosed,
    StoreError,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
    StoreUncertain,
    StoreUnknown,
    UsageError,
    ValueInvalid,
    ValueNotEncodable,
    ValueNotKept,
    ValueTooLarge,
    WrongDatabase,
)
from semel.outbox.message import Message
from semel.policy import Policy
from semel.runtime.context import Context, current, step
from semel.stores.memory.store import MemoryStore
from semel.types import (
    Absent,
    Busy,
    CannotTell,
    Completed,
    Delivery,
    DidNotHappen,
    Done,
    Errored,
    Failed,
    Forgotten,
    Happened,
    Inquiry,
    Late,
    Lost,
    Mismatch,
    Mode,
    Outcome,
    Probe,
    ProbeAnswer,
    Record,
    Renewed,
    State,
    Stats,
    Unavailable,
    Unknown,
    Verdict,
)

__all__ = [
    "Absent",
    "AsyncCleaner",
    "AsyncGuarded",
    "AsyncSemel",
    "AsyncStore",
    "AttemptsExhausted",
    "Busy",
    "CannotTell",
    "Capabilities",
    "ClaimLost",
    "ClaimOutcome",
    "Claimed",
    "Cleaner",
    "Completed",
    "Context",
    "Delivery",
    "DidNotHappen",
    "Done",
    "Errored",
    "EventLoopBlocked",
    "Failed",
    "Fenced",
    "Forgotten",
    "GiveUp",
    "Guarded",
    "HandlerFailed",
    "Happened",
    "IdsMismatch",
    "Inquiry",
    "KeyInvalid",
    "KeyMissing",
    "Late",
    "LateEvent",
    "Lost",
    "MemoryStore",
    "Message",
    "MessageInvalid",
    "MessageTooLarge",
    "Mismatch",
    "Mode",
    "ModeMismatch",
    "NoTransaction",
    "NotApplied",
    "NotInHandler",
    "NotRecorded",
    "ObserveCounts",
    "Outcome",
    "OutcomeError",
    "OutcomeUnknown",
    "PayloadMismatch",
    "Policy",
    "PolicyInvalid",
    "Probe",
    "ProbeAnswer",
    "PurgeResult",
    "Purged",
    "Record",
    "RecordCorrupt",
    "Renewed",
    "Semel",
    "SemelError",
    "SinkRefused",
    "SinkUnavailable",
    "SinkUnknown",
    "SourceRefused",
    "SourceUnavailable",
    "State",
    "Stats",
    "StepRepeated",
    "StillRunning",
    "Store",
    "StoreClosed",
    "StoreError",
    "StoreFull",
    "StoreRefused",
    "StoreSettings",
    "StoreUnavailable",
    "StoreUncertain",
    "StoreUnknown",
    "Unavailable",
    "Unknown",
    "UsageError",
    "ValueInvalid",
    "ValueNotEncodable",
    "ValueNotKept",
    "ValueTooLarge",
    "Verdict",
    "WrongDatabase",
    "aopen",
    "aproducer",
    "current",
    "errors",
    "keys",
    "open",
    "producer",
    "step",
    "tiered",
    "unwrap",
]


if TYPE_CHECKING:
    from semel.outbox.publish import aproducer, producer
    from semel.stores.tiered import tiered

    __version__: str
else:

    def __dir__() -> list[str]:
        """What is there, and what would be."""
        return sorted({*globals(), *__all__})

    def __getattr__(name: str) -> object:
        """What is slow to find or to load, and not always needed."""
        if name in ("aproducer", "producer"):
            from semel.outbox import publish

            return getattr(publish, name)
        if name == "tiered":
            from semel.stores.tiered import tiered

            return tiered
        if name == "__version__":
            from importlib.metadata import version

            return version("semel")
        raise AttributeError(f"module 'semel' has no attribute {name!r}")
