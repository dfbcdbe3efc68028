"""Every sink on its real broker: what is confirmed arrives, in order, under the row's id."""

import os
from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec.structs import replace

from semel import Message
from semel.core.relay_flow import NotPublished, Published, PublishRefused, waves
from semel.errors import PolicyInvalid, SinkUnavailable, SinkUnknown
from semel.keys import cloudevent
from semel.keys.message import Envelope
from semel.outbox.sinks import LATER, Sink, in_turns, kafka, sink_for, sqs
from semel.outbox.sinks.sqs import group_of
from tests.outbox.brokers import BROKERS, StandardSqs, rows
from tests.outbox.tools import Place, drain
from tests.services import server

pytestmark = pytest.mark.anyio

NOWHERE = {
    "redis": "redis://127.0.0.1:{port}/0",
    "nats": "nats://127.0.0.1:{port}",
    "rabbitmq": "amqp://guest:guest@127.0.0.1:{port}/",
    "sqs": "sqs://localhost/q?endpoint=http://127.0.0.1:{port}&region=r",
    "kafka": "kafka://127.0.0.1:{port}",
}


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setitem(os.environ, name, "test")


@pytest.fixture(params=BROKERS)
async def broker(request: pytest.FixtureRequest) -> Any:
    made = BROKERS[request.param]()
    await made.prepare()
    return made


@pytest.fixture
async def sink(broker: Any) -> AsyncIterator[Sink]:
    made = sink_for(broker.url)
    await made.open()
    yield made
    await made.close()


async def publish(sink: Sink, given: list[Any]) -> list[Any]:
    """As a relay would: in waves where the sink keeps no order by itself, and again what is left for the next batch.

    A sink begins no further calls after some time, which a busy computer may need for few rows.
    """
    answers: dict[str, Any] = dict.fromkeys((row.id for row in given), LATER)
    while left := [row for row in given if answers[row.id] == LATER]:
        for wave in [left] if sink.ordered else waves(left):
            answers |= zip([row.id for row in wave], await sink.publish(wave), strict=True)
        assert sum(answer == LATER for answer in answers.values()) < len(left), "each batch gets further"
    return [answers[row.id] for row in given]


