"""Renew the live claims of a client: all of them in one batch, each at a third of its own lease.

If a claim is lost, or cannot be renewed until shortly before its lease ends, its handler is notified at
once. The two keepers share the bookkeeping and differ only in the timer: a thread or an event loop.
"""

from collections.abc import Callable
from contextlib import suppress
from threading import Condition, Lock, Thread, current_thread

from msgspec import Struct

from semel.core.commands import Answer, Claim, Granted, Renew
from semel.runtime.channel import Channel
from semel.runtime.process import asyncio, restart_after_fork
from semel.types import Lost, Renewed, Unavailable

__all__ = ["Keeper", "LiveClaim", "LoopKeeper"]

RENEW_AT = 1 / 3
"""The share of the lease after which it is renewed: two renewals may fail before it ends."""
RETRY_AT = 1 / 10
"""The share of the lease after which a renewal without an answer is repeated."""
TOGETHER = 1 / 12
"""The share of the lease within which claims are renewed together with those due now."""
IDLE_S = 2.0
"""The thread of a keeper without claims ends after this time; the next claim starts another."""
AWAKE = float("inf")
"""While the thread is awake, a new claim must make it look once more."""


class LiveClaim(Struct, eq=False):
    """A live claim: until when it is held, and what to call when it is lost."""

    claim: Claim
    fence: int
    lease_s: float
    """The lease: how long the claim lasts without renewal."""
    deadline: float
    due: float
    ends: float
    """When renewing stops, so that a hung handler frees its key."""
    posted_at: float = 0.0
    """When the pending renewal was sent; 0: none is pending."""
    lost: bool = False
    started: bool = False
    """Whether the handler was called: before that, a release does not count the attempt."""
    stopped: bool = False
    """Whether `on_lost` was called."""
    on_lost: Callable[[], object] | None = None
    ended: bool = False
    """Whether the handler or `with` block that holds it has ended: then it cannot wait for itself."""

    @classmethod
    def since(cls, claim: Claim, granted: Granted, sent_at: float, run_max_s: float) -> "LiveClaim":
        """Build it for a claim that was sent at `sent_at`: its lease is counted from before the store saw it."""
        lease_s = claim.lease_us / 1e6
        return cls(
            claim,
            granted.fence,
            lease_s,
            sent_at + lease_s,
            sent_at + lease_s * RENEW_AT,
            sent_at + run_max_s,
        )

    @property
    def give_up_at(self) -> float:
        """When a claim that could not be renewed is given up: before its lease ends, never after."""
        return self.deadline - min(self.lease_s * RENEW_AT, max(0.5, self.lease_s * RETRY_AT))

    def report_lost(self) -> None:
        """Mark the claim as lost, and call `on_lost` once."""
        if not self.lost:
            self.lost = True
            if self.on_lost is not None:
                self.stopped = True
                self.on_lost()


class KeeperBase:
    """The live claims by owner; renews them and reports lost ones."""

    def __init__(
        self,
        channel: Channel,
        steady_s: Callable[[], float],
        on_expired: Callable[[LiveClaim], None] | None = None,
    ) -> None:
        self._channel = channel
        self._steady_s = steady_s
        self._on_expired = on_expired
        self.kept: dict[bytes, LiveClaim] = {}

    def drop(self, owner: bytes) -> LiveClaim | None:
        """Stop renewing a claim that is settled or abandoned."""
        return self.kept.pop(owner, None)

    def act(self, now: float) -> float | None:
        """Renew due claims and report lost ones. Returns when to act again (`None`: there is no live claim)."""
        due: list[LiveClaim] = []
        next_at: float | None = None
        for kept in list(self.kept.values()):
            at = self._act_on(kept, now, due)
            if at is not None and (next_at is None or at < next_at):
                next_at = at
        if due:
            self._post(due, now)
        return next_at

    def _act_on(self, kept: LiveClaim, now: float, due: list[LiveClaim]) -> float | None:
        if kept.lost:
            return None
        if now >= kept.give_up_at:
            kept.report_lost()
            if self._on_expired is not None:
                self._on_expired(kept)
            return None
        if kept.posted_at:
            return kept.give_up_at
        if kept.due - kept.lease_s * TOGETHER > now:
            return min(kept.due, kept.give_up_at)
        if now < kept.ends:
            kept.posted_at = now
            due.append(kept)
        return kept.give_up_at

    def _post(self, due: list[LiveClaim], now: float) -> None:
        items = [Renew(kept.claim.id, kept.claim.owner, kept.fence, kept.claim.lease_us) for kept in due]

        def note(answers: list[Answer]) -> None:
            for kept, answer in zip(due, answers, strict=True):
                self._note(kept, answer, now)

        def on_answers(answers: list[Answer]) -> None:
            self._apply(lambda: note(answers))

        try:
            self._channel.post(items, on_answers)
        except Exception as error:  # noqa: BLE001 - the other claims need their keeper; these renewals are repeated
            on_answers([Unavailable(error)] * len(items))

    def _note(self, kept: LiveClaim, answer: Answer, sent_at: float) -> None:
        kept.posted_at = 0.0
        if isinstance(answer, Renewed):
            kept.deadline = max(kept.deadline, sent_at + kept.lease_s)
            kept.due = sent_at + kept.lease_s * RENEW_AT
        elif isinstance(answer, Lost):
            if self.kept.get(kept.claim.owner) is kept:
                kept.report_lost()
        else:
            kept.due = self._steady_s() + kept.lease_s * RETRY_AT

    def _apply(self, note: Callable[[], None]) -> None:
        """Apply the answers to renewals. Called in the thread that has the answers; `note` changes the claims."""
        note()


