"""Batch handlers under claims: one call for what is new, one by one when that fails, an outcome for each."""

import asyncio
from typing import Any

import pytest

import semel
from semel.brokers import Arrival, Route, Runner, RunnerLimits
from semel.errors import NotInHandler, UsageError
from semel.testing.queue import Queue
from tests.brokers.test_runner import Paid, client, queue, send, working
from tests.waiting import until

__all__ = ["queue"]  # a fixture

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def worked(queue: Queue, route: Route, **pace: Any) -> Runner:
    runner = Runner(queue.source(), [route], pace=RunnerLimits(**pace))
    await working(runner, lambda: until(lambda: len(queue) == 0))
    return runner


@pytest.mark.parametrize("blocks", [True, False], ids=["blocks", "awaits"])
async def test_one_call_for_all_that_are_new(queue: Queue, blocks: bool) -> None:
    calls: list[list[str]] = []

    def charge(paid: list[Paid]) -> None:
        calls.append([each.order for each in paid])

    async def acharge(paid: list[Paid]) -> None:
        charge(paid)

    once = client()
    keys = [f"k{n}" for n in range(50)]
    send(queue, *keys, "k0", "k1")
    runner = await worked(queue, Route(charge if blocks else acharge, once=once, batch=True))
    assert calls == [keys]
    assert (runner.counts.acked, runner.counts.duplicates) == (52, 2)


async def test_a_batch_that_fails_is_tried_one_by_one_and_only_the_bad_one_is_held_back(queue: Queue) -> None:
    calls: list[list[str]] = []

    async def charge(paid: list[Paid]) -> None:
        calls.append([each.order for each in paid])
        if "bad" in calls[-1]:
            raise ValueError("never")

    policy = semel.Policy(permanent=(ValueError,), retry_delay_s=0.02)
    send(queue, "a", "bad", "c")
    queue.send(b"not json", {"message_id": "odd"})
    await worked(queue, Route(charge, once=client(policy=policy), batch=True))
    assert calls == [["a", "bad", "c"], ["a"], ["bad"], ["c"]]
    assert sorted(letter.key for _, letter in queue.dead) == ["bad", "odd"]


async def test_each_message_has_its_own_attempts(queue: Queue) -> None:
    calls: list[list[str]] = []

    async def charge(paid: list[Paid]) -> None:
        calls.append([each.order for each in paid])
        if calls.count(["b"]) < 3 and "b" in calls[-1]:
            raise RuntimeError("not yet")

    once = client()
    send(queue, "a", "b", "c")
    await worked(queue, Route(charge, once=once, batch=True))
    assert calls == [["a", "b", "c"], ["a"], ["b"], ["c"], ["b"], ["b"]]
    record = await once.records.lookup("b")
    assert isinstance(record, semel.Record)
    assert (record.state, record.attempt) == ("done", 3)


async def test_no_single_claim_is_the_current_one(queue: Queue) -> None:
    refused: list[bool] = []

    async def charge(messages: list[Arrival]) -> None:
        try:
            semel.current()
        except NotInHandler:
            refused.append(True)

    send(queue, "a", "b")
    await worked(queue, Route(charge, once=client(), batch=True))
    assert refused == [True]


async def test_a_drain_cancels_the_call_and_gives_every_attempt_back(queue: Queue) -> None:
    started = asyncio.Event()
    ended: list[str] = []

    async def charge(messages: list[Arrival]) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("ended")

    once = client()
    send(queue, "a", "b")
    runner = Runner(queue.source(), [Route(charge, once=once, batch=True)], pace=RunnerLimits(drain_s=0.05))
    running = asyncio.create_task(runner.run())
    await started.wait()
    runner.stop()
    await running
    assert (ended, len(queue)) == (["ended"], 2)
    for key in ("a", "b"):
        record = await once.records.lookup(key)
        assert isinstance(record, semel.Record)
        assert (record.state, record.owner) == ("claimed", b"")
        assert record.attempt == 0


@pytest.mark.parametrize("mode", ["mark", "quarantine"])
def test_modes_that_never_repeat_have_no_batches(mode: Any) -> None:
    async def charge(messages: list[Arrival]) -> None: ...

    with pytest.raises(UsageError, match="one by one"):
        Route(charge, once=client(mode=mode), batch=True)
