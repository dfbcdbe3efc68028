"""The schema: numbered migrations, each applied once, and the connection that runs them."""

import re
import sqlite3
from collections.abc import Iterator
from importlib.resources import files

from semel.errors import StoreRefused
from semel.stores.sqlite.probe import ADOPT_HINT, APPLICATION_ID, Kind

__all__ = ["VERSION", "migrate", "migrations", "schema_sql"]

VERSION = 2
"""The last migration that this semel knows."""
SQLITE_OLDEST = (3, 35, 0)
"""The first SQLite that answers an INSERT with RETURNING."""


def migrations() -> dict[int, str]:
    """The text of every migration by its number."""
    found: dict[int, str] = {}
    for file in (files("semel.stores.sqlite") / "migrations").iterdir():
        match = re.fullmatch(r"(\d{4})_\w+\.sql", file.name)
        if match:
            found[int(match[1])] = file.read_text(encoding="utf-8")
    return dict(sorted(found.items()))


def schema_sql() -> str:
    """All migrations as one script, for those who apply schemas by hand."""
    return "\n".join(f"BEGIN;\n{text}COMMIT;\n" for text in migrations().values())


def statements(script: str) -> Iterator[str]:
    """The statements of a script one by one, since `executescript` would commit first."""
    gathered = ""
    for line in script.splitlines(keepends=True):
        gathered += line
        if sqlite3.complete_statement(gathered):
            yield gathered
            gathered = ""


def check_library() -> None:
    """Refuse an SQLite that is too old for the statements used here."""
    if sqlite3.sqlite_version_info < SQLITE_OLDEST:
        wanted = ".".join(map(str, SQLITE_OLDEST[:2]))
        raise StoreRefused(
            f"SQLite {sqlite3.sqlite_version} is too old; Python must be linked with {wanted} or newer"
        )


def version_of(connection: sqlite3.Connection) -> int:
    """The schema's version; 0: there is none yet."""
    if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'semel_meta'").fetchone():
        return 0
    version: int = connection.execute(
        "SELECT value FROM semel_meta WHERE name = 'schema_version'"
    ).fetchone()[0]
    return version


def migrate(connection: sqlite3.Connection, path: str, kind: Kind, *, adopt: bool) -> None:
    """Bring the schema to `VERSION`, inside the transaction that the caller holds.

    Under the write lock all is looked at again: another process may have been here since.
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
