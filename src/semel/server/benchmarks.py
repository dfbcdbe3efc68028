"""Results of `semel bench --keep`: records of the measured store, under a tenant of their own.

There are a few places for them, and the newest result takes that of the oldest: they are found by their keys, nobody
lists records for them.
"""

from collections.abc import Generator, Iterable
from typing import Any, TypeAlias

import msgspec

from semel.codec import decode, encode
from semel.core.commands import Admit, Answer, Claim, Forget, Granted, Item, Lookup, Settle, answer_or_raise
from semel.errors import RecordCorrupt, StoreError
from semel.runtime.process import new_owner
from semel.types import Id, Record

__all__ = ["LOOKUPS", "TENANT", "Result", "Row", "keep", "results"]

TENANT = "semel.benchmarks"
CONSUMER = "benchmarks"
"""Where the records are: no caller of the service can name that tenant."""
KEPT = 6
FOREVER_US = 100 * 365 * 86400 * 1_000_000
"""A result is kept until a newer one takes its place."""
LEASE_US = 10_000_000
PLACES: tuple[Id, ...] = tuple((TENANT, CONSUMER, str(number)) for number in range(KEPT))
LOOKUPS: tuple[Lookup, ...] = tuple(map(Lookup, PLACES))
"""What finds the results."""

Asking: TypeAlias = Generator[Item, Any, None]
"""Yields items, is sent their answers."""


class Row(msgspec.Struct, frozen=True):
    """One comparison."""

    what: str
    per_second: float
    limit: str
    limit_per_second: float
    ratio: float


class Result(msgspec.Struct, frozen=True):
    """What `semel bench` says, and when the store took it."""

    store: str
    seconds: float
    semel: str
    python: str
    machine: str
    rows: list[Row]
    measured_us: int = 0
    """By the store's clock."""


def keep(document: dict[str, Any]) -> Asking:
    """Store a result in place of the oldest. Raises `StoreError` where every place is being written to."""
    answer_or_raise((yield Admit(TENANT, CONSUMER, "lease")))
    found: list[tuple[int, Id, Record | None]] = []
    for lookup in LOOKUPS:
        record = answer_or_raise((yield lookup))
        is_done = isinstance(record, Record) and record.state == "done"
        found.append((record.settled_at, lookup.id, record) if is_done else (0, lookup.id, None))
    for _, place, oldest in sorted(found, key=lambda each: each[:2]):
        if oldest is not None:
            answer_or_raise((yield Forget(place, fence=oldest.fence)))
        owner = new_owner()
        granted = answer_or_raise((yield Claim(place, owner, LEASE_US, FOREVER_US)))
        if isinstance(granted, Granted):
            value = encode(document)
            answer_or_raise((yield Settle(place, owner, granted.fence, "done", value, FOREVER_US, LEASE_US)))
            return
    raise StoreError("the result could not be stored: others are being written; try again")


def results(answers: Iterable[Answer]) -> list[Result]:
    """The results among the answers to `LOOKUPS`, the newest first. Raises `StoreUnavailable`."""
    found: list[Result] = []
    for answer in answers:
        record = answer_or_raise(answer)
        if isinstance(record, Record) and record.state == "done" and record.value is not None:
            try:
                result = msgspec.convert(decode(record.value), Result)
            except (msgspec.ValidationError, RecordCorrupt):
                continue  # of a version to come: the others are worth showing
            found.append(msgspec.structs.replace(result, measured_us=record.settled_at))
    return sorted(found, key=lambda result: -result.measured_us)
