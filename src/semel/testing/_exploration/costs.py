"""A move, and which of the bounds it uses up."""

from typing import NamedTuple

from semel.testing._exploration.scenes import BUDGETS

BATCHES = ("lose both requests", "lose both replies", "lose the second", "send both late")


OPERATOR_MOVES = ("forget", "forget by force", "resolve")
"""Their number is that of the event, not of a worker."""


class Move(NamedTuple):
    """One step: what happens, to which worker, and with which others."""

    kind: str
    seat: int = -1
    others: tuple[int, ...] = ()


COSTS: dict[str, tuple[str, ...]] = {
    "lose the request": ("lost",),
    "lose the reply": ("lost",),
    "send late": ("late",),
    "die": ("kills",),
    "die after sending": ("kills",),
    "die, send late": ("kills", "late"),
    "stall": ("stalls",),
    "raise before": ("errors",),
    "refuse before": ("errors",),
    "raise after": ("errors",),
    "lose the sink's reply": ("lost",),
    "reach the sink late": ("late",),
    "no answer of the probe": ("lost",),
    "renew late": ("late",),
    "lose both requests": ("lost",),
    "lose both replies": ("lost",),
    "lose the second": ("lost",),
    "send both late": ("late",),
    "tick": ("ticks",),
    "purge": ("purges",),
    "flush": ("flushes",),
    "step back": ("steps_back",),
    "forget": ("forgets",),
    "forget by force": ("forgets",),
    "resolve": ("resolves",),
}
"""What a fault uses up; the other moves are free."""


class Barred(dict[tuple[bool, ...], frozenset[str]]):
    """The kinds of moves that cannot be paid, by which of the budgets are left."""

    def __missing__(self, left: tuple[bool, ...]) -> frozenset[str]:
        empty = {name for name, some in zip(BUDGETS, left, strict=True) if not some}
        self[left] = found = frozenset(kind for kind, costs in COSTS.items() if empty & set(costs))
        return found


BARRED = Barred()
