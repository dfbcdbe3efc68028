"""A claim or a settle that comes alone, in as few statements as the plain case takes.

Most callers send one item at a time. A duplicate costs one SELECT and no transaction. A first claim costs that and a
transaction of an INSERT; a settle costs a transaction of an UPDATE. Each transaction writes the clock row too, as the
full way in `batch` does. `machine.decide` decides claims here as well; the UPDATE of a settle says in SQL what it
decides about a running claim.
"""

import sqlite3

from semel.core.commands import Answer, Claim, Settle
from semel.core.ids import digest
from semel.core.machine import decide
from semel.errors import RecordCorrupt
from semel.stores.rows import CODES, EXTRAS, JOURNAL
from semel.stores.sqlite import encoding
from semel.stores.sqlite.batch import FileState, Scope
from semel.stores.sqlite.clock import StoreClock
from semel.stores.sqlite.encoding import COLUMNS, EPOCH_US, PURGE_SLACK
from semel.types import FOREVER, Completed, Id

__all__ = ["SingleItems"]

CONSUMERS_MAX = 8192
"""How many consumers are remembered; they are looked up again when there are more."""

_SELECT = (
    "SELECT c.last_us, c.offset_us, " + ", ".join(f"r.{column}" for column in COLUMNS.split(", ")) + " FROM"
    " semel_clock AS c LEFT JOIN semel_records AS r ON r.digest = ?"
)
_INSERT = (
    "INSERT INTO semel_records (id, digest, consumer_id, owner, fence, lease, expires, purge_at, key, fingerprint,"
    " event_type) VALUES (?,?,?,?,?,?,?,?,?,?,?) ON CONFLICT DO NOTHING"
)
_SETTLE = (
    "UPDATE semel_records SET state=?1, settled=?2, expires=?3, value=?4"
    " WHERE digest=?5 AND fence=?6 AND owner=?7 AND state=0 AND purge_at BETWEEN ?8 AND ?9"
    " AND ?2 < max(lease, expires)"
)
"""A running claim without flags, whose place in the purge index will do; one that is over is left to the full way."""
_TICK = "UPDATE semel_clock SET last_us=?1, offset_us=?2 WHERE last_us < ?1 AND offset_us <= ?2"
"""No row is changed where another process is ahead of our clock: the full way catches up with it."""
_FIND_CONSUMER = (
    "SELECT c.id, m.name FROM semel_consumers AS c LEFT JOIN semel_meta AS m ON m.name = 'ids:' || c.id"
    " WHERE c.tenant = ? AND c.consumer = ?"
)


class SingleItems:
    """Answers single items on the connection that writes. The caller holds the lock of that connection."""

    def __init__(
        self, connection: sqlite3.Connection, clock: StoreClock, seen: FileState, *, readable_keys: bool
    ) -> None:
        self._connection = connection
        self._clock = clock
        self._seen = seen
        self._readable_keys = readable_keys
        self._consumers: dict[Scope, int] = {}
        """Consumers whose digests are plain, by their numbers; 0: they begin with a time."""

    def answer(self, item: Claim | Settle) -> Answer:
        """The answer, after the commit. `None`: the case is not plain, or an error came up.

        Nothing is written then. The item goes the full way, which knows every case and what each error means.
        """
        try:
            return self._claim(item) if type(item) is Claim else self._settle(item)  # type: ignore[arg-type]
        except (sqlite3.Error, RecordCorrupt, UnicodeEncodeError, OverflowError):
            return None
        finally:
            if self._connection.in_transaction:
                self._roll_back()

    def _claim(self, item: Claim) -> Answer:
        consumer_id = self._consumer_id(item.id)
        if not consumer_id:
            return None
        key = digest(item.id)
        last_us, offset_us, *row = self._connection.execute(_SELECT, (key,)).fetchone()
        if row[0] is None:
            return self._insert(item, key, consumer_id, last_us, offset_us) if _is_plain(item) else None
        if type(row[2]) is int and row[2] & (EXTRAS | JOURNAL):
            return None  # a part of it lies in another table
        now, _ = self._clock.tick(last_us, offset_us)
        answer, changed = decide(encoding.from_row(row, item.id), item, now)
        return answer if changed is None else None

    def _insert(self, item: Claim, key: bytes, consumer_id: int, last_us: int, offset_us: int) -> Answer:
        self._connection.execute("BEGIN IMMEDIATE")
        now, offset_us = self._clock.tick(
            last_us, offset_us
        )  # under the lock: a wait for it must not be counted
        answer, record = decide(None, item, now)
        if record is None or record.expires_at_us >= FOREVER:
            return answer if record is None else None
        self._seen.next_rowid = 0  # before the row is there: an interrupt may strike after it
        text = item.id[2] if self._readable_keys else None
        row = encoding.to_claim_row(record, key, None, encoding.purge_at(record, None), consumer_id, text)
        inserted = self._connection.execute(_INSERT, (*row, record.fingerprint, record.event_type or None))
        return answer if inserted.rowcount == 1 and self._commit(now, offset_us) else None

    def _settle(self, item: Settle) -> Answer:
        if item.to not in ("done", "failed") or not item.owner or not self._consumer_id(item.id):
            return None
        self._seen.claims.pop(item.id, None)
        self._connection.execute("BEGIN IMMEDIATE")
        now, offset_us = self._clock.tick(0, 0)
        expires_at = now + item.window_us
        if expires_at >= FOREVER:
            return None
        minute = encoding.minute_after(expires_at)
        settled = self._connection.execute(
            _SETTLE,
            (
                CODES[item.to],
                now - item.fence,
                expires_at - item.fence,
                item.value,
                digest(item.id),
                item.fence - EPOCH_US,
                item.owner,
                minute,
                minute + PURGE_SLACK,
            ),
        )
        return Completed(at_us=now) if settled.rowcount == 1 and self._commit(now, offset_us) else None

    def _commit(self, now: int, offset_us: int) -> bool:
        """Write the time and commit; `False`: another process is ahead of it, and nothing is committed."""
        if self._connection.execute(_TICK, (now, offset_us)).rowcount != 1:
            return False
        self._connection.execute("COMMIT")
        return True

    def _roll_back(self) -> None:
        try:
            self._connection.execute("ROLLBACK")
        except sqlite3.Error:  # a full disk may have ended it already
            pass

    def _consumer_id(self, record_id: Id) -> int:
        """The number of the consumer; 0: the store has not met it, or it declared a kind of ids.

        A consumer that the store has met keeps its number and its kind of ids for good.
        """
        scope = record_id[:2]
        number = self._consumers.get(scope)
        if number is None:
            found = self._connection.execute(_FIND_CONSUMER, scope).fetchone()
            if found is None:
                return 0
            if len(self._consumers) >= CONSUMERS_MAX:
                self._consumers.clear()
            number = self._consumers[scope] = found[0] if found[1] is None else 0
        return number


def _is_plain(item: Claim) -> bool:
    """Whether a first claim is one row without flags."""
    return (
        item.owner != b""
        and item.journal is None
        and item.meta is None
        and not item.quarantine
        and not item.sliding
        and not item.apart_us
    )
