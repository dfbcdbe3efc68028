"""Accept sockets in your own application, and answer for each event what became of it."""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any

import msgspec

from semel.intake import Intake, Receipt
from semel.sockets.message import Fields, Invalid

__all__ = ["Acceptor"]

_log = logging.getLogger("semel")

IN_FLIGHT_MAX = 100
"""Events of one socket that wait for their answer; then it is not read."""
HOLD_S = 30.0
"""How long an event is held for a store that does not answer, before its sender is told to send it again."""
POLICY_VIOLATION, GOING_AWAY, SERVER_ERROR = 1008, 1001, 1011

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Authorize = Callable[[Scope], bool | Awaitable[bool]]


class Acceptor:
    """A WebSocket route: `WebSocketRoute("/events", Acceptor(intake))` in Starlette or FastAPI.

    Each text or binary message is one event, and gets one answer, in whatever order they are ready:
    `{"id": ..., "status": "accepted" | "duplicate" | "busy" | "invalid"}`, with `reason` and `retry_after_s`
    where there are any. `accepted`: journaled, it will run, whoever dies. `busy`: not taken, send it again.
    `authorize(scope)` decides who may connect; without it the route lets in whom the application lets through.
    """

    def __init__(
        self,
        intake: Intake,
        *,
        fields: Fields | None = None,
        authorize: Authorize | None = None,
        hold_s: float = HOLD_S,
        in_flight_max: int = IN_FLIGHT_MAX,
    ) -> None:
        self._intake = intake
        self._fields = fields or Fields()
        self._authorize = authorize
        self._hold_s = hold_s
        self._in_flight_max = in_flight_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One socket, until its client leaves."""
        if scope["type"] != "websocket" or (await receive())["type"] != "websocket.connect":
            return
        if self._authorize is not None:
            allowed = self._authorize(scope)
            if not (await allowed if inspect.isawaitable(allowed) else allowed):
                await send({"type": "websocket.close", "code": POLICY_VIOLATION})
                return
        await send({"type": "websocket.accept"})
        room = asyncio.Semaphore(self._in_flight_max)
        answering: set[asyncio.Task[None]] = set()
        try:
            while (message := await receive())["type"] == "websocket.receive":
                await room.acquire()
                text = message.get("text")
                task = asyncio.create_task(self._answer(message.get("bytes") if text is None else text, send))
                answering.add(task)
                task.add_done_callback(answering.discard)
                task.add_done_callback(lambda _task: room.release())
            # The client has left, or this instance is stopping. What was received is not forgotten for that.
            if answering:
                await asyncio.wait(answering)
        finally:
            for task in answering:
                task.cancel()

    async def _answer(self, message: str | bytes | None, send: Send) -> None:
        event = self._fields.read(message or b"", self._intake.body_bytes_max)
        if isinstance(event, Invalid):
            return await _say(send, event.id, "invalid", reason=event.reason)
        try:
            receipt = await self._intake.take(event, hold_s=self._hold_s)
        except Exception:  # noqa: BLE001 - one event must not end the socket
            _log.exception("event %r could not be taken", event.id)
            receipt = Receipt("busy", 1.0, "this instance cannot take events")
        status = "invalid" if receipt.status == "refused" else receipt.status
        await _say(send, event.id, status, receipt.reason, receipt.retry_after_s)
        return None


async def _say(
    send: Send, event_id: str | None, status: str, reason: str = "", retry_after_s: float = 0.0
) -> None:
    answer: dict[str, Any] = {"id": event_id, "status": status}
    if reason:
        answer["reason"] = reason
    if retry_after_s:
        answer["retry_after_s"] = round(retry_after_s, 3)
    with suppress(Exception):  # it has left: servers tell so by errors of their own
        await send({"type": "websocket.send", "text": msgspec.json.encode(answer).decode()})
