"""`/livez`, `/readyz`, `/metrics`: for whoever watches the service."""

from fastapi import APIRouter, FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from semel.core.commands import Lookup
from semel.errors import StoreError
from semel.server import tokens
from semel.server.openapi import Document
from semel.server.problems import unavailable
from semel.server.routes.base import authorize
from semel.server.service import Service
from semel.types import Unavailable

__all__ = ["add"]

TEXT = "text/plain; charset=utf-8"
PROBE = Lookup((tokens.TENANT, tokens.CONSUMER, "readyz"))
"""A question that costs the same however much the store holds."""


def add(app: FastAPI, document: Document) -> None:
    """Add the routes."""
    routes = APIRouter(tags=["health"])

    @routes.get(
        "/livez",
        summary="Whether the process runs",
        **document.operation(gives=str, gives_types=("text/plain",)),
    )
    async def livez() -> Response:
        """Always, as long as it can answer at all: a store that is down is no reason to restart it."""
        return Response("alive\n", media_type=TEXT)

    @routes.get(
        "/readyz",
        summary="Whether to send requests here",
        **document.operation(gives=str, gives_types=("text/plain",)),
    )
    async def readyz(request: Request) -> Response:
        """Not while it drains, and not while its store gives no answer."""
        service: Service = request.app.state.service
        if service.draining:
            raise unavailable("draining: this instance is about to end")
        try:
            (found,) = await service.runtime.channel.asend((PROBE,))
        except StoreError as error:
            raise unavailable() from error
        if isinstance(found, Unavailable):
            raise unavailable()
        return Response("ready\n", media_type=TEXT)

    @routes.get(
        "/metrics", summary="For Prometheus", **document.operation(gives=str, gives_types=("text/plain",))
    )
    async def metrics(request: Request) -> Response:
        """Counters of this instance. Needs a token of all tenants, with any role."""
        ask = authorize(request, "read")
        ask.caller.require_all_tenants("the metrics are about all tenants")
        return Response(ask.service.metrics.page(), media_type=CONTENT_TYPE_LATEST)

    app.include_router(routes)
