"""Where processed keys are read from: a table, Redis keys, or a file of JSON lines. Each can go on at a cursor."""

import re
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol
from urllib.parse import unquote, urlsplit

import msgspec

from semel.cli.output import NOT_FOUND, USAGE, CommandExit
from semel.errors import StoreUnavailable
from semel.observe.formatting import redact
from semel.runtime.extras import install_command

__all__ = ["ImportSource", "ProcessedKey", "source_for", "time_us_of"]

PAGE = 1000
"""How many keys are read, written and checked together."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}", re.ASCII)
_WILD = re.compile(r"[*?\[\\]")
SECONDS_MAX, MILLIS_MAX, MICROS_MAX = 10**11, 10**14, 10**17
"""A number of seconds since 1970 is below the first until the year 5138; and so on."""


class ProcessedKey(NamedTuple):
    """A key that was processed."""

    key: str
    time_us: int | None
    """When, in microseconds since 1970; `None`: not known."""
    rest_us: int | None = None
    """How much longer the source would remember it; `None`: not known."""


class ImportSource(Protocol):
    """A place with processed keys."""

    name: str
    """Identifies the source and what is read from it; never contains a password."""

    def count(self) -> int | None:
        """Return how many keys there are, or `None` if only reading can tell."""

    def pages(self, cursor: Any) -> Iterator[tuple[list[ProcessedKey], Any]]:
        """Yield keys, a page at a time, each with the cursor after it. `None`: from the beginning."""

    def close(self) -> None:
        """Close the connection."""


def time_us_of(value: Any) -> int | None:
    """Return a stored time in microseconds: a date with time (UTC unless it says), or a number since 1970.

    Raises `ValueError` for anything else.
    """
    if value is None:
        return None
    if isinstance(value, str):
        text = value.strip()
        value = float(text) if re.fullmatch(r"-?[0-9.]+", text) else datetime.fromisoformat(text)
    if isinstance(value, datetime):
        return round((value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp() * 1e6)
    number = float(value)
    for bound, factor in ((SECONDS_MAX, 1e6), (MILLIS_MAX, 1e3), (MICROS_MAX, 1.0)):
        if abs(number) < bound:
            return round(number * factor)
    return round(number / 1e3)


def source_for(url: str, *, table: str, key: str, time: str | None, pattern: str | None) -> ImportSource:
    """Return the source for a URL or a file. Raises `CommandExit` with what is missing."""
    for name in (table, key, time):
        if name and not _NAME.fullmatch(name):
            raise CommandExit(
                f"{name!r} is not a name of a table or column; use letters, digits and _", USAGE
            )
    scheme = url.partition(":")[0]
    if scheme in ("postgresql", "postgres"):
        return PostgresTable(url, table, key, time)
    if scheme == "sqlite":
        return SqliteTable(url, table, key, time)
    if scheme in ("redis", "rediss", "valkey", "valkeys"):
        if not pattern:
            raise CommandExit("say which keys of Redis to read, such as --pattern 'processed:*'", USAGE)
        return RedisKeys(url, pattern)
    path = Path(url)
    if not path.is_file():
        raise CommandExit(f"{url} is neither a file nor a URL of PostgreSQL, SQLite or Redis", NOT_FOUND)
    return JsonLines(path, key, time)


class KeyedTable(ABC):
    """A table, read in the order of its keys. The key is compared and sorted as its own type, so its index is used."""

    mark: ClassVar[str]
    """How a statement names its parameter."""
    cast: ClassVar[str] = ""
    """Turns a key into a text that is compared as the key's own type again."""

    def __init__(self, place: str, table: str, key: str, time: str | None) -> None:
        self.name: str = f"{place}?table={table}&key={key}&time={time or ''}"
        self._table, self._key = f'"{table}"', f'"{key}"'
        self._time = f'max("{time}")' if time else "NULL"

    def count(self) -> int | None:
        """Count the keys."""
        return int(self._ask(f"SELECT count(DISTINCT {self._key}) FROM {self._table}")[0][0])  # noqa: S608 - checked

    def pages(self, cursor: Any) -> Iterator[tuple[list[ProcessedKey], Any]]:
        """Yield the keys after the cursor, which is a key."""
        while True:
            after = "" if cursor is None else f" AND {self._key} > {self.mark}"
            rows = self._ask(
                f"SELECT {self._key}{self.cast} AS semel_key, {self._time} FROM {self._table}"  # noqa: S608
                f" WHERE {self._key} IS NOT NULL{after} GROUP BY {self._key} ORDER BY {self._key} LIMIT {PAGE}",
                *([] if cursor is None else [cursor]),
            )
            if not rows:
                return
            cursor = rows[-1][0]
            yield _keys(rows), cursor

    @abstractmethod
    def _ask(self, query: str, *parameters: Any) -> list[Any]:
        """Return the rows. Raises `CommandExit` for a table or column that does not exist."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection."""


