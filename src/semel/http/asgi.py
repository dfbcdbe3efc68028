"""The Idempotency-Key middleware for ASGI: FastAPI, Starlette, Litestar, Quart and others.

A keyed request runs in two tasks of its own, so that neither a client that disconnects nor a server that then cancels
the request interrupts the handler: one runs the protocol, one the application. The response is buffered, the
record is completed, and then the response is sent. A streamed response passes through, except for its end.
"""

from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any, TypeAlias

from semel.client.client import Semel
from semel.client.client_async import AsyncSemel
from semel.errors import ClaimLost, StoreClosed, StoreUnavailable
from semel.http.responses import Reply
from semel.http.rules import (
    HEADER,
    Front,
    RequestRefused,
    ResponseFailed,
    Rules,
    answer,
    caller_unknown,
    digest_of_credentials,
    failure_reply,
    is_stranger,
    key_in,
    record_key,
    streams,
    too_large,
    verdict,
)
from semel.runtime.process import asyncio, logging
from semel.types import Done, Errored, Outcome, Unavailable, Unknown

__all__ = ["AsgiIdempotency", "by_authorization", "path_of"]

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Any, Any, Any], Awaitable[None]]
"""Every framework types scope and messages in its own way."""
Caller: TypeAlias = Callable[[Scope], str | Awaitable[str | None] | None]

SENT_BY_SERVER = ("http.response.pathsend", "http.response.zerocopysend")
"""The server sends a file itself: there is nothing to buffer."""
GUARDED = "semel.idempotency"
"""Set in the scope of a guarded request, so that it is not guarded twice."""


def by_authorization(scope: Scope) -> str | None:
    """Identify the caller by `Authorization`; `None` without it. A new token is a new caller."""
    for name, value in scope["headers"]:
        if name == b"authorization":
            return digest_of_credentials(value)
    return None


def path_of(scope: Scope) -> str:
    """Return the path as the route, if no router has set one."""
    return str(scope["path"])


