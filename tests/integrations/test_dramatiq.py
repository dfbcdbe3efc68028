"""Actors in a real Dramatiq worker, on a real Redis."""

import os
from collections import Counter
from collections.abc import Iterator
from threading import Event
from typing import Any

import dramatiq
import pytest
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import Retries

import semel
from semel.errors import UsageError
from semel.integrations.dramatiq import OnceActors
from tests.services import redis
from tests.waiting import await_true

pytestmark = [pytest.mark.slow, pytest.mark.service]


@pytest.fixture
def place() -> Iterator[tuple[Any, semel.Semel]]:
    store = redis.place(f"dramatiq {os.urandom(4).hex()}")
    retries = Retries(min_backoff=1, max_backoff=2)
    broker: Any = RedisBroker(url=store.partition("?")[0], middleware=[retries])  # type: ignore[no-untyped-call]
    with semel.open(store, consumer="billing", lease="2s") as once:
        broker.add_middleware(OnceActors(once))
        yield broker, once
    broker.close()


def test_an_actor_runs_once_for_its_key(place: Any) -> None:
    broker, _ = place
    ran: Counter[str] = Counter()
    seen: list[str] = []
    began, go = Event(), Event()

    @dramatiq.actor(broker=broker, once="order")
    def charge(order: str) -> None:
        ran[order] += 1
        if order == "flaky" and ran[order] < 3:
            raise TimeoutError
        if order == "slow":
            began.set()
            go.wait(60)

    @dramatiq.actor(broker=broker, once=True)
    def by_id(name: str) -> None:
        ran[name] += 1

    @dramatiq.actor(broker=broker)
    def last() -> None:
        charge("a")  # a direct call: not guarded
        seen.append("last")

    worker = dramatiq.Worker(broker, worker_timeout=20, worker_threads=2)
    worker.start()
    try:
        for order in ("a", "a", "flaky", "b"):
            charge.send(order)
        message = by_id.message("x")
        broker.enqueue(message)
        broker.enqueue(message.copy())  # as a redelivery: the same message id
        by_id.send("x")
        assert await_true(lambda: ran == {"a": 1, "b": 1, "flaky": 3, "x": 2})
        charge.send("slow")
        assert began.wait(60)
        charge.send("slow")  # while the first runs: it is enqueued again for later
        last.send()
        assert await_true(lambda: seen == ["last"])
        go.set()
        assert await_true(lambda: not worker.consumers["default"].delay_queue.unfinished_tasks)
        broker.join("default", timeout=60_000)
        assert ran == {"a": 2, "b": 1, "flaky": 3, "x": 2, "slow": 1}
    finally:
        go.set()
        worker.stop()
    charge("direct")
    charge("direct")
    assert ran["direct"] == 2


def test_an_inbox_is_refused() -> None:
    with semel.open("sqlite:///never.db", consumer="c", mode="inbox") as inbox, pytest.raises(UsageError):
        OnceActors(inbox)
