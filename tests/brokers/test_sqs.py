"""SQS under the contract, on a server with real visibility timeouts, looked at with boto3."""

import asyncio
import json
import os
from base64 import b64encode
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import boto3
import pytest
from msgspec.structs import replace

import semel
from semel.brokers import Arrival, Runner
from semel.brokers.probes import look_at
from semel.brokers.source import Source
from semel.brokers.sqs import from_url
from semel.errors import SourceUnavailable
from semel.observe.probes import SourceFacts
from semel.outbox.sinks.sqs import entry_of
from semel.testing import broker_contract
from semel.testing.broker_contract import Sent
from tests.brokers.cut_off import CutOff
from tests.brokers.storm import Storm
from tests.outbox.brokers import rows
from tests.services import sqs as service
from tests.services import sqs_refusals
from tests.services.server import NOBODY
from tests.waiting import until

NOT_APPLICABLE = {
    "an_empty_body_arrives_as_it_was_sent": "the service takes no message without a body",
    "a_message_without_a_body_is_passed_as_none_or_skipped": "the service takes no message without a body",
    "a_member_that_is_replaced_ends_with_the_reason": "consumers of a queue have no names",
}


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")


class Queue:
    def __init__(self, *, fifo: bool) -> None:
        self.ordered = fifo
        self.suffix = ".fifo" if fifo else ""
        self.name = f"t-{os.urandom(6).hex()}"
        self.endpoint = service.url()
        self.sqs: Any = boto3.client("sqs", region_name="eu-west-1", endpoint_url=self.endpoint)
        more = {"FifoQueue": "true"} if fifo else {}
        self.urls = [
            self.sqs.create_queue(QueueName=name + self.suffix, Attributes=more)["QueueUrl"]
            for name in (self.name, f"{self.name}-dead")
        ]

    def url(self, deadline_s: float = 2.0) -> str:
        return f"sqs://eu-west-1/{self.name}{self.suffix}?endpoint={self.endpoint}&deadline_s={deadline_s}"

    async def send(self, messages: Sequence[Sent]) -> None:
        await asyncio.to_thread(self._send, messages)

    def _send(self, messages: Sequence[Sent]) -> None:
        for at in range(0, len(messages), 10):
            entries = [self._entry(number, each) for number, each in enumerate(messages[at : at + 10])]
            assert "Failed" not in self.sqs.send_message_batch(QueueUrl=self.urls[0], Entries=entries)

    def _entry(self, number: int, sent: Sent) -> dict[str, Any]:
        entry: dict[str, Any] = {"Id": str(number), "MessageBody": (sent.body or b"").decode()}
        if sent.key:
            entry["MessageAttributes"] = {"message_id": {"DataType": "String", "StringValue": sent.key}}
        if self.ordered:
            entry |= {"MessageGroupId": sent.lane or "g", "MessageDeduplicationId": sent.key}
        return entry

    def give_up_after(self, deliveries: int) -> None:
        """Have the queue itself move messages to the one of the dead letters."""
        asked = self.sqs.get_queue_attributes(QueueUrl=self.urls[1], AttributeNames=["QueueArn"])
        redrive = {"deadLetterTargetArn": asked["Attributes"]["QueueArn"], "maxReceiveCount": str(deliveries)}
        self.sqs.set_queue_attributes(
            QueueUrl=self.urls[0], Attributes={"RedrivePolicy": json.dumps(redrive)}
        )

    def source(self, *, deadline_s: float | None = None) -> Source:
        return from_url(self.url(deadline_s or 2.0))

    async def count_unsettled(self) -> int:
        return await asyncio.to_thread(self._unsettled)

    def _unsettled(self) -> int:
        names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
        found = self.sqs.get_queue_attributes(QueueUrl=self.urls[0], AttributeNames=names)["Attributes"]
        return sum(int(found[name]) for name in names)

    async def dead(self) -> list[tuple[Mapping[str, str], bytes]]:
        return await asyncio.to_thread(self._dead)

    def _dead(self) -> list[tuple[Mapping[str, str], bytes]]:
        answer = self.sqs.receive_message(
            QueueUrl=self.urls[1], MaxNumberOfMessages=10, MessageAttributeNames=["All"]
        )
        return [
            (json.loads(own["semel-dead-letter"]["StringValue"]), _body(each["Body"], own))
            for each in answer.get("Messages", ())
            for own in [each["MessageAttributes"]]
        ]

    async def close(self) -> None:
        for url in self.urls:
            with suppress(self.sqs.exceptions.QueueDoesNotExist):  # a scenario may have removed it
                await asyncio.to_thread(self.sqs.delete_queue, QueueUrl=url)
        self.sqs.close()


