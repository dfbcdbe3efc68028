"""Records in the memory of this process: for tests, and for single-process programs that may forget on exit.

Every operation is O(1): a dict, one lock, and a wheel of expiry times instead of scans.
"""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from threading import Lock
from typing import Any

import msgspec
from msgspec.structs import replace

from semel.clock import Clock, SystemClock
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
    Page,
    Purge,
    Purged,
    ReadSettings,
    Renew,
    Scan,
    SetWindow,
    StoreSettings,
    SwitchMode,
)
from semel.core.machine import UNFINISHED, counted_state, decide, fits, standing
from semel.core.protocols import Capabilities, Listener
from semel.errors import StoreFull
from semel.runtime.process import restart_after_fork
from semel.stores.admin_rules import StatsCounter, cursor_refused, window_in_force
from semel.stores.memory.compact_marks import CompactMarks
from semel.stores.memory.marks import Marker, MemoryMarks, SteadyClock
from semel.types import FOREVER, Id, Mode, Record, Stats, Unavailable

GRANULE_US = 1_000_000
"""Records expire exactly; they are *removed* by the wheel, in buckets of one second."""


class ExpiryWheel:
    """Ids by the second in which they expire. Adding an id and removing a due id are O(1)."""

    def __init__(self) -> None:
        self._buckets: dict[int, list[Id]] = {}
        self._order: list[int] = []

    def add(self, record_id: Id, expires_at: int) -> None:
        """Schedule a check of this record after `expires_at`."""
        granule = expires_at // GRANULE_US + 1
        bucket = self._buckets.get(granule)
        if bucket is None:
            bucket = self._buckets[granule] = []
            heappush(self._order, granule)
        bucket.append(record_id)

    def due(self, now: int) -> bool:
        """Whether any record is due for a check."""
        return bool(self._order) and self._order[0] * GRANULE_US <= now

    def pop(self, now: int, limit: int) -> list[Id]:
        """Remove and return up to `limit` due ids."""
        taken: list[Id] = []
        while len(taken) < limit and self.due(now):
            bucket = self._buckets[self._order[0]]
            taken += [bucket.pop() for _ in range(min(len(bucket), limit - len(taken)))]
            if not bucket:
                del self._buckets[heappop(self._order)]
        return taken


RECORDS_MAX = 1_000_000
PURGE_STEP = 32
"""How many expired records one claim removes at most, so that no claim pays for a backlog."""


