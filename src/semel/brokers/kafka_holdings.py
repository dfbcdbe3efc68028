"""The claims of a transaction: held while it is made, settled when it is known how it ended."""

import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence

from semel.aclient import AsyncSemel
from semel.brokers.kafka_batch import Piece
from semel.brokers.outages import backoff_s
from semel.claims import Claimed
from semel.lazily import asyncio
from semel.types import Lost, Renewed, Unavailable, Verdict

__all__ = ["TransactionClaims"]

_log = logging.getLogger("semel.kafka")

RETRY_FIRST_S = 0.02
RETRY_MAX_S = 1.0

Tell = Callable[[Sequence[Claimed]], Awaitable[list[Verdict]]]


class TransactionClaims:
    """What is claimed for the records of a transaction, through the client that claimed it."""

    def __init__(self, once: AsyncSemel) -> None:
        self._once = once

    def hold(self, piece: Piece, claim: Claimed) -> None:
        """Have the claim renewed until it is settled."""
        piece.claim = claim
        self._once._hold(claim)  # noqa: SLF001 - the claim and its client are one mechanism

    def _drop(self, claim: Claimed) -> None:
        self._once._drop(claim)  # noqa: SLF001

    async def check(self, pieces: Sequence[Piece], outage_s: Callable[[BaseException], float]) -> None:
        """A process that was stopped past its lease does not know it yet: ask before anything is written."""
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
            self.forsake([piece])

    async def settle(self, committed: Sequence[Piece], hurried: Callable[[], bool]) -> int:
        """Complete what is committed, or fail it where that was its letter; returns how many were not heard."""
        done: list[Claimed] = []
        failed: list[tuple[Claimed, BaseException]] = []
        for piece in committed:
            if piece.claim is not None and piece.failure is not None:
                failed.append((piece.claim, piece.failure))
            elif piece.claim is not None:
                done.append(piece.claim)
        errors = {id(claim): error for claim, error in failed}

        async def fail(claims: Sequence[Claimed]) -> list[Verdict]:
            return await self._once.fail_many(claims, [errors[id(claim)] for claim in claims])

        unheard = await self._tell(done, self._once.complete_many, hurried)
        return unheard + await self._tell([claim for claim, _ in failed], fail, hurried)

    async def _tell(self, claims: Sequence[Claimed], tell: Tell, hurried: Callable[[], bool]) -> int:
        """Repeat what a store that is away did not hear, until the claims end: the effect has happened."""
        tries = unheard = 0
        while claims:
            verdicts = await tell(claims)
            lost = sum(isinstance(verdict, Lost) for verdict in verdicts)
            if lost:
                _log.warning("%d committed keys were claimed by others meanwhile", lost)
            pairs = zip(claims, verdicts, strict=True)
            claims = [claim for claim, verdict in pairs if isinstance(verdict, Unavailable)]
            ended = [claim for claim in claims if claim.deadline_s <= 0 or hurried()]
            for claim in ended:
                self._drop(claim)
            unheard += len(ended)
            claims = [claim for claim in claims if claim not in ended]
            if claims:
                await asyncio.sleep(backoff_s(tries, RETRY_FIRST_S, RETRY_MAX_S))
                tries += 1
        return unheard

    async def give_back(self, pieces: Sequence[Piece]) -> None:
        """Release what did not go; only an attempt that failed by itself is used up."""
        groups: dict[tuple[float, bool], list[Claimed]] = defaultdict(list)
        for piece in pieces:
            if piece.again_s is not None and piece.claim is not None:
                groups[piece.again_s if piece.counts else 0.0, piece.counts].append(piece.claim)
        for (delay_s, counts), claims in groups.items():
            await self._once.release_many(claims, delay_s=delay_s, count_attempt=counts)
            for claim in claims:
                self._drop(claim)  # without an answer too: its lease ends by itself

    def forsake(self, pieces: Sequence[Piece]) -> None:
        """They are others' now, or nobody knows how it ended: leave the claims to their leases."""
        for piece in pieces:
            if piece.claim is not None:
                self._drop(piece.claim)
                piece.claim = None
