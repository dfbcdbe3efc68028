"""Random numbers for back-offs, from a generator of semel's own.

A program may seed or check the global one: its processes must not wait in step, and its numbers stay its own.
"""

from random import SystemRandom

__all__ = ["jitter"]

jitter: SystemRandom = SystemRandom()
"""It has no state: threads and forks may share it."""
