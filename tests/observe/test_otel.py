"""One span per delivery, current in the handler; a duplicate links to the span that did the work."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

import semel
from semel.observe.otel import TraceHook
from tests.observe.listening import listened
from tests.services import postgres, redis


class Traced:
    """A tracer of one test's own."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    def hook(self, **options: Any) -> TraceHook:
        return TraceHook(self.provider, **options)

    def spans(self) -> list[ReadableSpan]:
        return list(self.exporter.get_finished_spans())


@pytest.fixture
def traced() -> Traced:
    return Traced()


def one() -> int:
    return 1


def test_a_delivery_is_a_span(colour: str, traced: Traced) -> None:
    inside: list[Any] = []

    def handler() -> int:
        inside.append(trace.get_current_span().get_span_context().span_id)
        return 1

    with listened(colour, "memory:", hooks=[traced.hook()]) as (once, _):
        once.run("a", handler)
        assert trace.get_current_span().get_span_context().span_id not in inside
    (span,) = traced.spans()
    assert span.name == "process billing"
    assert span.kind is SpanKind.CONSUMER
    assert span.context is not None
    assert inside == [span.context.span_id]
    assert dict(span.attributes or {}) == {
        "messaging.system": "semel",
        "messaging.operation.type": "process",
        "messaging.operation.name": "process",
        "messaging.destination.name": "billing",
        "messaging.consumer.group.name": "billing",
        "messaging.message.id": "a",
        "semel.attempt": 1,
        "semel.outcome": "done",
    }


@pytest.mark.parametrize("kind", ["memory", "sqlite", "redis", "postgres"])
def test_a_duplicate_links_to_the_span_that_did_the_work(kind: str, tmp_path: Path, traced: Traced) -> None:
    store = "memory:"
    if kind != "memory":
        at = {"redis": redis.place, "postgres": postgres.place}
        store = at[kind](tmp_path) if kind in at else f"sqlite:///{tmp_path}/events.db"
    first = [semel.Delivery(key="a", body=1, source="orders", meta={"tag": "kept"})]
    with semel.open(store, consumer="billing", hooks=[traced.hook()]) as once:
        once.run_many(first, lambda body: body)
        if kind == "memory":
            once.run("a", one)
        else:  # another process: what it knows, it knows from the record
            with semel.open(store, consumer="billing", hooks=[traced.hook()]) as other:
                other.run("a", one)
        record = once.records.lookup("a")
    work, duplicate = traced.spans()
    assert (work.name, duplicate.name) == ("process orders", "process billing")
    assert work.context is not None
    (link,) = duplicate.links
    assert (link.context.trace_id, link.context.span_id) == (work.context.trace_id, work.context.span_id)
    assert (duplicate.attributes or {})["semel.outcome"] == "duplicate"
    assert (duplicate.attributes or {})["semel.duplicate.reason"] == "redelivery"
    assert record is not None
    assert b'"tag":"kept"' in (record.meta or b"")


def test_without_links_nothing_is_kept_and_nothing_looked_up(traced: Traced) -> None:
    with semel.open("memory:", consumer="billing", hooks=[traced.hook(links=False, keys=False)]) as once:
        once.run("a", one)
        once.run("a", one)
        record = once.records.lookup("a")
    assert record is not None
    assert record.meta is None
    _, duplicate = traced.spans()
    assert not duplicate.links
    assert "a" not in (duplicate.attributes or {}).values()


def test_a_failure_is_an_error_with_its_exception(colour: str, traced: Traced) -> None:
    def fails() -> None:
        raise ValueError("no")

    with listened(colour, "memory:", hooks=[traced.hook()]) as (once, _):
        once.run("a", fails)
    (span,) = traced.spans()
    assert span.status.status_code is StatusCode.ERROR
    assert [event.name for event in span.events] == ["exception"]
    assert (span.attributes or {})["semel.outcome"] == "released"


def test_handlers_in_threads_and_tasks_have_their_own_spans(traced: Traced) -> None:
    seen: dict[int, int] = {}

    def handler(number: int) -> None:
        seen[number] = trace.get_current_span().get_span_context().span_id

    async def ahandler(number: int) -> None:
        await asyncio.sleep(0)
        seen[number] = trace.get_current_span().get_span_context().span_id

    async def run() -> None:
        async with semel.aopen("memory:", consumer="other", hooks=[traced.hook()]) as once:
            await once.run_many(
                [semel.Delivery(key=str(n), body=n) for n in range(8, 16)], ahandler, concurrency=4
            )

    with semel.open("memory:", consumer="billing", hooks=[traced.hook()]) as once:
        once.run_many([semel.Delivery(key=str(n), body=n) for n in range(8)], handler, concurrency=4)
    asyncio.run(run())
    by_key = {
        int(str((span.attributes or {})["messaging.message.id"])): span.context.span_id
        for span in traced.spans()
        if span.context is not None
    }
    assert seen == by_key
    assert len(set(seen.values())) == 16


def test_no_span_stays_open(traced: Traced) -> None:
    hook = traced.hook()
    with semel.open("memory:", consumer="billing", policy=semel.Policy(wait_s=0), hooks=[hook]) as once:
        claim = once.claim("a")
        once.run("a", one)
        once.claim("a")
        assert isinstance(claim, semel.Claimed)
        once.complete(claim)
        once.run_many([semel.Delivery(key="b", body=1)] * 2, lambda body: body)
        with pytest.raises(KeyboardInterrupt):
            once.run("c", lambda: (_ for _ in ()).throw(KeyboardInterrupt()))
    assert hook._spans == {}
    assert hook._tokens == {}
