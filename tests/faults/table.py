"""What holds when a process dies: how often the effect is in the world in the end. A literal, on purpose.

It is compared with measurements and rendered into the documentation; nothing writes it.
"""

from typing import NamedTuple


class Cell(NamedTuple):
    """How many effects, and whether the record says that nobody knows."""

    effects: int
    flagged: bool = False

    def __str__(self) -> str:
        return f"{self.effects}, flagged" if self.flagged else str(self.effects)


ONCE, TWICE, LOST = Cell(1), Cell(2), Cell(0)
UNKNOWN_DONE, UNKNOWN_NOT_DONE = Cell(1, flagged=True), Cell(0, flagged=True)
NEVER = None
"""The window does not exist in that mode."""

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

GUARANTEES: dict[str, dict[str, Cell | None]] = {
    "inbox": {
        "before_claim": ONCE,
        "claim_reply_lost": ONCE,
        "claim_late": NEVER,
        "after_claim": ONCE,
        "effect_reply_lost": ONCE,
        "effect_late": NEVER,
        "after_effect": ONCE,
        "complete_reply_lost": ONCE,
        "complete_late": NEVER,
        "before_ack": ONCE,
        "stalled_before_effect": ONCE,
        "stalled_after_effect": ONCE,
        "store_lost": ONCE,
    },
    "lease, keyed sink": dict.fromkeys(WINDOWS, ONCE),
    "lease, fenced sink": {
        "before_claim": ONCE,
        "claim_reply_lost": ONCE,
        "claim_late": ONCE,
        "after_claim": ONCE,
        "effect_reply_lost": TWICE,
        "effect_late": ONCE,
        "after_effect": TWICE,
        "complete_reply_lost": ONCE,
        "complete_late": TWICE,
        "before_ack": ONCE,
        "stalled_before_effect": ONCE,
        "stalled_after_effect": TWICE,
        "store_lost": TWICE,
    },
    "lease, plain sink": {
        "before_claim": ONCE,
        "claim_reply_lost": ONCE,
        "claim_late": ONCE,
        "after_claim": ONCE,
        "effect_reply_lost": TWICE,
        "effect_late": TWICE,
        "after_effect": TWICE,
        "complete_reply_lost": ONCE,
        "complete_late": TWICE,
        "before_ack": ONCE,
        "stalled_before_effect": TWICE,
        "stalled_after_effect": TWICE,
        "store_lost": TWICE,
    },
    "lease, probe": {**dict.fromkeys(WINDOWS, ONCE), "store_lost": TWICE},
    "quarantine": {
        "before_claim": ONCE,
        "claim_reply_lost": ONCE,
        "claim_late": UNKNOWN_NOT_DONE,
        "after_claim": UNKNOWN_NOT_DONE,
        "effect_reply_lost": UNKNOWN_DONE,
        "effect_late": UNKNOWN_DONE,
        "after_effect": UNKNOWN_DONE,
        "complete_reply_lost": ONCE,
        "complete_late": ONCE,
        "before_ack": ONCE,
        "stalled_before_effect": ONCE,
        "stalled_after_effect": ONCE,
        "store_lost": TWICE,
    },
    "quarantine, probe": {**dict.fromkeys(WINDOWS, ONCE), "store_lost": TWICE},
    "mark": {
        "before_claim": ONCE,
        "claim_reply_lost": LOST,
        "claim_late": LOST,
        "after_claim": LOST,
        "effect_reply_lost": ONCE,
        "effect_late": ONCE,
        "after_effect": ONCE,
        "complete_reply_lost": NEVER,
        "complete_late": NEVER,
        "before_ack": ONCE,
        "stalled_before_effect": ONCE,
        "stalled_after_effect": ONCE,
        "store_lost": TWICE,
    },
    "transaction": {
        "before_claim": ONCE,
        "claim_reply_lost": ONCE,
        "claim_late": ONCE,
        "after_claim": ONCE,
        "effect_reply_lost": ONCE,
        "effect_late": TWICE,
        "after_effect": TWICE,
        "complete_reply_lost": ONCE,
        "complete_late": TWICE,
        "before_ack": NEVER,
        "stalled_before_effect": ONCE,
        "stalled_after_effect": TWICE,
        "store_lost": TWICE,
    },
    "transaction, marks": {
        "before_claim": ONCE,
        "claim_reply_lost": ONCE,
        "claim_late": ONCE,
        "after_claim": ONCE,
        "effect_reply_lost": ONCE,
        "effect_late": ONCE,
        "after_effect": ONCE,
        "complete_reply_lost": ONCE,
        "complete_late": ONCE,
        "before_ack": NEVER,
        "stalled_before_effect": ONCE,
        "stalled_after_effect": ONCE,
        "store_lost": ONCE,
    },
    "observe": {
        "before_claim": ONCE,
        "claim_reply_lost": ONCE,
        "claim_late": ONCE,
        "after_claim": ONCE,
        "effect_reply_lost": TWICE,
        "effect_late": TWICE,
        "after_effect": TWICE,
        "complete_reply_lost": ONCE,
        "complete_late": ONCE,
        "before_ack": TWICE,
        "stalled_before_effect": TWICE,
        "stalled_after_effect": TWICE,
        "store_lost": TWICE,
    },
}

STEPS: dict[str, Cell] = {
    "killed before the step": ONCE,
    "killed in the step, after its effect": TWICE,
    "killed after the step's note": ONCE,
    "the note's reply is lost": ONCE,
}
"""Lease with a plain sink, the effect inside a step."""

POWER_FAILS: dict[str, tuple[Cell, Cell]] = {
    "before the effect; the worker is gone": (ONCE, ONCE),
    "before the effect; the worker goes on, and the event comes again": (ONCE, TWICE),
    "before the effect; the worker goes on alone": (ONCE, ONCE),
    "after the effect, before the completion; the worker is gone": (TWICE, TWICE),
    "after the completion": (ONCE, ONCE),
}
"""The power of the store fails: lease with a plain sink on PostgreSQL, by default and with `durable_claims=False`."""

WINDOW_OF: dict[tuple[str, str], str] = {
    ("claim", "not_sent"): "before_claim",
    ("claim", "reply_lost"): "claim_reply_lost",
    ("claim", "late"): "claim_late",
    ("claim", "after_reply"): "after_claim",
    ("claim", "stalled"): "before_ack",
    ("effect", "not_sent"): "after_claim",
    ("effect", "reply_lost"): "effect_reply_lost",
    ("effect", "late"): "effect_late",
    ("effect", "after_reply"): "after_effect",
    ("effect", "stalled"): "stalled_before_effect",
    ("complete", "not_sent"): "after_effect",
    ("complete", "reply_lost"): "complete_reply_lost",
    ("complete", "late"): "complete_late",
    ("complete", "after_reply"): "before_ack",
    ("complete", "stalled"): "stalled_after_effect",
}
"""Which window a fault at a yield opens. Stalled before its claim, a process finds the event done by others."""
