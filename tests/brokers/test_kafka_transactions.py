"""Kafka to Kafka: every event's output once for a reader of what is committed, whoever dies or stalls meanwhile."""

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

import semel
from semel.brokers import Arrival, Runner
from semel.brokers.dead_letters import letter_of
from semel.brokers.kafka.transactions import KafkaTransaction, Output
from semel.client.claims import Claimed
from semel.errors import Fenced, ModeMismatch, UsageError
from semel.stores.memory.store import MemoryStore
from semel.testing.broker_contract import Sent
from tests.brokers.scenes import Died, Scene, kill, started, woken, worker
from tests.brokers.topics import Pipe
from tests.brokers.transformer import copied
from tests.cli.processes import environment
from tests.services.kcat import kcat
from tests.waiting import until

pytestmark = pytest.mark.slow

WITHIN_S = 60.0


def on_stage(scene_of: Callable[[Scene], Awaitable[None]]) -> None:
    async def play() -> None:
        pipe = await asyncio.to_thread(Pipe)
        async with asyncio.timeout(WITHIN_S):
            await scene_of(Scene(pipe))
        await pipe.close()

    asyncio.run(play())


@pytest.mark.usefixtures("every_kafka")
def test_outputs_and_offsets_are_committed_together_once_for_each_key() -> None:
    async def scene_of(scene: Scene) -> None:
        keys = [f"k{n}" for n in range(60)]
        await scene.send(*keys, *keys[:20])
        transaction = await scene.until_settled()
        await scene.send("k1", "k2")
        again = await scene.until_settled()
        assert scene.pipe.outputs() == Counter(keys)
        assert (transaction.counts.duplicates, again.counts.duplicates) == (20, 2)
        left = kcat(
            "-b", scene.pipe.address, "-e", "-X", "auto.offset.reset=earliest",
            "-X", "enable.auto.commit=false", "-G", f"g-{scene.pipe.name}", scene.pipe.name,
        )  # fmt: skip
        assert left == "", "another client of the group is told that everything is consumed"

    on_stage(scene_of)


@pytest.mark.usefixtures("every_kafka")
def test_an_aborted_transaction_leaves_nothing_that_a_reader_sees() -> None:
    async def handler(message: Arrival) -> Output:
        return Output(message.body if message.body != b"k7" else b"x" * 2_000_000)

    async def scene_of(scene: Scene) -> None:
        keys = [f"k{n}" for n in range(20)]
        await scene.send(*keys)
        transaction = await scene.until_settled(handler, once=scene.client(max_attempts=2))
        assert transaction.counts.aborts >= 2
        assert scene.pipe.outputs() == Counter(set(keys) - {"k7"})
        assert sum(scene.pipe.outputs("read_uncommitted").values()) > len(keys), "something was undone"
        [(headers, body)] = await scene.pipe.dead()
        letter = letter_of(headers)
        assert letter is not None
        assert (body, letter.key, letter.attempts, letter.reason) == (b"k7", "k7", 2, "failed")

    on_stage(scene_of)


def test_a_failing_handler_holds_up_its_partition_and_its_attempts_are_its_own() -> None:
    ran: list[str] = []

    def handler(message: Arrival) -> Output:
        body = bytes(message.body).decode()
        ran.append(f"{body}#{semel.current().attempt}")
        if body == "bad":
            raise ValueError("for good")
        if body == "k3" and semel.current().attempt < 3:
            raise RuntimeError("not yet")
        return Output(message.body)

    async def scene_of(scene: Scene) -> None:
        keys = [f"k{n}" for n in range(8)]
        await scene.pipe.send([Sent(key, key.encode(), "lane") for key in [*keys, "bad", "last"]])
        once = scene.client(permanent=(ValueError,))
        transaction = await scene.until_settled(handler, once=once)
        said = kcat("-C", "-b", scene.pipe.address, "-t", scene.pipe.output, "-e", "-f", "%s\n")
        assert Counter(said.split()) == Counter([*keys, "last"])
        assert [each for each in ran if each[:3] == "k3#"] == ["k3#1", "k3#2", "k3#3"]
        assert all(each.endswith("#1") for each in ran if each[:3] != "k3#"), "neighbours do not pay for it"
        firsts = list(dict.fromkeys(each.partition("#")[0] for each in ran))
        assert firsts == [*keys, "bad", "last"], "a lane keeps its order"
        assert [body for _, body in await scene.pipe.dead()] == [b"bad"]
        assert transaction.counts.errors == 2
        record = await once.records.lookup("bad")
        assert record is not None
        assert record.state == "failed"

    on_stage(scene_of)


def test_a_message_without_a_key_is_buried_in_the_transaction() -> None:
    async def scene_of(scene: Scene) -> None:
        await scene.pipe.send([Sent("", b"nobody"), Sent("a", b"a")])
        await scene.until_settled()
        assert scene.pipe.outputs() == Counter(["a"])
        assert [body for _, body in await scene.pipe.dead()] == [b"nobody"]

    on_stage(scene_of)


