"""The rules of two stores that are asked and written together, written once for sync and async.

`Pair.carry_out` is a generator: it yields `AskSide` and receives the answers of that store.

    claim ──► old: not granted ────────────────────────────► that is the answer
                └─ granted ──► new: granted ───────────────► granted, with the fence of the old store
                                └─ known ──► done in old too ► known
                                └─ else ───► released in old ► that is the answer

A handler runs only while both stores have granted the same owner. A claim takes the old store first and a release
gives it back last, so that two callers never wait for each other. A result is written to the old store first.
"""

from collections.abc import Generator, Sequence
from threading import Lock
from typing import Any, Literal, TypeAlias, TypeVar

from msgspec.structs import replace

from semel.core.commands import (
    Answer,
    Claim,
    Forget,
    Granted,
    Item,
    Known,
    Lookup,
    Mark,
    Marked,
    Renew,
    Settle,
)
from semel.stores.migrating.operators import OPERATORS
from semel.stores.migrating.sides import AskSide, ask
from semel.types import Completed, Id, Record, Renewed, Unavailable

__all__ = ["Pair"]

NOTES_MAX = 100_000
"""The most running claims whose two fences are kept. The fence of any other is looked up by its owner."""

T = TypeVar("T")
Steps: TypeAlias = Generator[AskSide, Any, T]
Hot: TypeAlias = Claim | Renew | Settle | Mark


class Pair:
    """The two stores as one. Keeps the fences of running claims, and nothing that could not be looked up."""

    def __init__(self, old_name: str, new_name: str) -> None:
        self.old_name: str = old_name
        self.new_name: str = new_name
        self.after_fork()

    def after_fork(self) -> None:
        """Replace the lock: another thread of the parent may have held it."""
        self._lock = Lock()
        self._notes: dict[tuple[Id, bytes], tuple[int, int]] = {}

    def carry_out(self, items: Sequence[Item]) -> Steps[list[Answer]]:
        """Carry out the items in order; items on different keys share their round trips."""
        answers: list[Answer] = []
        batch: list[Hot] = []
        touched: set[Id] = set()
        for item in items:
            ids = _ids(item)
            if ids is None or not touched.isdisjoint(ids):
                answers += yield from self._batch(batch)
                batch, touched = [], set()
            if ids is None:
                answers.append((yield from OPERATORS[type(item)](item, self.old_name, self.new_name)))
            else:
                assert isinstance(item, Claim | Renew | Settle | Mark)
                batch.append(item)
                touched.update(ids)
        return answers + (yield from self._batch(batch))

    # --- claims, renewals, settlements and marks ---

    def _batch(self, items: list[Hot]) -> Steps[list[Answer]]:
        """Carry out items on different keys, in at most two round trips to each store."""
        if not items:
            return []
        fences = self._noted_fences(items)
        early = {
            at: replace(item, fence=fences[at])
            for at, item in enumerate(items)
            if type(item) is Settle and item.to == "released" and at in fences
        }
        yield from self._look_up_fences(items, fences)
        released = dict(zip(early, (yield from ask("new", list(early.values()))), strict=True))
        answers: list[Answer] = yield from ask("old", items)
        seconds: dict[int, Item] = {}
        for at, (item, answer) in enumerate(zip(items, answers, strict=True)):
            second = None if at in early else _second(item, answer, fences.get(at))
            if second is not None:
                seconds[at] = second
        replies = dict(zip(seconds, (yield from ask("new", list(seconds.values()))), strict=True))
        undone: list[Item] = []
        for at, reply in {**released, **replies}.items():
            first, item = answers[at], items[at]
            answers[at] = self._both(item, first, reply)
            undone += _undo(item, first, reply)
        yield from ask("old", undone)  # without an answer the lease ends it
        with self._lock:
            for at, item in enumerate(items):
                if isinstance(item, Settle) and isinstance(answers[at], Completed):
                    self._notes.pop((item.id, item.owner), None)
        return answers

    def _noted_fences(self, items: list[Hot]) -> dict[int, int | None]:
        """Return the fences in the new store of claims that were granted here, by position."""
        fences: dict[int, int | None] = {}
        with self._lock:
            for at, item in enumerate(items):
                if isinstance(item, Renew | Settle):
                    note = self._notes.get((item.id, item.owner))
                    if note is not None and note[0] == item.fence:
                        fences[at] = note[1]
        return fences

    def _look_up_fences(self, items: list[Hot], fences: dict[int, int | None]) -> Steps[None]:
        """Add the fences of claims that were granted elsewhere; `None`: the new store has no such claim."""
        others = {
            at: item for at, item in enumerate(items) if isinstance(item, Renew | Settle) and at not in fences
        }
        found = yield from ask("new", [Lookup(item.id) for item in others.values()])
        for (at, item), record in zip(others.items(), found, strict=True):
            if isinstance(record, Unavailable) or (isinstance(record, Record) and record.owner != item.owner):
                fences[at] = item.fence  # the new store will refuse it, or is unavailable still
            else:
                fences[at] = record.fence if isinstance(record, Record) else None

    def _both(self, item: Hot, first: Answer, reply: Answer) -> Answer:
        """Return the answer of both stores together."""
        if isinstance(first, Unavailable) or isinstance(reply, Unavailable):
            return first if isinstance(first, Unavailable) else reply
        if type(item) is Claim and isinstance(reply, Granted):
            with self._lock:
                self._notes[item.id, item.owner] = (first.fence, reply.fence)
                if len(self._notes) > NOTES_MAX:
                    del self._notes[next(iter(self._notes))]
            return _merge_claims(first, reply)
        if type(item) is Mark:
            firsts = iter(reply.firsts)
            return Marked([each and next(firsts) for each in first.firsts])
        if isinstance(item, Renew | Settle):
            return first if isinstance(reply, Completed | Renewed) else reply
        return reply


