"""The operating system's locks on an SQLite file: which process holds one, and whether this process holds its own."""

import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from semel.errors import StoreRefused

__all__ = [
    "RESERVED_BYTE",
    "SHARED_BYTE",
    "WAL_WRITE_BYTE",
    "SystemLock",
    "holder_of_lock",
    "holds_shared_lock",
    "lock_holders",
    "parse_locks",
    "refuse_inherited",
]

WAL_WRITE_BYTE = 120
"""The byte of the `-shm` file that a writer locks while the database is in WAL mode."""
RESERVED_BYTE = 0x40000001
"""The byte of the database file that a writer locks otherwise."""
SHARED_BYTE = 0x40000002
"""The first byte of the range that every user of the database file locks."""
_LOCK = re.compile(r"POSIX +\S+ +(READ|WRITE) +(\d+) +[0-9a-f]+:[0-9a-f]+:(\d+) +(\d+) +(\d+|EOF)")
_TO_THE_END = 2**63
_READS = 5
"""How often the list is read. It comes in pieces: while other processes lock and unlock, one read may miss a lock."""


class SystemLock(NamedTuple):
    """One POSIX lock that is held."""

    kind: str
    """`READ` or `WRITE`."""
    pid: int
    inode: int
    first: int
    last: int


def parse_locks(text: str) -> Iterator[SystemLock]:
    """Yield the held locks. `text`: as in /proc/locks."""
    for line in text.splitlines():
        match = _LOCK.search(line)
        if match is not None and "->" not in line:  # an arrow: the process waits for the lock
            last = _TO_THE_END if match[5] == "EOF" else int(match[5])
            yield SystemLock(match[1], int(match[2]), int(match[3]), int(match[4]), last)


def lock_holders(text: str, inodes: dict[int, int]) -> Iterable[int]:
    """Yield the processes that hold a write lock on the given byte of these files. `text`: as in /proc/locks."""
    for lock in parse_locks(text):
        if lock.kind == "WRITE" and lock.inode in inodes and lock.first <= inodes[lock.inode] <= lock.last:
            yield lock.pid


def holder_of_lock(path: str) -> str:
    """Return which process holds the write lock, as ` (process 123)`; empty if the system does not report it."""
    try:
        text = _read_locks()
        inodes = {Path(path).stat().st_ino: RESERVED_BYTE}
        if Path(path + "-shm").exists():
            inodes[Path(path + "-shm").stat().st_ino] = WAL_WRITE_BYTE
    except OSError:
        return ""
    pids = sorted(set(lock_holders(text, inodes)))
    return f" (process {', '.join(map(str, pids))})" if pids else ""


def _read_locks() -> str:
    return Path("/proc/locks").read_text(encoding="ascii", errors="replace")


# --- forks ---
# SQLite counts in memory which locks its process holds. A forked child inherits the count, but not the locks. While
# the child has an inherited connection of the parent, SQLite takes no lock here, and reports that it has one. If
# another thread of the parent was inside SQLite, the child inherits locked mutexes, and waits for them forever.

_OPEN_AT_FORK: dict[tuple[int, int], set[int]] = {}
"""The descriptors that were open when this process was forked, by the device and inode of their file."""


def refuse_inherited(path: str) -> None:
    """Raise `StoreRefused` if a connection to the file was inherited in a fork: SQLite cannot lock the file here.

    Asks only the operating system. A lock of this process on the file shows that it opened the file again since.
    """
    if not _OPEN_AT_FORK:
        return
    try:
        found = Path(path).stat()
    except OSError:
        return
    file = (found.st_dev, found.st_ino)
    still_open = any(_file_of(descriptor) == file for descriptor in _OPEN_AT_FORK.get(file, ()))
    if still_open and not holds_shared_lock(found.st_ino):
        raise StoreRefused(
            f"this process was forked while a connection to {path} was open, so SQLite cannot lock the file here;"
            " close your own connections before a fork, or start the process by spawn instead"
        )


def holds_shared_lock(inode: int) -> bool:
    """Whether this process holds the lock that every user of the file takes. `False` if the system lists no locks."""
    for _ in range(_READS):
        try:
            text = _read_locks()
        except OSError:
            return False
        for lock in parse_locks(text):
            if lock.pid == os.getpid() and lock.inode == inode and lock.first <= SHARED_BYTE <= lock.last:
                return True
    return False


def _file_of(descriptor: int) -> tuple[int, int] | None:
    """Return the device and inode of a regular file, else `None`."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return (found.st_dev, found.st_ino) if stat.S_ISREG(found.st_mode) else None


def _note_open_files() -> None:
    """Record the open files. Runs in a forked child, where semel's own connections are closed already."""
    _OPEN_AT_FORK.clear()
    for folder in ("/proc/self/fd", "/dev/fd"):
        try:
            descriptors = [int(name) for name in os.listdir(folder)]  # noqa: PTH208 - names are numbers, not paths
        except OSError:
            continue
        for descriptor in descriptors:
            if (file := _file_of(descriptor)) is not None:
                _OPEN_AT_FORK.setdefault(file, set()).add(descriptor)
        return


os.register_at_fork(after_in_child=_note_open_files)