def begin_for(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every sink begin calls for this long."""
    for module in (kafka, sqs):
        monkeypatch.setattr(module, "BEGIN_MAX_S", seconds)
    assert in_turns.__kwdefaults__ is not None
    monkeypatch.setitem(in_turns.__kwdefaults__, "begin_max_s", seconds)


async def test_what_is_confirmed_arrives_in_order_under_its_id(broker: Any, sink: Sink) -> None:
    given = rows(30, broker.where)
    assert await publish(sink, given) == [Published()] * 30
    arrived = await broker.read(30)
    assert sorted(each.key for each in arrived) == sorted(row.id for row in given)
    by_id = {row.id: row for row in given}
    for aggregate in {row.aggregate for row in given}:
        numbers = [by_id[each.key].seq for each in arrived if by_id[each.key].aggregate == aggregate]
        assert numbers == sorted(numbers)
        assert len(numbers) == 10
    first = next(each for each in arrived if each.key == given[0].id)
    assert first.payload == given[0].payload
    prefix = {"nats": "ce-", "rabbitmq": "cloudEvents:"}.get(type(broker).__name__.lower(), "ce_")
    assert first.headers[f"{prefix}id"] == given[0].id
    assert first.headers[f"{prefix}source"] == "/shop"
    assert first.headers[f"{prefix}type"] == "order.moved"
    assert first.headers["tenant"] == "acme"


async def test_a_consumer_finds_the_key_of_what_arrives(broker: Any, sink: Sink) -> None:
    (row,) = rows(1, broker.where)
    await sink.publish([row])
    (arrived,) = await broker.read(1)
    envelope = Envelope(headers=arrived.headers, body=arrived.payload)
    assert cloudevent()(envelope) == f"ce:5:/shop:{row.id}"


async def test_a_repeat_is_dropped_where_the_broker_can(broker: Any, sink: Sink) -> None:
    given = rows(3, broker.where)
    await publish(sink, given)
    assert await publish(sink, given) == [Published()] * 3
    drops = type(broker).__name__ in ("Nats", "Sqs")
    assert len(await broker.read(3 if drops else 6)) == (3 if drops else 6)


async def test_a_destination_that_is_not_there_refuses(broker: Any, sink: Sink) -> None:
    (row,) = rows(1, "not-there.fifo")
    (answer,) = await sink.publish([row])
    if type(broker).__name__ == "Redis":  # a stream is made when it is written to
        assert isinstance(answer, Published)
        return
    assert isinstance(answer, PublishRefused), answer
    assert not answer.of_message
    assert "not-there" in answer.reason, answer
    assert isinstance((await sink.publish([replace(row, destination=broker.where)]))[0], Published)


@pytest.mark.parametrize("name", NOWHERE)
async def test_a_broker_that_is_away_is_no_attempt(name: str) -> None:
    sink = sink_for(NOWHERE[name].format(port=server.free_port()))
    try:
        await sink.open()
        answers = await sink.publish(rows(2, "somewhere"))
    except SinkUnavailable:
        answers = []
    finally:
        await sink.close()
    assert not any(isinstance(answer, Published | PublishRefused) for answer in answers)


async def test_from_the_outbox_to_the_broker(broker: Any, postgres_place: Place) -> None:
    ids = postgres_place.write(
        *(
            Message("order.moved", n, aggregate=("order", str(n % 4)), destination=broker.where)
            for n in range(20)
        )
    )
    relay = await drain(postgres_place, broker.url)
    assert relay.totals.published == 20
    arrived = await broker.read(20)
    assert sorted(each.key for each in arrived) == sorted(ids)
    order = {message_id: number for number, message_id in enumerate(ids)}
    for aggregate in range(4):
        numbers = [order[each.key] for each in arrived if order[each.key] % 4 == aggregate]
        assert numbers == sorted(numbers)


async def test_an_aggregate_ends_at_a_row_that_is_refused_in_its_middle(broker: Any, sink: Sink) -> None:
    """What is behind it comes later, in its order; other aggregates go on."""
    given = rows(40, broker.where, aggregates=4)
    odd = 8  # the third of the first aggregate
    given[odd] = broker.poison(given[odd])
    answers = await publish(sink, given)
    refused, behind = answers[odd], answers[odd + 4 :: 4]
    assert isinstance(refused, PublishRefused), refused
    assert all(isinstance(each, NotPublished) for each in behind)
    others = [each for at, each in enumerate(answers) if at % 4 or at < odd]
    assert others == [Published()] * 32
    healed = [replace(given[odd], payload=b"1", destination=broker.where), *given[odd + 4 :: 4]]
    assert await publish(sink, healed) == [Published()] * len(healed)
    assert in_order(given, await broker.read(40))


async def test_many_rows_of_one_aggregate_are_one_batch(
    broker: Any, sink: Sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_for(60.0, monkeypatch)  # so that a slow computer splits no batch
    given = rows(100, broker.where, aggregates=1)
    assert await sink.publish(given) == [Published()] * 100
    assert in_order(given, await broker.read(100))


async def test_rows_that_no_time_was_left_for_are_not_published(
    broker: Any, sink: Sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_for(0.0, monkeypatch)
    given = rows(100, broker.where, aggregates=1)
    answers = await sink.publish(given)
    count = sum(isinstance(each, Published) for each in answers)
    assert answers == [Published()] * count + [LATER] * (100 - count)
    assert in_order(given[:count], await broker.read(count))


async def test_a_standard_queue_gets_all_that_an_aggregate_has_at_once() -> None:
    broker = StandardSqs()
    await broker.prepare()
    sink = sink_for(broker.url)
    await sink.open()
    given = rows(25, broker.where, aggregates=1)
    given[3] = broker.poison(given[3])
    answers = await sink.publish(given)
    await sink.close()
    assert isinstance(answers[3], PublishRefused)
    assert [isinstance(each, Published) for each in answers].count(True) == 24
    arrived = await broker.read(24)
    assert {each.key for each in arrived} == {row.id for row in given} - {given[3].id}
    assert arrived[0].headers["ce_type"] == "order.moved"


@pytest.mark.parametrize(("aggregate", "group"), [("1", "order/1"), ("ü", None), ("x" * 200, None)])
def test_the_group_of_a_fifo_queue_is_a_name_that_it_takes(aggregate: str, group: str | None) -> None:
    (row,) = rows(1, "q.fifo")
    made = group_of(replace(row, aggregate=("order", aggregate)))
    assert made == group or (group is None and len(made) == 64)


def in_order(given: list[Any], arrived: list[Any]) -> bool:
    """Whether a consumer that drops repeats sees every row, and each aggregate's in their order."""
    by_id = {row.id: row for row in given}
    seen: dict[Any, list[int]] = {}
    for each in dict.fromkeys(each.key for each in arrived):
        seen.setdefault(by_id[each].aggregate, []).append(by_id[each].seq)
    assert sum(map(len, seen.values())) == len(given)
    return all(numbers == sorted(numbers) for numbers in seen.values())


async def test_redis_stops_an_aggregate_behind_a_refusal() -> None:
    import redis.asyncio

    broker = BROKERS["redis"]()
    async with redis.asyncio.Redis.from_url(broker.url) as client:
        await client.set("wrong", "no stream")
    sink = sink_for(broker.url)
    await sink.open()
    given = rows(6, broker.where, aggregates=2)
    given[0] = replace(given[0], destination="wrong")
    answers = await sink.publish(given)
    await sink.close()
    assert isinstance(answers[0], PublishRefused)
    assert "WRONGTYPE" in answers[0].reason
    assert [isinstance(each, Published) for each in answers] == [False, True] * 3


@pytest.mark.parametrize("url", ["pigeon://x", "stdout", ""])
def test_an_unknown_sink_says_what_there_is(url: str) -> None:
    with pytest.raises(SinkUnknown, match="stdout:"):
        sink_for(url)


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(PolicyInvalid, match="stream"):
        sink_for("redis://localhost/0?steram=x")


def test_no_secret_is_in_a_name() -> None:
    for url in ("redis://user:hunter2@h/0", "amqp://user:hunter2@h/", "nats://user:hunter2@h:1"):
        assert "hunter2" not in sink_for(url).name
