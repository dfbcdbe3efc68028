"""The records of a transaction by partition: which go, and which wait."""

import logging
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from time import monotonic
from typing import Any

import msgspec

from semel.brokers.kafka.source import RecordPosition
from semel.brokers.kafka.transactor import PartitionBatch, ProducedMessage, Where
from semel.brokers.source import Arrival, DeadLetterInfo
from semel.client import deliver
from semel.client.claims import Claimed
from semel.client.client_async import AsyncSemel
from semel.core.backoff import backoff_s
from semel.errors import StoreError
from semel.runtime.process import asyncio
from semel.types import Delivery, Done, Lost, Renewed, SettleAnswer, Unavailable

__all__ = ["Backlog", "Piece", "TransactionClaims", "hold_back", "parts_of"]


class Piece(msgspec.Struct, eq=False):
    """One record, from its receipt until the transaction that moves its offset is committed."""

    arrival: Arrival
    number: int = 0
    """Its number in the current transaction."""
    delivery: Delivery[Arrival] | None = None
    leader: "Piece | None" = None
    """The first record of its key in the same transaction: this one is a copy, and shares its result."""
    claim: Claimed | None = None
    runs: bool = False
    """Whether its handler runs or has run."""
    sends: Sequence[ProducedMessage] = ()
    letter: DeadLetterInfo | None = None
    """Its output is its dead letter."""
    failure: BaseException | None = None
    """The failure for its record after the dead letter is committed."""
    again_s: float | None = None
    """The delay before its next try, if it does not go now."""
    counts: bool = False
    """Its attempt is used up."""
    error: BaseException | None = None
    """The error of its attempt, if it is tried again."""
    again: bool = False
    """Whether it was reported to hooks as received."""

    @property
    def place(self) -> RecordPosition:
        """Its position."""
        place: RecordPosition = self.arrival.handle
        return place

    @property
    def where(self) -> Where:
        """Its partition."""
        return self.place.where

    @property
    def dead_lettered(self) -> bool:
        """Whether its output is its dead letter."""
        return self.letter is not None

    def renew(self) -> None:
        """Reset the results of the last turn."""
        self.leader = self.claim = self.failure = self.letter = self.again_s = self.error = None
        self.runs = self.counts = False
        self.sends = ()


def hold_back(pieces: Sequence[Piece]) -> None:
    """Hold back the records behind one that does not go, and its copies."""
    stopped: set[Where] = set()
    before = -1
    while len(stopped) != before:
        before = len(stopped)
        for piece in pieces:
            leader = piece.leader
            if piece.again_s is None and (
                piece.where in stopped
                or (leader is not None and (leader.again_s is not None or leader.dead_lettered))
            ):
                piece.again_s = 0.0
            if piece.again_s is not None:
                stopped.add(piece.where)


def parts_of(pieces: Sequence[Piece]) -> list[PartitionBatch]:
    """Return the parts of the transaction."""
    found: dict[Where, tuple[Any, int, list[ProducedMessage]]] = {}
    for piece in pieces:
        if piece.again_s is None:
            place = piece.place
            sends = found[place.where][2] if place.where in found else []
            sends += piece.sends
            found[place.where] = (place.offsets, place.offset + 1, sends)
    return [PartitionBatch(where, *each) for where, each in found.items()]


class _Lane(msgspec.Struct):
    """The pending records of one partition, in order."""

    offsets: Any
    pieces: deque[Piece] = msgspec.field(default_factory=deque[Piece])
    due_at: float = 0.0
    alone_until: int = -1
    """Up to this offset each record runs alone: one of them may have killed its worker."""


