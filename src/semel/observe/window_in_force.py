"""The effective window of a consumer: the stored one, else the one of its latest records.

The window of a client is stored only in the records that it completes: each has the time when it was
settled and the time when it expires.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct

from semel.types import Record
from semel.windows import FOREVER_US, exact_text, is_endless

__all__ = ["SAMPLE", "WindowInForce", "window_in_force"]

SAMPLE = 200
"""How many records are read."""
EXACT_US = 1000
"""Stores may keep times in milliseconds."""


class WindowInForce(Struct, frozen=True):
    """How long a consumer's finished keys are remembered, and the origin of that value."""

    us: int
    origin: Literal["stored", "seen", "assumed", "unread"]

    @property
    def text(self) -> str:
        """For people."""
        told = {
            "stored": "",
            "seen": ", as the client says",
            "assumed": " unless the client says otherwise: no record shows it yet",
            "unread": " unless the client says otherwise: its records are being looked for",
        }
        return exact_text(self.us) + told[self.origin]


def window_in_force(
    stored: Mapping[tuple[str, str, str], int],
    tenant: str,
    consumer: str,
    records: Sequence[Record],
    assumed_us: int,
) -> WindowInForce:
    """Return the window of the consumer's events. `records`: some finished ones. `assumed_us`: the fallback."""
    own = stored.get((tenant, consumer, ""))
    if own is not None:
        return WindowInForce(own, "stored")
    telling = [
        each
        for each in records
        if each.state == "done"
        and each.settled_at_us
        and not each.sliding
        and each.anchor_us is None
        and (tenant, consumer, each.event_type) not in stored
    ]
    if not telling:
        return WindowInForce(assumed_us, "assumed")
    latest = max(telling, key=lambda each: each.settled_at_us)
    seen_us = _round(latest.expires_at_us - latest.settled_at_us)
    return WindowInForce(FOREVER_US if is_endless(seen_us) else seen_us, "seen")


def _round(us: int) -> int:
    """Round to the nearest whole second if it is near enough."""
    seconds_us = round(us / 1e6) * 10**6
    return seconds_us if abs(seconds_us - us) <= EXACT_US else us
