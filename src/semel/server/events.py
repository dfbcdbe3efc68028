"""Events taken in: each is known by its key, and goes to a handler, to a sink, or is kept in its record."""

import asyncio
import importlib
import inspect
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, TypeAlias, cast

import msgspec

from semel.aclient import AsyncSemel
from semel.context import current
from semel.core.commands import ReadSettings
from semel.core.relaying import Published, Row
from semel.errors import PolicyInvalid, SemelError, SinkUnavailable
from semel.keys.identity import Identity
from semel.keys.message import Envelope
from semel.lazily import logging
from semel.outbox.sinks import Sink, sink_for
from semel.plans import Plan
from semel.policy import Policy
from semel.server.service import Service
from semel.server.shapes import EventOutcome
from semel.types import Busy, Delivery, Done, Failed, Late, Mismatch, Outcome, Unavailable

__all__ = ["Event", "Intake", "handler_of"]

Handler: TypeAlias = Callable[[Any], Awaitable[Any]]

CONCURRENCY = 16
"""Handlers of one request that run at once."""
SWEEP_S = 10.0
"""How often orphans are looked for: events whose instance died while it handled them."""
CLIENTS_MAX = 10_000
DEFAULT_KEY = "id"
TYPE_CHARS_MAX = 128


class Event(msgspec.Struct, frozen=True):
    """One event as it came: what identifies it, and the JSON that it holds."""

    envelope: Envelope
    body: Any
    event_type: str = ""
    event_time_us: int | None = None
    size_bytes: int = 0


