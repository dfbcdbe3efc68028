"""RabbitMQ under the contract, looked at with a connection of its own."""

import asyncio
import json
import os
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import aio_pika
import pika
import pytest
from aio_pika.exceptions import DeliveryError

import semel
from semel import Policy
from semel.brokers import Arrival, Runner
from semel.brokers.probes import look_at
from semel.brokers.rabbitmq import RabbitConnection, from_url
from semel.brokers.source import Source
from semel.cli import consume
from semel.cli.output import OK, TRY_LATER
from semel.errors import SourceRefused
from semel.observe.probes import SourceFacts
from semel.testing import broker_contract
from semel.testing.broker_contract import Sent
from tests.brokers.cut_off import CutOff
from tests.brokers.storm import Storm
from tests.services import rabbitmq as service
from tests.services import sqs_refusals
from tests.services.server import NOBODY, free_port
from tests.waiting import WITHIN_S, until


class Queue:
    ordered = False

    def __init__(self) -> None:
        self.name = f"t-{os.urandom(6).hex()}"
        self.server = service.url()
        self.connection: Any = None
        self.channel: Any = None

    @property
    def url(self) -> str:
        return f"{self.server}?queue={self.name}"

    async def connect(self) -> "Queue":
        self.connection = await aio_pika.connect(self.server)
        self.channel = await self.connection.channel()
        await self.channel.declare_queue(self.name, durable=True, arguments={"x-queue-type": "quorum"})
        return self

    async def send(self, messages: Sequence[Sent]) -> None:
        await asyncio.to_thread(self._send, messages)

    def _send(self, messages: Sequence[Sent]) -> None:
        """By another client library than the source's: that one invents ids."""
        connection = pika.BlockingConnection(pika.URLParameters(self.server))
        channel = connection.channel()
        channel.confirm_delivery()
        for each in messages:
            properties = pika.BasicProperties(message_id=each.key or None, delivery_mode=2)
            channel.basic_publish("", self.name, each.body or b"", properties, mandatory=True)
        connection.close()

    def source(self, *, deadline_s: float | None = None) -> Source:
        return from_url(self.url)

    async def count_unsettled(self) -> int:
        """Ready, delivered and postponed ones."""
        queues = [self.name, f"{self.name}.retry.1s", f"{self.name}.retry.5s"]
        return await asyncio.to_thread(service.messages, queues)

    async def dead(self) -> list[tuple[Mapping[str, str], bytes]]:
        queue = await self.channel.get_queue(f"{self.name}.dead")
        found: list[tuple[Mapping[str, str], bytes]] = []
        while (message := await queue.get(fail=False)) is not None:
            found.append(({name: str(value) for name, value in message.headers.items()}, message.body))
        return found

    async def close(self) -> None:
        for suffix in ("", ".dead", ".retry.1s", ".retry.5s"):
            await self.channel.queue_delete(self.name + suffix)
        await self.connection.close()


@pytest.mark.slow
class TestRabbitmq(broker_contract.BrokerSuite):
    not_applicable: ClassVar = {
        "a_member_that_is_replaced_ends_with_the_reason": "consumers of a queue have no names",
        "a_body_near_the_limit_of_the_broker_is_not_lost": "the limit of the server is on the body alone",
        "a_message_without_a_body_is_passed_as_none_or_skipped": "a body may be empty, but not missing",
        "doctor_names_what_explain_names": "only the management API tells it: see tests/observe",
    }

    async def broker(self) -> Queue:
        return await Queue().connect()

    async def cut_off_broker(self) -> CutOff:
        broker = await self.broker()
        return CutOff(broker, broker.url, from_url)

    def away(self) -> Source:
        return from_url(f"amqp://127.0.0.1:{NOBODY}/?queue=q")

    def with_wrong_credentials(self) -> list[Source]:
        return [from_url(url) for url in self._refused()]

    def _refused(self) -> list[str]:
        url = service.url()
        return [f"{url.replace('guest:guest', 'guest:wrong')}?queue=q", f"{url}missing?queue=q"]

    def probes_with_wrong_credentials(self) -> list[Awaitable[SourceFacts]]:
        return [look_at(url) for url in self._refused()]

    def at_missing_places(self) -> list[Source]:
        return [from_url(f"{service.url()}?queue=missing&kind=existing")]

    async def without_dead_letter_place(self) -> Queue:
        return await self.broker()

    async def remove_dead_letter_place(self, broker: Any) -> None:
        await broker.channel.queue_delete(f"{broker.name}.dead")

    async def probe(self, broker: Any) -> SourceFacts:
        return await look_at(broker.url)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
