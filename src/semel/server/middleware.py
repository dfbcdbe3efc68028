"""Authenticate each request before its body is read."""

import asyncio
import time
from functools import partial

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from semel.errors import StoreError
from semel.server.auth import ANYBODY, Caller, caller_for
from semel.server.limits import PAYER, ROUTE
from semel.server.problems import HttpProblem, unavailable
from semel.server.service import Service
from semel.server.settings import is_loopback

__all__ = ["AuthMiddleware", "read_body", "too_long"]

GUARDED = ("/v1/", "/metrics")
FORWARDED = (
    "forwarded",
    "via",
    "x-forwarded",
    "x-real-ip",
    "x-client-ip",
    "true-client-ip",
    "cf-connecting-ip",
)
"""How the names begin of headers that proxies add."""
CHALLENGE = {"WWW-Authenticate": 'Bearer realm="semel"'}


class AuthMiddleware:
    """ASGI middleware: authenticates, counts requests, and turns errors into responses."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app: ASGIApp = app
        self.service: Service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        service, began = self.service, time.perf_counter()
        answered, came = Answered(send), CountedBody(receive)
        PAYER.set(None)  # an earlier request may have started this task
        ROUTE.set(f"{scope.get('method', 'WEBSOCKET')} {scope['path']}")
        service.metrics.in_flight.inc()
        try:
            _refuse_two_lengths(scope)
            caller = await self._caller(scope)
            scope.setdefault("state", {}).update(
                caller=caller, is_token_valid=partial(self._is_token_valid, scope)
            )
            if caller is not None:
                service.start_paying(caller)
            await self.app(scope, came, answered)
        except HttpProblem as problem:
            await _refuse(scope, receive, answered, problem)
        except StoreError:
            await _refuse(scope, receive, answered, unavailable())
        finally:
            service.metrics.in_flight.dec()
            payer = PAYER.get()
            if payer is not None:
                service.costs.charge(payer, size_bytes=came.size_bytes + answered.size_bytes)
            if scope["type"] == "http":
                route = getattr(scope.get("route"), "path", "other")
                service.metrics.requests.labels(route, str(answered.status or 499)).inc()
                service.metrics.durations.labels(route).observe(time.perf_counter() - began)

    async def _caller(self, scope: Scope) -> Caller | None:
        headers, service = Headers(scope=scope), self.service
        if not service.needs_token:
            _keep_browsers_out(headers)
        if not scope["path"].startswith(GUARDED):
            return None
        if not await service.asks_for_tokens():
            service.pace(ANYBODY.name)
            return ANYBODY
        scheme, _, text = headers.get("authorization", "").partition(" ")
        text = text.strip() if scheme.lower() == "bearer" else ""
        peer, is_guess = f"peer {(scope.get('client') or ('',))[0]}", not service.was_used(text)
        if is_guess:  # before the store is asked: a stranger's guesses cost it no more than this rate
            service.pace(peer)
        token = await service.token(text)
        if token is None:
            if not is_guess:
                service.pace(peer)
            raise HttpProblem(
                401, "unauthorized", "a valid token is needed: Authorization: Bearer semel_...", CHALLENGE
            )
        service.pace(f"token {token.id}")
        return caller_for(token)

    async def _is_token_valid(self, scope: Scope) -> bool:
        """Whether the token of an open connection is still valid. True while the store does not answer."""
        if not await self.service.asks_for_tokens():
            return True
        text = Headers(scope=scope).get("authorization", "").partition(" ")[2]
        try:
            return await self.service.token(text.strip()) is not None
        except HttpProblem:
            return True


class Answered:
    """Wraps `send`; notes whether a response has begun."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status: int = 0
        self.size_bytes: int = 0

    async def __call__(self, message: Message) -> None:
        """Pass it on."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message).setdefault("X-Content-Type-Options", "nosniff")
        self.size_bytes += len(message.get("body", b""))
        await self._send(message)


class CountedBody:
    """Wraps `receive`; counts the bytes of a body."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.size_bytes: int = 0

    async def __call__(self) -> Message:
        """The next message."""
        message = await self._receive()
        self.size_bytes += len(message.get("body", b""))
        return message


def _refuse_two_lengths(scope: Scope) -> None:
    """Refuse two lengths: a proxy that uses the other one sees another request in the body (request smuggling)."""
    names = {name for name, _ in scope["headers"]}
    if b"content-length" in names and b"transfer-encoding" in names:
        raise HttpProblem(
            400,
            "two-lengths",
            "a request has Content-Length or Transfer-Encoding, not both",
            {"Connection": "close"},
        )


def _keep_browsers_out(headers: Headers) -> None:
    """Without tokens, a foreign web page must not reach the service through a user's browser.

    A foreign name that resolves to this computer appears in `Host`, a foreign page in `Origin`. A local `Host` proves
    nothing, because a proxy on this computer sends one too: forwarded requests are refused.
    """
    if any(name.startswith(FORWARDED) for name in headers):
        raise HttpProblem(
            403,
            "forbidden",
            "this server needs no token, so it refuses requests through a proxy; leave --auth none out",
        )
    host = headers.get("host", "").rpartition("@")[2]
    if not is_loopback(_name_of(host)):
        raise HttpProblem(
            403, "forbidden", f"this server answers to loopback names only, not to {host[:100]!r}"
        )
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2] != host:
        raise HttpProblem(403, "forbidden", "requests from other sites are refused")


def _name_of(host: str) -> str:
    return host.partition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]


async def _refuse(scope: Scope, receive: Receive, send: Answered, problem: HttpProblem) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": problem.detail[:100]})
    elif not send.status:
        await problem.response()(scope, receive, send)


async def read_body(request: Request, bytes_max: int, wait_s: float) -> bytes:
    """Read the whole body of a request. Raises `HttpProblem` if it is too long, too slow or compressed."""
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise HttpProblem(415, "packed", "send the body without Content-Encoding")
    said = request.headers.get("content-length", "0")
    if said.isdecimal() and int(said) > bytes_max:
        raise too_long(bytes_max)
    pieces, size = list[bytes](), 0
    try:
        async with asyncio.timeout(wait_s):
            async for piece in request.stream():
                size += len(piece)
                if size > bytes_max:
                    raise too_long(bytes_max)
                pieces.append(piece)
    except TimeoutError:
        raise HttpProblem(408, "too-slow", f"the body did not arrive in {wait_s:g} s") from None
    except ClientDisconnect:
        raise HttpProblem(400, "malformed", "the body ended too early") from None
    return b"".join(pieces)


def too_long(bytes_max: int) -> HttpProblem:
    """Return the problem for a body that is too long."""
    return HttpProblem(413, "too-long", f"the body may have {bytes_max} bytes; send fewer items at once")
