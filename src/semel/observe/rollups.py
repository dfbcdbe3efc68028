"""One-minute rollups, kept in the store for seven days: every process writes its own, and they add up.

One record holds an hour of one process, which claims it. Each flush adds a step to the record: a step is
written at once, fenced, and written once even if it is sent twice. Readers need no listing of records: the keys
of an hour are `<hour>:0`, `<hour>:1` and so on, and each process takes one of the lowest free numbers.
"""

import secrets
from collections.abc import Generator, Iterable, Sequence
from threading import Event, Lock, Thread
from time import monotonic
from typing import Any, TypeAlias

import msgspec

from semel.core.commands import Admit, Answer, Claim, Granted, Item, Lookup, Renew, Settle
from semel.core.protocols import AsyncStore, Store
from semel.errors import SemelError, StoreUnavailable, UsageError
from semel.observe.counters import CounterHook, MinuteCounts
from semel.observe.events import HookEvent
from semel.observe.formatting import redact
from semel.observe.workers import BEAT_S, Heartbeat
from semel.runtime.generators import drive
from semel.runtime.jitter import jitter
from semel.runtime.process import logging, new_owner, restart_after_fork
from semel.stores.registry import store_for
from semel.types import Lost, Record, Renewed, Unavailable

__all__ = ["CONSUMER", "KEPT_S", "TENANT", "RollupHook", "Writer", "hours"]

TENANT = CONSUMER = "semel.rollups"
"""The tenant of the records: a separate one, so that they do not count in users' statistics."""
KEPT_S = 7 * 86400
KEPT_US = (KEPT_S + 3600) * 10**6
URLS_MAX = 8
URL_CHARACTERS_MAX = 500
"""The most sources in a heartbeat, and the longest: a record's metadata is small."""
INTERVAL_S = 60.0
LEASE_US = 5 * 60 * 10**6
"""Longer than a few flushes. After it another process takes over the record of one that died."""
SPREAD = 4
"""A process takes one of the lowest free numbers, so fewer than this are free below a taken one."""
FIRST_LOOK = 8
NUMBERS_MAX = 4096
TRIES_MAX = 20
STEPS_MAX = 240
"""Each step rewrites the record; above this size the process begins another."""
PENDING_MAX = 2000

