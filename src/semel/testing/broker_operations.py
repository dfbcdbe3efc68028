"""Scenarios about operation: stops, dead letters, redelivered messages, counters."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from semel.brokers.attempts import Attempt, Attempts
from semel.brokers.dead_letters import DeadLetter, letter_of
from semel.brokers.source import Arrival, DeadLetterInfo
from semel.client.claims import Claimed
from semel.errors import MessageTooLarge, SourceUnavailable
from semel.observe.counters import CounterHook
from semel.policy import Policy
from semel.testing.broker_scene import WITHIN_S, Scene, Sent, messages_of, scenario
from semel.testing.contract.harness import check, equal
from semel.types import Delivery

__all__ = ["STOP_S"]

STOP_S = 2.0
"""How long a stop may take while handlers of 0.2 s run. A quarter of a second is usual, and half a second with SQS;
the rest is for a busy computer. To run every received message would take ten seconds."""
NACKS_MAX = 5
"""Calls of `nack` that a stop may make for its hundred messages: one for claimed ones, one for the others."""
HANDLER_S = 0.2
MESSAGES = 100
LARGE = 1000
"""The bytes of a body that is said to be too large; compressed it is not."""


async def _wait_until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition():  # noqa: ASYNC110 - a thread or a runner sends no signal
            await asyncio.sleep(0.005)


async def _stop_in_the_middle(scene: Scene, handler: Any, begun: list[str], **options: Any) -> None:
    """Stop a runner while handlers run. No further handler starts, and the runner ends in time."""
    keys = [f"k{n:03}" for n in range(MESSAGES)]
    await scene.broker.send(messages_of(*keys))
    source = scene.broker.source(deadline_s=5.0)
    nack, nacks = source.nack, 0

    async def count_nack(arrivals: Sequence[Arrival], delay_s: float) -> None:
        nonlocal nacks
        nacks += 1
        await nack(arrivals, delay_s)

    source.nack = count_nack  # type: ignore[method-assign]
    async with scene.running(handler, source=source, **options) as runner:
        await _wait_until(lambda: scene.ran)
        runner.stop()
        scene.stopped = True
        started, stopped_at = len(begun), time.monotonic()
    took_s = time.monotonic() - stopped_at
    equal(len(begun), started, "handlers started before the stop, and in all")
    check(took_s < STOP_S, f"a stop took {took_s:.1f} s")
    check(
        nacks <= NACKS_MAX,
        f"{nacks} calls gave back {len(keys) - len(begun)} messages; one call takes all of them",
    )
    check(0 < len(scene.ran) < len(keys), "the stop came in the middle")
    check(runner.counts.received <= len(keys), "the stop received what it had given back")
    equal(sorted(scene.ran), sorted(begun), "finished handlers are the started ones")
    async with scene.running(handler, **options):
        await scene.wait_until_settled()
    equal(sorted(scene.ran), keys, "handled keys")


@scenario
async def a_stop_starts_no_further_handler(scene: Scene) -> None:
    """Mode lease: claims that did not start are released, and their messages are nacked."""
    begun: list[str] = []

    async def slow(message: Arrival) -> None:
        begun.append(bytes(message.body).decode())
        await asyncio.sleep(0 if scene.stopped else HANDLER_S)
        await scene.note(message)

    await _stop_in_the_middle(scene, slow, begun, once=scene.client(), concurrency=2)


@scenario
async def a_stop_commits_what_is_done_in_a_transaction(scene: Scene) -> None:
    """Mode inbox: the transaction commits early, and messages that did not start are nacked."""
    begun: list[str] = []

    def slow(_connection: Any, message: Arrival) -> None:
        begun.append(bytes(message.body).decode())
        time.sleep(0 if scene.stopped else HANDLER_S)
        scene.ran.append(bytes(message.body).decode())

    async with scene.inbox() as once:
        await _stop_in_the_middle(scene, slow, begun, once=once, concurrency=2)


class _Died(BaseException):
    """Raised by a handler in place of a real crash of its process."""


@scenario
async def what_was_delivered_before_runs_alone(scene: Scene) -> None:
    """Mode inbox: any message that a dead process held may have killed it."""
    keys = ["a", "b", "c"]
    calls: list[list[str]] = []

    def credit(_connection: Any, messages: list[bytes]) -> None:
        calls.append([message.decode() for message in messages])

    def hang(_connection: Any, messages: list[bytes]) -> None:
        credit(_connection, messages)
        raise _Died

    async with scene.inbox() as once:
        await _send_to_the_dead(scene, keys, hang, once)
        calls.clear()
        async with scene.running(credit, once=once, source=scene.broker.source(deadline_s=1.0), many=True):
            await scene.wait_until_settled()
    equal(sorted(calls), [["a"], ["b"], ["c"]], "the calls")


@scenario
async def what_ended_its_workers_is_given_up_and_its_neighbours_are_done(scene: Scene) -> None:
    """Mode inbox: its workers died as often as attempts are allowed; its neighbours' attempts do not count."""
    keys = ["a", "b", "killer"]
    attempts = 2

    def note(_connection: Any, message: Arrival) -> None:
        scene.ran.append(bytes(message.body).decode())

    def hang(_connection: Any, _messages: list[bytes]) -> None:
        raise _Died

    async with scene.inbox(policy=Policy(max_attempts=attempts, retry_delay_s=0.05)) as once:
        await _send_to_the_dead(scene, keys, hang, once)
        killer = Delivery(key="killer", body=Arrival(headers={}, body=b"killer"))
        for _ in range(attempts):  # a worker that dies while it runs the message leaves this record
            check(isinstance(await Attempts(once).begin(killer), Attempt), "an attempt begins")
        async with scene.running(note, once=once, source=scene.broker.source(deadline_s=1.0)):
            await scene.wait_until_settled()
    equal(sorted(scene.ran), ["a", "b"], "handled keys")
    [(headers, body)] = await scene.broker.dead()
    letter = letter_of(headers)
    assert letter is not None
    equal((body, letter.key, letter.reason), (b"killer", "killer", "failed"), "the dead letter")
    check("no end of the earlier ones was recorded" in letter.error, f"the error says why: {letter.error}")