class Keeper(KeeperBase):
    """A keeper with a thread, started by the first claim and ended when idle or closed."""

    def __init__(
        self,
        channel: Channel,
        steady_s: Callable[[], float],
        on_expired: Callable[[LiveClaim], None] | None = None,
    ) -> None:
        super().__init__(channel, steady_s, on_expired)
        self.after_fork()
        restart_after_fork(self)

    def after_fork(self) -> None:
        """Drop the parent's claims: the parent renews them."""
        self.kept.clear()
        self._lock = Lock()  # entered itself, not through the condition, whose `with` Ctrl-C can strike
        self._wake = Condition(self._lock)
        self._thread: Thread | None = None
        self._asleep_until = AWAKE
        self._stirred = False
        self._closed = False

    def keep(self, kept: LiveClaim) -> None:
        """Renew this claim until it is dropped."""
        self.kept[kept.claim.owner] = kept
        if self._thread is None:
            self._start()
        elif kept.due < self._asleep_until:
            self._look_again()

    def _apply(self, note: Callable[[], None]) -> None:
        note()
        self._look_again()

    def _look_again(self) -> None:
        with self._lock:
            self._stirred = True
            self._wake.notify()

    def close(self) -> None:
        """Stop renewing and wait for the thread to end."""
        with self._lock:
            self._closed = True
            thread = self._thread
            self._wake.notify()
        if thread is not None:
            thread.join()

    def _start(self) -> None:
        with self._lock:
            if self._thread is not None or self._closed:
                return
            self._asleep_until = AWAKE
            self._thread = thread = Thread(target=self._run, name="semel-keeper", daemon=True)
            try:
                thread.start()
            except BaseException:
                if thread.ident is None:  # no thread could be had; the next claim tries again
                    self._thread = None
                raise

    def _run(self) -> None:
        while True:
            self._asleep_until = AWAKE
            next_at = self.act(self._steady_s())
            with self._lock:
                if self._closed:
                    self._thread = None
                    return
                if not self._stirred:
                    self._asleep_until = self._steady_s() + IDLE_S if next_at is None else next_at
                    self._wake.wait(max(0.0, self._asleep_until - self._steady_s()))
                idle, self._stirred = next_at is None and not self._stirred and not self._closed, False
                if idle and not self.kept:
                    self._thread = None
                    if not self.kept:  # a claim kept before this line saw a thread, so this thread must stay
                        return
                    self._thread = current_thread()


class LoopKeeper(KeeperBase):
    """A keeper with a timer of the event loop: no thread, no task."""

    _loop: "asyncio.AbstractEventLoop | None" = None
    _alarm: "asyncio.TimerHandle | None" = None
    _alarm_at = 0.0

    def keep(self, kept: LiveClaim) -> None:
        """Renew this claim until it is dropped."""
        self.kept[kept.claim.owner] = kept
        if self._alarm is None or kept.due < self._alarm_at:
            self._loop = asyncio.get_running_loop()
            self._ring_at(kept.due)

    def _apply(self, note: Callable[[], None]) -> None:
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):  # closed: its handlers are gone with it
                loop.call_soon_threadsafe(self._note_and_ring, note)

    def _note_and_ring(self, note: Callable[[], None]) -> None:
        note()
        self._ring()

    def close(self) -> None:
        """Stop renewing."""
        self._silence()
        self._loop = None
        self.kept.clear()

    def _silence(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _ring_at(self, at: float) -> None:
        self._silence()
        assert self._loop is not None
        self._alarm_at = at
        self._alarm = self._loop.call_later(max(0.0, at - self._steady_s()), self._ring)

    def _ring(self) -> None:
        self._silence()  # an answer may ring before the alarm does: one alarm, never two
        if self._loop is None:
            return
        next_at = self.act(self._steady_s())
        if next_at is not None:
            self._ring_at(next_at)
