"""Execute a batch of items inside one transaction: read the records, decide, write the changes."""

import sqlite3
from collections.abc import Sequence
from typing import Any

from semel.core.commands import (
    Admit,
    Answer,
    Claim,
    Count,
    Forget,
    Item,
    Lookup,
    Mark,
    Marked,
    Purge,
    ReadSettings,
    RecordItem,
    Renew,
    Resolve,
    Scan,
    Settle,
    SetWindow,
    SwitchMode,
)
from semel.core.ids import DIGEST_BYTES, digest, digests_of, holds_time, time_in
from semel.core.machine import check, decide
from semel.errors import KeyInvalid, RecordCorrupt, StoreFull
from semel.stores.admin_rules import item_unknown
from semel.stores.rows import EXTRAS, JOURNAL, flags_of, has_extras
from semel.stores.sqlite import admin, encoding, marks
from semel.stores.sqlite.encoding import EPOCH_US, Stored
from semel.types import FOREVER, Absent, Forgotten, Id, Record, Unavailable

RECORD_ITEMS = frozenset((Claim, Renew, Settle, Lookup, Forget, Resolve))
READS = frozenset((Lookup, Scan, Count, ReadSettings))
"""Items that never write: a batch of only these does not wait for the write lock."""
FRUGAL = frozenset((Settle, Renew, Forget, Resolve, Purge))
"""Items that change existing rows: they may still fit on a full disk when new rows do not."""

CLAIMS_MAX = 8192
"""How many running claims are remembered; a few hundred bytes each."""

TIME_BYTES = 6
"""Milliseconds since 1970, for the next eight thousand years."""

Scope = tuple[str, str]


