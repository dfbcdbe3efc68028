"""For the tests of those who use semel or write a store for it. Public."""

from semel.testing.clock import ManualClock

__all__ = ["ManualClock"]
