"""The report of a chaos run: figures, verdict, timeline; as sentences and as a JSON document."""

import shlex
from collections import Counter
from collections.abc import Sequence
from typing import Any

from msgspec import Struct, field, to_builtins

from semel.observe.explain import Explanation
from semel.observe.formatting import plural, redact
from semel.observe.guarantees import GuaranteeCell
from semel.testing.chaos.effects import effects_text
from semel.testing.chaos.ledger import ChaosLedger, FaultNote
from semel.testing.chaos.lines import LineResult, judge_lines
from semel.testing.chaos.messages import PHASES
from semel.testing.chaos.settings import ChaosSettings
from semel.testing.chaos.verdict import EventResult, WindowResult, judge_events, judge_windows

__all__ = [
    "ChaosReport",
    "RunSpan",
    "build_command",
    "build_report",
    "describe_fault",
    "document",
    "promise_text",
    "summary",
]

NAMED_MAX = 5
STATES = ("once", "doubled", "lost", "undecided", "failed")


class RunSpan(Struct, frozen=True):
    """One run of the handler on the timeline. `end`: `returned`, `raised`, `killed` or `running`."""

    key: str
    worker: int
    began_s: float
    ended_s: float
    end: str


class ChaosReport(Struct, frozen=True, kw_only=True):
    """What a chaos run found. `held`: whether every event had the effects that the table promises."""

    held: bool
    seed: int
    rounds: int
    handler: str
    store: str
    source: str
    mode: str
    sink: str
    lease_s: float
    seconds: float
    counted_by: str
    command: str
    """A command that repeats the plan."""
    events: list[EventResult]
    windows: list[WindowResult]
    lines: list[LineResult]
    file: str
    faults: list[FaultNote]
    spans: list[RunSpan]
    workers: list[tuple[int, float, float]]
    """Number, beginning and end of each worker process."""
    how: str
    """What the mode promises, in words."""
    weaknesses: list[str]
    broken: list[str]
    """Why the promises are broken; empty if they held."""
    not_injected: list[str] = field(default_factory=list[str])
    """Faults that this store or source does not allow."""

    def keys(self, state: str) -> list[str]:
        """Return the keys of the events in this state: once, doubled, lost, undecided, failed."""
        return [event.key for event in self.events if event.state == state]

    @property
    def doubled(self) -> list[str]:
        """The keys of events whose effect happened more than once."""
        return self.keys("doubled")

    @property
    def lost(self) -> list[str]:
        """The keys of events whose effect never happened."""
        return self.keys("lost")

    @property
    def undecided(self) -> list[str]:
        """The keys of events whose outcome is recorded as unknown."""
        return self.keys("undecided")

    @property
    def repeated_lines(self) -> list[LineResult]:
        """The lines that ran more than once for an event; those of the effect first, then the most often repeated."""
        repeated = [line for line in self.lines if line.events_repeated]
        return sorted(repeated, key=lambda line: (not line.is_effect, -line.events_repeated, line.line))

    @property
    def faults_by_kind(self) -> dict[str, int]:
        """How many faults of each kind happened."""
        return dict(sorted(Counter(fault.kind for fault in self.faults).items()))

    def check(self, *, strict: bool = False) -> None:
        """Raise `AssertionError` with the summary if a promise is broken; `strict`: or an event was not done once."""
        if not self.held or (strict and (self.doubled or self.lost)):
            raise AssertionError("\n".join(summary(self)))


def build_report(
    settings: ChaosSettings,
    explanation: Explanation,
    ledger: ChaosLedger,
    keys: Sequence[str],
    effects: dict[str, int],
    unknown: set[str],
    *,
    rounds: int,
    seconds: float,
    not_injected: list[str],
) -> ChaosReport:
    """Judge a run."""
    events = judge_events(keys, effects, unknown, ledger, explanation.windows)
    elsewhere = effects if settings.effects and settings.mode != "inbox" else None
    return ChaosReport(
        held=all(event.kept for event in events),
        seed=settings.seed,
        rounds=rounds,
        handler=settings.handler,
        store=redact(explanation.store),
        source=redact(settings.source) or "a queue of its own",
        mode=settings.mode,
        sink=settings.sink,
        lease_s=settings.lease_s,
        seconds=round(seconds, 2),
        counted_by=effects_text(settings),
        command=build_command(settings, rounds),
        events=events,
        windows=judge_windows(events, explanation.windows),
        lines=judge_lines(ledger, elsewhere),
        file=ledger.file,
        faults=ledger.faults,
        spans=[
            RunSpan(key, call.worker, call.began_s, _end_s(call, seconds), _end_word(call))
            for key, calls in ledger.calls.items()
            for call in calls
        ],
        workers=[
            (each.number, each.began_s, seconds if each.ended_s is None else each.ended_s)
            for each in ledger.workers
        ],
        how=explanation.how,
        weaknesses=[redact(weakness.what) for weakness in explanation.weaknesses],
        broken=_list_broken(events),
        not_injected=not_injected,
    )


