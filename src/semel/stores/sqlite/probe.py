"""Look at a file before it is opened as a store, without touching it."""

import os
import sqlite3
import struct
import time
from pathlib import Path
from typing import Literal, TypeAlias
from urllib.parse import quote

from semel.errors import StoreRefused
from semel.stores.sqlite.trouble import is_busy

__all__ = ["APPLICATION_ID", "Kind", "inspect", "network_mount", "uri"]

APPLICATION_ID = 0x73656D6C
"""`seml`: what marks a file as made by semel."""
_MAGIC = b"SQLite format 3\x00"
_HEADER_BYTES = 100
_MOUNT_POINT = 4
"""Which field of a line of mountinfo it is."""
_TRIES = 20
_TRY_AGAIN_S = 0.05
"""A file that another process is just creating looks damaged or foreign for a moment."""

Kind: TypeAlias = Literal["new", "own", "guest"]
"""`new`: to be made. `own`: made by semel. `guest`: another application's, semel's tables beside its own."""

NETWORK_KINDS = frozenset(
    ("nfs", "nfs3", "nfs4", "cifs", "smb2", "smb3", "smbfs", "9p", "afs", "ceph", "glusterfs", "lustre", "gfs2",
     "ocfs2", "ncpfs", "coda", "beegfs", "orangefs", "fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.s3fs",
     "fuse.rclone", "fuse.davfs", "davfs", "fuse.gcsfuse", "fuse.goofys", "fuse.juicefs")
)  # fmt: skip


def uri(path: str, **options: str | int) -> str:
    """The path as SQLite's URI."""
    query = "&".join(f"{name}={value}" for name, value in options.items())
    return f"file:{quote(path)}?{query}"


def inspect(path: str, *, adopt: bool, version_known: int) -> Kind:
    """Say what the file is. Raises `StoreRefused` where it must not be used; its bytes stay as they are."""
    _check_place(path)
    for remaining in reversed(range(_TRIES)):
        try:
            return _inspect(path, adopt=adopt, version_known=version_known)
        except _Unclear as unclear:
            if not remaining or not _being_written(path):
                raise StoreRefused(str(unclear)) from unclear.__cause__
            time.sleep(_TRY_AGAIN_S)
    raise AssertionError("the last try answers")


class _Unclear(Exception):
    """Not usable as it looks now; another process may be about to change that."""


def _check_place(path: str) -> None:
    folder = Path(path).parent
    if not folder.is_dir():
        raise StoreRefused(f"the folder {folder} does not exist; create it first")
    if Path(path).is_dir():
        raise StoreRefused(f"{path} is a folder; name a file in it")
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        mounts = ""
    kind = network_mount(mounts, os.path.realpath(path))
    if kind is not None:
        raise StoreRefused(
            f"{path} is on a network file system ({kind}), where SQLite's locks do not hold;"
            " use a local disk, or a store that is a server"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise StoreRefused(f"the folder {folder} cannot be written; SQLite keeps its log beside the file")
    if Path(path).exists() and not os.access(path, os.R_OK | os.W_OK):
        raise StoreRefused(f"{path} cannot be read and written; check its rights")


def network_mount(mountinfo: str, path: str) -> str | None:
    """The kind of network file system that `path` lies on, `None` for a local one.

    `mountinfo`: the text of /proc/self/mountinfo.
    """
    best, best_kind = "", ""
    for line in mountinfo.splitlines():
        fields, _, rest = line.partition(" - ")
        parts = fields.split(" ")
        if len(parts) <= _MOUNT_POINT or not rest:
            continue
        point = parts[_MOUNT_POINT].encode("latin-1", "replace").decode("unicode_escape", "replace")
        below = path == point or path.startswith(point.rstrip("/") + "/")
        if below and len(point) >= len(best):
            best, best_kind = point, rest.split(" ")[0]
    return best_kind if best_kind in NETWORK_KINDS else None


def _being_written(path: str) -> bool:
    return any(Path(path + suffix).exists() for suffix in ("-journal", "-wal"))


def _inspect(path: str, *, adopt: bool, version_known: int) -> Kind:
    try:
        with Path(path).open("rb") as file:
            header = file.read(_HEADER_BYTES)
    except FileNotFoundError:
        return "new"
    if not header:
        return "new"
    if len(header) < _HEADER_BYTES or not header.startswith(_MAGIC):
        raise _Unclear(f"{path} is not an SQLite database; name another file")
    _check_length(path, header)
    (application_id,) = struct.unpack_from(">I", header, 68)
    try:
        tables, version = _look(path)
    except sqlite3.DatabaseError as error:
        if is_busy(error):
            raise _Unclear(f"{path} is locked by another program: {error}") from error
        raise _Unclear(f"{path} is damaged: {error}; restore a backup or name another file") from error
    if version is not None:
        if version > version_known:
            raise StoreRefused(
                f"{path} has schema version {version}, this semel knows {version_known}; use a newer semel"
            )
        return "own" if application_id == APPLICATION_ID else "guest"
    if not tables:
        return "new"
    if adopt and application_id != APPLICATION_ID:
        return "guest"
    raise _Unclear(
        f"{path} is a database of another application; name another file,"
        " or open it with adopt=True to put semel's tables beside its own"
    )


def _check_length(path: str, header: bytes) -> None:
    """Whether the file is as long as its header says; a log beside it may hold the rest."""
    (page_bytes,) = struct.unpack_from(">H", header, 16)
    changes, pages = struct.unpack_from(">II", header, 24)
    (valid_for,) = struct.unpack_from(">I", header, 92)
    expected = pages * (65536 if page_bytes == 1 else page_bytes)
    if changes == valid_for and Path(path).stat().st_size < expected and not _has_log(path):
        raise _Unclear(f"{path} is damaged: it has been cut short; restore a backup or name another file")


def _has_log(path: str) -> bool:
    log = Path(path + "-wal")
    return log.exists() and log.stat().st_size > 0


def _look(path: str) -> tuple[list[str], int | None]:
    """The tables and semel's schema version. `immutable` leaves no trace, but does not see the log."""
    opened = sqlite3.connect(uri(path, mode="ro") if _has_log(path) else uri(path, immutable=1), uri=True)
    try:
        tables = [name for (name,) in opened.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        if "semel_meta" not in tables:
            return tables, None
        row = opened.execute("SELECT value FROM semel_meta WHERE name = 'schema_version'").fetchone()
        if row is None or type(row[0]) is not int:
            raise sqlite3.DatabaseError("semel_meta does not say which schema it is")
        return tables, row[0]
    finally:
        opened.close()
