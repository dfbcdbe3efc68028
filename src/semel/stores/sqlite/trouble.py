"""Say in semel's words what SQLite's errors mean, and who holds a lock."""

import re
import sqlite3
from collections.abc import Iterable
from pathlib import Path

from semel.errors import StoreError, StoreFull, StoreRefused, StoreUnavailable

__all__ = ["holder_of_lock", "is_busy", "is_full", "lock_holders", "translated"]

_PRIMARY = 0xFF
_SHM_SIZE = 4874
"""SQLITE_IOERR_SHMSIZE: the disk is full, met while growing the shared memory file."""
_DB_MOVED = 1032

WAL_WRITE_BYTE = 120
"""The byte of the `-shm` file that a writer locks while the database is in WAL mode."""
RESERVED_BYTE = 0x40000001
"""The byte of the database file that a writer locks otherwise."""
_LOCK = re.compile(r"POSIX +\S+ +WRITE +(\d+) +[0-9a-f]+:[0-9a-f]+:(\d+) +(\d+) +(\d+|EOF)")


def is_busy(error: sqlite3.Error) -> bool:
    """Another connection holds the lock; trying again may help."""
    return _code(error) & _PRIMARY in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def is_full(error: sqlite3.Error) -> bool:
    """There is no room on the disk, or the database has reached its largest size."""
    return _code(error) & _PRIMARY == sqlite3.SQLITE_FULL or _code(error) == _SHM_SIZE


def translated(error: sqlite3.Error, path: str) -> StoreError:
    """The error to raise instead of the driver's."""
    primary = _code(error) & _PRIMARY
    if is_full(error):
        return StoreFull(
            f"no room to write to {path}: {error}; free some disk space. What is stored still answers"
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


def holder_of_lock(path: str) -> str:
    """Who holds the write lock, as far as the system tells: ` (process 123)`, or nothing."""
    try:
        text = Path("/proc/locks").read_text(encoding="ascii", errors="replace")
        inodes = {Path(path).stat().st_ino: RESERVED_BYTE}
        if Path(path + "-shm").exists():
            inodes[Path(path + "-shm").stat().st_ino] = WAL_WRITE_BYTE
    except OSError:
        return ""
    pids = sorted(set(lock_holders(text, inodes)))
    return f" (process {', '.join(map(str, pids))})" if pids else ""


def lock_holders(locks: str, inodes: dict[int, int]) -> Iterable[int]:
    """The processes that hold a write lock on that byte of one of these files. `locks`: as in /proc/locks."""
    for line in locks.splitlines():
        if "->" in line:
            continue  # it waits for the lock, it does not hold it
        match = _LOCK.search(line)
        if match is None or int(match[2]) not in inodes:
            continue
        end = RESERVED_BYTE if match[4] == "EOF" else int(match[4])
        if int(match[3]) <= inodes[int(match[2])] <= end:
            yield int(match[1])


def _code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", None) or 0
