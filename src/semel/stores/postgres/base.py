"""What both colours of the store share: its place, what is known of it, and what becomes of an error."""

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
"""How often a stage is begun again that the server has undone for the sake of others."""
PAUSE_MAX_S = 0.02
CLOCK_OFF_S = 2.0
"""By how much the server's clock may differ from ours without a word: it harms nothing, and explains a lot."""
EXTENDS_MAX = 3
EXTEND = Stage("extend", [])
"""Partitions are made ahead by whoever cleans; where nobody did for days, a claim that finds none has them made."""

_log = logging.getLogger("semel")


class PostgresStoreBase:
    """What both colours have in common: the place, what is known of it, and who listens."""

    batch_type: type[PostgresBatch] = PostgresBatch

    def __init__(self, place: PostgresTarget, clock: Clock | None) -> None:
        self.place = place
        self.name: str = place.name
        self.weaknesses: tuple[str, ...] = ()
        """What weakens the guarantee, as found by the start checks."""
        self.identity: str = ""
        """Which table of which database this is, once it is open."""
        self.clock = clock
        self.ears: ChangeListeners = ChangeListeners()
        self.consumers: dict[Scope, int] = {}
        self.kinds: dict[Scope, str] = {}
        self.statements: dict[str, str] = statements(place.schema)
        self.capabilities: Capabilities = self._powers(durable=True)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    def _powers(self, *, durable: bool) -> Capabilities:
        return Capabilities(durable=durable, transactional=True, shared=True, notifies=True)

    def apply_schema_state(self, found: SchemaState) -> None:
        """Apply the results of the checks at the start."""
        for weakness in found.weaknesses:
            _log.warning("%s: %s", self.name, weakness)
        ahead_s = found.clock_us / 1e6 - time.time()
        if abs(ahead_s) > CLOCK_OFF_S:
            _log.info("%s: its clock is %+.1f s from ours; its own decides", self.name, ahead_s)
        self.weaknesses = found.weaknesses
        self.identity = found.identity
        self.capabilities = self._powers(durable=found.durable)

    def batch(self, items: Sequence[Item]) -> PostgresBatch:
        """The items as they are to be said."""
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
        """The items as one statement, if they are one item of the plain case and its consumer is known.

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
        """The answer of a single call, after everybody in this process was told of what changed."""
        if isinstance(answer, Completed):
            self.ears.tell((call.item.id,))
        elif isinstance(answer, Busy):
            self.ears.note((call.item,), (answer,))
        return [answer]

    def forget_consumers(self) -> None:
        """Forget the numbers of consumers: perhaps the next connection leads to another server."""
        self.consumers.clear()
        self.kinds.clear()

    def answer_failed_stage(
        self, batch: PostgresBatch, stage: Stage, rest: Sequence[Stage], error: StoreError
    ) -> bool:
        """Answer the items of failed stages. Returns whether to try the rest. Raises if nothing was answered."""
        if not isinstance(error, StoreUnavailable):
            raise error
        lost = [stage] if isinstance(error, StoreFull) else [stage, *rest]
        if not isinstance(error, StoreFull) and not any(each is not None for each in batch.answers):
            raise error
        for each in lost:
            for position in each.positions:
                batch.refuse(position, error)
        return isinstance(error, StoreFull)

    def again(self, batch: PostgresBatch, stage: Stage, error: psycopg.Error, tries: int) -> bool:
        """Whether a stage that ended in an error is begun again: undone, cut off, or without partition."""
        if is_cut(error):
            batch.start_over()
            return not tries and _repeatable(batch, stage)
        if is_unplaced(error):
            return tries < EXTENDS_MAX
        return is_transient(error) and tries < REPEATS_MAX - 1

    def finish_batch(self, batch: PostgresBatch) -> list[Answer]:
        """Notify the waiters in this process of changed records, and return the answers."""
        self.ears.tell(batch.changed)
        self.ears.note(batch.items, batch.answers)
        return batch.answers

    def closed_error(self) -> StoreClosed:
        """Used after `close`."""
        return StoreClosed(f"{self.name} is closed; open() it again to use it")


def _repeatable(batch: PostgresBatch, stage: Stage) -> bool:
    """Whether saying it twice is harmless: all but marks carry an owner or a fence."""
    return not any(isinstance(batch.items[position], Mark) for position in stage.positions)


def error_as_rows(ask: SendCalls, error: psycopg.Error) -> list[Any]:
    """The error as a row, where the talk has asked for that; otherwise it goes on its way."""
    if error.sqlstate in ask.told:
        return [(error.sqlstate,)]
    raise error


def pause_s(tries: int) -> float:
    """How long to wait before a stage is begun again."""
    return jitter.uniform(0, PAUSE_MAX_S) * (tries + 1)
