"""Compare what happened with what the table of guarantees promises, event by event and window by window."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from semel.observe.formatting import plural
from semel.observe.guarantees import WINDOWS, GuaranteeCell
from semel.testing.chaos.ledger import ChaosLedger, FaultNote, HandlerCall, Stage
from semel.testing.chaos.messages import Phase

__all__ = ["EventResult", "WindowResult", "judge_events", "judge_windows", "windows_of"]

_KILLED: dict[Stage, tuple[str, ...]] = {
    "received": ("before_claim", "claim_late", "after_claim"),
    "claimed": ("after_claim",),
    "running": ("after_claim", "after_effect", "effect_late"),
    "returned": ("after_effect", "complete_reply_lost", "complete_late", "before_ack"),
    "recorded": ("before_ack",),
}
_STOPPED: dict[Stage, tuple[str, ...]] = {
    "received": ("before_claim", "claim_late", "stalled_before_effect"),
    "claimed": ("stalled_before_effect",),
    "running": ("stalled_before_effect", "stalled_after_effect"),
    "returned": ("stalled_after_effect", "complete_late", "before_ack"),
    "recorded": ("before_ack",),
}
NO_FAULT = "no fault: duplicates only"
_STORE_AWAY = (
    "claim_reply_lost",
    "claim_late",
    "complete_reply_lost",
    "complete_late",
    "stalled_before_effect",
    "stalled_after_effect",
)
_EXACT: dict[tuple[str, Phase], tuple[str, ...]] = {
    ("kill", "claimed"): ("after_claim",),
    ("kill", "returned"): ("after_effect",),
    ("kill", "recorded"): ("before_ack",),
    ("pause", "claimed"): ("stalled_before_effect",),
    ("pause", "returned"): ("stalled_after_effect",),
}
"""Where the window of the event that a fault was planned for is known."""


class EventResult(Struct, frozen=True, kw_only=True):
    """What became of one event."""

    key: str
    number: int
    deliveries: int
    runs: int
    runs_cut: int
    """Runs that were killed before their end."""
    effects: int
    allowed: tuple[int, int]
    """The least and the most effects that the table allows after the faults that hit it."""
    windows: list[str]
    """Where faults may have hit it."""
    faults: int
    state: str
    """`once`, `doubled`, `lost`, `undecided` (recorded as unknown), or `failed` (a dead letter)."""
    kept: bool
    """Whether that is what the table promises."""
    why: str = ""
    """What is wrong, if it is not."""


class WindowResult(Struct, frozen=True, kw_only=True):
    """What happened to the events that were hit in one window. `promised` `None`: it does not exist in this mode.

    `window` is empty for events that no fault hit: a duplicate alone must change nothing.
    """

    window: str
    text: str
    promised: GuaranteeCell | None
    events: int
    """How many events may have been hit there."""
    alone: int
    """How many of them were surely hit there, once, and nowhere else."""
    effects: dict[int, int]
    """How many of those had how many effects."""
    kept: bool


def windows_of(fault: FaultNote, key: str, stage: Stage) -> tuple[str, ...]:
    """Return the windows of the table in which a fault may have hit an event."""
    if fault.kind == "ack lost":
        return ("before_ack",)
    if fault.kind in ("store cut off", "reply lost", "store slow"):
        return _STORE_AWAY
    if key == fault.key and fault.phase is not None and (fault.kind, fault.phase) in _EXACT:
        return _EXACT[fault.kind, fault.phase]
    return (_STOPPED if fault.kind in ("pause", "stall") else _KILLED)[stage]


def judge_events(
    keys: Sequence[str],
    effects: Mapping[str, int],
    unknown: Iterable[str],
    ledger: ChaosLedger,
    promised: Mapping[str, GuaranteeCell | None],
) -> list[EventResult]:
    """Return the result of each event."""
    hits: dict[str, list[tuple[str, ...]]] = {key: [] for key in keys}
    for fault in ledger.faults:
        for key, stage in fault.hit.items():
            if key in hits:
                hits[key].append(windows_of(fault, key, stage))
    flagged = set(unknown)
    results = []
    for number, key in enumerate(keys):
        calls = ledger.calls.get(key, [])
        windows = hits[key] + [("effect_reply_lost",) for call in calls if call.error]
        results.append(
            _judge(key, number, effects[key], windows, calls, ledger, promised, unknown=key in flagged)
        )
    return results


def _judge(
    key: str,
    number: int,
    effects: int,
    hits: list[tuple[str, ...]],
    calls: list[HandlerCall],
    ledger: ChaosLedger,
    promised: Mapping[str, GuaranteeCell | None],
    *,
    unknown: bool,
) -> EventResult:
    failed = ledger.dead.get(key) == "failed"
    least, most = 1, 1
    unflagged = False
    for windows in hits:
        cells = [cell for window in windows if (cell := promised[window]) is not None]
        least = min([least, *(cell.effects for cell in cells)])
        most += max([0, *(cell.effects - 1 for cell in cells)])
        unflagged = unflagged or any(cell.effects == 0 and not cell.flagged for cell in cells)
    least = 0 if failed else least
    why = ""
    if effects > most:
        why = f"{plural(effects, 'effect')}, and the faults that hit it allow {most}"
    elif effects < least:
        why = "no effect, and no fault that hit it explains that"
    elif effects == 0 and not (unknown or unflagged or failed):
        why = "no effect, and the record is not flagged as unknown"
    state = "doubled" if effects > 1 else "undecided" if unknown else "once" if effects else "lost"
    return EventResult(
        key=key,
        number=number,
        deliveries=ledger.deliveries.get(key, 0),
        runs=len(calls),
        runs_cut=sum(call.cut_s is not None for call in calls),
        effects=effects,
        allowed=(least, most),
        faults=len(hits),
        windows=sorted({window for windows in hits for window in windows}, key=list(WINDOWS).index),
        state="failed" if failed and not effects else state,
        kept=not why,
        why=why,
    )


def judge_windows(
    results: Sequence[EventResult], promised: Mapping[str, GuaranteeCell | None]
) -> list[WindowResult]:
    """Return, for each window of the table, what happened to the events that may have been hit there."""
    judged = []
    for window, text in {"": NO_FAULT, **WINDOWS}.items():
        hit = [
            result for result in results if window in result.windows or (not window and not result.windows)
        ]
        alone = [result for result in hit if result.faults <= 1 and len(result.windows) <= 1]
        judged.append(
            WindowResult(
                window=window,
                text=text,
                promised=promised[window] if window else GuaranteeCell(1),
                events=len(hit),
                alone=len(alone),
                effects=dict(sorted(Counter(result.effects for result in alone).items())),
                kept=all(result.kept for result in hit),
            )
        )
    return judged
