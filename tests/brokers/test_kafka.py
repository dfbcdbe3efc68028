"""Kafka under the contract, looked at with a client of its own."""

import asyncio
import os
from pathlib import Path

import pytest

from semel.brokers.offsets import Offsets
from semel.testing import broker_contract
from tests.brokers.storm import Storm
from tests.brokers.topics import Topic


@pytest.mark.slow
class TestKafka(broker_contract.Suite):
    ordered = True

    async def broker(self) -> Topic:
        return await asyncio.to_thread(Topic)


def test_an_offset_never_passes_one_that_is_not_done() -> None:
    offsets = Offsets()
    for offset in (3, 4, 7, 8):
        offsets.received(offset)
    assert [offsets.done(offset) for offset in (4, 8, 3, 3, 7)] == [None, None, 5, None, 9]
    assert len(offsets) == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
def test_workers_killed_with_9_lose_nothing_and_repeat_nothing(seed: int, tmp_path: Path) -> None:
    async def scene() -> None:
        topic = await asyncio.to_thread(Topic)
        events = 10_000 if "SEMEL_SOAK" in os.environ else 1000
        await Storm(f"{topic.url}&session_s=1.5", tmp_path, seed).run(topic, events)
        await topic.close()

    asyncio.run(scene())
