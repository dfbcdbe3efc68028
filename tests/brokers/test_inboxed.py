"""Mode inbox through the runner: marks and effects in one transaction of its own, on both databases."""

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
from msgspec.structs import replace

import semel
from semel.brokers import Arrival, Route, Runner, RunnerLimits
from semel.brokers.attempts import Attempt, Attempts
from semel.brokers.dead_letters import DeadLetter, headers_of, replay
from semel.brokers.transaction_connections import AsyncPostgresConnections
from semel.client import deliver
from semel.core.commands import Claim, Settle
from semel.errors import UsageError
from semel.testing.proxy import Proxy
from semel.testing.queue import Queue
from tests.brokers.test_runner import Paid, queue, send, working
from tests.services import postgres
from tests.waiting import until

__all__ = ["queue"]  # a fixture

pytestmark = pytest.mark.anyio
PATIENT = semel.Policy(retry_delay_s=0.02, max_attempts=3, permanent=(KeyError,))


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Ledger:
    """A plain table, without a unique constraint, in the store's own database."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.url = f"sqlite:///{folder}/a.db" if kind == "sqlite" else postgres.place(folder)
        self.table = "ledger" if kind == "sqlite" else f"ledger_{abs(hash(folder))}"
        self.insert = f"INSERT INTO {self.table} VALUES ({'?' if kind == 'sqlite' else '%s'})"
        self.ask(f"CREATE TABLE {self.table} (key TEXT)")

    def connect(self) -> Any:
        if self.kind == "sqlite":
            return sqlite3.connect(self.url.removeprefix("sqlite:///"))
        return psycopg.connect(postgres.url())

    def ask(self, statement: str) -> list[Any]:
        with self.connect() as connection:
            cursor = connection.execute(statement)
            rows: list[Any] = cursor.fetchall() if cursor.description else []
        connection.close()
        return rows

    def keys(self) -> list[str]:
        return sorted(key for (key,) in self.ask(f"SELECT key FROM {self.table}"))

    def client(self, **options: Any) -> semel.AsyncSemel:
        return semel.aopen(self.url, consumer="wallet", mode="inbox", **({"policy": PATIENT} | options))


@pytest.fixture(params=["sqlite", "postgres"])
def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> Ledger:
    return Ledger(request.param, tmp_path)


async def worked(
    queue: Queue,
    ledger: Ledger,
    handler: Any,
    scene: Callable[[], Awaitable[None]] | None = None,
    **more: Any,
) -> Runner:
    async with ledger.client(**more.pop("client", {})) as once:
        source = more.pop("source", None) or queue.source()
        runner = Runner(source, [Route(handler, once=once, **more)])
        await working(runner, scene or (lambda: until(lambda: len(queue) == 0)))
    return runner


@pytest.mark.parametrize("blocks", [True, False], ids=["blocks", "awaits"])
async def test_mark_and_effect_commit_together_before_the_ack(
    queue: Queue, ledger: Ledger, blocks: bool
) -> None:
    seen: list[tuple[str, int]] = []

    def credit(connection: Any, paid: Paid) -> None:
        connection.execute(ledger.insert, (paid.order,))
        seen.append((semel.current().key, semel.current().attempt))

    async def acredit(connection: Any, paid: Paid) -> None:
        await connection.execute(ledger.insert, (paid.order,))
        seen.append((semel.current().key, semel.current().attempt))

    keys = [f"k{n:03}" for n in range(300)]
    send(queue, *keys, *keys[::3])
    runner = await worked(queue, ledger, credit if blocks else acredit)
    assert ledger.keys() == keys
    assert sorted(seen) == [(key, 1) for key in keys]
    assert (runner.counts.acked, runner.counts.duplicates) == (400, 100)


async def test_nothing_is_acknowledged_before_the_commit(queue: Queue, ledger: Ledger) -> None:
    source = queue.source()
    ack = source.ack
    at_ack: list[list[str]] = []

    async def watched(arrivals: Any) -> None:
        at_ack.append(await asyncio.to_thread(ledger.keys))
        await ack(arrivals)

    async def credit(connection: Any, paid: Paid) -> None:
        await connection.execute(ledger.insert, (paid.order,))

    source.ack = watched  # type: ignore[method-assign]
    send(queue, "a", "b")
    await worked(queue, ledger, credit, source=source)
    assert at_ack[0] == ["a", "b"]


async def test_ids_that_are_too_old_or_no_ids_are_dead_letters_and_the_others_run_once(
    queue: Queue, ledger: Ledger
) -> None:
    """With declared ids. Only PostgreSQL, whose partitions go, has ids that are too old."""
    good = [semel.keys.uuid7("wallet") for _ in range(3)]
    old = "00000000-7c1a-7b2e-9f60-2a4c8d1e5f37"  # of 1970
    send(queue, *good, old, "order-17", *good)
    failed: list[str] = []

    async def credit(connection: Any, paid: Paid) -> None:
        if paid.order == good[0] and not failed:
            failed.append(paid.order)
            raise RuntimeError("once")  # its attempt is a claim, in the partition of its mark
        await connection.execute(ledger.insert, (paid.order,))

    policy = replace(PATIENT, late="hold")
    runner = await worked(queue, ledger, credit, client={"ids": "uuid7", "policy": policy})
    late = [old] if ledger.kind == "postgres" else []
    assert ledger.keys() == sorted([*good, *([] if late else [old])])
    assert sorted(letter.key or "" for _, letter in queue.dead if letter.reason == "late") == late
    assert [letter.reason for _, letter in queue.dead if letter.reason != "late"] == ["no-key"]
    assert runner.counts.duplicates == 3


@pytest.mark.parametrize("blocks", [True, False], ids=["blocks", "awaits"])
async def test_poison_is_isolated_and_given_up_in_the_right_order(
    queue: Queue, ledger: Ledger, blocks: bool
) -> None:
    attempts: list[int] = []

    def refuse(paid: Paid) -> None:
        if paid.order == "bad":
            attempts.append(1)
            raise RuntimeError("no")
        if paid.order == "worse":
            raise KeyError("never")

    def credit(connection: Any, paid: Paid) -> None:
        connection.execute(ledger.insert, (paid.order,))
        refuse(paid)

    async def acredit(connection: Any, paid: Paid) -> None:
        await connection.execute(ledger.insert, (paid.order,))
        refuse(paid)

    states: list[Any] = []
    source = queue.source()
    dead_letter = source.dead_letter

    async def watched(arrival: Arrival, letter: Any) -> None:
        async with ledger.client() as once:
            record = await once.records.lookup(letter.key)
        assert record is not None
        states.append((letter.key, record.state, record.fence == letter.fence))
        await dead_letter(arrival, letter)

    source.dead_letter = watched  # type: ignore[method-assign]
    send(queue, "a", "bad", "b", "worse", "c")
    await worked(queue, ledger, credit if blocks else acredit, source=source)
    assert ledger.keys() == ["a", "b", "c"]
    assert sorted(states) == [("bad", "claimed", True), ("worse", "claimed", True)]
    letters = {letter.key: letter for _, letter in queue.dead}
    assert (letters["bad"].attempts, letters["worse"].attempts) == (3, 1)
    assert "RuntimeError: no" in letters["bad"].stack
    assert "AttemptsExhausted" in letters["bad"].error
    assert len(attempts) == 4  # with the others, which is undone, and three times by itself
    async with ledger.client() as once:
        record = await once.records.lookup("bad")
    assert record is not None
    assert (record.state, record.fence) == ("failed", letters["bad"].fence)
    kept = [(each.attempt, each.kind, each.message) for each in record.errors]
    assert kept == [(number, "builtins.RuntimeError", "no") for number in (1, 2, 3)]
    assert {each.worker for each in record.errors} == {letters["bad"].worker}
    send(queue, "bad")  # the producer repeats it: it is known to have failed
    await worked(queue, ledger, credit if blocks else acredit)
    assert len(queue.dead) == 2


async def test_a_mark_keeps_the_errors_before_it_and_no_older_ones(queue: Queue, ledger: Ledger) -> None:
    tried: list[str] = []

    def credit(connection: Any, paid: Paid) -> None:
        connection.execute(ledger.insert, (paid.order,))
        tried.append(paid.order)
        if paid.order == "flaky" and tried.count("flaky") <= 2:
            raise RuntimeError("card 4242")

    def hide(info: semel.types.ErrorInfo) -> semel.types.ErrorInfo:
        return semel.types.ErrorInfo(info.kind, "hidden", "", info.worker)

    place, owner, info = (
        ("", "wallet", "old"),
        b"o" * 16,
        semel.types.ErrorInfo("app.Old", "of another event"),
    )
    async with ledger.client() as once:
        await once.records.lookup("old")  # it connects
        (granted,) = await deliver.send(once, [Claim(place, owner, 1000, 1)])
        await deliver.send(once, [Settle(place, owner, granted.fence, "failed", b"r", 1, error=info)])
    send(queue, "flaky", "old")
    policy = replace(PATIENT, redact_error=hide)
    await worked(queue, ledger, credit, client={"policy": policy})
    async with ledger.client() as once:
        flaky, old = await once.records.lookup("flaky"), await once.records.lookup("old")
    assert flaky is not None
    assert old is not None
    assert (flaky.state, old.state) == ("done", "done")
    assert [(each.attempt, each.message) for each in flaky.errors] == [(1, "hidden")]
    assert old.errors == ()


async def test_a_redaction_holds_for_dead_letters_and_the_log(
    queue: Queue, ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    def credit(_connection: Any, _paid: Paid) -> None:
        raise RuntimeError("card 4242")

    policy = replace(PATIENT, redact_error=lambda info: semel.types.ErrorInfo(info.kind, "hidden"))
    send(queue, "bad")
    await worked(queue, ledger, credit, client={"policy": policy})
    [(_, letter)] = queue.dead
    assert (letter.error, letter.stack) == ("builtins.RuntimeError: hidden", "")
    async with ledger.client() as once:
        record = await once.records.lookup("bad")
    assert record is not None
    assert "4242" not in repr(record) + caplog.text + repr(letter)
    assert "attempt 1; again in" in caplog.text


class DeadLetters:
    """The queue's dead letters, as `semel dlq` sees a broker's."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue

    async def republish(self, headers: Any, body: bytes) -> None:
        self.queue.send(body, dict(headers))

    async def remove(self, dead: DeadLetter) -> None:
        self.queue.dead.clear()


