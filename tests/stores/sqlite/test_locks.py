"""SQLite's locks outlive everything that semel does with the file: second clients, hooks, pages, commands, forks.

A process that opens and closes a file in any other way than through SQLite loses all its locks on it. The next process
that closes its connection then takes itself for the last user, and removes the log that others still write to.
"""

import asyncio
import os
import re
import shutil
import signal
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

import semel
from semel.cli.main import main
from semel.errors import StoreRefused
from semel.observe.doctor import examine
from semel.observe.probes import weaknesses
from semel.observe.rollups import RollupHook
from semel.outbox.tables import rows_for
from semel.server.settings import ServeSettings
from semel.stores.sqlite import SqliteStore
from semel.stores.sqlite.locks import RESERVED_BYTE, SHARED_BYTE, parse_locks
from tests.cli.processes import semel as run_semel
from tests.cli.processes import warm
from tests.server.tools import Running, process, serving
from tests.stores.sqlite.tools import finish, forked, in_child, line, lookup, say
from tests.stores.sqlite.tools import process as python

__all__ = ["warm"]
pytestmark = pytest.mark.usefixtures("warm")

ROOT = Path(__file__).resolve().parents[3]
LOCKS = Path("/proc/locks")
needs_proc = pytest.mark.skipif(not LOCKS.exists(), reason="this system does not list its locks")


