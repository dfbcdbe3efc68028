"""The cost that the middleware adds to a request: `python -m benchmarks.http [--out FILE]`.

An ASGI application that answers at once is called by hand, without a server, bare and behind each middleware, in turns
in one run; with stores in memory, the rest is the cost of the middleware. Medians of processor time, in microseconds
per request. `idemkit` and `asgi-idempotency-header` are measured, too, if they are installed.
"""

import argparse
import asyncio
import gc
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

import semel
from semel.http.asgi import AsgiIdempotency, by_authorization
from semel.stores import MemoryStore

COUNT = 300
ROUNDS = 9
BODY = b'{"amount": 500, "currency": "eur"}'
ANSWER = b'{"id": "ch_1"}'
HEADERS = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(ANSWER))]


async def app(scope: Any, receive: Any, send: Any) -> None:
    if scope["method"] == "POST":
        await receive()
    await send({"type": "http.response.start", "status": 201, "headers": HEADERS})
    await send({"type": "http.response.body", "body": ANSWER, "more_body": False})


async def receive() -> Any:
    return {"type": "http.request", "body": BODY, "more_body": False}


async def send(_message: Any) -> None: ...


def scope(method: str, key: str | None) -> dict[str, Any]:
    headers = [
        (b"host", b"shop.example"), (b"user-agent", b"bench"), (b"accept", b"*/*"),
        (b"content-type", b"application/json"), (b"content-length", b"%d" % len(BODY)),
        (b"authorization", b"Bearer x"),
    ]  # fmt: skip
    if key is not None:
        headers.append((b"idempotency-key", key.encode()))
    return {
        "type": "http", "method": method, "path": "/charges", "raw_path": b"/charges", "query_string": b"",
        "headers": headers, "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
        "scheme": "http", "root_path": "", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
    }  # fmt: skip


async def time_us(calls: list[Callable[[], Awaitable[Any]]]) -> float:
    """Run the calls one after the other; return the microseconds per call."""
    gc.collect()
    gc.disable()
    start = time.process_time()
    for call in calls:
        await call()
    spent = time.process_time() - start
    gc.enable()
    return spent / len(calls) * 1e6


def requests(target: Any, method: str, keys: Iterator[str | None]) -> list[Callable[[], Awaitable[Any]]]:
    scopes = [scope(method, next(keys)) for _ in range(COUNT)]
    return [partial(target, each, receive, send) for each in scopes]


def nobody() -> Iterator[None]:
    while True:
        yield None


def fresh() -> Iterator[str]:
    while True:
        yield str(uuid.uuid4())


def same() -> Iterator[str]:
    while True:
        yield "00000000-0000-4000-8000-000000000000"


def rivals() -> dict[str, Any]:
    found: dict[str, Any] = {}
    with suppress(ImportError):
        kit = import_module("idemkit")
        found["idemkit"] = kit.IdempotencyMiddleware(
            app, backend=kit.InMemoryBackend(max_size=10**6), config=kit.HttpConfig()
        )
    with suppress(ImportError):
        header = import_module("idempotency_header_middleware")
        backends = import_module("idempotency_header_middleware.backends")
        found["asgi-idempotency-header"] = header.IdempotencyHeaderMiddleware(app, backends.MemoryBackend())
    return found


async def nothing() -> None: ...


async def measure() -> dict[str, float]:
    async with semel.aopen(MemoryStore(records_max=10**6), consumer="bench") as client:
        ours = AsgiIdempotency(app, client, caller=by_authorization)
        keys, copies = fresh(), same()
        await ours(scope("POST", next(copies)), receive, send)

        def runs() -> list[Callable[[], Awaitable[Any]]]:
            return [partial(client.run, next(keys), nothing) for _ in range(COUNT)]

        subjects: dict[str, Callable[[], list[Callable[[], Awaitable[Any]]]]] = {
            "bare GET": lambda: requests(app, "GET", nobody()),
            "bare POST": lambda: requests(app, "POST", nobody()),
            "run() alone, no middleware": runs,
            "semel: GET": lambda: requests(ours, "GET", nobody()),
            "semel: POST without a key": lambda: requests(ours, "POST", nobody()),
            "semel: POST, new key": lambda: requests(ours, "POST", keys),
            "semel: POST, replay": lambda: requests(ours, "POST", copies),
        }
        for name, target in rivals().items():
            subjects[f"{name}: GET"] = partial(requests, target, "GET", nobody())
            subjects[f"{name}: POST, new key"] = partial(requests, target, "POST", keys)
            subjects[f"{name}: POST, replay"] = partial(requests, target, "POST", copies)
        spent: dict[str, list[float]] = {name: [] for name in subjects}
        for _ in range(ROUNDS):
            for name, make in subjects.items():
                spent[name].append(await time_us(make()))
        return {name: median(each) for name, each in spent.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.http", description=__doc__)
    parser.add_argument("--out", type=Path, help="file for the figures")
    options = parser.parse_args()
    figures = asyncio.run(measure())
    for name, us in figures.items():
        print(f"{name:42}{us:8.1f} us")
    added = {
        "GET": figures["semel: GET"] - figures["bare GET"],
        "POST without a key": figures["semel: POST without a key"] - figures["bare POST"],
        "POST, new key, beside run()": figures["semel: POST, new key"]
        - figures["bare POST"]
        - figures["run() alone, no middleware"],
    }
    for name, us in added.items():
        print(f"added: {name:35}{us:8.1f} us")
    if options.out is not None:
        versions = {"semel": semel.__version__}
        for package in ("idemkit", "asgi-idempotency-header"):
            with suppress(PackageNotFoundError):
                versions[package] = version(package)
        rounded = [{name: round(us, 1) for name, us in each.items()} for each in (figures, added)]
        report = {"versions": versions, "us": rounded[0], "added_us": rounded[1]}
        options.out.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")


if __name__ == "__main__":
    main()
