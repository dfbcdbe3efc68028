"""semel (Latin: once): events arrive many times; their effect happens once.

once = semel.open("sqlite:///events.db", consumer="billing")

@once.guard(key="order.id")
def charge(order): ...

charge(order)      # runs once; a duplicate returns the first receipt
"""

from semel import errors, keys
from semel.aclient import AsyncSemel
from semel.base import ClaimOutcome
from semel.claims import Claimed
from semel.client import Semel, aopen, open  # noqa: A004 - semel.open is the door
from semel.context import Context, current, step
from semel.core.commands import Purged, Settings
from semel.core.ports import AsyncStore, Capabilities, Store
from semel.decorators import AsyncGuarded, Guarded, unwrap
from semel.errors import *  # noqa: F403 - every error is public, and listed in its module
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

__all__ = sorted(
    [
        *errors.__all__,
        "Absent",
        "AsyncGuarded",
        "AsyncSemel",
        "AsyncStore",
        "Busy",
        "Capabilities",
        "ClaimOutcome",
        "Claimed",
        "Completed",
        "Context",
        "Delivery",
        "Done",
        "Errored",
        "Failed",
        "Forgotten",
        "Guarded",
        "Late",
        "Lost",
        "MemoryStore",
        "Mismatch",
        "Mode",
        "Observed",
        "Outcome",
        "Policy",
        "Purged",
        "Record",
        "Renewed",
        "Semel",
        "Settings",
        "State",
        "Stats",
        "Store",
        "Unavailable",
        "Unknown",
        "Verdict",
        "aopen",
        "current",
        "errors",
        "keys",
        "open",
        "step",
        "unwrap",
    ]
)


def __getattr__(name: str) -> str:
    if name == "__version__":
        from importlib.metadata import version

        return version("semel")
    raise AttributeError(f"module 'semel' has no attribute {name!r}")
