"""How long to wait before something is tried again: doubled each time, up to a limit."""

__all__ = ["backoff_s"]

_DOUBLINGS_MAX = 40
"""More than there are between any two limits; a float has no room for all that an outage of days would make."""


def backoff_s(tries: int, first_s: float, max_s: float) -> float:
    """The wait after `tries` earlier ones: `first_s`, doubled by each of them, `max_s` at most."""
    return min(max_s, first_s * 2.0 ** min(tries, _DOUBLINGS_MAX))
