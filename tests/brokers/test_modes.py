"""Modes other than lease and inbox, through the runner."""

from typing import Any

import pytest

import semel
from semel.brokers import Arrival, Runner, RunnerLimits
from semel.observe import events
from semel.testing.queue import Queue
from tests.brokers.test_runner import client, queue, send, working
from tests.waiting import until

__all__ = ["queue"]  # a fixture

pytestmark = pytest.mark.anyio
QUICK = semel.Policy(retry_delay_s=0.02, max_attempts=3, permanent=(KeyError,))


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Script:
    """A handler that raises what it is told to, attempt by attempt."""

    def __init__(self, *errors: BaseException | None) -> None:
        self.errors = list(errors)
        self.ran = 0

    def handler(self) -> Any:
        async def charge(message: Arrival) -> None:
            self.ran += 1
            error = self.errors.pop(0) if self.errors else None
            if error is not None:
                raise error

        return charge


async def worked(queue: Queue, script: Script, once: semel.AsyncSemel) -> Runner:
    runner = Runner(queue.source(), script.handler(), once=once, pace=RunnerLimits())
    await working(runner, lambda: until(lambda: len(queue) == 0))
    return runner


async def test_quarantine_buries_what_nobody_knows_and_runs_it_no_more(queue: Queue) -> None:
    once, script = client(mode="quarantine", policy=QUICK), Script(RuntimeError("halfway"))
    send(queue, "a", "b")
    await worked(queue, script, once)
    assert script.ran == 2
    [(_, letter)] = queue.dead
    assert (letter.reason, letter.error) == ("unknown", "RuntimeError: halfway")
    send(queue, letter.key)  # delivered again: still nobody knows
    await worked(queue, script, once)
    assert (script.ran, [each.reason for _, each in queue.dead]) == (2, ["unknown", "unknown"])


async def test_quarantine_tries_again_what_was_not_applied(queue: Queue) -> None:
    once, script = client(mode="quarantine", policy=QUICK), Script(semel.NotApplied("not sent"))
    send(queue, "a")
    await worked(queue, script, once)
    assert (script.ran, queue.dead) == (2, [])


async def test_a_mark_runs_at_most_once_also_when_the_handler_fails(queue: Queue) -> None:
    once, script = client(mode="mark", policy=QUICK), Script(RuntimeError("lost"))
    send(queue, "a", "a", "b")
    await worked(queue, script, once)
    assert script.ran == 2
    [(_, letter)] = queue.dead
    assert (letter.reason, letter.error) == ("failed", "RuntimeError: lost"), "nobody would run it again"


async def test_observe_suppresses_nothing_and_counts(queue: Queue) -> None:
    once, script = client(mode="observe", policy=QUICK), Script()
    send(queue, "a", "a", "b")
    await worked(queue, script, once)
    assert (script.ran, once.observed.runs, once.observed.duplicates) == (3, 3, 1)


@pytest.mark.parametrize("redelivers", [True, False])
async def test_observe_gives_up_too_without_spinning(redelivers: bool) -> None:
    queue = Queue(deadline_s=10, redelivers=redelivers)
    once, script = client(mode="observe", policy=QUICK), Script(*[RuntimeError("never")] * 100)
    send(queue, "a")
    await worked(queue, script, once)
    assert script.ran == 3
    [(_, letter)] = queue.dead
    assert (letter.reason, letter.key) == ("failed", "a")


async def test_a_type_without_deduplication_gives_up_too(queue: Queue) -> None:
    once, script = client(policy=QUICK), Script(*[RuntimeError("never")] * 100)
    await once.windows.set("off", event_type="noise")
    queue.send(b"{}", {"message_id": "a", "ce_type": "noise"})
    await worked(queue, script, once)
    assert (script.ran, len(queue.dead)) == (3, 1)


async def test_hooks_hear_where_a_message_came_from_and_whether_it_was_redelivered(queue: Queue) -> None:
    heard: list[events.HookEvent] = []

    async def charge(_message: Arrival) -> None: ...

    async def twice() -> None:
        for _ in range(2):
            send(queue, "a")
            await until(lambda: len(queue) == 0)

    await working(Runner(queue.source(), charge, once=client(hooks=[heard.append])), twice)
    received = [each for each in heard if isinstance(each, events.Received)]
    assert [each.source for each in received] == ["queue", "queue"]
    [copy] = [each for each in heard if isinstance(each, events.Duplicate)]
    assert copy.reason == "producer"  # the broker delivered each of the two once
