"""Every store against the machine, in both colours: the same random batches, and every answer to the microsecond."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace

from semel.core.commands import (
    Answer,
    Count,
    Item,
    Known,
    Mark,
    Marked,
    Page,
    Purge,
    Purged,
    RecordItem,
    Scan,
)
from semel.core.machine import decide, standing
from semel.core.protocols import HasAsyncTwin, Store
from semel.testing import ManualClock
from semel.types import Id, Record
from tests.contract.dict_store import DictStore
from tests.contract.scripts import BATCH_MAX, S, Script
from tests.contract.stores import KINDS, SLOTS, Kind
from tests.server import places as servers
from tests.stores.shells import InLoop

SOAK = bool(os.environ.get("SEMEL_SOAK"))
OPERATIONS = 60_000 if SOAK else 2_500
"""On each store: more than 30,000 in a run over all of them."""
PAUSES_US = (0, 0, 1, S, S, 4 * S, 10 * S, 31 * S, 70 * S)
WITH_TWIN = ("postgres", "postgres-timed", "redis", "http", "redis-over-postgres")
"""They have a native twin for an event loop; the others run in a thread there, which is the sync one again."""
KNOWN_US = 3700 * S
"""Now and then so much time passes that every window is over."""


class Machine:
    """The specification by itself: a dict, and `decide`."""

    def __init__(self) -> None:
        self.records: dict[Id, Record] = {}
        self.marks: dict[str, int] = {}

    def answer(self, item: Item, now_us: int) -> Any:
        if isinstance(item, Mark):
            firsts = [self.marks.get(key, 0) <= now_us for key in item.keys]
            for key, first in zip(item.keys, firsts, strict=True):
                if first or item.refresh:
                    self.marks[key] = max(self.marks.get(key, 0), now_us + item.window_us)
            return Marked(firsts)
        if isinstance(item, Purge):
            return Purged
        answer, written = decide(
            self.records.get(cast("RecordItem", item).id), cast("RecordItem", item), now_us
        )
        if written is not None:
            self.records[written.id] = written
        return answer


def same(answer: Answer, expected: Any) -> bool:
    """Whether they agree. A cache may answer without the time that is left."""
    if expected is Purged:
        return isinstance(answer, Purged)
    if isinstance(answer, Known) and isinstance(expected, Known) and not answer.rest_us:
        expected = replace(expected, rest_us=0)
    return bool(answer == expected or plain(answer) == plain(expected))


def plain(answer: Any) -> Any:
    """A record without what a store need not keep: the lease of what is settled."""
    if isinstance(answer, Record) and answer.state != "claimed":
        return replace(answer, lease_until_us=0)
    return answer


def in_colour(kind: Kind, colour: str, folder: Path, clock: ManualClock) -> Store:
    make = servers.make_timed if kind.name == "http" else kind.make
    store = make(folder, clock)
    if colour == "async":
        assert isinstance(store, HasAsyncTwin)
        return InLoop(store.twin())
    return store


def ask(store: Store, kind: Kind, items: Sequence[Item]) -> tuple[list[Answer], list[int]]:
    """The answers, and the store's time of each. A service counts beside the call: its store is asked."""
    if kind.name == "http":
        answers = store.send(items)
        return answers, [servers.time_of(item) for item in items]
    *answers, stats = store.send([*items, Count()])
    return answers, [stats.now_us] * len(items)


def compare(kind: Kind, colour: str, folder: Path, seed: str, operations: int) -> None:
    clock = ManualClock()
    store = in_colour(kind, colour, folder, clock)
    machine, script = Machine(), Script(seed)
    store.open()
    try:
        done, now_us = 0, clock.now_us()
        while done < operations:
            items = script.batch(now_us)
            if kind.without >= SLOTS:  # a mark in a partition keeps its window
                items = [replace(item, refresh=False) if isinstance(item, Mark) else item for item in items]
            answers, times_us = ask(store, kind, items)
            for number, (item, answer, now_us) in enumerate(zip(items, answers, times_us, strict=True)):
                expected = machine.answer(item, now_us)
                assert same(answer, expected), (
                    f"seed {seed}, after {done} items, item {number} of {items}: {answer} not {expected}"
                )
            script.hear(items, answers)
            done += len(items)
            pause_us = KNOWN_US if script.chance.random() < 0.02 else script.chance.choice(PAUSES_US)
            clock.advance(us=pause_us + 2 * BATCH_MAX)
        listed, now_us = records_of(store)
        assert listed == standing_of(machine.records, now_us)
    finally:
        store.close()


def records_of(store: Store) -> tuple[dict[Id, Record], int]:
    """All that stands in a store by its own listing, and its time."""
    (stats,) = store.send([Count()])
    now_us: int = stats.now_us
    found: dict[Id, Record] = {}
    scan = Scan(limit=50)
    while True:
        (page,) = store.send([scan])
        assert isinstance(page, Page)
        found.update((record.id, record) for record in page.records if record.consumer != "marks")
        if page.cursor is None:
            return standing_of(found, now_us), now_us
        scan = Scan(limit=50, cursor=page.cursor)


def standing_of(records: dict[Id, Record], now_us: int) -> dict[Id, Record]:
    stand = {record_id: standing(record, now_us) for record_id, record in records.items()}
    return {
        record_id: plain(record)
        for record_id, record in stand.items()
        if record is not None and record.state != "forgotten"
    }


def cases() -> list[Any]:
    found = []
    for kind in KINDS:
        if kind.in_loop or kind.two_clocks:
            continue
        marks = [pytest.mark.service] if kind.needs_service else []
        found.append(pytest.param(kind, "sync", id=f"{kind.name}-sync", marks=marks))
        if kind.name in WITH_TWIN:
            found.append(pytest.param(kind, "async", id=f"{kind.name}-async", marks=marks))
    return found


@pytest.mark.timeout(0 if SOAK else 300)
@pytest.mark.parametrize(("kind", "colour"), cases())
def test_every_answer_is_the_machines(kind: Kind, colour: str, tmp_path: Path) -> None:
    seed = os.urandom(4).hex() if SOAK else "once"
    compare(kind, colour, tmp_path, seed, OPERATIONS)


def test_a_store_that_differs_once_is_found_out(tmp_path: Path) -> None:
    class Forgetful(DictStore):
        def send(self, items: Sequence[Item], /) -> list[Answer]:
            answers = super().send(items)
            return [
                Marked([True] * len(each.firsts)) if isinstance(each, Marked) else each for each in answers
            ]

    broken = KINDS[0]._replace(name="forgetful", make=lambda _folder, clock: Forgetful(clock))
    with pytest.raises(AssertionError, match="not Marked"):
        compare(broken, "sync", tmp_path, "once", OPERATIONS)


def test_a_run_is_long_enough() -> None:
    assert OPERATIONS * len(cases()) >= 30_000
