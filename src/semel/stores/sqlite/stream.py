"""Commit marks only after the caller's own work is done: one transaction around it."""

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from semel.core.commands import Mark
from semel.core.ids import digests_of
from semel.stores.sqlite.batch import FileState, SqliteBatch
from semel.stores.sqlite.errors import to_store_error
from semel.stores.sqlite.store import SqliteStore, _roll_back

__all__ = ["Marker", "marking"]

STREAM_CACHE_KIB = 64 * 1024
"""Digests are scattered over the whole table: with SQLite's default of 2 MB a stream would read each page again."""

Marker: TypeAlias = Callable[[Sequence[str]], list[bool]]
"""Marks keys that all differ; returns for each whether it was new."""


@contextmanager
def marking(store: SqliteStore, tenant: str, consumer: str, window_us: int) -> Iterator[Marker]:
    """Yield a marker. Its marks are committed when the block ends normally, and rolled back when it raises.

    Other writers of the file wait meanwhile, so the block must not wait for them. A process that dies inside the
    block has marked nothing. If it dies just after the block's own work, that work is repeated, and none is lost.
    """
    with store._writing:
        connection = store._write_connection()
        connection.execute(f"PRAGMA cache_size = -{STREAM_CACHE_KIB}")
        try:
            store._execute(connection, "BEGIN IMMEDIATE")
            now, offset_us = store._now(connection)
            batch = SqliteBatch(connection, now, FileState(), readable_keys=False)

            def mark(keys: Sequence[str]) -> list[bool]:
                # In the order of their digests: neighbours share a page, which is then written only once.
                order = _by_digest(tenant, consumer, keys)
                answer = batch.run((Mark(tenant, consumer, [keys[at] for at in order], window_us),))[0]
                firsts = [False] * len(keys)
                for at, first in zip(order, answer.firsts, strict=True):
                    firsts[at] = first
                return firsts

            yield mark
            if batch.wrote:
                store._seen.mark_counts.forget()
                connection.execute("UPDATE semel_clock SET last_us = ?, offset_us = ?", (now, offset_us))
                store._execute(connection, "COMMIT")
        except sqlite3.Error as error:
            raise to_store_error(error, store.path) from error
        finally:
            _roll_back(connection)


def _by_digest(tenant: str, consumer: str, keys: Sequence[str]) -> list[int]:
    """Return the positions of the keys, sorted by their place in the table."""
    digests = digests_of(tenant, consumer, keys)
    return sorted(range(len(keys)), key=digests.__getitem__)
