"""The service: claims over HTTP, against an endpoint that does nothing and against the same store without HTTP.

A real `semel serve` in a process of its own, on SQLite and on Redis. The bare endpoint is a FastAPI application in
uvicorn that reads the same bodies and answers about as many bytes. Every claim is completed by a second request.
"""

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import msgspec

import semel
from semel.cli.bench import workloads
from semel.cli.bench.measure import Fresh, Job, Measurement, compare

BATCH = 500
COUNT = 10_000
SINGLES = 500
CROWD = 2_000
CALLERS = 50
BARE = """
import sys
import uvicorn
from fastapi import FastAPI, Request, Response
app = FastAPI()
answer = b'{"outcomes":[{"claim":"' + b"x" * 230 + b'"}]}'
@app.post("/v1/claims")
@app.post("/v1/claims/complete")
async def claims(request: Request) -> Response:
    await request.body()
    return Response(answer, media_type="application/json")
@app.get("/livez")
async def livez() -> Response:
    return Response(b"alive")
uvicorn.run(app, port=int(sys.argv[1]), http="h11", timeout_keep_alive=75, access_log=False)
"""


def rows(folder: Path) -> list[Measurement]:
    """All comparisons; servers are started in `folder`."""
    from tests.services import redis

    with redis.own(folder) as keeper, bare() as nothing:
        stores = {"sqlite": f"sqlite:///{folder}/semel.db", "redis": keeper.url}
        return [row for kind, url in stores.items() for row in on(kind, url, nothing, folder)]


def on(kind: str, url: str, nothing: int, folder: Path) -> Iterator[Measurement]:
    """Each with its limit beside it."""
    with ExitStack() as stack:
        port = stack.enter_context(serve(url, folder))
        direct = stack.enter_context(semel.open(url, consumer="direct"))
        over = stack.enter_context(semel.open(f"http://127.0.0.1:{port}", consumer="over"))
        alone, bare_alone = claims(port, 1, SINGLES), claims(nothing, 1, SINGLES)
        yield compare(kind, "claim + complete of 1", alone, "bare endpoint", bare_alone)
        crowd = f"claim + complete of 1, {CALLERS} at once"
        yield compare(
            kind, crowd, claim_on_many_connections(port), "bare endpoint", claim_on_many_connections(nothing)
        )
        limit = workloads.claiming(direct, COUNT, BATCH)
        yield compare(kind, "claim + complete of 500", claims(port, BATCH, COUNT), "no HTTP", limit)
        store = workloads.claiming(over, COUNT, BATCH)
        yield compare(kind, "claim + complete of 500, http store", store, "no HTTP", limit)
        yield compare(kind, "events of 500", events(port), "claim + complete", limit)


def events(port: int) -> Job:
    """Many events in a request: journaled before the answer, persisted on SQLite or stored on Redis soon after."""
    fresh, connection = Fresh(COUNT), HTTPConnection("127.0.0.1", port)

    def run() -> None:
        for keys in fresh.batches(BATCH):
            found = _post(connection, "/v1/events", [{"id": key, "type": "bench"} for key in keys])
            assert all(each["status"] == "accepted" for each in found["events"])

    return Job(run, COUNT, fresh)


def claims(port: int, size: int, count: int) -> Job:
    """Claims and their completions, some in a request, one after the other, on one connection."""
    fresh, connection = Fresh(count), HTTPConnection("127.0.0.1", port)

    def run() -> None:
        for keys in fresh.batches(size):
            found = _post(connection, "/v1/claims", claims_body(keys))["outcomes"]
            ends = [{"claim": each["claim"]} for each in found]
            _post(connection, "/v1/claims/complete", {"claims": ends})

    return Job(run, count, fresh)


def claims_body(keys: Sequence[str]) -> dict[str, Any]:
    """Return the request body that claims these keys."""
    return {"consumer": "bench", "claims": [{"key": key} for key in keys]}


def _post(connection: HTTPConnection, path: str, document: object) -> Any:
    connection.request("POST", path, msgspec.json.encode(document), {"content-type": "application/json"})
    answer = connection.getresponse()
    said = answer.read()
    assert answer.status == 200, said
    return msgspec.json.decode(said)


def claim_on_many_connections(port: int) -> Job:
    """A claim and its completion in two requests, on many connections at once, on plain sockets."""
    fresh = Fresh(CROWD)
    return Job(lambda: asyncio.run(_crowd(port, fresh.keys)), CROWD, fresh)


async def _crowd(port: int, keys: list[str]) -> None:
    async def work(mine: list[str]) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)

        async def post(path: str, document: object) -> Any:
            body = msgspec.json.encode(document)
            writer.write(
                b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n%s" % (path.encode(), len(body), body)
            )
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), head
            length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
            return msgspec.json.decode(await reader.readexactly(int(length)))

        for key in mine:
            found = (await post("/v1/claims", claims_body([key])))["outcomes"]
            await post("/v1/claims/complete", {"claims": [{"claim": found[0]["claim"]}]})
        writer.close()

    await asyncio.gather(*(work(keys[at::CALLERS]) for at in range(CALLERS)))


@contextmanager
def bare() -> Iterator[int]:
    """Run the application that does nothing; yield its port."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "bare.py"
        script.write_text(BARE)
        with _start(lambda port: [sys.executable, str(script), str(port)], Path(folder)) as port:
            yield port


@contextmanager
def serve(url: str, folder: Path) -> Iterator[int]:
    """Run the service on this store; yield its port."""

    def command(port: int) -> list[str]:
        options = ["--port", str(port), "--store", url, "--rate", "0", "--lease-max", "1h", "--auth", "none"]
        return [sys.executable, "-m", "semel", "serve", *options]

    with _start(command, folder) as port:
        yield port


@contextmanager
def _start(command: Callable[[int], list[str]], folder: Path) -> Iterator[int]:
    from tests.services import server

    port = server.free_port()
    running = subprocess.Popen(command(port), cwd=folder, stderr=subprocess.DEVNULL)
    try:
        server.await_ready(lambda: _answers(port), "a server", folder / "log")
        yield port
    finally:
        running.terminate()
        running.wait(60)


def _answers(port: int) -> bool:
    connection = HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/livez")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()
