"""The store behind `semel serve`: one POST for one batch."""

from collections.abc import Callable, Sequence
from typing import Any

import httpx2

from semel.core.commands import Answer, Item

# sync: from semel.core.protocols import AsyncStore
from semel.core.protocols import Capabilities, Listener
from semel.runtime.process import restart_after_fork
from semel.stores.http import encoding
from semel.stores.http.requests import (
    ABOUT_PATH,
    DROPPED,
    FAILED,
    ITEMS_PATH,
    AsyncHttpClients,
    HttpRequests,
    RequestPart,
)

__all__ = ["AsyncHttpStore"]

_HEADERS = {"content-type": encoding.ITEMS_MSGPACK, "accept": encoding.ITEMS_MSGPACK}


class AsyncHttpStore:
    """Any store behind a server. Its name: the URL without the token.

    Give options in the URL or by name; `semel.stores.http.requests.HttpOptions` lists them. An item that the server
    cannot answer now is `Unavailable`; a refused request raises `StoreRefused`.
    """

    def __init__(self, url: str, **options: Any) -> None:
        self._talk = HttpRequests(url, options)
        # sync: self._made_with = (url, options)
        self.name: str = self._talk.name
        self.after_fork()
        restart_after_fork(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the store behind the server, known after `open`; until then they are assumed."""
        return self._talk.capabilities

    # sync: def twin(self) -> AsyncStore:
    # sync:     """Return the same store for an event loop, not yet connected."""
    # sync:     from semel.stores.http.store_async import AsyncHttpStore
    # sync:
    # sync:     url, options = self._made_with
    # sync:     return AsyncHttpStore(url, **options)

    def after_fork(self) -> None:
        """Drop the connections, locks and loops of the parent process."""
        self._talk.after_fork()
        self._clients = AsyncHttpClients(self._talk)

    # --- the store protocol ---

    async def aopen(self) -> None:
        """Read the server's description of itself; idempotent. Raises `StoreRefused` without the right token."""
        talk = self._talk
        talk.closed = False
        if talk.about is not None:
            return
        try:
            response = await self._clients.get().get(ABOUT_PATH)
        except FAILED as error:
            raise talk.unreachable(error) from error
        talk.read_about(response)

    async def aclose(self) -> None:
        """Close all connections; idempotent, and safe while others are inside `asend`."""
        self._talk.closed = True
        self._talk.about = None
        await self._clients.aclose()

    async def asend(self, items: Sequence[Item], /) -> list[Answer]:
        """Carry out the items; one request for as many as the server accepts at once."""
        talk = self._talk
        if talk.closed:
            raise talk.closed_error()
        if talk.about is None:
            await self.aopen()
        answers: list[Answer] = []
        for part in talk.parts(items):
            answers += await self._ask(part)
        talk.notify_listeners(items, answers)
        return answers

    def watch(self, listener: Listener, /) -> Callable[[], None]:
        """Notify `listener` of records that are settled, released or forgotten through this object."""
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
        except (*FAILED, RuntimeError) as error:  # RuntimeError: the client was closed during the call
            return self._talk.unavailable_answers(part, error)
        answers = self._talk.answers(part, response)
        rest = self._talk.rest_of(part, answers)
        return answers if rest is None else answers[: -len(rest.items)] + await self._ask(rest)

    async def _post(self, part: RequestPart) -> httpx2.Response:
        return await self._clients.get().post(ITEMS_PATH, content=part.body, headers=_HEADERS)
