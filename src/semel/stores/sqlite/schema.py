"""Files: their creation, the checks before one is used, and the schema in numbered migrations, each applied once."""

import os
import re
import sqlite3
import stat
import time
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Literal, TypeAlias
from urllib.parse import quote

from semel.errors import StoreRefused
from semel.stores.sqlite.errors import is_busy, is_no_database

__all__ = [
    "ADOPT_HINT",
    "APPLICATION_ID",
    "VERSION",
    "Kind",
    "create_private",
    "inspect",
    "migrate",
    "migrations",
    "network_mount",
    "schema_sql",
    "uri",
]

APPLICATION_ID = 0x73656D6C
"""`seml`: marks a file as created by semel."""
ADOPT_HINT = "add ?adopt=true to its URL (in Python: adopt=True) to put semel's tables beside its own"
_MOUNT_POINT = 4
"""The index of the mount point among the fields of a mountinfo line."""
_TRIES = 20
_TRY_AGAIN_S = 0.05
"""Pause between tries. A file that another process is just creating looks damaged or foreign for a moment."""

Kind: TypeAlias = Literal["new", "own", "guest"]
"""`new`: to be created. `own`: created by semel. `guest`: another application's, with semel's tables beside its own."""

NETWORK_KINDS = frozenset(
    ("nfs", "nfs3", "nfs4", "cifs", "smb2", "smb3", "smbfs", "9p", "afs", "ceph", "glusterfs", "lustre", "gfs2",
     "ocfs2", "ncpfs", "coda", "beegfs", "orangefs", "fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.s3fs",
     "fuse.rclone", "fuse.davfs", "davfs", "fuse.gcsfuse", "fuse.goofys", "fuse.juicefs")
)  # fmt: skip


def uri(path: str, **options: str | int) -> str:
    """Return the path as an SQLite URI."""
    query = "&".join(f"{name}={value}" for name, value in options.items())
    return f"file:{quote(path)}?{query}"


def inspect(path: str, *, adopt: bool, version_known: int) -> Kind:
    """Return the kind of the file, without changing it. Raises `StoreRefused` if it must not be used.

    Only SQLite opens the file. If this process opened and closed it in any other way, the system would drop every
    lock that the process holds on it, and another process would think that it is the last user.
    """
    check_place(path)
    for remaining in reversed(range(_TRIES)):
        before = _state_of_files(path)
        try:
            return _inspect(path, adopt=adopt, version_known=version_known)
        except _Unclear as unclear:
            if not remaining or not _being_written(path, before):
                raise StoreRefused(str(unclear)) from unclear.__cause__
            time.sleep(_TRY_AGAIN_S)
    raise AssertionError("the last try returns or raises")


class _Unclear(Exception):
    """The file is not usable at the moment; another process may be changing that."""


