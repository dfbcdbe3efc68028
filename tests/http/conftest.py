"""A real server for every test of the middlewares."""

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest
import uvicorn

import semel
from semel import AsyncSemel
from semel.http import Rules
from semel.http.asgi import AsgiIdempotency
from semel.stores import MemoryStore
from tests.http.apps import Shop
from tests.waiting import await_true

READY_S = 20.0


class Served:
    """A server in a thread of its own, on a port of its own."""

    def __init__(self, app: Any, **options: Any) -> None:
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(app, log_level="critical", ws="none", **options)
        self.server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self.server.run, args=([self._socket],))
        self._thread.start()
        assert await_true(lambda: self.server.started, READY_S), "the server did not start"

    def close(self) -> None:
        self.server.should_exit = True
        self._thread.join(READY_S)
        self._socket.close()
        assert not self._thread.is_alive()


class House:
    """A shop behind the middleware, on a server, and how to call it."""

    def __init__(self, shop: Shop, client: AsyncSemel, served: Served) -> None:
        self.shop = shop
        self.client = client
        self.url = served.url
        self.server = served.server

    def post(
        self, path: str, body: object = None, *, key: str | None = "k1", **options: Any
    ) -> httpx2.Response:
        headers = {**({} if key is None else {"Idempotency-Key": key}), **options.pop("headers", {})}
        return self.request("POST", path, json=body, headers=headers, **options)

    def request(self, method: str, path: str, **options: Any) -> httpx2.Response:
        with httpx2.Client(base_url=self.url, timeout=READY_S, trust_env=False) as http:
            return http.request(method, path, **options)


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """Serve any application until the test ends."""
    running: list[Served] = []

    def start(app: Any, **options: Any) -> Served:
        running.append(Served(app, **options))
        return running[-1]

    yield start
    for served in running:
        served.close()


@pytest.fixture
def house(serve: Callable[..., Served]) -> Callable[..., House]:
    """Build a shop behind the middleware, with these rules, and serve it."""

    def build(
        rules: Rules | None = None,
        *,
        caller: Any = None,
        store: Any = None,
        **options: Any,
    ) -> House:
        shop = Shop()
        client = semel.aopen(store or MemoryStore(), consumer="shop", **options)
        shop.closing.append(client.close)
        shop.app.add_middleware(AsgiIdempotency, client, caller=caller, rules=rules)
        return House(shop, client, serve(shop.app))

    return build
