"""`/v1/events`: receives events, one or many, over HTTP or a WebSocket, and answers each."""

import asyncio
from collections import Counter
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, FastAPI, Request, WebSocket
from starlette.responses import Response
from starlette.websockets import WebSocketDisconnect

from semel.server.auth import Caller
from semel.server.events import Events, IncomingEvent, incoming
from semel.server.problems import HttpProblem, problem_of_body
from semel.server.requests import EventOutcome, EventOutcomes
from semel.server.routes.base import (
    JSON,
    TENANT_HEADER,
    Document,
    answer,
    authorize,
    body_of,
    content_type,
    many,
    wrong_type,
)
from semel.server.service import TOKEN_LIVE_S, Service

__all__ = ["add"]

CLOUDEVENT = "application/cloudevents+json"
CLOUDEVENTS = "application/cloudevents-batch+json"
TYPES = (JSON, CLOUDEVENT, CLOUDEVENTS)
EXAMPLE = {"id": "evt_1", "type": "order.placed", "amount": "12.50"}
POLICY_VIOLATION = 1008
REASON_CHARS_MAX = 100
LATER = (429, 503)
"""The statuses after which the same events are to be sent again."""
STATUSES = {"accepted": 200, "duplicate": 200, "busy": 503, "invalid": 422}
"""The status for a single event, so that a plain HTTP producer repeats it if needed."""

Body = dict[str, Any] | Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]

_decode = msgspec.json.Decoder(Body).decode
_encode = msgspec.json.Encoder().encode


def add(app: FastAPI, document: Document) -> None:
    """Add the routes."""
    routes = APIRouter(prefix="/v1", tags=["events"])

    @routes.post(
        "/events",
        summary="Send events, each processed once",
        **document.operation(
            takes=Body,
            gives=EventOutcomes,
            example=EXAMPLE,
            answer={"events": [{"status": "accepted", "key": "evt_1"}]},
            takes_types=TYPES,
        ),
    )
    async def events(request: Request) -> Response:
        """A JSON object or an array of them; CloudEvents in every mode.

        `accepted`: it is stored, and will be handled even after a crash. `duplicate`: it was accepted before.
        The status also answers a single event: 422 without a key, 503 if it must be sent again.
        """
        return await take(request)

    @routes.websocket("/events")
    async def socket(websocket: WebSocket) -> None:
        await listen(websocket)

    app.include_router(routes)


async def take(request: Request) -> Response:
    """Process the events of one request."""
    kind = content_type(request)
    if kind not in TYPES:
        raise wrong_type(request, *TYPES)
    ask = authorize(request, "write")
    body = await body_of(request)
    found = _parse(body)
    headers = [(name, value) for name, value in request.headers.items() if isinstance(found, dict)]
    events = _events(found, body, headers)
    many(len(events), ask.service, ask.caller)
    await _note(ask.service, ask.caller, ask.tenant, len(events))
    outcomes = await _taker(request).take(ask.tenant, events)
    if isinstance(found, dict) or all(each.status == "invalid" for each in outcomes):
        first = outcomes[0]
        if STATUSES[first.status] != 200:  # noqa: PLR2004 - what HTTP calls success
            raise _problem(first)
    return answer(EventOutcomes(outcomes))


async def listen(websocket: WebSocket) -> None:
    """A message is an event or an array of events; its answer is one object or an array.

    The ASGI server bounds a message's length: it is in memory before it comes here.
    """
    caller: Caller = websocket.state.caller
    try:
        caller.require("write")
        tenant = caller.acting_for(websocket.headers.get(TENANT_HEADER))
    except HttpProblem as problem:  # a handler's response would not end the handshake
        await websocket.close(POLICY_VIOLATION, problem.detail[:REASON_CHARS_MAX])
        return
    service: Service = websocket.app.state.service
    await websocket.accept()
    while True:
        try:
            message = await _next_message(websocket)
            if message["type"] == "websocket.disconnect":
                return
            data = message.get("bytes") or (message.get("text") or "").encode()
            service.pace(caller.name)
            service.costs.check(caller)
            service.costs.charge(caller, size_bytes=len(data))
            found = _parse(data)
            events = _events(found, data, ())
            many(len(events), service, caller)
            await _note(service, caller, tenant, len(events))
            outcomes = await _taker(websocket).take(tenant, events)
            said: Any = outcomes[0] if isinstance(found, dict) else outcomes
        except HttpProblem as problem:
            said = EventOutcome("busy" if problem.status in LATER else "invalid", detail=problem.detail)
        except WebSocketDisconnect:
            return
        await websocket.send_text(_encode(said).decode())


async def _note(service: Service, caller: Caller, tenant: str, count: int) -> None:
    """Write the events into the audit if all writes are audited. Raises `HttpProblem`."""
    consumer = service.settings.events_consumer
    await service.note_writes(caller, {tenant: {"event": Counter({consumer: count})}})


async def _next_message(websocket: WebSocket) -> Any:
    """Return the next message; closes a connection whose token is no longer valid. Raises `WebSocketDisconnect`."""
    while True:
        await _check_token(websocket)
        try:
            async with asyncio.timeout(TOKEN_LIVE_S):
                message = await websocket.receive()
        except TimeoutError:
            continue
        await _check_token(websocket)
        return message


async def _check_token(websocket: WebSocket) -> None:
    if not await websocket.state.is_token_valid():
        await websocket.close(POLICY_VIOLATION, "this token is no longer valid")
        raise WebSocketDisconnect(POLICY_VIOLATION)


def _parse(body: bytes) -> Any:
    try:
        return _decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise problem_of_body(error) from error


def _events(found: Any, sent: bytes, headers: Any) -> list[IncomingEvent]:
    if isinstance(found, dict):
        return [incoming(found, sent, headers)]
    return [incoming(each, _encode(each)) for each in found]


def _taker(connection: Any) -> Events:
    taker: Events = connection.app.state.events
    return taker


def _problem(outcome: EventOutcome) -> HttpProblem:
    headers = (
        {} if outcome.retry_after_s is None else {"Retry-After": str(max(1, round(outcome.retry_after_s)))}
    )
    return HttpProblem(STATUSES[outcome.status], outcome.status, outcome.detail or outcome.status, headers)
