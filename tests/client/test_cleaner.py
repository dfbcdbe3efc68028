"""The cleaner of a service, and what a consumer declares of its ids, on stores without partitions."""

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import semel
from semel.client import PurgeResult
from semel.core.commands import Purge, Purged
from semel.errors import IdsMismatch, PolicyInvalid, StoreUnavailable

HOLD = semel.Policy(late="hold")
GUARD_S = 60.0


class Fake:
    """Records to purge, in batches that the test gives."""

    def __init__(self, *answers: Purged | Exception) -> None:
        self.answers = list(answers)
        self.limits: list[int] = []

    @property
    def records(self) -> "Fake":
        return self

    def purge(self, *, limit: int = 0, dry_run: bool = False) -> Purged:
        self.limits.append(limit)
        answer = self.answers.pop(0) if self.answers else Purged(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


class AsyncFake:
    def __init__(self, fake: Fake) -> None:
        self.fake = fake

    @property
    def records(self) -> "AsyncFake":
        return self

    async def purge(self, *, limit: int = 0, dry_run: bool = False) -> Purged:
        await asyncio.sleep(0)
        return self.fake.purge(limit=limit, dry_run=dry_run)


BATCHES = (Purged(5000, 90.0, more=True), Purged(5000, 70.0, more=True), Purged(7, 1.0, partitions=2))
WHOLE = PurgeResult(10007, 2, 90.0)


def collect(rounds: list[PurgeResult], count: int) -> tuple[threading.Event, Callable[[PurgeResult], None]]:
    enough = threading.Event()

    def done(made: PurgeResult) -> None:
        rounds.append(made)
        if len(rounds) >= count:
            enough.set()

    return enough, done


def test_a_round_goes_on_till_nothing_is_left() -> None:
    fake = Fake(*BATCHES)
    assert semel.Cleaner(fake).clean() == WHOLE
    assert fake.limits == [5000] * 3


def test_who_else_cleans_is_told() -> None:
    assert semel.Cleaner(Fake(Purged(0, cleaner="semel pid 7"))).clean().cleaner == "semel pid 7"


def test_a_cleaner_runs_in_a_thread_and_survives_an_outage() -> None:
    rounds: list[PurgeResult] = []
    enough, done = collect(rounds, 2)
    with semel.Cleaner(Fake(StoreUnavailable("down"), *BATCHES), every=0.1, done=done) as cleaner:
        cleaner.start()  # once is enough
        assert sum(thread.name == "semel-cleaner" for thread in threading.enumerate()) == 1
        assert enough.wait(GUARD_S)
    assert rounds[0] == WHOLE
    assert all(thread.name != "semel-cleaner" for thread in threading.enumerate())
    cleaner.close()


def test_closing_ends_a_round_after_its_batch() -> None:
    entered, go_on = threading.Event(), threading.Event()

    class Endless(Fake):
        def purge(self, *, limit: int = 0, dry_run: bool = False) -> Purged:
            entered.set()
            go_on.wait(GUARD_S)
            self.limits.append(limit)
            return Purged(limit, more=True)

    fake = Endless()
    cleaner = semel.Cleaner(fake)
    cleaner.start()
    assert entered.wait(GUARD_S)
    closer = threading.Thread(target=cleaner.close)
    closer.start()
    assert cleaner._stop.wait(GUARD_S)
    go_on.set()
    closer.join(GUARD_S)
    assert not closer.is_alive()
    assert len(fake.limits) == 1


def test_the_same_in_an_event_loop() -> None:
    async def main() -> None:
        rounds: list[PurgeResult] = []
        enough = asyncio.Event()

        def done(made: PurgeResult) -> None:
            rounds.append(made)
            enough.set()

        fake = Fake(StoreUnavailable("down"), *BATCHES)
        async with semel.AsyncCleaner(AsyncFake(fake), every=0.1, done=done) as cleaner:
            cleaner.start()
            await asyncio.wait_for(enough.wait(), GUARD_S)
        assert rounds[0] == WHOLE
        await cleaner.close()
        assert all(task.get_name() != "semel-cleaner" for task in asyncio.all_tasks())

    asyncio.run(main())


def test_too_often_is_refused() -> None:
    for kind in (semel.Cleaner, semel.AsyncCleaner):
        with pytest.raises(PolicyInvalid, match="too often"):
            kind(Fake(), every="1ms")  # type: ignore[arg-type]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_has_no_cleaner_till_it_starts_one() -> None:
    with semel.Cleaner(Fake(), every="1h") as cleaner:
        child = os.fork()
        if not child:
            status = 1
            try:
                cleaner.close()  # must not wait for a thread that is not here
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_every_store_holds_a_consumer_to_its_ids(kind: str, tmp_path: Path) -> None:
    url = "memory:ids" if kind == "memory" else f"sqlite:///{tmp_path}/events.db"
    key = semel.keys.uuid7("billing")
    with semel.open(url, consumer="events", ids="uuid7", policy=HOLD) as once:
        assert once.run(key, lambda: 1) == semel.Done(1)
        assert once.run(key, lambda: 2) == semel.Done(1, replayed=True)
        with pytest.raises(semel.errors.KeyInvalid):
            once.run("order-17", lambda: 3)
        with pytest.raises(semel.errors.KeyInvalid):
            once.records.lookup("order-17")
        for other in ("ulid", None):
            refused: Any = semel.open(url, consumer="events", ids=other, policy=HOLD)
            with pytest.raises(IdsMismatch, match="uuid7"):
                refused.claim(key)
            refused.close()
        with semel.open(url, consumer="plain", policy=HOLD) as plain:
            plain.run("order-17", lambda: 1)
        refused = semel.open(url, consumer="plain", ids="ulid", policy=HOLD)
        with pytest.raises(IdsMismatch, match="None"):
            refused.records.stats()
        refused.close()


def test_purges_are_of_five_thousand() -> None:
    assert Purge().limit == 5000
