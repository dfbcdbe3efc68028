"""Pending calls to a store: queued, folded into batches, answered, and undone when the caller stops waiting."""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeAlias

from semel.core.commands import Answer, Claim, Granted, Item, Mark, Marked, Renew, Settle
from semel.core.folding import Fold
from semel.core.protocols import AsyncStore, Store
from semel.errors import StoreClosed, StoreError, StoreUnavailable
from semel.runtime.process import asyncio, logging
from semel.runtime.prompt_future import PromptFuture
from semel.types import Unavailable

__all__ = [
    "BATCH_MAX",
    "Channel",
    "LoopCall",
    "PendingCall",
    "SendQueue",
    "Singles",
    "give_back",
    "post_quietly",
    "recall",
    "redo",
    "spread",
    "undo",
]

BATCH_MAX = 500
"""The knee of the curve on every store we measured: larger batches gain nothing and wait longer."""

URGENT = frozenset((Settle, Renew))
"""Items that end or renew a claim."""

Callback: TypeAlias = Callable[[list[Answer]], None]
OnStoreTime: TypeAlias = Callable[[float], None]
OnPostedTime: TypeAlias = Callable[[Sequence[Item], float], None]


class Channel(Protocol):
    """How a client reaches its store. Answers are by position; an unreachable store is `Unavailable`."""

    on_store_time: OnStoreTime | None
    """Called in the context of each `asend` with its part of the store's time, in seconds."""
    on_posted_time: OnPostedTime | None
    """Called with the items of each `post` and their part of the store's time, in the thread that has the answers."""

    def send(self, items: Sequence[Item], /) -> list[Answer]:
        """Wait for the answers, in a thread."""
        ...

    async def asend(self, items: Sequence[Item], /) -> list[Answer]:
        """Wait for the answers, in an event loop."""
        ...

    def post(self, items: Sequence[Item], done: Callback, /) -> None:
        """Queue the items; `done` is called with the answers, in the thread that has them."""
        ...

    def close(self) -> None:
        """Send queued items, then stop. Idempotent."""
        ...


# --- one caller's items -------------------------------------------------------------------------


class PendingCall:
    """One caller's pending items. `finish` is called once, with all answers or an error."""

    __slots__ = ("abandoned", "answers", "error", "finish", "items", "left", "store_s")

    def __init__(self, items: Sequence[Item], finish: Callable[["PendingCall"], None]) -> None:
        self.items: Sequence[Item] = items
        self.answers: list[Answer] = [None] * len(items)
        self.left: int = len(items)
        self.error: BaseException | None = None
        self.finish: Callable[[PendingCall], None] = finish
        self.abandoned: bool = False
        self.store_s: float = 0.0
        """Its part of the store's time."""


def _by_future(_call: "PendingCall") -> None:
    """Do nothing: `resolve` wakes the waiter."""


class LoopCall(PendingCall):
    """A call whose waiter is in an event loop."""

    __slots__ = ("future", "loop")

    def __init__(
        self,
        items: Sequence[Item],
        loop: "asyncio.AbstractEventLoop",
        future: "asyncio.Future[None] | PromptFuture",
    ) -> None:
        super().__init__(items, _by_future)
        self.loop: asyncio.AbstractEventLoop = loop
        self.future: asyncio.Future[None] | PromptFuture = future


class Singles(PendingCall):
    """Single marks of many callers in an event loop: one item for all, and only a future per caller."""

    __slots__ = ("futures", "keys")

    def __init__(self, tenant: str, consumer: str, window_us: int) -> None:
        self.keys: list[str] = []
        self.futures: list[asyncio.Future[Any]] = []
        super().__init__((Mark(tenant, consumer, self.keys, window_us),), _hand_out)


def _hand_out(call: PendingCall) -> None:
    """Wake the callers of the marks, except those that stopped waiting: a mark is not undone."""
    assert isinstance(call, Singles)
    answer = call.answers[0]
    results = answer.firsts if isinstance(answer, Marked) else [answer] * len(call.futures)
    for future, result in zip(call.futures, results, strict=True):
        if future.done():
            continue
        if call.error is None:
            future.set_result(result)
        else:
            future.set_exception(call.error)


def finisher(done: Callback, on_posted_time: OnPostedTime | None) -> Callable[[PendingCall], None]:
    """Return a function that passes a call's answers to `done`. Logs its errors: the flusher must serve other calls."""

    def finish(call: PendingCall) -> None:
        error = call.error
        try:
            if on_posted_time is not None:
                on_posted_time(call.items, call.store_s)
            done(call.answers if error is None else unreachable(call.items, StoreUnavailable(str(error))))
        except Exception:  # noqa: BLE001
            logging.getLogger("semel").exception("the answers of a store could not be passed on")

    return finish


def resolve(calls: list[LoopCall], channel: Channel) -> None:
    """Wake the waiters, in the loop; calls whose waiters have left are undone."""
    for call in calls:
        future = call.future
        if future.done():
            undo(channel, call)
        else:
            future.set_result(None)


# --- the items of all callers -------------------------------------------------------------------

Taker: TypeAlias = tuple[PendingCall, int]


