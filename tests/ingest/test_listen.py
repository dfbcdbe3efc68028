"""Instances that connect to a source which sends everything once, to everybody."""

import asyncio
import json
import os
import signal
import sqlite3
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

import semel
from semel.errors import PolicyInvalid
from semel.ingest.sockets import Backoff, Event, Fields, Intake, IntakeLimits, Invalid, Listener
from tests.ingest.fleet import environment
from tests.ingest.source import Source, source
from tests.services import postgres, redis, server
from tests.waiting import until

pytestmark = pytest.mark.anyio

SOON = Backoff(first_s=0.02, max_s=0.1)


@asynccontextmanager
async def listening(store: str, url: str, done: list[str], **options: Any) -> AsyncIterator[Listener]:
    async def handle(event: Event) -> None:
        done.append(event.id)

    once = semel.aopen(store, consumer="listen", lease="1s")
    try:
        async with Intake(once, handle, pace=IntakeLimits(sweep_s=0.1)) as intake:
            listener = Listener(url, intake, backoff=SOON, **options)
            running = asyncio.create_task(listener.run())
            yield listener
            listener.stop()
            await running
    finally:
        await once.close()


def event(number: int, **more: Any) -> dict[str, Any]:
    return {"id": f"evt-{number}", "type": "plain", **more}


async def test_two_listeners_hear_everything_and_run_it_once(tmp_path: Path) -> None:
    store, done = f"sqlite:///{tmp_path / 'records.db'}", list[str]()
    names = {f"evt-{number}" for number in range(50)}
    async with (
        source() as feed,
        listening(store, feed.url, done) as one,
        listening(store, feed.url, done) as two,
    ):
        await feed.await_listeners(2)
        feed.send(*(event(number) for number in range(50)))
        await until(lambda: set(done) == names)
        await until(lambda: one.counts.accepted + one.counts.duplicates == 50)
        await until(lambda: two.counts.accepted + two.counts.duplicates == 50)
    assert Counter(done) == Counter(names)
    assert one.counts.accepted + two.counts.accepted == 50


async def test_a_lost_connection_is_made_again(tmp_path: Path) -> None:
    store, done = f"sqlite:///{tmp_path / 'records.db'}", list[str]()
    async with source() as feed, listening(store, feed.url, done) as listener:
        for number in range(3):
            await feed.await_listeners(1)
            feed.send(event(number))
            await until(lambda number=number: len(done) == number + 1)  # type: ignore[misc]
            await feed.drop()
        await feed.stop()
        await feed.start()
        await feed.await_listeners(1)
        feed.send(event(3))
        await until(lambda: len(done) == 4)
        assert listener.counts.connected >= 4


async def test_a_source_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    feed, done = Source(), list[str]()
    async with listening(f"sqlite:///{tmp_path / 'records.db'}", feed.url, done):
        await asyncio.sleep(0.1)
        await feed.start()
        await feed.await_listeners(1)
        feed.send(event(1))
        await until(lambda: done == ["evt-1"])
    await feed.stop()


async def test_what_is_no_event_is_counted_and_the_rest_goes_on(tmp_path: Path) -> None:
    done: list[str] = []
    async with (
        source() as feed,
        listening(f"sqlite:///{tmp_path / 'records.db'}", feed.url, done) as listener,
    ):
        await feed.await_listeners(1)
        feed.send("no json", "[]", "{}", event(1))
        await until(lambda: done == ["evt-1"])
        assert listener.counts.invalid == 3


async def test_nothing_is_let_go_while_the_store_is_away(tmp_path: Path) -> None:
    """The one listener holds what it has read and reads no further; the source sends it all only once."""
    done: list[str] = []
    names = {f"evt-{number}" for number in range(400)}
    with redis.own(tmp_path) as keeper:
        async with source() as feed, listening(keeper.url, feed.url, done) as listener:
            await feed.await_listeners(1)
            await asyncio.to_thread(keeper.stop)
            feed.send(*(event(number, more="x" * 10_000) for number in range(400)))
            await until(lambda: listener.counts.received >= 100)
            await asyncio.sleep(0.2)
            assert listener.counts.received <= 101, "it goes on reading what it cannot journal"
            await asyncio.to_thread(keeper.start)
            await until(lambda: set(done) == names)
    assert Counter(done) == Counter(names)


