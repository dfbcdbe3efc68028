"""Scenarios that need something special of a broker: an outage, a refusal, a second member, settings of its own.

A suite provides what the broker has. What the broker does not have is named in `not_applicable`, with the reason.
"""

import asyncio
import os
from base64 import b64encode
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar, Literal, NoReturn, Protocol, TypeAlias

from semel.brokers.dead_letters import DeadLetter
from semel.brokers.outages import STOP_AWAY_S, STOP_SILENT_S
from semel.brokers.runner import Runner
from semel.brokers.source import Arrival, Source
from semel.client.client import aopen
from semel.client.client_async import AsyncSemel
from semel.errors import Fenced, SourceRefused, UsageError
from semel.observe.probes import SourceFacts
from semel.policy import Policy
from semel.stores.memory.store import MemoryStore
from semel.testing.broker_scene import WITHIN_S, Broker, Reports, Scene, Sent, messages_of
from semel.testing.contract.harness import check, equal

__all__ = ["CONDITIONS", "Condition", "Conditions", "CutOffBroker", "TombstonePolicy"]

REPORTED_WITHIN_S = 15.0
"""An outage is reported within five seconds; the rest is for a computer that is busy with other tests."""
SILENT_S = 8.0
"""Longer than the time after which an answer that a broker does not confirm has failed: then clients go on."""
QUIET_S = 3.0
"""No further line may be logged for this long, although the runner retries several times."""
TICKS_MAX = 10
TICK_S = 0.1
"""A stop takes at most a second, measured in ticks of its own event loop: a busy computer delays both."""
SILENT_TICKS_MAX = 20
"""The same if the broker falls silent in the moment of the stop, which cannot be told from a slow one at once."""
REFUSED_WITHIN_S = 30.0
KEYS = [f"k{number:02}" for number in range(60)]
HANDLER_S = 0.02
LINES_MAX = 4

TombstonePolicy: TypeAlias = Literal["pass", "skip"]


class CutOffBroker(Broker, Protocol):
    """A broker that can be cut off from its sources; the test's own client still reaches it."""

    async def cut_off(self) -> None:
        """Cut the connections of the sources, and refuse new ones."""
        ...

    async def fall_silent(self) -> None:
        """Keep the connections of the sources, and let nothing pass."""
        ...

    async def reconnect(self) -> None:
        """Let sources reach the broker again."""
        ...


class Conditions:
    """What a suite provides for these scenarios. Each method raises unless the suite implements it."""

    not_applicable: ClassVar[Mapping[str, str]] = {}
    """Scenarios that cannot happen on this broker, with the reasons; each is listed as a test with its reason."""

    async def broker(self) -> Broker:
        """Return a fresh queue, topic or stream for one scenario."""
        return self._missing("broker")

    def away(self) -> Source:
        """Return a source at an address where nobody listens."""
        return self._missing("away")

    async def cut_off_broker(self) -> CutOffBroker:
        """Return a fresh broker that can be cut off from its sources."""
        return self._missing("cut_off_broker")

    def with_wrong_credentials(self) -> Sequence[Source]:
        """Return sources whose credentials or rights the broker refuses, at least one with a wrong password."""
        return self._missing("with_wrong_credentials")

    def at_missing_places(self) -> Sequence[Source]:
        """Return sources of queues, topics or streams that do not exist and that the source does not create."""
        return self._missing("at_missing_places")

    def same_members(self, broker: Broker) -> tuple[Source, Source]:
        """Return two sources with the same name of a member, of which the broker keeps the second."""
        return self._missing("same_members", broker)

    async def without_dead_letter_place(self) -> Broker:
        """Return a fresh broker without a place for dead letters."""
        return self._missing("without_dead_letter_place")

    async def remove_dead_letter_place(self, broker: Broker) -> None:
        """Remove the place for dead letters of a broker whose source is running."""
        self._missing("remove_dead_letter_place", broker)

    def bytes_near_limit(self) -> int:
        """Return the size of a body that the broker accepts, but not together with a dead letter's headers."""
        return self._missing("bytes_near_limit")

    async def body_at(self, broker: Broker, position: str) -> bytes:
        """Return the body of an acknowledged message, from where its dead letter says that it is."""
        return self._missing("body_at", broker, position)

    def source_for_tombstones(self, broker: Broker, policy: TombstonePolicy) -> Source:
        """Return a source that passes messages without a body to the handler, or skips them."""
        return self._missing("source_for_tombstones", broker, policy)

    async def probe(self, broker: Broker) -> SourceFacts:
        """Return what `semel explain` and `semel doctor` read about the broker's source."""
        return self._missing("probe", broker)

    def probes_with_wrong_credentials(self) -> Sequence[Awaitable[SourceFacts]]:
        """Return what `semel explain` and `semel doctor` do with sources whose credentials the broker refuses."""
        return self._missing("probes_with_wrong_credentials")

    async def probe_of_hasty_broker(self) -> SourceFacts:
        """Return what they read about a source whose broker gives a message up after fewer deliveries than semel."""
        return self._missing("probe_of_hasty_broker")

    def _missing(self, method: str, *_given: object) -> NoReturn:
        raise AssertionError(
            f"{type(self).__name__} has no {method}: implement it, or name the scenario in not_applicable, with the"
            " reason"
        )


