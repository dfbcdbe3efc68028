"""The contract of a source: the promises of a runner, as scenarios to run on a real broker.

With pytest, a broker's whole test is::

    class TestMyBroker(broker_contract.BrokerSuite):
        async def broker(self):
            return MyBroker(...)

where `MyBroker` sends messages to the broker and inspects it, through a client of its own.

Scenarios about outages, refusals, members, dead-letter places and probes need more of the suite: each method of
`broker_conditions.Conditions` that the broker has something for. A scenario that cannot happen on a broker is named in
`not_applicable` with the reason, and is listed by pytest under that reason; nothing is left out silently.

Features of one broker are tested with that broker: the committed offsets and transactions of Kafka, the trimming of
Redis streams, the message groups of SQS. So are scenarios that kill processes, and the exit codes of `semel
consume` (78 for the errors `SourceRefused` and `Fenced`, which the scenarios expect of the runner).
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from time import monotonic
from typing import Any

from semel.brokers.dead_letters import letter_of
from semel.brokers.source import Arrival, DeadLetterInfo
from semel.client.claims import Claimed
from semel.policy import Policy
from semel.testing import broker_operations, broker_probes
from semel.testing.broker_conditions import CONDITIONS, Conditions, CutOffBroker
from semel.testing.broker_scene import (
    SCENARIOS,
    WITHIN_S,
    Broker,
    Scene,
    Sent,
    messages_of,
    needs_order,
    scenario,
)
from semel.testing.contract.harness import check, equal

__all__ = [
    "CONDITIONS",
    "SCENARIOS",
    "Broker",
    "BrokerSuite",
    "Conditions",
    "CutOffBroker",
    "Scene",
    "Sent",
    "arun",
    "broker_operations",
    "broker_probes",
]

NOTICED_S = 1.0
"""Longer than a runner takes to notice a stop; it sends no signal when it does."""
DUE_S = 0.7
LOOKS_MAX = 5
"""How often a runner may claim a message that is busy for one short lease."""


@scenario
async def each_message_runs_once_and_is_acknowledged(scene: Scene) -> None:
    """A batch of new messages."""
    keys = [f"k{n}" for n in range(50)]
    await scene.broker.send(messages_of(*keys))
    async with scene.running():
        await scene.wait_until_settled()
    equal(sorted(scene.ran), sorted(keys), "handled keys")


@scenario
async def a_duplicate_is_acknowledged_without_running(scene: Scene) -> None:
    """The producer sent it again."""
    await scene.broker.send(messages_of("a", "b"))
    async with scene.running():
        await scene.wait_until_settled()
        await scene.broker.send(messages_of("a", "a"))
        await scene.wait_until_settled()
    equal(sorted(scene.ran), ["a", "b"], "handled keys")


@scenario
async def an_idle_source_answers_with_nothing(scene: Scene) -> None:
    """No message, no error, no wait longer than `wait_s`; `ack`, `nack` and `extend` accept empty lists."""
    source = scene.broker.source()
    await source.open()
    try:
        async with asyncio.timeout(WITHIN_S):
            equal(list(await source.receive(10, 0.05)), [], "messages from an empty broker")
            await source.ack([])
            await source.nack([], 0.0)
            equal(list(await source.extend([])), [], "messages lost from an empty list")
    finally:
        await source.close()


@scenario
async def what_was_not_acknowledged_is_delivered_again(scene: Scene) -> None:
    """A consumer dies with messages in hand."""
    keys = ["a", "b", "c"]
    await scene.broker.send(messages_of(*keys))
    await scene.deliver_to_the_dead(len(keys))
    async with scene.running(source=scene.broker.source(deadline_s=1.0)):
        await scene.wait_until_settled()
    equal(sorted(scene.ran), keys, "handled keys")


@scenario
async def nothing_is_acknowledged_before_it_is_recorded(scene: Scene) -> None:
    """While the handler runs, the broker still holds the message."""
    held: list[int] = []

    async def handler(_message: Arrival) -> None:
        held.append(await scene.broker.count_unsettled())

    await scene.broker.send(messages_of("a"))
    async with scene.running(handler):
        await scene.wait_until_settled()
    equal(held, [1], "messages that the broker held while the handler ran")


@scenario
async def a_failed_handler_is_tried_again(scene: Scene) -> None:
    """Transient: released, redelivered, counted."""

    async def handler(message: Arrival) -> None:
        await scene.note(message)
        if scene.ran != ["a", "a", "a"]:
            raise RuntimeError("not yet")

    await scene.broker.send(messages_of("a"))
    async with scene.running(handler):
        await scene.wait_until_settled()
    equal(scene.ran, ["a", "a", "a"], "handled keys")


@scenario
async def a_broker_that_counts_deliveries_counts_each(scene: Scene) -> None:
    """If no record counts attempts, the broker's own count limits them."""
    counts: list[int] = []

    async def handler(message: Arrival) -> None:
        counts.append(message.deliveries)
        if len(counts) < LOOKS_MAX:
            raise RuntimeError("not yet")

    await scene.broker.send(messages_of("a"))
    async with scene.running(handler):
        await scene.wait_until_settled()
    check(counts in ([0] * LOOKS_MAX, list(range(1, LOOKS_MAX + 1))), f"deliveries are counted: {counts}")


