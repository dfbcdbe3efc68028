"""Records behind `semel serve`, for threads: one POST for one batch."""

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

import httpx2

from semel.core.commands import Answer, Item
from semel.core.protocols import AsyncStore, Capabilities, Listener
from semel.runtime.process import restart_after_fork
from semel.stores.http import encoding
from semel.stores.http.requests import ABOUT_PATH, DROPPED, FAILED, ITEMS_PATH, HttpRequests, RequestPart

__all__ = ["HttpStore"]

_HEADERS = {"content-type": encoding.ITEMS_MSGPACK, "accept": encoding.ITEMS_MSGPACK}


class HttpStore:
    """Any store behind a server. Its name: the URL without the token.

    The options stand in the URL or are given by name; `semel.stores.http.requests.Options` lists them. What the
    server cannot answer now is `Unavailable`, item by item; what it refuses raises `StoreRefused`.
    """

    def __init__(self, url: str, **options: Any) -> None:
        self._talk = HttpRequests(url, options)
        self._made_with = (url, options)
        self.name: str = self._talk.name
        self.after_fork()
        restart_after_fork(self)

    def __repr__(self) -> str:
        return f"HttpStore({self.name!r})"

    @property
    def capabilities(self) -> Capabilities:
        """What the store behind the server can promise; known once it is open, and hoped for until then."""
        return self._talk.capabilities

    def twin(self) -> AsyncStore:
        """The same store for an event loop, not yet connected."""
        from semel.stores.http.store_async import AsyncHttpStore

        url, options = self._made_with
        return AsyncHttpStore(url, **options)

    def after_fork(self) -> None:
        """Connections and locks are the parent's."""
        self._talk.after_fork()
        self._lock = Lock()
        self._client: httpx2.Client | None = None

    # --- the port ---

    def open(self) -> None:
        """Ask the server what it is; idempotent. Raises `StoreRefused` without the right token."""
        talk = self._talk
        talk.closed = False
        if talk.about is not None:
            return
        try:
            response = self._connected().get(ABOUT_PATH)
        except FAILED as error:
            raise talk.unreachable(error) from error
        talk.met(response)

    def close(self) -> None:
        """Let go of all connections; idempotent, and safe while another thread is inside `send`."""
        self._talk.closed = True
        self._talk.about = None
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def send(self, items: Sequence[Item], /) -> list[Answer]:
        """Carry out the items, one request for as many as the server takes at once."""
        talk = self._talk
        if talk.closed:
            raise talk.closed_error()
        if talk.about is None:
            self.open()
        answers: list[Answer] = []
        for part in talk.parts(items):
            answers += self._ask(part)
        talk.told(items, answers)
        return answers

    def watch(self, listener: Listener, /) -> Callable[[], None]:
        """Tell `listener` of what is settled, released or forgotten through this object."""
        return self._talk.listen(listener)

    # --- inside ---

    def _ask(self, part: RequestPart) -> list[Answer]:
        try:
            try:
                response = self._post(part)
            except DROPPED:
                if not part.repeatable or self._talk.closed:
                    raise
                response = self._post(part)
        except (*FAILED, RuntimeError) as error:  # RuntimeError: the client was closed under us
            return self._talk.failed(part, error)
        answers = self._talk.answers(part, response)
        rest = self._talk.rest_of(part, answers)
        return answers if rest is None else answers[: -len(rest.items)] + self._ask(rest)

    def _post(self, part: RequestPart) -> httpx2.Response:
        return self._connected().post(ITEMS_PATH, content=part.body, headers=_HEADERS)

    def _connected(self) -> httpx2.Client:
        with self._lock:
            if self._talk.closed:
                raise self._talk.closed_error()
            if self._client is None:
                self._client = httpx2.Client(**self._talk.client_options())
            return self._client
