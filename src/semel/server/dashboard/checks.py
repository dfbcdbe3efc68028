"""Pages for operators: observe mode, guarantees, the doctor's findings, and the audit."""

import asyncio
import re
from typing import Any

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from semel.core.commands import Page, Scan
from semel.core.protocols import Store
from semel.keys.limits import CONSUMER_BYTES_MAX
from semel.observe.doctor import Finding, examine
from semel.observe.formatting import now_us, redact
from semel.observe.guarantees import WINDOWS
from semel.outbox.tables import examine as examine_outbox
from semel.runtime import audit
from semel.server.dashboard.auth import Viewer
from semel.server.dashboard.state import Dashboard, range_of
from semel.stores.memory.store import MemoryStore
from semel.stores.registry import store_for

__all__ = ["routes"]

CONSUMERS_MAX = 30
AUDIT_ROWS = 200
HOUR_CHARS = len("2026-11-17T12")
HOUR_US = 3600 * 10**6
WRITES_PAGES = 5
"""Pages of entries about requests that are read for one page; of more, the user chooses a shorter time."""
_TIME = re.compile(r"[0-9T:-]{0,16}")


def routes(desk: Dashboard) -> list[Route]:
    """The pages."""

    async def observe(request: Request) -> Response:
        viewer = await desk.viewer(request)
        rows = [
            row
            for row in await desk.figures.rows(range_of(request), viewer.tenant)
            if row["mode"] == "observe" or row["observed"]
        ]
        return await desk.page(request, viewer, "observe.html", {"rows": rows})

    async def check(request: Request) -> Response:
        viewer = await desk.overseer(request)
        settings = await desk.figures.settings()
        told = []
        places = sorted(settings.modes)[:CONSUMERS_MAX]
        windows = await desk.looks.windows_in_force(settings.windows, places)
        for place, window in zip(places, windows, strict=True):
            told.append((place, window, await desk.explainer.explain(settings.modes[place], window.us)))
        told.sort(key=lambda each: (each[2].holds, not each[2].weaknesses))  # trouble first
        return await desk.page(request, viewer, "check.html", {"told": told, "crashes": WINDOWS})

    async def doctor(request: Request) -> Response:
        viewer = await desk.overseer(request)
        url = desk.service.settings.store
        findings = await asyncio.to_thread(_examine, url)
        findings += [replace(each, what=redact(each.what)) for each in await examine_outbox(url)]
        findings.sort(key=lambda each: LEVELS.index(each.level))  # trouble first
        return await desk.page(request, viewer, "_doctor.html", {"findings": findings})

    async def trail(request: Request) -> Response:
        viewer = await desk.viewer(request)
        viewer.require("admin")
        values = {"rows": await _audit_entries(desk, viewer), **await _writes(desk, viewer, request)}
        return await desk.page(request, viewer, "audit.html", values)

    return [
        Route("/observe", observe),
        Route("/check", check),
        Route("/parts/doctor", doctor),
        Route("/audit", trail),
    ]


LEVELS = ("error", "warning", "ok")


def _examine(url: str) -> list[Finding]:
    """Run the doctor on a connection of its own."""
    store = store_for(url)
    if isinstance(store, MemoryStore):
        return [
            Finding(
                "connection", "ok", "the store is the memory of this process: there is nothing to examine"
            )
        ]
    if not isinstance(store, Store):
        return [Finding("connection", "warning", f"{store.name} serves event loops only: not examined")]
    return [replace(each, what=redact(each.what)) for each in examine(store)]


async def _audit_entries(desk: Dashboard, viewer: Viewer) -> list[audit.AuditEntry]:
    """Return the audit entries, the newest first."""
    rows: list[audit.AuditEntry] = []
    prefix, cursor = audit.prefix_of(viewer.tenant), None
    while True:
        page: Page = await desk.looks.scan_own(
            Scan(audit.TENANT, audit.CONSUMER, prefix=prefix, cursor=cursor, limit=AUDIT_ROWS)
        )
        rows += [audit.entry_of(record) for record in page.records]
        cursor = page.cursor
        if cursor is None:
            return sorted(rows, key=lambda row: -row.at_us)[:AUDIT_ROWS]


async def _writes(desk: Dashboard, viewer: Viewer, request: Request) -> dict[str, Any]:
    """Return the requests of tokens of one tenant, in the minutes that begin with the asked text.

    If none is asked for: of this hour and the one before.
    """
    asked = request.query_params
    tenant = asked.get("tenant", "")[:CONSUMER_BYTES_MAX] if viewer.tenant is None else viewer.tenant
    at, now = asked.get("at", "").strip(), now_us()
    times = [at] if at else [audit.minute_of(each)[:HOUR_CHARS] for each in (now, now - HOUR_US)]
    entries: list[audit.AuditEntry] = []
    more = False
    for each in times:
        if _TIME.fullmatch(each):
            found, left = await _entries_about_writes(desk, audit.prefix_of(tenant) + each)
            entries += found
            more = more or left
    entries.sort(key=lambda entry: -entry.at_us)
    return {
        "all_audited": desk.service.settings.audit == "all",
        "writes": [_write_row(entry) for entry in entries[:AUDIT_ROWS]],
        "more_writes": more or len(entries) > AUDIT_ROWS,
        "tenant": tenant,
        "at": at,
    }


async def _entries_about_writes(desk: Dashboard, prefix: str) -> tuple[list[audit.AuditEntry], bool]:
    """Return the entries of some pages, and whether there are more."""
    entries: list[audit.AuditEntry] = []
    cursor = None
    for _ in range(WRITES_PAGES):
        page: Page = await desk.looks.scan_own(
            Scan(audit.TENANT, audit.WRITES, prefix=prefix, cursor=cursor, limit=AUDIT_ROWS)
        )
        entries += map(audit.entry_of, page.records)
        cursor = page.cursor
        if cursor is None:
            return entries, False
    return entries, True


def _write_row(entry: audit.AuditEntry) -> dict[str, Any]:
    items = entry.details.get("items")
    counts = [
        f"{count} {kind} {consumer}"
        for kind, consumers in (items.items() if isinstance(items, dict) else ())
        for consumer, count in (consumers.items() if isinstance(consumers, dict) else ())
    ]
    return {
        "at_us": entry.at_us,
        "actor": entry.actor,
        "damaged": entry.damaged,
        "route": entry.details.get("route", entry.action),
        "items": ", ".join(counts),
    }
