"""SQLite: bare multi-row statements and autocommit rows on the same disk, with the same durability."""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import quote, urlsplit

from semel.cli.bench.measure import Fresh, Job, Scratch
from semel.core.ids import digests_of
from semel.stores.sqlite import SqliteStore, from_url
from semel.stores.sqlite.schema import check_place

__all__ = ["RawSqlite", "scratch"]

SINGLES = 25
ROWS_MAX = 1_000


class RawSqlite:
    """Raw operations of SQLite: 16-byte keys, WITHOUT ROWID, WAL."""

    def __init__(self, path: Path, synchronous: str = "FULL") -> None:
        self.db: sqlite3.Connection = sqlite3.connect(path, isolation_level=None)
        self.db.execute("PRAGMA journal_mode = WAL")
        self.db.execute(f"PRAGMA synchronous = {synchronous}")
        self.db.execute("CREATE TABLE seen (digest BLOB PRIMARY KEY, expires_at INTEGER) WITHOUT ROWID")

    def close(self) -> None:
        """Close the file."""
        self.db.close()

    def batches(self, count: int, size: int) -> Job:
        """Insert in multi-row statements, one commit each, and return the new digests."""
        fresh = Fresh(count)

        def run() -> None:
            for batch in fresh.batches(size):
                parameters: list[object] = []
                for digest in digests_of("", "raw", batch):
                    parameters += (digest, 1)
                places = ",".join(["(?,?)"] * len(batch))
                self.db.execute("BEGIN IMMEDIATE")
                self.db.execute(
                    f"INSERT INTO seen VALUES {places} ON CONFLICT DO NOTHING RETURNING digest",  # noqa: S608
                    parameters,
                ).fetchall()
                self.db.execute("COMMIT")

        return Job(run, count, fresh)

    def autocommit(self, count: int = SINGLES) -> Job:
        """Insert one row per commit."""

        def run() -> None:
            for _ in range(count):
                self.db.execute("INSERT INTO seen VALUES (?, 1)", (os.urandom(16),))

        return Job(run, count)


@contextmanager
def scratch(url: str) -> Iterator[Scratch]:
    """A folder beside the user's file, removed at the end."""
    store: SqliteStore = from_url(url)
    check_place(store.path)
    query = urlsplit(url).query
    with TemporaryDirectory(prefix=".semel-bench-", dir=Path(store.path).parent) as folder:
        target = f"sqlite:///{quote(str(Path(folder) / 'semel.db'))}" + (f"?{query}" if query else "")
        with closing(RawSqlite(Path(folder) / "raw.db", store.synchronous)) as raw:
            yield Scratch(
                kind="sqlite",
                target=target,
                single_limit="autocommit row",
                single=raw.autocommit,
                batch_limit="bare insert of {size}",
                batch=lambda size: raw.batches(min(ROWS_MAX, SINGLES * size), size),
            )
