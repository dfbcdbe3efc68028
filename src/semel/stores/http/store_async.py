"""Records behind `semel serve`, for event loops: native, without a thread."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import httpx2

from semel.core.commands import Answer, Item
from semel.core.protocols import Capabilities, Listener
from semel.runtime.process import restart_after_fork
from semel.stores.http import encoding
from semel.stores.http.requests import ABOUT_PATH, DROPPED, FAILED, ITEMS_PATH, HttpRequests, RequestPart

__all__ = ["AsyncHttpStore"]

_HEADERS = {"content-type": encoding.ITEMS_MSGPACK, "accept": encoding.ITEMS_MSGPACK}


class AsyncHttpStore:
    """The same store as `HttpStore`, for event loops. A program may run one loop after the other."""

    def __init__(self, url: str, **options: Any) -> None:
        self._talk = HttpRequests(url, options)
        self.name: str = self._talk.name
        self.after_fork()
        restart_after_fork(self)

    def __repr__(self) -> str:
        return f"AsyncHttpStore({self.name!r})"

    @property
    def capabilities(self) -> Capabilities:
        """What the store behind the server can promise; known once it is open, and hoped for until then."""
        return self._talk.capabilities

    def after_fork(self) -> None:
        """Loops and connections are the parent's."""
        self._talk.after_fork()
        self._clients: dict[asyncio.AbstractEventLoop, httpx2.AsyncClient] = {}

    # --- the port ---

    async def aopen(self) -> None:
        """Ask the server what it is; idempotent. Raises `StoreRefused` without the right token."""
        talk = self._talk
        talk.closed = False
        if talk.about is not None:
            return
        try:
            response = await self._client().get(ABOUT_PATH)
        except FAILED as error:
            raise talk.unreachable(error) from error
        talk.met(response)

    async def aclose(self) -> None:
        """Let go of all connections; idempotent."""
        self._talk.closed = True
        self._talk.about = None
        client = self._clients.pop(asyncio.get_running_loop(), None)
        self._clients.clear()  # those of loops that have ended
        if client is not None:
            with suppress(*FAILED):
                await client.aclose()

    async def asend(self, items: Sequence[Item], /) -> list[Answer]:
        """Carry out the items, one request for as many as the server takes at once."""
        talk = self._talk
        if talk.closed:
            raise talk.closed_error()
        if talk.about is None:
            await self.aopen()
        answers: list[Answer] = []
        for part in talk.parts(items):
            answers += await self._ask(part)
        talk.told(items, answers)
        return answers

    def watch(self, listener: Listener, /) -> Callable[[], None]:
        """Tell `listener` of what is settled, released or forgotten through this object."""
        return self._talk.listen(listener)

    # --- inside ---

    async def _ask(self, part: RequestPart) -> list[Answer]:
        try:
            try:
                response = await self._post(part)
            except DROPPED:
                if not part.repeatable or self._talk.closed:
                    raise
                response = await self._post(part)
        except (*FAILED, RuntimeError) as error:  # RuntimeError: the client was closed under us
            return self._talk.failed(part, error)
        answers = self._talk.answers(part, response)
        rest = self._talk.rest_of(part, answers)
        return answers if rest is None else answers[: -len(rest.items)] + await self._ask(rest)

    async def _post(self, part: RequestPart) -> httpx2.Response:
        return await self._client().post(ITEMS_PATH, content=part.body, headers=_HEADERS)

    def _client(self) -> httpx2.AsyncClient:
        if self._talk.closed:
            raise self._talk.closed_error()
        loop = asyncio.get_running_loop()
        client = self._clients.get(loop)
        if client is None:
            self._clients = {each: its for each, its in self._clients.items() if not each.is_closed()}
            client = self._clients[loop] = httpx2.AsyncClient(**self._talk.client_options())
        return client
