"""Events over WebSockets, in many instances at once: each processed and persisted once.

async with Intake(once, table.after(handler)) as intake:
    await Listener("wss://source.example/feed", intake).run()          # instances that connect
app = FastAPI(routes=[WebSocketRoute("/events", Acceptor(intake))])    # instances that accept
"""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import suppress
from importlib.util import find_spec
from time import monotonic
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from semel.core.backoff import backoff_s
from semel.errors import KeyInvalid, PolicyInvalid, SourceRefused
from semel.ingest.event_table import Columns, EventTable
from semel.ingest.intake import TYPE_BYTES_MAX, Event, Intake, IntakeLimits
from semel.ingest.receipts import Receipt
from semel.keys.limits import check as check_key
from semel.observe.limited_log import OutageLog
from semel.runtime.extras import install_command
from semel.runtime.jitter import jitter

__all__ = [
    "Acceptor",
    "Backoff",
    "Columns",
    "Event",
    "EventTable",
    "Fields",
    "Intake",
    "IntakeLimits",
    "Invalid",
    "Listener",
    "ListenerCounters",
    "Receipt",
]

PARTS_MAX = 16
OTHER_ID = "event_id"
"""The fallback for an event without `id`, if no other path was given."""


class Invalid(Struct, frozen=True):
    """The message is not an event; nothing is claimed."""

    reason: str
    id: str | None = None


class Fields(Struct, frozen=True, kw_only=True):
    """Where the id and the type of an event are: paths such as `id` or `meta.id`.

    With the default, an event without `id` may have `event_id`.
    """

    id: str = "id"
    type: str = "type"

    def __post_init__(self) -> None:
        for path in (self.id, self.type):
            if not path or "" in path.split(".") or path.count(".") >= PARTS_MAX:
                raise PolicyInvalid(f"{path!r} is not a path to a field; write id, or meta.id")

    def read(self, message: str | bytes, bytes_max: int) -> Event | Invalid:
        """Return the event in a message, or `Invalid`. Never raises for bad content."""
        try:
            body = message.encode() if isinstance(message, str) else bytes(message)
            if len(body) > bytes_max:
                return Invalid(f"larger than {bytes_max} bytes")
            fields = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return Invalid("not JSON")
        if not isinstance(fields, dict):
            return Invalid("no JSON object")
        found = _at(fields, self.id)
        if found is None and self.id == "id":
            found = fields.get(OTHER_ID)
        if isinstance(found, int) and not isinstance(found, bool):
            found = str(found)
        if not isinstance(found, str):
            return Invalid(f"no id at {self.id!r}")
        try:
            key = check_key(found)
        except KeyInvalid as error:
            return Invalid(str(error))
        kind = _at(fields, self.type)
        kind = "" if kind is None else kind
        if not isinstance(kind, str) or not _is_short(kind):
            return Invalid(f"{self.type!r} is not a short text", key)
        return Event(id=key, type=kind, body=body)


def _at(fields: Any, path: str) -> Any:
    for part in path.split("."):
        fields = fields.get(part) if isinstance(fields, dict) else None
    return fields


def _is_short(text: str) -> bool:
    return (not text or text.isprintable()) and len(text.encode(errors="replace")) <= TYPE_BYTES_MAX


_log = logging.getLogger("semel")

IN_FLIGHT_MAX = 100
"""The most events of one socket without an answer; above it the socket is not read."""
HOLD_S = 30.0
"""How long an event waits for a store that does not answer, before the sender gets `busy`."""
POLICY_VIOLATION, GOING_AWAY = 1008, 1001

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Authorize = Callable[[Scope], bool | Awaitable[bool]]


