"""Redis Streams under the contract, looked at with a client of its own."""

import asyncio
import os
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import redis.asyncio

import semel
from semel.brokers.probes import look_at
from semel.brokers.redis_streams import LOWEST, TRIM, from_url
from semel.brokers.source import Source
from semel.observe.probes import SourceFacts
from semel.testing import broker_contract
from semel.testing.broker_contract import Sent
from tests.brokers.cut_off import CutOff
from tests.brokers.storm import Storm
from tests.services import redis as service
from tests.services.server import NOBODY


class Stream:
    ordered = False

    def __init__(self) -> None:
        self.name = f"t-{os.urandom(6).hex()}"
        self.url = service.place("streams").partition("?")[0]
        self.redis: Any = redis.asyncio.Redis.from_url(self.url)

    async def send(self, messages: Sequence[Sent]) -> None:
        for each in messages:
            await self.redis.xadd(
                self.name, {**({"message_id": each.key} if each.key else {}), "data": each.body}
            )

    def source(self, *, deadline_s: float | None = None) -> Source:
        return from_url(f"{self.url}?stream={self.name}&group=g&deadline_s={deadline_s or 2.0}")

    async def count_unsettled(self) -> int:
        if not await self.redis.exists(self.name):
            return 0
        groups = await self.redis.xinfo_groups(self.name)
        if not groups:
            return int(await self.redis.xlen(self.name))
        [group] = groups
        new = await self.redis.xrange(self.name, f"({group['last-delivered-id'].decode()}", "+")
        return int(group["pending"]) + len(new)

    async def dead(self) -> list[tuple[Mapping[str, str], bytes]]:
        found: list[tuple[Mapping[str, str], bytes]] = []
        for _, fields in await self.redis.xrange(f"{self.name}.dead"):
            body = fields.pop(b"data")
            found.append(({name.decode(): value.decode() for name, value in fields.items()}, body))
        return found

    async def close(self) -> None:
        await self.redis.delete(self.name, f"{self.name}.dead")
        await self.redis.aclose()


class TestRedisStreams(broker_contract.BrokerSuite):
    not_applicable: ClassVar = {
        "a_missing_place_ends_the_runner": "the source makes the stream and its group",
        "a_member_that_is_replaced_ends_with_the_reason": "two consumers may have one name, and share its messages",
        "a_body_near_the_limit_of_the_broker_is_not_lost": "the limit of 512 MB is on each field alone",
        "a_message_without_a_body_is_passed_as_none_or_skipped": "a field may be empty, but has a value",
        "doctor_names_what_explain_names": "the server gives no message up",
    }

    async def broker(self) -> Stream:
        return Stream()

    async def cut_off_broker(self) -> CutOff:
        broker = await self.broker()
        return CutOff(broker, f"{broker.url}?stream={broker.name}&group=g&deadline_s=1", from_url)

    def away(self) -> Source:
        return from_url(f"redis://127.0.0.1:{NOBODY}/0?stream=s&group=g")

    def with_wrong_credentials(self) -> list[Source]:
        return [from_url(self._refused())]

    def _refused(self) -> str:
        host = service.place("streams").partition("?")[0].removeprefix("redis://")
        return f"redis://somebody:wrong@{host}?stream=s&group=g"

    def probes_with_wrong_credentials(self) -> list[Awaitable[SourceFacts]]:
        return [look_at(self._refused())]

    async def without_dead_letter_place(self) -> Stream:
        return Stream()

    async def remove_dead_letter_place(self, broker: Any) -> None:
        await broker.redis.delete(f"{broker.name}.dead")

    async def probe(self, broker: Any) -> SourceFacts:
        return await look_at(f"{broker.url}?stream={broker.name}&group=g")


@pytest.mark.anyio
async def test_a_message_of_another_consumer_is_not_taken_back_by_a_heartbeat() -> None:
    broker = Stream()
    await broker.send([Sent("a")])
    first, second = broker.source(deadline_s=0.2), broker.source(deadline_s=0.2)
    await first.open()
    await second.open()
    [mine] = await first.receive(10, 1)
    while not (taken := list(await second.receive(10, 0.05))):
        pass
    assert list(await first.extend([mine])) == [mine]
    assert list(await second.extend(taken)) == []
    await first.close()
    await second.close()
    await broker.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
