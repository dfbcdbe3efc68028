"""Receive webhooks: verify, take the id, journal, answer; a duplicate gets the same answer.

stripe = webhooks.Receiver(once, webhooks.stripe("whsec_..."), handler)
app = FastAPI(lifespan=stripe.lifespan)
app.add_route("/webhooks/stripe", stripe, methods=["POST"])
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from typing import Any, Literal, Self

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from semel.client import deliver
from semel.client.client_async import AsyncSemel
from semel.errors import StoreError
from semel.ingest.intake import DeadLetterHandler, Event, Handler, Intake, IntakeLimits
from semel.ingest.receipts import Receipt
from semel.ingest.webhook_schemes import (
    Challenge,
    Scheme,
    Verified,
    WebhookRefused,
    github,
    headers_of,
    shopify,
    slack,
    standard,
    stripe,
)
from semel.types import (
    Busy,
    Delivery,
    Done,
    Errored,
    Failed,
    Late,
    Lost,
    Mismatch,
    Outcome,
    Unavailable,
    Unknown,
)
from semel.windows import Duration, window_us

__all__ = [
    "Challenge",
    "Event",
    "IntakeLimits",
    "Receiver",
    "Scheme",
    "Verified",
    "WebhookRefused",
    "github",
    "shopify",
    "slack",
    "standard",
    "stripe",
]

_log = logging.getLogger("semel")

WINDOW = "96h"
"""Senders repeat for days: the example in Standard Webhooks runs for more than 75 hours."""
BODY_WAIT_S = 10.0
HOLD_S = 2.0
"""How long a request waits for a slow store, before its sender gets 503."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class WebhookResponse(Struct, frozen=True):
    """The response to the sender."""

    status: int
    reason: str = ""
    retry_after_s: float | None = None
    body: bytes = b""


class Receiver:
    """Receives webhooks of one sender: takes a client with its own consumer, a scheme and a handler.

    `answer="journaled"` needs a durable store and runs inside `async with receiver:`, or `lifespan=receiver.lifespan`
    of the application; `"synchronous"` runs the handler within the request. The handler gets an `Event`.
    """

    def __init__(
        self,
        once: AsyncSemel,
        scheme: Scheme,
        handler: Handler,
        *,
        answer: Literal["journaled", "synchronous"] = "journaled",
        window: Duration = WINDOW,
        pace: IntakeLimits | None = None,
        dead: DeadLetterHandler | None = None,
        fingerprint: bool = False,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        synchronous = answer == "synchronous"
        policy = replace(once.policy, window_s=window_us(window) / 1e6)
        if synchronous:
            policy = replace(policy, wait_s=0, fingerprint=_body if fingerprint else policy.fingerprint)
        self._once = once.using(policy)
        self._source = f"webhook:{scheme.name}"
        self._scheme = scheme
        self._handler = handler
        self._fingerprint = fingerprint
        self._now_s = now_s
        self._intake: Intake = Intake(self._once, handler, pace=pace, dead=dead, source=self._source)
        self._synchronous = synchronous

    @property
    def intake(self) -> Intake:
        """The intake that journals and runs events."""
        return self._intake

    async def __aenter__(self) -> Self:
        if not self._synchronous:
            await self._intake.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        if not self._synchronous:
            await self._intake.drain()

    @asynccontextmanager
    async def lifespan(self, app: Any) -> AsyncIterator[None]:
        """For the application: `FastAPI(lifespan=receiver.lifespan)`."""
        del app
        async with self:
            yield

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or the lifespan if the receiver is the application itself."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            answer = await self._answer(scope, receive)
            if answer is not None:
                await _send(answer, send)
        else:
            await send({"type": "websocket.close", "code": 1003})

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        async with self:
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})

    async def _answer(self, scope: Scope, receive: Receive) -> WebhookResponse | None:
        """Return the response to one request, or `None` if the sender has disconnected."""
        if scope["method"] != "POST":
            return WebhookResponse(405, "webhooks are posted")
        headers = headers_of(scope["headers"])
        if headers is None:
            return WebhookResponse(431, "too many headers")
        if headers.get("content-encoding", "identity") != "identity":
            return WebhookResponse(415, "send a signed body without compression")
        try:
            async with asyncio.timeout(BODY_WAIT_S):
                body = await _read(headers.get("content-length", ""), receive, self._intake.body_bytes_max)
        except TimeoutError:
            return WebhookResponse(408, f"no whole body within {BODY_WAIT_S:g} s")
        if body is None or isinstance(body, WebhookResponse):
            return body
        found = self._scheme.verify(headers, body, self._now_s())
        if isinstance(found, WebhookRefused):
            _log.info("a webhook from %s was refused: %s", self._scheme.name, found.reason)
            return WebhookResponse(found.status, found.reason)
        if isinstance(found, Challenge):
            return WebhookResponse(200, body=found.body)
        event = Event(id=found.id, type=found.type, body=body)
        return await (self._run(event) if self._synchronous else self._take(event))

    async def _take(self, event: Event) -> WebhookResponse:
        receipt = await self._intake.take(
            event, hold_s=HOLD_S, fingerprint=event.body if self._fingerprint else None
        )
        return response_when_journaled(receipt)

    async def _run(self, event: Event) -> WebhookResponse:
        try:
            delivery = Delivery(key=event.id, body=event, event_type=event.type, source=self._source)
            return response_for(await deliver.deliver_one(self._once, delivery, self._handler))
        except StoreError as error:
            return response_for(Unavailable(error))


