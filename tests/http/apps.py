"""A shop whose every route shows one thing that a middleware can get wrong."""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

import semel

WAIT_S = 20.0


class Shop:
    """Counts what really ran."""

    def __init__(self) -> None:
        self.ran: Counter[str] = Counter()
        self.status = 201
        self.bodies: list[bytes] = []
        self.file: Path | None = None
        self.entered = threading.Event()
        self.gate = threading.Event()
        self.behind = threading.Event()
        self.keys: list[str] = []
        routes = [
            Route("/charges", self.charge, methods=["POST", "PATCH", "GET", "PUT"]),
            Route("/refunds", self.charge, methods=["POST"]),
            Route("/orders/{number}/pay", self.charge, methods=["POST"]),
            Route("/slow", self.slow, methods=["POST"]),
            Route("/boom", self.boom, methods=["POST"]),
            Route("/stream", self.stream, methods=["POST"]),
            Route("/endless", self.endless, methods=["POST"]),
            Route("/events", self.events, methods=["POST"]),
            Route("/large", self.large, methods=["POST"]),
            Route("/file", self.send_file, methods=["POST"]),
            Route("/background", self.background, methods=["POST"]),
            Route("/cookie", self.cookie, methods=["POST"]),
            Route("/current", self.current, methods=["POST"]),
            WebSocketRoute("/socket", self.socket),
        ]
        self.closing: list[Callable[[], Awaitable[None]]] = []
        self.app = Starlette(routes=routes, lifespan=self.life)

    @asynccontextmanager
    async def life(self, app: Starlette) -> AsyncIterator[None]:
        """What belongs to the server's loop is closed in it."""
        yield
        for close in self.closing:
            await close()

    async def charge(self, request: Request) -> Response:
        body = await request.body()
        self.ran[f"{request.method} {request.url.path}"] += 1
        self.bodies.append(body)
        count = self.ran.total()
        return JSONResponse({"number": count}, self.status, {"X-Number": str(count)})

    async def slow(self, request: Request) -> Response:
        """Runs until the test opens the gate."""
        self.ran["slow"] += 1
        self.entered.set()
        await asyncio.to_thread(self.gate.wait, WAIT_S)
        return JSONResponse({"slow": self.ran["slow"]}, self.status)

    async def boom(self, request: Request) -> Response:
        self.ran["boom"] += 1
        raise LookupError(f"boom {self.ran['boom']}")

    async def stream(self, request: Request) -> Response:
        self.ran["stream"] += 1

        async def parts() -> AsyncIterator[bytes]:
            for number in range(3):
                yield b"part %d;" % number

        return StreamingResponse(parts(), status_code=self.status, media_type="text/plain")

    async def endless(self, request: Request) -> Response:
        self.ran["endless"] += 1

        async def parts() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield b"more\n"
                    await asyncio.sleep(0.01)  # endless, but not at full speed
            finally:
                self.behind.set()

        return StreamingResponse(parts(), media_type="text/plain")

    async def events(self, request: Request) -> Response:
        """The second event comes when the test has seen the first."""
        self.ran["events"] += 1

        async def parts() -> AsyncIterator[bytes]:
            yield b"data: one\n\n"
            await asyncio.to_thread(self.gate.wait, WAIT_S)
            yield b"data: two\n\n"

        return StreamingResponse(parts(), media_type="text/event-stream")

    async def large(self, request: Request) -> Response:
        self.ran["large"] += 1
        return PlainTextResponse("x" * int(request.query_params["bytes"]))

    async def send_file(self, request: Request) -> Response:
        self.ran["file"] += 1
        assert self.file is not None
        return FileResponse(self.file)

    async def background(self, request: Request) -> Response:
        self.ran["background"] += 1

        def behind() -> None:
            self.gate.wait(WAIT_S)
            self.behind.set()

        return JSONResponse({"queued": True}, background=BackgroundTask(behind))

    async def cookie(self, request: Request) -> Response:
        self.ran["cookie"] += 1
        response = PlainTextResponse("ok", headers={"X-Kept": "yes"})
        response.set_cookie("session", "secret")
        response.headers.append("Connection", "X-Hop")
        response.headers["X-Hop"] = "1"
        response.headers.append("X-Twice", "a")
        response.headers.append("X-Twice", "b")
        return response

    async def current(self, request: Request) -> Response:
        self.keys.append(semel.current().idempotency_key)
        self.ran["current"] += 1
        return JSONResponse({"attempt": semel.current().attempt}, self.status)

    async def socket(self, socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_text("hello")
        await socket.close()
