"""Accept events: journal them, answer, then pass them to a handler, a sink or the table of events.

It uses the intake of webhooks and sockets, one per tenant. Without a handler, sink and table
the event is stored as the value of its own record.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import inf
from time import monotonic
from typing import Any, TypeAlias

import msgspec
from msgspec.structs import replace

from semel.brokers.routes import in_loop
from semel.client.client_async import AsyncSemel
from semel.client.items import ItemBuilder
from semel.codec import encode
from semel.core.commands import Claim, Forget, Granted, Page, ReadSettings, Scan, Settle, StoreSettings
from semel.core.relay_flow import OutboxRow, Published
from semel.errors import PolicyInvalid, SemelError, SinkUnavailable, StoreError
from semel.ingest.event_table import ROWS_MAX, EventTable, columns_of
from semel.ingest.intake import SWEEP_MAX_S, SWEEP_MIN_S, Event, Intake, IntakeLimits
from semel.ingest.receipts import Receipt, receipt_for
from semel.keys.identity import Identity
from semel.keys.message import Envelope
from semel.observe.explain import of_store
from semel.observe.limited_log import LimitedLog
from semel.outbox.sinks import Sink, sink_for
from semel.policy import Policy
from semel.runtime.error_settings import read_error_settings
from semel.runtime.handlers import check_takes_event
from semel.runtime.process import load_object, new_owner
from semel.runtime.tasks import end_tasks
from semel.server.auth import Caller
from semel.server.limits import PAYER
from semel.server.problems import unavailable
from semel.server.requests import EventOutcome
from semel.server.service import Service
from semel.types import Delivery, Done, Forgotten, Outcome, Record, Unavailable
from semel.windows import duration_us

__all__ = ["Events", "IncomingEvent", "incoming"]

_log = LimitedLog(logging.getLogger("semel"))

Handler: TypeAlias = Callable[[Event], Awaitable[Any]]

CONCURRENCY = 16
"""The most handlers of one tenant at once."""
HOLD_S = 5.0
"""How long an event waits for a store that does not answer, before the sender gets `busy`."""
ORPHANS_MAX = 100
"""Orphans per page, of all tenants."""
PAGES_MAX = 50
"""Pages of orphans per sweep, and tenants that are asked for alone; the next sweep continues after the last."""
TENANTS_MAX = 10_000
"""The most intakes that are kept; idle ones are dropped first."""
DEFAULT_KEY = "id"
WINDOW = "24h"
UNSURE = (
    "the store did not answer: reload the page. If the event is gone, it has not run and must be sent again"
)
TYPE_CHARS_MAX = 128


class IncomingEvent(msgspec.Struct, frozen=True):
    """One event as received: its identity and its JSON."""

    envelope: Envelope
    type: str
    body: bytes


class Events:
    """Processes the events of one instance."""

    def __init__(self, service: Service) -> None:
        settings = service.settings
        self._service = service
        self._identity = Identity(body=settings.events_key or DEFAULT_KEY)
        self._errors = read_error_settings(service.settings.errors)
        self._threads = ThreadPoolExecutor(2 * CONCURRENCY, "semel-handler")  # threads start when needed
        self._sink: Sink | None = sink_for(settings.sink) if settings.sink else None
        handler: Handler | None = self._publish if self._sink is not None else None
        if settings.handler:
            handler = self._as_async(settings.handler)
        own = settings.store if service.is_of_settings and _is_sql(settings.store) else ""
        place = settings.persist or (own if handler is None else "")
        self._table: EventTable | None = None
        if place:
            columns = columns_of(settings.events_columns)
            self._table = EventTable(place, table=settings.events_table, columns=columns)
        self._concurrency: int = (
            ROWS_MAX if handler is None else CONCURRENCY
        )  # rows of several events share a commit
        self._hands_on = handler is not None
        """Whether events go to a handler, a sink or a table."""
        if self._table is not None:
            handler = self._table.persist if handler is None else self._table.after(handler)
        self._handler: Handler | None = handler
        self._sweep_s = min(SWEEP_MAX_S, max(SWEEP_MIN_S, duration_us(settings.events_lease) / 3e6))
        self._intakes: dict[str, Intake] = {}
        self._opening = asyncio.Lock()
        self._sweeper: asyncio.Task[None] | None = None
        self._orphans_cursor: str | None = None
        self._last_tenant = ""

    async def open(self) -> None:
        """Connect the sink and start to look for orphans. Raises `PolicyInvalid` for a store that is not durable."""
        if self._handler is None:
            return
        store = self._service.runtime.store
        if not store.capabilities.durable:
            fix = next(
                (each.fix for each in of_store(store) if each.breaks and each.fix), "use another store"
            )
            raise PolicyInvalid(
                f"events are journaled before they are answered, and {store.name} does not outlive its process: {fix},"
                " or leave --handler, --sink and --persist out"
            )
        if self._table is not None:
            await self._table.check()
        if self._sink is not None:
            await self._sink.open()
        self._sweeper = asyncio.create_task(self._sweep_on(), name="semel-sweeper")

    async def close(self) -> None:
        """Finish accepted events within the given time; other instances take over the rest."""
        sweeper, self._sweeper = self._sweeper, None
        await end_tasks(sweeper)
        await asyncio.gather(*(intake.drain() for intake in self._intakes.values()))
        if self._table is not None:
            await self._table.close()
        if self._sink is not None:
            await self._sink.close()
        self._threads.shutdown(wait=False)

    async def take(self, tenant: str, events: Sequence[IncomingEvent]) -> list[EventOutcome]:
        """Process events; returns a receipt for each, in order. A failure of one event does not affect the others."""
        outcomes: list[EventOutcome | None] = [None] * len(events)
        found: list[Event] = []
        places: list[int] = []
        for at, each in enumerate(events):
            try:
                found.append(self._event(tenant, each))
                places.append(at)
            except SemelError as error:
                outcomes[at] = EventOutcome("invalid", detail=str(error))
        for at, event, receipt in zip(places, found, await self._receipts(tenant, found), strict=True):
            outcomes[at] = _outcome(event.id, receipt)
        return [outcome for outcome in outcomes if outcome is not None]

    def _event(self, tenant: str, event: IncomingEvent) -> Event:
        most = self._service.settings.limits.value_bytes_max - 1  # one byte for the encoding
        if len(event.body) > most:
            raise PolicyInvalid(f"the event has {len(event.body)} bytes; {most} are allowed")
        key = self._identity.find(event.envelope).key
        found = Event(id=key, type=event.type, tenant=tenant, body=event.body)
        if self._table is not None:
            self._table.check_event(found)
        return found

    async def find_event(self, record: Record) -> Event | None:
        """Return the event of a finished record if its payload is stored and it can be processed again.

        Raises `StoreUnavailable` if the table does not answer.
        """
        own = record.consumer == self._service.settings.events_consumer
        if not own or record.state not in ("done", "failed") or not self._hands_on or self._table is None:
            return None
        return await self._table.find(record.tenant, record.key)

    async def again(self, record: Record, event: Event) -> bool:
        """Turn the record into a journaled claim without an owner, as after a crash, and run it.

        Returns whether the record was unchanged. Forget and claim are one batch: after the claim the event will
        run, here or by another instance's sweep. Raises `HttpProblem` if the store does not answer.
        """
        owner, journal = new_owner(), encode(event.body)
        lease_us, window_us = duration_us(self._service.settings.events_lease), duration_us(WINDOW)
        claim = Claim(
            record.id, owner, lease_us, window_us, event_type=event.type, journal=journal, meta=record.meta
        )
        answers = await self._service.send((Forget(record.id, fence=record.fence), claim))
        if any(isinstance(answer, Unavailable) for answer in answers):
            raise unavailable(UNSURE)
        forgotten, granted = answers
        if isinstance(granted, Granted):
            # Without an answer the claim ends with its lease.
            await self._service.send(
                (Settle(record.id, owner, granted.fence, "released", count_attempt=False),)
            )
            await (await self._intake(record.tenant)).adopt([replace(record, journal=journal)])
        return isinstance(forgotten, Forgotten) and isinstance(granted, Granted)

    async def _receipts(self, tenant: str, events: Sequence[Event]) -> list[Receipt]:
        await self._service.moves.refresh()
        self._service.moves.check_sender(tenant, self._service.settings.events_consumer)
        if self._handler is None:
            return await self._keep(tenant, events)
        intake = await self._intake(tenant)
        return await asyncio.gather(*(intake.take(event, hold_s=HOLD_S) for event in events))

    async def _keep(self, tenant: str, events: Sequence[Event]) -> list[Receipt]:
        """Store each event as the value of its record."""
        deliveries = [Delivery(key=event.id, body=event, event_type=event.type) for event in events]
        outcomes = await self._client(tenant).run_many(deliveries, _payload, concurrency=CONCURRENCY)
        return [_receipt_of(outcome) for outcome in outcomes]

    # --- one intake for each tenant ---

    def _client(self, tenant: str) -> AsyncSemel:
        settings = self._service.settings
        plan = ItemBuilder(
            consumer=settings.events_consumer,
            tenant=tenant,
            window=WINDOW,
            lease=settings.events_lease,
            mode="lease",
            policy=Policy(
                wait_s=0,
                value_bytes_max=settings.limits.value_bytes_max,
                **self._errors,
            ),
        )
        return AsyncSemel(plan, self._service.runtime)

    async def _intake(self, tenant: str) -> Intake:
        intake = self._intakes.get(tenant)
        if intake is not None:
            return intake
        async with self._opening:
            if tenant not in self._intakes:
                await self._make_room()
                assert self._handler is not None
                settings = self._service.settings
                pace = IntakeLimits(
                    concurrency=self._concurrency,
                    pending_max=max(1000, settings.limits.batch_items_max),
                    sweep_s=inf,
                    drain_s=settings.drain_s,
                )
                made = Intake(
                    self._client(tenant),
                    self._handler,
                    pace=pace,
                    source="events",
                    find_orphans=partial(self._orphans_of, tenant),
                )
                self._intakes[tenant] = await made.__aenter__()  # `close` waits for it
            return self._intakes[tenant]

    async def _make_room(self) -> None:
        if len(self._intakes) >= TENANTS_MAX:
            for tenant in [each for each, intake in self._intakes.items() if not intake.pending]:
                await self._intakes.pop(tenant).drain()

    async def _sweep_on(self) -> None:
        while True:
            began = monotonic()
            try:
                await self._sweep()
            except StoreError as error:
                self._orphans_cursor = None
                _log.warning("the search for orphaned events failed: %s", error)
            except Exception:  # noqa: BLE001 - the sweeper must not die of one bad turn
                self._orphans_cursor = None
                _log.exception("the search for orphaned events failed")
            await asyncio.sleep(max(self._sweep_s, monotonic() - began))

    async def _sweep(self) -> None:
        """Run journaled events without an owner, of every tenant: each tenant has its own intake and handlers.

        More than a page may all be of one tenant: then each tenant is asked for alone, so that none waits for
        another's. The pages go on after that, for tenants that are not known here, until the next sweep is due.
        """
        until = monotonic() + self._sweep_s
        for number in range(PAGES_MAX):
            cursor = self._orphans_cursor
            page = await self._find_orphans(Scan(cursor=cursor, limit=ORPHANS_MAX))
            if page is None:
                return
            orphans: dict[str, list[Record]] = {}
            for record in page.records:
                orphans.setdefault(record.tenant, []).append(record)
            for tenant, records in orphans.items():
                await self._adopt(tenant, records)
            self._orphans_cursor = page.cursor
            if page.cursor is None or (number and monotonic() >= until):
                return
            if not number:
                await self._sweep_by_tenant()

    async def _sweep_by_tenant(self) -> None:
        """Run orphans of each tenant that has the consumer of events, a bounded number of tenants in turn."""
        (settings,) = await self._service.send((ReadSettings(),))
        if not isinstance(settings, StoreSettings):
            return
        consumer = self._service.settings.events_consumer
        known = sorted(tenant for tenant, name in settings.modes if name == consumer)
        later = [tenant for tenant in known if tenant > self._last_tenant]
        for tenant in (later + known[: len(known) - len(later)])[:PAGES_MAX]:
            self._last_tenant = tenant
            await self._adopt(tenant, await self._orphans_of(tenant, ORPHANS_MAX))

    async def _adopt(self, tenant: str, records: Sequence[Record]) -> None:
        if records:
            PAYER.set(Caller("recovery", tenant, "write"))  # each pays for its own; they run in this context
            await (await self._intake(tenant)).adopt(records)
            PAYER.set(None)

    async def _orphans_of(self, tenant: str, most: int) -> Sequence[Record]:
        page = await self._find_orphans(Scan(tenant, limit=most))
        return () if page is None else page.records

    async def _find_orphans(self, scan: Scan) -> Page | None:
        """Return a page of orphans; `None` if the store does not answer. Tenants take turns in this lane."""
        item = replace(scan, consumer=self._service.settings.events_consumer, orphaned=True)
        page, _ = await self._service.recovery.ask(item.tenant or "", item)
        return page if isinstance(page, Page) else None

    # --- handlers, sinks, tables ---

    def _as_async(self, spec: str) -> Handler:
        """Return the handler as async; a blocking one runs in a thread."""
        found = load_object(spec)
        if not callable(found):
            raise PolicyInvalid(f"{spec} is not a function, but {type(found).__name__}")
        check_takes_event(found, spec)
        return in_loop(found, self._threads)

    async def _publish(self, event: Event) -> None:
        """Publish an event to the sink. Raises unless the broker confirmed it; the event is then retried."""
        assert self._sink is not None
        source = event.payload.get("source")
        row = OutboxRow(
            seq=0,
            id=event.id,
            created_at=0,
            attempts=0,
            aggregate=None,
            event_type=event.type or "event",
            source=source if isinstance(source, str) else "semel",
            subject=None,
            destination="",
            content_type="application/json",
            traceparent=None,
            headers={},
            payload=event.body,
        )
        (sent,) = await self._sink.publish([row])
        if not isinstance(sent, Published):
            raise SinkUnavailable(f"{self._sink.name}: {sent.reason}")


async def _payload(event: Event) -> Any:
    return event.payload


def _is_sql(store: str) -> bool:
    return store.startswith(("sqlite:", "postgresql:", "postgres:"))


def _receipt_of(outcome: Outcome[Any]) -> Receipt:
    match outcome:
        case Done(recorded=True, replayed=False):
            return Receipt("accepted")
        case Done(recorded=False):
            return Receipt("busy", 1.0, "the store did not record it")
        case _:
            return receipt_for(outcome)


def _outcome(key: str, receipt: Receipt) -> EventOutcome:
    match receipt.status:
        case "accepted" | "duplicate":
            return EventOutcome(receipt.status, key)
        case "busy":
            return EventOutcome("busy", key, f"{receipt.reason}; send it again", receipt.retry_after_s)
        case "refused":
            return EventOutcome("invalid", key, receipt.reason)


def incoming(body: Any, sent: bytes, headers: Iterable[tuple[str, str]] = ()) -> IncomingEvent:
    """Parse one event of a JSON body; a CloudEvent in binary mode has its attributes in the headers."""
    attributes = {name[3:]: value for name, value in headers if name.startswith("ce-")}
    kind = (attributes or body).get("type")
    if not isinstance(kind, str) or len(kind) > TYPE_CHARS_MAX or not kind.isprintable():
        kind = ""
    whole = msgspec.json.encode({**attributes, "data": body}) if attributes else sent
    envelope = Envelope(headers=tuple(headers), body=body, transport="HTTP")
    return IncomingEvent(envelope, kind, whole)
