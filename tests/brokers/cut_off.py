"""Brokers whose sources reach them through a proxy, which can be cut."""

import re
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from semel.brokers.source import Source
from semel.testing.proxy import Proxy

PORT = re.compile(r"127\.0\.0\.1:(\d+)")


class CutOff:
    """A broker of the contract, and a proxy between it and its sources."""

    def __init__(
        self, broker: Any, url: str, from_url: Callable[[str], Source], *, at: int = 0, turn: Any = None
    ) -> None:
        """`url` has the address of the broker itself; `at` is the port of the proxy, any by default.

        `turn` is a lock that was taken, to be let go with the proxy.
        """
        self._broker = broker
        self._from_url = from_url
        port = int(PORT.findall(url)[0])
        self._stack = ExitStack()
        if turn is not None:
            self._stack.push(turn)
        self._proxy = self._stack.enter_context(Proxy(port, at=at))
        self._url = url.replace(f":{port}", f":{self._proxy.port}")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._broker, name)

    def source(self, *, deadline_s: float | None = None) -> Source:
        return self._from_url(self._url)

    async def cut_off(self) -> None:
        self._proxy.mode = "refuse"
        self._proxy.cut()

    async def fall_silent(self) -> None:
        self._proxy.mode = "blackhole"

    async def reconnect(self) -> None:
        if self._proxy.mode == "blackhole":  # those lines have lost what was swallowed
            self._proxy.cut()
        self._proxy.mode = "pass"

    async def close(self) -> None:
        with self._stack:
            await self._broker.close()
