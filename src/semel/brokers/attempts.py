"""Count attempts and restarts in the store, for messages whose transaction leaves nothing behind when it fails.

A rolled back transaction keeps no count, and a broker counts deliveries, not runs: a message that was only in the same
process as one that killed it is delivered again too. So attempts are claims without a lease, on the store's own
connection::

    suspected message:  claim (attempt n) ──► run ──► done: the mark takes the claim over
                                               ├────► failed: the claim is released, the attempt counts
                                               ├────► not its fault: released, the attempt does not count
                                               └────► the process dies: the claim stays, the attempt counts
    any other message:                        run ──► failed: claim and release in one, the attempt counts

A released claim (no owner) therefore means that every attempt ended with an error; a claim with an owner means that one
attempt did not end.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from semel.brokers.source import Arrival
from semel.client import deliver
from semel.client.client_async import AsyncSemel
from semel.core.commands import Admit, Claim, Granted, Item, Lookup
from semel.core.ids import digest
from semel.core.machine import NOBODY
from semel.core.settlement import replay
from semel.errors import StoreUnavailable
from semel.runtime.process import asyncio
from semel.types import Delivery, Id, Outcome, Record, Unavailable
from semel.windows import OFF

__all__ = ["Attempt", "Attempts", "Progress", "ended_each_time"]


class Attempt(msgspec.Struct, frozen=True):
    """An attempt that is recorded before it runs."""

    number: int
    claim: Claim | None = None
    """`None`: the window of its event type is off, so nothing is recorded."""
    granted: Granted | None = None


class Attempts:
    """The attempts of one consumer's messages. Each call is one round trip."""

    def __init__(self, once: AsyncSemel) -> None:
        self._once = once
        self._plan = deliver.items_of(once)

    async def lookup(self, deliveries: Sequence[Delivery[Arrival]]) -> list[Record | None]:
        """Return the records of the deliveries; `None` if there is none, or if the store did not answer."""
        if not deliveries:
            return []
        answers = await self._send([Lookup(self._plan.id(each.key)) for each in deliveries])
        return [answer if isinstance(answer, Record) else None for answer in answers]

    async def begin(self, delivery: Delivery[Arrival]) -> Attempt | Outcome[Any]:
        """Record the begin of an attempt. Returns an outcome if the message must not run."""
        claim = await self._claim(delivery)
        if claim.window_us == OFF:
            return Attempt(max(1, delivery.body.deliveries))
        [answer] = await self._send([claim])
        if not isinstance(answer, Granted):
            return replay(answer, None)
        return Attempt(answer.attempt, claim, answer)

    async def end(self, attempt: Attempt, error: BaseException | None = None, *, counts: bool) -> None:
        """Record that an attempt ended with an error, or remove it if it does not count."""
        if attempt.claim is not None and attempt.granted is not None:
            claim, granted = attempt.claim, attempt.granted
            await self._send([self._plan.release(claim, granted, 0.0, count_attempt=counts, error=error)])

    async def add_failed(self, delivery: Delivery[Arrival], error: BaseException) -> None:
        """Record an attempt that has failed and was not recorded before it ran."""
        claim = await self._claim(delivery)
        if claim.window_us != OFF:
            await self._send([replace(claim, owner=NOBODY, error=self._plan.describe(error))])

    async def _claim(self, delivery: Delivery[Arrival]) -> Claim:
        windows = await deliver.windows(self._once)
        claim = self._plan.claim(windows, delivery.key, event_type=delivery.event_type)
        return replace(claim, lease_us=0)

    async def _send(self, items: Sequence[Item]) -> list[Any]:
        return await deliver.send(self._once, items)


def ended_each_time(record: Record | None, deliveries: int) -> bool:
    """Whether each earlier delivery of a message ended with a recorded error, so that none killed its process."""
    return (
        record is not None
        and record.state == "claimed"
        and record.owner == NOBODY
        and record.attempt >= deliveries - 1
    )


