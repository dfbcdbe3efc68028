"""The service: one store, and the state that requests share: known tokens, rates, claims, draining."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from semel.core.commands import Admit, Answer, Claim, Count, Granted, Item, Known, Lookup, Renew, Scan, Settle
from semel.core.protocols import AsyncStore, HasAsyncTwin, Store
from semel.errors import PolicyInvalid, RecordCorrupt, SemelError, StoreError, StoreUnavailable, UsageError
from semel.observe.events import Hook, Hooks
from semel.runtime import audit
from semel.runtime.engine import Runtime
from semel.runtime.generators import adrive
from semel.server import tokens
from semel.server.auth import Caller, caller_for, permit
from semel.server.growth import Growth, RenewalLimit
from semel.server.limits import PAYER, ROUTE, AnswerCache, Buckets, Costs, LiveClaims, account_of, retry_after
from semel.server.metrics import ItemReporter, Metrics
from semel.server.moved import MoveCheck
from semel.server.problems import HttpProblem, problem_of, unavailable
from semel.server.requests import check, check_event_journal
from semel.server.settings import ServeSettings, is_loopback
from semel.server.slow_lane import SlowLane, answer_bytes, send_to
from semel.server.tokens import Token
from semel.stores.http.encoding import ANSWER_FULL, ItemRefusal
from semel.stores.registry import store_for
from semel.types import Lost, Mode, Record, Renewed, Unavailable

__all__ = ["Service"]

TOKEN_LIVE_S = 5.0
"""How long a token is cached: a revoked one is refused after that."""
TOKENS_MAX = 10_000
LOG_INS_BURST = 20
LOG_INS_PER_S = 1 / 30
"""Log-ins of one token, at once and from then on: enough for a team that shares it, some megabytes of sessions."""
CONSUMERS_MAX = 10_000
FIRST_ITEMS, MORE_ITEMS = 64, 256
"""Items per batch: few at first, because their values may be large."""
FULL = ItemRefusal(
    413, ANSWER_FULL, "the answers before it fill this response; send this item again, in another request"
)
LEASED: tuple[Mode, ...] = ("lease", "quarantine")
V = TypeVar("V")


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
        """Whether the store is the one of the settings."""
        found = store_for(settings.store) if store is None else store
        native = found.twin() if isinstance(found, HasAsyncTwin) else found
        self.metrics: Metrics = Metrics()
        told = Hooks((self.metrics, *hooks))
        self.runtime: Runtime = Runtime(native, owned=True, hooks=told)
        self._tell = ItemReporter(told)
        self.draining: bool = False
        self.needs_token: bool = True
        self.failure: SemelError | None = None
        """The error that prevented the start."""
        self._clock = clock
        self._buckets = Buckets(settings.limits.rate_per_s, clock)
        self._log_ins = Buckets(LOG_INS_PER_S, clock, LOG_INS_BURST)
        self.costs: Costs = Costs(settings.limits, clock)
        self.runtime.channel.on_store_time = self.costs.charge_store

        def lane() -> SlowLane:
            own_url, answer_bytes_max = (
                settings.store if store is None else "",
                settings.limits.answer_bytes_max,
            )
            return SlowLane(self.runtime.instrumented, own_url, told, answer_bytes_max)

        self.slow: SlowLane = lane()
        self.background: SlowLane = lane()
        """For snapshots of the dashboard: a count of a large store takes seconds, and no page waits for it."""
        self.recovery: SlowLane = lane()
        """For the search for orphaned events: its cost grows with what tenants leave behind, and no claim waits."""
        self._growth = Growth(settings.limits, self.send)
        self.moves: MoveCheck = MoveCheck(self.runtime)
        self._renewals = RenewalLimit(settings.limits, clock)
        self._live = LiveClaims(settings.limits.live_claims_max, clock)
        self.first_token: str = ""
        """The first token, created because the store never had one; shown once."""
        self._tokens: AnswerCache[Token] = AnswerCache(TOKEN_LIVE_S, TOKENS_MAX, clock)
        self._closed: AnswerCache[bool] = AnswerCache(TOKEN_LIVE_S, 1, clock)
        self._sessions: AnswerCache[str] = AnswerCache(TOKEN_LIVE_S, TOKENS_MAX, clock)
        self._uses: AnswerCache[bool] = AnswerCache(tokens.USE_EVERY_US / 1e6, TOKENS_MAX, clock)
        self._noting: set[asyncio.Task[None]] = set()
        self._modes: dict[tuple[str, str], Mode] = {}

    async def open(self) -> None:
        """Connect to the store, check tokens. Raises `StoreError`; `PolicyInvalid` for `--auth none` with tokens."""
        self._charge_posted_in(asyncio.get_running_loop())
        await self.runtime.aconnect(tokens.TENANT, tokens.CONSUMER, "lease", "")
        settings = self.settings
        if settings.audit == "all":
            await self.send((Admit(audit.TENANT, audit.WRITES, "lease"),))
        is_closed = await self.ask(tokens.were_made())
        if settings.auth == "none":
            if is_closed:
                raise PolicyInvalid(
                    "this store has had tokens, so it needs tokens: leave --auth none out, and create one with"
                    " `semel token create`, or serve another store"
                )
            self.needs_token = False
        elif settings.first_token and not is_closed and is_loopback(settings.host):
            _, self.first_token = await self.ask(tokens.create("first", None, "admin"))

    def _charge_posted_in(self, loop: asyncio.AbstractEventLoop) -> None:
        def charge(items: Sequence[Item], took_s: float) -> None:
            with suppress(RuntimeError):  # the loop is closed, and with it all accounts
                loop.call_soon_threadsafe(self.costs.charge_posted, items, took_s)

        self.runtime.channel.on_posted_time = charge

    async def close(self) -> None:
        """Send queued items and close the store."""
        for task in self._noting:
            task.cancel()
        await asyncio.gather(*self._noting, return_exceptions=True)
        await self.slow.close()
        await self.background.close()
        await self.recovery.close()
        await self.runtime.aclose()

    # --- callers ---

    async def asks_for_tokens(self) -> bool:
        """Whether callers need a token: with `--auth none` from the time when the store has one, within seconds."""
        if not self.needs_token:
            with suppress(HttpProblem):  # the store does not answer; nothing can be done with it either
                is_closed = await self._ask_cached(self._closed, "", tokens.is_closed())
                self.needs_token = is_closed is True
        return self.needs_token

    def was_used(self, text: str) -> bool:
        """Whether the token that this text names was valid here within the last minute."""
        halves = tokens.split(text)
        return halves is not None and self._uses.knows(halves[0])

    def knows_session(self, text: str) -> bool:
        """Whether the session's answer is cached."""
        return self._sessions.knows(text)

    async def token(self, text: str) -> Token | None:
        """Return the token of a request if it is valid. Raises `HttpProblem` if the store does not answer."""
        halves = tokens.split(text)
        if halves is None:
            return None
        token = await self._token(halves[0])
        return self._in_use(token) if token is not None and token.matches(halves[1]) else None

    async def session(self, text: str) -> Token | None:
        """Return the token of a dashboard session if both are valid. Raises `HttpProblem`."""
        if not tokens.SESSION_SHAPE.fullmatch(text):
            return None
        token_id = await self._ask_cached(self._sessions, text, tokens.find_session(text))
        token = None if token_id is None else await self._token(token_id)
        return None if token is None else self._in_use(token)

    async def log_in(self, token: Token) -> str:
        """Begin a session; returns the id for the browser. Raises `HttpProblem` if this token logs in too often.

        The store keeps each session for a week: without a limit one token could fill it.
        """
        wait_s = self._log_ins.take(token.id)
        if wait_s:
            raise HttpProblem(
                429,
                "too-fast",
                "this token has logged in too often; use an open session, or wait",
                retry_after(wait_s),
            )
        await self._note_session(token, "log in")
        text: str = await self.ask(tokens.start_session(token.id))
        return text

    async def log_out(self, text: str) -> None:
        """End a session: here at once, on other instances within seconds."""
        if tokens.SESSION_SHAPE.fullmatch(text):
            token = await self.session(text)
            if token is not None:
                await self._note_session(token, "log out")
            await self.ask(tokens.end_session(text))
            self._sessions.drop(text)

    async def _note_session(self, token: Token, action: str) -> None:
        if self.settings.audit == "all":
            await self.note(caller_for(token), token.tenant or "", action)

    async def _token(self, token_id: str) -> Token | None:
        token = await self._ask_cached(self._tokens, token_id, tokens.lookup(token_id))
        return None if token is None or token.is_over(time.time_ns() // 1000) else token

    async def _ask_cached(self, believed: AnswerCache[V], name: str, asking: tokens.Asking) -> V | None:
        """Return the store's answer, cached for a short time."""
        if believed.knows(name):
            return believed[name]
        try:
            found: V | None = await self.ask(asking)
        except RecordCorrupt:
            found = None
        except StoreError as error:
            raise unavailable() from error
        believed[name] = found
        return found

    def _in_use(self, token: Token) -> Token:
        """Record the use of the token in the background, at most once a minute."""
        if not self._uses.knows(token.id):
            self._uses[token.id] = True
            task = asyncio.get_running_loop().create_task(self._note_use(token.id))
            self._noting.add(task)
            task.add_done_callback(self._noting.discard)
        return token

    async def _note_use(self, token_id: str) -> None:
        with suppress(StoreError):  # the next minute tries again
            await self.ask(tokens.note_use(token_id, time.time_ns() // 1000))

    def pace(self, name: str) -> None:
        """Count a request. Raises `HttpProblem` above the rate limit."""
        wait_s = self._buckets.take(name)
        if wait_s:
            raise HttpProblem(
                429,
                "too-fast",
                "too many requests; slow down, or send more items in each",
                retry_after(wait_s),
            )

    def start_paying(self, caller: Caller) -> None:
        """Charge this request's costs to the caller's tenant. Raises `HttpProblem` while it has overspent."""
        PAYER.set(caller)
        self.costs.check(caller)

    # --- the store ---

    async def ask(self, asking: tokens.Asking) -> Any:
        """Run a generator of items for the store."""
        return await adrive(asking, self._answer)

    async def _answer(self, item: Item) -> Answer:
        return (await self.runtime.channel.asend((item,)))[0]

    async def carry_out(self, caller: Caller, items: Sequence[Item]) -> list[Answer]:
        """Execute items; returns answers by position. A forbidden item gets `ItemRefusal`; the others are executed.

        Operators' actions are written into the audit first. Raises `StoreError` if that fails.
        """
        await self.moves.refresh()
        checked: list[Item] = []
        try:
            return await self._carry_out(caller, items, checked)
        finally:
            for item in checked:
                self._growth.settle(item)

    async def _carry_out(self, caller: Caller, items: Sequence[Item], checked: list[Item]) -> list[Answer]:
        """Do so; `checked` gets the items whose growth is reserved."""
        answers: list[Answer] = [None] * len(items)
        places: list[int] = []
        room = self._live.room(caller.name)
        for at, item in enumerate(items):
            try:
                permit(caller, item)
                check(item, self.settings.limits)
                self._check_window(item)
                self.moves.check(item)
                check_event_journal(item, self.settings.events_consumer)
                await self._growth.check(item)
                checked.append(item)
                if isinstance(item, Claim):
                    room = _take_room(room)
                self._renewals.take(item)
            except HttpProblem as problem:
                answers[at] = refusal(problem)
            else:
                places.append(at)
        sent = [items[at] for at in places]
        await self._audit(caller, sent)
        for at, answer in zip(places, await self._send_bounded(caller, sent), strict=True):
            self._renewals.settle(items[at], answer)
            if isinstance(answer, Unavailable) and isinstance(answer.error, UsageError):
                answers[at] = refusal(problem_of(answer.error))  # the store answers, but refuses this
                continue
            answers[at] = answer
            self._note(caller, items[at], answer)
        return answers

    def _check_window(self, item: Item) -> None:
        """Raise `HttpProblem` for a window that the store cannot promise to keep."""
        window_us = getattr(item, "window_us", None)
        if window_us:
            try:
                self.runtime.store.capabilities.check_window(window_us, "this service's store")
            except PolicyInvalid as error:
                raise problem_of(error) from None

    async def _audit(self, caller: Caller, items: Sequence[Item]) -> None:
        acts = [act for item in items if (act := audit.act_of(item)) is not None]
        await asyncio.gather(*(self.note(caller, each.tenant, each.action, **each.details) for each in acts))
        if self.settings.audit == "all":
            await self.note_writes(caller, audit.writes_of(items))

    async def note_writes(self, caller: Caller, writes: audit.Writes) -> None:
        """Write what a request writes into the audit, before it is executed, if all writes are audited.

        One round trip, shared with other requests; the completion of the entry goes with the request's own items.
        Raises `HttpProblem` if the store does not answer: nothing must be done then.
        """
        if self.settings.audit != "all" or not writes:
            return
        actor, now_us = caller.label or caller.name, time.time_ns() // 1000
        claims = audit.claims_of_writes(actor, ROUTE.get(), writes, now_us)
        try:
            answers = await self.runtime.channel.asend(claims)
            self.runtime.channel.post(audit.settles_of_writes(claims, answers), _ignore)
        except StoreError as error:
            raise unavailable() from error

    async def note(self, caller: Caller, tenant: str, action: str, **details: Any) -> None:
        """Write an action into the audit, before it is executed. Raises `StoreError`."""
        await self.ask(audit.note(tenant, action, caller.label or caller.name, **details))

    async def _send_bounded(self, caller: Caller, items: Sequence[Item]) -> list[Answer]:
        """Return answers that fit into one response; later items are refused and not executed.

        Counts and scans use the slow lane, and their store time is charged; they alone are refused when it is used up.
        """
        answers: list[Answer] = []
        used = 0
        while len(answers) < len(items):
            if used >= self.settings.limits.answer_bytes_max:
                return answers + [FULL] * (len(items) - len(answers))
            at = len(answers)
            item = items[at]
            if isinstance(item, Count | Scan):
                try:
                    self.costs.check_scan(caller)
                    answer, took_s = await self.slow.ask(account_of(caller), item)
                except HttpProblem as problem:
                    answer, took_s = refusal(problem), 0.0
                self.costs.charge_scan(took_s)
                group = [answer]
            else:
                quick = _quick_from(items, at)
                room = self.settings.limits.answer_bytes_max - used
                group = _fit(quick, await self.send(quick), room)
            used += sum(map(answer_bytes, group))
            answers += group
        return answers

    async def one(self, caller: Caller, item: Item) -> Any:
        """Execute one item. Raises `HttpProblem` if the store does not answer."""
        answer = (await self.carry_out(caller, (item,)))[0]
        if isinstance(answer, ItemRefusal):
            raise problem_of_refusal(answer)
        if isinstance(answer, Unavailable):
            raise unavailable()
        return answer

    async def beside_loop(self, work: Callable[[], V]) -> V:
        """Decode large values in a thread. Its time is charged like the store's: values can be made to be slow."""

        def timed() -> tuple[V, float]:
            began = time.thread_time()
            return work(), time.thread_time() - began

        done, took_s = await asyncio.to_thread(timed)
        self.costs.charge_store(took_s)
        return done

    async def mode(self, caller: Caller, tenant: str, consumer: str) -> Mode:
        """Return the mode of a consumer that claims; a new one has mode lease. Raises `HttpProblem`."""
        place = (tenant, consumer)
        mode = self._modes.get(place)
        if mode is None:
            mode = await self.one(caller, Admit(tenant, consumer, "lease"))
            if mode not in LEASED:
                raise HttpProblem(
                    409, "mode-mismatch", f"consumer {consumer!r} has mode {mode}: it has no claims"
                )
            if len(self._modes) >= CONSUMERS_MAX:
                self._modes.clear()
            self._modes[place] = mode
        return mode

    async def send(self, items: Sequence[Item]) -> list[Answer]:
        """Send items with the next shared batch if they are independent, else directly and in order.

        It checks and reports nothing: use `carry_out` for items of callers.
        """
        if not items:
            return []
        if is_independent(items):
            return await self.runtime.channel.asend(items)
        try:
            return await send_to(self.runtime.instrumented, items, self.costs.charge_store)
        except StoreUnavailable as error:
            return [Unavailable(error)] * len(items)
        except StoreError:
            raise
        except Exception as error:
            if any(
                isinstance(item, Scan) and item.cursor for item in items
            ):  # each store has its own kind of cursor
                raise HttpProblem(422, "out-of-bounds", "the cursor is not one of this server") from error
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


def _ignore(_answers: Sequence[Answer]) -> None:
    """Do nothing: an entry of the audit is complete without its completion, too."""


def _take_room(room: int) -> int:
    """Return the room for claims after one more. Raises `HttpProblem` if there is none."""
    if room <= 0:
        raise HttpProblem(429, "too-many-claims", "too many claims at a time; complete some first")
    return room - 1


def _quick_from(items: Sequence[Item], start: int) -> Sequence[Item]:
    """Return the items from there up to the next count or scan."""
    end = min(len(items), start + (MORE_ITEMS if start else FIRST_ITEMS))
    for at in range(start, end):
        if isinstance(items[at], Count | Scan):
            end = max(at, start + 1)
            break
    return items[start:end]


def _fit(items: Sequence[Item], answers: list[Answer], room: int) -> list[Answer]:
    """Refuse what does not fit into a response among answers to claims and look-ups.

    Those that told a value changed nothing, and a client that sends all again from there changes nothing by that: a
    claim that was granted is granted again. Other items are not sent twice, so their answers stay.
    """
    if not all(isinstance(item, Claim | Lookup) for item in items):
        return answers
    fitting: list[Answer] = []
    for answer in answers:
        fits = room > 0 or not isinstance(answer, Known | Record)
        fitting.append(answer if fits else FULL)
        room -= answer_bytes(answer)
    return fitting


def is_independent(items: Sequence[Item]) -> bool:
    """Whether the order of the items does not matter: all on records, no two on the same one."""
    if len(items) == 1:
        return not (isinstance(items[0], Scan) and items[0].cursor)
    ids = {item.id for item in items if isinstance(item, Claim | Renew | Settle)}
    return len(ids) == len(items)


def refusal(problem: HttpProblem) -> ItemRefusal:
    """Return the refusal of one item among many."""
    return ItemRefusal(
        problem.status, problem.kind, problem.detail, int(problem.headers.get("Retry-After", 0))
    )


def problem_of_refusal(refused: ItemRefusal) -> HttpProblem:
    """Return the problem for a request whose only item, or every item, was refused."""
    after = {"Retry-After": str(refused.retry_after_s)} if refused.retry_after_s else None
    return HttpProblem(refused.status, refused.title, refused.detail, after)


def check_any_done(answers: Sequence[Answer]) -> None:
    """Raises `HttpProblem` of the first item if every item was refused: then the status says so."""
    if answers and all(isinstance(each, ItemRefusal) for each in answers):
        raise problem_of_refusal(answers[0])
