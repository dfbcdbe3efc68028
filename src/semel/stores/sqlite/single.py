"""The fast path for a single claim or settle: as few statements as the plain case needs.

Most callers send one item at a time. A duplicate costs one SELECT and no transaction. A first claim costs that and a
transaction with an INSERT; a settle costs a transaction with an UPDATE. Each transaction writes the clock row, as
those of `batch` do, and reads the time under the write lock, so that both paths share one clock.
"""

import sqlite3
from contextlib import suppress

from semel.core.commands import Answer, Claim, Known, Settle
from semel.core.ids import digest
from semel.core.machine import decide
from semel.stores.rows import CODES, STATES
from semel.stores.sqlite import encoding
from semel.stores.sqlite.batch import FileState, Scope
from semel.stores.sqlite.clock import StoreClock
from semel.stores.sqlite.encoding import EPOCH_US, PURGE_SLACK
from semel.types import FOREVER, Completed

__all__ = ["SINGLES", "SingleItems"]

SINGLES = frozenset((Claim, Settle))
"""The items that have a fast path when they are sent alone."""
CONSUMERS_MAX = 8192
"""How many consumers are cached; when there are more, the cache is cleared."""

_FIND = (
    f"SELECT CASE WHEN state BETWEEN 1 AND 31 AND state & 7 < 3 AND expires > ?2 - {EPOCH_US} - fence"
    " AND (?3 IS NULL OR fingerprint IS NULL OR fingerprint = ?3)"
    " AND owner > x'' AND (value IS NULL OR value >= x'') AND (fingerprint IS NULL OR fingerprint >= x'')"
    " AND (event_type IS NULL OR (event_type >= '' AND event_type < x''))"
    f" AND attempt BETWEEN 0 AND {FOREVER} AND fence BETWEEN {1 - EPOCH_US} AND {FOREVER}"
    f" AND seen BETWEEN -{FOREVER} AND {FOREVER} AND settled BETWEEN -{FOREVER} AND {FOREVER}"
    " AND EXISTS (SELECT 1 FROM semel_clock WHERE last_us < ?2 AND offset_us <= ?4) THEN state & 7 ELSE 0 END,"
    " value, fence, settled, seen, expires FROM semel_records WHERE digest = ?1"
)
"""The first column is the state of a row that answers a duplicate: done or failed, not expired at ?2, of the same
payload, without rows in other tables, and valid; else 0. A check in SQLite costs less than reading all columns.
Bounds check types too: in SQLite every number is less than every text, and every text less than every blob."""
_INSERT = (
    "INSERT INTO semel_records (id, digest, consumer_id, owner, fence, lease, expires, purge_at, key, fingerprint,"
    " event_type) VALUES (?,?,?,?,?,?,?,?,?,?,?) ON CONFLICT DO NOTHING"
)
_UPDATE = (
    "UPDATE semel_records SET state=?1, settled=?2, expires=?3, value=?4"
    " WHERE digest=?5 AND fence=?6 AND owner=?7 AND state=0 AND purge_at BETWEEN ?8 AND ?9"
    " AND ?2 < max(lease, expires)"
)
"""Settle a claim without flags that has not expired, and whose place in the purge index need not change."""
_TICK = "UPDATE semel_clock SET last_us=?1, offset_us=?2 WHERE last_us < ?1 AND offset_us <= ?2"
"""Changes nothing if another process is ahead of this one's clock: the full path catches up with it."""
_FIND_CONSUMER = (
    "SELECT c.id, m.name FROM semel_consumers AS c LEFT JOIN semel_meta AS m ON m.name = 'ids:' || c.id"
    " WHERE c.tenant = ? AND c.consumer = ?"
)