async def test_a_dead_letter_is_replayed_by_forgetting_its_failure(queue: Queue, ledger: Ledger) -> None:
    broken = True

    async def credit(connection: Any, paid: Paid) -> None:
        if broken:
            raise KeyError("never")
        await connection.execute(ledger.insert, (paid.order,))

    send(queue, "a")
    await worked(queue, ledger, credit)
    [(message, letter)] = queue.dead
    broken = False
    dead = DeadLetter.from_message("1", message.headers | headers_of(letter), message.body)
    async with ledger.client() as once:
        await replay(DeadLetters(queue), dead, once)  # type: ignore[arg-type]
    await worked(queue, ledger, credit)
    assert (ledger.keys(), queue.dead) == (["a"], [])


async def test_a_batch_handler_is_given_what_is_new_and_isolates_what_is_bad(
    queue: Queue, ledger: Ledger
) -> None:
    calls: list[list[str]] = []

    async def credit(connection: Any, paid: list[Paid]) -> None:
        calls.append([each.order for each in paid])
        for each in paid:
            await connection.execute(ledger.insert, (each.order,))
        if any(each.order == "bad" for each in paid):
            raise KeyError("never")

    send(queue, "a", "b")
    await worked(queue, ledger, credit, batch=True)
    send(queue, "a", "c", "bad", "d")
    await worked(queue, ledger, credit, batch=True)
    assert calls == [["a", "b"], ["c", "bad", "d"], ["c"], ["bad"], ["d"]]
    assert ledger.keys() == ["a", "b", "c", "d"]
    assert [letter.key for _, letter in queue.dead] == ["bad"]