TENANT = CONSUMER = "semel.progress"
"""A tenant of semel's own, so that no user's statistics count these records."""
KEPT_US = 90 * 86400 * 1_000_000
"""Longer than the pause of a partition between two batches."""


class ProgressMark(msgspec.Struct):
    """The highest offset of a partition that was started."""

    offset: int


class Progress:
    """Stores how far each partition was started, to recognize redeliveries if the broker does not count them.

    Before a batch runs, its highest offsets are written to the store. A record that comes again at or below such an
    offset was received by a process that has ended or lost the partition, and may have killed it. One write for each
    batch.
    """

    def __init__(self, once: AsyncSemel) -> None:
        self._once = once
        self._scope = f"{once.tenant}/{once.consumer}/"
        self._admitted = False
        self._writing = asyncio.Lock()
        self._before: dict[str, int] = {}
        """The highest offset that others started, by partition, as last read from the store."""
        self._mine: dict[str, int] = {}
        """The highest offset that this process started, by partition."""

    async def look(self, arrivals: Sequence[Arrival]) -> None:
        """Read how far others got in partitions that are new here. One round trip, or none."""
        places = {place for each in arrivals if (place := _place(each)[0]) and place not in self._before}
        if not places:
            return
        await self._admit()
        named = sorted(places)
        answers = await self._send([Lookup(self._id(place)) for place in named])
        for place, answer in zip(named, answers, strict=True):
            self._before[place] = _offset_in(answer)

    def was_started(self, arrival: Arrival) -> bool:
        """Whether another process started this delivery before. Call `look` first."""
        place, offset = _place(arrival)
        return bool(place) and offset <= self._before.get(place, -1)

    async def start(self, arrivals: Sequence[Arrival]) -> None:
        """Record that these deliveries start. Raises `StoreUnavailable`: then none of them may start."""
        async with self._writing:  # two writes of one partition at once could leave the lower offset
            await self._start(arrivals)

    async def _start(self, arrivals: Sequence[Arrival]) -> None:
        highest: dict[str, int] = {}
        for each in arrivals:
            place, offset = _place(each)
            if place and offset > self._mine.get(place, self._before.get(place, -1)):
                highest[place] = max(offset, highest.get(place, -1))
        if not highest:
            return
        await self._admit()
        claims = [
            Claim(self._id(place), NOBODY, 0, KEPT_US, meta=msgspec.json.encode(ProgressMark(offset)))
            for place, offset in highest.items()
        ]
        for answer in await self._send(claims):
            if not isinstance(answer, Granted):
                raise _no_answer(answer)
        self._mine.update(highest)

    async def _admit(self) -> None:
        if not self._admitted:
            [answer] = await self._send([Admit(TENANT, CONSUMER, "lease")])
            if isinstance(answer, Unavailable):
                raise _no_answer(answer)
            self._admitted = True

    async def _send(self, items: Sequence[Item]) -> list[object]:
        return await deliver.send(self._once, items)

    def _id(self, place: str) -> Id:
        return (TENANT, CONSUMER, digest((TENANT, CONSUMER, self._scope + place)).hex())


def _place(arrival: Arrival) -> tuple[str, int]:
    """Return the partition and the offset of a delivery; the partition is empty if the broker counts deliveries."""
    if arrival.deliveries:
        return "", 0
    place, _, number = (arrival.position or "").rpartition("/")
    return (place, int(number)) if number.isdecimal() else ("", 0)


def _offset_in(answer: object) -> int:
    if isinstance(answer, Unavailable):
        raise _no_answer(answer)
    if not isinstance(answer, Record) or answer.meta is None:
        return -1
    return msgspec.json.decode(answer.meta, type=ProgressMark).offset


def _no_answer(answer: object) -> StoreUnavailable:
    error = StoreUnavailable("the store gave no answer, so nothing can be started")
    error.__cause__ = getattr(answer, "error", None)
    return error
