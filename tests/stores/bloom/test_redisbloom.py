"""The `BF.*` commands, against a scripted server: no server that can be installed here has the module."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from semel.errors import StoreRefused, StoreUnavailable
from semel.stores.bloom import Filter
from semel.stores.bloom.redisbloom import RedisBloom
from tests.services import redis

Command = list[bytes]
Script = Callable[[Command], bytes]


class Scripted:
    """Speaks enough RESP to answer one client at a time by a function from command to reply."""

    def __init__(self, script: Script) -> None:
        self.commands: list[Command] = []
        self._script = script
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(10)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(client,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, client: socket.socket) -> None:
        with client, client.makefile("rb") as read:
            while line := read.readline():
                command = []
                for _ in range(int(line[1:])):
                    size = int(read.readline()[1:])
                    command.append(read.read(size + 2)[:-2])
                self.commands.append(command)
                with suppress(OSError):
                    client.sendall(self._answer(command))

    def _answer(self, command: Command) -> bytes:
        if command[0] in (b"CLIENT", b"HELLO", b"SELECT"):
            return b"+OK\r\n" if command[0] != b"HELLO" else b"-ERR unknown command 'HELLO'\r\n"
        return self._script(command)


class Module:
    """What RedisBloom would do, with exact sets: the commands and their replies are what is looked at."""

    def __init__(self) -> None:
        self.filters: dict[bytes, set[bytes]] = {}
        self.room: dict[bytes, int] = {}
        self.now_s = int(time.time())

    def __call__(self, command: Command) -> bytes:
        name, *args = command
        if name == b"TIME":
            return b"*2\r\n" + bulk(b"%d" % self.now_s) + bulk(b"0")
        if name == b"BF.RESERVE":
            assert args[3] == b"NONSCALING"
            if args[0] in self.filters:
                return b"-ERR item exists\r\n"
            self.filters[args[0]], self.room[args[0]] = set(), int(args[2])
            return b"+OK\r\n"
        if name == b"PEXPIRE":
            return b":1\r\n"
        if name == b"BF.MADD":
            return array([self._add(args[0], each) for each in args[1:]])
        if name == b"BF.MEXISTS":
            held = self.filters.get(args[0], set())
            return array([b":%d\r\n" % (each in held) for each in args[1:]])
        if name == b"BF.INFO":
            if args[0] not in self.filters:
                return b"-ERR not found\r\n"
            held = self.filters[args[0]]
            pairs = [
                (b"Capacity", self.room[args[0]]),
                (b"Size", 1000),
                (b"Number of items inserted", len(held)),
            ]
            return array([part for word, number in pairs for part in (bulk(word), b":%d\r\n" % number)])
        return b"-ERR unknown command '%b'\r\n" % name

    def _add(self, key: bytes, each: bytes) -> bytes:
        held = self.filters[key]
        if len(held) >= self.room[key]:
            return b"-ERR non scaling filter is full\r\n"
        new = each not in held
        held.add(each)
        return b":%d\r\n" % new


def bulk(text: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(text), text)


def array(parts: list[bytes]) -> bytes:
    return b"*%d\r\n" % len(parts) + b"".join(parts)


@contextmanager
def scripted(script: Script) -> Iterator[Scripted]:
    server = Scripted(script)
    try:
        yield server
    finally:
        server.close()


def made(port: int, capacity: int = 300) -> RedisBloom:
    return RedisBloom(f"redis://127.0.0.1:{port}/0", name="billing", capacity=capacity, window=90, answer_s=5)


IDS = [bytes([number]) * 16 for number in range(50)]


def test_what_is_put_in_is_found_and_nothing_else() -> None:
    module = Module()
    with scripted(module) as server:
        bloom = made(server.port)
        assert isinstance(bloom, Filter)
        bloom.open()
        bloom.add_many(IDS[:20])
        assert bloom.maybe_many(IDS) == [True] * 20 + [False] * 30
        assert bloom.maybe_many([]) == []
        full = bloom.fullness()
        assert (full.ids, full.generations, full.saturated) == (20, 1, False)
        assert 0 < full.false_positive_ratio < 0.001
        bloom.close()
    reserve = next(command for command in server.commands if command[0] == b"BF.RESERVE")
    assert reserve[1].startswith(b"semel:bloom:{billing}:")
    assert (float(reserve[2]), int(reserve[3])) == (0.001 / 4, 100)
    expire = next(command for command in server.commands if command[0] == b"PEXPIRE")
    assert int(expire[2]) >= 4 * 30_000


def test_a_generation_is_made_once_and_outlives_its_client() -> None:
    module = Module()
    with scripted(module) as server:
        for _ in range(2):
            bloom = made(server.port)
            bloom.add_many(IDS[:5])
            bloom.add_many(IDS[5:10])
            bloom.close()
        assert [command[0] for command in server.commands].count(b"BF.RESERVE") == 2
        module.now_s += 89  # almost a window later, in another generation
        bloom = made(server.port)
        bloom.add_many(IDS[10:11])
        assert bloom.maybe_many(IDS[:12]) == [True] * 11 + [False]
        module.now_s += 200
        later = made(server.port)
        assert not any(later.maybe_many(IDS))
        for each in (bloom, later):
            each.close()


def test_a_full_generation_takes_no_more_and_says_so() -> None:
    with scripted(Module()) as server:
        bloom = made(server.port, capacity=30)
        bloom.add_many(IDS)
        assert bloom.full == 40
        assert sum(bloom.maybe_many(IDS)) == 10
        assert bloom.fullness().fill_ratio == 0.5
        bloom.close()


def test_a_server_without_the_module_is_told_apart(tmp_path: object) -> None:
    """On a real one: this is what every server says that can be installed here."""
    bloom = RedisBloom(redis.place(tmp_path).partition("?")[0], name="x", capacity=10)
    for _ in range(2):
        with pytest.raises(StoreRefused, match="no RedisBloom module"):
            bloom.open()
    bloom.close()


def test_a_server_out_of_reach_is_no_module_missing() -> None:
    with scripted(Module()) as server:
        port = server.port
    with pytest.raises(StoreUnavailable, match="gave no answer"):
        made(port).open()
    with scripted(lambda _: b"-ERR something else\r\n") as server, pytest.raises(StoreUnavailable):
        made(server.port).open()
    module = Module()
    refused = {b"BF.RESERVE": b"-ERR (capacity should be larger than 0)\r\n"}
    with (
        scripted(lambda command: refused.get(command[0]) or module(command)) as server,
        pytest.raises(StoreRefused, match="refuses to create the filter"),
    ):
        made(server.port).open()