async def test_what_was_delivered_before_runs_alone_and_the_most_tried_last(
    queue: Queue, ledger: Ledger
) -> None:
    calls: list[list[str]] = []

    async def credit(connection: Any, paid: list[Paid]) -> None:
        calls.append([each.order for each in paid])

    send(queue, "a", "worst", "again", "b")
    queue._waiting[1].deliveries = 2 * PATIENT.max_attempts
    queue._waiting[2].deliveries = 1
    await worked(queue, ledger, credit, batch=True)
    assert calls == [["a", "b"], ["again"], ["worst"]]
    assert queue.dead == []  # a delivery is no attempt


async def test_an_attempt_that_did_not_end_counts_and_one_that_was_cancelled_does_not(
    queue: Queue, ledger: Ledger
) -> None:
    ran: list[int] = []
    started = asyncio.Event()

    async def credit(connection: Any, paid: Paid) -> None:
        ran.append(semel.current().attempt)
        started.set()
        await asyncio.Event().wait()

    async with ledger.client() as once:
        delivery = Route(credit, once=once).delivery(
            Arrival(headers={"message_id": "killer"}, body=b"{}"), "", None
        )
        for _ in range(PATIENT.max_attempts - 1):  # processes that died with it
            assert isinstance(await Attempts(once).begin(delivery), Attempt)
        send(queue, "killer")
        queue._waiting[0].deliveries = 1
        runner = Runner(queue.source(), [Route(credit, once=once)], pace=RunnerLimits(drain_s=0.05))
        running = asyncio.create_task(runner.run())
        await started.wait()
        runner.stop()
        await running
        record = await once.records.lookup("killer")
        assert record is not None
        assert (ran, record.attempt, queue.dead) == ([3], 2, [])
        assert isinstance(await Attempts(once).begin(delivery), Attempt)
        await worked(queue, ledger, credit)
    assert ran == [3]
    [(_, letter)] = queue.dead
    assert (letter.key, letter.attempts) == ("killer", 4)
    assert "no end of the earlier ones was recorded" in letter.error


