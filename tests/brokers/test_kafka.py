"""Kafka under the contract, looked at with a client of its own."""

import asyncio
import logging
import os
import threading
from collections import Counter
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from semel.brokers import Arrival, Source
from semel.brokers.dead_letters import replay
from semel.brokers.kafka.client import CLIENT_LOG, Offsets
from semel.brokers.kafka.source import KafkaSource, from_url
from semel.brokers.probes import look_at
from semel.errors import GiveUp
from semel.observe.probes import SourceFacts
from semel.testing import broker_contract
from semel.testing.broker_conditions import TombstonePolicy
from semel.testing.broker_contract import Scene, Sent
from tests.brokers.cut_off import CutOff
from tests.brokers.storm import Storm
from tests.brokers.topics import Topic
from tests.services import kafka as service
from tests.services.kcat import kcat
from tests.services.packages import locked
from tests.services.server import NOBODY
from tests.waiting import until


class Bare(Topic):
    """A topic without one for its dead letters."""

    def topics(self) -> list[Any]:
        return super().topics()[:1]


@pytest.mark.slow
class TestKafka(broker_contract.BrokerSuite):
    ordered = True
    not_applicable: ClassVar = {"doctor_names_what_explain_names": "a log gives no message up"}

    async def broker(self) -> Topic:
        return await asyncio.to_thread(Topic)

    async def cut_off_broker(self) -> CutOff:
        broker = await self.broker()
        behind, advertised = service.behind_a_proxy()
        turn = locked(
            f"semel-kafka-proxy-{advertised}"
        )  # the broker names one port: one test at a time has it
        await asyncio.to_thread(turn.__enter__)
        url = broker.url.replace(broker.address, behind)
        return CutOff(broker, f"{url}&session_s=1.5", from_url, at=advertised, turn=turn)

    def away(self) -> Source:
        return from_url(f"kafka://127.0.0.1:{NOBODY}/t?group=g")

    def with_wrong_credentials(self) -> list[Source]:
        return [from_url(self._refused())]

    def _refused(self) -> str:
        options = "security=SASL_PLAINTEXT&mechanism=PLAIN&username=semel&password=wrong"
        return f"kafka://{service.secured()}/missing?group=g&{options}"

    def probes_with_wrong_credentials(self) -> list[Awaitable[SourceFacts]]:
        return [look_at(self._refused())]

    def at_missing_places(self) -> list[Source]:
        return [from_url(f"kafka://{service.servers()}/missing?group=g")]

    def same_members(self, broker: Any) -> tuple[Source, Source]:
        url = f"{broker.url}&session_s=6&instance=pod-0"
        return from_url(url), from_url(url)

    async def without_dead_letter_place(self) -> Topic:
        return await asyncio.to_thread(Bare)

    async def remove_dead_letter_place(self, broker: Any) -> None:
        await asyncio.to_thread(broker.delete_dead_letters)

    def bytes_near_limit(self) -> int:
        return 1_048_450

    async def body_at(self, broker: Any, position: str) -> bytes:
        return await asyncio.to_thread(broker.body_at, position)

    def source_for_tombstones(self, broker: Any, policy: TombstonePolicy) -> Source:
        return from_url(f"{broker.url}&session_s=1.5&tombstones={policy}")

    async def probe(self, broker: Any) -> SourceFacts:
        return await look_at(broker.url)


if "SEMEL_SOAK" in os.environ:  # storms, transactions and dedup run on both releases in the short form too

    @pytest.mark.slow
    class TestKafka4(TestKafka):
        """The whole contract on the other release: the server of groups and transactions is another one there."""

        @pytest.fixture(autouse=True)
        def _on_kafka_4(self) -> Iterator[None]:
            with service.release("kafka-4"):
                yield


def test_an_offset_never_passes_one_that_is_not_done() -> None:
    offsets = Offsets()
    for offset in (3, 4, 7, 8):
        offsets.add(offset)
    assert [offsets.complete(offset) for offset in (4, 8, 3, 3, 7)] == [None, None, 5, None, 9]
    assert len(offsets) == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
@pytest.mark.usefixtures("every_kafka")
def test_workers_killed_with_9_lose_nothing_and_repeat_nothing(seed: int, tmp_path: Path) -> None:
    async def scene() -> None:
        topic = await asyncio.to_thread(Topic)
        events = 10_000 if "SEMEL_SOAK" in os.environ else 1000
        await Storm(f"{topic.url}&session_s=1.5", tmp_path, seed).run(topic, events)
        await topic.close()

    asyncio.run(scene())