def _end_s(call: Any, seconds: float) -> float:
    return float(next((each for each in (call.ended_s, call.cut_s) if each is not None), seconds))


def _end_word(call: Any) -> str:
    if call.ended_s is not None:
        return "raised" if call.error else "returned"
    return "running" if call.cut_s is None else "killed"


def build_command(settings: ChaosSettings, rounds: int) -> str:
    """Return the command that repeats the plan. Passwords in addresses are left out."""
    words = ["semel", "chaos", settings.handler, "--seed", str(settings.seed), "--rounds", str(rounds)]
    words += ["--mode", settings.mode]
    if not settings.store_is_new:
        words += ["--store", redact(settings.store)]
    standard = ChaosSettings(handler="", store="")
    if settings.source:
        words += ["--from", redact(settings.source)]
    for name in ("effects", "sample", "events", "workers", "concurrency", "sink"):
        value = getattr(settings, name)
        if value != getattr(standard, name):
            words += [f"--{name}", str(value)]
    for kind in settings.faults:
        words += ["--fault", kind]
    if settings.lease_s != standard.lease_s:
        words += ["--lease", f"{settings.lease_s:g}s"]
    if settings.force:
        words.append("--force")
    return shlex.join(words)


def _list_broken(events: Sequence[EventResult]) -> list[str]:
    bad = [event for event in events if not event.kept]
    told = [f"{event.key}: {event.why}" for event in bad[:NAMED_MAX]]
    if len(bad) > NAMED_MAX:
        told.append(f"and {len(bad) - NAMED_MAX} more")
    return told


def describe_fault(fault: FaultNote) -> str:
    """Return one line about a fault."""
    words = [f"{fault.at_s:7.2f} s  worker {fault.worker}: {fault.kind}"]
    if fault.lasted_s:
        words.append(f"for {fault.lasted_s:.2f} s")
    if fault.phase == "line" and fault.line:
        words.append(f"before line {fault.line}")
    elif fault.phase is not None:
        words.append(f"({PHASES[fault.phase]})")
    return " ".join([*words, fault.key]).rstrip()


def promise_text(cell: GuaranteeCell | None) -> str:
    """Return what the table promises for one window."""
    if cell is None:
        return "cannot happen"
    most = {0: "0: lost", 1: "1", 2: "up to 2"}[cell.effects]
    return f"{most}, flagged for a person" if cell.flagged else most


def summary(report: ChaosReport) -> list[str]:
    """Return the report as sentences."""
    said = [
        f"{plural(len(report.events), 'event')} in {plural(report.rounds, 'round')},"
        f" {sum(event.deliveries for event in report.events):,} deliveries, {len(report.spans):,} runs of the handler,"
        f" {plural(len(report.faults), 'fault')} ("
        + ", ".join(f"{kind} {number}" for kind, number in report.faults_by_kind.items())
        + ")",
    ]
    counts = ", ".join(f"{state} {len(report.keys(state))}" for state in STATES)
    said.append(f"effects: {counts} (counted by: {report.counted_by})")
    again = "ran again after a rollback" if report.mode == "inbox" else "ran more than once"
    for line in report.repeated_lines[:NAMED_MAX]:
        effect = ", as often as the effect was counted" if line.is_effect else ""
        said.append(
            f"{again} for {plural(line.events_repeated, 'event')}{effect}: {report.file}:{line.line}:"
            f" {line.text.strip()}"
        )
    said += [f"not done here: {each}" for each in report.not_injected]
    mode = f"mode {report.mode}" + (f" with a {report.sink} sink" if report.mode == "lease" else "")
    if not report.held:
        said.append(f"BROKEN: {mode} on {report.store} promises more:")
        said += [f"  {each}" for each in report.broken]
    elif report.doubled or report.lost:
        said.append(
            f"HELD: {mode} promises no more than this: doubled {len(report.doubled)} and lost {len(report.lost)} after"
            " faults for which the table of guarantees allows it. See `semel explain`."
        )
    else:
        said.append(f"HELD: every promise of {mode} on {report.store}.")
    said.append(f"again: {report.command}")
    return said


def document(report: ChaosReport) -> dict[str, Any]:
    """Return the report as a JSON document."""
    told: dict[str, Any] = to_builtins(report, str_keys=True)
    counts = {state: len(report.keys(state)) for state in STATES}
    return {"counts": counts, "faults_by_kind": report.faults_by_kind, **told}
