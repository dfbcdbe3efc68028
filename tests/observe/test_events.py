"""Each thing that happens is told once, in order, in both colours; nobody listening costs next to nothing."""

import logging
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import semel
from semel.client.claims import Claimed
from semel.core.commands import Claim, Settle
from semel.errors import StoreUnavailable
from semel.observe import events
from semel.stores.memory.store import MemoryStore
from semel.testing import ManualClock
from tests.observe.listening import Heard, listened

NO_WAIT = semel.Policy(wait_s=0)


def one() -> int:
    return 1


def fail() -> None:
    raise ValueError("no")


def test_a_first_delivery_and_its_duplicate(colour: str) -> None:
    with listened(colour, "memory:") as (once, heard):
        once.run("a", one)
        assert heard.names() == ["received", "claimed", "began", "ended", "completed"]
        assert {each.owner for each in heard.of(events.DeliveryEvent)} == {
            heard.only(events.ClaimedEvent).owner
        }
        assert heard.only(events.Began).handler.endswith(".one")
        heard.all.clear()
        once.run("a", one)
        assert heard.names() == ["received", "duplicate"]
        duplicate = heard.only(events.Duplicate)
        assert (duplicate.reason, duplicate.state, duplicate.suppressed) == ("redelivery", "done", True)
        assert 0 <= duplicate.lag_s < 60


def test_the_lag_is_measured_by_the_stores_clock() -> None:
    clock = ManualClock()
    heard = Heard()
    with semel.open(MemoryStore(clock=clock), consumer="billing", hooks=[heard]) as once:
        once.run("a", one)
        clock.advance(3600)
        once.run("b", one)  # from its answer the store's time is known
        once.run("a", one)
    assert heard.only(events.Duplicate).lag_s == pytest.approx(3600, abs=1)


def test_failures_have_their_own_events(colour: str) -> None:
    with listened(colour, "memory:", policy=semel.Policy(permanent=(ValueError,))) as (once, heard):
        once.run("a", fail)
        once.run("a", fail)
    assert heard.names() == ["received", "claimed", "began", "ended", "failed", "received", "duplicate"]
    assert isinstance(heard.only(events.FailedEvent).error, ValueError)
    assert heard.only(events.Duplicate).state == "failed"


def test_a_passing_failure_releases(colour: str) -> None:
    with listened(colour, "memory:") as (once, heard):
        once.run("a", fail)
        assert heard.names()[-1] == "released"
        heard.all.clear()
        once.run("a", one)
        assert heard.only(events.ClaimedEvent).attempt == 2
        assert heard.names()[-1] == "completed"


def test_another_payload_is_a_reused_key(colour: str) -> None:
    with listened(colour, "memory:", policy=semel.Policy(fingerprint=lambda body: body)) as (once, heard):
        once.run("a", lambda body: 1, b"x")
        once.run("a", lambda body: 1, b"y")
    assert heard.only(events.Duplicate).reason == "reuse"


def test_a_source_that_knows_says_why(colour: str) -> None:
    deliveries = [
        semel.Delivery(key="a", body=1, source="orders", redelivered=None),
        semel.Delivery(key="b", body=1, source="orders"),
    ]
    with listened(colour, "memory:") as (once, heard):
        once.run_many(deliveries, lambda body: body)
        heard.all.clear()
        once.run_many([semel.Delivery(key="a", body=1, source="orders", redelivered=True)], lambda body: body)
        once.run_many(
            [semel.Delivery(key="b", body=1, source="orders", redelivered=False)], lambda body: body
        )
    assert [each.reason for each in heard.of(events.Duplicate)] == ["redelivery", "producer"]
    assert {each.source for each in heard.of(events.DeliveryEvent)} == {"orders"}