def test_workers_killed_with_9_lose_nothing_and_repeat_nothing(seed: int, tmp_path: Path) -> None:
    async def scene() -> None:
        queue = await Queue().connect()
        await Storm(queue.url, tmp_path, seed).run(queue, 10_000 if "SEMEL_SOAK" in os.environ else 1000)
        await queue.close()

    asyncio.run(scene())


@pytest.mark.slow
def test_a_queue_of_delayed_messages_that_is_removed_is_made_again() -> None:
    """The server confirms a message that no queue takes, and drops it."""

    async def scene() -> None:
        queue = await Queue().connect()
        done = asyncio.Event()

        async def handler(_message: Arrival) -> None:
            attempt = semel.current().attempt
            if attempt == 2:
                await queue.channel.queue_delete(f"{queue.name}.retry.1s")
            if attempt < 3:
                raise ValueError("not yet")
            done.set()

        async with semel.aopen("memory:", consumer="c", policy=Policy(retry_delay_s=0.1)) as once:
            runner = Runner(from_url(queue.url), handler, once=once)
            running = asyncio.create_task(runner.run())
            await queue.send([Sent("a", b"{}")])
            async with asyncio.timeout(WITHIN_S):
                await done.wait()
            runner.stop()
            await running
        await queue.close()

    asyncio.run(scene())


@pytest.mark.slow
def test_what_a_refused_probe_cannot_tell_is_said_to_be_unknown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(consume, "REFUSED_S", 0.0)

    async def scene() -> None:
        queue = await Queue().connect()
        with sqs_refusals.endpoint() as refusing:
            async with semel.aopen("memory:", consumer="c") as once:
                await consume.warn_of_short_windows(once, [f"{queue.url}&management={refusing}"])
        await queue.close()

    asyncio.run(scene())
    said = capsys.readouterr().err
    assert "may deliver a message again is unknown" in said
    assert "the management API answers 501" in said


class Management(BaseHTTPRequestHandler):
    """A management API that knows one queue, whose messages last for a minute."""

    def do_GET(self) -> None:
        body = json.dumps({"durable": True, "arguments": {"x-message-ttl": 60_000}}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_line: object) -> None:
        pass


