"""The messages between the conductor of a chaos run and its workers."""

from typing import Literal, TypeAlias

import msgspec
from msgspec import Struct

from semel.types import Mode

__all__ = [
    "PHASES",
    "ChaosOrder",
    "DeliveriesReceived",
    "DeliveryAnswer",
    "FromConductor",
    "FromWorker",
    "Halted",
    "Handed",
    "HandedMessage",
    "HandlerSource",
    "Lagged",
    "Phase",
    "Proceed",
    "RunBegan",
    "RunEnded",
    "RunReached",
    "Watched",
    "from_conductor",
    "from_worker",
]

Phase: TypeAlias = Literal["received", "claimed", "line", "returned", "recorded"]
PHASES: dict[Phase, str] = {
    "received": "received, not yet claimed",
    "claimed": "claimed, the handler has not begun",
    "line": "between two lines of the handler",
    "returned": "the handler has returned, nothing is recorded",
    "recorded": "recorded, not yet acknowledged",
}
"""Where a fault can hit a delivery, in the order of a delivery."""


class ChaosOrder(Struct, frozen=True, kw_only=True):
    """A request for one worker."""

    handler: str
    store: str
    mode: Mode
    consumer: str
    lease_s: float
    source: str = ""
    """The URL of a broker; empty: the conductor's own queue."""
    visibility_s: float
    concurrency: int
    effects_table: bool
    """Mode inbox: note each run in a table, in the handler's transaction."""
    path: list[str]
    """`sys.path` of the conductor."""


# --- from a worker ------------------------------------------------------------------------------


class HandlerSource(Struct, frozen=True, tag=True):
    """The worker is ready. Where its handler is written; `line_last` 0: that is not known."""

    file: str = ""
    line_first: int = 0
    line_last: int = 0


class DeliveriesReceived(Struct, frozen=True, tag=True):
    """Deliveries were received: position and key of each."""

    deliveries: list[tuple[str, str]]


class RunBegan(Struct, frozen=True, tag=True):
    """The handler was called."""

    run: str
    key: str
    attempt: int


class RunReached(Struct, frozen=True, tag=True):
    """A line is about to run, for the first time in this run."""

    run: str
    line: int


class RunEnded(Struct, frozen=True, tag=True):
    """The handler returned, or raised `error`."""

    run: str
    error: str = ""


class Halted(Struct, frozen=True, tag=True):
    """A watched delivery has reached a phase and waits for `Proceed`. `share`: of the handler's lines, how many ran."""

    key: str
    phase: Phase
    run: str = ""
    line: int = 0
    share: float = 0.0


class DeliveryAnswer(Struct, frozen=True, tag=True):
    """Deliveries were answered, or given more time; `reason`: why they became dead letters.

    `acking`: a broker is about to be told; if the worker dies now, nobody knows whether it was.
    """

    how: Literal["acking", "ack", "nack", "extend", "dead"]
    positions: list[str]
    delay_s: float = 0.0
    reason: str = ""


class Lagged(Struct, frozen=True, tag=True):
    """Nobody planned it: the event loop stood still for so long, or (`store`) the store was slow or failed."""

    seconds: float
    store: bool = False


FromWorker: TypeAlias = (
    HandlerSource | DeliveriesReceived | RunBegan | RunReached | RunEnded | Halted | DeliveryAnswer | Lagged
)


# --- to a worker --------------------------------------------------------------------------------


class HandedMessage(Struct, frozen=True):
    """One delivery of the conductor's own queue."""

    position: str
    key: str
    body: str
    deliveries: int


class Handed(Struct, frozen=True, tag=True):
    """Deliveries of the conductor's own queue."""

    messages: list[HandedMessage]


class Watched(Struct, frozen=True, tag=True):
    """Halt at each phase of these keys."""

    keys: list[str]


class Proceed(Struct, frozen=True, tag=True):
    """Go on after `Halted`."""


FromConductor: TypeAlias = Handed | Watched | Proceed

from_worker: msgspec.json.Decoder[FromWorker] = msgspec.json.Decoder(FromWorker)
from_conductor: msgspec.json.Decoder[FromConductor] = msgspec.json.Decoder(FromConductor)