Condition: TypeAlias = Callable[[Conditions], Coroutine[Any, Any, None]]
CONDITIONS: dict[str, Condition] = {}
"""By name: the scenarios that need something special of the broker."""


def condition(run: Condition) -> Condition:
    """Add a scenario to the contract."""
    CONDITIONS[run.__name__] = run
    return run


# --- outages ------------------------------------------------------------------------------------


def _client(**options: Any) -> AsyncSemel:
    return aopen(MemoryStore(), consumer="contract", **options)


async def _nothing(_message: Arrival) -> Any:
    raise AssertionError("nothing can be delivered")


async def _count_ticks(work: Awaitable[Any]) -> int:
    """Return how many tenths of a second of the event loop the work took."""
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(TICK_S)
            ticks += 1

    ticking = asyncio.create_task(tick())
    try:
        async with asyncio.timeout(WITHIN_S):
            await work
    finally:
        ticking.cancel()
    return ticks


def _check_stop(ticks: int, name: str) -> None:
    check(STOP_AWAY_S < TICKS_MAX * TICK_S, f"the runner's own bound is {STOP_AWAY_S:.2f} s")
    check(ticks < TICKS_MAX, f"a stop took {ticks * TICK_S:.1f} s or more while {name} was away")


@condition
async def an_outage_is_reported_once_and_a_stop_is_quick(suite: Conditions) -> None:
    """A broker that is away at the start: one line at once, no flood, and a stop within a second."""
    source = suite.away()
    async with _client() as once:
        runner = Runner(source, _nothing, once=once)
        with Reports() as reports:
            task = asyncio.create_task(runner.run())
            await _wait_for_report(reports)
            await asyncio.sleep(QUIET_S)
            equal(len(reports.lines), 1, f"lines about the outage: {reports.lines}")
            check(source.name in reports.lines[0], f"the line names the source: {reports.lines[0]}")
            runner.stop()
            _check_stop(await _count_ticks(task), source.name)


@asynccontextmanager
async def _cut_off_broker(suite: Conditions) -> Any:
    broker = await suite.cut_off_broker()
    try:
        yield broker
    finally:
        await broker.reconnect()
        await broker.close()


@condition
async def an_outage_in_the_middle_is_reported_and_loses_nothing(suite: Conditions) -> None:
    """A broker that goes away while handlers run and comes back: two lines; nothing is lost or run twice."""
    async with _cut_off_broker(suite) as broker:
        scene = Scene(broker)
        with Reports() as reports:
            async with _in_the_middle(scene) as (runner, _):
                name = runner.source.name
                await broker.cut_off()
                await _wait_for_report(reports)
                await asyncio.sleep(QUIET_S)
                equal(len(reports.of(name)), 1, f"lines about the outage: {reports.lines}")
                await broker.reconnect()
                await scene.wait_until_settled()
        equal(sorted(scene.ran), KEYS, "handled keys")
        equal(len(reports.of(name)), 2, f"lines about the outage and its end: {reports.lines}")
        check(
            len(reports.lines) <= LINES_MAX, f"lines, those of the client library included: {reports.lines}"
        )


@condition
async def an_outage_ends_only_when_the_broker_answers(suite: Conditions) -> None:
    """A broker that is silent is not said to answer again, although a client may return from its call with nothing."""
    async with _cut_off_broker(suite) as broker:
        scene = Scene(broker)
        with Reports() as reports:
            async with _in_the_middle(scene) as (runner, _):
                name = runner.source.name
                await broker.fall_silent()
                await _wait_for_report(reports)
                await asyncio.sleep(SILENT_S)
                equal(len(reports.of(name)), 1, f"lines about a broker that is silent: {reports.lines}")
                await broker.reconnect()
                await scene.wait_until_settled()
                async with asyncio.timeout(WITHIN_S):
                    while len(reports.of(name)) == 1:  # noqa: ASYNC110 - a log line has no event
                        await asyncio.sleep(HANDLER_S)
        check("answers again" in reports.of(name)[-1], f"the last line: {reports.lines}")
        equal(len(reports.of(name)), 2, f"lines about the outage and its end: {reports.lines}")