async def test_headers_are_sent_to_the_source(tmp_path: Path) -> None:
    headers = {"Authorization": "Bearer abc"}
    async with (
        source() as feed,
        listening(f"sqlite:///{tmp_path / 'records.db'}", feed.url, [], headers=headers),
    ):
        await feed.await_listeners(1)
    assert feed.headers == ["Bearer abc"]


async def test_a_url_of_another_kind_is_refused(tmp_path: Path) -> None:
    once = semel.aopen(f"sqlite:///{tmp_path / 'records.db'}", consumer="listen")

    async def handle(event: Event) -> None: ...

    with pytest.raises(PolicyInvalid, match="ws://"):
        Listener("http://localhost/", Intake(once, handle))


def test_waits_between_attempts_grow_and_are_spread() -> None:
    backoff = Backoff(first_s=1, max_s=10)
    assert [backoff.delay_s(tries, 1.0) for tries in range(6)] == [1, 2, 4, 8, 10, 10]
    assert [backoff.delay_s(tries, 0.0) for tries in range(6)] == [0.5, 1, 2, 4, 5, 5]
    assert backoff.delay_s(10_000, 1.0) == 10


def test_where_the_id_is_can_be_said() -> None:
    fields = Fields(id="meta.id", type="meta.kind")
    read = fields.read('{"meta": {"id": 7, "kind": "x"}}', 1000)
    assert read == Event(id="7", type="x", body=b'{"meta": {"id": 7, "kind": "x"}}')
    assert isinstance(fields.read('{"meta": 7}', 1000), Invalid)
    assert isinstance(fields.read('{"meta": {"id": 1.5}}', 1000), Invalid)
    assert isinstance(fields.read('{"meta": {"id": "\\ud800"}}', 1000), Invalid)
    with pytest.raises(PolicyInvalid):
        Fields(id="a..b")


def test_an_event_names_itself_by_id_or_else_by_event_id() -> None:
    read = Fields().read
    assert read('{"id": "a", "event_id": "b"}', 1000) == Event(id="a", body=b'{"id": "a", "event_id": "b"}')
    assert read('{"event_id": "b"}', 1000) == Event(id="b", body=b'{"event_id": "b"}')
    assert isinstance(Fields(id="meta.id").read('{"event_id": "b"}', 1000), Invalid)


# --- semel listen -------------------------------------------------------------------------------

HANDLER = """
import asyncio, os, semel
async def handle(event):
    attempt = semel.current().attempt
    with open("runs", "a") as file:
        file.write(f"{event.id} {os.getpid()} {attempt}\\n")
    if event.type == "hangs" and attempt == 1:
        await asyncio.Event().wait()
    if event.type == "bad":
        raise ValueError("never")
"""


def command(tmp_path: Path, feed: Source, store: str, *more: str, rows: str = "sqlite:///rows.db") -> int:
    if not (tmp_path / "work.py").exists():  # an earlier command may be reading it
        (tmp_path / "work.py").write_text(HANDLER)
    words = [sys.executable, "-m", "semel", "listen", feed.url, "work:handle", "--store", store, "--lease", "1s",
             "--persist", rows, *more]  # fmt: skip
    return server.spawn(words, tmp_path / "log", env=environment(tmp_path))


def rows(tmp_path: Path) -> Counter[str]:
    if not (tmp_path / "rows.db").exists():
        return Counter()
    with closing(sqlite3.connect(tmp_path / "rows.db")) as file:
        try:
            return Counter(row[0] for row in file.execute("SELECT event_id FROM events"))
        except sqlite3.OperationalError:
            return Counter()