class SqliteTable(KeyedTable):
    """A table in an SQLite file."""

    mark = "?"

    def __init__(self, url: str, table: str, key: str, time: str | None) -> None:
        self._path = Path(unquote(urlsplit(url).path[1:]))
        if not self._path.is_file():
            raise CommandExit(f"{self._path} does not exist", NOT_FOUND)
        super().__init__(f"sqlite:///{self._path.resolve()}", table, key, time)

    def _ask(self, query: str, *parameters: Any) -> list[Any]:
        try:
            with closing(sqlite3.connect(f"file:{self._path}?mode=ro", uri=True)) as connection:
                return connection.execute(query, parameters).fetchall()
        except sqlite3.Error as error:
            raise CommandExit(f"{self._path}: {error}", USAGE) from error

    def close(self) -> None:
        """Nothing is open between two pages."""


class PostgresTable(KeyedTable):
    """A table in PostgreSQL."""

    mark = "%s"
    cast = "::text"

    def __init__(self, url: str, table: str, key: str, time: str | None) -> None:
        try:
            import psycopg
        except ImportError:
            raise CommandExit(f"PostgreSQL needs an extra: {install_command('postgres')}", USAGE) from None
        self._driver = psycopg
        super().__init__(redact(url), table, key, time)
        try:
            self._connection = psycopg.connect(url.partition("?")[0], autocommit=True)
        except psycopg.Error as error:
            raise StoreUnavailable(redact(f"{url}: {error}")) from error

    def _ask(self, query: str, *parameters: Any) -> list[Any]:
        try:
            return self._connection.execute(query, parameters).fetchall()
        except self._driver.OperationalError as error:
            raise StoreUnavailable(redact(str(error))) from error
        except self._driver.Error as error:
            raise CommandExit(redact(str(error)).strip(), USAGE) from error

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def _keys(rows: Sequence[tuple[Any, Any]]) -> list[ProcessedKey]:
    return [ProcessedKey(str(key), _time_or_exit(time)) for key, time in rows]


def _time_or_exit(value: Any) -> int | None:
    try:
        return time_us_of(value)
    except (TypeError, ValueError, OverflowError):
        raise CommandExit(
            f"{value!r} is not a time; name another column with --time, or none", USAGE
        ) from None


class RedisKeys:
    """Keys of Redis by a pattern. The part of the pattern before its first wildcard is not part of the event's key."""

    def __init__(self, url: str, pattern: str) -> None:
        try:
            import redis
        except ImportError:
            raise CommandExit(f"Redis needs an extra: {install_command('redis')}", USAGE) from None
        self._driver = redis
        self.name: str = f"{redact(url.partition('?')[0])}?pattern={pattern}"
        self._pattern = pattern
        self._prefix = _WILD.split(pattern, maxsplit=1)[0].encode()
        plain = url.partition("?")[0].replace("valkey", "redis", 1)
        self._client: Any = redis.Redis.from_url(plain)

    def count(self) -> int | None:
        """Redis counts only all keys of a database."""
        return None

    def pages(self, cursor: Any) -> Iterator[tuple[list[ProcessedKey], Any]]:
        at = int(cursor or 0)
        while True:
            try:
                at, names = self._client.scan(at, self._pattern, PAGE)
                pipeline = self._client.pipeline(transaction=False)
                for name in names:
                    pipeline.pttl(name)
                rests = pipeline.execute() if names else []
            except self._driver.RedisError as error:
                raise StoreUnavailable(redact(f"{self.name}: {error}")) from error
            found = [
                ProcessedKey(
                    _text(name.removeprefix(self._prefix)), None, None if rest == -1 else rest * 1000
                )
                for name, rest in zip(names, rests, strict=True)
                if rest != -2  # noqa: PLR2004 - it has expired meanwhile
            ]
            if found:
                yield found, at or None
            if not at:
                return

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


def _text(name: bytes) -> str:
    try:
        return name.decode()
    except UnicodeDecodeError:
        raise CommandExit(f"the key {name!r} is not UTF-8; give a pattern without it", USAGE) from None


class JsonLines:
    """A file with a JSON object in each line, such as `semel audit --keys` writes it."""

    def __init__(self, path: Path, key: str, time: str | None) -> None:
        self._path, self._key, self._time = path, key, time
        self.name: str = f"{path.resolve()}?key={key}&time={time or ''}"

    def count(self) -> int | None:
        """Only reading it tells."""
        return None

    def pages(self, cursor: Any) -> Iterator[tuple[list[ProcessedKey], Any]]:
        decode = msgspec.json.Decoder().decode
        with self._path.open("rb") as file:
            file.seek(int(cursor or 0))
            while True:
                page: list[ProcessedKey] = []
                while len(page) < PAGE and (line := file.readline()):
                    if line.strip():
                        page.append(self._read(decode, line))
                if not page:
                    return
                yield page, file.tell()

    def _read(self, decode: Any, line: bytes) -> ProcessedKey:
        try:
            found = decode(line)
            return ProcessedKey(
                str(found[self._key]), time_us_of(found.get(self._time) if self._time else None)
            )
        except (msgspec.MsgspecError, KeyError, TypeError, AttributeError, ValueError) as error:
            shown = line[:80].decode(errors="replace").strip()
            raise CommandExit(f"{self._path}: no {self._key} in {shown!r}: {error}", USAGE) from None

    def close(self) -> None:
        """Nothing is open after the last page."""
