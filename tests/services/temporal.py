"""Temporal for tests: its test server, by Maven and Java."""

from pathlib import Path

from tests.services import java, server
from tests.services.nats import answers
from tests.services.server import State

HEAP_MB = 256


def address() -> str:
    """The address of this run's server."""
    found: str = server.shared("temporal", _start)["address"]
    return found


def _start(folder: Path) -> State:
    port, log = server.free_port(), folder / "log"
    pid = server.spawn(
        [*java.command("temporal", HEAP_MB), "io.temporal.testserver.TestServer", str(port)], log
    )
    server.await_ready(lambda: answers(port), "temporal", log)
    return {"address": f"127.0.0.1:{port}", "pids": [pid]}
