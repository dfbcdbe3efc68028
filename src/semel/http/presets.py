"""Which responses are kept for a retry, and which let it run again."""

from collections.abc import Callable

from msgspec import Struct

__all__ = ["PRESETS", "Preset"]

BEFORE_EXECUTION = frozenset({400, 401, 403, 429})
"""Refused before anything was done: badly formed, not known, not allowed, too many."""
CLIENT_ERRORS, SERVER_ERRORS = 400, 500
"""Where they begin."""
DAY_S = 86_400.0


class Preset(Struct, frozen=True):
    """What is kept, and for how long at least. Make your own where none of `PRESETS` fits."""

    name: str
    keeps: Callable[[int], bool]
    """Whether a response with this status answers every retry; else the claim is released and a retry runs."""
    window_s_min: float = 0.0
    """A shorter window of the client is lengthened to this."""


PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset("ietf", lambda status: status < SERVER_ERRORS and status not in BEFORE_EXECUTION),
        Preset("stripe-v1", lambda status: status not in BEFORE_EXECUTION, DAY_S),
        Preset("stripe-v2", lambda status: status < CLIENT_ERRORS, 30 * DAY_S),
    )
}
"""`ietf`: what the handler decided, not its failures. `stripe-v1`: its failures too. `stripe-v2`: successes only."""