class MemoryStore:
    """A bounded store in memory. Its name is `memory:`.

    When it holds `records_max` live records, new keys are answered with `StoreFull`; known keys
    still work. `compact=True` packs marks into a fifth of the memory, at two to three microseconds each.
    A fork copies the store: parent and child do not see each other's changes.
    """

    name: str = "memory:"
    """What messages and metrics call the store."""
    capabilities: Capabilities = Capabilities(durable=False, notifies=True, instant=True, refreshes=True)
    """What the store can promise."""

    def __init__(
        self, *, records_max: int = RECORDS_MAX, compact: bool = False, clock: Clock | None = None
    ) -> None:
        self._clock = clock or SystemClock()
        self._records_max = records_max
        self._compact = compact
        self._lock = Lock()
        restart_after_fork(self)
        self._records: dict[Id, Record] = {}
        self._marks: dict[tuple[str, str], MemoryMarks | CompactMarks] = {}
        self._steady = SteadyClock(self._clock, lambda: self._last_us)
        self._journaled: dict[Id, None] = {}
        self._wheel = ExpiryWheel()
        self._windows: dict[tuple[str, str, str], int] = {}
        self._modes: dict[tuple[str, str], Mode] = {}
        self._ids: dict[tuple[str, str], str] = {}
        self._listeners: tuple[Listener, ...] = ()
        self._last_us = 0
        self._offset_us = 0

    def open(self) -> None:
        """Do nothing: there is nothing to connect."""

    def close(self) -> None:
        """Do nothing: the records stay, for a client opened on the same object."""

    def watch(self, listener: Listener, /) -> Callable[[], None]:
        """Call `listener` for every settled, released or forgotten record. Returns a function that stops it."""
        with self._lock:
            self._listeners = (*self._listeners, listener)

        def stop() -> None:
            with self._lock:
                self._listeners = tuple(each for each in self._listeners if each is not listener)

        return stop

    def send(self, items: Sequence[Item], /) -> list[Answer]:
        """Execute the items one after the other, under the lock."""
        changed: list[Id] = []
        with self._lock:
            now = self._now()
            answers = [self._apply(item, now, changed) for item in items]
        if self._listeners:
            for record_id in changed:
                for listener in self._listeners:
                    listener(record_id)
        return answers

    def _apply(self, item: Item, now: int, changed: list[Id]) -> Answer:
        kind = type(item)
        if kind in _ADMIN:
            return _ADMIN[kind](self, item, now)
        record_id: Id = item.id  # type: ignore[union-attr]  # all others are about one record
        stored = self._records.get(record_id)
        if stored is None:
            if kind is Claim:
                if not self._has_room(now):
                    return Unavailable(self._full())
            elif self._marks and isinstance(item, (Lookup, Forget)) and record_id[:2] in self._marks:
                return self._marks[record_id[:2]].apply(item, now)
        answer, record = decide(stored, item, now)  # type: ignore[arg-type]
        if record is not None:
            self._write(stored, record)
            if kind is not Claim and kind is not Renew:  # these two do not end a claim that others wait for
                changed.append(record_id)
        return answer

    def _write(self, stored: Record | None, record: Record) -> None:
        self._records[record.id] = record
        if record.expires_at_us != FOREVER and (
            stored is None
            or record.expires_at_us < stored.expires_at_us - GRANULE_US
            or stored.expires_at_us == FOREVER
        ):
            self._wheel.add(record.id, record.expires_at_us)
        if record.journal is not None:
            self._journaled[record.id] = None
        elif stored is not None and stored.journal is not None:
            self._journaled.pop(record.id, None)

    def _now(self) -> int:
        """Return the wall clock's time, later than every time returned before."""
        now = self._clock.now_us() + self._offset_us
        if now <= self._last_us:
            self._offset_us += self._last_us + 1 - now
            now = self._last_us + 1
        self._last_us = now
        return now

    def _has_room(self, now: int) -> bool:
        if self._wheel.due(now):
            self._clear(now, PURGE_STEP)
        if self._room() > 0:
            return True
        return self._clear(now, PURGE_STEP).count > 0

    def _full(self) -> StoreFull:
        return StoreFull(
            f"memory: holds {self._records_max} live records; raise records_max, shorten the window,"
            " or use a store that keeps them on disk"
        )

    def _marks_held(self) -> int:
        # Also called without the lock: another thread may add a consumer during the count.
        return sum(map(len, tuple(self._marks.values()))) if self._marks else 0

    def _clear(self, now: int, limit: int) -> Purged:
        """Remove expired records; checks only those that are due."""
        count, oldest = 0, now
        for record_id in self._wheel.pop(now, limit):
            record = self._records.get(record_id)
            if record is None or record.expires_at_us == FOREVER:
                continue
            gone_at = max(record.expires_at_us, record.lease_until_us if record.state == "claimed" else 0)
            if gone_at > now:
                self._wheel.add(record_id, gone_at)
                continue
            del self._records[record_id]
            count, oldest = count + 1, min(oldest, gone_at)
        return Purged(count, (now - oldest) / 1e6, self._wheel.due(now))

    # --- items that are not about one record ---

    def _mark(self, item: Mark, _now: int) -> Marked | Unavailable:
        marks = self._marks_of(item.tenant, item.consumer)
        keys = item.keys
        if self._room() < len(keys):
            marks.make_room()
            new = sum(not marks.knows(key) for key in keys)  # known keys still work
            if new and self._room() < new:
                return Unavailable(self._full())
        return Marked((marks.refresh if item.refresh else marks.add)(keys, item.window_us))

    def marker(
        self,
        tenant: str,
        consumer: str,
        window_us: Callable[[], int],
        of_type: Callable[[str, str], bool] | None = None,
    ) -> Marker:
        """Return a function that marks one key of a consumer, without building an item."""
        with self._lock:
            marks = self._marks_of(tenant, consumer)

        def room() -> int:
            if self._room() <= 0:
                marks.make_room()
            return self._room()

        return marks.marker(window_us, room, self._full, of_type)

    def _marks_of(self, tenant: str, consumer: str) -> MemoryMarks | CompactMarks:
        marks = self._marks.get((tenant, consumer))
        if marks is None:
            marks = (
                CompactMarks(self._steady, tenant, consumer) if self._compact else MemoryMarks(self._steady)
            )
            self._marks[tenant, consumer] = marks
        return marks

    def _room(self) -> int:
        return self._records_max - len(self._records) - self._marks_held()

    def _scan(self, item: Scan, now: int) -> Page:
        after = _place(item.cursor)
        ids = sorted(self._journaled if item.orphaned else self._records)
        found: list[Record] = []
        for record_id in ids:
            record = standing(self._records[record_id], now)
            if (
                record is None
                or record.state == "forgotten"
                or record_id <= after
                or not fits(record, item, now)
            ):
                continue
            if len(found) == item.limit:
                return Page(found, msgspec.json.encode(found[-1].id).decode())
            found.append(record)
        return Page(found)

    def _purge(self, item: Purge, now: int) -> Purged:
        if item.dry_run:
            gone = [record for record in self._records.values() if standing(record, now) is None]
            marks = sum(marks.count_expired() for marks in self._marks.values())
            oldest = min((record.expires_at_us for record in gone), default=now)
            return Purged(len(gone) + marks, (now - oldest) / 1e6)
        marks = sum(marks.purge() for marks in self._marks.values())
        purged = self._clear(now, item.limit)
        return Purged(purged.count + marks, purged.lag_s, purged.more)

    def _count(self, item: Count, now: int) -> Stats:
        counter = StatsCounter(item, now)
        for stored in self._records.values():
            if item.tenant not in (None, stored.id[0]):
                continue
            record = standing(stored, now)
            if record is None:
                counter.add_expired(1, max(stored.expires_at_us, stored.lease_until_us))
            elif record.state != "forgotten":
                counter.add_records(record.tenant, record.consumer, counted_state(record))
        for (tenant, consumer), held in self._marks.items():
            counter.add_marks(tenant, consumer, len(held) - held.count_expired())
        return counter.stats()

    def _read_settings(self, _item: ReadSettings, _now: int) -> StoreSettings:
        return StoreSettings(dict(self._windows), dict(self._modes), dict(self._ids))

    def _set_window(self, item: SetWindow, now: int) -> None:
        name = (item.tenant, item.consumer, item.event_type)
        if item.window_us is None:
            self._windows.pop(name, None)
            return
        self._windows[name] = item.window_us
        if not item.existing:
            return
        for stored in list(self._records.values()):
            if name != window_in_force(self._windows, *stored.id[:2], stored.event_type):
                continue
            if stored.anchor_us is not None:
                continue  # the window of its key counts instead
            if stored.state in ("done", "failed") and standing(stored, now) is not None:
                start = stored.first_seen_us if stored.sliding else stored.settled_at_us
                self._write(stored, replace(stored, expires_at_us=start + item.window_us))

    def _admit(self, item: Admit, _now: int) -> Mode:
        scope = (item.tenant, item.consumer)
        if item.ids and scope not in self._modes:
            self._ids[scope] = item.ids
        return self._modes.setdefault(scope, item.mode)

    def _switch_mode(self, item: SwitchMode, now: int) -> int:
        scope = (item.tenant, item.consumer)
        unfinished = sum(
            record is not None and counted_state(record) in UNFINISHED
            for record in (standing(each, now) for each in self._records.values() if each.id[:2] == scope)
        )
        if not unfinished:
            self._modes[scope] = item.mode
        return unfinished

    def after_fork(self) -> None:
        """Replace the locks in a forked child, whose records are its own from now on."""
        self._lock = Lock()  # another thread of the parent may have held it, and cannot release it here
        for marks in self._marks.values():
            marks.after_fork()


def _place(cursor: str | None) -> Id:
    """Decode the cursor: the id of the record after which a page starts."""
    try:
        return msgspec.json.decode(cursor, type=Id) if cursor else ("", "", "")
    except msgspec.DecodeError:
        raise cursor_refused(cursor) from None


_ADMIN: dict[type, Any] = {
    Mark: MemoryStore._mark,
    Scan: MemoryStore._scan,
    Purge: MemoryStore._purge,
    Count: MemoryStore._count,
    ReadSettings: MemoryStore._read_settings,
    SetWindow: MemoryStore._set_window,
    Admit: MemoryStore._admit,
    SwitchMode: MemoryStore._switch_mode,
}
