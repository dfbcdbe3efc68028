"""Windows and durations: `24h` as microseconds, the presets, and which window an event type has."""

import re
from collections.abc import Mapping
from datetime import timedelta
from typing import TypeAlias

from semel.errors import PolicyInvalid

__all__ = [
    "FOREVER_US",
    "OFF",
    "PRESETS",
    "WINDOW_LONGEST_S",
    "WINDOW_MAX_S",
    "WINDOW_MIN_S",
    "Duration",
    "duration_us",
    "exact_text",
    "is_endless",
    "resolve",
    "window_us",
]

Duration: TypeAlias = str | float | timedelta
"""`"24h"`, `"1h30m"`, a number of seconds, or a `timedelta`."""

OFF = 0
"""The window of an event type that is not deduplicated."""

PRESETS: Mapping[str, str] = {
    "payments": "24h",
    "orders": "4h",
    "notifications": "15m",
    "analytics": "5m",
    "webhooks": "96h",
}
"""Windows by the kind of events; a name is valid wherever a duration is."""

WINDOW_MIN_S = 0.02
WINDOW_MAX_S = 90 * 86400
"""The longest window that every store keeps; longer than the redelivery time of any known broker."""
WINDOW_LONGEST_S = 3650 * 86400
"""The longest window with an end. Stores that keep records without end keep this one too."""
FOREVER_US = 100 * 365 * 86400 * 1_000_000
"""The window `forever`: a hundred years. A number, so that every store computes with it as with any other window;
added to the time of this century it is exact in JSON and in Lua's doubles."""

_UNITS_US = {"us": 1, "ms": 1000, "s": 10**6, "m": 60 * 10**6, "h": 3600 * 10**6, "d": 86400 * 10**6}
_CHARS_MAX = 64
"""Longer than any duration that a person writes; reading a long row of digits takes time with its square."""
_PART = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s|m|h|d)")


def duration_us(duration: Duration) -> int:
    """Microseconds of `"24h"`, `"1h30m"`, `"250ms"`, a `timedelta` or a number of seconds.

    Raises `PolicyInvalid` for anything else, negative and endless durations included.
    """
    if isinstance(duration, timedelta):
        duration = duration.total_seconds()
    if isinstance(duration, bool) or not isinstance(duration, str | float | int):
        raise PolicyInvalid(f"{duration!r} is not a duration; give seconds, text like 24h, or a timedelta")
    if isinstance(duration, str):
        parts = _PART.findall(duration) if len(duration) <= _CHARS_MAX else []
        if not parts or "".join(number + unit for number, unit in parts) != duration:
            raise PolicyInvalid(
                f"{duration[:_CHARS_MAX]!r} is not a duration; write it like 24h, 15m, 1h30m, 30s or 250ms"
            )
        duration = sum(float(number) * _UNITS_US[unit] for number, unit in parts) / 10**6
    if not 0 <= duration < 2**40:
        raise PolicyInvalid(f"{duration!r} seconds is not a duration; give a number of seconds, 0 or more")
    return round(duration * 10**6)


def window_us(window: Duration) -> int:
    """Microseconds of a window: a duration, a preset's name, `"forever"`, or `"off"`."""
    if window == "off":
        return OFF
    if window == "forever":
        return FOREVER_US
    us = duration_us(PRESETS.get(window, window) if isinstance(window, str) else window)
    if us != FOREVER_US and not WINDOW_MIN_S * 10**6 <= us <= WINDOW_LONGEST_S * 10**6:
        raise PolicyInvalid(
            f"a window of {window!r} is out of bounds; use 20ms to 3650d, forever, one of {', '.join(PRESETS)}, or off"
        )
    return us


def is_endless(left_us: int) -> bool:
    """Whether a record that is remembered for this much longer has a window without end."""
    return left_us >= FOREVER_US // 2


def resolve(
    stored: Mapping[tuple[str, str, str], int], tenant: str, consumer: str, event_type: str, default_us: int
) -> int:
    """The window of an event type: its own, else the consumer's, else the client's."""
    own = stored.get((tenant, consumer, event_type)) if event_type else None
    if own is None:
        own = stored.get((tenant, consumer, ""))
    return default_us if own is None else own


def exact_text(us: int) -> str:
    """A window in one unit, without loss: `off`, `15m`, `24h`, `30d`, `forever`."""
    if us == 0:
        return "off"
    if us == FOREVER_US:
        return "forever"
    for unit, size in (
        ("d", 86400 * 10**6),
        ("h", 3600 * 10**6),
        ("m", 60 * 10**6),
        ("s", 10**6),
        ("ms", 1000),
    ):
        if us % size == 0 and (unit != "d" or us >= 7 * size):
            return f"{us // size}{unit}"
    return f"{us}us"