class AsgiIdempotency(Front[AsyncSemel]):
    """Run a request once for its Idempotency-Key; a retry gets the first one's response.

    `caller` returns the caller of a scope; if it returns `None`, the request is refused (401). `caller=None` lets
    all callers share one key space, so use it only with one caller. `route` returns the route of a request
    (by default the path). Two round trips for a first request, one for a retry; none for unguarded requests.
    """

    def __init__(
        self,
        app: App,
        client: AsyncSemel | Semel,
        *,
        caller: Caller | None,
        route: Callable[[Scope], str] = path_of,
        rules: Rules | None = None,
    ) -> None:
        super().__init__(client.twin if isinstance(client, Semel) else client, rules)
        self.app: App = app
        self._caller = caller
        self._route = path_of if self.rules.keeping.by_path else route
        self._running: set[asyncio.Task[Any]] = set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Guard a request, or pass it on."""
        if scope["type"] != "http" or scope["method"] not in self._methods or GUARDED in scope:
            await self.app(scope, receive, send)
            return
        fields = [value for name, value in scope["headers"] if name == HEADER]
        if not fields and not self.rules.required:
            await self.app(scope, receive, send)
            return
        try:
            key = key_in(self.rules, fields)
            assert key is not None
            whose = await self._whose(scope)
            body = await self._body(scope, receive)
        except RequestRefused as refusal:
            await _send(send, refusal.reply)
            return
        if body is None:
            return  # the client disconnected before the request was complete
        scope[GUARDED] = key
        exchange = AsgiExchange(self, scope, receive, send, body)
        method, route = scope["method"], self._route(scope)
        await self._guard(
            exchange, record_key(method, route, whose, key), self.handler(_serve, method, route)
        )

    async def _whose(self, scope: Scope) -> str | None:
        if self._caller is None:
            return None
        whose = self._caller(scope)
        if whose is not None and not isinstance(whose, str):
            whose = await whose
        if whose is None:
            raise caller_unknown(self.rules)
        return whose

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        """Read the whole body; `None` if the client disconnected. Raises `RequestRefused` above the limit."""
        bytes_max = self.rules.request_bytes_max
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value) > bytes_max:
                raise too_large(self.rules)
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return None
            part = message.get("body", b"")
            size += len(part)
            if size > bytes_max:
                raise too_large(self.rules)
            parts.append(part)
            if not message.get("more_body", False):
                return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _guard(self, exchange: "AsgiExchange", key: str, handler: Any) -> None:
        conducting = asyncio.get_running_loop().create_task(self._conduct(exchange, key, handler))
        try:
            # Unlike `shield`, this does not report an error that `adopt` logs.
            await asyncio.wait((conducting,))
            conducting.result()
            await exchange.wind_up()
        except asyncio.CancelledError:
            # Cancelled because the client disconnected or the server shuts down: both tasks continue until they end.
            self.adopt(exchange.abandon())
            self.adopt(conducting)
            raise

    async def _conduct(self, exchange: "AsgiExchange", key: str, handler: Any) -> None:
        """Run the protocol around the application, and respond."""
        try:
            outcome: Outcome[Any] = await self.client.run(key, handler, exchange)
            if is_stranger(outcome):
                await self._forget(key)
        except (StoreUnavailable, StoreClosed) as error:
            outcome = Unavailable(error)
        if type(outcome) is Unavailable and self.rules.fail_open:
            await exchange.run_unguarded()
        else:
            await exchange.respond(outcome)

    async def _forget(self, key: str) -> None:
        """Forget a released claim, unless it was claimed or completed since."""
        with suppress(StoreUnavailable):  # it expires with its window
            await self.client.records.forget(key, state="claimed")

    def adopt(self, task: "asyncio.Task[None] | None") -> None:
        """Keep a background task until it ends, and log its error."""
        if task is not None and not task.done():
            self._running.add(task)
            task.add_done_callback(self._let_go)

    def _let_go(self, task: "asyncio.Task[None]") -> None:
        self._running.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logging.getLogger("semel").error(
                "a request failed after its client had disconnected", exc_info=error
            )


async def _send(send: Send, reply: Reply, *more: tuple[bytes, bytes]) -> None:
    await send({"type": "http.response.start", "status": reply.status, "headers": [*reply.headers, *more]})
    await send({"type": "http.response.body", "body": reply.body})


class AsgiExchange:
    """One keyed request and its response."""

    def __init__(
        self, middleware: AsgiIdempotency, scope: Scope, receive: Receive, send: Send, body: bytes
    ) -> None:
        self.scope = scope
        self.forward = send
        path = scope.get("raw_path") or scope["path"].encode("utf-8", "surrogateescape")
        self.payload: bytes = middleware.rules.payload(path, scope.get("query_string", b""), body)
        self._middleware = middleware
        self._rules = middleware.rules
        self._receive = receive
        self._body: bytes | None = body
        self._gathered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the response is complete, or the application has ended without one."""
        self._opened = asyncio.Event()
        """Set when the response streams or was sent: from then on a disconnect matters."""
        self._sent = asyncio.Event()
        """Set when the response was sent: background work of the application may start."""
        self._task: asyncio.Task[None] | None = None
        self._start: Message | None = None
        self._parts: list[bytes] = []
        self._size = 0
        self._length: int | None = None
        self._streaming = False
        self._held: Message | None = None
        self._own: Reply | None = None
        self._error: Exception | None = None
        self._gone = False
        self._abandoned = False

    # --- the application's side ---

    async def receive(self) -> Message:
        """Return the body, then block: a handler does not see a disconnect, a stream does."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._opened.wait()
        if self._streaming:
            return await self._receive()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Buffer the response, or pass it through if it streams."""
        kind = message["type"]
        if kind == "http.response.start":
            self._start = message
            streaming, self._length = streams(
                list(message.get("headers", ())), self._rules.response_bytes_max
            )
            if streaming or message.get("trailers"):
                await self._stream()
        elif kind == "http.response.body" and not self._streaming:
            await self._gather(message)
        else:
            if kind in SENT_BY_SERVER and not self._streaming:
                await self._stream()
            if self._streaming and not self._sent.is_set() and self._ends(message):
                self._held = message  # until the record is complete
                await self._end()
            else:
                await self._pass(message)

    async def _gather(self, message: Message) -> None:
        part = message.get("body", b"")
        self._parts.append(part)
        self._size += len(part)
        more = message.get("more_body", False)
        if self._size > self._rules.response_bytes_max or (more and self._length is None):
            await self._stream()
            parts, self._parts = self._parts, []
            self._size = 0
            await self.send({"type": "http.response.body", "body": b"".join(parts), "more_body": more})
        elif not more:
            assert self._start is not None, "a body before its start"
            headers = [(bytes(name), bytes(value)) for name, value in self._start.get("headers", ())]
            self._own = Reply(self._start["status"], headers, b"".join(self._parts))
            await self._end()

    def _ends(self, message: Message) -> bool:
        """Whether this message completes the response."""
        kind = message["type"]
        if kind == "http.response.body":
            self._size += len(message.get("body", b""))
            if message.get("more_body", False):
                return self._length is not None and self._size >= self._length
            return not (self._start or {}).get("trailers")
        if kind == "http.response.trailers":
            return not message.get("more_trailers", False)
        return kind in SENT_BY_SERVER and not message.get("more_body", False)

    async def _stream(self) -> None:
        assert self._start is not None, "a body before its start"
        self._streaming = True
        self._opened.set()
        await self._pass(self._start)

    async def _pass(self, message: Message) -> None:
        try:
            await self.forward(message)
        except OSError:
            self._gone = True
            raise  # as without the middleware: a stream ends on a disconnect

    async def _end(self) -> None:
        self._settle_gathered()
        await self._sent.wait()

    # --- the protocol's side ---

    async def run(self) -> Any:
        """Run the application; returns the value for the record when its response is complete."""
        self._task = task = asyncio.get_running_loop().create_task(self._apply())
        task.add_done_callback(self._settle_gathered)
        if self._abandoned:  # it disconnected while it waited for its claim
            self._middleware.adopt(task)
        try:
            await self._gathered
        except asyncio.CancelledError:  # the claim is lost, or the server shuts down
            await self._stop(task)
            raise
        return self._verdict(task)

    async def _apply(self) -> None:
        await self._middleware.app(self.scope, self.receive, self.send)

    def _verdict(self, task: "asyncio.Task[None]") -> Any:
        """Return the value for the record. Raises the application's error, or `ResponseFailed`."""
        if self._own is not None:
            return verdict(self._rules, self._own.status, self._own)
        error = None
        if task.done():
            error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if self._streaming and self._start is not None and (error is None or self._gone):
            return verdict(self._rules, self._start["status"], None)  # complete, or cut short by its reader
        if error is None:
            error = RuntimeError("the application ended without a response")
        if isinstance(error, Exception) and not self._streaming and self._middleware.keeps_errors:
            self._own, self._error = failure_reply(self._rules), error
            return verdict(self._rules, self._own.status, self._own)
        raise error

    async def _stop(self, task: "asyncio.Task[None]") -> None:
        """Cancel the application and wait for its end: the claim must not be released before."""
        task.cancel()
        while not task.done():
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError:
                continue  # cancelled twice; it is ending

    async def run_unguarded(self) -> None:
        """Run without a claim, as if there were no key: the store cannot be reached, and `fail_open` is set."""
        self._streaming = True
        self._opened.set()
        await self._middleware.app(self.scope, self.receive, self.forward)

    # --- the client's side ---

    async def respond(self, outcome: Outcome[Any]) -> None:
        """Send the response for the outcome, or the end of a streamed one.

        Then the application continues in the background; if its response does not count, it is stopped.
        """
        try:
            if self._streaming:
                await self._finish_stream(outcome)
            else:
                await self._reply(answer(self._rules, outcome, self._own))
        finally:
            if self._task is not None and not self._sent.is_set():
                self._task.cancel()
        if self._error is not None:
            raise self._error

    async def _reply(self, reply: Reply) -> None:
        if not self._abandoned:
            await _send(self.forward, reply, self._middleware.max_age())
        self._opened.set()
        if reply is self._own:
            self._sent.set()

    async def _finish_stream(self, outcome: Outcome[Any]) -> None:
        match outcome:
            case Done(recorded=True) | Errored(ResponseFailed()) | Unknown(_, ResponseFailed()):
                if self._held is not None:
                    await self._pass(self._held)
                self._sent.set()
            case Errored(error):
                raise error
            case _:  # the response must look incomplete: it is cut off, and a retry gets an answer
                raise ClaimLost(f"a streamed response ended as {type(outcome).__name__}; its end is not sent")

    async def wind_up(self) -> None:
        """Wait for the application's background work, and raise its error."""
        task = self._task
        if task is None:
            return
        if not task.done():
            await asyncio.wait({task})
        error = None if task.cancelled() else task.exception()
        if error is not None:
            raise error

    def abandon(self) -> "asyncio.Task[None] | None":
        """Detach from the request; returns the application's task for the caller to keep."""
        self._abandoned = True
        return self._task

    def _settle_gathered(self, _ended: object = None) -> None:
        if not self._gathered.done():
            self._gathered.set_result(None)


async def _serve(exchange: AsgiExchange) -> Any:
    return await exchange.run()
