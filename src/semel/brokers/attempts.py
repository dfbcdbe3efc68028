"""Count attempts in the store, for messages whose transaction leaves nothing behind when it fails.

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
from semel.core.commands import Claim, Granted, Item, Lookup
from semel.core.machine import NOBODY
from semel.core.settlement import replay
from semel.types import Delivery, Outcome, Record
from semel.windows import OFF

__all__ = ["Attempt", "Attempts", "ended_each_time"]


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

    async def end(self, attempt: Attempt, *, counts: bool) -> None:
        """Record that an attempt ended with an error, or remove it if it does not count."""
        if attempt.claim is not None and attempt.granted is not None:
            await self._send([self._plan.release(attempt.claim, attempt.granted, 0.0, count_attempt=counts)])

    async def add_failed(self, delivery: Delivery[Arrival]) -> None:
        """Record an attempt that has failed and was not recorded before it ran."""
        claim = await self._claim(delivery)
        if claim.window_us != OFF:
            await self._send([replace(claim, owner=NOBODY)])

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