@pytest.mark.slow
async def test_five_commands_lose_nothing_when_some_are_killed_and_redis_restarts(tmp_path: Path) -> None:
    names = {f"evt-{number}" for number in range(63)}
    schema = f"rows_{uuid4().hex[:12]}"
    postgres.execute(postgres.url(), f"CREATE SCHEMA {schema}")
    table = f"{postgres.url()}{'&' if '?' in postgres.url() else '?'}options=-csearch_path%3D{schema}"

    def persisted() -> Counter[str]:
        if postgres.execute(postgres.url(), f"SELECT to_regclass('{schema}.events')") == [(None,)]:
            return Counter()
        return Counter(
            row[0] for row in postgres.execute(postgres.url(), f"SELECT event_id FROM {schema}.events")
        )

    with redis.own(tmp_path) as keeper:
        async with source() as feed:
            pids = [command(tmp_path, feed, keeper.url, rows=table) for _ in range(5)]
            try:
                await feed.await_listeners(5)
                feed.send(*({"id": f"evt-{number}", "type": "hangs"} for number in range(3)))
                await until(lambda: len(begun(tmp_path)) == 3)
                owners = {pid for _, pid, _ in begun(tmp_path)}
                assert owners <= set(pids)
                feed.send(*(event(number) for number in range(3, 33)))
                for owner in owners:
                    server.end(owner, signal.SIGKILL)
                await asyncio.to_thread(keeper.restart)
                feed.send(*(event(number) for number in range(33, 63)))
                await until(lambda: set(persisted()) == names)
            finally:
                for pid in pids:
                    await asyncio.to_thread(server.end, pid, signal.SIGTERM)
    assert persisted() == Counter(names)
    runs = begun(tmp_path)
    for number in range(3):
        assert [attempt for name, _, attempt in runs if name == f"evt-{number}"] == [1, 2]
    assert {pid for name, pid, attempt in runs if attempt == 2}.isdisjoint(owners)
    assert "Traceback" not in (tmp_path / "log").read_text()


def begun(folder: Path) -> list[tuple[str, int, int]]:
    """(event, process, attempt), in the order in which handlers began."""
    lines = (folder / "runs").read_text().splitlines() if (folder / "runs").exists() else []
    return [(name, int(pid), int(attempt)) for name, pid, attempt in map(str.split, lines)]


@pytest.mark.slow
async def test_the_command_buries_what_it_gives_up(tmp_path: Path) -> None:
    async with source() as feed:
        more = ("--dead", "dead.jsonl", "--max-attempts", "2", "--retry-delay", "20ms")
        pid = command(tmp_path, feed, "sqlite:///records.db", *more)
        try:
            await feed.await_listeners(1)
            feed.send({"id": "evt-1", "type": "bad", "amount": 7})
            await until((tmp_path / "dead.jsonl").exists)
        finally:
            await asyncio.to_thread(server.end, pid, signal.SIGTERM)
    letter = json.loads((tmp_path / "dead.jsonl").read_text())
    assert letter["payload"]["amount"] == 7
    assert "AttemptsExhausted" in letter["error"]
    assert rows(tmp_path) == Counter()
    assert "1 received, 1 accepted" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["ws://127.0.0.1:1/"], 2, "name a handler"),
        (["ws://127.0.0.1:1/", "nowhere:handle"], 78, "no module named"),
        (["ws://127.0.0.1:1/", "work"], 2, "names no handler"),
        (["ws://127.0.0.1:1/", "work:credit"], 78, "it is given the event alone: write handler(event)"),
        (["http://127.0.0.1:1/", "work:handle"], 78, "ws://"),
        (["ws://127.0.0.1:1/", "work:handle", "--store", "memory:"], 78, "journal"),
        (["ws://127.0.0.1:1/", "work:handle", "--persist", "mysql://x/"], 78, "postgresql://"),
        (["ws://127.0.0.1:1/", "work:handle", "--header-file", "none"], 78, "cannot be read"),
    ],
)
async def test_the_command_says_what_is_wrong(tmp_path: Path, words: list[str], code: int, said: str) -> None:
    (tmp_path / "work.py").write_text(HANDLER + "\ndef credit(connection, event):\n    pass\n")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "semel", "listen", *words, cwd=tmp_path, env=environment(tmp_path),
        stderr=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    _, err = await asyncio.wait_for(process.communicate(), 60)
    assert said in err.decode()
    assert process.returncode == code
    assert os.linesep not in err.decode().strip(), "one line, no traceback"