def test_copies_in_one_batch_are_received_and_raced(colour: str) -> None:
    with listened(colour, "memory:") as (once, heard):
        once.run_many([semel.Delivery(key=key, body=1) for key in "aabb"], lambda body: body)
    assert len(heard.of(events.Received)) == 4
    assert len(heard.of(events.CompletedEvent)) == 2
    assert [(each.key, each.reason) for each in heard.of(events.Duplicate)] == [("a", "race"), ("b", "race")]


def test_a_concurrent_duplicate_is_a_race() -> None:
    heard, inside, go_on = Heard(), threading.Event(), threading.Event()

    def slow() -> int:
        inside.set()
        go_on.wait(30)
        return 1

    with semel.open("memory:", consumer="billing", hooks=[heard]) as once:
        first = threading.Thread(target=once.run, args=("a", slow))
        first.start()
        inside.wait(30)
        assert isinstance(once.using(NO_WAIT).run("a", one), semel.Busy)
        turned_away = heard.only(events.Duplicate)
        second = threading.Thread(target=once.run, args=("a", one))
        second.start()
        go_on.set()
        first.join()
        second.join()
    assert (turned_away.reason, turned_away.state) == ("race", "claimed")
    assert [each.reason for each in heard.of(events.Duplicate)] == ["race", "race"] or [
        each.reason for each in heard.of(events.Duplicate)
    ] == ["race", "redelivery"]  # the second may come when the first is done already
    assert len(heard.of(events.CompletedEvent)) == 1


def test_the_plain_verbs_are_told(colour: str) -> None:
    with listened(colour, "memory:") as (once, heard):
        claim = once.claim("a")
        once.claim("a")
        once.complete(claim, 1)
        once.complete(claim, 1)
        lost = once.claim_many(["b", "b"])[0]
        once.records.forget("b", force=True)
        once.complete(lost)
        once.release(once.claim("c"))
    assert heard.names() == [
        "received", "claimed", "received", "busy", "duplicate", "completed", "completed",
        "received", "claimed", "lost", "received", "claimed", "released",
    ]  # fmt: skip


def test_marks_are_told(colour: str) -> None:
    with listened(colour, "memory:", mode="mark") as (once, heard):
        assert [once.mark("a"), once.mark("a"), once.mark("a")] == [True, False, False]
        once.mark_many(["b", "b"])
    assert heard.names() == [
        "received", "marked", "received", "duplicate", "received", "duplicate",
        "received", "marked", "received", "duplicate",
    ]  # fmt: skip


def test_an_inbox_is_told(tmp_path: Path) -> None:
    heard = Heard()
    path = tmp_path / "app.db"
    with semel.open(f"sqlite:///{path}", consumer="wallet", mode="inbox", hooks=[heard]) as wallet:
        connection = sqlite3.connect(path, isolation_level=None)
        for _ in range(2):
            connection.execute("BEGIN IMMEDIATE")
            wallet.inbox(connection).first("a")
            connection.execute("COMMIT")
        connection.close()
    assert heard.names() == ["received", "marked", "received", "duplicate"]


def test_observe_mode_counts_what_it_would_have_stopped(colour: str) -> None:
    with listened(colour, "memory:", mode="observe") as (once, heard):
        once.run("a", one)
        once.run("a", one)
    assert len(heard.of(events.CompletedEvent)) == 2
    assert heard.only(events.Duplicate).suppressed is False


def test_quarantine_and_its_duplicates(colour: str) -> None:
    with listened(colour, "memory:", mode="quarantine") as (once, heard):
        once.run("a", fail)
        once.run("a", one)
    assert heard.names()[-3:] == ["quarantined", "received", "duplicate"]
    assert heard.only(events.Duplicate).state == "unknown"


def test_a_swept_orphan_is_told(tmp_path: Path) -> None:
    heard = Heard()
    store = f"sqlite:///{tmp_path}/events.db"
    with semel.open(store, consumer="billing", hooks=[heard]) as once:
        claim = once.claim("a", journal={"n": 1})
        assert isinstance(claim, Claimed)
        once.release(claim)
        heard.all.clear()
        assert len(once.sweep(lambda payload: payload)) == 1
    assert heard.names() == ["received", "claimed", "began", "ended", "completed"]


