"""How a rotating filter is laid out: checked on birth, and the arithmetic of its generations."""

from math import ceil

from msgspec import Struct

from semel.errors import PolicyInvalid
from semel.windows import Duration, duration_us

__all__ = ["BloomLayout", "layout"]

CAPACITY_MAX = 10**10
"""About 22 GB of bits; more is a mistake in a number."""
ERROR_MIN, ERROR_MAX = 1e-9, 0.1
"""Above, every tenth new id is looked for in vain and a filter saves nothing; at 0.5 it would have no hash left."""
STEPS_MAX = 32


class BloomLayout(Struct, frozen=True, kw_only=True):
    """A window in steps. Each generation takes the ids of one step; those of a window and one step are kept.

    So an id that was put in is found for a whole window, and forgotten within one step after it.
    """

    capacity: int
    window_us: int
    error_rate: float
    steps: int

    @property
    def step_us(self) -> int:
        """How long a generation takes ids in."""
        return -(-self.window_us // self.steps)

    @property
    def generations(self) -> int:
        """How many are asked."""
        return self.steps + 1

    @property
    def generation_capacity(self) -> int:
        """How many ids a generation is made for."""
        return ceil(self.capacity / self.steps)

    @property
    def generation_error_rate(self) -> float:
        """Each has its own chance to be wrong; together they are as wrong as was asked for."""
        return self.error_rate / self.generations

    def number(self, now_us: int) -> int:
        """The generation of an instant."""
        return now_us // self.step_us


def layout(capacity: int, window: Duration, error_rate: float, steps: int) -> BloomLayout:
    """The layout of these settings. Raises `PolicyInvalid` with what to change."""
    if type(capacity) is not int or not 1 <= capacity <= CAPACITY_MAX:
        raise PolicyInvalid(
            f"capacity is {capacity!r}; it is how many ids one window brings, 1 to {CAPACITY_MAX:,}"
        )
    if not ERROR_MIN <= error_rate <= ERROR_MAX:
        raise PolicyInvalid(
            f"error_rate is {error_rate!r}; it is the share of new ids that look known, {ERROR_MIN} to {ERROR_MAX}"
        )
    if type(steps) is not int or not 1 <= steps <= STEPS_MAX:
        raise PolicyInvalid(f"steps is {steps!r}; a window has 1 to {STEPS_MAX} of them")
    window_us = duration_us(window)
    if window_us < steps:
        raise PolicyInvalid(f"a window of {window!r} has no {steps} steps; make it longer")
    return BloomLayout(capacity=capacity, window_us=window_us, error_rate=float(error_rate), steps=steps)