class Intake:
    """What happens to the events of one instance."""

    def __init__(self, service: Service) -> None:
        settings = service.settings
        self._service = service
        self._identity = Identity(body=settings.events_key or DEFAULT_KEY)
        self._sink: Sink | None = sink_for(settings.sink) if settings.sink else None
        self._handler: Handler = self._publish if self._sink is not None else _keep
        if settings.handler:
            self._handler = handler_of(settings.handler)
        self._sweeps = bool(settings.handler or settings.sink)
        self._clients: dict[str, AsyncSemel] = {}
        self._sweeper: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Connect the sink, and look for orphans from now on."""
        if self._sink is not None:
            await self._sink.open()
        if self._sweeps and self._service.runtime.store.capabilities.durable:
            self._sweeper = asyncio.get_running_loop().create_task(self._sweep(), name="semel-sweeper")

    async def close(self) -> None:
        """End; what is under way is taken over by another instance."""
        sweeper, self._sweeper = self._sweeper, None
        if sweeper is not None:
            sweeper.cancel()
            with suppress(asyncio.CancelledError):
                await sweeper
        if self._sink is not None:
            await self._sink.close()

    async def take(self, tenant: str, events: Sequence[Event]) -> list[EventOutcome]:
        """What became of each, in order. One event's failure never touches another's."""
        outcomes: list[EventOutcome | None] = [None] * len(events)
        deliveries: list[Delivery[Any]] = []
        places: list[int] = []
        for at, event in enumerate(events):
            try:
                deliveries.append(self._delivery(event))
                places.append(at)
            except SemelError as error:
                outcomes[at] = EventOutcome("invalid", detail=str(error))
        if deliveries:
            found = await self._client(tenant).run_many(deliveries, self._handler, concurrency=CONCURRENCY)
            for at, delivery, outcome in zip(places, deliveries, found, strict=True):
                outcomes[at] = _outcome(delivery.key, outcome)
        made = [each for each in outcomes if each is not None]
        for each in made:
            self._service.metrics.events.labels(each.status).inc()
        return made

    def _delivery(self, event: Event) -> Delivery[Any]:
        most = self._service.settings.limits.value_bytes_max
        if event.size_bytes > most:
            raise PolicyInvalid(f"the event has {event.size_bytes} bytes; {most} are allowed")
        durable = self._service.runtime.store.capabilities.durable
        return Delivery(
            key=self._identity.find(event.envelope).key,
            body=event.body,
            event_type=event.event_type,
            event_time_us=event.event_time_us,
            journal=event.body if durable and self._sweeps else None,
        )

    def _client(self, tenant: str) -> AsyncSemel:
        client = self._clients.get(tenant)
        if client is None:
            if len(self._clients) >= CLIENTS_MAX:
                self._clients.clear()
            settings = self._service.settings
            policy = Policy(wait_s=0, value_bytes_max=settings.limits.value_bytes_max)
            plan = Plan(
                consumer=settings.events_consumer,
                tenant=tenant,
                window="24h",
                lease="30s",
                mode="lease",
                policy=policy,
            )
            client = self._clients[tenant] = AsyncSemel(plan, self._service.runtime)
        return client

    async def _publish(self, body: Any) -> None:
        """Hand an event to the sink. Raises unless the broker confirmed it, so that it is tried again."""
        assert self._sink is not None
        event = body if isinstance(body, dict) else {}
        row = Row(
            seq=0,
            id=current().key,
            created_at=0,
            attempts=0,
            aggregate=None,
            event_type=str(event.get("type", "event")),
            source=str(event.get("source", "semel")),
            subject=None,
            destination="",
            content_type="application/json",
            traceparent=None,
            headers={},
            payload=msgspec.json.encode(body),
        )
        (sent,) = await self._sink.publish([row])
        if not isinstance(sent, Published):
            raise SinkUnavailable(f"{self._sink.name}: {sent.reason}")

    async def _sweep(self) -> None:
        while True:
            try:
                await self._sweep_once()
            except SemelError as error:
                logging.getLogger("semel").warning("looking for orphaned events failed: %s", error)
            await asyncio.sleep(SWEEP_S)

    async def _sweep_once(self) -> None:
        (settings,) = await self._service.runtime.channel.asend((ReadSettings(),))
        if isinstance(settings, Unavailable):
            return
        for tenant, consumer in settings.modes:
            if consumer == self._service.settings.events_consumer:
                await self._client(tenant).sweep(self._handler)


async def _keep(event: Any) -> Any:
    """The event is the value of its record."""
    return event


def handler_of(name: str) -> Handler:
    """The function that `package.module:function` names, found from the working folder too. Raises `PolicyInvalid`."""
    module, colon, function = name.partition(":")
    if not colon:
        raise PolicyInvalid(f"{name!r} names no handler; write package.module:function")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise PolicyInvalid(f"the handler {name} cannot be had: {error}") from error
    if not callable(found):
        raise PolicyInvalid(f"the handler {name} is no function")
    if inspect.iscoroutinefunction(found):
        return cast("Handler", found)

    async def in_thread(event: Any) -> Any:
        return await asyncio.to_thread(found, event)

    return in_thread


def _outcome(key: str, outcome: Outcome[Any]) -> EventOutcome:
    match outcome:
        case Done(recorded=False):
            return EventOutcome("retry", key, "it was handled, but that could not be recorded; send it again")
        case Done(replayed=replayed):
            return EventOutcome("duplicate" if replayed else "accepted", key)
        case Busy(retry_after_s=after_s):
            return EventOutcome("busy", key, "another delivery of it is being handled", after_s)
        case Mismatch():
            return EventOutcome("invalid", key, "the key was used before for another payload")
        case Failed(replayed=True):
            return EventOutcome("duplicate", key, "it failed for good before")
        case Failed(error=error):
            return EventOutcome("failed", key, f"{type(error).__name__}: it failed for good")
        case Late(age_s=age_s):
            return EventOutcome(
                "invalid", key, f"it is {age_s:.0f} s old: too late to tell whether it is new"
            )
        case _:
            return EventOutcome("retry", key, "it could not be handled; send it again", 1.0)


# --- what comes in ------------------------------------------------------------------------------


def event_of(body: Any, size_bytes: int, headers: Iterable[tuple[str, str]] = ()) -> Event:
    """One event of a JSON body; a CloudEvent in binary mode has its attributes in the headers."""
    attributes = {name[3:]: value for name, value in headers if name.startswith("ce-")}
    about = attributes or (body if isinstance(body, dict) else {})
    kind, moment = about.get("type"), about.get("time")
    whole = {**attributes, "data": body} if attributes else body
    return Event(
        Envelope(headers=tuple(headers), body=body, transport="HTTP"),
        whole,
        kind if isinstance(kind, str) and len(kind) <= TYPE_CHARS_MAX and kind.isprintable() else "",
        _moment_us(moment),
        size_bytes,
    )


def _moment_us(text: Any) -> int | None:
    try:
        moment = datetime.fromisoformat(text) if isinstance(text, str) else None
        return None if moment is None or moment.tzinfo is None else round(moment.timestamp() * 1e6)
    except (ValueError, OverflowError):
        return None
