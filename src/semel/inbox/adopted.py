"""The statements of an inbox on an existing table of processed events: a row is a mark.

The table's own unique key decides which of two transactions is the first. It is checked before the first mark.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

from semel.client.items import ItemBuilder
from semel.connections import Row, Statement, Talk, code_of
from semel.connections.base import Dialect
from semel.errors import PolicyInvalid, StillRunning, UsageError
from semel.inbox.base import InboxStatements, Value
from semel.inbox.postgres import array
from semel.policy import InboxTable

__all__ = ["AdoptedTableStatements"]

LOCK_TIMEOUT = "55P03"
_POSTGRES_COLUMNS = """
SELECT attname::text, format_type(atttypid, atttypmod),
    (attnotnull AND NOT atthasdef AND attidentity = '' AND attgenerated = '')::int
FROM pg_attribute WHERE attrelid = to_regclass($1) AND attnum > 0 AND NOT attisdropped
"""
_POSTGRES_UNIQUE = """
SELECT string_agg(attname::text, ',') FROM pg_index
JOIN pg_attribute ON attrelid = indrelid AND attnum = ANY(indkey[0:indnkeyatts - 1])
WHERE indrelid = to_regclass($1) AND indisunique AND indisvalid AND indpred IS NULL AND indexprs IS NULL
GROUP BY indexrelid
"""
_POSTGRES_PATIENCE = """
WITH old AS MATERIALIZED (SELECT current_setting('lock_timeout') AS was)
SELECT was, set_config('lock_timeout', $1::text, true) FROM old
"""
"""Set the lock timeout of the transaction. Answers with the one before."""
_POSTGRES_FIRST = """
WITH given AS (SELECT k::{kind} AS k, n FROM unnest($1::text::text[]) WITH ORDINALITY AS u(k, n)),
made AS (
    INSERT INTO {table} ({names}) SELECT DISTINCT k{more} FROM given ORDER BY k
    ON CONFLICT ({names}) DO NOTHING RETURNING {event_id} AS k
)
SELECT min(n)::int FROM given JOIN made USING (k) GROUP BY k
"""


class AdoptedTableStatements(InboxStatements):
    """Inserts rows into the caller's own table, in the caller's transaction."""

    def __init__(self, table: InboxTable, dialect: Dialect, plan: ItemBuilder) -> None:
        super().__init__(plan)
        self._table = table
        self._dialect = dialect
        self._kind = ""
        """The type of the id's column, once the table is checked."""
        self._mine: set[str] = set()
        """The keys for which the last answer was `True`."""
        columns = table.columns
        if self.tenant and not columns.tenant:
            raise PolicyInvalid(
                f"the table {table.name} has no column for tenants, and this client has the tenant {self.tenant!r}:"
                " equal ids of two tenants would be taken for one event; name one: InboxColumns(tenant=...)"
            )
        self._scope: list[str] = [
            value
            for name, value in ((columns.tenant, self.tenant), (columns.consumer, self.consumer))
            if name
        ]

    def first_many(
        self, keys: Sequence[str], event_type: str, window_us: int, fingerprint: bytes | None = None
    ) -> Talk[list[bool]]:
        """Insert a row for each key, all or none. Waits for a transaction that has inserted one of them."""
        del event_type, window_us  # a row has neither
        if fingerprint is not None:
            raise UsageError(f"the table {self._table.name} keeps no fingerprints; leave it out")
        if not self._kind:
            yield from self._check()
        in_dialect = self._first_in_sqlite if self._dialect == "sqlite" else self._first_in_postgres
        firsts = yield from in_dialect(keys)
        for key, first in zip(keys, firsts, strict=True):
            (self._mine.add if first else self._mine.discard)(key)
        return firsts

    def _first_in_sqlite(self, keys: Sequence[str]) -> Talk[list[bool]]:
        names = self._table.columns.names
        marks = ", ".join("?" * len(names))
        listed = ", ".join(names)
        insert = (
            f"INSERT INTO {self._table.name} ({listed}) VALUES ({marks})"
            f" ON CONFLICT ({listed}) DO NOTHING RETURNING 1"
        )
        firsts: list[bool] = []
        for key in keys:
            firsts.append(bool((yield Statement(insert, (key, *self._scope)))))
        return firsts

    def _first_in_postgres(self, keys: Sequence[str]) -> Talk[list[bool]]:
        columns = self._table.columns
        more = "".join(f", ${number}::text" for number in range(2, 2 + len(self._scope)))
        insert = _POSTGRES_FIRST.format(
            kind=self._kind,
            table=self._table.name,
            names=", ".join(columns.names),
            more=more,
            event_id=columns.event_id,
        )
        # A savepoint, so that the caller's transaction stays usable after a timeout.
        yield Statement("SAVEPOINT semel_inbox")
        try:
            ((before, _),) = yield Statement(_POSTGRES_PATIENCE, (str(self.wait_ms),))
            rows = yield Statement(insert, (array(keys), *self._scope))
        except Exception as error:
            if code_of(error) is not None:
                yield Statement("ROLLBACK TO SAVEPOINT semel_inbox")
            if code_of(error) == LOCK_TIMEOUT:
                raise StillRunning(
                    f"another transaction has marked one of these keys, and is still open after {self.lock_wait_s:g} s"
                ) from error
            raise
        yield Statement(_POSTGRES_PATIENCE, (before,))
        yield Statement("RELEASE SAVEPOINT semel_inbox")
        new = {int(row[0]) for row in rows}
        return [place + 1 in new for place in range(len(keys))]

    def unmark(self, keys: Sequence[str]) -> Talk[None]:
        """Remove the rows that this inbox has written, and no others: a row does not say who wrote it."""
        for key in self._mine.intersection(keys):
            yield self._on(f"DELETE FROM {self._table.name}", key)

    def store(self, key: str, encoded: bytes) -> Talk[None]:
        """Refuse: there is no column for a value."""
        del encoded
        yield from ()
        raise UsageError(
            f"the table {self._table.name} keeps no values; store the value of {key!r} in your own tables"
        )

    def replay(self, key: str) -> Talk[Value | None]:
        """Return that there is a row, without a value."""
        if not self._kind:
            yield from self._check()
        rows = yield self._on(f"SELECT 1 FROM {self._table.name}", key)
        return Value(None) if rows else None

    def committed(self, key: str) -> bool:
        """Refuse: a row does not say which attempt wrote it."""
        self._refuse_committed(key)

    async def acommitted(self, key: str) -> bool:
        """The same for event loops."""
        self._refuse_committed(key)

    def _refuse_committed(self, key: str) -> NoReturn:
        raise UsageError(
            f"a row of {self._table.name} does not say which attempt wrote it; run the whole transaction again, and"
            f" first({key!r}) says whether it was committed"
        )

    def _on(self, statement: str, key: str) -> Statement:
        """Return a statement on the row of a key."""
        names = self._table.columns.names
        if self._dialect == "sqlite":
            parts = [f"{name} = ?" for name in names]
        else:
            casts = [f"::{self._kind}", *[""] * (len(names) - 1)]
            parts = [
                f"{name} = ${number}::text{cast}"
                for number, (name, cast) in enumerate(zip(names, casts, strict=True), 1)
            ]
        return Statement(f"{statement} WHERE {' AND '.join(parts)}", (key, *self._scope))

    # --- the table ---

    def _check(self) -> Talk[None]:
        """Check that the table can hold marks. Raises `PolicyInvalid` with the reason and the fix."""
        columns, unique = yield from (
            self._sqlite_layout() if self._dialect == "sqlite" else self._postgres_layout()
        )
        name, wanted = self._table.name, self._table.columns.names
        if not columns:
            raise PolicyInvalid(f"there is no table {name} in the database of this connection")
        missing = sorted(set(wanted) - columns.keys())
        if missing:
            raise PolicyInvalid(
                f"the table {name} has no column {', '.join(missing)}; it has {', '.join(sorted(columns))}: name them,"
                " such as InboxColumns(event_id=...)"
            )
        unfilled = sorted(each for each, (_, needed) in columns.items() if needed and each not in wanted)
        if unfilled:
            raise PolicyInvalid(
                f"the table {name} needs a value for {', '.join(unfilled)}, which a mark does not have; give the column"
                " a default"
            )
        if frozenset(wanted) not in unique:
            has = "; ".join(sorted(", ".join(sorted(each)) for each in unique)) or "none"
            raise PolicyInvalid(
                f"the table {name} would take the same event twice: it needs a unique key over exactly"
                f" {', '.join(wanted)}, and has {has}; CREATE UNIQUE INDEX ON {name} ({', '.join(wanted)})"
            )
        self._kind = columns[wanted[0]][0] or "text"

    def _postgres_layout(self) -> Talk[tuple[dict[str, tuple[str, bool]], set[frozenset[str]]]]:
        rows = yield Statement(_POSTGRES_COLUMNS, (self._table.name,))
        indexes = yield Statement(_POSTGRES_UNIQUE, (self._table.name,))
        return _layout(rows, [str(row[0]).split(",") for row in indexes])

    def _sqlite_layout(self) -> Talk[tuple[dict[str, tuple[str, bool]], set[frozenset[str]]]]:
        name = self._table.name
        info = yield Statement(f"PRAGMA table_info({name})")
        unique = [[str(row[1]) for row in info if row[5]]]
        for index in (yield Statement(f"PRAGMA index_list({name})")):
            if index[2] and not index[4]:
                parts = yield Statement(f'PRAGMA index_info("{index[1]}")')
                unique.append([str(part[2]) for part in parts])
        rows = [
            (
                row[1],
                row[2],
                bool(row[3]) and row[4] is None and not (row[5] and str(row[2]).upper() == "INTEGER"),
            )
            for row in info
        ]
        return _layout(rows, unique)


def _layout(
    rows: Sequence[Row], unique: Sequence[Sequence[str]]
) -> tuple[dict[str, tuple[str, bool]], set[frozenset[str]]]:
    """Return the columns (type, whether a row must have a value) and the sets of columns with a unique key."""
    columns: dict[str, tuple[Any, bool]] = {str(name): (kind, bool(needed)) for name, kind, needed in rows}
    return columns, {frozenset(each) for each in unique if each}
