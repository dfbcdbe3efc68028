"""Batches that overlap, and rows that appear while a statement runs."""

import contextlib
import os
import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest

from semel.core.commands import Claim, Granted, Mark, Settle
from semel.core.ids import digest
from semel.errors import StoreUnavailable
from semel.stores.postgres import PostgresStore, queries
from semel.stores.postgres import batch as batching
from semel.stores.postgres.batch import RACES_MAX
from semel.types import Busy, Completed, Lost
from tests.services import postgres
from tests.stores.postgres import places
from tests.waiting import await_true

MINUTE_US = 60 * 1_000_000
CALLERS = 6
KEYS = [f"key {number}" for number in range(1500)]


class Counting(PostgresStore):
    """Counts the deadlocks that the server had to resolve."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.deadlocks = 0

    def _converse(self, line: Any, said: Any) -> Any:
        try:
            return super()._converse(line, said)
        except psycopg.errors.DeadlockDetected:
            self.deadlocks += 1
            raise


class Unsorted(Counting):
    """Leaves the items in the order of the caller."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        ordered = re.compile(r"ORDER BY (?:[ci]\.)?digest")
        for name in ("claim", "settle"):
            assert ordered.search(self.statements[name])
        self.statements = {name: ordered.sub("", text) for name, text in self.statements.items()}


def attack(stores: Sequence[Counting], patience_s: float = 60) -> int:
    """Claim, settle and mark the same keys from all sides; one winner per key, whatever it takes."""
    barrier = threading.Barrier(CALLERS, timeout=patience_s)

    def caller(number: int) -> tuple[int, int]:
        store = stores[number % len(stores)]
        sent = [Claim(("", "c", key), os.urandom(16), MINUTE_US, MINUTE_US) for key in KEYS]
        if number % 2:
            sent.reverse()
        barrier.wait()
        won = [
            (claim, answer)
            for claim, answer in zip(sent, store.send(sent), strict=True)
            if isinstance(answer, Granted)
        ]
        # Everybody ends everybody's claims: those of others are lost, and locked all the same.
        settles = [Settle(each.id, each.owner, 1, "released") for each in sent]
        for claim, answer in won:
            settles[sent.index(claim)] = Settle(
                claim.id, claim.owner, answer.fence, "done", window_us=MINUTE_US
            )
        barrier.wait()
        ended = store.send(settles)
        assert sum(isinstance(answer, Completed) for answer in ended) == len(won)
        assert sum(isinstance(answer, Lost) for answer in ended) == len(sent) - len(won)
        barrier.wait()
        (marked,) = store.send([Mark("", "m", [each.id[2] for each in sent], MINUTE_US)])
        return len(won), sum(marked.firsts)

    for store in stores:
        store.open()
    try:
        with ThreadPoolExecutor(CALLERS) as threads:
            results = list(threads.map(caller, range(CALLERS)))
    finally:
        for store in stores:
            store.close()
    assert [sum(column) for column in zip(*results, strict=True)] == [len(KEYS), len(KEYS)]
    return sum(store.deadlocks for store in stores)


def counting(kind: type[Counting], folder: Path) -> Counting:
    at, _, rest = postgres.place(folder).partition("?")
    schema = rest.partition("&")[0].removeprefix("schema=")
    return kind(at, schema=schema, pool_max=8, wait_s=60)


def test_overlapping_batches_in_opposite_order_never_deadlock(tmp_path: Path) -> None:
    assert attack([counting(Counting, tmp_path), counting(Counting, tmp_path)]) == 0


@pytest.mark.slow
def test_the_same_batches_deadlock_when_nobody_sorts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "sorted", lambda found, **_: list(found), raising=False)
    stores = [counting(Unsorted, tmp_path), counting(Unsorted, tmp_path)]
    # So many that somebody comes late to the barrier, or has no more tries.
    with contextlib.suppress(threading.BrokenBarrierError, StoreUnavailable):
        attack(stores, patience_s=10)
    assert sum(store.deadlocks for store in stores) > 0


@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_a_row_that_appears_after_the_snapshot_is_looked_at_again(
    place: str, store: PostgresStore, ending: str
) -> None:
    mine = Claim(("", "c", "raced"), os.urandom(16), MINUTE_US, MINUTE_US)
    store.send([Claim(("", "c", "warm"), os.urandom(16), MINUTE_US, MINUTE_US)])
    answers: list[Any] = []
    rival = psycopg.connect(place.partition("?")[0])
    schema = store.place.schema
    now = "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
    rival.execute(
        f"INSERT INTO {schema}.records (digest, state, owner, fence, lease_until, attempt, expires_at, consumer_id)"
        f" VALUES (%s, 0, '\\x11', {now}, {now} + 60000000, 1, {now} + 120000000, 1)",
        (str(_uuid(mine)),),
    )  # not committed: our statement does not see it, and must wait for it
    caller = threading.Thread(target=lambda: answers.extend(store.send([mine])))
    caller.start()
    assert await_true(lambda: blocked(place), 10)
    getattr(rival, ending)()
    caller.join(10)
    rival.close()
    assert isinstance(answers[0], Busy if ending == "commit" else Granted)


def test_a_key_that_others_keep_changing_is_busy_in_the_end() -> None:
    item = Claim(("", "c", "k"), b"o" * 16, MINUTE_US, MINUTE_US)
    batch = batching.PostgresBatch([item], {("", "c"): 1})
    (stage,) = batching.stages(batch)
    said = queries.talk_of(batch, stage)
    asked = [next(said).name]
    with contextlib.suppress(StopIteration):
        while len(asked) < 100:
            asked.append(said.send([]).name)  # neither won nor there: raced for
    assert asked == ["claim"] * RACES_MAX
    assert isinstance(batch.answers[0], Busy)


def blocked(place: str) -> bool:
    return bool(
        postgres.execute(
            place,
            "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND application_name = 'semel'",
        )
    )


def _uuid(claim: Claim) -> str:
    return digest(claim.id).hex()


def test_takeovers_raced_for_by_threads_have_one_winner_each(tmp_path: Path) -> None:
    store = places.make(tmp_path)
    store.open()
    fences: dict[str, list[int]] = {}
    try:
        for _ in range(10):
            barrier = threading.Barrier(CALLERS, timeout=30)

            def caller(_number: int, barrier: threading.Barrier = barrier) -> list[tuple[str, int]]:
                claims = [Claim(("", "c", f"k{n}"), os.urandom(16), 1, MINUTE_US) for n in range(20)]
                barrier.wait()
                return [
                    (claim.id[2], answer.fence)
                    for claim, answer in zip(claims, store.send(claims), strict=True)
                    if isinstance(answer, Granted)
                ]

            with ThreadPoolExecutor(CALLERS) as threads:
                for won in threads.map(caller, range(CALLERS)):
                    for key, fence in won:
                        fences.setdefault(key, []).append(fence)
    finally:
        store.close()
    assert all(len(set(found)) == len(found) for found in fences.values())
