"""The loop's own habits, on a queue in the same process."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from time import monotonic
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

import semel
from semel.brokers import Arrival, Route, Runner, RunnerLimits
from semel.core.settlement import retry_dead_letter
from semel.errors import KeyMissing, SourceUnavailable
from semel.observe.prometheus import PrometheusHook
from semel.stores import MemoryStore
from semel.testing.queue import Queue
from tests.waiting import until

pytestmark = pytest.mark.anyio
WITHIN_S = 20.0


class Paid(msgspec.Struct):
    order: str


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def queue() -> Queue:
    return Queue(deadline_s=10)


def client(**options: Any) -> semel.AsyncSemel:
    policy = options.pop("policy", semel.Policy(retry_delay_s=0.02))
    return semel.aopen("memory:", consumer="billing", policy=policy, **options)


def send(queue: Queue, *keys: str, **more: Any) -> None:
    for key in keys:
        queue.send(b'{"order":"%s"}' % key.encode(), {"message_id": key}, **more)


async def working(runner: Runner, scene: Callable[[], Awaitable[None]]) -> None:
    """Run the scene while the runner works, then stop it."""
    running = asyncio.create_task(runner.run())
    try:
        scened = asyncio.ensure_future(scene())
        await asyncio.wait([scened, running], return_when=asyncio.FIRST_COMPLETED)
        if running.done() and not scened.done():
            scened.cancel()
            await running
        await scened
    finally:
        runner.stop()
        async with asyncio.timeout(WITHIN_S):
            await running


async def test_a_thousand_deliveries_with_duplicates_run_once_each_and_are_all_acked(queue: Queue) -> None:
    ran: list[str] = []

    async def charge(paid: Paid) -> None:
        ran.append(paid.order)

    keys = [f"k{n}" for n in range(700)]
    send(queue, *keys, *keys[::2][:300])
    runner = Runner(queue.source(), charge, once=client())
    await working(runner, lambda: until(lambda: len(queue) == 0))
    assert sorted(ran) == sorted(keys)
    assert (runner.counts.received, runner.counts.acked, runner.counts.duplicates) == (1000, 1000, 300)


async def test_a_handler_that_blocks_runs_in_a_thread_with_its_context(queue: Queue) -> None:
    seen: list[tuple[str, int]] = []

    def charge(paid: Paid) -> None:
        semel.step("note", seen.append, (semel.current().key, semel.current().attempt))

    send(queue, "a")
    await working(Runner(queue.source(), charge, once=client()), lambda: until(lambda: len(queue) == 0))
    assert seen == [("a", 1)]


async def test_a_failed_handler_is_tried_again_with_the_next_attempt(queue: Queue) -> None:
    attempts: list[int] = []

    async def charge(message: Arrival) -> None:
        attempts.append(semel.current().attempt)
        if len(attempts) < 3:
            raise RuntimeError("not yet")

    send(queue, "a")
    await working(Runner(queue.source(), charge, once=client()), lambda: until(lambda: len(queue) == 0))
    assert attempts == [1, 2, 3]


async def test_poison_is_buried_before_it_is_failed_and_then_acked(queue: Queue) -> None:
    once = client(policy=semel.Policy(permanent=(ValueError,), retry_delay_s=0.02))
    states: list[Any] = []

    async def charge(message: Arrival) -> None:
        raise ValueError("never")

    source = queue.source()
    dead_letter = source.dead_letter

    async def watched(arrival: Arrival, letter: Any) -> None:
        record = await once.records.lookup("a")
        assert isinstance(record, semel.Record)
        states.append(record.state)
        await dead_letter(arrival, letter)

    source.dead_letter = watched  # type: ignore[method-assign]
    send(queue, "a", "a")
    await working(Runner(source, charge, once=once), lambda: until(lambda: len(queue) == 0))
    [(message, letter)] = queue.dead
    assert (letter.key, letter.reason, letter.attempts, letter.consumer) == ("a", "failed", 1, "billing")
    assert "ValueError: never" in letter.stack
    assert message.headers == {"message_id": "a"}
    assert states == ["claimed"]
    record = await once.records.lookup("a")
    assert isinstance(record, semel.Record)
    assert (record.state, record.fence) == ("failed", letter.fence)


async def test_a_dead_letter_that_is_not_taken_is_said_again(queue: Queue) -> None:
    once = client(policy=semel.Policy(permanent=(ValueError,), retry_delay_s=0.02))
    refusals = 2

    async def charge(message: Arrival) -> None:
        raise ValueError("never")

    source = queue.source()
    dead_letter = source.dead_letter

    async def reluctant(arrival: Arrival, letter: Any) -> None:
        nonlocal refusals
        if refusals:
            refusals -= 1
            raise semel.errors.SourceUnavailable("not now")
        await dead_letter(arrival, letter)

    source.dead_letter = reluctant  # type: ignore[method-assign]
    send(queue, "a")
    await working(Runner(source, charge, once=once), lambda: until(lambda: len(queue) == 0))
    assert len(queue.dead) == 1
    assert refusals == 0


async def test_a_refused_dead_letter_is_counted_and_has_the_handlers_error_also_after_a_restart(
    queue: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    registry, ran, refusals = CollectorRegistry(), 0, 0
    policy = semel.Policy(max_attempts=1, retry_delay_s=0.01)
    once = client(policy=policy, hooks=[PrometheusHook(registry)])

    async def charge(message: Arrival) -> None:
        nonlocal ran
        ran += 1
        raise ValueError("never")

    async def refuse(arrival: Arrival, letter: Any) -> None:
        nonlocal refusals
        refusals += 1
        raise SourceUnavailable("no such place")

    source = queue.source()
    source.dead_letter = refuse  # type: ignore[method-assign]
    send(queue, "a")
    first = Runner(source, charge, once=once)
    await working(first, lambda: until(lambda: refusals >= 4))
    stuck = registry.get_sample_value("semel_dead_letters_stuck_total", {"consumer": "billing"})
    assert (ran, first.counts.errors, first.counts.stuck, stuck) == (1, 1, 1, refusals)
    assert "the handler failed" not in caplog.text, "it ran once, and the line about its dead letter says why"
    assert caplog.text.count("a dead letter cannot be written") == 1
    await working(Runner(queue.source(), charge, once=once), lambda: until(lambda: len(queue) == 0))
    [(_, letter)] = queue.dead
    assert ran == 1
    assert letter.error.endswith("attempt 1 raised ValueError: never")
    assert letter.stack.endswith(".charge")


def test_a_refused_dead_letter_is_tried_again_within_half_a_minute() -> None:
    policy = semel.Policy(retry_delay_s=3.0)
    assert [retry_dead_letter(policy, attempt).delay_s for attempt in (1, 2, 4, 5, 99)] == [3, 6, 24, 30, 30]


async def test_what_does_not_read_as_the_annotation_says_is_poison(queue: Queue) -> None:
    async def charge(paid: Paid) -> None:
        raise AssertionError

    queue.send(b'{"order": 7}', {"message_id": "a"})
    await working(Runner(queue.source(), charge, once=client()), lambda: until(lambda: len(queue) == 0))
    assert "MessageInvalid" in queue.dead[0][1].error


async def test_more_attempts_than_allowed_are_buried(queue: Queue) -> None:
    once = client(policy=semel.Policy(max_attempts=2, retry_delay_s=0.02))

    async def charge(message: Arrival) -> None:
        raise RuntimeError("again")

    send(queue, "a")
    await working(Runner(queue.source(), charge, once=once), lambda: until(lambda: len(queue) == 0))
    assert "AttemptsExhausted" in queue.dead[0][1].error


async def test_a_message_without_a_key_is_buried_or_refused(queue: Queue) -> None:
    async def charge(message: Arrival) -> None:
        raise AssertionError

    queue.send(b"{}")
    await working(Runner(queue.source(), charge, once=client()), lambda: until(lambda: len(queue) == 0))
    assert queue.dead[0][1].reason == "no-key"
    queue.send(b"{}")
    with pytest.raises(KeyMissing):
        await Runner(queue.source(), charge, once=client(), pace=RunnerLimits(no_key="refuse")).run()
    assert len(queue) == 1


def test_a_message_without_a_body_that_has_no_key_is_refused_with_the_fix() -> None:
    route = Route(print, once=client(), key=semel.keys.body("order"))
    tombstone = Arrival(headers={"message_id": "a"}, body=None, transport="kafka")
    with pytest.raises(KeyMissing, match="tombstones=skip"):
        route.delivery(tombstone, "", None)


async def test_a_busy_one_is_parked_until_its_owner_is_done_and_never_dropped(queue: Queue) -> None:
    store = MemoryStore()
    once = semel.aopen(store, consumer="billing", lease="300ms")
    ran: list[str] = []

    async def charge(message: Arrival) -> None:
        ran.append("ran")

    claim = await once.claim("a")
    assert isinstance(claim, semel.Claimed)  # and its owner dies here
    send(queue, "a")
    runner = Runner(queue.source(), charge, once=once)
    await working(runner, lambda: until(lambda: len(queue) == 0))
    assert ran == ["ran"]
    assert 1 <= runner.counts.parked <= 3


async def test_a_full_room_sends_busy_ones_back_to_the_broker(queue: Queue) -> None:
    once = semel.aopen(MemoryStore(), consumer="billing", lease="400ms")

    async def charge(message: Arrival) -> None:
        return None

    keys = [f"k{n}" for n in range(6)]
    for key in keys:
        await once.claim(key)
    send(queue, *keys)
    runner = Runner(queue.source(), charge, once=once, pace=RunnerLimits(room=2))
    await working(runner, lambda: until(lambda: len(queue) == 0))
    assert runner.counts.returned >= 4


async def test_a_handler_longer_than_the_brokers_deadline_runs_once(queue: Queue) -> None:
    queue.deadline_s = 0.6
    ran: list[int] = []
    extended: list[float] = []
    source = queue.source()
    extend = source.extend

    async def counted(arrivals: Sequence[Arrival]) -> Sequence[Arrival]:
        extended.append(monotonic())
        return await extend(arrivals)

    source.extend = counted  # type: ignore[method-assign]

    async def charge(message: Arrival) -> None:
        ran.append(message.deliveries)
        began = monotonic()
        await until(lambda: extended and extended[-1] - began > 2 * queue.deadline_s)

    send(queue, "a")
    runner = Runner(source, charge, once=client())
    await working(runner, lambda: until(lambda: len(queue) == 0))
    assert ran == [1]
    assert runner.counts.received == 1


async def test_a_stop_finishes_what_runs_and_gives_back_what_waits(queue: Queue) -> None:
    queue.deadline_s = 60.0
    started, go = asyncio.Event(), asyncio.Event()
    ran: list[str] = []

    async def charge(paid: Paid) -> None:
        started.set()
        await go.wait()
        ran.append(paid.order)

    once = client()
    send(queue, *(f"k{n}" for n in range(20)))
    first = Runner(queue.source(), charge, once=once, pace=RunnerLimits(batch=1, concurrency=1, drain_s=10))
    running = asyncio.create_task(first.run())
    await started.wait()
    first.stop()
    go.set()
    await running
    assert len(queue) == 20 - len(ran)
    second = Runner(queue.source(), charge, once=once)
    await working(second, lambda: until(lambda: len(queue) == 0))
    assert sorted(ran) == sorted(f"k{n}" for n in range(20))


async def test_a_handler_that_outlasts_the_drain_is_cancelled_and_its_attempt_given_back(
    queue: Queue,
) -> None:
    started = asyncio.Event()
    attempts: list[int] = []

    async def charge(message: Arrival) -> None:
        attempts.append(semel.current().attempt)
        started.set()
        if len(attempts) == 1:
            await asyncio.Event().wait()

    once = client()
    send(queue, "a")
    first = Runner(queue.source(), charge, once=once, pace=RunnerLimits(drain_s=0.05))
    running = asyncio.create_task(first.run())
    await started.wait()
    first.stop()
    await running
    assert len(queue) == 1
    await working(Runner(queue.source(), charge, once=once), lambda: until(lambda: len(queue) == 0))
    assert attempts == [1, 1]


@pytest.mark.parametrize("redelivers", [True, False])
async def test_lanes_keep_their_order_also_when_the_first_fails(redelivers: bool) -> None:
    queue = Queue(deadline_s=10, redelivers=redelivers)
    ran: dict[str, list[str]] = {"x": [], "y": []}
    failed: set[str] = set()

    async def charge(message: Arrival) -> None:
        key = dict(message.headers)["message_id"]
        if key not in failed and key.endswith("3"):
            failed.add(key)
            raise RuntimeError("once")
        ran[message.lane].append(key)

    for n in range(10):
        send(queue, f"x{n}", lane="x")
        send(queue, f"y{n}", lane="y")
    runner = Runner(queue.source(), charge, once=client(), pace=RunnerLimits(order=True))
    await working(runner, lambda: until(lambda: len(queue) == 0))
    assert ran == {"x": [f"x{n}" for n in range(10)], "y": [f"y{n}" for n in range(10)]}


async def test_handlers_never_exceed_their_number(queue: Queue) -> None:
    running = most = 0
    crowded = asyncio.Event()

    async def charge(message: Arrival) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 7:
            crowded.set()
        await crowded.wait()
        await asyncio.sleep(0)  # whoever else could start does
        running -= 1

    send(queue, *(f"k{n}" for n in range(200)))
    runner = Runner(queue.source(), charge, once=client(), pace=RunnerLimits(concurrency=7, batch=10))
    await working(runner, lambda: until(lambda: len(queue) == 0))
    assert most == 7


async def test_one_slow_message_does_not_hold_up_the_others(queue: Queue) -> None:
    go = asyncio.Event()
    ran: list[str] = []

    async def charge(paid: Paid) -> None:
        if paid.order == "k0":
            await go.wait()
        ran.append(paid.order)

    send(queue, *(f"k{n}" for n in range(50)))

    async def scene() -> None:
        await until(lambda: len(ran) == 49 and len(queue) == 1)
        go.set()
        await until(lambda: len(queue) == 0)

    await working(
        Runner(queue.source(), charge, once=client(), pace=RunnerLimits(batch=10, concurrency=3)), scene
    )
    assert ran[-1] == "k0"


async def test_an_absent_broker_is_waited_for(queue: Queue, caplog: pytest.LogCaptureFixture) -> None:
    ran: list[str] = []

    async def charge(paid: Paid) -> None:
        ran.append(paid.order)

    queue.away = True
    send(queue, "a")

    async def scene() -> None:
        await until(lambda: "cannot be reached" in caplog.text)
        queue.away = False
        await until(lambda: len(queue) == 0)

    await working(Runner(queue.source(), charge, once=client()), scene)
    assert ran == ["a"]


async def test_each_type_has_its_handler_and_client(queue: Queue) -> None:
    ran: list[tuple[str, str]] = []

    async def pay(message: Arrival) -> None:
        ran.append(("pay", dict(message.headers)["message_id"]))

    async def count(message: Arrival) -> None:
        ran.append(("count", dict(message.headers)["message_id"]))

    metrics = semel.aopen("memory:", consumer="metrics", mode="mark")
    routes = [Route(pay, once=client(), types=["paid"]), Route(count, once=metrics)]
    for key, kind in [("a", "paid"), ("b", "viewed"), ("a", "paid"), ("b", "viewed")]:
        queue.send(b"{}", {"message_id": key, "ce_type": kind})
    await working(Runner(queue.source(), routes), lambda: until(lambda: len(queue) == 0))
    assert sorted(ran) == [("count", "b"), ("pay", "a")]


async def test_a_middleware_surrounds_the_handler(queue: Queue) -> None:
    order: list[str] = []

    async def outer(message: Arrival, call: Any) -> Any:
        order.append("in")
        try:
            return await call(message)
        finally:
            order.append("out")

    async def charge(message: Arrival) -> None:
        order.append("handler")

    send(queue, "a")
    route = Route(charge, once=client(), middleware=[outer])
    await working(Runner(queue.source(), [route]), lambda: until(lambda: len(queue) == 0))
    assert order == ["in", "handler", "out"]


async def test_a_stop_ends_the_heartbeat_though_its_cancellation_is_lost(queue: Queue) -> None:
    """A driver may answer a cancellation with an error of its own, as if the broker were away."""
    queue.deadline_s = 0.03
    source = queue.source()
    lost = 0

    async def extend(arrivals: Sequence[Arrival]) -> Sequence[Arrival]:
        nonlocal lost
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            lost += 1
            raise SourceUnavailable("connection lost") from None
        raise AssertionError("nobody sets it")

    source.extend = extend  # type: ignore[method-assign]
    started = asyncio.Event()

    async def charge(paid: Paid) -> None:
        started.set()
        await asyncio.sleep(0.1)  # longer than it takes until the first heartbeat

    send(queue, "a")
    await working(Runner(source, charge, once=client()), lambda: until(started.is_set))
    assert lost == 1
