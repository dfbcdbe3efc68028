"""Records in one SQLite file: connections, transactions and locks. The statements are in `batch` and `encoding`."""

import contextlib
import os
import re
import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock, RLock
from typing import Literal
from urllib.parse import quote
from weakref import WeakSet

from semel.clock import Clock
from semel.core.commands import Answer, Claim, Item, Settle
from semel.core.protocols import Capabilities, Listener
from semel.errors import PolicyInvalid, StoreClosed, StoreFull, StoreRefused, StoreUnavailable
from semel.runtime.jitter import jitter
from semel.stores.sqlite import locks, schema
from semel.stores.sqlite import schema as sqlite_schema
from semel.stores.sqlite.batch import FRUGAL, READS, FileState, SqliteBatch
from semel.stores.sqlite.clock import StoreClock
from semel.stores.sqlite.errors import is_busy, to_store_error
from semel.stores.sqlite.schema import create_private
from semel.stores.sqlite.single import SINGLES, SingleItems
from semel.types import Completed, Id

BUSY_WAIT_MAX_S = 3600.0
RETRY_MIN_S, RETRY_MAX_S = 0.00005, 0.0006
"""How long to wait before the next try to get a lock: short and random, so that no process is starved.
SQLite's own waits, longer each time, let one of four processes write while the others waited for seconds."""
CHECKPOINT_PAGES = 4000
"""The log is copied into the file when it has this many pages (16 MB): later than SQLite's default of 1,000,
because a page that is written many times is then copied once."""
CACHE_KIB = 16 * 1024
"""Digests are scattered over their whole index: with SQLite's default of 2 MB a larger store would read pages again."""
STATEMENTS_MAX = 512
_NOT_IN_URL = re.compile(r"[%?#\s]")
FORK_WAIT_S = 10.0
"""How long a fork waits for a transaction of another thread to end."""


