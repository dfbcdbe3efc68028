"""Translate SQLite's errors into semel's."""

import sqlite3

from semel.errors import StoreError, StoreFull, StoreRefused, StoreUnavailable

__all__ = ["is_busy", "is_full", "is_no_database", "to_store_error"]

_PRIMARY = 0xFF
_SHM_SIZE = 4874
"""SQLITE_IOERR_SHMSIZE: the disk was full when SQLite extended the shared memory file."""
_DB_MOVED = 1032


def is_busy(error: sqlite3.Error) -> bool:
    """Whether another connection holds the lock; a retry may help."""
    return _code(error) & _PRIMARY in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def is_no_database(error: sqlite3.Error) -> bool:
    """Whether the file is not an SQLite database."""
    return _code(error) & _PRIMARY == sqlite3.SQLITE_NOTADB


def is_full(error: sqlite3.Error) -> bool:
    """Whether the disk is full, or the database has reached its largest size."""
    return _code(error) & _PRIMARY == sqlite3.SQLITE_FULL or _code(error) == _SHM_SIZE


def to_store_error(error: sqlite3.Error, path: str) -> StoreError:
    """Return the error to raise instead of the driver's."""
    primary = _code(error) & _PRIMARY
    if is_full(error):
        return StoreFull(
            f"no room to write to {path}: {error}; free some disk space. Stored keys are still answered"
        )
    if primary in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return StoreRefused(
            f"{path} is damaged: {error}. Stop using it, keep a copy, and restore a backup"
            " or recover what can be read with the sqlite3 shell's .recover"
        )
    if _code(error) == _DB_MOVED:
        return StoreRefused(f"{path} was removed or replaced while it was open")
    if primary in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
        return StoreUnavailable(
            f"{path} cannot be written: {error}; check the rights of the file and its folder"
        )
    if primary == sqlite3.SQLITE_CANTOPEN:
        return StoreUnavailable(f"{path} cannot be opened: {error}; check that the file and its folder exist")
    return StoreUnavailable(f"{path} gave no answer: {error}")


def _code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", None) or 0
