"""Migrations and start checks of a database, before it is used for records."""

import re
from functools import lru_cache
from importlib.resources import files

from msgspec import Struct
from msgspec.structs import replace

from semel.errors import PolicyInvalid, StoreRefused
from semel.stores.postgres.batch import SendCalls, Talk
from semel.stores.postgres.calendar import ALARM_US

__all__ = [
    "SCHEMA",
    "VERSION",
    "channel_of",
    "check_schema_name",
    "migrations",
    "outbox_channel_of",
    "schema_sql",
    "statements",
]

_BLOCK = re.compile(
    r"^-- (fragment|query): (\w+)\n(.*?)(?=^-- (?:fragment|query): |\Z)", re.MULTILINE | re.DOTALL
)
_FRAGMENT = re.compile(r"\{(\w+)\}")
_ONLY = re.compile(r"\{(plain|timed) ([^{}]*)\}")
STATEMENT_FILES = ("queries.sql", "single.sql")
UNWAITED = "unwaited"
"""The fragment that lets a claim be answered before its commit is on disk; empty unless the user chose that."""
TABLES = {"plain": "records", "timed": "timed_records"}
"""The tables of records: one for all, and one in partitions by the time inside their ids."""
_COMMENT = re.compile(r"(?:^|\s+)--[^\n']*$", re.MULTILINE)
_CHANNEL_CHARS_MAX = 57
_OUTBOX_CHANNEL_CHARS_MAX = 50


def channel_of(schema: str) -> str:
    """Return the notification channel for changes in a schema; a long name is cut to the server's limit."""
    return f"semel_{schema[:_CHANNEL_CHARS_MAX]}"


def outbox_channel_of(schema: str) -> str:
    """Return the notification channel for new messages in a schema's outbox."""
    return f"semel_outbox_{schema[:_OUTBOX_CHANNEL_CHARS_MAX]}"


@lru_cache(maxsize=64)
def statements(schema: str, *, durable_claims: bool = True) -> dict[str, str]:
    """Return the text of each statement. `schema` must have passed `check_schema_name`.

    Without `durable_claims` the statements for plain claims do not wait until their commit is on disk.
    """
    found: dict[str, str] = {}
    for file in STATEMENT_FILES:
        found |= _read_statements(file, schema, durable_claims=durable_claims)
    return found | {"begin": "BEGIN", "commit": "COMMIT", "rollback": "ROLLBACK"}


def _read_statements(file: str, schema: str, *, durable_claims: bool) -> dict[str, str]:
    """Return the statements of one file, with their fragments filled in."""
    source = (files("semel.stores.postgres") / file).read_text(encoding="utf-8")
    fragments = {"schema": f'"{schema}"', "name": schema, "channel": channel_of(schema)}
    queries: dict[str, str] = {}
    for kind, name, text in _BLOCK.findall(source):
        filled = _FRAGMENT.sub(
            lambda match: fragments.get(match[1], match[0]), _COMMENT.sub("", text).strip()
        )
        if kind == "fragment":
            fragments[name] = "" if name == UNWAITED and durable_claims else filled
        else:
            queries[name] = _for_table(filled, schema, "plain")
            if "{records}" in filled:
                queries[f"{name}_timed"] = _for_table(filled, schema, "timed")
    return queries


def _for_table(text: str, schema: str, kind: str) -> str:
    """Return the statement for one of the two tables."""
    chosen = _ONLY.sub(lambda match: match[2] if match[1] == kind else "", text)
    return chosen.replace("{records}", f'"{schema}".{TABLES[kind]}')


SCHEMA = "semel"
VERSION = 9
"""The last migration that this semel knows."""
OLDEST = 130000
_NAME = re.compile(r"[a-z_][a-z0-9_]{0,62}")


class SchemaState(Struct, frozen=True):
    """The results of the start checks."""

    durable: bool
    weaknesses: tuple[str, ...] = ()
    """What weakens the guarantee, as messages for operators."""
    identity: str = ""
    """The inbox compares it to check that the caller's connection leads to the same table."""
    clock_us: int = 0
    """The time of the server's clock, which is the store's clock."""