async def _stop_in_an_outage(broker: CutOffBroker, break_it: Callable[[], Awaitable[None]]) -> None:
    scene = Scene(broker)
    with Reports() as reports:
        async with _in_the_middle(scene) as (runner, task):
            await break_it()
            await _wait_for_report(reports)
            runner.stop()
            _check_stop(await _count_ticks(asyncio.shield(task)), runner.source.name)
    await broker.reconnect()
    async with scene.running(source=broker.source(deadline_s=1.0)):
        await scene.wait_until_settled()
    equal(sorted(scene.ran), KEYS, "handled keys")


@condition
async def a_stop_is_quick_while_connections_are_refused(suite: Conditions) -> None:
    """The broker was killed while handlers run: a stop within a second, and nothing is lost or run twice."""
    async with _cut_off_broker(suite) as broker:
        await _stop_in_an_outage(broker, broker.cut_off)


@condition
async def a_stop_is_quick_while_the_broker_is_silent(suite: Conditions) -> None:
    """The broker accepts everything and answers nothing: reported within seconds, and a stop within a second."""
    async with _cut_off_broker(suite) as broker:
        await _stop_in_an_outage(broker, broker.fall_silent)


@condition
async def a_stop_is_quick_though_the_broker_falls_silent_in_that_moment(suite: Conditions) -> None:
    """Nothing was reported yet: a stop waits about a second for confirmations, and nothing is lost or run twice."""
    check(STOP_SILENT_S < SILENT_TICKS_MAX * TICK_S, f"the runner's own bound is {STOP_SILENT_S:.2f} s")
    async with _cut_off_broker(suite) as broker:
        scene = Scene(broker)
        async with _in_the_middle(scene) as (runner, task):
            await broker.fall_silent()
            runner.stop()
            ticks = await _count_ticks(asyncio.shield(task))
            check(ticks < SILENT_TICKS_MAX, f"a stop took {ticks * TICK_S:.1f} s or more")
        await broker.reconnect()
        async with scene.running(source=broker.source(deadline_s=1.0)):
            await scene.wait_until_settled()
        equal(sorted(scene.ran), KEYS, "handled keys")


@asynccontextmanager
async def _in_the_middle(scene: Scene) -> Any:
    """Run a runner until it has handled some messages and more remain; yields the runner and its task."""

    async def slow(message: Arrival) -> None:
        await asyncio.sleep(HANDLER_S)
        await scene.note(message)

    await scene.broker.send(messages_of(*KEYS))
    source = scene.broker.source(deadline_s=1.0)
    async with scene.running(slow, source=source, concurrency=2, batch=10) as runner:
        async with asyncio.timeout(WITHIN_S):
            while not scene.ran:  # noqa: ASYNC110 - a handler has no event
                await asyncio.sleep(HANDLER_S)
        yield runner, scene.task


async def _wait_for_report(reports: Reports) -> None:
    """Wait for the first line, in ticks of this event loop: to load a client library may take a busy computer long."""
    for _ in range(round(REPORTED_WITHIN_S / TICK_S)):
        if reports.first.is_set():
            return
        await asyncio.sleep(TICK_S)
    raise AssertionError(f"no outage was reported within {REPORTED_WITHIN_S:.0f} s")


# --- refusals -----------------------------------------------------------------------------------


async def _refuse_all(sources: Sequence[Source]) -> None:
    check(bool(sources), "the suite names no source")
    for source in sources:
        async with _client() as once:
            runner = Runner(source, _nothing, once=once)
            try:
                async with asyncio.timeout(REFUSED_WITHIN_S):
                    await runner.run()
            except SourceRefused as error:
                check(bool(str(error)), "the error message is empty: it must name what was refused")
            except TimeoutError:
                raise AssertionError(f"{source.name} is refused, and the runner retries for ever") from None
            else:
                raise AssertionError(f"{source.name} is refused, and the runner ended without a reason")


@condition
async def wrong_credentials_end_the_runner(suite: Conditions) -> None:
    """With `SourceRefused`, for which `semel consume` exits with 78, instead of retrying for ever."""
    await _refuse_all(suite.with_wrong_credentials())


@condition
async def a_missing_place_ends_the_runner(suite: Conditions) -> None:
    """No such queue, topic or stream: `SourceRefused`, instead of waiting for ever."""
    await _refuse_all(suite.at_missing_places())


