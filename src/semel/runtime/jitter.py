"""Random numbers for back-offs, from a generator of semel's own.

A program may seed or check the global generator: its processes must still not wait in step, and its numbers must
not change.
"""

from random import SystemRandom

__all__ = ["jitter", "spread_s"]

jitter: SystemRandom = SystemRandom()
"""A generator without state: threads and forks may share it."""


def spread_s(delay_s: float) -> float:
    """Return a random time between half of the delay and all of it, so that waiters do not return at once."""
    return delay_s * jitter.uniform(0.5, 1)