async def test_a_constraint_that_is_looked_at_at_commit_blames_one_message(
    queue: Queue, tmp_path: Path
) -> None:
    ledger = Ledger("postgres", tmp_path)
    ledger.ask(f"ALTER TABLE {ledger.table} ADD COLUMN n INT UNIQUE DEFERRABLE INITIALLY DEFERRED")
    insert = f"INSERT INTO {ledger.table} VALUES (%s, %s)"

    async def credit(connection: Any, paid: Paid) -> None:
        await connection.execute(insert, (paid.order, 1 if paid.order in ("a", "twin") else len(paid.order)))

    send(queue, "a", "twin", "longer")
    await worked(queue, ledger, credit)
    assert len(ledger.keys()) == 2
    assert "longer" in set(ledger.keys())
    assert [letter.reason for _, letter in queue.dead] == ["failed"]


async def test_two_runners_with_the_same_messages_do_each_once(queue: Queue, ledger: Ledger) -> None:
    async def credit(connection: Any, paid: Paid) -> None:
        await connection.execute(ledger.insert, (paid.order,))

    other = Queue(deadline_s=5)
    keys = [f"k{n:03}" for n in range(200)]
    send(queue, *keys)
    send(other, *reversed(keys))
    both = lambda: until(lambda: len(queue) == len(other) == 0)  # noqa: E731
    await asyncio.gather(worked(queue, ledger, credit, both), worked(other, ledger, credit, both))
    assert ledger.keys() == keys


async def test_a_commit_without_an_answer_is_settled_by_the_mark(
    queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger("postgres", tmp_path)
    parts = urlsplit(ledger.url)
    assert parts.port is not None
    with Proxy(parts.port) as proxy:
        ledger.url = ledger.url.replace(f":{parts.port}", f":{proxy.port}")

        @asynccontextmanager
        async def begun(_desk: Any, connection: Any) -> Any:
            async with connection.transaction():
                yield
                if not proxy.cuts:
                    proxy.cut_replies(1)

        monkeypatch.setattr(AsyncPostgresConnections, "transaction", begun)

        async def credit(connection: Any, paid: Paid) -> None:
            await connection.execute(ledger.insert, (paid.order,))

        send(queue, "a", "b")
        runner = await worked(queue, ledger, credit)
    assert (ledger.keys(), proxy.cuts) == (["a", "b"], 1)
    assert (runner.counts.parked, runner.counts.duplicates) == (2, 2)


async def test_a_stop_rolls_back_what_outlasts_the_drain(queue: Queue, ledger: Ledger) -> None:
    started = asyncio.Event()

    async def credit(connection: Any, paid: Paid) -> None:
        await connection.execute(ledger.insert, (paid.order,))
        started.set()
        await asyncio.Event().wait()

    send(queue, "a")
    async with ledger.client() as once:
        runner = Runner(queue.source(), [Route(credit, once=once)], pace=RunnerLimits(drain_s=0.05))
        running = asyncio.create_task(runner.run())
        await started.wait()
        runner.stop()
        await running
    assert (len(queue), ledger.keys()) == (1, [])


async def test_what_cannot_work_is_refused_at_the_start(queue: Queue, ledger: Ledger) -> None:
    async def lonely(message: Arrival) -> None: ...

    with pytest.raises(UsageError, match="the open transaction and the message"):
        Route(lonely, once=ledger.client())

    def blocking(connection: Any, message: Arrival) -> None: ...

    async def outer(message: Arrival, call: Any) -> Any: ...

    route = Route(blocking, once=ledger.client(), middleware=[outer])
    with pytest.raises(UsageError, match="async def"):
        await Runner(queue.source(), [route]).run()
