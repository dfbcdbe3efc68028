"""The smallest store that keeps the contract: a dict, a lock, and the machine. What the guide for stores shows."""

import json
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from msgspec.structs import replace

from semel.clock import Clock, SystemClock
from semel.core import machine
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
    RecordItem,
    Renew,
    Resolve,
    Scan,
    Settle,
    SetWindow,
    StoreSettings,
    SwitchMode,
)
from semel.core.machine import UNFINISHED, counted_state
from semel.core.protocols import Capabilities, Listener
from semel.types import Id, Mode, Record, Stats


class DictStore:
    name = "dict:"
    rules: Any = machine
    capabilities = Capabilities(durable=False, notifies=True, instant=True, endless=True, refreshes=True)

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or SystemClock()
        self.lock = threading.Lock()
        self.records: dict[Hashable, Record] = {}
        self.marks: dict[Hashable, tuple[Id, int]] = {}
        self.windows: dict[tuple[str, str, str], int] = {}
        self.modes: dict[tuple[str, str], Mode] = {}
        self.ids: dict[tuple[str, str], str] = {}
        self.listeners: list[Listener] = []
        self.last_us = 0
        self.offset_us = 0

    def open(self) -> None:
        pass

    def close(self) -> None:
        pass

    def watch(self, listener: Listener, /) -> Callable[[], None]:
        self.listeners.append(listener)
        return lambda: self.listeners.remove(listener) if listener in self.listeners else None

    def send(self, items: Sequence[Item], /) -> list[Answer]:
        changed: list[Id] = []
        with self.lock:
            now = self.now()
            answers = [self.apply(item, now, changed) for item in items]
        for record_id in changed:
            for listener in list(self.listeners):
                listener(record_id)
        return answers

    def now(self) -> int:
        """The clock, made to go forward only and never to stand still."""
        now = self.clock.now_us() + self.offset_us
        if now <= self.last_us:
            self.offset_us += self.last_us + 1 - now
            now = self.last_us + 1
        self.last_us = now
        return now

    def place(self, record_id: Id) -> Hashable:
        """What a record is found by."""
        return record_id

    def decide(self, stored: Record | None, item: RecordItem, now: int) -> machine.Decision:
        """The rules; mutants bend them here."""
        return self.rules.decide(stored, item, now)  # type: ignore[no-any-return]

    def apply(self, item: Item, now: int, changed: list[Id]) -> Answer:
        match item:
            case Claim() | Renew() | Settle() | Lookup() | Forget() | Resolve():
                return self.on_record(item, now, changed)
            case Mark():
                return self.mark(item, now)
            case Scan():
                return self.scan(item, now)
            case Purge():
                return self.purge(item, now)
            case Count():
                return self.count(item, now)
            case ReadSettings():
                return StoreSettings(dict(self.windows), dict(self.modes), dict(self.ids))
            case SetWindow():
                return self.set_window(item, now)
            case Admit():
                return self.admit(item)
            case SwitchMode():
                return self.switch_mode(item, now)

    def admit(self, item: Admit) -> Mode:
        scope = (item.tenant, item.consumer)
        if item.ids and scope not in self.modes:
            self.ids[scope] = item.ids
        return self.modes.setdefault(scope, item.mode)

    def on_record(self, item: RecordItem, now: int, changed: list[Id]) -> Answer:
        place = self.place(item.id)
        stored = self.records.get(place)
        if stored is None and place in self.marks:
            stored = self.mark_record(place)
        answer, record = self.decide(stored, item, now)
        if record is not None:
            self.write(place, record)
            if isinstance(item, Settle | Forget | Resolve):
                changed.append(item.id)
        return answer

    def write(self, place: Hashable, record: Record) -> None:
        self.marks.pop(place, None)
        self.records[place] = record

    # --- marks ---

    def mark_record(self, place: Hashable) -> Record:
        record_id, expires_at = self.marks[place]
        return Record(
            id=record_id,
            state="done",
            owner=b"",
            fence=1,
            lease_until_us=0,
            attempt=1,
            expires_at_us=expires_at,
            first_seen_us=0,
        )

    def mark(self, item: Mark, now: int) -> Marked:
        return Marked([self.mark_key((item.tenant, item.consumer, key), item, now) for key in item.keys])

    def mark_key(self, record_id: Id, item: Mark, now: int) -> bool:
        place = self.place(record_id)
        if place in self.marks and self.marks[place][1] > now:
            if item.refresh:
                self.marks[place] = (record_id, max(self.marks[place][1], now + item.window_us))
            return False
        self.records.pop(place, None)
        self.marks[place] = (record_id, now + item.window_us)
        return True

    # --- what operators ask for ---

    def standing(self, now: int) -> list[Record]:
        found = (self.rules.standing(record, now) for record in self.records.values())
        return [record for record in found if record is not None and record.state != "forgotten"]

    def scan(self, item: Scan, now: int) -> Page:
        after = tuple(json.loads(item.cursor)) if item.cursor else ()
        found = [
            record for record in self.standing(now) if record.id > after and self.fits(record, item, now)
        ]
        found.sort(key=lambda record: record.id)
        page = found[: item.limit]
        return Page(page, json.dumps(page[-1].id) if len(found) > item.limit else None)

    def fits(self, record: Record, item: Scan, now: int) -> bool:
        return (
            item.tenant in (None, record.tenant)
            and item.consumer in (None, record.consumer)
            and item.state in (None, record.state)
            and record.key.startswith(item.prefix)
            and (item.seen_before is None or record.first_seen_us < item.seen_before)
            and (
                not item.orphaned
                or (record.journal is not None and record.state == "claimed" and record.lease_until_us <= now)
            )
        )

    def is_over(self, record: Record, now: int) -> bool:
        """Whether a record may be removed: nothing would be answered otherwise."""
        return self.rules.standing(record, now) is None

    def purge(self, item: Purge, now: int) -> Purged:
        over: list[tuple[dict[Any, Any], Hashable]] = []
        over += [(self.records, place) for place, record in self.records.items() if self.is_over(record, now)]
        over += [(self.marks, place) for place, (_, expires_at) in self.marks.items() if expires_at <= now]
        if not item.dry_run:
            for table, place in over[: item.limit]:
                del table[place]
        return Purged(min(len(over), item.limit), more=len(over) > item.limit)

    def count(self, item: Count, now: int) -> Stats:
        states: dict[str, int] = {}
        consumers: dict[str, int] = {}
        for record in self.standing(now):
            if item.covers(record.tenant, record.consumer):
                state = counted_state(record)
                states[state] = states.get(state, 0) + 1
                consumers[record.consumer] = consumers.get(record.consumer, 0) + 1
        marks = 0
        for record_id, expires_at in self.marks.values():
            if item.covers(*record_id[:2]) and expires_at > now:
                marks += 1
                consumers[record_id[1]] = consumers.get(record_id[1], 0) + 1
        over = [
            record
            for record in self.records.values()
            if item.tenant in (None, record.tenant) and self.rules.standing(record, now) is None
        ]
        oldest = min((record.expires_at_us for record in over), default=now)
        lag_s = (now - oldest) / 1e6
        return Stats(
            now_us=now, states=states, consumers=consumers, marks=marks, expired=len(over), purge_lag_s=lag_s
        )

    def set_window(self, item: SetWindow, now: int) -> None:
        name = (item.tenant, item.consumer, item.event_type)
        if item.window_us is None:
            self.windows.pop(name, None)
            return
        self.windows[name] = item.window_us
        if not item.existing:
            return
        for place, record in self.records.items():
            own = (*record.id[:2], record.event_type)
            mine = name == (own if own in self.windows else (*record.id[:2], ""))
            mine = mine and record.anchor_us is None
            if mine and record.state in ("done", "failed") and self.rules.standing(record, now) is not None:
                start = record.first_seen_us if record.sliding else record.settled_at_us
                self.records[place] = replace(record, expires_at_us=start + item.window_us)

    def switch_mode(self, item: SwitchMode, now: int) -> int:
        scope = (item.tenant, item.consumer)
        unfinished = sum(
            record.id[:2] == scope and counted_state(record) in UNFINISHED for record in self.standing(now)
        )
        if not unfinished:
            self.modes[scope] = item.mode
        return unfinished