def check_schema_name(name: str) -> str:
    """Return the name if it can be used in a statement without escapes. Raises `PolicyInvalid`."""
    if not _NAME.fullmatch(name) or name.startswith("pg_"):
        raise PolicyInvalid(
            f"schema is {name!r}; use lower case letters, digits and _, at most 63, not beginning with a digit"
        )
    return name


def migrations() -> dict[int, str]:
    """Return the text of every migration by its number, with `{schema}` in place of the schema's name."""
    found: dict[int, str] = {}
    for file in (files("semel.stores.postgres") / "migrations").iterdir():
        match = re.fullmatch(r"(\d{4})_\w+\.sql", file.name)
        if match:
            found[int(match[1])] = file.read_text(encoding="utf-8")
    return dict(sorted(found.items()))


def script(number: int, schema: str) -> str:
    """Return one migration for one schema."""
    text = migrations()[number].replace("{schema}", f'"{schema}"')
    return text.replace("{outbox_channel}", outbox_channel_of(schema))


def schema_sql(schema: str = SCHEMA) -> str:
    """Return all migrations as one script, to apply the schema by hand."""
    check_schema_name(schema)
    parts = [script(number, schema) for number in migrations()]
    return "\n".join(
        [f'CREATE SCHEMA IF NOT EXISTS "{schema}";\n', *(f"BEGIN;\n{part}COMMIT;\n" for part in parts)]
    )


def prepare(name: str, schema: str) -> Talk[SchemaState]:
    """Check the server and bring the schema to `VERSION`. Raises `StoreRefused` if the protocol cannot hold."""
    found = yield from _check(name)
    ((_, made),) = yield SendCalls("has_schema")
    version = 0
    if made:
        ((version,),) = yield SendCalls("version")
    if version != VERSION:
        yield from _migrate(name, schema)
    ((ahead_us,),) = yield SendCalls("ahead")
    if ahead_us is not None and ahead_us < ALARM_US:
        few = f"partitions reach only {ahead_us / 86400e6:.1f} days ahead: run semel purge as their owner"
        found = replace(found, weaknesses=(*found.weaknesses, few))
    ((identity,),) = yield SendCalls("identity")
    return replace(found, identity=identity)


def has_tables() -> Talk[bool]:
    """Whether semel's tables exist."""
    ((_, made),) = yield SendCalls("has_schema")
    return bool(made)


def _check(name: str) -> Talk[SchemaState]:
    ((version, recovering, read_only, encoding, commit, fsync, full_pages, clock_us),) = yield SendCalls(
        "server"
    )
    if version < OLDEST:
        raise StoreRefused(f"{name} is PostgreSQL {version // 10000}; {OLDEST // 10000} or newer is needed")
    if recovering:
        raise StoreRefused(f"{name} is a replica; connect to the primary, where records are decided")
    if read_only == "on":
        raise StoreRefused(f"{name} is read-only for this role; grant it the right to write")
    if encoding != "UTF8":
        raise StoreRefused(f"{name} has the encoding {encoding}; keys need a database in UTF8")
    weak = []
    if commit == "off":
        weak.append("synchronous_commit is off: a crash of the server may lose the last answered writes")
    if fsync == "off":
        weak.append("fsync is off: a crash of its computer may destroy the database")
    if full_pages == "off":
        weak.append("full_page_writes is off: a crash of its computer may damage the database")
    return SchemaState(durable=not weak, weaknesses=tuple(weak), clock_us=clock_us)


def _migrate(name: str, schema: str) -> Talk[None]:
    """Apply the missing migrations. Checks again under a lock: another process may have migrated since."""
    yield SendCalls("begin")
    yield SendCalls("migration_lock")
    ((has_schema, made),) = yield SendCalls("has_schema")
    version = 0
    if made:
        ((version,),) = yield SendCalls("version")
    if version > VERSION:
        raise StoreRefused(
            f"{name} has schema version {version}, this semel knows {VERSION}; use a newer semel"
        )
    if not has_schema:
        yield SendCalls("create", script=f'CREATE SCHEMA "{schema}"')
    for number in migrations():
        if number > version:
            yield SendCalls("migration", script=script(number, schema))
    yield SendCalls("commit")