@scenario
async def poison_goes_to_the_dead_letters_with_its_headers(scene: Scene) -> None:
    """Permanent: a copy with key, reason, attempts and stack; other messages still run."""

    async def handler(message: Arrival) -> None:
        if bytes(message.body) == b"bad":
            raise ValueError("naïve\nlines")
        await scene.note(message)

    await scene.broker.send([*messages_of("a", "b"), Sent("bad", b"bad"), *messages_of("c")])
    once = scene.client(policy=Policy(permanent=(ValueError,), retry_delay_s=0.05))
    async with scene.running(handler, once=once):
        await scene.wait_until_settled()
    equal(sorted(scene.ran), ["a", "b", "c"], "handled keys")
    dead = await scene.broker.dead()
    equal([body for _, body in dead], [b"bad"], "the dead letters")
    letter = letter_of(dead[0][0])
    check(letter is not None, "a dead letter has semel's headers")
    assert letter is not None
    equal(
        (letter.key, letter.reason, letter.attempts),
        ("bad", "failed", 1),
        "key, reason and attempts in the headers",
    )
    check("naïve\nlines" in letter.stack, "the stack is in the headers")


@scenario
async def a_dead_letter_is_confirmed_before_the_record_says_failed(scene: Scene) -> None:
    """A crash in between writes the dead letter twice; the reverse order would lose the message."""
    states: list[str] = []
    once = scene.client(policy=Policy(permanent=(ValueError,), retry_delay_s=0.05))
    source = scene.broker.source()
    dead_letter = source.dead_letter

    async def watch(arrival: Arrival, letter: DeadLetterInfo) -> None:
        record = await once.records.lookup(letter.key)
        states.append("absent" if record is None else record.state)
        await dead_letter(arrival, letter)

    async def handler(_message: Arrival) -> None:
        raise ValueError("never")

    source.dead_letter = watch  # type: ignore[method-assign]
    await scene.broker.send(messages_of("a"))
    async with scene.running(handler, once=once, source=source):
        await scene.wait_until_settled()
    record = await once.records.lookup("a")
    states.append("absent" if record is None else record.state)
    equal(
        states, ["claimed", "failed"], "state of the record when the dead letter was written, and at the end"
    )


@scenario
async def a_failed_message_comes_back_when_it_is_due_and_not_before(scene: Scene) -> None:
    """A broker that redelivers it at once would cause a busy loop."""
    times: list[float] = []
    source = scene.broker.source()
    receive = source.receive

    async def watch(limit: int, wait_s: float) -> Sequence[Arrival]:
        found = await receive(limit, wait_s)
        times.extend(monotonic() for _ in found)
        return found

    async def handler(message: Arrival) -> None:
        await scene.note(message)
        if len(scene.ran) == 1:
            raise RuntimeError("not yet")

    source.receive = watch  # type: ignore[method-assign]
    await scene.broker.send(messages_of("a"))
    once = scene.client(policy=Policy(retry_delay_s=1.0))
    async with scene.running(handler, once=once, source=source):
        await scene.wait_until_settled()
    equal(scene.ran, ["a", "a"], "handled keys")
    if source.redelivers:
        equal(len(times), 2, "number of deliveries")
        check(
            times[1] - times[0] > DUE_S, f"delivered again {times[1] - times[0]:.3f} s after a delay of 1 s"
        )


@scenario
async def a_message_without_a_key_goes_to_the_dead_letters(scene: Scene) -> None:
    """No key is ever invented."""
    await scene.broker.send([Sent("", b"nobody"), *messages_of("a")])
    async with scene.running():
        await scene.wait_until_settled()
    equal(scene.ran, ["a"], "handled keys")
    equal([body for _, body in await scene.broker.dead()], [b"nobody"], "the dead letters")


@scenario
async def an_empty_body_arrives_as_it_was_sent(scene: Scene) -> None:
    """A message may be its key alone."""
    bodies: list[object] = []

    async def handler(message: Arrival) -> None:
        bodies.append(message.body)

    await scene.broker.send([Sent("a", b"")])
    async with scene.running(handler):
        await scene.wait_until_settled()
    equal(bodies, [b""], "the bodies")


@scenario
async def a_busy_message_waits_for_its_owner_and_is_not_dropped(scene: Scene) -> None:
    """Another worker holds the claim, and dies."""
    once = scene.client(lease="700ms")
    claim = await once.claim("a")
    check(isinstance(claim, Claimed), "the other worker has the claim")
    await scene.broker.send(messages_of("a"))
    async with scene.running(once=once) as runner:
        await scene.wait_until_settled()
    equal(scene.ran, ["a"], "handled keys")
    check(runner.counts.parked + runner.counts.returned <= LOOKS_MAX, "a busy message caused a busy loop")