async def _send_to_the_dead(scene: Scene, keys: list[str], hang: Any, once: Any) -> None:
    """Send messages and deliver them to a worker that dies before it acknowledges them."""
    await scene.broker.send(messages_of(*keys))
    got = await scene.deliver_to_the_dead(len(keys))
    # If the broker counts no deliveries, a runner records each attempt that it starts.
    if not got[0].deliveries:
        await _die_with(scene, hang, once)


async def _die_with(scene: Scene, handler: Any, once: Any) -> None:
    """Run a runner that starts every message and ends without an acknowledgement."""
    try:
        async with scene.running(handler, once=once, many=True) as runner:
            await _wait_until(lambda: runner.stopping)  # by itself
    except _Died:
        return


@scenario
async def a_dead_letter_carries_the_last_error_of_the_handler(scene: Scene) -> None:
    """The dead letter is written after the last allowed attempt, not one attempt later."""

    async def handler(message: Arrival) -> None:
        await scene.note(message)
        raise RuntimeError(f"no, number {len(scene.ran)}")

    await scene.broker.send(messages_of("a"))
    once = scene.client(policy=Policy(max_attempts=2, retry_delay_s=0.05))
    async with scene.running(handler, once=once):
        await scene.wait_until_settled()
    equal(scene.ran, ["a", "a"], "handled keys")
    [(headers, _)] = await scene.broker.dead()
    letter = letter_of(headers)
    assert letter is not None
    equal((letter.reason, letter.attempts), ("failed", 2), "reason and attempts in the dead letter")
    check("RuntimeError: no, number 2" in letter.error, f"the error says why: {letter.error}")
    check("raise RuntimeError" in letter.stack, "the stack shows where")


class _Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@scenario
async def a_dead_letter_that_is_refused_is_said_once_and_tried_again(scene: Scene) -> None:
    """Its message stays with the broker, and one log line gives the reason."""
    source, log = scene.broker.source(), _Log()
    dead_letter, refusals = source.dead_letter, 0
    stuck: list[int] = []

    async def refuse(arrival: Arrival, letter: DeadLetterInfo) -> None:
        nonlocal refusals
        if refusals < 3:  # noqa: PLR2004 - a few
            refusals += 1
            raise SourceUnavailable("no such place")
        stuck.append(runner.counts.stuck)
        await dead_letter(arrival, letter)

    async def handler(_message: Arrival) -> None:
        raise ValueError("never")

    source.dead_letter = refuse  # type: ignore[method-assign]
    await scene.broker.send(messages_of("a"))
    once = scene.client(policy=Policy(max_attempts=1, retry_delay_s=0.05))
    logging.getLogger("semel.runner").addHandler(log)
    try:
        async with scene.running(handler, once=once, source=source) as runner:
            await scene.wait_until_settled()
    finally:
        logging.getLogger("semel.runner").removeHandler(log)
    equal(stuck, [1], "dead letters stuck before one was written")
    equal(runner.counts.stuck, 0, "dead letters stuck at the end")
    said = [text for text in log.texts if "no such place" in text and "dead letter" in text]
    equal(len(said), 1, "log lines about it within a minute")
    [(headers, _)] = await scene.broker.dead()
    letter = letter_of(headers)
    assert letter is not None
    check("ValueError: never" in letter.error, f"the error is the handler's: {letter.error}")


