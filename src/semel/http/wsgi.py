"""The Idempotency-Key middleware for WSGI: Flask, Django and others.

The application runs in the thread of its request, under a claim that is renewed meanwhile. The response is
buffered, the record is completed, then the response is returned. A streamed one is written at once, except its end.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from http import HTTPStatus
from io import BytesIO
from typing import Any, TypeAlias

from semel.client.client import Semel
from semel.errors import ClaimLost, StoreClosed, StoreUnavailable
from semel.http.responses import Headers, Reply
from semel.http.rules import (
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
from semel.types import Done, Errored, Outcome, Unavailable, Unknown

__all__ = ["WsgiIdempotency", "by_authorization", "path_of"]

Environ: TypeAlias = dict[str, Any]
StartResponse: TypeAlias = Callable[..., Callable[[bytes], object]]
App: TypeAlias = Callable[[Environ, StartResponse], Iterable[bytes]]

GUARDED = "semel.idempotency"
"""Set in the environ of a guarded request, so that it is not guarded twice."""


def by_authorization(environ: Environ) -> str | None:
    """Identify the caller by `Authorization`; `None` without it. A new token is a new caller."""
    return digest_of_credentials(environ.get("HTTP_AUTHORIZATION", "").encode("latin-1"))


def path_of(environ: Environ) -> str:
    """Return the path as the route, if no router has set one."""
    return str(environ.get("SCRIPT_NAME", "") + environ.get("PATH_INFO", ""))


class WsgiIdempotency(Front[Semel]):
    """Run a request once for its Idempotency-Key; a retry gets the first one's response.

    `caller` returns the caller of an environ; if it returns `None`, the request is refused (401). `caller=None` lets
    all callers share one key space, so use it only with one caller. `route` returns the route of a request
    (by default the path). Two round trips for a first request, one for a retry; none for unguarded requests.
    """

    def __init__(
        self,
        app: App,
        client: Semel,
        *,
        caller: Callable[[Environ], str | None] | None,
        route: Callable[[Environ], str] = path_of,
        rules: Rules | None = None,
    ) -> None:
        super().__init__(client, rules)
        self.app: App = app
        self._caller = caller
        self._route = path_of if self.rules.keeping.by_path else route

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Guard a request, or pass it on."""
        field = environ.get("HTTP_IDEMPOTENCY_KEY")
        if (
            environ["REQUEST_METHOD"] not in self._methods
            or GUARDED in environ
            or (field is None and not self.rules.required)
        ):
            return self.app(environ, start_response)
        try:
            key = key_in(self.rules, [] if field is None else [field.encode("latin-1", "replace")])
            assert key is not None
            whose = None if self._caller is None else self._caller(environ)
            if whose is None and self._caller is not None:
                raise caller_unknown(self.rules)
            body = self._body(environ)
        except RequestRefused as refusal:
            return _send(start_response, refusal.reply)
        environ[GUARDED] = key
        environ["wsgi.input"] = BytesIO(body)
        environ["CONTENT_LENGTH"] = str(len(body))
        exchange = WsgiExchange(self, environ, start_response, body)
        method, route = environ["REQUEST_METHOD"], self._route(environ)
        return self._guard(
            exchange, record_key(method, route, whose, key), self.handler(_serve, method, route)
        )

    def _body(self, environ: Environ) -> bytes:
        """Read the whole body. Raises `RequestRefused` above the limit."""
        bytes_max, stream = self.rules.request_bytes_max, environ["wsgi.input"]
        length = environ.get("CONTENT_LENGTH") or ""
        if length.isdigit():
            if int(length) > bytes_max:
                raise too_large(self.rules)
            return bytes(stream.read(int(length)))
        if not environ.get("wsgi.input_terminated"):
            return b""  # by the specification there is no body without a length
        body = bytes(stream.read(bytes_max + 1))
        if len(body) > bytes_max:
            raise too_large(self.rules)
        return body

    def _guard(self, exchange: "WsgiExchange", key: str, handler: Any) -> Iterable[bytes]:
        try:
            outcome: Outcome[Any] = self.client.run(key, handler, exchange)
            if is_stranger(outcome):
                self._forget(key)
        except (StoreUnavailable, StoreClosed) as error:
            outcome = Unavailable(error)
        if type(outcome) is Unavailable and self.rules.fail_open:
            return self.app(exchange.environ, exchange.start_response)
        return exchange.respond(outcome)

    def _forget(self, key: str) -> None:
        """Forget a released claim, unless it was claimed or completed since."""
        with suppress(StoreUnavailable):  # it expires with its window
            self.client.records.forget(key, state="claimed")


