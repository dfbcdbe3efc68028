"""The part of the store that sync and async share: its settings, its caches, and the handling of errors."""

import logging
import time
from collections.abc import Sequence
from typing import Any

import psycopg

from semel.clock import Clock
from semel.core.commands import Answer, Claim, Item, Mark, Settle
from semel.core.protocols import Capabilities
from semel.errors import StoreClosed, StoreError, StoreFull, StoreUnavailable
from semel.runtime.jitter import jitter
from semel.stores.postgres.batch import PostgresBatch, Scope, SendCalls, Stage
from semel.stores.postgres.errors import is_cut, is_transient, is_unplaced
from semel.stores.postgres.notifications import ChangeListeners
from semel.stores.postgres.schema import SchemaState, statements
from semel.stores.postgres.settings import PostgresTarget
from semel.stores.postgres.single import SingleCall, single_call
from semel.types import Busy, Completed

__all__ = ["EXTEND", "REPEATS_MAX", "PostgresStoreBase", "error_as_rows", "pause_s"]

REPEATS_MAX = 20
"""How often a stage is tried that the server rolls back because of other transactions."""
PAUSE_MAX_S = 0.02
CLOCK_OFF_S = 2.0
"""A larger difference between the server's clock and ours is logged: it does no harm, but explains a lot."""
EXTENDS_MAX = 3
EXTEND = Stage("extend", [])
"""The cleaner creates partitions ahead of time. If it has not run for days, a claim that finds none creates them."""

_log = logging.getLogger("semel")


class PostgresStoreBase:
    """The settings, caches and listeners of a store, for sync and async."""

    batch_type: type[PostgresBatch] = PostgresBatch

    def __init__(self, place: PostgresTarget, clock: Clock | None) -> None:
        self.place = place
        self.name: str = place.name
        self.weaknesses: tuple[str, ...] = ()
        """What weakens the guarantee, from the start checks."""
        self.identity: str = ""
        """The identity of the table and its database, once the store is open."""
        self.clock = clock
        self.changes: ChangeListeners = ChangeListeners()
        self.consumers: dict[Scope, int] = {}
        self.kinds: dict[Scope, str] = {}
        self.statements: dict[str, str] = statements(place.schema, durable_claims=place.durable_claims)
        self.durable_claims: bool = place.durable_claims
        self.capabilities: Capabilities = self._powers(durable=True)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    def _powers(self, *, durable: bool) -> Capabilities:
        return Capabilities(
            durable=durable, transactional=True, shared=True, notifies=True, endless=durable, refreshes=True
        )

    def apply_state(self, found: SchemaState) -> None:
        """Store the results of the start checks, and log warnings about them."""
        for weakness in found.weaknesses:
            _log.warning("%s: %s", self.name, weakness)
        ahead_s = found.clock_us / 1e6 - time.time()
        if abs(ahead_s) > CLOCK_OFF_S:
            _log.info("%s: its clock is %+.1f s from ours; the server's clock decides", self.name, ahead_s)
        self.weaknesses = found.weaknesses
        self.identity = found.identity
        self.capabilities = self._powers(durable=found.durable)

    def batch(self, items: Sequence[Item]) -> PostgresBatch:
        """Build the batch of these items."""
        now = None if self.clock is None else self.clock.now_us()
        place = self.place
        return self.batch_type(
            items,
            self.consumers,
            self.kinds,
            now=now,
            readable_keys=place.readable_keys,
            schema=place.schema,
            retention=place.retention,
        )

    def single(self, items: Sequence[Item]) -> SingleCall | None:
        """Return a single statement for the items, or `None`: it needs one plain item of a cached consumer.

        Behind a pooler nothing can be prepared; records of consumers with declared ids are in partitions.
        """
        if len(items) != 1 or self.place.pooler:
            return None
        item = items[0]
        if not isinstance(item, Claim | Settle):
            return None
        scope = item.id[:2]
        consumer = self.consumers.get(scope)
        if consumer is None or scope in self.kinds:
            return None
        now = None if self.clock is None else self.clock.now_us()
        return single_call(item, consumer, now, readable_keys=self.place.readable_keys)

    def report_answer(self, call: SingleCall, answer: Answer) -> list[Answer]:
        """Return the answer of a single call, after notifying the listeners of this process."""
        if isinstance(answer, Completed):
            self.changes.notify((call.item.id,))
        elif isinstance(answer, Busy):
            self.changes.note((call.item,), (answer,))
        return [answer]

    def forget_consumers(self) -> None:
        """Clear the cached numbers of consumers: the next connection may lead to another server."""
        self.consumers.clear()
        self.kinds.clear()

    def refuse_stages(
        self, batch: PostgresBatch, stage: Stage, rest: Sequence[Stage], error: StoreError
    ) -> bool:
        """Answer the items of a failed stage with the error. Returns whether the rest is worth trying.

        Raises the error if it is not `StoreUnavailable`, or if no item has been answered. `StoreFull` never raises,
        and refuses only this stage.
        """
        if not isinstance(error, StoreUnavailable):
            raise error
        lost = [stage] if isinstance(error, StoreFull) else [stage, *rest]
        if not isinstance(error, StoreFull) and not any(each is not None for each in batch.answers):
            raise error
        for each in lost:
            for position in each.positions:
                batch.refuse(position, error)
        return isinstance(error, StoreFull)

    def may_retry(self, batch: PostgresBatch, stage: Stage, error: psycopg.Error, tries: int) -> bool:
        """Whether to retry a failed stage: it was rolled back, cut off, or found no partition."""
        if is_cut(error):
            batch.start_over()
            return not tries and _repeatable(batch, stage)
        if is_unplaced(error):
            return tries < EXTENDS_MAX
        return is_transient(error) and tries < REPEATS_MAX - 1

    def finish(self, batch: PostgresBatch) -> list[Answer]:
        """Return the answers, after notifying the listeners of this process."""
        self.changes.notify(batch.changed)
        self.changes.note(batch.items, batch.answers)
        return batch.answers

    def closed_error(self) -> StoreClosed:
        """Return the error for calls made after `close()`."""
        return StoreClosed(f"{self.name} is closed; open() it again to use it")


def _repeatable(batch: PostgresBatch, stage: Stage) -> bool:
    """Whether a stage may be repeated: all items but marks carry an owner or a fence."""
    return not any(isinstance(batch.items[position], Mark) for position in stage.positions)


def error_as_rows(ask: SendCalls, error: psycopg.Error) -> list[Any]:
    """Return the error as a row, if the talk expects it; else raise it."""
    if error.sqlstate in ask.expected_errors:
        return [(error.sqlstate,)]
    raise error


def pause_s(tries: int) -> float:
    """Return how long to wait before a stage is retried."""
    return jitter.uniform(0, PAUSE_MAX_S) * (tries + 1)