Asking: TypeAlias = Generator[Sequence[Item], Sequence[Answer], Any]
"""A generator that yields items for the store and receives their answers."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(MinuteCounts).decode


class Writer:
    """Writes the counts of a `CounterHook`. One for each process and store; not thread-safe."""

    def __init__(self, tally: CounterHook) -> None:
        self._tally = tally
        self._pending: list[tuple[str, MinuteCounts]] = []
        """Parts that the store has not confirmed, by the names of their steps."""
        self._hour = -1
        self._place = ("", "", "")
        self._owner = b""
        self._fence = 0
        self._steps = 0
        self._written = 0
        self.mark: str = secrets.token_hex(4)
        """The id of this process in its parts."""
        self._admitted = False

    def unwritten_counts(self) -> list[MinuteCounts]:
        """The counts that the store has not confirmed."""
        return [part for _, part in self._pending] + [self._negate(part) for part in self._tally.peek()]

    def flush(self) -> Asking:
        """Write all counts; returns whether the store confirmed them. Unconfirmed ones are sent again."""
        for part in self._tally.take():
            self._written += 1
            self._pending.append((f"{part.minute}.{self.mark}.{self._written}", self._negate(part)))
        del self._pending[:-PENDING_MAX]
        tries = 0
        while self._pending:
            name, part = self._pending[0]
            if self._hour != part.minute // 60 or self._steps >= STEPS_MAX:
                yield from self._end()
                if not (yield from self._begin(part.minute // 60)):
                    return False
            step = (name, _encode(part))
            (answer,) = yield (Renew(self._place, self._owner, self._fence, LEASE_US, step),)
            if isinstance(answer, Renewed):
                self._tally.note_time(answer.lease_until_us - LEASE_US)
                self._steps += 1
                del self._pending[0]
                tries = 0
            elif isinstance(answer, Lost) and tries < TRIES_MAX:
                tries += 1
                self._hour = -1
            else:
                return False
        return True

    def close(self) -> Asking:
        """Write the rest, and release the record for another process."""
        yield from self.flush()
        if self._hour >= 0:
            yield (Settle(self._place, self._owner, self._fence, "released", count_attempt=False),)
            self._hour = -1

    def _negate(self, part: MinuteCounts) -> MinuteCounts:
        part.writer = self.mark
        return part

    def _end(self) -> Asking:
        """End the record of an hour."""
        if self._hour >= 0:
            yield (Settle(self._place, self._owner, self._fence, "done", None, KEPT_US, LEASE_US),)
            self._hour = -1

    def _begin(self, hour: int) -> Asking:
        """Claim a record of an hour; returns whether it succeeded."""
        if not self._admitted:
            (mode,) = yield (Admit(TENANT, CONSUMER, "lease"),)
            if isinstance(mode, Unavailable):
                return False
            self._admitted = True
        owner = new_owner()
        for _ in range(TRIES_MAX):
            number = yield from self._free(hour)
            if number is None:
                return False
            place = _place(hour, number)
            (answer,) = yield (Claim(place, owner, LEASE_US, KEPT_US),)
            if isinstance(answer, Unavailable):
                return False
            if isinstance(answer, Granted):
                self._hour, self._place, self._owner, self._fence = hour, place, owner, answer.fence
                self._steps = len(answer.steps)
                self._tally.note_time(answer.lease_until_us - LEASE_US)
                return True
        return False

    def _free(self, hour: int) -> Asking:
        """Return one of the lowest free numbers."""
        free: list[int] = []
        at = 0
        while len(free) < SPREAD and at < NUMBERS_MAX:
            size = max(FIRST_LOOK, at)
            answers = yield [Lookup(_place(hour, number)) for number in range(at, at + size)]
            for number, answer in enumerate(answers, at):
                if isinstance(answer, Unavailable):
                    return None
                if not isinstance(answer, Record) or _is_left(answer, self._tally.now_s):
                    free.append(number)
            at += size
        return jitter.choice(free[:SPREAD]) if free else None


def hours(wanted: Iterable[int]) -> Asking:
    """Return the parts that all processes wrote for these hours. Raises `StoreUnavailable`."""
    found: dict[int, list[MinuteCounts]] = {hour: [] for hour in wanted}
    missing = dict.fromkeys(found, 0)
    at, size = 0, FIRST_LOOK
    while missing and at < NUMBERS_MAX:
        places = [(hour, number) for hour in missing for number in range(at, at + size)]
        answers = yield [Lookup(_place(*each)) for each in places]
        for (hour, _), answer in zip(places, answers, strict=True):
            if isinstance(answer, Unavailable):
                raise StoreUnavailable("the rollups could not be read") from answer.error
            if isinstance(answer, Record):
                found[hour] += _parts(answer)
            else:
                missing[hour] += 1
        missing = {hour: count for hour, count in missing.items() if count < SPREAD}
        at, size = at + size, 2 * size
    return found


def _parts(record: Record) -> list[MinuteCounts]:
    parts: list[MinuteCounts] = []
    for _, value in record.steps:
        try:
            parts.append(_decode(value or b""))
        except msgspec.MsgspecError:
            continue  # written by a newer version: skip it, and keep the other parts
    return parts


def _is_left(record: Record, now_s: float) -> bool:
    """Whether its writer has ended and the record has space."""
    gone = not record.owner or record.lease_until_us <= now_s * 1e6
    return record.state == "claimed" and gone and len(record.steps) < STEPS_MAX


def _place(hour: int, number: int) -> tuple[str, str, str]:
    return (TENANT, CONSUMER, f"{hour}:{number}")


class RollupHook:
    """A hook that writes counts into a store every `interval_s`, from a thread of its own, and a heartbeat every 10 s.

    For workers that use the store directly: `semel.open(url, ..., hooks=[RollupHook(url)])`; the dashboard of any
    `semel serve` on that store then shows their traffic. `close()` writes the rest, and closes a store that was given
    as a URL or is `owned`. `sources`: the URLs from which this process consumes; its heartbeats name them without
    passwords, and the dashboard can then find their dead letters. While the store cannot be reached, the counts of
    the last day are kept in memory; older ones are lost.
    """

    def __init__(
        self,
        store: str | Store | AsyncStore,
        *,
        interval_s: float = INTERVAL_S,
        owned: bool = False,
        sources: Sequence[str] = (),
    ) -> None:
        found = store_for(store) if isinstance(store, str) else store
        if not isinstance(found, Store):
            raise UsageError(f"{found.name} serves event loops only; give its URL, or a store that blocks")
        if not 1 <= interval_s <= 600:  # noqa: PLR2004 - a step each: more often, and an hour has too many
            raise UsageError(f"interval_s is {interval_s:g}; it must be between 1 and 600")
        self._store = found
        self._owned = owned or isinstance(store, str)
        self._interval_s = interval_s
        self.tally: CounterHook = CounterHook()
        self.name_sources(sources)
        self.after_fork()
        restart_after_fork(self)

    def after_fork(self) -> None:
        """Start from zero in a child process, with a record of its own."""
        self._writer = Writer(self.tally)
        self._heartbeat = Heartbeat(self.tally)
        self._beat_due = 0.0
        self._over = Event()
        self._lock = Lock()
        self._thread: Thread | None = None

    def name_sources(self, urls: Sequence[str]) -> None:
        """Name the sources in the heartbeats, without passwords."""
        names = [redact(url) for url in urls]
        self.tally.source_urls = tuple(name for name in names[:URLS_MAX] if len(name) <= URL_CHARACTERS_MAX)

    def __call__(self, happening: HookEvent) -> None:
        """Count it."""
        self.tally(happening)
        if self._thread is None:
            self._start()

    def _start(self) -> None:
        with self._lock:
            if self._thread is None and not self._over.is_set():
                self._thread = Thread(target=self._run, name="semel-rollups", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Write the rest and stop the thread. Idempotent."""
        with self._lock:
            self._over.set()
        thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        try:
            while True:
                self._beat()
                now_s = self.tally.now_s
                left_s = self._interval_s - now_s % self._interval_s  # processes write at the same time
                if self._over.wait(min(left_s, BEAT_S)):
                    break
                if left_s <= BEAT_S:
                    self._ask(self._writer.flush())
            if self._ask(self._writer.close()):  # a store that is away is not waited for twice
                self._beat(stopped=True)
        finally:
            if self._owned:
                self._store.close()

    def _beat(self, *, stopped: bool = False) -> None:
        """Write a heartbeat, not more often than each 10 s. A service takes none: it counts its callers itself."""
        now = monotonic()
        if self._store.name.startswith("http") or (now < self._beat_due and not stopped):
            return
        self._beat_due = now + BEAT_S
        self._ask(self._heartbeat.beat(stopped=stopped), told=False)

    def _ask(self, asking: Asking, *, told: bool = True) -> bool:
        """Have the store answer; returns whether it could be reached. `told`: say so if it could not."""
        try:
            self._store.open()
            drive(asking, self._send)
        except SemelError as error:
            level = logging.WARNING if told else logging.DEBUG
            logging.getLogger("semel").log(level, "rollups could not be written: %s", error)
            return False
        return True

    def _send(self, items: Sequence[Item]) -> Sequence[Answer]:
        try:
            return self._store.send(items)
        except StoreUnavailable as error:
            return [Unavailable(error)] * len(items)
