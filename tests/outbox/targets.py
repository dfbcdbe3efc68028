"""A webhook's target for tests: a real HTTP or HTTPS server on loopback that behaves as it is told."""

import asyncio
import contextlib
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec

from tests.services.programs import program


class Call(msgspec.Struct):
    """What the target was sent."""

    path: str
    headers: dict[str, str]
    body: bytes


Answer = Callable[[Call, asyncio.StreamWriter], Awaitable[None]]


async def accept(_call: Call, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")


def status(code: int, body: bytes = b"", *more: bytes) -> Answer:
    """Always this answer."""

    async def answer(_call: Call, writer: asyncio.StreamWriter) -> None:
        head = b"HTTP/1.1 %d Told\r\ncontent-length: %d\r\n" % (code, len(body))
        writer.write(head + b"".join(line + b"\r\n" for line in more) + b"\r\n" + body)

    return answer


class Target:
    """The server and what it has seen."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.answer: Answer = accept
        self.port = 0

    def url(self, scheme: str = "http") -> str:
        return f"{scheme}://localhost:{self.port}/hooks/orders?a=1"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                headers = {
                    name.lower(): value.strip()
                    for name, _, value in (line.partition(":") for line in head[1:] if line)
                }
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                call = Call(head[0].split()[1], headers, body)
                self.calls.append(call)
                await self.answer(call, writer)
                await writer.drain()


@contextlib.asynccontextmanager
async def target(context: ssl.SSLContext | None = None) -> AsyncIterator[Target]:
    """A server, closed at the end with whatever hangs on it."""
    made = Target()
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await made.serve(reader, writer)
        except asyncio.CancelledError:
            pass
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # what was aborted is closed by the loop's next round


def certificate(folder: Path, name: str = "localhost") -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """How a server proves to be `name`, and how a client that trusts it looks."""
    key, cert = folder / f"{name}.key", folder / f"{name}.pem"
    subprocess.run(
        [program("openssl"), "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", f"/CN={name}",
         "-addext", f"subjectAltName=DNS:{name}", "-keyout", str(key), "-out", str(cert)],
        check=True, capture_output=True,
    )  # fmt: skip
    mine = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    mine.load_cert_chain(cert, key)
    return mine, ssl.create_default_context(cafile=str(cert))
