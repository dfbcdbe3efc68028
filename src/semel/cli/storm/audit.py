"""Count what the ledgers hold, and say which promise was kept."""

import sqlite3
from collections import Counter

from msgspec import Struct

from semel.cli.storm.messages import PHASES, Mode
from semel.cli.storm.run import DemoProgress
from semel.cli.storm.worker import DemoFolder

__all__ = ["DemoResult", "SinkCounts", "audit"]


class SinkCounts(Struct, frozen=True):
    """What a system that honours idempotency keys was left with."""

    lost: int
    twice: int


class DemoResult(Struct, frozen=True):
    """One storm, counted. `broken`: the promises that were not kept; empty is what we want."""

    mode: Mode
    events: int
    deliveries: int
    duplicates_suppressed: int
    replays: int
    kills: int
    kills_by_phase: dict[str, int]
    pauses: int
    takeovers: int
    lost: int
    """Events whose effect never happened."""
    twice: int
    """Events whose effect happened more than once."""
    repeats: int
    """Effects beyond the first of each event."""
    repeats_unexplained: int
    """Those beyond the kills, pauses and lost claims that hit their event."""
    answers_differ: int
    """Events whose deliveries were answered differently."""
    sink: SinkCounts | None
    seconds: float
    broken: list[str]


def audit(place: DemoFolder, progress: DemoProgress, events: list[str], seconds: float) -> DemoResult:
    """Read the ledgers, which know nothing of semel, and hold them against the promises."""
    happened = _effects(place)
    lost = sum(not happened[event] for event in events)
    twice = sum(count > 1 for count in happened.values())
    over = sum(max(0, count - 1 - progress.hits[event]) for event, count in happened.items())
    differ = sum(len(answers) > 1 for answers in progress.answers.values())
    sink = _sink(place, events) if place.mode == "lease" else None
    broken = [f"no worker was killed at: {phase}" for phase in PHASES if not progress.kills[phase]]
    if lost:
        broken.append(f"{lost} events were lost")
    if place.mode == "inbox" and twice:
        broken.append(f"{twice} events had their effect twice")
    if place.mode == "lease" and over:
        broken.append(f"{over} repeats that no kill, pause or lost claim explains")
    if differ:
        broken.append(f"{differ} events were answered differently")
    if sink is not None and (sink.lost or sink.twice):
        broken.append(f"the sink with idempotency keys lost {sink.lost} and doubled {sink.twice}")
    if place.mode == "control" and not twice:
        broken.append("the control shows no double: the storm was too mild")
    return DemoResult(
        mode=place.mode,
        events=len(events),
        deliveries=progress.deliveries,
        duplicates_suppressed=progress.duplicates,
        replays=progress.replays,
        kills=progress.kills.total(),
        kills_by_phase={phase: progress.kills[phase] for phase in PHASES},
        pauses=progress.pauses,
        takeovers=progress.takeovers,
        lost=lost,
        twice=twice,
        repeats=sum(count - 1 for count in happened.values()),
        repeats_unexplained=over,
        answers_differ=differ,
        sink=sink,
        seconds=round(seconds, 2),
        broken=broken,
    )


def _effects(place: DemoFolder) -> Counter[str]:
    if place.mode == "lease":
        return Counter(place.effects.read_text().split())
    return _counted(place, "SELECT event, count(*) FROM ledger GROUP BY event")


def _sink(place: DemoFolder, events: list[str]) -> SinkCounts:
    connection = sqlite3.connect(place.sink)
    try:
        applied = dict(connection.execute("SELECT event, count(*) FROM applied GROUP BY event").fetchall())
    finally:
        connection.close()
    return SinkCounts(sum(event not in applied for event in events), sum(count > 1 for count in applied.values()))


def _counted(place: DemoFolder, query: str) -> Counter[str]:
    connection = sqlite3.connect(place.database)
    try:
        return Counter(dict(connection.execute(query).fetchall()))
    finally:
        connection.close()