class WsgiExchange:
    """One keyed request and its response."""

    def __init__(
        self,
        middleware: WsgiIdempotency,
        environ: Environ,
        start_response: StartResponse,
        body: bytes,
    ) -> None:
        self.environ = environ
        self.start_response = start_response
        path = path_of(environ).encode("latin-1", "replace")
        query = environ.get("QUERY_STRING", "").encode("latin-1", "replace")
        self.payload: bytes = middleware.rules.payload(path, query, body)
        self._middleware = middleware
        self._rules = middleware.rules
        self._line = ""
        self._headers: list[tuple[str, str]] = []
        self._parts: list[bytes] = []
        self._size = 0
        self._length: int | None = None
        self._gone = False
        self._write: Callable[[bytes], object] | None = None
        """The server's `write`, once the response streams."""
        self._held = b""
        self._own: Reply | None = None
        self._error: Exception | None = None

    # --- under the claim ---

    def run(self) -> Any:
        """Call the application; returns the value for the record."""
        try:
            self._collect()
        except Exception as error:
            if self._write is not None or not self._middleware.keeps_errors:
                raise
            self._own, self._error = failure_reply(self._rules), error
        if self._write is not None:
            return verdict(self._rules, self._status(), None)
        if self._own is None:
            self._own = Reply(self._status(), self._encode_headers(), b"".join(self._parts))
        return verdict(self._rules, self._own.status, self._own)

    def _collect(self) -> None:
        chunks = self._middleware.app(self.environ, self._start)
        try:
            coming = iter(chunks)
            first = next(coming, b"")  # now status and headers are set
            if not self._line:
                raise RuntimeError("the application ended without start_response")
            streaming, self._length = streams(self._encode_headers(), self._rules.response_bytes_max)
            whole = isinstance(chunks, list | tuple) or getattr(chunks, "streaming", True) is False
            if streaming or (self._length is None and not whole):
                self._stream()
            self._take(first)
            while not self._gone and (chunk := next(coming, None)) is not None:
                self._take(chunk)
        finally:
            if hasattr(chunks, "close"):
                chunks.close()

    def _start(
        self, line: str, headers: list[tuple[str, str]], exc_info: Any = None
    ) -> Callable[[bytes], object]:
        if exc_info is not None and self._write is not None:
            raise exc_info[1].with_traceback(exc_info[2])  # too late for another status
        self._line, self._headers = line, list(headers)
        return self._take

    def _take(self, chunk: bytes) -> None:
        self._size += len(chunk)
        if self._write is None:
            self._parts.append(chunk)
            if self._size > self._rules.response_bytes_max:
                self._stream()
        elif self._length is not None and self._size >= self._length:
            self._held += chunk  # until the record is complete
        else:
            self._push(chunk)

    def _stream(self) -> None:
        """Start streaming: write the buffered parts, then each part as it comes."""
        self._write = self.start_response(self._line, self._headers)
        parts, self._parts = self._parts, []
        for part in parts:
            self._push(part)

    def _push(self, chunk: bytes) -> None:
        assert self._write is not None
        try:
            if chunk and not self._gone:
                self._write(chunk)
        except OSError:
            self._gone = True  # cut short by its reader: its effect has happened

    def _status(self) -> int:
        return int(self._line.split(" ", 1)[0])

    def _encode_headers(self) -> Headers:
        return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in self._headers]

    # --- after it ---

    def respond(self, outcome: Outcome[Any]) -> Iterable[bytes]:
        """Return the response for the outcome, or the end of a streamed one."""
        if self._write is not None:
            match outcome:
                case Done(recorded=True) | Errored(ResponseFailed()) | Unknown(_, ResponseFailed()):
                    return [self._held]
                case Errored(error):
                    raise error
                case _:  # the response must look incomplete: it is cut off, and a retry gets an answer
                    raise ClaimLost(
                        f"a streamed response ended as {type(outcome).__name__}; its end is not sent"
                    )
        reply = answer(self._rules, outcome, self._own)
        if self._error is not None and reply is self._own:
            self._log(self._error)
        line = self._line if reply is self._own and self._error is None else None
        return _send(self.start_response, reply, self._middleware.max_age(), line=line)

    def _log(self, error: Exception) -> None:
        """Log the error, as the server would have done; the client gets a stored response instead."""
        from semel.runtime.process import logging

        logging.getLogger("semel").error("a request failed, and its failure is stored", exc_info=error)


def _serve(exchange: WsgiExchange) -> Any:
    return exchange.run()


def _send(
    start_response: StartResponse, reply: Reply, *more: tuple[bytes, bytes], line: str | None = None
) -> Iterable[bytes]:
    try:
        phrase = HTTPStatus(reply.status).phrase
    except ValueError:
        phrase = "Status"
    headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in (*reply.headers, *more)]
    start_response(line or f"{reply.status} {phrase}", headers)
    return [reply.body]