def test_workers_killed_with_9_lose_nothing_and_repeat_nothing(seed: int, tmp_path: Path) -> None:
    async def scene() -> None:
        broker = Stream()
        source = f"{broker.url}?stream={broker.name}&group=g&deadline_s=2"
        await Storm(source, tmp_path, seed).run(broker, 10_000 if "SEMEL_SOAK" in os.environ else 1000)
        await broker.close()

    asyncio.run(scene())


# --- trimming ---

NODE = 100
"""How many entries the server keeps together, and trims together."""


async def worked(broker: Stream, group: str, *, trim_s: float, limit: int = 10_000) -> list[str]:
    """What a consumer of the group was given and has acknowledged, until there is no more or it has enough."""
    source = from_url(f"{broker.url}?stream={broker.name}&group={group}&deadline_s=30&trim_s={trim_s}")
    await source.open()
    done: list[str] = []
    while len(done) < limit and (some := await source.receive(min(50, limit - len(done)), 0.02)):
        await source.ack(some)
        done += [str(each.by_name.get("message_id")) for each in some]
    await source.close()
    return done


@pytest.mark.anyio
async def test_a_stream_is_trimmed_only_as_far_as_every_group_has_acknowledged() -> None:
    broker, keys = Stream(), [f"k{n}" for n in range(1000)]
    await broker.send([Sent(key) for key in keys])
    await broker.redis.xgroup_create(broker.name, "slow", id="0")
    assert await worked(broker, "fast", trim_s=0.001) == keys
    assert await broker.redis.xlen(broker.name) == 1000, "the slow group has read nothing yet"
    assert await worked(broker, "slow", trim_s=0.001, limit=500) == keys[:500]
    await worked(broker, "fast", trim_s=0.001)
    assert 500 <= await broker.redis.xlen(broker.name) <= 500 + NODE + 1
    assert await worked(broker, "slow", trim_s=0.0) == keys[500:], "it has lost nothing"
    assert await broker.redis.xlen(broker.name) >= 500, "nobody trims unasked"
    await worked(broker, "fast", trim_s=0.001)
    assert await broker.redis.xlen(broker.name) <= NODE + 1
    await broker.close()


@pytest.mark.anyio
async def test_what_a_dead_consumer_of_another_group_had_in_hand_is_not_trimmed() -> None:
    broker, keys = Stream(), [f"k{n}" for n in range(1000)]
    await broker.send([Sent(key, key.encode()) for key in keys])
    slow = f"{broker.url}?stream={broker.name}&group=slow"
    dead = from_url(f"{slow}&deadline_s=60")  # or it would take over from itself, on a slow computer
    await dead.open()
    given = [await dead.receive(100, 0.1) for _ in range(10)]
    await dead.ack([each for some in given for each in some if each.body not in (b"k350", b"k900")])
    await dead.close()
    assert await worked(broker, "fast", trim_s=0.001) == keys
    await worked(broker, "fast", trim_s=0.001)
    assert 650 <= await broker.redis.xlen(broker.name) <= 650 + NODE, (
        "all before k350 is gone, and nothing else"
    )
    heir = from_url(f"{slow}&deadline_s=0.2")
    await heir.open()
    taken: list[bytes] = []
    async with asyncio.timeout(10):
        while len(taken) < 2:
            some = await heir.receive(10, 0.05)
            taken += [each.body for each in some]
            await heir.ack(some)
    assert taken == [b"k350", b"k900"]
    await heir.close()
    await broker.close()


@pytest.mark.anyio
async def test_ids_are_compared_as_the_numbers_they_are() -> None:
    broker = Stream()
    ids = [f"{ms}-{seq}" for ms in (9, 10) for seq in (9, 10, 2**64 - 2, 2**64 - 1)]
    for id_ in ids:
        await broker.redis.xadd(broker.name, {"message_id": id_, "data": "{}"}, id=id_)
    for at, id_ in enumerate(ids):
        await broker.redis.xgroup_create(broker.name, f"g{at}", id=id_)
    for lowest, id_ in enumerate(ids):
        low = await broker.redis.eval(LOWEST + "return low", 1, broker.name)
        assert low.decode() == id_
        await broker.redis.xgroup_destroy(broker.name, f"g{lowest}")
    assert await broker.redis.eval(TRIM, 1, broker.name, 10) == 0, (
        "without groups nobody has said that it is done"
    )
    await broker.close()


def test_a_negative_interval_is_refused() -> None:
    with pytest.raises(semel.errors.UsageError, match="trim_s"):
        from_url("redis://localhost/0?stream=s&group=g&trim_s=-1")