def held(path: Path) -> set[tuple[str, int]]:
    """The locks that this process holds on the database file and on the index of its log.

    The list is read in pieces: while other processes lock and unlock, one reading may miss a lock that is held.
    """
    inodes = {
        (path.parent / (path.name + suffix)).stat().st_ino: suffix or "file"
        for suffix in ("", "-shm")
        if (path.parent / (path.name + suffix)).exists()
    }
    return {
        (inodes[lock.inode], lock.first)
        for _ in range(5)
        for lock in parse_locks(LOCKS.read_text())
        if lock.pid == os.getpid() and lock.inode in inodes
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.db"


@pytest.fixture
def store(path: Path) -> Iterator[SqliteStore]:
    """A store that is open in this process, and has read and written."""
    opened = SqliteStore(path)
    finish(opened, "before")
    lookup(opened, "before")
    yield opened
    opened.close()


def second_client(path: Path) -> None:
    with semel.open(f"sqlite:///{path}", consumer="second") as once:
        once.run("k", lambda: 1)


def second_client_of_asyncio(path: Path) -> None:
    async def work() -> None:
        async with semel.aopen(f"sqlite:///{path}", consumer="second") as once:
            await once.run("k", asyncio.sleep, 0)

    asyncio.run(work())


def clients_in_threads(path: Path) -> None:
    threads = [threading.Thread(target=second_client, args=(path,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def relative_path(path: Path) -> None:
    second_client(Path(os.path.relpath(path)))


def symbolic_link(path: Path) -> None:
    link = path.with_name("link.db")
    link.symlink_to(path)
    second_client(link)


def with_adopt(path: Path) -> None:
    with semel.open(f"sqlite:///{path}?adopt=true", consumer="second") as once:
        once.run("k", lambda: 1)


def hook(path: Path) -> None:
    rollups = RollupHook(f"sqlite:///{path}")
    with semel.open("memory:", consumer="second", hooks=[rollups]) as once:
        once.run("k", lambda: 1)
    rollups.close()


def users_connection(path: Path) -> None:
    with (
        semel.open(f"sqlite:///{path}", consumer="inbox", mode="inbox") as once,
        closing(sqlite3.connect(path)) as db,
        db,
    ):
        assert once.inbox(db).first("k")


def outbox(path: Path) -> None:
    async def look() -> None:
        rows = rows_for(f"sqlite:///{path}")
        await rows.open()
        await rows.counts()
        await rows.close()

    asyncio.run(look())


def doctor(path: Path) -> None:
    assert list(examine(SqliteStore(path)))


def explain(path: Path) -> None:
    with closing(SqliteStore(path)) as opened:
        opened.open()
        weaknesses(opened)


def pages(path: Path) -> None:
    with serving(ServeSettings(auth="none", store=f"sqlite:///{path}", port=0)) as running:
        for page in (
            "/ui/",
            "/ui/events",
            "/ui/check",
            "/ui/parts/doctor",
            "/ui/stores",
            "/ui/outbox",
            "/metrics",
        ):
            assert running.client.get(page).status_code == 200, page


def child_of_a_fork(path: Path) -> None:
    assert in_child(SqliteStore(path), "k") == "done"


def refused_open(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db, db:
        (version,) = db.execute("SELECT value FROM semel_meta WHERE name = 'schema_version'").fetchone()
        db.execute("UPDATE semel_meta SET value = 99 WHERE name = 'schema_version'")
    with pytest.raises(StoreRefused, match="newer"):
        SqliteStore(path).open()
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE semel_meta SET value = ? WHERE name = 'schema_version'", (version,))


def command(*arguments: str) -> Callable[[Path], None]:
    def run(path: Path) -> None:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(sys, "argv", ["semel", *arguments, "--store", f"sqlite:///{path}"])
            assert main() == 0

    run.__name__ = arguments[0]
    return run


ACTS: list[Callable[[Path], None]] = [
    second_client, second_client_of_asyncio, clients_in_threads, relative_path, symbolic_link, with_adopt, hook,
    users_connection, outbox, doctor, explain, pages, child_of_a_fork, refused_open,
    command("list"), command("stats"), command("purge"), command("doctor"), command("explain"), command("migrate"),
]  # fmt: skip


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.__name__)
def test_the_locks_are_held_after(store: SqliteStore, path: Path, act: Callable[[Path], None]) -> None:
    before = held(path)
    assert ("file", SHARED_BYTE) in before
    act(path)
    finish(store, "after")  # a fork has closed the store: it connects again
    lookup(store, "after")
    assert held(path) >= before
    # Another process that opens and closes the file must not take itself for the last user.
    assert run_semel("list", "--store", f"sqlite:///{path}", cwd=path.parent).returncode == 0
    assert path.with_name("events.db-wal").exists()
    finish(store, "last")
    with closing(SqliteStore(path)) as other:
        assert [lookup(other, key).state for key in ("before", "after", "last")] == ["done"] * 3


@needs_proc
@pytest.mark.parametrize("mode", ["delete", "wal"])
def test_a_transaction_of_the_user_keeps_its_lock(path: Path, mode: str) -> None:
    """The inbox lives in the user's own database: what the user holds there stays held."""
    with (
        closing(sqlite3.connect(path, isolation_level=None)) as db,
        closing(SqliteStore(path, adopt=True)) as first,
        closing(SqliteStore(path)) as second,
    ):
        db.execute(f"PRAGMA journal_mode = {mode}")
        db.execute("CREATE TABLE wallet (balance INTEGER)")
        first.open()
        db.execute("BEGIN IMMEDIATE")
        db.execute("INSERT INTO wallet VALUES (1)")
        before = held(path)
        assert ("file", RESERVED_BYTE) in before or mode == "wal"
        second.open()
        doctor(path)
        assert held(path) == before
        with python(TRIES_TO_WRITE, path) as other:
            assert line(other) == "database is locked"
        db.execute("COMMIT")
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


TRIES_TO_WRITE = """
import sqlite3, sys
try:
    sqlite3.connect(sys.argv[1], timeout=0, isolation_level=None).execute("BEGIN IMMEDIATE")
    print("written", flush=True)
except sqlite3.OperationalError as error:
    print(error, flush=True)
"""

RUNS = """
import sys, semel
for word in sys.stdin:
    with semel.open("sqlite:///" + sys.argv[1], consumer="billing") as once:
        outcome = once.run(word.strip(), lambda: "other")
        print(outcome.value, flush=True)
"""


def test_a_key_runs_once_with_two_clients_here_and_a_client_elsewhere(path: Path) -> None:
    url = f"sqlite:///{path}"
    with (
        semel.open(url, consumer="billing") as first,
        semel.open(url, consumer="billing") as second,
        python(RUNS, path) as other,
    ):
        ran = {"k0": first.run("k0", lambda: "here"), "k1": second.run("k1", lambda: "here")}
        assert all(isinstance(outcome, semel.Done) for outcome in ran.values())
        say(other, "opens-and-closes")
        assert line(other) == "other"
        assert first.run("k2", lambda: "here") == semel.Done("here", replayed=False)
        for key in ("k0", "k1", "k2"):
            say(other, key)
            assert line(other) == "here"
        say(other, "k3")
        assert line(other) == "other"
        assert second.run("k3", lambda: "here") == semel.Done("other", replayed=True)


@pytest.mark.slow
def test_accepted_events_are_known_after_list_and_kill_9(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text("def handle(event):\n    pass\n")
    options = ("--handler", "app:handle")
    two = [{"id": "evt_1"}, {"id": "evt_2"}]
    with process(tmp_path, *options) as (service, address):
        asked = Running(address)
        assert asked.client.get("/ui/parts/doctor").status_code == 200
        assert run_semel("list", cwd=tmp_path).returncode == 0
        answer = asked.post("/v1/events", two).json()
        assert [event["status"] for event in answer["events"]] == ["accepted"] * 2
        asked.client.close()
        service.send_signal(signal.SIGKILL)
        service.wait()
    with process(tmp_path, *options) as (_, address):
        asked = Running(address)
        answer = asked.post("/v1/events", two).json()
        assert [event["status"] for event in answer["events"]] == ["duplicate"] * 2
        asked.client.close()


# --- forks ---


@needs_proc
def test_a_child_holds_locks_of_its_own(store: SqliteStore, path: Path) -> None:
    with python(FORKS, path, "closed") as forking:
        assert line(forking) == "locked"
    finish(store, "after")


@needs_proc
def test_a_child_that_inherits_a_connection_is_refused(store: SqliteStore, path: Path) -> None:
    """SQLite believes in the parent's locks there: it would work without any, and say nothing."""
    with python(FORKS, path, "open") as forking:
        assert re.fullmatch(
            r"StoreRefused.*forked while a connection to .*events.db was open.*", line(forking)
        )
    with python(FORKS, path, "closed-in-child") as forking:
        assert line(forking) == "locked"
    finish(store, "after")


FORKS = """
import os, sqlite3, sys
import semel
from semel.stores.sqlite.locks import holds_shared_lock
path, what = sys.argv[1:]
db = sqlite3.connect(path)
db.execute("SELECT * FROM semel_meta").fetchall()
once = semel.open("sqlite:///" + path, consumer="forking")
once.run("parent", lambda: 1)
if what == "closed":
    db.close()
if os.fork() == 0:
    try:
        if what == "closed-in-child":
            db.close()
            db = sqlite3.connect(path)  # takes the same descriptor again
            db.execute("SELECT * FROM semel_meta").fetchall()
        once.run("child", lambda: 1)
        print("locked" if holds_shared_lock(os.stat(path).st_ino) else "no lock", flush=True)
    except semel.SemelError as error:
        print(type(error).__name__, error, flush=True)
    finally:
        os._exit(0)
os.wait()
"""


def test_an_inbox_on_an_inherited_connection_is_refused(store: SqliteStore, path: Path) -> None:
    with python(INHERITS, path) as forking:
        assert line(forking) == "StoreRefused"
    finish(store, "after")


INHERITS = """
import os, sqlite3, sys
import semel
once = semel.open("sqlite:///" + sys.argv[1], consumer="forking", mode="inbox")
db = sqlite3.connect(sys.argv[1])
with db:
    once.inbox(db).first("parent")
if os.fork() == 0:
    try:
        with db:
            once.inbox(db).first("child")
        print("written", flush=True)
    except semel.SemelError as error:
        print(type(error).__name__, flush=True)
    finally:
        os._exit(0)
os.wait()
"""


# --- one file, several names ---


def test_the_log_is_found_through_a_link(store: SqliteStore, path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.db"
    link.symlink_to(path.name)
    linked = SqliteStore(link)
    assert linked.path == store.path
    assert lookup(linked, "before").state == "done"
    linked.close()
    assert path.with_name("events.db-wal").exists()
    link.unlink()
    shutil.copy(path, tmp_path / "copy.db")
    link.symlink_to("copy.db")
    linked.open()
    with pytest.raises(StoreRefused, match="removed or replaced"):
        swap_and_write(linked, link, path)
    linked.close()


def swap_and_write(linked: SqliteStore, link: Path, path: Path) -> None:
    link.unlink()
    link.symlink_to(path.name)
    finish(linked, "elsewhere")


# --- nothing but SQLite opens the file ---

OPENS = re.compile(
    r"\bopen\(|\.read_bytes\(|\.read_text\(|\.write_bytes\(|\.write_text\(|\bshutil\b|\bmmap\b|\.copyfile\(|\bsendfile\b"
    r"|\bos\.(?:truncate|rename|replace|remove|unlink)\("
)
OWN = re.compile(
    r"\b(?:def|async def) open\(|\.open\(\)|semel\.a?open\(|client\.open\(|open\(\) it again|open\(\.\.\."
)
"""What is called open but opens no file: stores, clients and sources of our own."""
OPEN_FILES_OF_THEIR_OWN = {
    "cli/advise.py": "the plot, and the metrics that the user names",
    "cli/audit/command.py": "the plot, keys and history, in the files that the user names",
    "cli/audit/reading.py": "a copy of a table, in a folder of its own; the database itself through its driver",
    "cli/bench/command.py": "the plot",
    "cli/chaos.py": "the report, in the file that the user names",
    "cli/demo/command.py": "the log of the demonstration's workers",
    "cli/filter.py": "the counts, in the file that the user names",
    "cli/imports/sources.py": "a file of JSON lines; databases through their drivers",
    "cli/line_io.py": "input and output of semel filter",
    "cli/listen.py": "dead-lettered events, in the file that the user names",
    "cli/output.py": "the null device",
    "cli/options.py": "headers and secrets, in the files that the user names",
    "cli/settings.py": "semel.toml",
    "cli/demo/report.py": "the ledger of the demonstration",
    "cli/demo/worker.py": "the ledger of the demonstration, and the log of its workers",
    "runtime/extras.py": "how semel was installed, as its own distribution says",
    "observe/history.py": "the files of the history",
    "outbox/sinks/redis.py": "a script of the package",
    "outbox/sqlite.py": "the lock of the relay: a file of its own beside the database",
    "server/dashboard/rendering.py": "static files of the package",
    "stores/bloom/filter.py": "the file of a filter",
    "stores/http/requests.py": "a token, in the file that the user names",
    "stores/postgres/schema.py": "migrations and statements of the package",
    "stores/redis/calls.py": "scripts of the package",
    "stores/sqlite/locks.py": "the system's list of locks",
    "stores/sqlite/schema.py": "migrations of the package, and the system's list of mounts",
    "stores/sqlite/store.py": "the folder, to make a new file's name last",
    "stores/tiered/redis_calls.py": "a script of the package",
    "streams/dedup.py": "the index of a partition, by its own method",
    "streams/rocks.py": "the lock of the index: a file of its own",
    "testing/_histories/recording.py": "the recorded calls",
    "testing/chaos/conductor.py": "the log of the workers",
    "testing/chaos/lines.py": "the source of the handler",
    "testing/chaos/page.py": "templates of the package",
    "testing/chaos/run.py": "the log of the workers",
    "testing/worker_processes.py": "the log of the workers",
}


def test_every_module_that_opens_a_file_says_which() -> None:
    source = ROOT / "src/semel"
    opening = {
        str(file.relative_to(source))
        for file in source.rglob("*.py")
        for text in file.read_text(encoding="utf-8").splitlines()
        if OPENS.search(OWN.sub("", text))
    }
    # A new name here: is it never the database, its log, or the index of the log?
    assert opening == set(OPEN_FILES_OF_THEIR_OWN)


@pytest.mark.slow
@pytest.mark.parametrize(
    "act", [act for act in ACTS if act is not child_of_a_fork], ids=lambda act: act.__name__
)
def test_only_sqlite_opens_the_file(store: SqliteStore, path: Path, act: Callable[[Path], None]) -> None:
    names = {str(path) + suffix for suffix in ("", "-wal", "-shm", "-journal")}

    def watch() -> str:
        opened: list[str] = []

        def on_event(event: str, arguments: tuple[object, ...]) -> None:
            if event == "open" and isinstance(arguments[0], str | os.PathLike):
                opened.extend({str(Path(arguments[0]).absolute())} & names)

        sys.addaudithook(on_event)
        act(path)
        return " ".join(opened) or "none"

    assert forked(watch) == "none"
