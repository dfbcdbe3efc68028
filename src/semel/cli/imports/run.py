"""Write processed keys into a store, a page at a time. A killed import goes on; a repeated one changes nothing."""

from collections import Counter
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any, Literal

import msgspec

from semel.cli.imports.sources import ImportSource, ProcessedKey
from semel.core.commands import (
    Answer,
    Claim,
    Count,
    Forget,
    Granted,
    Item,
    Lookup,
    Mark,
    Settle,
    answer_or_raise,
)
from semel.core.ids import OWN
from semel.core.protocols import Store
from semel.errors import KeyInvalid
from semel.keys.limits import check as check_key
from semel.types import Completed, Record, Stats

__all__ = ["Imported", "Importer", "Kind"]

Kind = Literal["marks", "records"]
OWNER = sha256(b"semel import").digest()[:16]
"""The owner of imported records: a repeated import finds its own."""
PROGRESS = f"{OWN}import"
"""The consumer of the records that hold the cursor."""
PROGRESS_US = 30 * 86400 * 10**6
STEP_US = 10**6
"""Marks of one call share a window, so their rest is rounded up to this."""


class Imported(msgspec.Struct):
    """The counts of an import. `read` is the sum of those up to `refused`."""

    read: int = 0
    written: int = 0
    known: int = 0
    """In the store before, by an earlier import or by semel itself."""
    expired: int = 0
    """Processed longer ago than the window."""
    refused: int = 0
    """Keys that semel does not take: empty, too long, or with control characters."""
    verified: int = 0
    """Written or known, and found in the store afterwards, unless their window ended in between."""
    resumed: bool = False
    """It went on where an earlier import was killed. Its counts begin there."""


class Importer:
    """Imports one source for one consumer."""

    def __init__(
        self, store: Store, source: ImportSource, *, tenant: str, consumer: str, window_us: int, kind: Kind
    ) -> None:
        self._store, self._source = store, source
        self._tenant, self._consumer = tenant, consumer
        self._window_us, self._kind = window_us, kind
        self._name = sha256(msgspec.json.encode([tenant, consumer, kind, source.name])).hexdigest()[:32]
        self._turn = 0

    def run(self, on_page: Callable[[Imported], object], *, dry_run: bool = False) -> Imported:
        """Import every page. Raises `StoreUnavailable`; then run it again."""
        cursor, made = None, Imported()
        if not dry_run:
            cursor = self._cursor()
            made.resumed = cursor is not None
        for page, after in self._source.pages(cursor):
            self._import(page, made, dry_run=dry_run)
            if not dry_run and after is not None:
                self._keep(after)
            on_page(made)
        if not dry_run:
            self._send([Forget(self._slot(turn)) for turn in (0, 1)])
        return made

    def _import(self, page: Sequence[ProcessedKey], made: Imported, *, dry_run: bool) -> None:
        now_us = self._now_us()
        chosen: dict[str, tuple[int, int]] = {}
        copies: Counter[str] = Counter()
        made.read += len(page)
        for each in page:
            if not _is_key(each.key):
                made.refused += 1
                continue
            at_us = min(now_us, each.time_us or now_us)
            window_us = self._window_us if each.rest_us is None else each.rest_us
            if at_us + window_us <= now_us:
                made.expired += 1
            elif each.key in chosen:
                made.known += 1
                copies[each.key] += 1
            else:
                chosen[each.key] = (at_us, window_us)
        if dry_run:
            found = sum(self._has(list(chosen)))
            made.known += found
            made.written += len(chosen) - found
            return
        before = made.known
        written = self._mark(chosen, now_us) if self._kind == "marks" else self._record(chosen)
        made.written += written
        made.known = before + len(chosen) - written
        there = dict(zip(chosen, self._has(list(chosen)), strict=True))
        then_us = self._now_us()
        made.verified += sum(
            1 + copies[key]
            for key, (at_us, window_us) in chosen.items()
            if there[key] or at_us + window_us <= then_us
        )

    def _mark(self, chosen: dict[str, tuple[int, int]], now_us: int) -> int:
        """Mark the keys for the rest of their windows. Returns how many are new."""
        by_rest: dict[int, list[str]] = {}
        for key, (at_us, window_us) in chosen.items():
            rest_us = at_us + window_us - now_us
            by_rest.setdefault(-(-rest_us // STEP_US) * STEP_US, []).append(key)
        answers = self._send(
            [Mark(self._tenant, self._consumer, keys, rest) for rest, keys in by_rest.items()]
        )
        return sum(sum(answer.firsts) for answer in answers)

    def _record(self, chosen: dict[str, tuple[int, int]]) -> int:
        """Write done records. The store makes one for a completion whose record it lacks, and keeps any that it has."""
        answers = self._send(
            [
                Settle((self._tenant, self._consumer, key), OWNER, at_us, "done", None, window_us)
                for key, (at_us, window_us) in chosen.items()
            ]
        )
        return sum(isinstance(answer, Completed) and answer.recreated for answer in answers)

    def _now_us(self) -> int:
        """Return the store's time."""
        counted: Stats = answer_or_raise(self._store.send([Count(PROGRESS)])[0])
        return counted.now_us

    def _has(self, keys: Sequence[str]) -> list[bool]:
        return [
            isinstance(answer, Record)
            for answer in self._send([Lookup((self._tenant, self._consumer, key)) for key in keys])
        ]

    # --- the cursor: in one of two records, so that one of them is always whole ---

    def _slot(self, turn: int) -> tuple[str, str, str]:
        return (self._tenant, PROGRESS, f"{self._name}:{turn % 2}")

    def _cursor(self) -> Any:
        found = [
            msgspec.json.decode(answer.value)
            for answer in self._send([Lookup(self._slot(turn)) for turn in (0, 1)])
            if isinstance(answer, Record) and answer.state == "done" and answer.value
        ]
        if not found:
            return None
        self._turn, cursor = max(found, key=lambda each: int(each[0]))
        return cursor

    def _keep(self, cursor: Any) -> None:
        self._turn += 1
        slot = self._slot(self._turn)
        value = msgspec.json.encode([self._turn, cursor])
        granted = self._send([Forget(slot, force=True), Claim(slot, OWNER, STEP_US, PROGRESS_US)])[1]
        if isinstance(granted, Granted):
            self._send([Settle(slot, OWNER, granted.fence, "done", value, PROGRESS_US)])

    def _send(self, items: Sequence[Item]) -> list[Answer]:
        return [answer_or_raise(answer) for answer in self._store.send(items)] if items else []


def _is_key(key: str) -> bool:
    try:
        check_key(key)
    except KeyInvalid:
        return False
    return True
