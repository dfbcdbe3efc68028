"""Listen, serve, drain: one instance of the service in this process."""

import asyncio
import logging
import resource
import signal
import socket
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from semel.observe.limited_log import LimitFilter
from semel.server.problems import HttpProblem
from semel.server.service import Service
from semel.server.settings import ServeSettings

__all__ = ["Server", "connections_max", "serve", "server_for"]

_log = logging.getLogger("semel")

HEAD_BYTES_MAX = 8 * 1024
FILES_SPARE = 100
"""Files reserved for the store's connections, the log and other files."""
KEEP_ALIVE_S = 75
"""Longer than the http store keeps an idle connection."""


class WriteTimeout(asyncio.Protocol):
    """Closes the connection of a client that does not read its response."""

    loop: asyncio.AbstractEventLoop
    transport: Any
    write_wait_s: float = 30.0
    _write_timer: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        """Start the timeout: the client does not read fast enough."""
        super().pause_writing()
        self._stop_write_timer()
        self._write_timer = self.loop.call_later(self.write_wait_s, self.transport.abort)

    def resume_writing(self) -> None:
        """Cancel the timeout: the client has read."""
        self._stop_write_timer()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timeouts."""
        self._stop_write_timer()
        super().connection_lost(exc)

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


class PatientWebSocket(WriteTimeout, WebSocketsSansIOProtocol):
    """A WebSocket with a timeout for slow readers."""


class Patient(WriteTimeout, H11Protocol):
    """HTTP/1.1 with timeouts for slow clients: for a request's head, and for reading a response."""

    head_wait_s: float = 15.0
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Start the timeout of the first request's head."""
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """Receive a part of a head or of a body."""
        if self._head_timer is None and self._is_between():
            self._await_head()
        super().data_received(data)
        if not self._is_between():
            self._stop_head_timer()

    def handle_websocket_upgrade(self, event: Any) -> None:
        """Stop the timeout of heads: the connection becomes a WebSocket."""
        self._stop_head_timer()
        super().handle_websocket_upgrade(event)

    def on_response_complete(self) -> None:
        """Restart the timeout: the next head may have begun already."""
        super().on_response_complete()
        if self._head_timer is None and self._is_between() and self.conn.trailing_data[0]:
            self._await_head()

    def eof_received(self) -> bool | None:  # type: ignore[override]  # asyncio takes the answer, uvicorn gives none
        """Answer a complete request before closing: the client sends no more, but may still read."""
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body or self.scheme == "https":
            return None
        cycle.keep_alive = False
        return True

    def send_400_response(self, msg: str) -> None:
        """Answer a malformed request with the headers of every response, and close."""
        response = HttpProblem(400, "malformed", msg, {"Connection": "close"}).response()
        start = h11.Response(status_code=400, headers=response.raw_headers, reason=b"Bad Request")
        for event in (start, h11.Data(data=bytes(response.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timeouts."""
        self._stop_head_timer()
        super().connection_lost(exc)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _is_between(self) -> bool:
        """Whether no request is being served: the next head is incomplete."""
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is None or cycle.response_complete

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self.head_wait_s, self._give_up)

    def _give_up(self) -> None:
        self._head_timer = None
        if self._is_between() and not self.transport.is_closing():
            self.transport.close()


class ConnectionLimit:
    """ASGI middleware: answers 503 on connections beyond the limit, and closes them. WebSockets count too."""

    def __init__(self, app: ASGIApp, connections_max: int) -> None:
        self.app: ASGIApp = app
        self.open: Collection[object] = ()
        """The open connections."""
        self._connections_max = connections_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass it on, or refuse it."""
        if scope["type"] == "lifespan" or len(self.open) <= self._connections_max:
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close"})
        else:
            await _too_many_connections().response()(scope, receive, send)


def _too_many_connections() -> HttpProblem:
    return HttpProblem(
        503,
        "too-many-connections",
        "too many connections at once; send this again, and keep fewer connections open",
        {"Connection": "close", "Retry-After": "1"},
    )


class Server(uvicorn.Server):
    """Shuts down in order: not ready, then no new connections, then running requests finish."""

    def __init__(
        self,
        config: uvicorn.Config,
        service: Service,
        bound: socket.socket,
        listening: Callable[[str], None],
    ) -> None:
        super().__init__(config)
        self.bound: socket.socket = bound
        self._service = service
        self._listening = listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and report the address once it accepts connections. The caller reports a failed start."""
        log = logging.getLogger("uvicorn.error")
        log.disabled = True
        try:
            await super().startup(sockets)
        finally:
            log.disabled = False
        if self.started and sockets:
            host, port = sockets[0].getsockname()[:2]
            scheme = "https" if self.config.is_ssl else "http"
            self._listening(f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain on the first signal, stop at once on the second. It is not raised again: draining is no failure."""
        del frame
        unready_s = 0.0 if self._service.draining else self._service.settings.unready_s
        self.force_exit: bool = self.should_exit and sig == signal.SIGINT
        self._service.draining = True
        if unready_s and sig == signal.SIGTERM:
            loop = asyncio.get_running_loop()
            loop.call_soon_threadsafe(loop.call_later, unready_s, self._end)
        else:
            self._end()

    def _end(self) -> None:
        self.should_exit: bool = True


def server_for(app: FastAPI, settings: ServeSettings, listening: Callable[[str], None]) -> Server:
    """Return a listening server; `listening` gets the address. Raises `OSError` if it cannot listen."""
    limits = settings.limits
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    bound = socket.create_server((settings.host.strip("[]"), settings.port), family=family, backlog=2048)
    # Its connections inherit it. asyncio sets it only if the protocol is given, and a response in two parts would
    # otherwise wait for the client's acknowledgement, about 40 ms.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    waits = {"head_wait_s": limits.head_wait_s, "write_wait_s": limits.write_wait_s}
    limited = ConnectionLimit(app, connections_max(limits.connections_max))
    config = uvicorn.Config(
        limited,
        http=type("Patient", (Patient,), waits),
        ws=type("PatientWebSocket", (PatientWebSocket,), waits),
        ws_max_size=limits.body_bytes_max,
        h11_max_incomplete_event_size=HEAD_BYTES_MAX,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(settings.drain_s)),
        ssl_certfile=settings.tls_cert or None,
        ssl_keyfile=settings.tls_key or None,
        access_log=False,  # paths contain keys
        log_config=None,
        server_header=False,
        proxy_headers=False,
        lifespan="on",
    )
    server = Server(config, app.state.service, bound, listening)
    limited.open = server.server_state.connections
    return server


def connections_max(wanted: int) -> int:
    """Return the wanted number of connections, limited by the files that the process may open."""
    files_max = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files_max == resource.RLIM_INFINITY or wanted <= files_max - FILES_SPARE:
        return wanted
    most = max(1, files_max - FILES_SPARE)
    _log.warning(
        "%d connections at once, not %d: this process may have %d files open", most, wanted, files_max
    )
    return most


def serve(app: FastAPI, settings: ServeSettings, listening: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT. Raises `SystemExit` if the application does not start."""
    logging.getLogger("uvicorn.error").addFilter(LimitFilter())  # a line for each malformed request
    made = server_for(app, settings, listening)
    made.run(sockets=[made.bound])
