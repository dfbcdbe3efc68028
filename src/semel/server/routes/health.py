"""`/livez`, `/readyz`, `/metrics`: for monitoring."""

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
"""A query whose cost does not depend on the size of the store."""


def add(app: FastAPI, document: Document) -> None:
    """Add the routes."""
    routes = APIRouter(tags=["health"])

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
        """503 while it drains or its store does not answer."""
        service: Service = request.app.state.service
        if service.draining:
            raise unavailable("draining: this instance is shutting down")
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
        ask.caller.require_all_tenants("the metrics cover all tenants")
        return Response(ask.service.metrics.page(), media_type=CONTENT_TYPE_LATEST)

    app.include_router(routes)