@condition
async def a_member_that_is_replaced_ends_with_the_reason(suite: Conditions) -> None:
    """Another process came with the same name of a member: the older one does not live on, idle and silent."""
    broker = await suite.broker()
    ran: list[str] = []

    async def handler(message: Arrival) -> None:
        ran.append(bytes(message.body).decode())

    try:
        async with _client() as once:
            first, second = (Runner(source, handler, once=once) for source in suite.same_members(broker))
            older = asyncio.create_task(first.run())
            await broker.send(messages_of("a"))
            async with asyncio.timeout(WITHIN_S):
                while not ran:  # noqa: ASYNC110 - a handler has no event
                    await asyncio.sleep(HANDLER_S)
            newer = asyncio.create_task(second.run())
            try:
                async with asyncio.timeout(WITHIN_S):
                    await older
            except Fenced as error:
                check(bool(str(error)), "the error message is empty: it must name the reason")
            else:
                raise AssertionError("the replaced member ended without a reason")
            second.stop()
            await newer
    finally:
        await broker.close()


# --- dead letters and bodies --------------------------------------------------------------------

GIVE_UP = Policy(permanent=(ValueError,), retry_delay_s=0.05)


async def _fail(_message: Arrival) -> None:
    raise ValueError("never")


@condition
async def a_missing_place_for_dead_letters_is_made_or_refused_at_the_start(suite: Conditions) -> None:
    """Otherwise the first dead letter would block the source."""
    broker = await suite.without_dead_letter_place()
    scene = Scene(broker)
    try:
        await broker.send(messages_of("a"))
        try:
            async with scene.running(_fail, once=scene.client(policy=GIVE_UP)) as runner:
                await scene.wait_until_settled_or(lambda: runner.stopping)
        except UsageError as error:
            check(bool(str(error)), "the error message is empty: it must name the place")
            return
        equal([body for _, body in await broker.dead()], [b"a"], "the dead letters")
    finally:
        await broker.close()


@condition
async def a_place_for_dead_letters_that_is_removed_later_loses_nothing(suite: Conditions) -> None:
    """The dead letter is in a place that was made again, or its message stays with the broker."""
    broker = await suite.broker()
    scene = Scene(broker)

    async def fail_without_place(_message: Arrival) -> None:
        await suite.remove_dead_letter_place(broker)
        raise ValueError("never")

    try:
        await broker.send(messages_of("a"))
        async with scene.running(fail_without_place, once=scene.client(policy=GIVE_UP)) as runner:
            await scene.wait_until_settled_or(lambda: runner.counts.stuck > 0)
        if not await broker.count_unsettled():
            equal([body for _, body in await broker.dead()], [b"a"], "the dead letters")
    finally:
        await broker.close()


@condition
async def a_body_near_the_limit_of_the_broker_is_not_lost(suite: Conditions) -> None:
    """The broker refuses it with the headers of a dead letter. The body is in the dead letter, or where that says."""
    size = suite.bytes_near_limit()
    for body in (b"x" * size, b64encode(os.urandom(size))[:size]):
        broker = await suite.broker()
        scene = Scene(broker)
        try:
            await broker.send([Sent("a", body)])
            async with scene.running(_fail, once=scene.client(policy=GIVE_UP)):
                await scene.wait_until_settled()
            dead = DeadLetter.from_message("", *(await broker.dead())[0])
            equal(dead.letter.key, "a", "the key in the dead letter")
            where = dead.letter.body_at
            found = await suite.body_at(broker, where) if where else dead.body
            check(found == body, f"the body is in the dead letter or at {where!r}, after the ack")
        finally:
            await broker.close()


@condition
async def a_message_without_a_body_is_passed_as_none_or_skipped(suite: Conditions) -> None:
    """A tombstone is no empty body, and no dead letter."""
    for policy, expected in (("pass", [None, b"", b"{}"]), ("skip", [b"", b"{}"])):
        broker = await suite.broker()
        scene = Scene(broker)
        bodies: list[bytes | None] = []

        async def handler(message: Arrival, bodies: list[bytes | None] = bodies) -> None:
            bodies.append(message.body)

        try:
            await broker.send([Sent("a", b"{}"), Sent("gone", None), Sent("empty", b"")])
            source = suite.source_for_tombstones(broker, policy)  # type: ignore[arg-type]
            async with scene.running(handler, source=source):
                await scene.wait_until_settled()
            equal(sorted(bodies, key=str), expected, f"the bodies with the policy {policy}")
            equal(await broker.dead(), [], "the dead letters")
        finally:
            await broker.close()
