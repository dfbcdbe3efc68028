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
from semel.client.cleaner import AsyncCleaner, Cleaner
from semel.client.client import Semel, aopen, open
from semel.client.client_async import AsyncSemel
from semel.client.guard import AsyncGuarded, Guarded, unwrap
from semel.errors import GiveUp, NotApplied, SemelError
from semel.outbox.message import Message
from semel.policy import Policy
from semel.runtime.context import Context, current, step
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
    ProbeAnswer,
    Record,
    Renewed,
    SettleAnswer,
    State,
    Stats,
    Unavailable,
    Unknown,
)

__all__ = [
    "Absent",
    "AsyncCleaner",
    "AsyncGuarded",
    "AsyncSemel",
    "Busy",
    "CannotTell",
    "ClaimOutcome",
    "Claimed",
    "Cleaner",
    "Completed",
    "Context",
    "Delivery",
    "DidNotHappen",
    "Done",
    "Errored",
    "Failed",
    "Forgotten",
    "GiveUp",
    "Guarded",
    "Happened",
    "Inquiry",
    "Late",
    "Lost",
    "Message",
    "Mismatch",
    "Mode",
    "NotApplied",
    "Outcome",
    "Policy",
    "ProbeAnswer",
    "Record",
    "Renewed",
    "Semel",
    "SemelError",
    "SettleAnswer",
    "State",
    "Stats",
    "Unavailable",
    "Unknown",
    "aopen",
    "aproducer",
    "current",
    "errors",
    "keys",
    "migrating",
    "open",
    "producer",
    "step",
    "tiered",
    "unwrap",
]


if TYPE_CHECKING:
    from semel.outbox.publish import aproducer, producer
    from semel.stores.migrating import migrating
    from semel.stores.tiered import tiered

    __version__: str
else:

    def __dir__() -> list[str]:
        """List the public names, including lazy ones."""
        return sorted({*globals(), *__all__})

    def __getattr__(name: str) -> object:
        """Load names that are slow to import on first use."""
        if name in ("aproducer", "producer"):
            from semel.outbox import publish

            return getattr(publish, name)
        if name == "tiered":
            from semel.stores.tiered import tiered

            return tiered
        if name == "migrating":
            from semel.stores.migrating import migrating

            return migrating
        if name == "__version__":
            from importlib.metadata import version

            return version("semel")
        raise AttributeError(f"module 'semel' has no attribute {name!r}")
