"""The Idempotency-Key middleware for WSGI: Flask, Django and every other.

The application runs in the thread of its request, under a claim that is kept alive meanwhile. The response is
gathered, the record completed, and only then is it returned; what is streamed is written as it comes, all but its end.
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
    payload_of,
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
"""Set in the environ of a request that is guarded already, and never guarded twice."""


def by_authorization(environ: Environ) -> str | None:
    """The caller is whoever sends this `Authorization`; `None` without one. A new token is a new caller."""
    return digest_of_credentials(environ.get("HTTP_AUTHORIZATION", "").encode("latin-1"))


def path_of(environ: Environ) -> str:
    """The route where no router has said one: the path itself."""
    return str(environ.get("SCRIPT_NAME", "") + environ.get("PATH_INFO", ""))


class WsgiIdempotency(Front[Semel]):
    """Run a request once for its Idempotency-Key; a retry gets the first one's response.

    `caller` tells whose key it is from the environ, and `None` from it refuses the request (401); `caller=None` lets
    all callers share one space of keys, so choose it only where there is one caller. `route` names what was asked
    for (by default the path). Two round trips for a first request, one for a retry; none for what is not looked at.
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
        self._route = route

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Pass what is not looked at; guard the rest."""
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
        return self._guard(exchange, record_key(environ["REQUEST_METHOD"], self._route(environ), whose, key))

    def _body(self, environ: Environ) -> bytes:
        """The whole body. Raises `RequestRefused` past the limit."""
        bytes_max, stream = self.rules.request_bytes_max, environ["wsgi.input"]
        length = environ.get("CONTENT_LENGTH") or ""
        if length.isdigit():
            if int(length) > bytes_max:
                raise too_large(self.rules)
            return bytes(stream.read(int(length)))
        if not environ.get("wsgi.input_terminated"):
            return b""  # by the specification a body without a length is no body
        body = bytes(stream.read(bytes_max + 1))
        if len(body) > bytes_max:
            raise too_large(self.rules)
        return body

    def _guard(self, exchange: "WsgiExchange", key: str) -> Iterable[bytes]:
        try:
            outcome: Outcome[Any] = self.client.run(key, _serve, exchange)
            if is_stranger(outcome):
                self._forget(key)
        except (StoreUnavailable, StoreClosed) as error:
            outcome = Unavailable(error)
        if type(outcome) is Unavailable and self.rules.fail_open:
            return self.app(exchange.environ, exchange.start_response)
        return exchange.respond(outcome)

    def _forget(self, key: str) -> None:
        """Keep nothing of a released claim; one that somebody has taken or completed since stays."""
        with suppress(StoreUnavailable):  # it goes with its window
            self.client.records.forget(key, state="claimed")


class WsgiExchange:
    """One keyed request, and its response on the way back."""

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
        self.payload: bytes = payload_of(path, query, body)
        self._middleware = middleware
        self._rules = middleware.rules
        self._line = ""
        self._headers: list[tuple[str, str]] = []
        self._parts: list[bytes] = []
        self._size = 0
        self._length: int | None = None
        self._gone = False
        self._write: Callable[[bytes], object] | None = None
        """The server's, once the response streams."""
        self._held = b""
        self._own: Reply | None = None
        self._error: Exception | None = None

    # --- under the claim ---

    def run(self) -> Any:
        """Call the application, and come back with what the record is to keep."""
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
            first = next(coming, b"")  # by now it has said status and headers
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
        """From now on what comes is written at once, what has come first."""
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
            self._gone = True  # cut short by its reader: what it did is done

    def _status(self) -> int:
        return int(self._line.split(" ", 1)[0])

    def _encode_headers(self) -> Headers:
        return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in self._headers]

    # --- after it ---

    def respond(self, outcome: Outcome[Any]) -> Iterable[bytes]:
        """Return the response that the outcome means, or the end of the one that streams."""
        if self._write is not None:
            match outcome:
                case Done(recorded=True) | Errored(ResponseFailed()) | Unknown(_, ResponseFailed()):
                    return [self._held]
                case Errored(error):
                    raise error
                case _:  # the client must not take it for whole: it is cut off, and a retry is answered
                    raise ClaimLost(
                        f"a streamed response came to {type(outcome).__name__}; its end is not sent"
                    )
        reply = answer(self._rules.docs, outcome, self._own)
        if self._error is not None and reply is self._own:
            self._log(self._error)
        line = self._line if reply is self._own and self._error is None else None
        return _send(self.start_response, reply, self._middleware.max_age(), line=line)

    def _log(self, error: Exception) -> None:
        """The server would have written it where errors go; it is answered with a response that is kept instead."""
        from semel.runtime.process import logging

        logging.getLogger("semel").error("a request failed, and its failure is kept", exc_info=error)


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
