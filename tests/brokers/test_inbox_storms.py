"""Mode inbox on every broker while workers are killed with -9: a plain ledger, without any key, is exact."""

import asyncio
import os

import pytest

from tests.brokers.places import Made, kafka, nats, rabbitmq, redis, sqs
from tests.brokers.storm import InboxStorm
from tests.services import postgres

EVENTS = 500
SOAK_EVENTS = 10_000


@pytest.mark.slow
@pytest.mark.parametrize("made", [redis, nats, kafka, rabbitmq, sqs])
def test_workers_killed_with_9_lose_nothing_and_repeat_nothing(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")

    async def scene() -> None:
        broker, source = await made()
        storm = InboxStorm(source, postgres.url(), postgres.place(broker.name), 1)
        await storm.run(broker, SOAK_EVENTS if "SEMEL_SOAK" in os.environ else EVENTS)
        await broker.close()

    asyncio.run(scene())
