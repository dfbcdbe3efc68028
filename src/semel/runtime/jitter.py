"""Random numbers for back-offs, from a generator of semel's own.

A program may seed or check the global one: its processes must not wait in step, and its numbers stay its own.
"""

from random import SystemRandom

__all__ = ["jitter", "spread_s"]

jitter: SystemRandom = SystemRandom()
"""It has no state: threads and forks may share it."""


def spread_s(delay_s: float) -> float:
    """Between half of the delay and all of it: those who wait for the same thing do not return at once."""
    return delay_s * jitter.uniform(0.5, 1)