@pytest.mark.slow
def test_consumers_join_and_leave_under_load_and_no_offset_passes_what_is_not_done() -> None:
    events, leaving = 1000, 5
    effects: Counter[str] = Counter()

    async def handler(message: Arrival) -> None:
        await asyncio.sleep(0.002)  # as work takes; members change in the middle of it
        effects[bytes(message.body).decode()] += 1

    async def scene_of(topic: Topic) -> None:
        scene = Scene(topic)
        once = scene.client()
        keys = [f"k{n}" for n in range(events)]
        passed: list[str] = []

        async def watch() -> None:
            """At any time: what the group has consumed has had its effect."""
            while True:
                done = await asyncio.to_thread(topic.consumed)
                passed.extend(key for key in done if not effects[key])
                await asyncio.sleep(0.3)  # it asks the broker for every partition

        async def guest(number: int) -> None:
            """Comes when some of the work is done, and leaves when it has had a part in it, if any was left."""
            await until(lambda: len(effects) >= number * events // (2 * leaving))
            async with scene.running(handler, once=once, batch=10) as runner:
                await until(lambda: runner.counts.received or len(effects) == events)

        watching = asyncio.create_task(watch())
        async with scene.running(handler, once=once, batch=10):
            guests = [asyncio.create_task(guest(number)) for number in range(leaving)]
            for at in range(0, events, 100):
                await topic.send([Sent(key, key.encode()) for key in keys[at : at + 100]])
                await asyncio.sleep(0.3)  # the load goes on while they come and go
            await asyncio.gather(*guests)
            await scene.wait_until_settled()
        watching.cancel()
        assert effects == Counter(keys)
        assert passed == []
        left = kcat(
            "-b", topic.address, "-e", "-X", "auto.offset.reset=earliest", "-X", "enable.auto.commit=false",
            "-G", f"g-{topic.name}", topic.name,
        )  # fmt: skip
        assert left == "", "another client of the group is told that everything is consumed"

    on_topic(scene_of)


@pytest.mark.slow
def test_a_consumer_that_receives_nothing_for_longer_than_the_poll_interval_stays_in_the_group() -> None:
    async def scene_of(topic: Topic) -> None:
        scene = Scene(topic)

        async def handler(message: Arrival) -> None:
            await scene.note(message)
            await asyncio.sleep(
                4.5
            )  # real time: three times what the group waits for a poll; there is no room for more

        await topic.send([Sent(f"k{n}", f"k{n}".encode()) for n in range(4)])
        source = from_url(f"{topic.url}&session_s=1.5&poll_s=1.5")
        async with scene.running(handler, source=source, batch=4, in_hand=4, concurrency=4) as runner:
            await scene.wait_until_settled()
        assert sorted(scene.ran) == ["k0", "k1", "k2", "k3"]
        assert runner.counts.received == 4, "nobody took its partitions, so nothing came twice"
        assert runner.counts.acked == 4

    on_topic(scene_of)


@pytest.mark.slow
def test_a_replayed_dead_letter_has_the_key_of_its_record_and_a_tombstone_stays_one() -> None:
    """On a compacted topic an empty value would bring back what the tombstone deletes."""

    async def scene_of(topic: Topic) -> None:
        scene = Scene(topic)
        got: list[tuple[Any, Any]] = []

        async def give_up(_message: Arrival) -> None:
            raise GiveUp("not now")

        async def collect(message: Arrival) -> None:
            got.append((message.handle.key, message.body))

        async with scene.client() as once:
            await topic.send([Sent("a", None, "order/ä"), Sent("b", b"{}", "order/ä")])
            async with scene.running(give_up, once=once):
                await scene.wait_until_settled()
            queue = from_url(topic.url)
            await queue.visit()
            for dead in await queue.look(10):
                await replay(queue, dead, once)
            assert await queue.look(10) == []
            await queue.close()
            async with scene.running(collect, once=once):
                await scene.wait_until_settled()
        assert sorted(got, key=str) == sorted(
            [("order/ä".encode(), None), ("order/ä".encode(), b"{}")], key=str
        )

    on_topic(scene_of)


@pytest.mark.slow
def test_a_probe_of_a_pattern_reads_all_topics_that_match() -> None:
    """Their longest retention counts; topics of dead letters are none of them."""

    async def scene_of(topic: Topic) -> None:
        pattern = f"kafka://{topic.address}?topic=^{topic.name}&group=g"
        facts, one = await look_at(pattern), await look_at(topic.url)
        assert facts.horizon_s == one.horizon_s == 7 * 86400
        none = await look_at(f"kafka://{topic.address}?topic=^nothing-{topic.name}&group=g")
        assert none.horizon_s is None
        assert "matches" in none.notes[0]

    on_topic(scene_of)


def on_topic(scene_of: Any) -> None:
    async def play() -> None:
        topic = await asyncio.to_thread(Topic)
        async with asyncio.timeout(100):
            await scene_of(topic)
        await topic.close()

    asyncio.run(play())


@pytest.mark.slow
def test_a_close_that_nobody_waits_for_still_ends_the_client() -> None:
    """Its thread is busy for longer than a stop waits. What is left to the garbage collector may never end."""

    async def scene_of(topic: Topic) -> None:
        source = from_url(topic.url)
        assert isinstance(source, KafkaSource)
        await source.open()
        client, busy = source._consumer, threading.Event()
        assert source._thread is not None
        source._thread.submit(busy.wait)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(source.close(), 0.05)
        busy.set()

        def is_closed() -> bool:
            try:
                client.memberid()
            except RuntimeError:  # Consumer closed
                return True
            return False

        await until(is_closed)

    on_topic(scene_of)


def test_the_log_of_the_client_library_cannot_flood(caplog: pytest.LogCaptureFixture) -> None:
    kind = f"FAIL-{os.urandom(4).hex()}"
    with caplog.at_level(logging.INFO, "semel.kafka.client"):
        for number in range(1000):
            CLIENT_LOG.log(logging.ERROR, "%s [%s] %s", kind, "rdkafka#consumer-1", f"failed {number}")
        CLIENT_LOG.log(logging.ERROR, "%s [%s] %s", f"{kind}-other", "rdkafka#consumer-1", "else")
    assert len(caplog.records) == 2