def _body(text: str, attributes: Mapping[str, Any]) -> bytes:
    """The body of a dead letter; a compressed one is in an attribute."""
    packed = attributes.get("semel-dead-body")
    return text.encode() if packed is None else bytes(packed["BinaryValue"])


def bare(*, fifo: bool) -> Queue:
    """A queue without one for its dead letters."""
    queue = Queue(fifo=fifo)
    queue.sqs.delete_queue(QueueUrl=queue.urls[1])
    return queue


@pytest.mark.slow
class TestSqs(broker_contract.BrokerSuite):
    not_applicable: ClassVar = NOT_APPLICABLE

    async def broker(self) -> Queue:
        return await asyncio.to_thread(Queue, fifo=False)

    async def cut_off_broker(self) -> CutOff:
        broker = await self.broker()
        return CutOff(broker, broker.url(), from_url)

    def away(self) -> Source:
        return from_url(f"sqs://eu-west-1/q?endpoint=http://127.0.0.1:{NOBODY}")

    @pytest.fixture(autouse=True)
    def refusals(self) -> Iterator[None]:
        with sqs_refusals.endpoint() as self.refusing:
            yield

    def with_wrong_credentials(self) -> list[Source]:
        return [from_url(url) for url in self._refused()]

    def _refused(self) -> list[str]:
        return [f"sqs://eu-west-1/missing?endpoint={self.refusing}/{code}" for code in sqs_refusals.REFUSED]

    def probes_with_wrong_credentials(self) -> list[Awaitable[SourceFacts]]:
        return [look_at(url) for url in self._refused()]

    def at_missing_places(self) -> list[Source]:
        return [from_url(f"sqs://eu-west-1/missing?endpoint={service.url()}")]

    async def without_dead_letter_place(self) -> Queue:
        return await asyncio.to_thread(bare, fifo=False)

    async def remove_dead_letter_place(self, broker: Any) -> None:
        await asyncio.to_thread(broker.sqs.delete_queue, QueueUrl=broker.urls[1])

    def bytes_near_limit(self) -> int:
        return 262_100

    async def probe(self, broker: Any) -> SourceFacts:
        return await look_at(broker.url())

    async def probe_of_hasty_broker(self) -> SourceFacts:
        broker = await asyncio.to_thread(Queue, fifo=False)
        try:
            await asyncio.to_thread(broker.give_up_after, 3)
            return await look_at(broker.url(deadline_s=20))
        finally:
            await broker.close()

    @pytest.mark.anyio
    @pytest.mark.parametrize("code", sqs_refusals.PASSING)
    async def test_what_time_may_heal_is_an_outage(self, code: str) -> None:
        source = from_url(f"sqs://eu-west-1/q?endpoint={self.refusing}/{code}")
        with pytest.raises(SourceUnavailable, match=code):
            await source.open()
        await source.close()


@pytest.mark.anyio
async def test_a_message_arrives_as_the_relay_got_it_though_it_is_no_text_and_has_many_headers() -> None:
    queue = await asyncio.to_thread(Queue, fifo=False)
    headers = {f"h{n}": str(n) for n in range(12)}
    source, row = queue.source(), replace(rows(1, queue.name)[0], payload=b"\xff\x00", headers=headers)
    entry = entry_of(0, row, fifo=False)
    await asyncio.to_thread(queue.sqs.send_message_batch, QueueUrl=queue.urls[0], Entries=[entry])
    await source.open()
    [arrival] = await source.receive(1, 5.0)
    assert arrival.body == b"\xff\x00"
    assert headers.items() <= dict(arrival.headers).items()
    await source.close()
    await queue.close()


