"""A service on a port of its own, in a process or in this one's thread, and callers for it."""

import json
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2

from semel.core.protocols import Store
from semel.server import tokens
from semel.server.app import create_app
from semel.server.serving import server_for
from semel.server.settings import ServeSettings
from semel.server.tokens import Role, Token
from tests.cli.processes import WITHIN_S, start

JSON = {"content-type": "application/json"}


def token_for(
    store: Store, tenant: str | None = "", role: Role = "write", expires_us: int | None = None
) -> tuple[str, Token]:
    """A new token of the store, as it is sent and as it is kept."""
    kept, text = carry_out(store, tokens.create("test", tenant, role, expires_us))
    return text, kept


def carry_out(store: Store, asking: tokens.Asking) -> Any:
    """Run what yields items for the store; what it returns."""
    answer = None
    while True:
        try:
            (answer,) = store.send((asking.send(answer),))
        except StopIteration as end:
            return end.value


class Running:
    """A service that listens, and a client for it."""

    app: Any = None
    """Where it runs in this process."""

    def __init__(self, address: str, token: str = "") -> None:
        self.address = address
        headers = {"authorization": f"Bearer {token}"} if token else {}
        self.client = httpx2.Client(base_url=address, headers=headers, verify=False, trust_env=False)

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.address.rpartition(":")[2])

    def post(self, path: str, document: Any, **headers: str) -> httpx2.Response:
        """Send JSON."""
        return self.client.post(path, content=json.dumps(document), headers={**JSON, **headers})

    def claim(self, key: str, **more: Any) -> dict[str, Any]:
        """Claim one key; the outcome."""
        answer = self.post("/v1/claims", {"consumer": "billing", "claims": [{"key": key, **more}]})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()["outcomes"][0]
        return found

    def end(self, verb: str, claim: str, **more: Any) -> dict[str, Any]:
        """Complete, fail, release or renew one claim; the verdict."""
        answer = self.post(f"/v1/claims/{verb}", {"claims": [{"claim": claim, **more}]})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()["outcomes"][0]
        return found

    def raw(self, sent: bytes, *, half_close: bool = False, hangs_up: bool = False) -> bytes:
        """Send bytes as they are; all that comes back until the server hangs up or is quiet, unless it must not be."""
        with socket.create_connection(("127.0.0.1", self.port), 10) as connection:
            connection.sendall(sent)
            if half_close:
                connection.shutdown(socket.SHUT_WR)
            connection.settimeout(5 if hangs_up else 1)
            got = b""
            try:
                while piece := connection.recv(65536):
                    got += piece
            except TimeoutError:
                assert not hangs_up, "the server is quiet, and does not hang up"
            except ConnectionResetError:
                pass
            return got


def session_of(running: Running, token: str) -> str:
    """Log in to the dashboard; the id of the session."""
    headers = {"sec-fetch-site": "same-origin", "content-type": "application/x-www-form-urlencoded"}
    answer = running.client.post("/ui/login", content=f"token={token}", headers=headers)
    assert answer.status_code == 303, answer.text
    running.client.cookies.clear()  # the next one is somebody else
    return str(answer.headers["set-cookie"]).partition(";")[0].partition("=")[2]


@contextmanager
def serving(settings: ServeSettings, token: str = "", store: Store | None = None) -> Iterator[Running]:
    """The service in a thread, as `semel serve` runs it but for the signals; `store` instead of the settings' one."""
    app = create_app(settings, store=store)
    told: list[str] = []
    up = threading.Event()

    def listening(address: str) -> None:
        told.append(address)
        up.set()

    server = server_for(app, settings, listening)
    thread = threading.Thread(target=server.run, args=([server.bound],), daemon=True)
    thread.start()
    assert up.wait(30)
    running = Running(told[0], token)
    running.app = app
    try:
        yield running
    finally:
        running.client.close()
        app.state.service.draining = True  # what a signal does first: pages that listen are let go
        server.should_exit = True
        thread.join(30)


@contextmanager
def process(folder: Path, *options: str, **environment: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """`semel serve` in a process of its own, on any port, without tokens unless said; the process and its address."""
    open_to_all = () if "--auth" in options else ("--auth", "none")
    running = start("serve", "--port", "0", *open_to_all, *options, cwd=folder, **environment)
    assert running.stderr is not None
    try:
        line = running.stderr.readline().decode()
        assert line.startswith("Serving "), line + running.stderr.read().decode()
        yield running, line.partition(" at ")[2].partition(" ")[0]
    finally:
        if running.poll() is None:
            running.send_signal(signal.SIGTERM)
        running.communicate(timeout=WITHIN_S)