def by_time(time_us: int, key: bytes) -> bytes:
    """Put the time inside an id before its digest, so that ids of one time are neighbours in the index."""
    return (time_us // 1000).to_bytes(TIME_BYTES) + key


class FileState:
    """Cached contents of the file for one connection, valid until another connection writes to it."""

    def __init__(self) -> None:
        self.consumers: dict[Scope, int] = {}
        self.claims: dict[Id, Stored] = {}
        """Running claims that this connection wrote: most renewals and settles are for these."""
        self.next_rowid: int = 0
        self.kinds: dict[Scope, str] | None = None
        """The kinds of ids of the consumers that declared one; `None`: not read yet."""
        self.mark_counts: marks.MarkCounts = marks.MarkCounts()
        self._data_version = -1

    def refresh(self, data_version: int) -> None:
        """Drop everything that another connection may have changed. Call it under the write lock."""
        if data_version != self._data_version:
            self._data_version = data_version
            self.claims.clear()
            self.next_rowid = 0
            self.kinds = None
            self.mark_counts.forget()

    def forget(self) -> None:
        """Drop everything: the outcome of a transaction is unknown."""
        self.consumers.clear()
        self.refresh(-1)

    def commit(self, consumers: dict[Scope, int], claims: dict[Id, Stored | None]) -> None:
        """Cache what a committed batch wrote; `None`: the record is no longer a claim."""
        self.consumers.update(consumers)
        known = self.claims
        for record_id, stored in claims.items():
            if stored is None:
                known.pop(record_id, None)
            else:
                known[record_id] = stored
        while len(known) > CLAIMS_MAX:
            del known[next(iter(known))]


class SqliteBatch:
    """One batch. `full`: the error for items that would write and are not in `permitted`."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        now: int,
        seen: FileState,
        *,
        readable_keys: bool,
        full: StoreFull | None = None,
        permitted: frozenset[type] = frozenset(),
    ) -> None:
        self._connection = connection
        self._now = now
        self._seen = seen
        self._readable_keys = readable_keys
        self._full = full
        self._permitted = permitted
        self._stored: dict[bytes, Stored] = {}
        self._broken: dict[bytes, RecordCorrupt] = {}
        self._current: dict[bytes, Record] = {}
        self._dirty: dict[bytes, None] = {}
        self.consumers: dict[Scope, int] = {}
        """Consumers that this batch read or created; cached after the commit, as are `claims`."""
        self.claims: dict[Id, Stored | None] = {}
        self.changed: list[Id] = []
        self.wrote: bool = False

    def run(self, items: Sequence[Item]) -> list[Answer]:
        """Return the answers, by position. Does not commit."""
        answers: list[Answer] = [None] * len(items)
        together: list[int] = []
        for position, item in enumerate(items):
            if type(item) in RECORD_ITEMS:
                together.append(position)
                continue
            self._records(items, together, answers)
            self._flush()
            together = []
            answers[position] = self._apart(item)
        self._records(items, together, answers)
        self._flush()
        return answers

    # --- items on one record each ---

    def _records(self, items: Sequence[Any], positions: list[int], answers: list[Answer]) -> None:
        if not positions:
            return
        digests = self._read(items, positions, answers)
        current, dirty, broken, now, full = self._current, self._dirty, self._broken, self._now, self._full
        for position, key in zip(positions, digests, strict=True):
            item: RecordItem = items[position]
            kind = type(item)
            if broken and key in broken:
                answers[position] = Unavailable(broken[key])
                continue
            stored = current.get(key)
            if stored is None and kind is not Claim and isinstance(item, (Lookup, Forget)):
                answers[position] = self._without_record(item, key)
                continue
            try:
                answer, record = decide(stored, item, now)
                if record is not None:
                    if full is not None and kind not in self._permitted:
                        answers[position] = Unavailable(full)
                        continue
                    current[key] = record if _is_plain(record) else _fit(check(record))
                    dirty[key] = None
                    if kind is not Claim and kind is not Renew:  # these do not end a claim that others await
                        self.changed.append(item.id)
                answers[position] = answer
            except (RecordCorrupt, KeyInvalid) as error:
                answers[position] = Unavailable(error)

    def _read(self, items: Sequence[Any], positions: list[int], answers: list[Answer]) -> list[bytes]:
        """Return the digests of the items, after reading the records stored under them."""
        digests: list[bytes] = []
        unread: dict[bytes, Id] = {}
        claims, stored, current = self._seen.claims, self._stored, self._current
        fitting: list[int] = []
        if self._seen.kinds is None:
            self._seen.kinds = admin.read_ids(self._connection)
        kinds = self._seen.kinds
        for position in positions:
            record_id = items[position].id
            claim = claims.get(record_id) if claims else None
            if claim is not None and record_id not in self.claims:
                key = claim.digest
                if key not in current:
                    stored[key] = claim
                    current[key] = claim.record
            else:
                try:
                    key = digest(record_id)
                    if kinds and record_id[:2] in kinds:
                        key = self._by_time(kinds[record_id[:2]], items[position], key)
                except UnicodeEncodeError as error:
                    answers[position] = Unavailable(KeyInvalid(f"{record_id!r} is not valid text: {error}"))
                    continue
                except KeyInvalid as error:
                    answers[position] = Unavailable(error)
                    continue
                unread[key] = record_id
            digests.append(key)
            fitting.append(position)
        positions[:] = fitting
        for some in encoding.chunks(list(unread)):
            asked = encoding.pad_digests(some)
            rows = self._connection.execute(encoding.select_records(len(asked)), asked).fetchall()
            if not rows:
                continue
            for row, beside in zip(rows, admin.extras_of(self._connection, rows), strict=True):
                key = row[1]
                try:
                    record = encoding.from_row(row, unread[key], *beside)
                except RecordCorrupt as error:
                    self._broken[key] = error
                    continue
                stored[key] = Stored(key, row[0], row[10], record)
                current[key] = record
        return digests

    def _by_time(self, ids: str, item: RecordItem, key: bytes) -> bytes:
        """Return the key of a row whose consumer declared this kind of ids."""
        if not holds_time(ids):
            return key
        try:
            time_us = time_in(ids, item.id[2])
        except KeyInvalid:
            if isinstance(item, Lookup):
                return key  # no record has this key
            raise
        return by_time(time_us, key)

    def _without_record(self, item: Lookup | Forget, key: bytes) -> Record | Absent | Forgotten | Unavailable:
        """Answer from a mark, if there is one: it counts as a done record without owner or value."""
        key = key[-DIGEST_BYTES:]  # marks are not ordered by the time in their ids
        expires_at = marks.expiry_of(self._connection, key)
        if expires_at is None or expires_at + EPOCH_US <= self._now:
            return Absent()
        if type(item) is Forget:
            if self._full is not None and Forget not in self._permitted:
                return Unavailable(self._full)
            marks.forget(self._connection, key)
            self.wrote = True
            self.changed.append(item.id)
            return Forgotten(self._now)
        return Record(
            id=item.id,
            state="done",
            owner=b"",
            fence=1,
            lease_until_us=0,
            attempt=1,
            expires_at_us=expires_at + EPOCH_US,
            first_seen_us=0,
        )

    def _flush(self) -> None:
        """Write the changed records, each once, and drop the records that were read."""
        if self._dirty:
            self._write()
        self._dirty.clear()
        self._stored.clear()
        self._current.clear()
        self._broken.clear()

    def _write(self) -> None:
        claims: list[encoding.Row] = []
        others: list[encoding.Row] = []
        settled: list[encoding.Row] = []
        updated: list[encoding.Row] = []
        moved: list[encoding.Row] = []
        scope: Scope | None = None
        consumer_id, rowid = 0, self._next_rowid()
        for key in self._dirty:
            record = self._current[key]
            state = flags_of(record)
            before = self._stored.get(key)
            if before is None:
                tenant, consumer, name = record.id
                if (tenant, consumer) != scope:
                    scope = (tenant, consumer)
                    consumer_id = self._consumer_id(scope)
                stored = Stored(key, rowid, encoding.purge_at(record, None), record)
                rowid += 1
                readable = self._readable_keys or record.journal is not None or record.quarantine
                text = name if readable else None
                if encoding.is_plain_claim(record, state):
                    claims.append(
                        encoding.to_claim_row(record, key, stored.rowid, stored.purge_at, consumer_id, text)
                    )
                else:
                    others.append(
                        (
                            stored.rowid,
                            key,
                            consumer_id,
                            text,
                            stored.purge_at,
                            *encoding.to_row(record, state),
                        )
                    )
            else:
                stored = Stored(key, before.rowid, encoding.purge_at(record, before.purge_at), record)
                if encoding.is_settling(record, before.record):
                    settled.append(encoding.to_settled_row(record, state, before.rowid))
                else:
                    updated.append((*encoding.to_row(record, state), before.rowid))
                if stored.purge_at != before.purge_at:
                    moved.append((stored.purge_at, before.rowid))
            if state & (EXTRAS | JOURNAL) or (before is not None and _has_beside(before.record)):
                self._write_beside(stored.rowid, record, None if before is None else before.record)
                self.claims[record.id] = None
            else:
                self.claims[record.id] = stored if record.state == "claimed" else None
        self._seen.next_rowid = rowid
        for statement, rows in (
            (encoding.INSERT_CLAIM, claims),
            (encoding.INSERT_RECORD, others),
            (encoding.UPDATE_SETTLED, settled),
            (encoding.UPDATE_RECORD, updated),
            (encoding.MOVE_RECORD, moved),
        ):
            if rows:
                self._connection.executemany(statement, rows)
        self.wrote = True

    def _next_rowid(self) -> int:
        seen = self._seen
        if not seen.next_rowid:
            (last,) = self._connection.execute("SELECT max(id) FROM semel_records").fetchone()
            seen.next_rowid = (last or 0) + 1
        return seen.next_rowid

    def _write_beside(self, rowid: int, record: Record, before: Record | None) -> None:
        """Write steps, meta, anchor and journal to their own tables, only when they change."""
        if before is None or encoding.to_extras(record) != encoding.to_extras(before):
            if has_extras(record):
                self._connection.execute(
                    "INSERT OR REPLACE INTO semel_extras (id, steps, meta, anchor, horizon)"
                    " VALUES (?, ?, ?, ?, ?)",
                    (rowid, *encoding.to_extras(record)),
                )
            else:
                self._connection.execute("DELETE FROM semel_extras WHERE id = ?", (rowid,))
        if before is None or record.journal != before.journal:
            if record.journal is not None:
                self._connection.execute(
                    "INSERT OR REPLACE INTO semel_journal (id, payload) VALUES (?, ?)",
                    (rowid, record.journal),
                )
            else:
                self._connection.execute("DELETE FROM semel_journal WHERE id = ?", (rowid,))

    def _consumer_id(self, scope: Scope) -> int:
        known = self._seen.consumers.get(scope) or self.consumers.get(scope)
        if known is not None:
            return known
        row = self._connection.execute(
            "SELECT id FROM semel_consumers WHERE tenant = ? AND consumer = ?", scope
        ).fetchone()
        if row is None:
            row = self._connection.execute(
                "INSERT INTO semel_consumers (tenant, consumer) VALUES (?, ?) RETURNING id", scope
            ).fetchone()
        number: int = row[0]
        self.consumers[scope] = number
        return number

    # --- the other items ---

    def _apart(self, item: Item) -> Answer:
        if self._full is not None and type(item) not in READS and type(item) not in self._permitted:
            return Unavailable(self._full)
        try:
            return self._admin(item)
        except RecordCorrupt as error:
            return Unavailable(error)
        except UnicodeEncodeError as error:
            return Unavailable(KeyInvalid(f"a name is not valid text: {error}"))

    def _admin(self, item: Item) -> Answer:
        connection, now = self._connection, self._now
        match item:
            case Mark():
                return self._mark(item)
            case Scan():
                return admin.scan(connection, item, now)
            case Count():
                return admin.count(connection, item, now)
            case ReadSettings():
                return admin.read_settings(connection)
            case Purge():
                purged, wrote = admin.purge(connection, item, now)
                self.wrote |= wrote
                self._seen.claims.clear()  # some of them may be removed now
                return purged
            case SetWindow():
                admin.set_window(connection, item, now)
                self.wrote = True
                return None
            case Admit():
                mode, wrote = admin.admit(connection, item)
                self.wrote |= wrote
                self._seen.kinds = None
                return mode
            case SwitchMode():
                unfinished = admin.switch_mode(connection, item, now)
                self.wrote |= not unfinished
                return unfinished
            case _:
                raise item_unknown(item)

    def _mark(self, item: Mark) -> Marked:
        digests = digests_of(item.tenant, item.consumer, item.keys)
        consumer_id = self._consumer_id((item.tenant, item.consumer))
        now = self._now - EPOCH_US
        firsts = marks.mark(
            self._connection, self._seen.mark_counts, digests, consumer_id, now, now + item.window_us
        )
        self.wrote |= True in firsts
        if item.refresh:
            known = [each for each, first in zip(digests, firsts, strict=True) if not first]
            self.wrote |= marks.refresh(self._connection, known, now, now + item.window_us)
        return Marked(firsts)


def _has_beside(record: Record) -> bool:
    return has_extras(record) or record.journal is not None


def _is_plain(record: Record) -> bool:
    """Whether a record needs neither `check` nor `_fit`, as nearly all do not."""
    return (
        record.owner != b""
        and 0 < record.fence <= FOREVER
        and record.expires_at_us < FOREVER
        and record.lease_until_us <= FOREVER
        and record.attempt > 0
        and not record.event_type
        and not record.steps
    )


def _fit(record: Record) -> Record:
    """Raise an error for values that a row cannot hold, before they make the statement fail for other records."""
    if max(record.fence, record.expires_at_us, record.lease_until_us, record.horizon_us) > FOREVER:
        raise RecordCorrupt(f"record {record.id!r} has a time that no store can hold")
    if record.event_type and not record.event_type.isascii():
        _encodable(record.event_type)
    if record.steps:
        for name, _ in record.steps:
            _encodable(name)
    return record


def _encodable(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise KeyInvalid(f"{text!r} is not valid text: {error}") from error