class SendQueue:
    """Items waiting for the store: items that end or renew claims go before those that make new ones."""

    def __init__(self) -> None:
        self.urgent: deque[tuple[Item, Taker]] = deque()
        """Items that end or renew a claim; they are sent first."""
        self.others: deque[tuple[Item, Taker]] = deque()
        self._singles: dict[tuple[str, str, int], Singles] = {}
        """Queued marks that still take more keys."""

    def __len__(self) -> int:
        return len(self.urgent) + len(self.others)

    def add(self, call: PendingCall) -> None:
        """Queue a caller's items."""
        for at, item in enumerate(call.items):
            queue = self.urgent if type(item) in URGENT else self.others
            queue.append((item, (call, at)))

    def mark(
        self, tenant: str, consumer: str, window_us: int, key: str, future: "asyncio.Future[Any]"
    ) -> None:
        """Queue one mark together with the marks that already wait."""
        scope = (tenant, consumer, window_us)
        singles = self._singles.get(scope)
        if singles is None or len(singles.keys) >= BATCH_MAX:
            singles = self._singles[scope] = Singles(tenant, consumer, window_us)
            self.add(singles)
        singles.keys.append(key)
        singles.futures.append(future)

    def take(self) -> Fold[Taker]:
        """Return the next batch, folded; items that do not fit go first into the batch after it."""
        entries: list[tuple[Item, Taker]] = []
        room = BATCH_MAX
        for queue in (self.urgent, self.others):
            while queue and room > 0:
                entry = queue.popleft()
                entries.append(entry)
                call = entry[1][0]
                room -= len(call.keys) if type(call) is Singles else 1
        self._singles.clear()
        fold = Fold(entries)
        for item, taker in reversed(fold.later):
            (self.urgent if type(item) in URGENT else self.others).appendleft((item, taker))
        return fold


def spread(
    fold: Fold[Taker], answers: Sequence[Answer], error: BaseException | None, took_s: float
) -> list[PendingCall]:
    """Pass the answers to their calls. Returns the calls that now have all of their answers.

    The time of a batch is divided among its items. A call in several batches gets the time of the last one.
    """
    finished: list[PendingCall] = []
    for (call, at), answer in fold.ready:
        call.answers[at] = answer
        call.left -= 1
        if not call.left:
            finished.append(call)
    for slot, answer in zip(fold.slots, answers, strict=True):
        for (call, at), view in slot.takers:
            mine, trouble = answer, error
            if view is not None and error is None:
                try:
                    mine = view(answer)
                except Exception as strange:  # noqa: BLE001 - an answer of the wrong shape fails only its own call
                    trouble = strange
            if trouble is not None:
                call.error = trouble
            call.answers[at] = mine
            call.left -= 1
            if not call.left:
                finished.append(call)
    item_s = took_s / (len(fold.slots) or 1)
    for call in finished:
        call.store_s = item_s * len(call.answers)
    return finished


def require_all(answers: list[Answer], items: Sequence[Item]) -> list[Answer]:
    """Return the answers if each item has one. Raises `StoreError` otherwise."""
    if len(answers) != len(items):
        raise StoreError(f"the store gave {len(answers)} answers to {len(items)} items")
    return answers


def unreachable(items: Sequence[Item], error: StoreUnavailable) -> list[Answer]:
    """Return the answers to items when the store cannot be reached."""
    return [Unavailable(error)] * len(items)


def refuse(store: Store | AsyncStore, items: Sequence[Item]) -> None:
    """Raise the error for calls after `close()`, except for items that end claims: the store may still take them."""
    if not all(isinstance(item, Settle) for item in items):
        raise closed_error(store)


def closed_error(store: Store | AsyncStore) -> StoreClosed:
    """Return the error for calls made after `close()`."""
    return StoreClosed(f"this client of {store.name} is closed; open a new one")


# --- calls without a waiter ---------------------------------------------------------------------


def give_back(claim: Claim, fence: int) -> Settle:
    """Build the release of a claim whose handler never started; the attempt does not count."""
    return Settle(claim.id, claim.owner, fence, "released", lease_us=claim.lease_us, count_attempt=False)


def undo(channel: Channel, call: PendingCall) -> None:
    """Undo the call of a caller that has left: release granted claims, and repeat items without an answer."""
    items, call.items = call.items, ()
    answers, call.answers = call.answers, []
    if not items:
        return  # it was done before
    pairs = list(zip(items, answers, strict=True))
    give_back_granted(channel, items, answers)
    redo(channel, [item for item, answer in pairs if isinstance(answer, Unavailable)])


def redo(channel: Channel, items: Sequence[Item]) -> None:
    """Repair interrupted items: items that end or renew claims are sent again, claims are undone."""
    post_quietly(channel, [item for item in items if isinstance(item, Settle | Renew)])
    recall(channel, [item for item in items if isinstance(item, Claim)])


def recall(channel: Channel, claims: Sequence[Claim]) -> None:
    """Undo claims without an answer: claim again with the same owners, then release what is granted."""
    post_quietly(channel, claims, lambda answers: give_back_granted(channel, claims, answers))


def give_back_granted(channel: Channel, items: Sequence[Item], answers: Sequence[Answer]) -> None:
    """Release the claims among the items that were granted."""
    post_quietly(
        channel,
        [
            give_back(item, answer.fence)
            for item, answer in zip(items, answers, strict=True)
            if isinstance(item, Claim) and isinstance(answer, Granted)
        ],
    )


def _nothing(_answers: list[Any]) -> None:
    """Drop the answers: no caller waits for them."""


def post_quietly(channel: Channel, items: Sequence[Item], done: Callback = _nothing) -> None:
    """Queue the items if the channel still accepts them."""
    if items:
        with suppress(StoreError):  # closed: the leases end on their own
            channel.post(items, done)
