"""The service itself: `/livez`, `/readyz` and `/metrics` for monitoring, `/docs` for people."""

import asyncio
import json
import time
from collections.abc import Callable
from functools import cache
from html import escape
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import HTMLResponse, Response

from semel.core.commands import Lookup
from semel.errors import StoreError
from semel.server import tokens
from semel.server.problems import unavailable
from semel.server.routes.base import Document, authorize
from semel.server.service import Service
from semel.types import Unavailable

__all__ = ["READY_LIVE_S", "Readiness", "add"]

TEXT = "text/plain; charset=utf-8"
PROBE = Lookup((tokens.TENANT, tokens.CONSUMER, "readyz"))
"""A query whose cost does not depend on the size of the store."""
READY_LIVE_S = 1.0
"""How long an answer of the store is used again: anybody may ask, and each would cost a round trip."""


class Readiness:
    """Asks the store at most once in `READY_LIVE_S`; who asks meanwhile waits for that answer."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._fresh_until = float("-inf")
        self._is_ready = False
        self._asking = asyncio.Lock()

    async def ask(self, service: Service) -> bool:
        """Whether the store answers."""
        async with self._asking:
            if self._clock() >= self._fresh_until:
                self._is_ready = await _answers(service)
                self._fresh_until = self._clock() + READY_LIVE_S
            return self._is_ready


async def _answers(service: Service) -> bool:
    try:
        (found,) = await service.runtime.channel.asend((PROBE,))
    except StoreError:
        return False
    return not isinstance(found, Unavailable)


def add(app: FastAPI, document: Document) -> None:
    """Add the routes."""
    routes = APIRouter(tags=["health"])
    readiness = Readiness()

    @routes.get(
        "/livez",
        summary="Whether the process runs",
        **document.operation(gives=str, gives_types=("text/plain",)),
    )
    async def livez() -> Response:
        """200 while the process can answer: a store that is down is no reason for a restart."""
        return Response("alive\n", media_type=TEXT)

    @routes.get(
        "/readyz",
        summary="Whether to send requests here",
        **document.operation(gives=str, gives_types=("text/plain",)),
    )
    async def readyz(request: Request) -> Response:
        """503 while it drains or its store does not answer. The store is asked once a second at most."""
        service: Service = request.app.state.service
        if service.draining:
            raise unavailable("draining: this instance is shutting down")
        if not await readiness.ask(service):
            raise unavailable()
        return Response("ready\n", media_type=TEXT)

    @routes.get(
        "/metrics", summary="For Prometheus", **document.operation(gives=str, gives_types=("text/plain",))
    )
    async def metrics(request: Request) -> Response:
        """Counters of this instance. Needs a token of all tenants, with any role."""
        ask = authorize(request, "read")
        ask.caller.require_all_tenants("the metrics cover all tenants")
        return Response(ask.service.metrics.page(), media_type=CONTENT_TYPE_LATEST)

    app.include_router(routes)
    _add_docs(app)


DOCS = """<!doctype html><html lang="en"><meta charset="utf-8"><title>semel</title>
<meta name="viewport" content="width=device-width">
<style>body{{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}}
pre{{background:#8881;padding:.6rem;overflow:auto}}code{{font-family:ui-monospace,monospace}}
@media(prefers-color-scheme:dark){{body{{background:#111;color:#ddd}}a{{color:#8bf}}}}</style>
<h1>semel {version}</h1><p>The same for programs: <a href="openapi.json">openapi.json</a>.</p>{parts}</html>"""
DOCS_POLICY = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}


def _add_docs(app: FastAPI) -> None:
    """Add `/docs`: the endpoints and their examples on one page, which loads no other file."""

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(page(), headers=DOCS_POLICY)

    @cache
    def page() -> str:
        made = app.openapi()
        parts = [
            _docs_part(method, path, operation)
            for path, methods in made["paths"].items()
            for method, operation in methods.items()
        ]
        return DOCS.format(version=escape(app.version), parts="".join(parts))

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        return Response(document(), media_type="application/json")

    @cache
    def document() -> bytes:
        return json.dumps(app.openapi()).encode()


def _docs_part(method: str, path: str, operation: dict[str, Any]) -> str:
    text = f"<h2><code>{method.upper()} {escape(path)}</code></h2><p><b>{escape(operation.get('summary', ''))}.</b> "
    text += escape(operation.get("description", "")) + "</p>"
    takes = operation.get("requestBody", {}).get("content", {})
    gives = operation.get("responses", {}).get("200", {}).get("content", {})
    for title, content in (("Send", takes), ("Get", gives)):
        example = next((each["example"] for each in content.values() if "example" in each), None)
        if example is not None:
            text += f"<p>{title}:</p><pre>{escape(json.dumps(example, indent=2))}</pre>"
    return text
