"""What each mode guarantees when a process dies: how often the effect happens in total.

The tests kill flows and processes in every window on every store and compare. Nothing else states guarantees.
"""

from typing import Literal, TypeAlias

from msgspec import Struct

from semel.types import Mode

__all__ = ["GUARANTEES", "WINDOWS", "GuaranteeCell", "Sink", "Weakness", "cells", "holds_at_least"]

Sink: TypeAlias = Literal["plain", "fenced", "keyed"]
"""What the called system supports: nothing, the fence, or the idempotency key."""


class GuaranteeCell(Struct, frozen=True):
    """How often the effect happens; `flagged`: the record becomes `unknown`, for an operator to resolve."""

    effects: int
    flagged: bool = False


class Weakness(Struct, frozen=True):
    """A fact that weakens the guarantee; `breaks`: the table does not hold."""

    what: str
    breaks: bool = False
    fix: str = ""
    """How to fix it, if known."""


WINDOWS: dict[str, str] = {
    "before_claim": "killed before the claim",
    "claim_reply_lost": "the claim's reply is lost",
    "claim_late": "the claim arrives after its caller gave up",
    "after_claim": "killed after the claim",
    "effect_reply_lost": "the effect's reply is lost",
    "effect_late": "the effect arrives after its caller gave up",
    "after_effect": "killed after the effect",
    "complete_reply_lost": "the completion's reply is lost",
    "complete_late": "the completion arrives after another took over",
    "before_ack": "killed before the ack",
    "stalled_before_effect": "stalled past the lease before the effect",
    "stalled_after_effect": "stalled past the lease after the effect",
    "store_lost": "the store loses the record",
}
"""The crash windows. For mark, the mark stands for the claim; for inbox, the commit for all three;
for transaction, the commit is the effect and the ack, and the event is also sent again by its producer."""

_ONCE, _TWICE, _NEVER = GuaranteeCell(1), GuaranteeCell(2), GuaranteeCell(0)
_DECIDE_DONE, _DECIDE_NOT = GuaranteeCell(1, flagged=True), GuaranteeCell(0, flagged=True)

_ROWS: dict[str, tuple[GuaranteeCell | None, ...]] = {
    # In the order of WINDOWS; None: the window does not exist in that mode.
    "inbox": (
        _ONCE, _ONCE, None, _ONCE,
        _ONCE, None, _ONCE,
        _ONCE, None, _ONCE,
        _ONCE, _ONCE, _ONCE,
    ),
    "lease, keyed sink": (_ONCE,) * len(WINDOWS),
    "lease, fenced sink": (
        _ONCE, _ONCE, _ONCE, _ONCE,
        _TWICE, _ONCE, _TWICE,
        _ONCE, _TWICE, _ONCE,
        _ONCE, _TWICE, _TWICE,
    ),
    "lease, plain sink": (
        _ONCE, _ONCE, _ONCE, _ONCE,
        _TWICE, _TWICE, _TWICE,
        _ONCE, _TWICE, _ONCE,
        _TWICE, _TWICE, _TWICE,
    ),
    "lease, probe": (
        *(_ONCE,) * (len(WINDOWS) - 1), _TWICE,
    ),
    "quarantine": (
        _ONCE, _ONCE, _DECIDE_NOT, _DECIDE_NOT,
        _DECIDE_DONE, _DECIDE_DONE, _DECIDE_DONE,
        _ONCE, _ONCE, _ONCE,
        _ONCE, _ONCE, _TWICE,
    ),
    "quarantine, probe": (
        *(_ONCE,) * (len(WINDOWS) - 1), _TWICE,
    ),
    "mark": (
        _ONCE, _NEVER, _NEVER, _NEVER,
        _ONCE, _ONCE, _ONCE,
        None, None, _ONCE,
        _ONCE, _ONCE, _TWICE,
    ),
    "transaction": (
        _ONCE, _ONCE, _ONCE, _ONCE,
        _ONCE, _TWICE, _TWICE,
        _ONCE, _TWICE, None,
        _ONCE, _TWICE, _TWICE,
    ),
    "transaction, marks": (
        _ONCE, _ONCE, _ONCE, _ONCE,
        _ONCE, _ONCE, _ONCE,
        _ONCE, _ONCE, None,
        _ONCE, _ONCE, _ONCE,
    ),
    "observe": (
        _ONCE, _ONCE, _ONCE, _ONCE,
        _TWICE, _TWICE, _TWICE,
        _ONCE, _ONCE, _TWICE,
        _TWICE, _TWICE, _TWICE,
    ),
}  # fmt: skip

GUARANTEES: dict[str, dict[str, GuaranteeCell | None]] = {
    name: dict(zip(WINDOWS, row, strict=True)) for name, row in _ROWS.items()
}
"""Effects by mode (for lease also by sink) and by window."""


def cells(mode: Mode, sink: Sink, *, probe: bool = False) -> dict[str, GuaranteeCell | None]:
    """Return what a mode guarantees in each window. Raises `KeyError` for a mode without a tested table.

    `probe`: the policy has a probe with true and final answers. A keyed sink needs none.
    """
    if probe and not (mode == "lease" and sink == "keyed"):
        return GUARANTEES[f"{mode}, probe"]
    return GUARANTEES[f"lease, {sink} sink" if mode == "lease" else mode]


def holds_at_least(
    offered: dict[str, GuaranteeCell | None], required: dict[str, GuaranteeCell | None]
) -> bool:
    """Whether the offer equals the requirement in every window, or has the effect once."""
    return all(
        mine is None or theirs is None or mine in (_ONCE, theirs)
        for mine, theirs in ((offered[window], required[window]) for window in WINDOWS)
    )