class SqliteStore:
    """A store in one file, for the threads and processes of one computer. Its name is its URL.

    `synchronous="NORMAL"` is faster and survives the death of every process, but may lose the last
    commits when the power fails. `readable_keys=False` stores only digests of keys, except for journaled and
    quarantined claims, which an operator must be able to name. `adopt=True` creates the tables
    beside those of another application. No call waits longer than `busy_wait_s` for other writers.
    """

    capabilities: Capabilities = Capabilities(
        durable=True,
        transactional=True,
        single_writer=True,
        shared=True,
        notifies=True,
        endless=True,
        refreshes=True,
    )

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        synchronous: Literal["FULL", "NORMAL"] = "FULL",
        readable_keys: bool = True,
        adopt: bool = False,
        busy_wait_s: float = 10.0,
        clock: Clock | None = None,
    ) -> None:
        given = os.fspath(path)
        if not given or "\0" in given or given == ":memory:":
            raise PolicyInvalid(f"{given!r} is not the path of a file; for a store in memory use memory:")
        if synchronous not in ("FULL", "NORMAL"):
            raise PolicyInvalid(f"synchronous is {synchronous!r}; it must be FULL or NORMAL")
        if not 0 <= busy_wait_s <= BUSY_WAIT_MAX_S:
            raise PolicyInvalid(
                f"busy_wait_s is {busy_wait_s}; it must lie between 0 and {BUSY_WAIT_MAX_S:g}"
            )
        self._named: str = str(Path(given).absolute())
        # SQLite follows links before it names its log; so must code that looks for the log or locks beside the file.
        self.path: str = os.path.realpath(given)
        self.name: str = "sqlite:///" + _NOT_IN_URL.sub(lambda found: quote(found[0]), given)
        self.clock: StoreClock = StoreClock(clock)
        self.synchronous: Literal["FULL", "NORMAL"] = synchronous
        self.readable_keys = readable_keys
        self._adopt = adopt
        self._busy_wait_s = busy_wait_s
        self._writing = Lock()  # taken before _reading where both are needed
        self._reading = Lock()
        self._writer: sqlite3.Connection | None = None
        self._reader: sqlite3.Connection | None = None
        self._singles: SingleItems | None = None
        """The fast path for items that are sent alone; lives as long as `_writer`."""
        self._inode = 0
        self._closed = False
        self._seen = FileState()
        self._listening = Lock()
        self._listeners: tuple[Listener, ...] = ()
        self._held_for_fork: list[Lock] = []
        with _registering:
            _STORES.add(self)

    # --- the port ---

    def adopt(self) -> None:
        """Allow the tables beside another application's own, as an inbox needs. Call it before `open`."""
        self._adopt = True

    def open(self) -> None:
        """Create or check the file and connect; idempotent. If it raises `StoreRefused`, the file is unchanged."""
        with self._writing:
            self._closed = False
            self._write_connection()

    def close(self) -> None:
        """Close the file; idempotent, from any thread. A call that waits for a lock raises `StoreClosed`."""
        self._closed = True
        with self._writing, self._reading:
            self._disconnect()

    def watch(self, listener: Listener, /) -> Callable[[], None]:
        """Call `listener` for every record that is settled, released or forgotten through this object.

        Returns a function that stops it.
        """
        with self._listening:
            self._listeners = (*self._listeners, listener)

        def stop() -> None:
            with self._listening:
                self._listeners = tuple(each for each in self._listeners if each is not listener)

        return stop

    def send(self, items: Sequence[Item], /) -> list[Answer]:
        """Execute the items in one transaction; returns the answers after its commit.

        A batch that changes nothing writes nothing to the disk. A batch that only reads does not wait
        for writers; nor does a single claim of a key that is settled or held. Raises `StoreUnavailable` if it does
        not get the lock within `busy_wait_s`.
        """
        if len(items) == 1 and type(items[0]) in SINGLES:
            return self._send_single(items[0])  # type: ignore[arg-type]
        if all(type(item) in READS for item in items):
            return self._read(items)
        with self._writing:
            answers, changed = self._write(self._write_connection(), items)
        if self._listeners:
            self._notify(changed)
        return answers

    def _send_single(self, item: Claim | Settle) -> list[Answer]:
        with self._writing:
            connection = self._write_connection()
            assert self._singles is not None
            answer = self._singles.answer(item)
            if answer is None:
                answers, changed = self._write(connection, (item,))
            else:
                answers, changed = [answer], [item.id] if type(answer) is Completed else []
        if changed and self._listeners:
            self._notify(changed)
        return answers

    def _notify(self, changed: list[Id]) -> None:
        for record_id in changed:
            for listener in self._listeners:
                listener(record_id)

    # --- transactions ---

    def _write(self, connection: sqlite3.Connection, items: Sequence[Item]) -> tuple[list[Answer], list[Id]]:
        try:
            return self._transact(connection, items)
        except StoreFull as full:
            return self._write_less(connection, items, full)

    def _write_less(
        self, connection: sqlite3.Connection, items: Sequence[Item], full: StoreFull
    ) -> tuple[list[Answer], list[Id]]:
        """Repeat the batch on a full disk: settles may still fit, and reads still work."""
        try:
            return self._transact(connection, items, full, FRUGAL)
        except StoreFull:
            return self._transact(connection, items, full)

    def _transact(
        self,
        connection: sqlite3.Connection,
        items: Sequence[Item],
        full: StoreFull | None = None,
        permitted: frozenset[type] = frozenset(),
    ) -> tuple[list[Answer], list[Id]]:
        try:
            self._execute(connection, "BEGIN IMMEDIATE")
            now, offset_us = self._now(connection)
            seen = self._seen
            seen.refresh(connection.execute("PRAGMA data_version").fetchone()[0])
            batch = SqliteBatch(
                connection, now, seen, readable_keys=self.readable_keys, full=full, permitted=permitted
            )
            answers = batch.run(items)
            if batch.wrote:
                connection.execute("UPDATE semel_clock SET last_us = ?, offset_us = ?", (now, offset_us))
                self._execute(connection, "COMMIT")
                seen.commit(batch.consumers, batch.claims)
            else:
                connection.execute("ROLLBACK")
            return answers, batch.changed
        except BaseException as error:
            self._seen.forget()
            if isinstance(error, sqlite3.Error):
                raise to_store_error(error, self.path) from error
            raise
        finally:
            if connection.in_transaction:
                _roll_back(connection)

    def _read(self, items: Sequence[Item]) -> list[Answer]:
        with self._reading:
            connection = self._reader
            if connection is not None and not self._closed:
                return self._look(connection, items)
        with self._writing:
            self._write_connection()
        with self._reading:
            if self._reader is None:
                raise self._closed_error()
            return self._look(self._reader, items)

    def _look(self, connection: sqlite3.Connection, items: Sequence[Item]) -> list[Answer]:
        try:
            connection.execute("BEGIN")
            # A reader may have to wait only in another application's file, which is not in WAL mode.
            self._execute(connection, "SELECT 1 FROM semel_clock")
            now, _ = self._now(connection)
            return SqliteBatch(connection, now, FileState(), readable_keys=self.readable_keys).run(items)
        except sqlite3.Error as error:
            raise to_store_error(error, self.path) from error
        finally:
            _roll_back(connection)

    def _now(self, connection: sqlite3.Connection) -> tuple[int, int]:
        last_us, offset_us = connection.execute("SELECT last_us, offset_us FROM semel_clock").fetchone()
        return self.clock.tick(last_us, offset_us)

    def _execute(self, connection: sqlite3.Connection, statement: str) -> None:
        """Begin or commit; wait for other processes in short random pauses, at most `busy_wait_s`."""
        deadline = 0.0
        while True:
            try:
                connection.execute(statement).fetchall()
                return
            except sqlite3.OperationalError as error:
                deadline = deadline or time.monotonic() + self._busy_wait_s
                self._wait_or_give_up(error, deadline)

    def _wait_or_give_up(self, error: sqlite3.OperationalError, deadline: float) -> None:
        if not is_busy(error):
            raise to_store_error(error, self.path) from error
        if self._closed:
            raise self._closed_error() from error
        if time.monotonic() >= deadline:
            raise StoreUnavailable(
                f"another writer{locks.holder_of_lock(self.path)} has held the lock of {self.path}"
                f" for {self._busy_wait_s:g} s; is it stopped, or in a long transaction?"
            ) from error
        time.sleep(jitter.uniform(RETRY_MIN_S, RETRY_MAX_S))

    # --- connections ---

    def _write_connection(self) -> sqlite3.Connection:
        """Return the write connection; opens both connections if there are none. The caller holds `_writing`."""
        if self._closed:
            raise self._closed_error()
        if self._writer is None:
            with self._reading:
                self._connect()
        else:
            self._check_still_there()
        assert self._writer is not None
        return self._writer

    def _connect(self) -> None:
        schema.check_library()
        locks.refuse_inherited(self.path)
        kind = sqlite_schema.inspect(self.path, adopt=self._adopt, version_known=schema.VERSION)
        created = create_private(self.path)
        try:
            writer, reader = self._raw_connection(), self._raw_connection()
        except sqlite3.Error as error:
            raise to_store_error(error, self.path) from error
        try:
            self._prepare(writer, reader, kind)
        except BaseException:
            writer.close()
            reader.close()
            raise
        if created:
            _sync_folder(self.path)
        self._seen.forget()
        self._inode = Path(self._named).stat().st_ino
        self._writer, self._reader = writer, reader
        self._singles = SingleItems(writer, self.clock, self._seen, readable_keys=self.readable_keys)

    def _prepare(
        self, writer: sqlite3.Connection, reader: sqlite3.Connection, kind: sqlite_schema.Kind
    ) -> None:
        """Set up both connections and the schema; starts again whenever another process holds the lock."""
        deadline = time.monotonic() + self._busy_wait_s
        while True:
            try:
                self._set_up(writer, kind)
                reader.execute("PRAGMA query_only = 1")
                return
            except sqlite3.OperationalError as error:
                self._wait_or_give_up(error, deadline)
            except sqlite3.Error as error:
                raise to_store_error(error, self.path) from error

    def _raw_connection(self) -> sqlite3.Connection:
        return sqlite3.connect(
            sqlite_schema.uri(self.path, mode="rwc"),
            uri=True,
            timeout=0,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=STATEMENTS_MAX,
        )

    def _set_up(self, writer: sqlite3.Connection, kind: sqlite_schema.Kind) -> None:
        writer.execute(f"PRAGMA synchronous = {self.synchronous}")
        writer.execute("PRAGMA fullfsync = 1")  # it has an effect only on macOS
        writer.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
        writer.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        if schema.version_of(writer) != schema.VERSION:
            writer.execute("BEGIN IMMEDIATE")
            try:
                schema.migrate(writer, self.path, kind, adopt=self._adopt)
                writer.execute("COMMIT")
            finally:
                _roll_back(writer)
        if writer.execute("PRAGMA application_id").fetchone()[0] == sqlite_schema.APPLICATION_ID:
            writer.execute("PRAGMA journal_mode = WAL").fetchall()

    def _check_still_there(self) -> None:
        try:
            inode = os.stat(self._named).st_ino  # noqa: PTH116 - every call runs this, and Path takes longer
        except OSError:
            inode = 0
        if inode != self._inode:
            raise StoreRefused(
                f"{self.path} was removed or replaced while it was open; writes since then cannot be kept."
                " Put the file back, or close and open the store to start with a new file"
            )

    def _disconnect(self) -> None:
        for connection in (self._writer, self._reader):
            if connection is not None:
                with contextlib.suppress(sqlite3.Error):
                    connection.close()
        self._writer = self._reader = self._singles = None

    def _closed_error(self) -> StoreClosed:
        return StoreClosed(f"{self.name} is closed; open() it again to use it")

    # --- fork ---
    # An SQLite connection must not cross a fork: its locks belong to the parent, but the child would think it has them.

    def _before_fork(self) -> None:
        """Wait for running transactions and disconnect; both processes connect again when they need to."""
        deadline = time.monotonic() + FORK_WAIT_S
        for lock in (self._writing, self._reading):
            if not lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
                return
            self._held_for_fork.append(lock)
        self._disconnect()

    def _after_fork_in_parent(self) -> None:
        while self._held_for_fork:
            self._held_for_fork.pop().release()

    def _after_fork_in_child(self) -> None:
        self._held_for_fork.clear()
        self._writing, self._reading, self._listening = Lock(), Lock(), Lock()
        self.clock.after_fork()
        if self._writer is not None:
            # A transaction of the parent was still running: neither use nor close its connections.
            _LEFT_TO_THE_PARENT.extend((self._writer, self._reader))
            self._writer = self._reader = self._singles = None


def _roll_back(connection: sqlite3.Connection) -> None:
    """Roll back an open transaction; a full disk may have ended it already."""
    if connection.in_transaction:
        with contextlib.suppress(sqlite3.Error):
            connection.execute("ROLLBACK")


def _sync_folder(path: str) -> None:
    """Make the new file's name survive a power failure too."""
    with contextlib.suppress(OSError):
        folder = os.open(Path(path).parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


_STORES: WeakSet[SqliteStore] = WeakSet()
_registering = RLock()
"""Held while `_STORES` changes, and during a fork: a store created meanwhile would be connected in both processes."""
_LEFT_TO_THE_PARENT: list[sqlite3.Connection | None] = []


def _before_fork() -> None:
    _registering.acquire()
    for store in sorted(_STORES, key=id):
        store._before_fork()


def _after_fork_in_parent() -> None:
    for store in list(_STORES):
        store._after_fork_in_parent()
    _registering.release()


def _after_fork_in_child() -> None:
    global _registering  # noqa: PLW0603 - a thread that does not exist here may hold the lock
    _registering = RLock()
    for store in list(_STORES):
        store._after_fork_in_child()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)
