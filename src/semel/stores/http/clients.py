"""The HTTP clients of one store: one for all threads, or one for each event loop."""

import asyncio
from contextlib import suppress
from threading import Lock

import httpx2

from semel.stores.http.requests import FAILED, HttpRequests

__all__ = ["AsyncHttpClients", "HttpClients"]


class HttpClients:
    """One client for all threads, created at first use."""

    def __init__(self, talk: HttpRequests) -> None:
        self._talk = talk
        self._lock = Lock()
        self._client: httpx2.Client | None = None

    def get(self) -> httpx2.Client:
        """Return the client. Raises `StoreClosed` after the store was closed."""
        with self._lock:
            if self._talk.closed:
                raise self._talk.closed_error()
            if self._client is None:
                self._client = httpx2.Client(**self._talk.client_options())
            return self._client

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()


class AsyncHttpClients:
    """A client for each event loop: a program may run one loop after the other."""

    def __init__(self, talk: HttpRequests) -> None:
        self._talk = talk
        self._clients: dict[asyncio.AbstractEventLoop, httpx2.AsyncClient] = {}

    def get(self) -> httpx2.AsyncClient:
        """Return the client of the running loop. Raises `StoreClosed` after the store was closed."""
        if self._talk.closed:
            raise self._talk.closed_error()
        loop = asyncio.get_running_loop()
        client = self._clients.get(loop)
        if client is None:
            self._clients = {each: its for each, its in self._clients.items() if not each.is_closed()}
            client = self._clients[loop] = httpx2.AsyncClient(**self._talk.client_options())
        return client

    async def aclose(self) -> None:
        """Close the connections of the running loop, and forget those of other loops."""
        client = self._clients.pop(asyncio.get_running_loop(), None)
        self._clients.clear()
        if client is not None:
            with suppress(*FAILED):
                await client.aclose()
