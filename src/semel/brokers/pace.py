"""How much a runner takes on at once, and what it has done."""

from typing import Literal

import msgspec

__all__ = ["RunnerCounters", "RunnerLimits"]


class RunnerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How much a runner takes on at once."""

    batch: int = 200
    """The most deliveries that are claimed together, or share a transaction."""
    concurrency: int = 10
    """How many handlers run at once."""
    in_hand: int = 1000
    """The most deliveries held, waiting ones included; beyond it nothing is received."""
    room: int = 100
    """How many busy or postponed deliveries wait in hand; beyond it they go back to the broker."""
    order: bool = False
    """Whether the deliveries of one lane (a partition, a message group) run one after the other, in order."""
    drain_s: float = 30.0
    """How long a stop waits for running handlers before it cancels them."""
    no_key: Literal["bury", "refuse"] = "bury"
    """What becomes of a message without a key: to the dead letters, or the runner stops with `KeyMissing`."""


class RunnerCounters(msgspec.Struct):
    """What a runner has done since it was made."""

    received: int = 0
    acked: int = 0
    duplicates: int = 0
    parked: int = 0
    returned: int = 0
    buried: int = 0
    stuck: int = 0
    """Messages whose dead letters could not be written so far; they are tried again."""
    errors: int = 0
    unguarded: int = 0
    """Ran without a claim because the store could not be reached, by `Policy(on_unavailable="run")`."""
