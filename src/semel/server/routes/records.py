"""Records, windows, statistics, purging: the endpoints of operators."""

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, FastAPI, Path, Query, Request
from starlette.responses import Response

from semel.core.commands import (
    Count,
    Forget,
    Lookup,
    Page,
    Purge,
    ReadSettings,
    Scan,
    SetWindow,
    StoreSettings,
)
from semel.observe.formatting import document as document_of
from semel.observe.formatting import exact_text, now_us, summary
from semel.runtime import audit
from semel.server.problems import HttpProblem
from semel.server.requests import Purging, WindowAsked
from semel.server.routes.base import Asked, Document, answer, authorize, beside_loop, read
from semel.server.slow_lane import answer_bytes
from semel.types import Absent, Busy, Record, State, Stats
from semel.windows import window_us

__all__ = ["add"]

Consumer = Annotated[str, Path(min_length=1, max_length=128)]
Key = Annotated[str, Path(min_length=1, max_length=512)]

_window = msgspec.json.Decoder(WindowAsked)
_purging = msgspec.json.Decoder(Purging)


class RecordsDocument(msgspec.Struct, frozen=True):
    """A page of records; `cursor` is for the next page, null after the last."""

    records: list[dict[str, Any]]
    cursor: str | None


class WindowsDocument(msgspec.Struct, frozen=True):
    """The stored windows."""

    windows: list[dict[str, str]]


def add(app: FastAPI, document: Document) -> None:
    """Add the routes."""
    routes = APIRouter(prefix="/v1", tags=["operate"])
    _add_records(routes, document)
    _add_upkeep(routes, document)
    app.include_router(routes)


def _add_records(routes: APIRouter, document: Document) -> None:
    @routes.get(
        "/records/{consumer}/{key:path}",
        summary="One record",
        **document.operation(gives=dict[str, Any], also=(404,)),
    )
    async def show(request: Request, consumer: Consumer, key: Key) -> Response:
        """The record of a key; changes nothing. Needs the role `read`."""
        ask = authorize(request, "read")
        record = await _find(ask, consumer, key)
        return await beside_loop(
            lambda: answer(_to_json(document_of(record, now_us()))), answer_bytes(record), ask.service
        )

    @routes.delete(
        "/records/{consumer}/{key:path}",
        summary="Forget a key: its next delivery runs",
        **document.operation(gives=dict[str, Any], also=(404, 409)),
    )
    async def forget(request: Request, consumer: Consumer, key: Key, *, force: bool = False) -> Response:
        """409 while a claim runs, unless forced. Written into the audit. Needs the role `admin`."""
        ask = authorize(request, "admin")
        record = await _find(ask, consumer, key)
        if force and audit.is_forced(record):
            audit.warn(record, ask.caller.label)
        found = await ask.service.one(ask.caller, Forget(record.id, force))
        if isinstance(found, Busy):
            after = {"Retry-After": str(max(1, round(found.retry_after_s)))}
            raise HttpProblem(409, "running", "a claim runs; wait for it, or use ?force=true", after)
        if isinstance(found, Absent):
            raise _nothing(key)
        return answer({"forgotten": key})

    @routes.get("/records", summary="Records, a page at a time", **document.operation(gives=RecordsDocument))
    async def scan(
        request: Request,
        consumer: Annotated[str | None, Query(min_length=1, max_length=128)] = None,
        state: State | None = None,
        prefix: Annotated[str, Query(max_length=512)] = "",
        cursor: Annotated[str | None, Query(min_length=1, max_length=4096)] = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    ) -> Response:
        """By consumer, state and prefix of the key. Needs the role `admin`."""
        ask = authorize(request, "admin")
        item = Scan(ask.tenant, consumer, state, prefix, cursor=cursor, limit=limit)
        page: Page = await ask.service.one(ask.caller, item)
        now = now_us()
        return answer(RecordsDocument([_to_json(summary(each, now)) for each in page.records], page.cursor))


def _add_upkeep(routes: APIRouter, document: Document) -> None:
    @routes.get("/windows", summary="The stored windows", **document.operation(gives=WindowsDocument))
    async def windows(request: Request) -> Response:
        """How long finished keys are remembered, by consumer and event type (empty: all types)."""
        ask = authorize(request, "read")
        found: StoreSettings = await ask.service.one(ask.caller, ReadSettings())
        mine = sorted((place, us) for place, us in found.windows.items() if place[0] == ask.tenant)
        rows = [
            {"consumer": consumer, "event_type": kind, "window": exact_text(us)}
            for (_, consumer, kind), us in mine
        ]
        return answer(WindowsDocument(rows))

    @routes.put(
        "/windows",
        summary="Set or remove a window",
        **document.operation(
            takes=WindowAsked, gives=dict[str, Any], example={"consumer": "billing", "window": "24h"}
        ),
    )
    async def set_window(request: Request) -> Response:
        """Effective on all clients within 10 seconds. Needs the role `admin`."""
        ask = authorize(request, "admin")
        said = await read(request, _window)
        us = None if said.window is None else window_us(said.window)
        item = SetWindow(ask.tenant, said.consumer, said.event_type, us, said.existing)
        await ask.service.one(ask.caller, item)
        ask.service.runtime.expire_settings()
        return answer({"consumer": said.consumer, "event_type": said.event_type, "window": said.window})

    @routes.get("/stats", summary="Statistics of the store", **document.operation(gives=dict[str, Any]))
    async def stats(request: Request) -> Response:
        """For the token's tenant; a token of all tenants that names none gets all of them."""
        ask = authorize(request, "read")
        everything = ask.caller.tenant is None and not ask.tenant
        found: Stats = await ask.service.one(ask.caller, Count(None if everything else ask.tenant))
        shown = {"states": found.states, "consumers": found.consumers, "marks": found.marks}
        if ask.caller.tenant is None:
            shown |= {
                "expired": found.expired,
                "purge_lag_s": found.purge_lag_s,
                "bytes_used": found.bytes_used,
            }
        return answer(shown)

    @routes.post(
        "/purge",
        summary="Remove expired records",
        **document.operation(takes=Purging, gives=dict[str, Any], example={"limit": 5000}),
    )
    async def purge(request: Request) -> Response:
        """It never changes an answer. Needs a token of all tenants with the role `admin`."""
        ask = authorize(request, "admin")
        ask.caller.require_all_tenants("purging affects all tenants")
        said = await read(request, _purging)
        purged = await ask.service.one(ask.caller, Purge(said.limit, said.dry_run))
        return answer({"removed": purged.count, "more": purged.more, "lag_s": purged.lag_s})


async def _find(ask: Asked, consumer: str, key: str) -> Record:
    record = await ask.service.one(ask.caller, Lookup((ask.tenant, consumer, key)))
    if isinstance(record, Absent):
        raise _nothing(key)
    assert isinstance(record, Record)
    return record


def _nothing(key: str) -> HttpProblem:
    return HttpProblem(404, "absent", f"no record of {key!a}: new, expired or forgotten")


def _to_json(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record as JSON without its tenant and owner: the caller must not settle it for its owner."""
    return {name: value for name, value in record.items() if name not in ("tenant", "owner")}
