"""A TCP proxy for tests that does what networks do: cuts connections, drops requests, delays replies."""

import contextlib
import select
import socket
import threading
from types import TracebackType
from typing import Literal, Self, TypeAlias

__all__ = ["Proxy", "ProxyMode"]

ProxyMode: TypeAlias = Literal[
    "pass", "refuse", "blackhole", "swallow", "hold", "cut_request", "cut_reply", "half_reply"
]
"""`refuse`: new connections are closed at once. `blackhole`: nothing passes. `swallow`: requests arrive, replies do
not. `hold`: replies are kept, and handed on when all passes again. `cut_request`: cut instead of handing a request on;
`cut_reply`: requests arrive, and when the server answers, the connection is cut instead; `half_reply`: in the midst
of the answer."""

CHUNK_BYTES = 65536
LOOK_S = 0.02


class Proxy:
    """Stands between clients and one server; set `mode` at any time to change what it does."""

    def __init__(self, port: int, host: str = "127.0.0.1", *, at: int = 0, listen: str = "127.0.0.1") -> None:
        """Lead to the server at `port`; a `host` that begins with `/` is a socket file.

        `at`: its own port. `listen`: its own address.
        """
        self._target = (host, port)
        self._listener = socket.create_server((listen, at))
        self.port: int = self._listener.getsockname()[1]
        self.mode: ProxyMode = "pass"
        self.cuts_left: int | None = None
        """So many are cut, then all pass again; `None`: for as long as the mode stands."""
        self.cuts: int = 0
        self.connections: int = 0
        self.turns: int = 0
        """How often the direction changed from request to reply: round trips."""
        self.asked_bytes: int = 0
        """What clients have sent."""
        self.kept_back: threading.Event = threading.Event()
        """Set whenever a request was not handed on."""
        self.arrived: threading.Event = threading.Event()
        """Set whenever a request has been handed to the server."""
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False

    def __enter__(self) -> Self:
        accepting = threading.Thread(target=self._accept, name="proxy")
        self._threads.append(accepting)
        accepting.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        self.cut()
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def cut(self) -> None:
        """End all connections now, as a cable does."""
        with self._lock:
            pairs = list(self._pairs)
        for pair in pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def cut_replies(self, times: int) -> None:
        """Cut the next replies instead of handing them on."""
        self.cut_next("cut_reply", times)

    def cut_next(self, mode: ProxyMode, times: int) -> None:
        """Cut so many connections in this way, then let all pass again."""
        self.cuts_left = times
        self.mode = mode

    def lead_to(self, port: int) -> None:
        """From now on, new connections go to another server."""
        self._target = (self._target[0], port)

    def _accept(self) -> None:
        while not self._closed:
            if not select.select([self._listener], [], [], LOOK_S)[0]:
                continue
            client, _ = self._listener.accept()
            if self.mode == "refuse":
                client.close()
                continue
            try:
                server = self._connect()
            except OSError:
                client.close()
                continue
            self.connections += 1
            for end in (client, server):
                if end.family != socket.AF_UNIX:
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            thread = threading.Thread(target=self._serve, args=(client, server), name="proxied")
            self._threads.append(thread)
            thread.start()

    def _connect(self) -> socket.socket:
        host, port = self._target
        if not host.startswith("/"):
            return socket.create_connection((host, port))
        server = socket.socket(socket.AF_UNIX)
        try:
            server.connect(host)
        except OSError:
            server.close()
            raise
        return server

    def _serve(self, client: socket.socket, server: socket.socket) -> None:
        pair = (client, server)
        with self._lock:
            self._pairs.add(pair)
        asked = False
        held = b""
        try:
            while not self._closed:
                for end in select.select(pair, [], [], LOOK_S)[0]:
                    data = end.recv(CHUNK_BYTES)
                    if not data:
                        return
                    if end is client:
                        asked = True
                        self.asked_bytes += len(data)
                        if self.mode == "cut_request":
                            self._count_cut()
                            return
                        if self.mode == "blackhole":
                            self.kept_back.set()
                        else:
                            server.sendall(data)
                            self.arrived.set()
                    elif self.mode == "hold":
                        held += data
                    else:
                        self.turns += asked
                        asked = False
                        if not self._hand_on(client, held + data):
                            return
                        held = b""
                if held and self.mode != "hold":
                    client.sendall(held)
                    held = b""
        except OSError:
            pass
        finally:
            with self._lock:
                self._pairs.discard(pair)
            client.close()
            server.close()

    def _hand_on(self, client: socket.socket, data: bytes) -> bool:
        """Give a reply to the client, or do not; `False`: the connection ends here."""
        if self.mode == "pass":
            client.sendall(data)
        elif self.mode in ("cut_reply", "half_reply"):
            if self.mode == "half_reply":
                client.sendall(data[: len(data) // 2])
            self._count_cut()
            return False
        return True

    def _count_cut(self) -> None:
        with self._lock:
            if self.cuts_left is not None:
                self.cuts_left -= 1
                if self.cuts_left <= 0:
                    self.mode = "pass"
            self.cuts += 1