async def _run_with_small_letters(scene: Scene, *, any_body_fits: bool) -> tuple[bool, str | None]:
    """Fail a message whose dead letter may not have its body as it is, or none at all.

    Returns whether the broker keeps acknowledged messages, and where the message was.
    """
    source = scene.broker.source()
    dead_letter = source.dead_letter
    positions: list[str | None] = []

    async def small(arrival: Arrival, letter: DeadLetterInfo) -> None:
        positions.append(arrival.position)
        if len(arrival.body) >= (LARGE if any_body_fits else 1):
            raise MessageTooLarge("more than the broker takes")
        await dead_letter(arrival, letter)

    async def handler(_message: Arrival) -> None:
        raise ValueError("never")

    source.dead_letter = small  # type: ignore[method-assign]
    await scene.broker.send([Sent("a", b"a" * LARGE)])
    once = scene.client(policy=Policy(permanent=(ValueError,), retry_delay_s=0.05))
    async with scene.running(handler, once=once, source=source) as runner:
        await scene.wait_until_settled_or(lambda: runner.counts.stuck > 0)
        keeps: bool = getattr(source, "keeps_acked", False)
    return keeps, positions[0]


async def _the_dead_letter(scene: Scene) -> DeadLetter:
    [(headers, body)] = await scene.broker.dead()
    return DeadLetter.from_message("", headers, body)


@scenario
async def a_dead_letter_that_is_too_large_does_not_lose_its_body(scene: Scene) -> None:
    """A header says where the body is if the broker keeps it after the ack; otherwise the body is compressed."""
    keeps, position = await _run_with_small_letters(scene, any_body_fits=True)
    dead = await _the_dead_letter(scene)
    if keeps:
        equal(dead.letter.body_at, position, "where the body is")
        check(dead.body != b"a" * LARGE, "the body is left out")
    else:
        equal(dead.letter.body_at, "", "where the body is: nowhere but here")
        equal(dead.body, b"a" * LARGE, "the body")
    equal(await scene.broker.count_unsettled(), 0, "messages that the broker holds")


@scenario
async def a_body_that_fits_into_no_dead_letter_stays_with_the_broker(scene: Scene) -> None:
    """An ack would remove the only copy of it. If the broker keeps it after the ack, a header says where."""
    keeps, position = await _run_with_small_letters(scene, any_body_fits=False)
    if keeps:
        equal((await _the_dead_letter(scene)).letter.body_at, position, "where the body is")
    else:
        equal(await scene.broker.dead(), [], "the dead letters")
        equal(await scene.broker.count_unsettled(), 1, "messages that the broker holds")


@scenario
async def a_message_that_waits_in_hand_is_counted_once(scene: Scene) -> None:
    """The count does not depend on how often its key is claimed while another worker holds it."""
    tally = CounterHook()
    once = scene.client(lease="400ms", hooks=[tally])
    claims = [await scene.client(lease="400ms").claim(key) for key in ("a", "b")]
    check(all(isinstance(claim, Claimed) for claim in claims), "the other worker has the claims")
    await scene.broker.send(messages_of("a", "a", "b", "c"))
    async with scene.running(once=once) as runner:
        await scene.wait_until_settled()
    equal(sorted(scene.ran), ["a", "b", "c"], "handled keys")
    received = runner.counts.received  # a broker may drop the copy itself
    found = [counts for part in tally.peek() for _, _, counts in part.consumers]
    equal(
        [sum(getattr(each, name) for each in found) for name in ("received", "processed", "duplicates")],
        [received, 3, received - 3],
        "received, processed, duplicates",
    )