def response_when_journaled(receipt: Receipt) -> WebhookResponse:
    """Return the response to an event that runs after it was journaled."""
    match receipt.status:
        case "accepted" | "duplicate":
            return WebhookResponse(202)
        case "refused":
            return WebhookResponse(422, receipt.reason)
        case "busy":
            return WebhookResponse(503, receipt.reason, receipt.retry_after_s)


def response_for(outcome: Outcome[Any]) -> WebhookResponse:
    """Return the response to an event whose handler ran within this request or an earlier one.

    A permanent failure gets 200 too: a retry cannot fix it, and the sender would retry for days.
    """
    match outcome:
        case Done(recorded=True) | Failed():
            return WebhookResponse(200)
        case Done():
            return WebhookResponse(503, "it ran, but could not be recorded", 1.0)
        case Busy(retry_after_s):
            return WebhookResponse(409, "the first delivery is still running", retry_after_s)
        case Lost():
            return WebhookResponse(409, "another delivery took over", 1.0)
        case Unknown():
            return WebhookResponse(409, "its outcome is unknown; an operator must resolve it")
        case Errored(_, _, retry_after_s):
            return WebhookResponse(503, "the attempt failed", max(1.0, retry_after_s))
        case Unavailable():
            return WebhookResponse(503, "it could not be recorded", 1.0)
        case Mismatch():
            return WebhookResponse(422, "this id was used before with another body")
        case Late():
            return WebhookResponse(422, "too old to tell whether it ran")


async def _read(length: str, receive: Receive, bytes_max: int) -> bytes | WebhookResponse | None:
    """Read the whole body; `None` if the sender has disconnected."""
    too_large = WebhookResponse(413, f"the body is larger than {bytes_max} bytes")
    if length.isdecimal() and int(length[:20]) > bytes_max:
        return too_large
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        part = message.get("body", b"")
        size += len(part)
        if size > bytes_max:
            return too_large
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


async def _send(answer: WebhookResponse, send: Send) -> None:
    headers = []
    body = answer.body
    if answer.reason:
        body = msgspec.json.encode({"status": answer.status, "detail": answer.reason})
        headers.append((b"content-type", b"application/problem+json"))
    elif body:
        headers.append((b"content-type", b"text/plain; charset=utf-8"))
    if answer.retry_after_s is not None:
        headers.append((b"retry-after", str(max(1, math.ceil(answer.retry_after_s))).encode()))
    if answer.status == 405:  # noqa: PLR2004 - which asks for it
        headers.append((b"allow", b"POST"))
    headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _body(event: Event) -> bytes:
    return event.body
