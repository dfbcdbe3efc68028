"""A source of events: sends each one once to whoever is connected, and never again."""

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from websockets.asyncio.server import ServerConnection, broadcast, serve

from tests.services import server
from tests.waiting import until


class Source:
    """Listens on a port of its own; can drop everybody, and go away."""

    def __init__(self) -> None:
        self.port = server.free_port()
        self.connections: set[ServerConnection] = set()
        self.joined = 0
        self.headers: list[str | None] = []
        self._serving: Any = None

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}/feed"

    async def start(self) -> None:
        self._serving = await serve(self._join, "127.0.0.1", self.port)

    async def stop(self) -> None:
        if self._serving is not None:
            self._serving.close()
            await self._serving.wait_closed()
            self._serving = None

    async def _join(self, connection: ServerConnection) -> None:
        assert connection.request is not None
        self.headers.append(connection.request.headers.get("Authorization"))
        self.connections.add(connection)
        self.joined += 1
        try:
            await connection.wait_closed()
        finally:
            self.connections.discard(connection)

    async def await_listeners(self, count: int, wait_s: float = 30) -> None:
        await until(lambda: len(self.connections) >= count, wait_s)

    def send(self, *events: dict[str, Any] | str) -> None:
        for each in events:
            broadcast(self.connections, each if isinstance(each, str) else json.dumps(each))

    async def drop(self) -> None:
        """Cut every connection without a word."""
        dropped = set(self.connections)
        for connection in dropped:
            connection.transport.abort()
        await until(lambda: not dropped & self.connections, 10)


@contextlib.asynccontextmanager
async def source() -> AsyncIterator[Source]:
    mine = Source()
    await mine.start()
    try:
        yield mine
    finally:
        await mine.stop()
