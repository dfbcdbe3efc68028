"""What a handler is given follows from its annotation: bytes, plain values, objects, CloudEvents."""

import dataclasses
import json
from datetime import UTC, datetime
from typing import Any

import msgspec
import pydantic
import pytest
from cloudevents.core.base import BaseCloudEvent
from cloudevents.core.bindings import amqp, http, kafka, rabbitmq
from cloudevents.core.formats.json import JSONFormat
from cloudevents.core.v03.event import CloudEvent as CloudEventV03
from cloudevents.core.v1.event import CloudEvent
from cloudevents.v1.http import CloudEvent as OldCloudEvent

import semel
from semel.brokers import Arrival, Route, Runner
from semel.brokers.routes import event_facts, reader, route_for
from semel.errors import MessageInvalid, UsageError
from semel.testing.queue import Queue

BODY = b'{"order": "o-1", "cents": 5}'
DATA = {"order": "o-1", "cents": 5}
TIME = datetime(2026, 11, 16, 8, 30, tzinfo=UTC)
FORMAT = JSONFormat()


class ByMsgspec(msgspec.Struct):
    order: str
    cents: int


class ByPydantic(pydantic.BaseModel):
    order: str
    cents: int


@dataclasses.dataclass
class ByDataclass:
    order: str
    cents: int


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def given(wanted: Any, arrival: Arrival, **more: Any) -> Any:
    """What a handler with this annotation is given."""

    def handler(message: Any) -> None: ...

    handler.__annotations__["message"] = wanted
    return reader(handler, **more)(arrival)


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (bytes, BODY),
        (dict, DATA),
        (dict[str, Any], DATA),
        (ByMsgspec, ByMsgspec("o-1", 5)),
        (ByPydantic, ByPydantic(order="o-1", cents=5)),
        (ByDataclass, ByDataclass("o-1", 5)),
    ],
)
def test_a_body_is_read_as_the_annotation_says(wanted: Any, expected: Any) -> None:
    arrival = Arrival(body=BODY)
    assert given(wanted, arrival) == expected
    assert given(list[wanted], arrival, batch=True) == expected, "of a batch, each is read alike"
    assert given(Arrival, arrival) is arrival


@pytest.mark.parametrize("wanted", [dict, ByMsgspec, ByPydantic, ByDataclass, CloudEvent, BaseCloudEvent])
@pytest.mark.parametrize("body", [b"", b"\xff", b"[1]", b'"text"', b"{", b"[" * 100_000])
def test_a_body_that_does_not_read_is_given_up(wanted: Any, body: bytes) -> None:
    with pytest.raises(MessageInvalid):
        given(wanted, Arrival(body=body))


# --- CloudEvents ---


def event(**more: Any) -> CloudEvent:
    attributes = {
        "id": "e-1",
        "source": "/shop",
        "type": "order.paid",
        "time": TIME,
        "subject": "größe",
        **more,
    }
    return CloudEvent({**attributes, "datacontenttype": "application/json"}, DATA)


def sent(binding: str, *, structured: bool) -> Arrival:
    """An event as the package's own bindings put it on the wire."""
    module: Any = {"http": http, "kafka": kafka, "amqp": amqp, "rabbitmq": rabbitmq}[binding]
    message = (module.to_structured if structured else module.to_binary)(event(), FORMAT)
    match binding:
        case "kafka":
            return Arrival(headers=list(message.headers.items()), body=message.value)
        case "http":
            return Arrival(headers=message.headers, body=message.body)
        case "amqp":
            headers = {**message.application_properties, "content-type": message.properties["content-type"]}
            return Arrival(headers=headers, body=message.application_data)
        case _:
            return Arrival(
                headers={**message.headers, "content-type": message.content_type}, body=message.body
            )


@pytest.mark.parametrize("wanted", [CloudEvent, BaseCloudEvent])
@pytest.mark.parametrize("structured", [False, True])
@pytest.mark.parametrize("binding", ["http", "kafka", "amqp", "rabbitmq"])
def test_an_event_arrives_as_it_was_sent(binding: str, structured: bool, wanted: Any) -> None:
    read = given(wanted, sent(binding, structured=structured))
    assert isinstance(read, CloudEvent)
    assert read.get_attributes() == event().get_attributes()
    assert read.get_data() == DATA


def test_structured_mode_wins_where_the_content_type_says_so() -> None:
    body = FORMAT.write(event())
    headers = {
        "ce-id": "other",
        "ce-source": "/x",
        "content-type": "application/cloudevents+json; charset=utf-8",
    }
    assert given(CloudEvent, Arrival(headers=headers, body=body)).get_id() == "e-1"


