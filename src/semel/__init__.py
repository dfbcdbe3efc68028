"""semel (Latin: once): events arrive many times; their effect happens once.

once = semel.open("sqlite:///events.db", consumer="billing")

@once.guard(key="order.id")
def charge(order): ...

charge(order)      # runs once; a duplicate returns the first receipt
"""

from typing import TYPE_CHECKING

from semel import errors, keys
from semel.aclient import AsyncSemel
from semel.base import ClaimOutcome
from semel.claims import Claimed
from semel.client import Semel, aopen, open
from semel.context import Context, current, step
from semel.core.commands import Purged, Settings
from semel.core.ports import AsyncStore, Capabilities, Store
from semel.decorators import AsyncGuarded, Guarded, unwrap
from semel.errors import (
    AttemptsExhausted,
    ClaimLost,
    Fenced,
    GiveUp,
    HandlerFailed,
    KeyInvalid,
    KeyMissing,
    LateEvent,
    MessageInvalid,
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
from semel.plans import Observed
from semel.policy import Policy
from semel.stores.memory import MemoryStore
from semel.types import (
    Absent,
    Busy,
    Completed,
    Delivery,
    Done,
    Errored,
    Failed,
    Forgotten,
    Late,
    Lost,
    Mismatch,
    Mode,
    Outcome,
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
    "AsyncGuarded",
    "AsyncSemel",
    "AsyncStore",
    "AttemptsExhausted",
    "Busy",
    "Capabilities",
    "ClaimLost",
    "ClaimOutcome",
    "Claimed",
    "Completed",
    "Context",
    "Delivery",
    "Done",
    "Errored",
    "Failed",
    "Fenced",
    "Forgotten",
    "GiveUp",
    "Guarded",
    "HandlerFailed",
    "KeyInvalid",
    "KeyMissing",
    "Late",
    "LateEvent",
    "Lost",
    "MemoryStore",
    "MessageInvalid",
    "Mismatch",
    "Mode",
    "ModeMismatch",
    "NoTransaction",
    "NotApplied",
    "NotInHandler",
    "NotRecorded",
    "Observed",
    "Outcome",
    "OutcomeError",
    "OutcomeUnknown",
    "PayloadMismatch",
    "Policy",
    "PolicyInvalid",
    "Purged",
    "Record",
    "RecordCorrupt",
    "Renewed",
    "Semel",
    "SemelError",
    "Settings",
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
    "current",
    "errors",
    "keys",
    "open",
    "step",
    "unwrap",
]


if TYPE_CHECKING:
    __version__: str
else:

    def __getattr__(name: str) -> str:
        """`__version__`, looked up when asked for: reading metadata is slow."""
        if name == "__version__":
            from importlib.metadata import version

            return version("semel")
        raise AttributeError(f"module 'semel' has no attribute {name!r}")