class SingleItems:
    """Answers single items on the write connection. The caller holds that connection's lock."""

    def __init__(
        self, connection: sqlite3.Connection, clock: StoreClock, seen: FileState, *, readable_keys: bool
    ) -> None:
        self._connection = connection
        self._clock = clock
        self._seen = seen
        self._readable_keys = readable_keys
        self._consumers: dict[Scope, int] = {}
        """The numbers of consumers; 0: the consumer declared a kind of ids, so its digests start with a time."""

    def answer(self, item: Claim | Settle) -> Answer:
        """Return the answer, after the commit if something was written. `None`: not the plain case, or an error.

        Nothing is written then. The item takes the full path, which handles every case and every error.
        """
        try:
            return self._claim(item) if type(item) is Claim else self._settle(item)  # type: ignore[arg-type]
        except (sqlite3.Error, UnicodeEncodeError, OverflowError):
            return None
        finally:
            if self._connection.in_transaction:
                with suppress(sqlite3.Error):  # a full disk may have ended it already
                    self._connection.execute("ROLLBACK")

    def _claim(self, item: Claim) -> Answer:
        consumer_id = self._consumer_id(item.id[:2])
        if not consumer_id:
            return None
        key = digest(item.id)
        now, offset_us = self._clock.peek()
        found = self._connection.execute(_FIND, (key, now, item.fingerprint, offset_us)).fetchone()
        if found is None:
            return self._insert(item, key, consumer_id) if _is_plain(item) else None
        state, value, fence, settled, seen, expires = found
        if not state or item.refresh:  # a sighting that starts the window again writes the record
            return None
        fence += EPOCH_US
        return Known(STATES[state], value, fence, fence + settled, fence - seen, fence + expires - now)

    def _insert(self, item: Claim, key: bytes, consumer_id: int) -> Answer:
        self._connection.execute("BEGIN IMMEDIATE")
        now, offset_us = self._clock.tick(0, 0)
        answer, record = decide(None, item, now)
        if record is None or record.expires_at_us >= FOREVER:
            return None
        self._seen.next_rowid = 0  # first: an interrupt may come between the commit and the code after it
        text = item.id[2] if self._readable_keys else None
        purge_at = encoding.purge_at(record, None)
        row = encoding.to_claim_row(record, key, None, purge_at, consumer_id, text)
        inserted = self._connection.execute(_INSERT, (*row, record.fingerprint, record.event_type or None))
        return answer if inserted.rowcount == 1 and self._commit(now, offset_us) else None

    def _settle(self, item: Settle) -> Answer:
        if item.to not in ("done", "failed") or not item.owner or item.error is not None:
            return None
        if not self._consumer_id(item.id[:2]):
            return None
        key = digest(item.id)
        self._seen.claims.pop(item.id, None)  # first, for the same reason
        self._connection.execute("BEGIN IMMEDIATE")
        now, offset_us = self._clock.tick(0, 0)
        expires_at = now + item.window_us
        if expires_at >= FOREVER:
            return None
        minute = encoding.minute_after(expires_at)
        updated = self._connection.execute(
            _UPDATE,
            (
                CODES[item.to],
                now - item.fence,
                expires_at - item.fence,
                item.value,
                key,
                item.fence - EPOCH_US,
                item.owner,
                minute,
                minute + PURGE_SLACK,
            ),
        )
        return Completed(at_us=now) if updated.rowcount == 1 and self._commit(now, offset_us) else None

    def _commit(self, now: int, offset_us: int) -> bool:
        """Write the time and commit. Returns `False` if another process is ahead of it; then nothing is committed."""
        if self._connection.execute(_TICK, (now, offset_us)).rowcount != 1:
            return False
        self._connection.execute("COMMIT")
        return True

    def _consumer_id(self, scope: Scope) -> int:
        """Return the number of the consumer; 0: it declared a kind of ids, or is not stored yet.

        A stored consumer never changes its number or its kind of ids.
        """
        number = self._consumers.get(scope)
        if number is not None:
            return number
        found = self._connection.execute(_FIND_CONSUMER, scope).fetchone()
        if found is None:
            return 0
        if len(self._consumers) >= CONSUMERS_MAX:
            self._consumers.clear()
        number = self._consumers[scope] = found[0] if found[1] is None else 0
        return number


def _is_plain(item: Claim) -> bool:
    """Whether a first claim needs only one row, without flags."""
    return (
        item.owner != b""
        and item.journal is None
        and item.meta is None
        and item.error is None
        and not item.quarantine
        and not item.sliding
        and not item.apart_us
    )