@pytest.mark.parametrize("missing", ["id", "source", "type", "specversion"])
@pytest.mark.parametrize("structured", [False, True])
def test_nothing_required_is_made_up(missing: str, structured: bool) -> None:
    attributes = {"specversion": "1.0", "id": "e-1", "source": "/shop", "type": "order.paid"}
    del attributes[missing]
    arrival = (
        Arrival(body=json.dumps({**attributes, "data": DATA}).encode())
        if structured
        else Arrival(headers={f"ce_{name}": value for name, value in attributes.items()}, body=BODY)
    )
    with pytest.raises(MessageInvalid):
        given(CloudEvent, arrival)


@pytest.mark.parametrize("structured", [False, True])
def test_an_event_without_a_time_has_none(structured: bool) -> None:
    attributes = {"specversion": "1.0", "id": "e-1", "source": "/shop", "type": "order.paid"}
    arrival = (
        Arrival(body=json.dumps(attributes).encode())
        if structured
        else Arrival(headers=[(f"ce_{name}", value.encode()) for name, value in attributes.items()])
    )
    read = given(CloudEvent, arrival)
    assert (read.get_time(), read.get_data()) == (None, None)
    assert read.get_attributes() == attributes


def test_the_older_version_is_itself_and_never_passes_for_the_newer() -> None:
    old = CloudEventV03({"id": "e-1", "source": "/shop", "type": "t", "time": TIME}, b"\x00\x01")
    arrival = Arrival(body=FORMAT.write(old))
    assert isinstance(given(BaseCloudEvent, arrival), CloudEventV03)
    assert given(CloudEventV03, arrival).get_data() == b"\x00\x01"
    with pytest.raises(MessageInvalid):
        given(CloudEvent, arrival)


def test_a_type_of_the_packages_old_interface_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match=r"cloudevents\.core\.v1\.event"):
        given(OldCloudEvent, Arrival())


def test_a_type_of_ones_own_that_is_a_cloudevent_is_made() -> None:
    class Paid(CloudEvent):
        @property
        def order(self) -> str:
            data = self.get_data()
            assert isinstance(data, dict)
            return str(data["order"])

    read = given(Paid, sent("kafka", structured=False))
    assert (type(read), read.order) == (Paid, "o-1")


def test_a_route_reads_the_type_of_an_event_in_the_encoding_of_its_binding() -> None:
    async def handler(_event: CloudEvent) -> None: ...

    route = Route(handler, once=semel.aopen("memory:", consumer="c"), types=["größe"])
    arrival = Arrival(headers={"ce-id": "e", "ce-source": "/s", "ce-type": "gr%C3%B6%C3%9Fe"})
    assert route_for([route], event_facts(arrival)[0]) is route


def test_a_time_beyond_any_calendar_is_no_time() -> None:
    headers = {"ce_specversion": "1.0", "ce_id": "e", "ce_source": "/s", "ce_type": "t", "ce_time": "9" * 30}
    assert event_facts(Arrival(headers=headers)) == ("t", None)
    with pytest.raises(MessageInvalid):
        given(CloudEvent, Arrival(headers=headers))


@pytest.mark.anyio
async def test_handlers_by_type_are_given_events_and_copies_in_either_mode_run_once() -> None:
    queue, ran = Queue(deadline_s=5), list[Any]()

    async def paid(event: CloudEvent) -> None:
        ran.append((semel.current().key, event.get_type(), event.get_data()))

    for structured in (False, True):
        arrival = sent("kafka", structured=structured)
        queue.send(arrival.body, dict(arrival.headers))  # type: ignore[arg-type]  # pairs
    queue.send(b"{}", {"ce_id": "e-2", "ce_source": "/shop", "ce_type": "order.paid"})  # no specversion
    async with semel.aopen("memory:", consumer="billing") as once:
        runner = Runner(queue.source(), [Route(paid, once=once, types=["order.paid"])])
        runner.stop_when_idle()
        await runner.run()
    assert ran == [("ce:5:/shop:e-1", "order.paid", DATA)]
    assert runner.counts.duplicates == 1
    assert "no specversion" in queue.dead[0][1].error


@pytest.mark.anyio
async def test_a_message_whose_type_contradicts_itself_is_put_aside_and_stops_nobody() -> None:
    queue, ran = Queue(deadline_s=5), list[str]()

    async def paid(_message: Arrival) -> None:
        ran.append(semel.current().key)

    queue.send(b"{}", {"message_id": "a", "ce_type": "x", "CE_Type": "y"})
    queue.send(b"{}", {"message_id": "b"})
    async with semel.aopen("memory:", consumer="billing") as once:
        runner = Runner(queue.source(), paid, once=once)
        runner.stop_when_idle()
        await runner.run()
    assert ran == ["b"]
    assert [letter.reason for _, letter in queue.dead] == ["no-key"]
