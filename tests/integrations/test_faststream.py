"""The middleware in real FastStream applications, on real NATS."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any

import nats
import pytest
from faststream.exceptions import AckMessage, RejectMessage
from faststream.nats import JStream, NatsBroker, PullSub
from nats.js.api import ConsumerConfig

import semel
from semel.errors import UsageError
from semel.integrations.faststream import once_middleware
from tests.services import nats as service
from tests.waiting import until

pytestmark = pytest.mark.slow
WITHIN_S = 20.0


class App:
    """One stream with one subscriber behind the middleware, and a producer that knows nothing of either."""

    def __init__(self, once: semel.AsyncSemel) -> None:
        self.name = f"t{os.urandom(6).hex()}"
        self.broker = NatsBroker(service.url(), middlewares=[once_middleware(once)], logger=None)
        self.ran: list[str] = []
        self.errors: list[Exception] = []

    async def scene(self, work: Callable[["App"], Awaitable[None]]) -> None:
        client = await nats.connect(service.url())
        self.jetstream = client.jetstream()
        await self.jetstream.add_stream(name=self.name, subjects=[self.name], duplicate_window=0.1)

        @self.broker.subscriber(
            self.name,
            durable="d",
            stream=JStream(self.name, declare=False),
            pull_sub=PullSub(batch_size=1),
            config=ConsumerConfig(ack_wait=1.0),
        )
        async def charge(body: str) -> None:
            self.ran.append(body)
            if self.errors:
                raise self.errors.pop(0)

        await self.broker.start()
        try:
            await work(self)
        finally:
            await self.broker.stop()
            await self.jetstream.delete_stream(self.name)
            await client.close()

    async def send(self, *keys: str) -> None:
        for key in keys:
            headers = {"message_id": key, "content-type": "text/plain"} if key else None
            await self.jetstream.publish(self.name, key.encode(), headers=headers)

    async def settled(self) -> None:
        async def holds_nothing() -> bool:
            info = await self.jetstream.consumer_info(self.name, "d")
            return not info.num_pending and not info.num_ack_pending

        await until(holds_nothing)


def run(work: Callable[[App], Awaitable[None]], **options: Any) -> App:
    async def scene() -> App:
        policy = semel.Policy(max_attempts=3)
        async with semel.aopen("memory:", consumer="billing", **({"policy": policy} | options)) as once:
            app = App(once)
            await app.scene(work)
            return app

    return asyncio.run(scene())


def test_duplicates_are_acknowledged_without_running() -> None:
    async def work(app: App) -> None:
        await app.send("a", "b", "a", "b", "a")
        await app.settled()

    assert sorted(run(work).ran) == ["a", "b"]


def test_a_failed_handler_is_delivered_again_whatever_the_ack_policy_would_do() -> None:
    async def work(app: App) -> None:
        app.errors = [RuntimeError("not yet"), RuntimeError("not yet")]
        await app.send("a")
        await until(lambda: len(app.ran) == 3)  # between two deliveries the consumer holds nothing
        await app.settled()

    assert run(work).ran == ["a", "a", "a"]


def test_what_fails_for_good_is_rejected_and_runs_no_more() -> None:
    async def work(app: App) -> None:
        app.errors = [RuntimeError("never")] * 10
        await app.send("a")
        await until(lambda: len(app.ran) == 3)
        await app.settled()
        await app.send("a")
        await app.settled()

    assert run(work).ran == ["a", "a", "a"]


def test_a_message_without_an_id_is_rejected_though_the_framework_made_one_up() -> None:
    async def work(app: App) -> None:
        await app.send("")
        await app.settled()

    assert run(work).ran == []


def test_the_handlers_own_words_count() -> None:
    async def work(app: App) -> None:
        app.errors = [AckMessage(), RejectMessage()]
        await app.send("a", "b", "a", "b")
        await app.settled()

    assert sorted(run(work).ran) == ["a", "b"]


def test_modes_with_transactions_are_refused(tmp_path: Any) -> None:
    with pytest.raises(UsageError, match="transaction"):
        once_middleware(semel.aopen(f"sqlite:///{tmp_path}/a.db", consumer="c", mode="inbox"))