class Acceptor:
    """A WebSocket route: `WebSocketRoute("/events", Acceptor(intake))` in Starlette or FastAPI.

    Each text or binary message is one event, and gets one answer, in whatever order they are ready:
    `{"id": ..., "status": "accepted" | "duplicate" | "busy" | "invalid"}`, with `reason` and `retry_after_s`
    if there are any. `accepted`: journaled, it will run even after a crash. `busy`: not accepted, send it again.
    `authorize(scope)` decides who may connect; without it only the application's own checks apply.
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
        """Serve one socket until its client disconnects."""
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
            # The client has disconnected, or this instance is stopping. Received events are still processed.
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
            _log.exception("event %r could not be accepted", event.id)
            receipt = Receipt("busy", 1.0, "this instance cannot accept events")
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
    with suppress(Exception):  # it has disconnected: servers raise different errors
        await send({"type": "websocket.send", "text": msgspec.json.encode(answer).decode()})


if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection


KEEPALIVE_S = 20.0
"""A source that does not answer a ping within this time counts as disconnected."""
OPEN_S = 10.0
CLOSE_S = 2.0
GOING_AWAY = 1001
REFUSED_STATUS = (401, 403, 404)
"""Statuses that a retry does not fix, unless the source has accepted us before."""
QUEUE_MAX = 16
"""The most messages that are read ahead; then the source must wait."""
LISTENER_IN_FLIGHT_MAX = 100
"""The most events that wait for the store."""
STOP_S = 10.0
"""How long a stop waits until received events are journaled."""
STEADY_S = 10.0
"""After a connection of at least this length the backoff starts again."""


class Backoff(Struct, frozen=True, kw_only=True):
    """The delay before a reconnect: doubled each time, with jitter, so that a fleet does not reconnect at once."""

    first_s: float = 0.2
    max_s: float = 30.0

    def delay_s(self, tries: int, chance: float) -> float:
        """Return the delay before attempt `tries` + 1; `chance` is between 0 and 1."""
        return backoff_s(tries, self.first_s, self.max_s) * (0.5 + chance / 2)


class ListenerCounters(Struct):
    """Counts of a listener."""

    connected: int = 0
    received: int = 0
    accepted: int = 0
    duplicates: int = 0
    invalid: int = 0


class Listener:
    """Passes the events of a source to an intake. The source never sends again: an event is held until it is journaled.

    While the store does not answer, events are held and the socket is not read: the source slows
    down, or closes the connection, and the listener reconnects.
    """

    def __init__(
        self,
        url: str,
        intake: Intake,
        *,
        fields: Fields | None = None,
        backoff: Backoff | None = None,
        headers: Mapping[str, str] | None = None,
        chance: Callable[[], float] = jitter.random,
    ) -> None:
        if not url.startswith(("ws://", "wss://")):
            raise PolicyInvalid("a source is ws://host/path or wss://host/path")
        if find_spec("websockets") is None:
            raise PolicyInvalid(
                f"listening needs websockets; install the extra: {install_command('websocket')}"
            )
        self._url = url
        self._intake = intake
        self._fields = fields or Fields()
        self._backoff = backoff or Backoff()
        self._headers = dict(headers or {})
        self._chance = chance
        self._stopping = asyncio.Event()
        self._taking: set[asyncio.Task[None]] = set()
        self.counts: ListenerCounters = ListenerCounters()

    def stop(self) -> None:
        """Make `run` close the connection and end after received events are journaled."""
        self._stopping.set()

    async def run(self) -> None:
        """Listen until `stop()`."""
        running = asyncio.create_task(self._listen_on())
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (running, stopping):
                task.cancel()
            await asyncio.gather(running, stopping, return_exceptions=True)
            if self._taking:
                _, unanswered = await asyncio.wait(self._taking, timeout=STOP_S)
                for task in unanswered:  # the intake processes them until it is drained
                    task.cancel()
        if not running.cancelled():
            running.result()

    async def _listen_on(self) -> None:
        from websockets.asyncio.client import connect
        from websockets.exceptions import InvalidHandshake, InvalidStatus, InvalidURI, WebSocketException

        outage = OutageLog(_log, "the source")
        tries = 0
        while True:
            connected_at = None
            try:
                async with connect(
                    self._url,
                    additional_headers=self._headers,
                    open_timeout=OPEN_S,
                    close_timeout=CLOSE_S,
                    ping_interval=KEEPALIVE_S,
                    ping_timeout=KEEPALIVE_S,
                    max_size=self._intake.body_bytes_max,
                    max_queue=QUEUE_MAX,
                ) as connection:
                    connected_at = monotonic()
                    outage.end()
                    self.counts.connected += 1
                    _log.info("connected as %s", self._intake.instance)
                    try:
                        await self._read(connection)
                    except asyncio.CancelledError:
                        await connection.close(GOING_AWAY)
                        raise
                why = "the source closed the connection"
            except InvalidURI as error:
                raise PolicyInvalid(str(error)) from error
            except InvalidStatus as error:
                if error.response.status_code in REFUSED_STATUS and not self.counts.connected:
                    raise SourceRefused(
                        f"the source answers {error.response.status_code}: check its URL, and the headers that it wants"
                        " (--header-file)"
                    ) from error
                why = str(error)
            except (InvalidHandshake, WebSocketException, OSError, TimeoutError) as error:
                why = f"{type(error).__name__}: {error}"
            if connected_at is not None and monotonic() - connected_at >= STEADY_S:
                tries = 0
            delay_s = self._backoff.delay_s(tries, self._chance())
            outage.report(why)
            await asyncio.sleep(delay_s)
            tries += 1

    async def _read(self, connection: "ClientConnection") -> None:
        room = asyncio.Semaphore(LISTENER_IN_FLIGHT_MAX)
        async for message in connection:
            self.counts.received += 1
            event = self._fields.read(message, self._intake.body_bytes_max)
            if isinstance(event, Invalid):
                self.counts.invalid += 1
                _log.warning("a message is not an event: %s", event.reason)
                continue
            await room.acquire()
            task = asyncio.create_task(self._take(event))
            self._taking.add(task)
            task.add_done_callback(self._taking.discard)
            task.add_done_callback(lambda _task: room.release())

    async def _take(self, event: Event) -> None:
        try:
            receipt = await self._intake.take(event, hold_s=None)
        except Exception:  # noqa: BLE001 - one event must not end the socket
            _log.exception("event %r could not be accepted", event.id)
            return
        match receipt.status:
            case "accepted":
                self.counts.accepted += 1
            case "duplicate":
                self.counts.duplicates += 1
            case "refused":
                self.counts.invalid += 1
                _log.warning("event %r is refused: %s", event.id, receipt.reason)
            case "busy":
                _log.error("event %r was not accepted: %s", event.id, receipt.reason)