class Backlog:
    """The pending records by partition, until they are committed or their partition is revoked."""

    def __init__(self) -> None:
        self._lanes: dict[Where, _Lane] = {}

    def __len__(self) -> int:
        return sum(len(lane.pieces) for lane in self._lanes.values())

    def add(self, arrivals: Sequence[Arrival]) -> None:
        """Add received records."""
        for arrival in arrivals:
            place: RecordPosition = arrival.handle
            lane = self._lanes.get(place.where)
            if lane is None or lane.offsets is not place.offsets:
                lane = self._lanes[place.where] = _Lane(place.offsets)
            lane.pieces.append(Piece(arrival))

    def keep(self, ours: Any) -> None:
        """Drop the records of revoked partitions."""
        for where, lane in list(self._lanes.items()):
            if not lane.pieces or not ours(lane.pieces[0].place):
                del self._lanes[where]

    def _ready(self) -> list[_Lane]:
        now = monotonic()
        return [lane for lane in self._lanes.values() if lane.pieces and lane.due_at <= now]

    def ready(self) -> int:
        """Return how many records may go now."""
        return sum(len(lane.pieces) for lane in self._ready())

    def next_at(self) -> float | None:
        """Return when the next waiting partition is due; `None` if none has records."""
        return min((lane.due_at for lane in self._lanes.values() if lane.pieces), default=None)

    def full_partitions(self, most: int) -> frozenset[Where]:
        """Return the waiting partitions that have `most` pending records or more: receive no more from them."""
        now = monotonic()
        return frozenset(
            where for where, lane in self._lanes.items() if lane.due_at > now and len(lane.pieces) >= most
        )

    def take(self, most: int) -> list[Piece]:
        """Return the next records, a fair share of each partition; they stay pending."""
        ready = self._ready()
        for lane in ready:
            if lane.pieces[0].place.offset <= lane.alone_until:
                lane.pieces[0].renew()
                return [lane.pieces[0]]
        share = -(-most // max(1, len(ready)))
        taken = [piece for lane in ready for piece in _first(lane.pieces, share)]
        for piece in taken:
            piece.renew()
        return taken

    def alone(self, piece: Piece) -> None:
        """Run a record alone that was tried before: it may have killed its worker."""
        lane = self._lanes.get(piece.where)
        if lane is not None:
            lane.alone_until = max(lane.alone_until, piece.place.offset)

    def mark_committed(self, pieces: Sequence[Piece]) -> None:
        """Remove committed records."""
        for piece in pieces:
            place = piece.place
            place.offsets.complete(place.offset)
            lane = self._lanes.get(place.where)
            if lane is not None and lane.pieces and lane.pieces[0] is piece:
                lane.pieces.popleft()

    def postpone(self, pieces: Sequence[Piece]) -> None:
        """Delay each partition until the retry of its first record that did not go."""
        seen: set[Where] = set()
        for piece in pieces:
            if piece.again_s is not None and piece.where not in seen:
                seen.add(piece.where)
                lane = self._lanes.get(piece.where)
                if lane is not None:
                    lane.due_at = monotonic() + piece.again_s


def _first(pieces: deque[Piece], most: int) -> Iterator[Piece]:
    for at, piece in enumerate(pieces):
        if at == most:
            return
        yield piece


_log = logging.getLogger("semel.kafka")

RETRY_FIRST_S = 0.02
RETRY_MAX_S = 1.0

SettleCall = Callable[[Sequence[Claimed]], Awaitable[list[SettleAnswer]]]


class TransactionClaims:
    """The claims of a transaction's records, and their client."""

    def __init__(self, once: AsyncSemel) -> None:
        self._once = once

    async def claim(self, pieces: Sequence[Piece], handler: Any) -> Sequence[Any]:
        """Claim the keys of these records in one round trip. Returns the outcome for each."""
        try:
            deliveries = [piece.delivery for piece in pieces if piece.delivery is not None]
            answers = await deliver.claim_many(self._once, deliveries, handler)
        except StoreError as error:
            return [Unavailable(error)] * len(pieces)
        for piece in pieces:
            piece.again = True
        return answers

    def hold(self, piece: Piece, claim: Claimed) -> None:
        """Renew the claim until it is settled."""
        piece.claim = claim
        deliver.keep(claim)

    async def check(self, pieces: Sequence[Piece], outage_s: Callable[[BaseException], float]) -> None:
        """Check the claims before the commit: a process that was paused past its lease does not know it."""
        late = [
            (piece, piece.claim)
            for piece in pieces
            if piece.claim is not None and (piece.claim.lost or piece.claim.deadline_s <= 0)
        ]
        if not late:
            return
        answers = await self._once.renew_many([claim for _, claim in late])
        for (piece, _), answer in zip(late, answers, strict=True):
            if isinstance(answer, Renewed):
                continue
            piece.again_s = outage_s(answer.error) if isinstance(answer, Unavailable) else 0.0
            self.lose([piece])

    async def settle(self, committed: Sequence[Piece], hurried: Callable[[], bool]) -> int:
        """Complete committed records, or fail dead-lettered ones. Returns how many could not be recorded."""
        done: list[Claimed] = []
        failed: list[tuple[Claimed, BaseException]] = []
        for piece in committed:
            if piece.claim is not None and piece.failure is not None:
                failed.append((piece.claim, piece.failure))
            elif piece.claim is not None:
                done.append(piece.claim)
        for claim, error in failed:
            deliver.observer_of(claim).expect(error=error)
        errors = {id(claim): error for claim, error in failed}

        async def fail(claims: Sequence[Claimed]) -> list[SettleAnswer]:
            return await self._once.fail_many(claims, [errors[id(claim)] for claim in claims])

        unrecorded = await self._settle(done, self._once.complete_many, hurried)
        return unrecorded + await self._settle([claim for claim, _ in failed], fail, hurried)

    async def _settle(
        self, claims: Sequence[Claimed], settle: SettleCall, hurried: Callable[[], bool]
    ) -> int:
        """Retry settlements while the store is unavailable, until the claims end: the effect has happened."""
        tries = unrecorded = 0
        while claims:
            verdicts = await settle(claims)
            lost = sum(isinstance(verdict, Lost) for verdict in verdicts)
            if lost:
                _log.warning("%d committed keys were claimed by others meanwhile", lost)
            pairs = zip(claims, verdicts, strict=True)
            claims = [claim for claim, verdict in pairs if isinstance(verdict, Unavailable)]
            ended = [claim for claim in claims if claim.deadline_s <= 0 or hurried()]
            for claim in ended:
                deliver.drop(claim)
                deliver.observer_of(claim).note_outcome(Done(None, recorded=False))
            unrecorded += len(ended)
            claims = [claim for claim in claims if claim not in ended]
            if claims:
                await asyncio.sleep(backoff_s(tries, RETRY_FIRST_S, RETRY_MAX_S))
                tries += 1
        return unrecorded

    async def give_back(self, pieces: Sequence[Piece]) -> None:
        """Release the claims of records that did not go; only a failed attempt counts."""
        groups: dict[tuple[float, bool], list[tuple[Claimed, BaseException | None]]] = defaultdict(list)
        for piece in pieces:
            if piece.again_s is not None and piece.claim is not None:
                groups[piece.again_s if piece.counts else 0.0, piece.counts].append(
                    (piece.claim, piece.error)
                )
        for (delay_s, counts), group in groups.items():
            claims, errors = [claim for claim, _ in group], [error for _, error in group]
            await self._once.release_many(claims, delay_s=delay_s, count_attempt=counts, errors=errors)
            for claim in claims:
                deliver.drop(claim)  # without an answer the lease ends on its own

    def report_copies(self, gone: Sequence[Piece], handler: Any) -> None:
        """Report committed records that share the result of an earlier record of their transaction."""
        reporter = deliver.reporter_of(self._once)
        for piece in gone if reporter.listens else ():
            if piece.leader is not None and piece.delivery is not None:
                items = deliver.items_of(self._once)
                record_id, delivery = items.id(piece.delivery.key), items.with_event_type(piece.delivery)
                reporter.report_copy(record_id, handler, delivery, Done(None, replayed=True), parks=False)

    def lose(self, pieces: Sequence[Piece]) -> None:
        """Drop claims that another attempt has taken over, and report them."""
        for piece in pieces:
            if piece.claim is not None:
                deliver.observer_of(piece.claim).note_outcome(Lost())
        self.drop(pieces)

    def drop(self, pieces: Sequence[Piece]) -> None:
        """Stop renewing claims that are lost, or whose transaction has an unknown end: their leases end."""
        for piece in pieces:
            if piece.claim is not None:
                deliver.drop(piece.claim)
                piece.claim = None
