"""What every route needs: who asks, what was sent, how to answer."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from starlette.responses import Response

from semel.server.auth import Caller
from semel.server.middleware import read_body
from semel.server.problems import HttpProblem, malformed_body
from semel.server.service import Service
from semel.server.tokens import Role

__all__ = [
    "JSON",
    "TENANT_HEADER",
    "Asked",
    "answer",
    "authorize",
    "beside_loop",
    "body_of",
    "content_type",
    "many",
    "read",
    "wrong_type",
]

T = TypeVar("T")

JSON = "application/json"
TENANT_HEADER = "semel-tenant"
QUICK_BYTES = 16 * 1024
"""Values of this size are decoded faster than a thread is woken."""
_encode = msgspec.json.Encoder().encode


class Asked(msgspec.Struct, frozen=True):
    """Who asks what of whom."""

    service: Service
    caller: Caller
    tenant: str
    """The tenant of endpoints that name none."""


def authorize(request: Request, role: Role) -> Asked:
    """The service and the caller, who has at least that role. Raises `HttpProblem`."""
    caller: Caller = request.state.caller
    caller.require(role)
    return Asked(request.app.state.service, caller, caller.acting_for(request.headers.get(TENANT_HEADER)))


def content_type(request: Request) -> str:
    """The media type of the body, without its parameters."""
    return str(request.headers.get("content-type", "")).partition(";")[0].strip().lower()


async def body_of(request: Request) -> bytes:
    """The body, within its bounds. Raises `HttpProblem`."""
    limits = request.app.state.service.settings.limits
    return await read_body(request, limits.body_bytes_max, limits.body_wait_s)


async def read(request: Request, decoder: "msgspec.json.Decoder[T]") -> T:
    """The JSON body as the decoder's type. Raises `HttpProblem`."""
    if content_type(request) != JSON:
        raise wrong_type(request, JSON)
    body = await body_of(request)
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise malformed_body(error) from error


async def beside_loop(show: Callable[[], Response], size_bytes: int) -> Response:
    """Decode and encode values in a thread where they are large, so that nobody else's request waits for it."""
    return await asyncio.to_thread(show) if size_bytes > QUICK_BYTES else show()


def wrong_type(request: Request, *wanted: str) -> HttpProblem:
    """The problem of a body of another kind."""
    found = content_type(request)[:100] or "nothing"
    return HttpProblem(415, "wrong-type", f"the content type is {found!r}; send {' or '.join(wanted)}")


def many(count: int, service: Service, caller: Caller) -> None:
    """Charge for so many items. Raises `HttpProblem` for more at once than are taken."""
    service.costs.charge(caller, items=count)
    most = service.settings.limits.batch_items_max
    if count > most:
        raise HttpProblem(413, "too-many", f"{most} are taken at once, not {count}; send them in parts")


def answer(document: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON answer."""
    return Response(_encode(document), status, headers, media_type=JSON)
