"""The ASGI application: routes, authentication and lifespan of one instance."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from semel.core.commands import Count
from semel.core.protocols import AsyncStore, Store
from semel.errors import SemelError
from semel.observe.counters import CounterHook
from semel.outbox.tables import Rows, rows_for
from semel.runtime.tasks import end_tasks
from semel.server.dashboard.app import create_pages
from semel.server.dashboard.recent_events import Tail
from semel.server.dashboard.state import Dashboard
from semel.server.events import Events
from semel.server.middleware import AuthMiddleware
from semel.server.problems import HttpProblem, problem_of, server_fault
from semel.server.routes import claims, events, health, items, records
from semel.server.routes.base import Document, operation_id
from semel.server.service import Service
from semel.server.settings import ServeSettings

__all__ = ["Gauges", "create_app"]

_log = logging.getLogger("semel")

EVERY_S = 60.0
"""Interval of outbox counts, which use an index."""
STATS_S = 300.0
"""Least interval of store counts, which read every record."""
SHARE = 20
"""Counting uses at most this fraction (1/n) of an instance's time."""


class Gauges:
    """Updates the gauges of one instance."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._task: asyncio.Task[None] | None = None
        self._stats_due = 0.0
        store = service.settings.store
        has_outbox = store.startswith(("sqlite:", "postgresql:", "postgres:")) and service.is_of_settings
        self._rows: Rows | None = rows_for(store) if has_outbox else None

    def start(self) -> None:
        """Start the task; `close` ends it."""
        self._task = asyncio.create_task(self._ask_on(), name="semel-gauges")

    async def close(self) -> None:
        """End."""
        await end_tasks(self._task)

    async def _ask_on(self) -> None:
        while True:
            for ask in (self._ask_outbox, self._ask_store):
                try:
                    await ask()
                except SemelError as error:
                    _log.debug("a gauge could not be read: %s", error)
                except Exception:  # noqa: BLE001 - the other gauges go on
                    _log.exception("a gauge could not be read")
            await asyncio.sleep(EVERY_S)

    async def _ask_store(self) -> None:
        began = time.monotonic()
        if began < self._stats_due:
            return
        # The instrumented store reports the answer to the hooks.
        await self._service.slow.ask("gauges", Count())
        took_s = time.monotonic() - began
        self._stats_due = began + max(STATS_S, SHARE * took_s)

    async def _ask_outbox(self) -> None:
        if self._rows is None:
            return
        try:
            await self._rows.open()
            counts = await self._rows.counts()
        finally:
            await self._rows.close()  # a server may end a session that is idle for long
        self._service.metrics.hook.note_outbox(counts.pending, counts.oldest_age_s)


PAGES = "/ui"
ROUTES = (items, claims, events, records, health)


def create_app(
    settings: ServeSettings | None = None,
    *,
    store: Store | AsyncStore | None = None,
    mounts: Mapping[str, ASGIApp] | None = None,
) -> FastAPI:
    """Build the service as an ASGI application; `store` replaces the one of the settings.

    `mounts`: further applications by path. They find the service in `app.state.service` of this application and check
    access themselves, as the dashboard at `/ui` does: the middleware checks tokens on `/v1` and `/metrics` only.
    """
    settings = settings or ServeSettings()
    tally, tail = CounterHook(), Tail()
    service = Service(settings, store, hooks=(tally, tail) if settings.dashboard else ())
    taker, gauges = Events(service), Gauges(service)
    desk = Dashboard(service, taker, tally, tail)
    document = Document()

    @asynccontextmanager
    async def life(_app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(service.close)
            try:
                await service.open()
                stack.push_async_callback(taker.close)
                await taker.open()
                stack.push_async_callback(gauges.close)
                gauges.start()
                if settings.dashboard:
                    stack.push_async_callback(desk.close)
                    await desk.open()
            except SemelError as error:
                service.failure = error  # the command reports it in one line
                raise
            yield

    app = FastAPI(
        title="semel",
        version=version("semel"),
        lifespan=life,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        separate_input_output_schemas=False,
        generate_unique_id_function=operation_id,
    )
    app.state.service, app.state.events = service, taker
    for each in ROUTES:
        each.add(app, document)
    app.openapi = lambda: document.build_document(app)  # type: ignore[method-assign]
    app.add_middleware(AuthMiddleware, service=service)
    if settings.proxies:  # outside of the auth middleware, which counts requests by their peers
        app.add_middleware(ProxyHeadersMiddleware, trusted_hosts=list(settings.proxies))
    app.add_exception_handler(HttpProblem, _problem)
    app.add_exception_handler(SemelError, _semel_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _on_failure)
    app.add_exception_handler(RequestValidationError, _parameter_error)
    if settings.dashboard:
        app.mount(PAGES, create_pages(desk))
        app.add_route(PAGES, _to_pages, include_in_schema=False)
    for path, mounted in (mounts or {}).items():
        app.mount(path, mounted)
    if settings.dashboard:
        app.add_route("/", _to_pages, include_in_schema=False)
    app.router.redirect_slashes = False  # such a redirect would lead to the host that `Host` names
    return app


async def _to_pages(_request: Request) -> Response:
    return RedirectResponse(f"{PAGES}/", 307)


async def _problem(_request: Request, error: Any) -> Response:
    response: Response = error.response()
    return response


async def _semel_error(_request: Request, error: Any) -> Response:
    return problem_of(error).response()


async def _on_failure(_request: Request, _error: Any) -> Response:
    return server_fault().response()


async def _http_error(_request: Request, error: Any) -> Response:
    return HttpProblem(error.status_code, "http", str(error.detail), error.headers).response()


async def _parameter_error(_request: Request, error: Any) -> Response:
    first = error.errors()[0]
    return HttpProblem(422, "invalid", f"{first['loc'][-1]}: {first['msg']}").response()