@pytest.mark.slow
def test_a_management_api_out_of_reach_is_said_once_and_asked_again(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()

    async def scene() -> None:
        queue = await Queue().connect()
        url = f"{queue.url}&management=http://127.0.0.1:{port}"
        outages = consume.ManagementOutages()
        clients = [semel.aopen("memory:", consumer=name, window="30s") for name in ("a", "b")]
        asking = [
            asyncio.create_task(consume.warn_of_short_windows(each, [url], outages)) for each in clients
        ]
        await until(lambda: caplog.records)
        server = HTTPServer(("127.0.0.1", port), Management)
        answering = asyncio.create_task(asyncio.to_thread(server.serve_forever))
        await asyncio.gather(*asking)
        await asyncio.to_thread(server.shutdown)
        await answering
        server.server_close()
        for client in clients:
            await client.close()
        await queue.close()

    asyncio.run(scene())
    away, back = (record.getMessage() for record in caplog.records)
    assert away.startswith("the management API of amqp://")
    assert f"http://127.0.0.1:{port} does not answer" in away
    assert "asking again" in away
    assert "answers again" in back
    assert capsys.readouterr().err.count("warning: ") == 2, "one for each consumer: the window is too short"


@pytest.mark.slow
@pytest.mark.parametrize("turns", range(6))
def test_a_close_amid_the_end_of_the_event_loop_ends(turns: int) -> None:
    """Then every task is cancelled once, also those of the driver for which its close waits."""

    async def scene() -> None:
        connection = await aio_pika.connect(service.url(), connection_class=RabbitConnection)
        closing = connection.transport.connection.closing  # type: ignore[union-attr]
        close = asyncio.create_task(connection.close())
        while not closing.done():  # noqa: ASYNC110 - each turn of the loop counts
            await asyncio.sleep(0)
        for _ in range(turns):
            await asyncio.sleep(0)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        done, _ = await asyncio.wait([close], timeout=WITHIN_S)
        assert done
        assert connection.is_closed

    asyncio.run(scene())


@pytest.mark.slow
@pytest.mark.anyio
async def test_until_idle_does_not_end_well_if_nobody_can_tell_what_others_hold(
    capsys: pytest.CaptureFixture[str],
) -> None:
    queue = await Queue().connect()
    url = f"{queue.url}&management=http://127.0.0.1:{NOBODY}"
    async with semel.aopen("memory:", consumer="c") as once:
        runner = Runner(from_url(url), print, once=once)
        assert await consume._say_what_is_left([runner], [url]) == TRY_LATER
        assert await consume._say_what_is_left([runner], [queue.url]) == OK
    assert "how many messages other consumers hold is not known" in capsys.readouterr().err
    await queue.close()


@pytest.mark.slow
def test_a_queue_that_was_declared_otherwise_is_refused_with_the_fix() -> None:
    async def scene() -> None:
        queue = await Queue().connect()
        refused, existing = (from_url(f"{queue.url}&kind={kind}") for kind in ("classic", "existing"))
        try:
            with pytest.raises(SourceRefused, match="was declared otherwise: add kind=existing to the URL"):
                await refused.open()
            await existing.open()
        finally:
            await refused.close()
            await existing.close()
            await queue.close()

    asyncio.run(scene())


@pytest.mark.slow
def test_a_full_queue_of_dead_letters_that_was_declared_otherwise_stops_no_consumer() -> None:
    """Declaring it again closes the channel that does so: it must not be the channel of the consumer."""
    ran: list[str] = []

    async def handler(message: Arrival) -> None:
        ran.append(semel.current().key)
        if ran[-1] == "bad":
            raise ValueError("never")

    async def scene() -> None:
        queue = await Queue().connect()
        full = {"x-queue-type": "quorum", "x-max-length": 1, "x-overflow": "reject-publish"}
        dead = await queue.channel.declare_queue(f"{queue.name}.dead", durable=True, arguments=full)
        for _ in range(9):  # it takes a few more than its limit
            with suppress(DeliveryError):
                await queue.channel.default_exchange.publish(aio_pika.Message(b"full"), dead.name)
        policy = Policy(max_attempts=1, retry_delay_s=0.1)
        async with semel.aopen("memory:", consumer="c", policy=policy) as once:
            runner = Runner(from_url(queue.url), handler, once=once)
            running = asyncio.create_task(runner.run())
            await queue.send([Sent("bad", b"{}")])
            await until(lambda: runner.counts.stuck == 1)
            await queue.send([Sent("good", b"{}")])
            await until(lambda: "good" in ran)
            await dead.purge()
            await until(lambda: runner.counts.dead_lettered == 1)
            await until(lambda: runner.counts.acked == 2)
            runner.stop()
            await running
        assert ran.count("bad") == 1
        await queue.close()

    asyncio.run(scene())


@pytest.mark.slow
def test_a_copy_never_gets_a_key_that_the_client_library_made_up() -> None:
    async def scene() -> None:
        queue = await Queue().connect()
        await queue.send([Sent("")])
        source = queue.source()
        await source.open()
        [first] = await source.receive(1, 10)
        await source.nack([first], 0.5)
        [again] = await source.receive(1, 10)
        assert (first.broker_id, again.broker_id) == (None, None)
        await source.ack([again])
        await source.close()
        await queue.close()

    asyncio.run(scene())
