"""Hold the ledger of a storm against the promises."""

import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from typing import NamedTuple

from tests.whole.scene import LEASE_S, Entry, Scene, UserDatabase
from tests.whole.worker import FLOWS, INBOX_FLOWS

__all__ = ["Hit", "audit", "missing"]

SERVICE_FLOWS = ("serve", "consume", "listen")


class Hit(NamedTuple):
    """A process group was killed, or stopped for a while. Group 0: the whole computer was slow."""

    group: int
    role: str
    """Whose process it was, for who looks for the cause."""
    from_ns: int
    to_ns: int


def missing(scene: Scene) -> list[str]:
    """The effects that have not happened yet."""
    happened = {(entry.flow, entry.event) for entry in scene.ledger.read() if entry.what == "effect"}
    happened |= set(UserDatabase(scene).counts())
    flows = [*FLOWS, *SERVICE_FLOWS]
    if scene.is_sql:
        flows += [*INBOX_FLOWS, "transfer", *INBOX_FLOWS.values()]
    return [f"{flow} {event}" for flow in flows for event in scene.events if (flow, event) not in happened]


def audit(scene: Scene, hits: list[Hit], *, crowded: bool) -> list[str]:
    """What was broken; empty is what we want. `crowded`: leases may run out because nobody gets to renew them."""
    entries = scene.ledger.read()
    broken = [f"lost: {each}" for each in missing(scene)]
    broken += [f"{entry.flow}: {entry.detail}" for entry in entries if entry.what in ("broken", "error")]
    broken += [
        f"{flow} {event}: {count} times in the user's own table"
        for (flow, event), count in UserDatabase(scene).counts().items()
        if count != 1
    ]
    by_event: dict[tuple[str, str], list[Entry]] = defaultdict(list)
    for entry in entries:
        if entry.what == "effect":
            by_event[entry.flow, entry.event].append(entry)
    ends = {entry.run: entry.detail for entry in entries if entry.what == "end" and entry.run}
    for (flow, event), effects in by_event.items():
        if len({effect.detail for effect in effects}) > 1:
            broken.append(f"{flow} {event}: a sink that honours the key sees {len(effects)} keys")
        if flow in SERVICE_FLOWS:
            found = _of_service(scene, effects, hits, crowded=crowded)
        else:
            found = _of_client(effects, ends, hits)
        broken += [f"{flow} {event}: {each}" for each in found]
    if scene.kind == "sqlite":
        with closing(sqlite3.connect(scene.file)) as file:
            damage = file.execute("PRAGMA integrity_check").fetchall()
        if damage != [("ok",)]:
            broken.append(f"the file is damaged: {damage[:3]}")
    return broken


def _of_client(effects: list[Entry], ends: dict[str, str], hits: list[Hit]) -> Iterator[str]:
    """A run that was told that it is recorded is the only one; any other was killed, or told that it is not."""
    told = Counter(ends.get(effect.run, "none") for effect in effects)
    if told["recorded"] > 1:
        yield f"ran {told['recorded']} times, and each was told that it is recorded"
    for effect in effects:
        if effect.run not in ends and not any(hit.group == effect.group for hit in hits):
            yield f"an effect in process group {effect.group} has no end, and nobody hit it"
    for word in set(told) - {"recorded", "unrecorded", "lost", "none"}:
        yield f"ran, and was answered {word}"


def _of_service(scene: Scene, effects: list[Entry], hits: list[Hit], *, crowded: bool) -> Iterator[str]:
    """An effect is repeated only where a process was hit that had the event in hand."""
    for one, two in pairwise(effects):
        if crowded and two.at_ns - one.at_ns >= LEASE_S * 0.9e9:
            continue
        if not any(_explains(scene, hit, one, two) for hit in hits):
            groups = f"process groups {one.group} and {two.group}"
            yield f"happened twice, {(two.at_ns - one.at_ns) / 1e9:.3f} s apart, in {groups}; neither was hit"


def _explains(scene: Scene, hit: Hit, one: Entry, two: Entry) -> bool:
    if hit.to_ns < one.at_ns - 10**9 or hit.from_ns > two.at_ns:
        return False  # it was over before the first began, or began after the second
    # A process that is stopped while it writes to SQLite stops all other writers, too.
    return hit.group in (0, one.group, two.group) or scene.kind == "sqlite"
