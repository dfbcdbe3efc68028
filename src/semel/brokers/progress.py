"""Store how far each partition was started, to recognize redeliveries if the broker does not count them.

Before a batch runs, its highest offsets are written to the store. A record that comes again at or below such an offset
was received by a process that has ended or lost the partition, and may have killed it. One write for each batch.
"""

from collections.abc import Sequence

import msgspec

from semel.brokers.source import Arrival
from semel.client import deliver
from semel.client.client_async import AsyncSemel
from semel.core.commands import Admit, Claim, Granted, Item, Lookup
from semel.core.ids import digest
from semel.core.machine import NOBODY
from semel.errors import StoreUnavailable
from semel.runtime.process import asyncio
from semel.types import Id, Record, Unavailable

__all__ = ["Progress"]

TENANT = CONSUMER = "semel.progress"
"""A tenant of semel's own, so that no user's statistics count these records."""
KEPT_US = 90 * 86400 * 1_000_000
"""Longer than the pause of a partition between two batches."""


class ProgressMark(msgspec.Struct):
    """The highest offset of a partition that was started."""

    offset: int


class Progress:
    """The started offsets of the partitions that one consumer works on."""

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