def test_a_busy_key_is_waited_for_while_other_partitions_go_on() -> None:
    async def scene_of(scene: Scene) -> None:
        claim = await scene.client(lease_s=3.0).claim("k0")
        assert isinstance(claim, Claimed)
        keys = [f"k{n}" for n in range(30)]
        await scene.send(*keys)
        transaction = await scene.until_settled()
        assert scene.pipe.outputs() == Counter(keys)
        assert 1 <= transaction.counts.parked <= 5
        assert transaction.counts.transactions > 1, "the other partitions did not wait"

    on_stage(scene_of)


@pytest.mark.usefixtures("every_kafka")
def test_the_younger_of_two_with_one_transactional_id_fences_the_older() -> None:
    async def scene_of(scene: Scene) -> None:
        id_ = f"tx-{scene.pipe.name}"
        transaction = scene.transaction(options=f"&transactional_id={id_}")
        task = asyncio.create_task(transaction.run())
        await scene.send("a")
        await scene.pipe.settled()
        younger = Producer({"bootstrap.servers": scene.pipe.address, "transactional.id": id_})
        await asyncio.to_thread(younger.init_transactions, 30)
        await scene.send("b")
        with pytest.raises(Fenced, match=id_):
            await task
        await scene.until_settled()
        assert scene.pipe.outputs() == Counter(["a", "b"])

    on_stage(scene_of)


@pytest.mark.usefixtures("every_kafka")
def test_a_stopped_process_that_wakes_up_after_others_took_over_writes_nothing(tmp_path: Path) -> None:
    async def scene_of(scene: Scene) -> None:
        keys = [f"k{n}" for n in range(12)]
        await scene.send(*keys)
        scene.store = f"sqlite:///{tmp_path}/records.db"
        stalled = tmp_path / "stalled"
        with worker(scene, stall=str(stalled), stall_at="before") as zombie:
            await until(stalled.exists)
            await scene.until_settled()
            assert scene.pipe.outputs() == Counter(keys)
            zombie.send_signal(signal.SIGCONT)
            await scene.send("later")
            await scene.pipe.settled()
            counts = await woken(zombie)
        assert scene.pipe.outputs() == Counter([*keys, "later"])
        assert counts["aborts"] >= 1, "its transaction was refused"
        assert counts["transactions"] == 1, "and afterwards it works again"

    on_stage(scene_of)


# --- the order of commit and completion, and the gap between them ---


class DiesBetween(KafkaTransaction):
    """Commits, and dies before it completes."""

    async def _record(self, *_arguments: Any) -> None:
        raise Died


class WrongOrder(KafkaTransaction):
    """Completes first; and dies before it commits."""

    async def _finish(self, pieces: Any) -> None:
        await self._record(pieces, {piece.where for piece in pieces})
        raise Died


async def dies(scene: Scene, kind: type[KafkaTransaction], *, marks: bool = False) -> None:
    transaction = scene.transaction(kind=kind, marks=marks)
    with pytest.raises(Died):
        await transaction.run()


async def each_once_though_killed_between(scene: Scene, kind: type[KafkaTransaction]) -> None:
    """What is committed, completed, or both, when the process dies after the first of the two."""
    keys = ["a", "b", "c"]
    await scene.send(*keys)
    await dies(scene, kind)
    await scene.until_settled()
    assert scene.pipe.outputs() == Counter(keys), "lost or doubled"


def test_killed_between_commit_and_completion_every_output_is_there_once() -> None:
    on_stage(lambda scene: each_once_though_killed_between(scene, DiesBetween))


def test_the_other_order_would_lose_outputs() -> None:
    with pytest.raises(AssertionError, match="lost or doubled"):
        on_stage(lambda scene: each_once_though_killed_between(scene, WrongOrder))


@pytest.mark.parametrize(("marks", "outputs"), [(False, 2), (True, 1)])
def test_a_copy_after_the_gap_runs_unless_marks_are_kept(marks: bool, outputs: int) -> None:
    async def scene_of(scene: Scene) -> None:
        await scene.send("a")
        await dies(scene, DiesBetween, marks=marks)
        await scene.send("a", "b")
        transaction = await scene.until_settled(marks=marks)
        assert scene.pipe.outputs() == Counter({"a": outputs, "b": 1})
        assert transaction.counts.marked == (1 if marks else 0)
        record = await scene.client().records.lookup("a")
        assert record is not None
        assert record.state == "done"

    on_stage(scene_of)