def check_place(path: str) -> None:
    """Raise `StoreRefused` if no database file can exist or be created there. Opens nothing."""
    folder = Path(path).parent
    if not folder.is_dir():
        raise StoreRefused(f"the folder {folder} does not exist; create it first")
    if Path(path).is_dir():
        raise StoreRefused(f"{path} is a folder; name a file in it, such as {Path(path) / 'semel.db'}")
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
    """Return the kind of network file system that holds `path`; `None` for a local one.

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


def _state_of_files(path: str) -> list[tuple[int, int] | None]:
    """Return the size and the modification time of the database, its rollback journal and its log."""
    states: list[tuple[int, int] | None] = []
    for suffix in ("", "-journal", "-wal"):
        try:
            stat = Path(path + suffix).stat()
        except OSError:
            states.append(None)
        else:
            states.append((stat.st_size, stat.st_mtime_ns))
    return states


def _being_written(path: str, before: list[tuple[int, int] | None]) -> bool:
    """Whether another process has written since `before`, or has started to write."""
    now = _state_of_files(path)
    return now != before or any(state is not None for state in now[1:])


def _inspect(path: str, *, adopt: bool, version_known: int) -> Kind:
    try:
        if not Path(path).stat().st_size:
            return "new"
    except FileNotFoundError:
        return "new"
    try:
        application_id, tables, version = _look(path)
    except sqlite3.DatabaseError as error:
        raise _unclear(path, error) from error
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
    raise _Unclear(f"{path} is a database of another application; name another file, or {ADOPT_HINT}")


def _unclear(path: str, error: sqlite3.DatabaseError) -> _Unclear:
    if is_busy(error):
        return _Unclear(f"{path} is locked by another program: {error}")
    if is_no_database(error):
        return _Unclear(f"{path} is not an SQLite database; name another file")
    return _Unclear(f"{path} is damaged or cut short: {error}; restore a backup or name another file")


def _look(path: str) -> tuple[int, list[str], int | None]:
    """Return the application id, the tables and semel's schema version.

    `immutable` leaves no trace, but does not read a log, and cannot roll back what a killed writer left unfinished.
    """
    if Path(path + "-wal").exists():
        opened = sqlite3.connect(uri(path, mode="ro"), uri=True)
    elif Path(path + "-journal").exists():
        opened = sqlite3.connect(uri(path, mode="rw"), uri=True)
    else:
        opened = sqlite3.connect(uri(path, immutable=1), uri=True)
    try:
        (application_id,) = opened.execute("PRAGMA application_id").fetchone()
        tables = [name for (name,) in opened.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        if "semel_meta" not in tables:
            return application_id, tables, None
        row = opened.execute("SELECT value FROM semel_meta WHERE name = 'schema_version'").fetchone()
        if row is None or type(row[0]) is not int:
            raise sqlite3.DatabaseError("semel_meta has no valid schema_version")
        return application_id, tables, row[0]
    finally:
        opened.close()


VERSION = 4
"""The last migration that this semel knows."""
SQLITE_OLDEST = (3, 35, 0)
"""The first SQLite that has INSERT ... RETURNING."""


def migrations() -> dict[int, str]:
    """Return the text of every migration by its number."""
    found: dict[int, str] = {}
    for file in (files("semel.stores.sqlite") / "migrations").iterdir():
        match = re.fullmatch(r"(\d{4})_\w+\.sql", file.name)
        if match:
            found[int(match[1])] = file.read_text(encoding="utf-8")
    return dict(sorted(found.items()))


def schema_sql() -> str:
    """Return all migrations as one script, to apply the schema by hand."""
    return "\n".join(f"BEGIN;\n{text}COMMIT;\n" for text in migrations().values())


def statements(script: str) -> Iterator[str]:
    """Yield the statements of a script one by one, since `executescript` would commit first."""
    gathered = ""
    for line in script.splitlines(keepends=True):
        gathered += line
        if sqlite3.complete_statement(gathered):
            yield gathered
            gathered = ""


def check_library() -> None:
    """Raise `StoreRefused` if SQLite is too old for the statements used here."""
    if sqlite3.sqlite_version_info < SQLITE_OLDEST:
        wanted = ".".join(map(str, SQLITE_OLDEST[:2]))
        raise StoreRefused(
            f"SQLite {sqlite3.sqlite_version} is too old; Python must be linked with {wanted} or newer"
        )


def version_of(connection: sqlite3.Connection) -> int:
    """Return the schema's version; 0: there is none yet."""
    if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'semel_meta'").fetchone():
        return 0
    version: int = connection.execute(
        "SELECT value FROM semel_meta WHERE name = 'schema_version'"
    ).fetchone()[0]
    return version


def migrate(connection: sqlite3.Connection, path: str, kind: Kind, *, adopt: bool) -> None:
    """Bring the schema to `VERSION`, inside the transaction that the caller holds.

    Checks everything again under the write lock: another process may have changed the file since.
    """
    version = version_of(connection)
    if version > VERSION:
        raise StoreRefused(
            f"{path} has schema version {version}, this semel knows {VERSION}; use a newer semel"
        )
    if not version:
        others = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if others and not adopt:
            raise StoreRefused(f"{path} is a database of another application; {ADOPT_HINT}")
        if kind == "new" and not others:
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    for number, script in migrations().items():
        if number > version:
            for statement in statements(script):
                connection.execute(statement)


def create_private(path: str | os.PathLike[str]) -> bool:
    """Create the file for its owner alone, if there is none; SQLite gives its log the same mode. Returns if it did.

    The file is created without being opened: closing it here would drop the locks that another thread just took on it.
    """
    try:
        os.mknod(path, stat.S_IFREG | 0o600)
    except OSError:  # the file exists, or SQLite will report the error
        return False
    return True