@pytest.mark.slow
@pytest.mark.anyio
async def test_a_dead_letter_keeps_all_ten_attributes_and_waits_for_a_queue_that_takes_it() -> None:
    """The service takes ten attributes, of which one is the letter's information.

    The server of this test has no size limits of queues, so the source is told of one.
    """
    queue = await asyncio.to_thread(Queue, fifo=False)
    source: Any = queue.source()
    attributes, limit = source.attributes, "2048"

    async def with_limit(name: str = "") -> Mapping[str, str]:
        return {**await attributes(name), "MaximumMessageSize": limit}

    source.attributes = with_limit
    own = {"message_id": "a", **{f"h{n}": str(n) for n in range(9)}}
    entry = {
        "Id": "0", "MessageBody": b64encode(os.urandom(3000)).decode(),
        "MessageAttributes": {name: {"DataType": "String", "StringValue": value} for name, value in own.items()},
    }  # fmt: skip
    await asyncio.to_thread(queue.sqs.send_message_batch, QueueUrl=queue.urls[0], Entries=[entry])

    async def fail(_message: Arrival) -> None:
        raise ValueError("never")

    policy = semel.Policy(permanent=(ValueError,), retry_delay_s=0.05)
    async with semel.aopen("memory:", consumer="c", policy=policy) as once:
        runner = Runner(source, fail, once=once)
        running = asyncio.create_task(runner.run())
        await until(lambda: runner.counts.stuck)
        assert (await queue.dead(), runner.counts.acked) == ([], 0)
        limit = "262144"
        await until(lambda: runner.counts.acked)
        assert runner.counts.stuck == 0
        runner.stop()
        await running
    await source.open()
    [dead] = await source.look(10)
    assert (dead.body.decode(), dead.original()) == (entry["MessageBody"], own)
    await source.close()
    await queue.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
def test_workers_killed_with_9_lose_nothing_and_repeat_nothing(seed: int, tmp_path: Path) -> None:
    async def scene() -> None:
        queue = await asyncio.to_thread(Queue, fifo=False)
        await Storm(queue.url(), tmp_path, seed).run(queue, 10_000 if "SEMEL_SOAK" in os.environ else 500)
        await queue.close()

    asyncio.run(scene())


@pytest.mark.slow
class TestFifo(broker_contract.BrokerSuite):
    """A queue whose groups keep their order."""

    ordered = True
    not_applicable: ClassVar = {
        **NOT_APPLICABLE,
        "a_message_without_a_key_goes_to_the_dead_letters": "each message has an id for deduplication",
        **dict.fromkeys(
            (
                "an_outage_is_reported_once_and_a_stop_is_quick",
                "an_outage_in_the_middle_is_reported_and_loses_nothing",
                "a_stop_is_quick_while_connections_are_refused",
                "a_stop_is_quick_though_the_broker_falls_silent_in_that_moment",
                "a_stop_is_quick_while_the_broker_is_silent",
                "wrong_credentials_end_the_runner",
                "a_missing_place_ends_the_runner",
                "a_place_for_dead_letters_that_is_removed_later_loses_nothing",
                "an_outage_ends_only_when_the_broker_answers",
                "a_body_near_the_limit_of_the_broker_is_not_lost",
                "a_probe_with_wrong_credentials_is_refused",
                "a_probe_reads_and_changes_nothing",
                "a_window_shorter_than_the_horizon_is_warned_of",
                "doctor_names_what_explain_names",
            ),
            "as in a standard queue, whose suite has it",
        ),
    }

    async def without_dead_letter_place(self) -> Queue:
        return await asyncio.to_thread(bare, fifo=True)

    async def broker(self) -> Queue:
        return await asyncio.to_thread(Queue, fifo=True)


@pytest.mark.parametrize(("queue", "lane"), [("orders", ""), ("orders.fifo", "tenant-1")])
def test_a_group_is_a_lane_only_where_the_queue_keeps_an_order(queue: str, lane: str) -> None:
    """In a standard queue a group is for fair shares among tenants."""
    source = from_url(f"sqs://eu-west-1/{queue}")
    message = {
        "MessageId": "m", "Body": "{}", "ReceiptHandle": "r", "Attributes": {"MessageGroupId": "tenant-1"},
    }  # fmt: skip
    assert source._arrival(message, 0.0).lane == lane
