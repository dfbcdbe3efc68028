"""Stored events as one relation of DuckDB: Parquet, CSV, JSON lines, or a table of SQLite or PostgreSQL."""

import csv
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from glob import glob, has_magic
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from semel.cli.output import NOT_FOUND, USAGE, CommandExit
from semel.errors import StoreUnavailable
from semel.observe.formatting import redact
from semel.runtime.extras import install_command

__all__ = ["EventColumns", "connect", "relation_of"]

ROWS_AT_ONCE = 10_000
_TABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_.]{0,127}", re.ASCII)
_READERS = {
    ".parquet": "read_parquet({files}, filename = true, union_by_name = true)",
    ".csv": "read_csv({files}, filename = true, union_by_name = true)",
    ".tsv": "read_csv({files}, filename = true, union_by_name = true)",
    ".jsonl": "read_json({files}, format = 'newline_delimited', filename = true, union_by_name = true)",
    ".ndjson": "read_json({files}, format = 'newline_delimited', filename = true, union_by_name = true)",
}


def connect(folder: Path, memory_bytes: int) -> Any:
    """Return a DuckDB connection that uses this much memory, and the folder for the rest."""
    try:
        import duckdb
    except ImportError:
        raise CommandExit(f"semel audit needs an extra: {install_command('audit')}", USAGE) from None
    connection = duckdb.connect(str(folder / "audit.duckdb"))
    connection.execute(f"SET memory_limit = '{memory_bytes // 2**20}MiB'")
    connection.execute(f"SET temp_directory = '{_quote(str(folder / 'spill'))}'")
    connection.execute("SET preserve_insertion_order = false")
    connection.execute("SET TimeZone = 'UTC'")
    return connection


class EventColumns:
    """The relation and its columns, checked."""

    def __init__(self, connection: Any, relation: str) -> None:
        self.relation = relation
        described = connection.execute(f"DESCRIBE SELECT * FROM {relation}").fetchall()  # noqa: S608 - made here
        self.types: dict[str, str] = {row[0]: row[1] for row in described}

    def name(self, column: str) -> str:
        """Return the quoted column. Raises `CommandExit` if there is none."""
        if column not in self.types:
            known = ", ".join(name for name in self.types if name != "filename")
            raise CommandExit(f"there is no column {column!r}; there are {known}", USAGE)
        return '"' + column.replace('"', '""') + '"'

    def time_us(self, column: str) -> str:
        """Return the expression for a time in microseconds: a timestamp, a text with one, or a number since 1970."""
        name, kind = self.name(column), self.types[column]
        if kind.startswith(("TIMESTAMP", "DATE")):
            return f"epoch_us({name}::TIMESTAMPTZ)"
        number = f"TRY_CAST({name} AS DOUBLE)"
        since = (
            f"CASE WHEN abs({number}) < 1e11 THEN {number} * 1e6 WHEN abs({number}) < 1e14 THEN {number} * 1e3"
            f" WHEN abs({number}) < 1e17 THEN {number} ELSE {number} / 1e3 END"
        )
        text = f"epoch_us(TRY_CAST({name}::VARCHAR AS TIMESTAMPTZ))"
        return f"CASE WHEN {number} IS NULL THEN {text} ELSE CAST({since} AS BIGINT) END"


def relation_of(places: list[str], table: str, folder: Path) -> str:
    """Return the relation of files or of one table. Raises `CommandExit`."""
    if len(places) == 1 and places[0].partition(":")[0] in ("postgresql", "postgres", "sqlite"):
        if not _TABLE.fullmatch(table):
            raise CommandExit(f"{table!r} is not a name of a table; use letters, digits and _", USAGE)
        copy = folder / "table.csv"
        _copy_table(places[0], table, copy)
        shown = _quote(f"{redact(places[0]).partition('?')[0]} {table}")
        rows = f"read_csv('{_quote(str(copy))}', header = true, all_varchar = true)"
        return f"(SELECT *, '{shown}' AS filename FROM {rows})"  # noqa: S608 - quoted
    files: list[str] = []
    for place in places:
        found = sorted(glob(place, recursive=True)) if has_magic(place) else [place]  # noqa: PTH207 - it may be absolute
        files += [each for each in found if Path(each).is_file()]
        if not found or not Path(found[0]).is_file():
            raise CommandExit(f"{place} names no file", NOT_FOUND)
    kinds = {_kind(each) for each in files}
    if len(kinds) > 1:
        raise CommandExit(
            f"the files are of different kinds ({', '.join(sorted(kinds))}); audit one at a time", USAGE
        )
    (kind,) = kinds
    if kind not in _READERS:
        raise CommandExit(
            f"{kind or files[0]} is not known; audit reads {', '.join(_READERS)} and tables", USAGE
        )
    return _READERS[kind].format(files="[" + ", ".join(f"'{_quote(each)}'" for each in files) + "]")


def _kind(file: str) -> str:
    return Path(file.removesuffix(".gz")).suffix.lower()


def _quote(text: str) -> str:
    return text.replace("'", "''")


def _copy_table(url: str, table: str, copy: Path) -> None:
    """Copy a table into a file, a few rows at a time."""
    (_copy_sqlite if url.startswith("sqlite") else _copy_postgres)(url, table, copy)


def _copy_sqlite(url: str, table: str, copy: Path) -> None:
    path = Path(unquote(urlsplit(url).path[1:]))
    if not path.is_file():
        raise CommandExit(f"{path} does not exist", NOT_FOUND)
    try:
        with (
            closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection,
            copy.open("w", newline="", encoding="utf-8") as file,
        ):
            cursor = connection.execute(f'SELECT * FROM "{table}"')  # noqa: S608 - checked
            written = csv.writer(file)
            written.writerow([column[0] for column in cursor.description])
            while rows := cursor.fetchmany(ROWS_AT_ONCE):
                written.writerows(rows)
    except sqlite3.Error as error:
        raise CommandExit(f"{path}: {error}", USAGE) from error


def _copy_postgres(url: str, table: str, copy: Path) -> None:
    try:
        import psycopg
    except ImportError:
        raise CommandExit(f"PostgreSQL needs an extra: {install_command('postgres')}", USAGE) from None
    name = ".".join(f'"{part}"' for part in table.split("."))
    statement: Callable[..., Any] = psycopg.sql.SQL
    try:
        with (
            psycopg.connect(url.partition("?")[0]) as connection,
            connection.cursor().copy(
                statement(f"COPY (SELECT * FROM {name}) TO STDOUT (FORMAT csv, HEADER)")  # noqa: S608
            ) as rows,
            copy.open("wb") as file,
        ):
            for block in rows:
                file.write(block)
    except psycopg.OperationalError as error:
        raise StoreUnavailable(redact(str(error))) from error
    except psycopg.Error as error:
        raise CommandExit(redact(str(error)).strip(), USAGE) from error