@scenario
async def a_handler_longer_than_the_deadline_runs_once(scene: Scene) -> None:
    """The runner extends the message's deadline while the handler runs."""

    async def handler(message: Arrival) -> None:
        await scene.note(message)
        await asyncio.sleep(3.5)  # real time: three of the broker's deadlines, which it measures itself

    await scene.broker.send(messages_of("a"))
    async with scene.running(handler, source=scene.broker.source(deadline_s=1.0)) as runner:
        await scene.wait_until_settled()
    equal(scene.ran, ["a"], "handled keys")
    equal(runner.counts.received, 1, "number of deliveries")


@scenario
async def a_stop_finishes_what_runs_and_leaves_the_rest_to_others(scene: Scene) -> None:
    """Drain: nothing is lost, and nothing runs twice."""
    started, released = asyncio.Event(), asyncio.Event()
    begun: list[str] = []

    async def slow(message: Arrival) -> None:
        begun.append(bytes(message.body).decode())
        started.set()
        await released.wait()
        await scene.note(message)

    keys = [f"k{n}" for n in range(8)]
    await scene.broker.send(messages_of(*keys))
    once = scene.client()
    source = scene.broker.source(deadline_s=5.0)
    async with scene.running(slow, once=once, source=source, batch=2, concurrency=2) as runner:
        await asyncio.wait_for(started.wait(), WITHIN_S)
        runner.stop()
        await asyncio.sleep(NOTICED_S)
        released.set()
    equal(sorted(scene.ran), sorted(begun), "finished handlers are the started ones")
    check(0 < len(scene.ran) < len(keys), "the stop came in the middle")
    equal(runner.counts.acked, len(scene.ran), "acknowledged messages")
    async with scene.running(once=once):
        await scene.wait_until_settled()
    equal(sorted(scene.ran), sorted(keys), "handled keys")


@scenario
async def two_runners_share_the_work(scene: Scene) -> None:
    """Two consumers of one group."""
    keys = [f"k{n}" for n in range(60)]
    await scene.broker.send(messages_of(*keys))
    once = scene.client()
    async with scene.running(once=once, batch=5), scene.running(once=once, batch=5):
        await scene.wait_until_settled()
    equal(sorted(scene.ran), sorted(keys), "handled keys")


@needs_order
async def a_lane_keeps_its_order_though_its_first_fails(scene: Scene) -> None:
    """If the broker promises order, a failed message is retried before the messages behind it run."""
    failed: set[str] = set()

    async def handler(message: Arrival) -> None:
        body = bytes(message.body).decode()
        if body.endswith("2") and body not in failed:
            failed.add(body)
            raise RuntimeError("once")
        await scene.note(message)

    lanes = ("x", "y")
    await scene.broker.send(
        [each for n in range(6) for lane in lanes for each in messages_of(f"{lane}{n}", lane=lane)]
    )
    async with scene.running(handler, order=True):
        await scene.wait_until_settled()
    for lane in lanes:
        equal([key for key in scene.ran if key[0] == lane], [f"{lane}{n}" for n in range(6)], f"lane {lane}")


async def arun(name: str, broker: Broker) -> None:
    """Run one scenario on a broker, and clean up. Raises `AssertionError` if the promise is broken."""
    run, ordered = SCENARIOS[name]
    try:
        if broker.ordered or not ordered:
            async with asyncio.timeout(2 * WITHIN_S):
                await run(Scene(broker))
    finally:
        await broker.close()


NO_ORDER = "the broker keeps no order"


class BrokerSuite(Conditions, ABC):
    """The contract as a class for pytest to collect: derive from it, name it `Test...`, implement `broker`."""

    ordered: bool = False
    """Whether the broker keeps an order within lanes."""

    @abstractmethod
    async def broker(self) -> Broker:
        """Return a fresh queue, topic or stream for one scenario."""

    def _left_out(self) -> dict[str, str]:
        """Return the scenarios that cannot happen on this broker, with the reasons."""
        unordered = {} if self.ordered else {name: NO_ORDER for name, (_, need) in SCENARIOS.items() if need}
        return {**unordered, **self.not_applicable}

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Parametrize the tests with the scenarios."""
        left_out = self._left_out()
        if "semel_scenario" in metafunc.fixturenames:
            names = [name for name in (*SCENARIOS, *CONDITIONS) if name not in left_out]
            metafunc.parametrize("semel_scenario", names)
        if "semel_left_out" in metafunc.fixturenames:
            ids = [f"{name}: {reason}" for name, reason in left_out.items()]
            metafunc.parametrize("semel_left_out", left_out, ids=ids)

    def test_contract(self, semel_scenario: str) -> None:
        """A runner keeps one promise on this broker."""

        async def scenario() -> None:
            if semel_scenario in CONDITIONS:
                async with asyncio.timeout(4 * WITHIN_S):
                    await CONDITIONS[semel_scenario](self)
            else:
                await arun(semel_scenario, await self.broker())

        asyncio.run(scenario())

    def test_not_applicable(self, semel_left_out: str) -> None:
        """A scenario that cannot happen on this broker has a reason; the test's name shows it."""
        check(semel_left_out in {**SCENARIOS, **CONDITIONS}, f"there is no scenario {semel_left_out}")
        check(bool(self._left_out()[semel_left_out]), f"not_applicable has no reason for {semel_left_out}")