class Trouble(MemoryStore):
    """A store that can be told to give no answers, or to lose what it has."""

    down = False
    forgets = False

    def send(self, items: Any, /) -> Any:
        if self.down:
            raise StoreUnavailable("down")
        if self.forgets and isinstance(items[0], Settle):
            self._records.clear()
        return super().send(items)


def test_a_store_without_an_answer(colour: str) -> None:
    store = Trouble()
    with listened(colour, store, policy=NO_WAIT) as (once, heard):
        once.run("a", one)
        store.down = True
        once.run("b", one)
    assert heard.names()[-2:] == ["received", "unreachable"]
    assert {failed.op for failed in heard.of(events.StoreFailed)} == {"claim"}


def test_round_trips_and_clean_up_are_told(colour: str) -> None:
    with listened(colour, "memory:") as (once, heard):
        once.run_many([semel.Delivery(key=str(n), body=n) for n in range(10)], lambda body: body)
        once.records.purge()
        once.records.purge(dry_run=True)
        once.records.stats()
    sent = {each.op: each for each in heard.of(events.StoreSent)}
    assert sent["claim"].items == 10
    assert all(each.duration_s > 0 for each in sent.values())
    assert heard.only(events.PurgedEvent).count == 0
    assert heard.only(events.Counted).stats.states["done"] == 10


def test_an_interrupt_drops_the_delivery() -> None:
    heard = Heard()
    with (
        semel.open("memory:", consumer="billing", hooks=[heard]) as once,
        pytest.raises(KeyboardInterrupt),
    ):
        once.run("a", lambda: (_ for _ in ()).throw(KeyboardInterrupt()))
    assert heard.names()[-1] == "released"


def test_a_hook_that_raises_is_reported_once_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    heard = Heard()

    def broken(happening: events.HookEvent) -> None:
        raise RuntimeError("oops")

    with semel.open("memory:", consumer="billing", hooks=[broken, heard]) as once:
        assert once.run("a", one) == semel.Done(1)
    assert heard.names()[-1] == "completed"
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_a_lease_that_cannot_be_kept_is_told() -> None:
    heard, store = Heard(), Trouble()
    told = threading.Event()

    def listen(happening: events.HookEvent) -> None:
        heard(happening)
        if isinstance(happening, events.Expired):
            told.set()

    def handler() -> bool:
        store.down = True
        return told.wait(30)

    with semel.open(store, consumer="billing", lease="200ms", hooks=[listen]) as once:
        once.run("a", handler)
        store.down = False
    assert (heard.only(events.Expired).consumer, heard.only(events.Expired).key) == ("billing", "a")
    assert "unrecorded" in heard.names()


def test_without_hooks_nothing_of_it_is_loaded() -> None:
    script = (
        "import semel, sys\n"
        "with semel.open('memory:', consumer='c') as once:\n"
        "    once.run('a', int)\n"
        "print([name for name in sys.modules if name.startswith('semel.observe')])"
    )
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_a_lost_record_is_told() -> None:
    heard, store = Heard(), Trouble()
    with semel.open(store, consumer="billing", hooks=[heard]) as once:
        store.forgets = True
        once.run("a", one)
    assert len(heard.of(events.StoreLost)) == 1


def test_claims_carry_nothing_unless_a_hook_wants_it() -> None:
    sent: list[Any] = []

    class Noting(MemoryStore):
        def send(self, items: Any, /) -> Any:
            sent.extend(items)
            return super().send(items)

    with semel.open(Noting(), consumer="billing", hooks=[Heard()]) as once:
        once.run("a", one)
        once.run("a", one)
    assert [item.meta for item in sent if isinstance(item, Claim)] == [None, None]
    assert [type(item).__name__ for item in sent][-3:] == ["Claim", "Settle", "Claim"]