def _ids(item: Item) -> list[Id] | None:
    """Return the keys of an item that may share a round trip with items on other keys."""
    if isinstance(item, Claim | Renew | Settle):
        return [item.id]
    if type(item) is Mark:
        return [(item.tenant, item.consumer, key) for key in item.keys]
    return None


def _second(item: Hot, answer: Answer, fence: int | None) -> Item | None:
    """Return the item for the new store after the old one's answer; `None`: the answer is final.

    A claim that the new store does not have was made by a client of the old store alone, and the old store decides.
    Its result is written to both.
    """
    if type(item) is Mark:
        keys = [key for key, first in zip(item.keys, getattr(answer, "firsts", ()), strict=False) if first]
        return replace(item, keys=keys) if keys else None
    if type(item) is Claim:
        return item if isinstance(answer, Granted) else None
    if not isinstance(answer, Completed | Renewed):
        return None
    assert isinstance(item, Renew | Settle)
    if fence is None:
        return item if isinstance(item, Settle) and item.to in ("done", "failed") else None
    return replace(item, fence=fence)


def _undo(item: Hot, first: Answer, reply: Answer) -> list[Item]:
    """Return what to write to the old store because the new one did not agree."""
    if type(item) is Mark and isinstance(reply, Unavailable) and isinstance(first, Marked):
        # The caller will mark again, and must then be the first.
        return [
            Forget((item.tenant, item.consumer, key))
            for key, is_first in zip(item.keys, first.firsts, strict=True)
            if is_first
        ]
    if type(item) is not Claim or isinstance(reply, Granted):
        return []
    to: Literal["done", "failed", "released"] = reply.state if isinstance(reply, Known) else "released"
    return [
        Settle(
            item.id,
            item.owner,
            first.fence,
            to,
            reply.value if isinstance(reply, Known) else None,
            (isinstance(reply, Known) and reply.rest_us) or item.window_us,
            item.lease_us,
            item.sliding,
            count_attempt=False,
            event_time_us=item.event_time_us if item.apart_us else None,
        )
    ]


def _merge_claims(old: Granted, new: Granted) -> Granted:
    """Return the claim of both: an attempt that only one of them knows counts, and so do its steps."""
    steps = dict(new.steps)
    steps.update(old.steps)
    return Granted(
        old.fence,
        max(old.attempt, new.attempt),
        old.lease_until_us,
        min(old.first_seen_us, new.first_seen_us),
        tuple(steps.items()),
        old.journal if old.attempt >= new.attempt else new.journal,
    )