def test_a_mark_that_was_taken_away_lets_the_event_run_again() -> None:
    async def scene_of(scene: Scene) -> None:
        await scene.send("a")
        await scene.until_settled(marks=True)
        scene.store = MemoryStore()  # the records are lost
        await scene.send("a")
        assert (await scene.until_settled(marks=True)).counts.marked == 1
        [line] = kcat("-C", "-b", scene.pipe.address, "-t", scene.pipe.marks, "-e", "-f", "%k %p\n").split(
            "\n"
        )[:1]
        key, partition = line.split()
        assert key == "a"
        place = ("-b", scene.pipe.address, "-t", scene.pipe.marks, "-p", partition)
        kcat("-P", *place, "-K:", "-Z", given=f"{key}:")
        scene.store = MemoryStore()
        await scene.send("a")
        await scene.until_settled(marks=True)
        assert scene.pipe.outputs() == Counter({"a": 2})

    on_stage(scene_of)


# --- storms ---


@pytest.mark.timeout(240)
@pytest.mark.usefixtures("every_kafka")
def test_workers_killed_with_9_amid_load_and_every_output_is_there_once(tmp_path: Path) -> None:
    chance = random.Random(7)
    soak = "SEMEL_SOAK" in os.environ
    events, kills = (10_000, 30) if soak else (600, 6)

    async def scene_of(scene: Scene) -> None:
        pipe, scene.store = scene.pipe, f"sqlite:///{tmp_path}/records.db"
        keys = [f"k{n}" for n in range(events)]
        deliveries = keys + chance.sample(keys, events * 3 // 10)
        chance.shuffle(deliveries)
        half = len(deliveries) // 2
        await scene.send(*deliveries[:half])
        workers = [started(scene, marks=pipe.marks, pause_s="0.005") for _ in range(3)]
        hits = 0
        try:
            for number in range(kills):
                hits += bool(await pipe.count_unsettled())
                await scene.send(
                    *deliveries[half + number * half // kills : half + (number + 1) * half // kills]
                )
                await asyncio.sleep(0.3 + chance.random())  # killed at any time
                at = chance.randrange(3)
                kill(workers[at])
                workers[at] = started(scene, marks=pipe.marks, pause_s="0.005")
            await scene.send(*deliveries[half + half :])
            await pipe.settled()
        finally:
            for each in workers:
                kill(each)
        assert hits > kills // 2, "most kills were amid work"
        assert pipe.outputs() == Counter(keys)

    async def play() -> None:
        pipe = await asyncio.to_thread(Pipe)
        async with asyncio.timeout(3600 if soak else 200):
            await scene_of(Scene(pipe))
        await pipe.close()

    asyncio.run(play())


# --- use ---


def test_the_modes_are_not_mixed_up() -> None:
    lease = semel.aopen("memory:", consumer="copy")
    with pytest.raises(UsageError, match='mode="transaction"'):
        KafkaTransaction("kafka://localhost/a?group=g", copied, once=lease)
    transaction = semel.aopen("memory:", consumer="copy", mode="transaction")
    with pytest.raises(UsageError, match="a runner of its own"):
        Runner(None, copied, once=transaction)  # type: ignore[arg-type]
    with pytest.raises(ModeMismatch, match="a KafkaTransaction"):
        asyncio.run(transaction.run("k", copied, Arrival()))


@pytest.fixture
def app(tmp_path: Path) -> Path:
    (tmp_path / "app.py").write_text(
        "from semel.brokers.kafka.transactions import Output\n"
        "def transform(message):\n    return Output(message.body.upper())\n"
    )
    return tmp_path


@pytest.mark.usefixtures("every_kafka")
def test_semel_consume_works_in_transactions(app: Path) -> None:
    async def scene_of(scene: Scene) -> None:
        pipe = scene.pipe
        await scene.send("a", "b", "a")
        command = [
            sys.executable, "-m", "semel", "consume", "app:transform", "--from", pipe.url, "--mode", "transaction",
            "--store", f"sqlite:///{app}/records.db", "--output", pipe.output, "--marks", pipe.marks, "--until-idle",
        ]  # fmt: skip
        ended = await asyncio.to_thread(
            subprocess.run, command, cwd=app, env=environment(), capture_output=True, text=True, timeout=60
        )
        assert ended.returncode == 0, ended.stderr
        assert "3 received, 3 acknowledged, 1 duplicate," in ended.stderr + ended.stdout
        assert pipe.outputs() == Counter(["A", "B"])

    on_stage(scene_of)


def test_missing_topics_are_named_before_anything_runs() -> None:
    async def scene_of(scene: Scene) -> None:
        url = f"{scene.pipe.url}&session_s=1.5"
        cases: list[tuple[dict[str, Any], str]] = [
            ({"output": "nowhere"}, "no topic nowhere"),
            ({"marks": f"{scene.pipe.name}.dead"}, "needs 4"),
        ]
        for more, said in cases:
            transaction = KafkaTransaction(url, copied, once=scene.client(), **more)
            with pytest.raises(UsageError, match=said):
                await transaction.run()

    on_stage(scene_of)
