"""The verbs of a client that only ask: connect, claim, settle, mark, sweep. How handlers are run is in `client_async`.

What they say to the store is in `items`, and what the answers mean is in `base`.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from time import monotonic
from types import TracebackType
from typing import Any, Self, TypeVar

from semel.client.base import ClaimOutcome, Client, raise_if_interrupted
from semel.client.claims import Claimed
from semel.core import flows
from semel.core.commands import Item, answer_or_raise, raise_unavailable
from semel.core.folding import leaders
from semel.errors import StoreUnavailable
from semel.keys.sliding import Sliding
from semel.runtime.executor import AsyncExecutor
from semel.runtime.generators import adrive
from semel.runtime.handlers import awaitable
from semel.types import Completed, Delivery, Lost, Outcome, Renewed, SettleAnswer, Unavailable

__all__ = ["AsyncVerbs"]

R = TypeVar("R")


class AsyncVerbs(Client, ABC):
    """What a client asks of its store."""

    @abstractmethod
    def _executor(self) -> AsyncExecutor:
        """The executor that this caller uses."""

    @abstractmethod
    def _keeper(self) -> Any:
        """The keeper that renews this caller's claims."""

    async def __aenter__(self) -> Self:
        await self._connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Send what is queued and let go. Idempotent; works while others wait."""
        await self._runtime.aclose()

    async def _connect(self) -> Any:
        """Connect at first use, and keep the stored windows fresh; returns them."""
        runtime = self._runtime
        if not self._admitted or monotonic() >= runtime.fresh_until:
            plan = self._plan
            # sync: runtime.warn_in_loop()
            await runtime.aconnect(plan.tenant, plan.consumer, plan.mode, plan.ids)
            if plan.mode == "inbox":
                await runtime.arefresh_behind()
            else:
                await runtime.arefresh()
            plan.check_live(runtime.windows, runtime.live_us)
            self._admitted = True
        return runtime.windows

    async def _reach(self) -> tuple[Any, bool]:
        """The stored windows, or those last known where the policy runs without the store; whether it was reached."""
        # sync: self._plan.check_probe()
        try:
            return await self._connect(), True
        except StoreUnavailable as error:
            return self._last_known(error), False

    async def _ask(self, item: Item) -> Any:
        await self._connect()
        return (await self._runtime.channel.asend((item,)))[0]

    async def sweep(self, handler: Callable[[Any], Awaitable[R]], *, limit: int = 100) -> list[Outcome[R]]:
        """Take over journaled claims whose owner died, and run `handler(payload)` for each."""
        # sync: self._plan.check_probe()
        task, owners = self._recovery(await self._connect(), awaitable(handler))
        hands = self._executor()
        try:
            outcomes = await adrive(flows.sweep(self._plan.orphans(limit), task, self._once(handler)), hands)
        finally:
            hands.forsake(owners)
        return [raise_if_interrupted(outcome) for outcome in outcomes]

    async def claim(
        self,
        key: str,
        *,
        event_type: str | None = None,
        fingerprint: bytes | None = None,
        event_time: datetime | None = None,
        journal: Any = None,
        sliding: Sliding | None = None,
        meta: Mapping[str, str] | None = None,
    ) -> ClaimOutcome:
        """The right to run, or what a duplicate needs to know. One round trip, no waiting.

        `sliding`: what made the key, where its window slides; by event time it needs `event_time` too. `meta` is kept
        with the record.
        """
        stored = await self._connect()
        item = self._claim_item(stored, key, event_type, fingerprint, event_time, journal, sliding, meta)
        sent_at = monotonic()
        answer = (await self._runtime.channel.asend((item,)))[0]
        self._tell_claimed((item,), (answer,))
        return self._outcome(item, answer_or_raise(answer), sent_at)  # type: ignore[no-any-return]

    async def claim_many(self, deliveries: Sequence[str | Delivery[Any]]) -> list[ClaimOutcome | Unavailable]:
        """Claims for all, in one round trip per 500; a later copy of a key gets `Busy`."""
        claims = self._claim_items(await self._connect(), deliveries)
        first_at, place_of = leaders([claim.id[2] for claim in claims])
        sent_at = monotonic()
        asked = [claims[at] for at in first_at]
        answers = await self._runtime.channel.asend(asked)
        self._tell_claimed(asked, answers)
        return self._outcomes(claims, answers, sent_at, (first_at, place_of))

    async def complete(self, claim: Claimed, value: Any = None) -> Completed | Lost[Any]:
        """The effect has happened: remember it. `Lost` if another attempt took over; nothing is overwritten."""
        verdict = (await self.complete_many([claim], [value]))[0]
        return raise_unavailable(verdict) if isinstance(verdict, Unavailable) else verdict

    async def fail(self, claim: Claimed, error: BaseException | str) -> Completed | Lost[Any]:
        """It failed for good: every duplicate gets this failure."""
        verdict = (await self.fail_many([claim], [error]))[0]
        return raise_unavailable(verdict) if isinstance(verdict, Unavailable) else verdict

    async def release(
        self, claim: Claimed, *, delay_s: float = 0.0, count_attempt: bool = True
    ) -> Completed | Lost[Any]:
        """Give the claim up; anybody may claim again after `delay_s`."""
        verdict = (await self.release_many([claim], delay_s=delay_s, count_attempt=count_attempt))[0]
        return raise_unavailable(verdict) if isinstance(verdict, Unavailable) else verdict

    async def renew(self, claim: Claimed) -> Renewed | Lost[Any]:
        """The lease once more, from now."""
        verdict = (await self.renew_many([claim]))[0]
        return raise_unavailable(verdict) if isinstance(verdict, Unavailable) else verdict

    async def complete_many(
        self, claims: Sequence[Claimed], values: Sequence[Any] | None = None
    ) -> list[SettleAnswer]:
        """Complete all of them in one round trip per 500."""
        await self._executor().refresh()
        return await self._end(claims, self._completions(claims, values))

    async def fail_many(
        self, claims: Sequence[Claimed], errors: Sequence[BaseException | str]
    ) -> list[SettleAnswer]:
        """Fail all of them in one round trip per 500."""
        await self._executor().refresh()
        return await self._end(claims, self._failures(claims, errors))

    async def release_many(
        self, claims: Sequence[Claimed], *, delay_s: float = 0.0, count_attempt: bool = True
    ) -> list[SettleAnswer]:
        """Release all of them in one round trip per 500."""
        return await self._end(claims, self._releases(claims, delay_s, count_attempt=count_attempt))

    async def renew_many(self, claims: Sequence[Claimed]) -> list[Renewed | Lost[Any] | Unavailable]:
        """Renew all of them in one round trip per 500."""
        return await self._runtime.channel.asend(self._renewals(claims))

    async def mark_many(
        self, keys: Sequence[str], *, event_type: str = "", meta: Mapping[str, str] | None = None
    ) -> list[bool]:
        """Note many keys in one round trip; a later copy of a key is `False`."""
        item, unfold = self._marks(await self._connect(), keys, event_type)
        firsts = unfold((await self._runtime.channel.asend((item,)))[0])
        self._tell_marked(keys, firsts, event_type, meta)
        return firsts

    async def _end(self, claims: Sequence[Claimed], items: Sequence[Item]) -> list[SettleAnswer]:
        for claim in claims:
            claim.settled = True
        verdicts = await self._runtime.channel.asend(items)
        self._drop_settled(claims, verdicts, self._keeper())
        self._tell_settled(items, verdicts)
        return verdicts

    def _hold(self, claim: Claimed) -> None:
        self._keeper().keep(claim._kept)  # noqa: SLF001 - the claim and its client are one mechanism

    def _drop(self, claim: Claimed) -> None:
        self._keeper().drop(claim.claim.owner)

    async def _settle(self, claim: Claimed, error: BaseException | None) -> None:
        claim.settled = True
        verdict = self._plan.leaving(claim.claim, claim.granted, error)
        answer = await adrive(flows.settle(claim.claim, claim.granted, verdict), self._executor())
        self._tell_left(claim, verdict.to, answer)
        self._check_exit(claim, error, answer)
