"""What an intake does with an event, from its first arrival to its end, in one process."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

import semel
from semel import Policy
from semel.core.commands import Granted
from semel.core.protocols import Store
from semel.errors import AttemptsExhausted, PolicyInvalid, StoreUnavailable, UsageError
from semel.ingest.intake import Event, Intake, IntakeLimits
from semel.ingest.receipts import Receipt
from semel.observe.events import DeadLettered, HookEvent
from semel.observe.limited_log import BURST, LimitedLog
from semel.observe.prometheus import PrometheusHook
from semel.stores.sqlite import SqliteStore
from tests.services import redis
from tests.waiting import until

pytestmark = pytest.mark.anyio


class Work:
    """A handler that can be held up, and that fails as often as it is told."""

    def __init__(self, *errors: Exception) -> None:
        self.begun: list[str] = []
        self.ended: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.errors = list(errors)

    async def __call__(self, event: Event) -> None:
        self.begun.append(event.id)
        await self.gate.wait()
        if self.errors:
            raise self.errors.pop(0)
        self.ended.append(event.id)


def event(name: str = "evt-1", body: bytes = b'{"amount": 1}') -> Event:
    return Event(id=name, type="paid", body=body)


def place(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'records.db'}"


@asynccontextmanager
async def taking(
    store: str | Store,
    work: Any,
    *,
    policy: Policy | None = None,
    mode: Any = "lease",
    lease: str = "30s",
    **options: Any,
) -> AsyncIterator[Intake]:
    options.setdefault("pace", IntakeLimits(sweep_s=0.05))
    once = semel.aopen(
        store, consumer="intake", lease=lease, mode=mode, policy=policy or Policy(retry_delay_s=0.02)
    )
    try:
        async with Intake(once, work, **options) as intake:
            yield intake
    finally:
        await once.close()


async def test_accepted_once_then_a_duplicate(tmp_path: Path) -> None:
    work = Work()
    async with taking(place(tmp_path), work) as intake:
        assert await intake.take(event()) == Receipt("accepted")
        assert await intake.take(event()) == Receipt("duplicate")
        await until(lambda: work.ended == ["evt-1"])
        assert await intake.take(event()) == Receipt("duplicate")
    assert work.begun == ["evt-1"]


async def test_duplicates_do_not_pile_up_while_the_first_runs(tmp_path: Path) -> None:
    work = Work()
    work.gate.clear()
    async with taking(place(tmp_path), work) as intake:
        await intake.take(event())
        receipts = await asyncio.gather(*(intake.take(event()) for _ in range(500)))
        assert {receipt.status for receipt in receipts} == {"duplicate"}
        await until(lambda: intake.pending == 1)
        work.gate.set()


async def test_who_claimed_first_is_kept_with_the_record(tmp_path: Path) -> None:
    async with taking(place(tmp_path), Work(), instance="blue-7") as intake:
        await intake.take(event())
        record = await intake._once.records.lookup("evt-1")
    assert record is not None
    assert record.meta == b'{"instance":"blue-7"}'
    assert record.event_type == "paid"


async def test_two_instances_of_one_process_have_names_of_their_own(tmp_path: Path) -> None:
    async with taking(place(tmp_path), Work()) as one, taking(place(tmp_path), Work()) as other:
        assert one.instance != other.instance


async def test_whoever_stops_waiting_does_not_stop_the_event(tmp_path: Path) -> None:
    work = Work()
    async with taking(place(tmp_path), work) as intake:
        waiting = asyncio.create_task(intake.take(event()))
        await asyncio.sleep(0)
        waiting.cancel()
        await until(lambda: work.ended == ["evt-1"])


async def test_an_error_is_tried_again_and_again_until_it_is_over(tmp_path: Path) -> None:
    work = Work(ConnectionError("one"), ConnectionError("two"))
    async with taking(place(tmp_path), work) as intake:
        await intake.take(event())
        await until(lambda: work.ended == ["evt-1"])
        assert await intake.take(event()) == Receipt("duplicate")
    assert work.begun == ["evt-1"] * 3


async def test_the_undertaker_comes_before_the_record_says_failed(tmp_path: Path) -> None:
    dead_lettered: list[tuple[Any, str, str]] = []
    async with taking(
        place(tmp_path), Work(*[ValueError("bad")] * 9), policy=Policy(permanent=(ValueError,)), dead=None
    ) as intake:

        async def dead_letter(given: Event, error: Exception) -> None:
            record = await intake._once.records.lookup(given.id)
            assert record is not None
            dead_lettered.append((given.payload, str(error), record.state))

        intake._dead = dead_letter
        await intake.take(event())
        await until(lambda: dead_lettered)
        await until(lambda: not intake.pending)
        record = await intake._once.records.lookup("evt-1")
        assert await intake.take(event()) == Receipt("duplicate")
    assert dead_lettered == [({"amount": 1}, "bad", "claimed")]
    assert record is not None
    assert record.state == "failed"


async def test_given_up_after_so_many_attempts_and_asked_again_if_it_could_not_be_buried(
    tmp_path: Path,
) -> None:
    dead_lettered: list[str] = []

    async def dead_letter(given: Event, error: Exception) -> None:
        assert isinstance(error, AttemptsExhausted)
        dead_lettered.append(str(error))
        if len(dead_lettered) == 1:
            raise OSError("the queue is closed")

    work = Work(*[ConnectionError("no")] * 99)
    async with taking(
        place(tmp_path), work, policy=Policy(max_attempts=2, retry_delay_s=0.02), dead=dead_letter
    ) as intake:
        await intake.take(event())
        await until(lambda: len(dead_lettered) == 2)
        await until(lambda: not intake.pending)
        record = await intake._once.records.lookup("evt-1")
    assert work.begun == ["evt-1"] * 2
    assert dead_lettered == [
        "attempt 2 of 2 failed: ConnectionError: no",
        "attempt 3 of 2 allowed: ConnectionError: no",  # the handler's error, also when it is called again
    ]
    assert record is not None
    assert record.state == "failed"
    assert [each.kind for each in record.errors][:2] == ["builtins.ConnectionError"] * 2


@pytest.mark.parametrize("permanent", [(), (Exception,)], ids=["no attempts left", "permanent"])
async def test_a_dead_letter_callback_that_fails_is_reported_and_gives_no_event_up(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    permanent: tuple[type[Exception], ...],
) -> None:
    monkeypatch.setattr("semel.ingest.intake._log", LimitedLog(logging.getLogger("semel")))
    registry, closed, calls, written = CollectorRegistry(), True, 0, 0

    async def dead_letter(given: Event, error: Exception) -> None:
        nonlocal calls
        calls += 1
        if closed:
            raise OSError("the queue is closed")

    def count(happened: HookEvent) -> None:
        nonlocal written
        written += isinstance(happened, DeadLettered)

    def stuck() -> float | None:
        return registry.get_sample_value("semel_dead_letters_stuck_total", {"consumer": "intake"})

    once = semel.aopen(
        place(tmp_path),
        consumer="intake",
        policy=Policy(max_attempts=1, retry_delay_s=0.001, permanent=permanent),
        hooks=[PrometheusHook(registry), count],
    )
    limits = IntakeLimits(sweep_s=0.05)
    work = Work(*[ConnectionError("no")] * 999)
    async with once, Intake(once, work, dead=dead_letter, pace=limits) as intake:
        await asyncio.gather(*(intake.take(event(f"evt-{number}")) for number in range(30)))
        await until(lambda: calls >= 30)
        assert stuck() == calls
        record = await once.records.lookup("evt-1")
        assert record is not None
        assert record.state in ("released", "claimed")  # never failed before its dead letter is written
        closed = False
        await until(lambda: written == 30)
    lines = [each.getMessage() for each in caplog.records if "callback failed for event" in each.getMessage()]
    assert 1 <= len(lines) <= BURST + 2  # ten at once, then ten a minute
    assert "OSError('the queue is closed') (given up for " in lines[0]
    assert "ConnectionError" in lines[0]


async def test_what_a_stop_interrupts_is_free_at_once_and_its_attempt_given_back(tmp_path: Path) -> None:
    work, other = Work(), Work()
    work.gate.clear()
    pace = IntakeLimits(concurrency=1, drain_s=0, sweep_s=0.05)
    async with taking(place(tmp_path), work, lease="30s", pace=pace) as intake:
        assert await intake.take(event("runs")) == Receipt("accepted")
        assert await intake.take(event("waits")) == Receipt("accepted")
        await until(lambda: work.begun == ["runs"])
    assert await intake.take(event("late")) == Receipt("busy", 1.0, "this instance is stopping")
    attempts: dict[str, int] = {}

    async def note(given: Event) -> None:
        attempts[given.id] = semel.current().attempt
        await other(given)

    async with taking(place(tmp_path), note, lease="30s"):
        await until(lambda: sorted(other.ended) == ["runs", "waits"])
    assert attempts == {"runs": 1, "waits": 1}


async def test_in_quarantine_what_has_not_begun_is_not_doubtful(tmp_path: Path) -> None:
    work = Work()
    work.gate.clear()
    pace = IntakeLimits(concurrency=1, drain_s=0)
    async with taking(place(tmp_path), work, mode="quarantine", pace=pace) as intake:
        await intake.take(event("runs"))
        await until(lambda: work.begun == ["runs"])
        await intake.take(event("waits"))
    async with semel.aopen(place(tmp_path), consumer="intake", mode="quarantine") as once:
        states = {record.key: record.state async for record in once.records.list()}
    assert states == {"runs": "unknown", "waits": "claimed"}


async def test_no_room_is_waited_for_as_long_as_the_caller_says(tmp_path: Path) -> None:
    work = Work()
    work.gate.clear()
    async with taking(place(tmp_path), work, pace=IntakeLimits(concurrency=1, pending_max=2)) as intake:
        await intake.take(event("a"))
        await intake.take(event("b"))
        assert (await intake.take(event("c"), hold_s=0)).status == "busy"
        waiting = asyncio.create_task(intake.take(event("d")))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        work.gate.set()
        assert (await waiting).status == "accepted"
        await until(lambda: sorted(work.ended) == ["a", "b", "d"])


async def test_an_event_is_held_while_the_store_is_away(tmp_path: Path) -> None:
    work = Work()
    with redis.own(tmp_path) as keeper:
        async with taking(keeper.url, work) as intake:
            keeper.stop()
            assert (await intake.take(event("told"), hold_s=0.1)).status == "busy"
            held = asyncio.create_task(intake.take(event("held")))
            await asyncio.sleep(0.2)
            assert not held.done()
            await asyncio.to_thread(keeper.start)
            assert await held == Receipt("accepted")
            await until(lambda: work.ended == ["held"])


async def test_an_intake_starts_before_its_store_does(tmp_path: Path) -> None:
    work = Work()
    with redis.own(tmp_path) as keeper:
        keeper.stop()
        async with taking(keeper.url, work) as intake:
            held = asyncio.create_task(intake.take(event()))
            await asyncio.to_thread(keeper.start)
            assert (await held).status == "accepted"
            await until(lambda: work.ended == ["evt-1"])


async def test_a_claim_whose_answer_was_lost_is_accepted_and_runs_at_once(tmp_path: Path) -> None:
    """It was answered as a duplicate of itself, and ran only when its lease was over."""

    class Lossy(SqliteStore):
        lost = 0

        def send(self, items: Any, /) -> Any:
            answers = super().send(items)
            if self.lost < 2 and any(isinstance(answer, Granted) for answer in answers):
                self.lost += 1
                raise StoreUnavailable("the answer was lost")
            return answers

    work, store = Work(), Lossy(tmp_path / "records.db")
    async with taking(store, work, lease="10m") as intake:
        assert await intake.take(event()) == Receipt("accepted")
        await until(lambda: work.ended == ["evt-1"])
        assert await intake.take(event()) == Receipt("duplicate")
    store.close()
    assert (store.lost, work.begun) == (2, ["evt-1"])


async def test_a_claim_without_a_journal_is_not_taken_for_a_duplicate(tmp_path: Path) -> None:
    """Its owner may die, and then nobody would have the payload."""
    work = Work()
    async with semel.aopen(place(tmp_path), consumer="intake", lease="300ms") as once:
        assert isinstance(await once.claim("evt-1"), semel.Claimed)
        async with taking(place(tmp_path), work) as intake:
            assert (await intake.take(event(), hold_s=0)).status == "busy"
            assert (await intake.take(event())).status == "accepted", "when the lease is over"
            await until(lambda: work.ended == ["evt-1"])


async def test_many_orphans_are_run_side_by_side(tmp_path: Path) -> None:
    names = [f"evt-{number}" for number in range(30)]
    async with semel.aopen(place(tmp_path), consumer="intake", lease="20ms") as once:
        for name in names:
            assert isinstance(await once.claim(name, journal=b"{}", event_type="paid"), semel.Claimed)
    at_once, most, done = 0, 0, set[str]()

    async def work(given: Event) -> None:
        nonlocal at_once, most
        assert (given.type, given.body) == ("paid", b"{}")
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0.01)
        at_once -= 1
        done.add(given.id)

    async with taking(place(tmp_path), work, pace=IntakeLimits(concurrency=5, sweep_s=0.05)):
        await until(lambda: done == set(names))
    assert 1 < most <= 5


async def test_wrong_use_is_told(tmp_path: Path) -> None:
    once = semel.aopen(place(tmp_path), consumer="intake")
    with pytest.raises(TypeError, match="async def"):
        Intake(once, lambda _event: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(UsageError, match="async with"):
        await Intake(once, Work()).take(event())
    for wrong in (
        {"concurrency": 0},
        {"concurrency": 5, "pending_max": 4},
        {"sweep_s": 0.0},
        {"drain_s": -1},
    ):
        with pytest.raises(PolicyInvalid):
            IntakeLimits(**wrong)
    async with once, Intake(once, Work()) as intake:
        with pytest.raises(UsageError, match="before"):
            await intake.__aenter__()


async def test_orphans_can_be_looked_at_in_both_colours(tmp_path: Path) -> None:
    with semel.open(place(tmp_path), consumer="intake", lease="20ms") as once:
        assert isinstance(once.claim("evt-1", journal=b"{}"), semel.Claimed)
        assert isinstance(once.claim("plain"), semel.Claimed)
        await until(lambda: [record.key for record in once.records.orphans()] == ["evt-1"])
    async with semel.aopen(place(tmp_path), consumer="intake") as other:
        assert [record.key for record in await other.records.orphans(limit=5)] == ["evt-1"]
