"""What stands around handlers."""

import asyncio
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import semel
from semel.brokers import Arrival, Middleware, Route, Runner
from semel.brokers.middleware import dead_letter, retry, timeout, tracing
from semel.testing.queue import Queue

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def consumed(handler: Any, *middleware: Middleware, headers: dict[str, str] | None = None) -> Queue:
    queue = Queue()
    queue.send(b"{}", {"message_id": "a", **(headers or {})})
    once = semel.aopen("memory:", consumer="billing", policy=semel.Policy(retry_delay_s=0.01))
    runner = Runner(queue.source(), [Route(handler, once=once, middleware=middleware)])
    runner.stop_when_idle()
    async with asyncio.timeout(20):
        await runner.run()
    assert len(queue) == 0
    return queue


async def test_a_handler_that_takes_too_long_is_stopped_and_tried_again() -> None:
    attempts: list[int] = []

    async def charge(message: Arrival) -> None:
        attempts.append(semel.current().attempt)
        if len(attempts) == 1:
            await asyncio.Event().wait()

    await consumed(charge, timeout(0.05))
    assert attempts == [1, 2]


async def test_a_retry_is_the_same_attempt_and_other_errors_are_not_retried() -> None:
    attempts: list[int] = []

    async def charge(message: Arrival) -> None:
        attempts.append(semel.current().attempt)
        if len(attempts) < 3:
            raise ConnectionError
        if len(attempts) == 3:
            raise KeyError

    await consumed(charge, retry(ConnectionError, wait_s=0.001))
    assert attempts == [1, 1, 1, 2]


async def test_what_no_repetition_cures_goes_to_the_dead_letters_at_once() -> None:
    attempts: list[int] = []

    async def charge(message: Arrival) -> None:
        attempts.append(semel.current().attempt)
        raise LookupError("no such order")

    queue = await consumed(charge, dead_letter(LookupError))
    assert attempts == [1]
    [(_, letter)] = queue.dead
    assert "LookupError: no such order" in letter.error


async def test_a_handler_may_give_up_by_itself() -> None:
    async def charge(message: Arrival) -> None:
        raise semel.GiveUp("closed account")

    assert len((await consumed(charge)).dead) == 1


async def test_a_span_continues_the_producers_trace() -> None:
    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))

    async def charge(message: Arrival) -> None:
        return None

    trace_id = "0af7651916cd43dd8448eb211c80319c"
    headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
    await consumed(charge, tracing(provider.get_tracer("test")), headers=headers)
    [span] = spans.get_finished_spans()
    assert format(span.context.trace_id, "032x") == trace_id
    assert span.name.startswith("process ")
    assert dict(span.attributes or {})["semel.attempt"] == 1
