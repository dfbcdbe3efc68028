"""The inbox of the public API."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from semel.client.items import ItemBuilder
from semel.connections import AsyncCallerConnection, Statement
from semel.core.folding import leaders
from semel.errors import LateEvent, PayloadMismatch
from semel.inbox.base import (
    InboxBase,
    InboxStatements,
    PartitionMissing,
    Tell,
    Windows,
    by_type,
    hash_fingerprint,
    is_for_all,
    outcome_of,
)
from semel.keys.limits import check_all
from semel.types import Delivery, Done, Late, Mismatch, Outcome

__all__ = ["AsyncInbox"]

T = TypeVar("T")


class AsyncInbox(InboxBase):
    """Marks in the transaction of the caller's connection. It never commits and never opens a transaction."""

    def __init__(
        self,
        handle: AsyncCallerConnection,
        words: InboxStatements,
        plan: ItemBuilder,
        connect: Callable[[], Awaitable[Windows]],
        tell: Tell | None = None,
        connect_behind: Callable[[], bool] | None = None,
    ) -> None:
        super().__init__(words, plan, tell)
        self._handle = handle
        self._connect = connect
        self._connect_behind = connect_behind

    async def first(self, key: str, *, event_type: str = "", fingerprint: bytes | None = None) -> bool:
        """Mark the event in the caller's transaction; `False`: it was marked before. One round trip.

        Waits for a transaction that has marked the same key, at most `Policy.lock_wait_s`. Raises
        `StillRunning` when it has not ended by then or a claim is running on the key, with the caller's
        transaction still usable; `NoTransaction` if none is open and none would be; `WrongDatabase`. `fingerprint`:
        the payload's bytes, as a claim takes them; `PayloadMismatch` if the key was marked with others. With `ids=`,
        `LateEvent` for an id too old, or too far ahead, to be looked up: nothing was marked.
        """
        return (await self._mark_and_report((key,), event_type, fingerprint))[0]

    async def first_many(self, keys: Sequence[str], *, event_type: str = "") -> list[bool]:
        """Mark many events with one statement, all or none; a later copy of a key is `False`."""
        return await self._mark_and_report(keys, event_type)

    async def _mark_and_report(
        self, keys: Sequence[str], event_type: str, fingerprint: bytes | None = None
    ) -> list[bool]:
        try:
            firsts = await self._mark(keys, event_type, fingerprint)
        except PayloadMismatch:
            self._report(keys, [Mismatch()] * len(keys), event_type)
            raise
        except LateEvent as error:
            self._report(keys, [Late(error.age_s)] * len(keys), event_type)
            raise
        self._report(keys, firsts, event_type)
        return firsts

    async def _mark(
        self, keys: Sequence[str], event_type: str, fingerprint: bytes | None = None
    ) -> list[bool]:
        check_all(keys)
        self._plan.check_times(keys)
        event_type = self._type(event_type)
        window_us = self._window_us(await self._stored_windows(), event_type)
        await self._handle.require_transaction()
        if not window_us:
            return [True] * len(keys)  # no deduplication for this type
        if len(keys) == 1:
            return await self._mark_distinct(keys, event_type, window_us, fingerprint)
        first_at, place_of = leaders(keys)
        distinct = [keys[at] for at in first_at]
        new = await self._mark_distinct(distinct, event_type, window_us, fingerprint) if distinct else []
        return self._spread(new, first_at, place_of)

    async def _mark_distinct(
        self, keys: Sequence[str], event_type: str, window_us: int, fingerprint: bytes | None
    ) -> list[bool]:
        """Mark distinct keys; creates partitions if there is none for their times."""
        handle, words, given = self._handle, self._words, hash_fingerprint(fingerprint)
        try:
            return await handle.run(words.first_many(keys, event_type, window_us, given))
        except PartitionMissing:
            await words.amake_partitions()
        return await handle.run(words.first_many(keys, event_type, window_us, given))

    async def _stored_windows(self) -> Windows:
        """Connect at first use. Behind a pooler that happens in the background: the callers may hold every connection.

        What this call needs is then read in the caller's transaction.
        """
        behind, handle = self._connect_behind, self._handle
        if behind is None or not self._words.may_read_settings(handle) or behind():
            return await self._connect()
        await handle.require_transaction()
        windows = await handle.run(self._words.read_settings())
        return await self._connect() if windows is None else windows

    async def unmark(self, keys: Sequence[str]) -> None:
        """Remove marks that this inbox made in the open transaction, for events that did not run."""
        await self._handle.run(self._words.unmark(keys))

    async def store(self, key: str, value: Any) -> None:
        """Store a value with the mark, for `replay`. Raises `UsageError` if the key is not marked."""
        encoded = self._encode(value)
        await self._stored_windows()
        await self._handle.require_transaction()
        await self._handle.run(self._words.store(key, encoded))

    async def replay(self, key: str) -> Done[Any] | None:
        """Return the value stored with the mark; `None`: the event is not done. Changes nothing."""
        await self._stored_windows()
        return self._done_outcome(await self._handle.run(self._words.replay(key)))

    async def committed(self, key: str) -> bool:
        """Whether this inbox's mark of the key was committed. Use it after a COMMIT without an answer.

        It reads on semel's own connection, after waiting for transactions that may still commit the key.
        `False`: it was not, or another's was; run the whole transaction again. Raises `StillRunning` if that
        takes longer than `Policy.lock_wait_s`.
        """
        await self._connect()
        return await self._words.acommitted(key)

    async def run_batch(
        self, deliveries: Sequence[Delivery[T]], handler: Callable[[list[Delivery[T]]], Awaitable[object]]
    ) -> list[Outcome[None]]:
        """Run `handler` with all new deliveries at once. Returns outcomes in input order.

        If that fails, it is undone and each delivery runs alone on a savepoint, so that one bad event
        does not block the others: its outcome is `Errored`, and its effects are undone. The caller commits.
        Raises errors of the whole transaction: retry it, see `aretry`.
        """
        return list(self._report_batch(deliveries, await self._run_batch(deliveries, handler)))

    async def _run_batch(
        self, deliveries: Sequence[Delivery[T]], handler: Callable[[list[Delivery[T]]], Awaitable[object]]
    ) -> list[Outcome[None]]:
        if len(deliveries) == 1:
            return [await self._run_one(deliveries[0], handler)]
        try:
            async with self._handle.savepoint():
                firsts = await self._first_each(deliveries)
                new = [each for each, first in zip(deliveries, firsts, strict=True) if first]
                if new:
                    await handler(new)
            return [Done(None, replayed=not first) for first in firsts]
        except Exception as error:  # noqa: BLE001 - a handler may raise anything
            await self._check_alive(error)
        return [await self._run_one(delivery, handler) for delivery in deliveries]

    async def _first_each(self, deliveries: Sequence[Delivery[Any]]) -> list[bool]:
        """Mark with one statement per event type, because each has its own window, and per fingerprint."""
        firsts = [False] * len(deliveries)
        for (event_type, fingerprint), places in by_type(deliveries).items():
            keys = [deliveries[place].key for place in places]
            for place, first in zip(places, await self._mark(keys, event_type, fingerprint), strict=True):
                firsts[place] = first
        return firsts

    async def _run_one(
        self, delivery: Delivery[T], handler: Callable[[list[Delivery[T]]], Awaitable[object]]
    ) -> Outcome[None]:
        try:
            async with self._handle.savepoint():
                first = (await self._mark((delivery.key,), delivery.event_type, delivery.fingerprint))[0]
                if first:
                    await handler([delivery])
            return Done(None, replayed=not first)
        except Exception as error:  # noqa: BLE001 - it is this delivery's outcome
            await self._check_alive(error)
            return outcome_of(error)

    async def _check_alive(self, error: Exception) -> None:
        """Raise the error if it concerns the transaction or the connection, not one delivery."""
        if is_for_all(error):
            raise error
        await self._handle.execute(Statement("SELECT 1"))
