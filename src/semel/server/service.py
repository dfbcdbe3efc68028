"""The store behind the service, and what every request shares: tokens known, rates and claims counted, draining."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from semel.core.commands import Admit, Answer, Claim, Granted, Item, Renew, Scan, Settle
from semel.core.ports import AsyncStore, Store, Twofold
from semel.errors import RecordCorrupt, SemelError, StoreError, StoreUnavailable, UsageError
from semel.observe.events import Hook, Hooks
from semel.runtime import Runtime
from semel.server import tokens
from semel.server.callers import Caller
from semel.server.checks import check
from semel.server.limits import Buckets, LiveClaims
from semel.server.metrics import Metrics
from semel.server.problems import Problem, problem_of, unavailable
from semel.server.settings import ServeSettings
from semel.server.telling import Telling
from semel.server.tokens import Token
from semel.stores.http.wire import Refusal
from semel.stores.registry import store_for
from semel.types import Lost, Mode, Renewed, Unavailable

__all__ = ["Service"]

TOKEN_LIVE_S = 5.0
"""How long a token is believed without asking the store: a revoked one is refused after that."""
TOKENS_MAX = 10_000
CONSUMERS_MAX = 10_000
CROWDED = Refusal(429, "too-many-claims", "too many claims at a time; complete some first")
LEASED: tuple[Mode, ...] = ("lease", "quarantine")


class Service:
    """One instance. Any number of them may serve one store."""

    def __init__(
        self,
        settings: ServeSettings,
        store: Store | AsyncStore | None = None,
        clock: Callable[[], float] = time.monotonic,
        hooks: Iterable[Hook] = (),
    ) -> None:
        self.settings: ServeSettings = settings
        self.is_of_settings: bool = store is None
        """Whether the store is the one that the settings name."""
        found = store_for(settings.store) if store is None else store
        native = found.twin() if isinstance(found, Twofold) else found
        self.metrics: Metrics = Metrics()
        told = Hooks((self.metrics, *hooks))
        self.runtime: Runtime = Runtime(native, owned=True, hooks=told)
        self._tell = Telling(told)
        self.draining: bool = False
        self.needs_token: bool = True
        self.failure: SemelError | None = None
        """What kept it from starting."""
        self._clock = clock
        self._buckets = Buckets(settings.limits.rate_per_s, clock)
        self._live = LiveClaims(settings.limits.live_claims_max, clock)
        self._tokens: dict[str, tuple[float, Token | None]] = {}
        self._modes: dict[tuple[str, str], Mode] = {}

    async def open(self) -> None:
        """Connect to the store, and see whether callers need a token. Raises `StoreError`."""
        await self.runtime.aconnect(tokens.TENANT, tokens.CONSUMER, "lease", "")
        known = await self.ask(tokens.tokens())
        self.needs_token = self.settings.auth_for(has_tokens=bool(known)) == "tokens"

    async def close(self) -> None:
        """Send what is queued and let go of the store."""
        await self.runtime.aclose()

    # --- who is asking ---

    async def token(self, text: str) -> Token | None:
        """The token as it was sent, if it is one of ours. Raises `Problem` when the store cannot be asked."""
        halves = tokens.split(text)
        if halves is None:
            return None
        token = await self._token(halves[0])
        return token if token is not None and token.matches(halves[1]) else None

    async def _token(self, token_id: str) -> Token | None:
        until, token = self._tokens.get(token_id, (0.0, None))
        if self._clock() < until:
            return token
        try:
            token = await self.ask(tokens.lookup(token_id))
        except RecordCorrupt:
            token = None
        except StoreError as error:
            raise unavailable() from error
        self._tokens.pop(token_id, None)
        self._tokens[token_id] = (self._clock() + TOKEN_LIVE_S, token)
        if len(self._tokens) > TOKENS_MAX:
            del self._tokens[next(iter(self._tokens))]
        return token

    def pace(self, name: str) -> None:
        """Count a request. Raises `Problem` for one too many."""
        wait_s = self._buckets.take(name)
        if wait_s:
            seconds = {"Retry-After": str(max(1, round(wait_s + 0.5)))}
            raise Problem(
                429, "too-fast", "too many requests; slow down, or send more items in each", seconds
            )

    # --- the store ---

    async def ask(self, asking: tokens.Asking) -> Any:
        """Run what yields items for the store."""
        answer: Any = None
        try:
            while True:
                item = asking.send(answer)
                answer = (await self.runtime.channel.asend((item,)))[0]
        except StopIteration as end:
            return end.value

    async def carry_out(self, caller: Caller, items: Sequence[Item]) -> list[Answer]:
        """Answers by position. What is out of bounds is a `Refusal` in its place, and the others go on."""
        answers: list[Answer] = [None] * len(items)
        places: list[int] = []
        room = self._live.room(caller.name)
        for at, item in enumerate(items):
            try:
                check(item, self.settings.limits)
            except Problem as problem:
                answers[at] = refusal(problem)
                continue
            if isinstance(item, Claim):
                room -= 1
                if room < 0:
                    answers[at] = CROWDED
                    continue
            places.append(at)
        sent = [items[at] for at in places]
        for at, answer in zip(places, await self.send(sent), strict=True):
            if isinstance(answer, Unavailable) and isinstance(answer.error, UsageError):
                answers[at] = refusal(problem_of(answer.error))  # the store can be reached, but not like that
                continue
            answers[at] = answer
            self._note(caller, items[at], answer)
        return answers

    async def one(self, caller: Caller, item: Item) -> Any:
        """The answer to one item. Raises `Problem` where there is none."""
        answer = (await self.carry_out(caller, (item,)))[0]
        if isinstance(answer, Refusal):
            raise Problem(answer.status, answer.title, answer.detail)
        if isinstance(answer, Unavailable):
            raise unavailable()
        return answer

    async def mode(self, caller: Caller, tenant: str, consumer: str) -> Mode:
        """The mode of a consumer that claims; one that nobody has met works by leases. Raises `Problem`."""
        place = (tenant, consumer)
        mode = self._modes.get(place)
        if mode is None:
            mode = await self.one(caller, Admit(tenant, consumer, "lease"))
            if mode not in LEASED:
                raise Problem(
                    409, "mode-mismatch", f"consumer {consumer!r} works in mode {mode}: it has no claims"
                )
            if len(self._modes) >= CONSUMERS_MAX:
                self._modes.clear()
            self._modes[place] = mode
        return mode

    async def send(self, items: Sequence[Item]) -> list[Answer]:
        """With everybody's next batch where no item needs another's effect, else straight and in order.

        Nothing is checked and nobody is told: `carry_out` is for what callers ask.
        """
        if not items:
            return []
        if is_independent(items):
            return await self.runtime.channel.asend(items)
        store = self.runtime.told
        try:
            if not isinstance(store, Store):
                return await store.asend(items)
            if store.capabilities.instant:
                return store.send(items)
            return await asyncio.to_thread(store.send, items)
        except StoreUnavailable as error:
            return [Unavailable(error)] * len(items)
        except StoreError:
            raise
        except Exception as error:
            if any(isinstance(item, Scan) and item.cursor for item in items):  # each store reads its own kind
                raise Problem(422, "out-of-bounds", "that is no cursor that was given out here") from error
            raise

    def _note(self, caller: Caller, item: Item, answer: Answer) -> None:
        self._tell(item, answer)
        match item:
            case Claim() if isinstance(answer, Granted):
                self._live.hold(caller.name, item.id, item.lease_us)
            case Renew() if isinstance(answer, Renewed):
                self._live.hold(caller.name, item.id, item.lease_us)
            case Settle() if not isinstance(answer, Unavailable | Lost):
                self._live.drop(caller.name, item.id)
            case _:
                pass


def is_independent(items: Sequence[Item]) -> bool:
    """Whether the order of the items cannot matter: all on records, no two on the same one."""
    if len(items) == 1:
        return not (isinstance(items[0], Scan) and items[0].cursor)
    ids = {item.id for item in items if isinstance(item, Claim | Renew | Settle)}
    return len(ids) == len(items)


def refusal(problem: Problem) -> Refusal:
    """The problem of one item among many."""
    return Refusal(problem.status, problem.kind, problem.detail)
