"""What a server cannot be made to do on demand: the application's messages, and its request's task, by hand."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import semel
from semel.http import Rules
from semel.http.asgi import AsgiIdempotency
from semel.stores import MemoryStore

START = {"type": "http.response.start", "status": 200, "headers": []}
END = {"type": "http.response.body", "body": b"done"}


class Desk:
    """One middleware around one application, and what was sent."""

    def __init__(self, app: Any, rules: Rules | None = None) -> None:
        self.sent: list[Any] = []
        self.client = semel.aopen(MemoryStore(), consumer="shop")
        self.middleware = AsgiIdempotency(app, self.client, caller=None, rules=rules)

    async def ask(self, send: Callable[[Any], Awaitable[None]] | None = None) -> None:
        scope = {
            "type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": [(b"idempotency-key", b"k")],
        }  # fmt: skip

        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def note(message: Any) -> None:
            self.sent.append(message)

        await self.middleware(scope, receive, send or note)

    async def answer(self) -> tuple[int, bytes]:
        self.sent.clear()
        await self.ask()
        return self.sent[0]["status"], self.sent[-1]["body"]


async def cancelled(desk: Desk, entered: asyncio.Event) -> None:
    """A server that cancels the request of a client that has gone."""
    request = asyncio.create_task(desk.ask())
    await entered.wait()
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request


@pytest.mark.anyio
async def test_a_server_that_cancels_a_request_does_not_cancel_its_handler() -> None:
    entered, leave, behind = asyncio.Event(), asyncio.Event(), asyncio.Event()
    ran: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        ran.append(1)
        entered.set()
        await leave.wait()
        await send(START)
        await send(END)
        behind.set()

    desk = Desk(app, Rules(wait_s=10))
    await cancelled(desk, entered)
    assert desk.sent == []
    leave.set()
    assert await desk.answer() == (200, b"done")
    await behind.wait()
    assert ran == [1]


@pytest.mark.anyio
async def test_an_error_that_nobody_waits_for_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    entered, leave = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        entered.set()
        await leave.wait()
        raise LookupError("nobody there")

    desk = Desk(app, Rules(wait_s=10))
    await cancelled(desk, entered)
    with caplog.at_level(logging.ERROR, "semel"):
        leave.set()
        with pytest.raises(LookupError):
            await desk.ask()
    assert any("client had disconnected" in each.message for each in caplog.records)


@pytest.mark.anyio
async def test_nothing_is_sent_before_the_record_is_complete() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(START)
        await send(END)

    desk = Desk(app)
    states: list[str] = []

    async def look(message: Any) -> None:
        record = await desk.client.records.lookup("POST / * k")
        states.append(record.state if isinstance(record, semel.Record) else "absent")

    await desk.ask(look)
    assert states == ["done", "done"]


@pytest.mark.anyio
@pytest.mark.parametrize("length", [None, 3])
async def test_a_stream_is_not_whole_before_the_record_is_complete(length: int | None) -> None:
    """With a length its client knows the last byte when it sees it; without, the end is a message of its own."""
    headers = [] if length is None else [(b"content-length", b"3")]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for part in (b"a", b"b", b"c"):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    desk = Desk(app, Rules(response_bytes_max=1))
    seen: list[tuple[bytes, str]] = []

    async def look(message: Any) -> None:
        record = await desk.client.records.lookup("POST / * k")
        assert isinstance(record, semel.Record)
        seen.append((message.get("body", b"start"), record.state))

    await desk.ask(look)
    end = [(b"c", "claimed"), (b"", "done")] if length is None else [(b"c", "done"), (b"", "done")]
    assert seen == [(b"start", "claimed"), (b"a", "claimed"), (b"b", "claimed"), *end]


@pytest.mark.anyio
async def test_a_file_that_the_server_sends_is_passed_on() -> None:
    ran: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        ran.append(1)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
        await send({"type": "http.response.pathsend", "path": "/tmp/file"})

    desk = Desk(app)
    await desk.ask()
    assert [message["type"] for message in desk.sent] == ["http.response.start", "http.response.pathsend"]
    assert (await desk.answer())[0] == 409
    assert ran == [1]


@pytest.mark.anyio
async def test_an_application_that_says_nothing_runs_again() -> None:
    ran: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        ran.append(1)

    desk = Desk(app)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="without a response"):
            await desk.ask()
    assert ran == [1, 1]


@pytest.mark.anyio
async def test_other_kinds_of_connection_pass() -> None:
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    desk = Desk(app, Rules(required=True))
    for kind in ("websocket", "lifespan"):
        await desk.middleware({"type": kind}, None, None)
    assert seen == ["websocket", "lifespan"]


@pytest.mark.anyio
async def test_a_request_is_guarded_once_by_two_middlewares() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(START)
        await send(END)

    inner = Desk(app)
    outer = Desk(inner.middleware)
    assert await outer.answer() == (200, b"done")
    assert isinstance(await inner.client.records.lookup("POST / * k"), semel.Absent | None)
