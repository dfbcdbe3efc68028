"""Helpers of every route: the caller, the body, the response."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from starlette.responses import Response

from semel.server.auth import Caller
from semel.server.middleware import read_body
from semel.server.problems import HttpProblem, problem_of_body
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
"""Smaller values are decoded faster than a thread wakes up."""
_encode = msgspec.json.Encoder().encode


class Asked(msgspec.Struct, frozen=True):
    """A request with its service and caller."""

    service: Service
    caller: Caller
    tenant: str
    """The tenant of endpoints whose path names none."""


def authorize(request: Request, role: Role) -> Asked:
    """Return the service and the caller. Raises `HttpProblem` if the role is too low."""
    caller: Caller = request.state.caller
    caller.require(role)
    return Asked(request.app.state.service, caller, caller.acting_for(request.headers.get(TENANT_HEADER)))


def content_type(request: Request) -> str:
    """Return the media type of the body, without parameters."""
    return str(request.headers.get("content-type", "")).partition(";")[0].strip().lower()


async def body_of(request: Request) -> bytes:
    """Read the body within its limits. Raises `HttpProblem`."""
    limits = request.app.state.service.settings.limits
    return await read_body(request, limits.body_bytes_max, limits.body_wait_s)


async def read(request: Request, decoder: "msgspec.json.Decoder[T]") -> T:
    """Decode the JSON body. Raises `HttpProblem`."""
    if content_type(request) != JSON:
        raise wrong_type(request, JSON)
    body = await body_of(request)
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise problem_of_body(error) from error


async def beside_loop(show: Callable[[], Response], size_bytes: int) -> Response:
    """Decode or encode large values in a thread, so that other requests do not wait."""
    return await asyncio.to_thread(show) if size_bytes > QUICK_BYTES else show()


def wrong_type(request: Request, *wanted: str) -> HttpProblem:
    """Return the problem for a wrong content type."""
    found = content_type(request)[:100] or "nothing"
    return HttpProblem(415, "wrong-type", f"the content type is {found!r}; send {' or '.join(wanted)}")


def many(count: int, service: Service, caller: Caller) -> None:
    """Charge for this many items. Raises `HttpProblem` if they are too many."""
    service.costs.charge(caller, items=count)
    most = service.settings.limits.batch_items_max
    if count > most:
        raise HttpProblem(
            413, "too-many", f"at most {most} are allowed in a request, not {count}; send them in parts"
        )


def answer(document: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON answer."""
    return Response(_encode(document), status, headers, media_type=JSON)
