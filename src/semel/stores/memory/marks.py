"""Marks in memory: the smallest kind of record, as fast as a dict or a set.

Single marks are a dict from key to expiry, and are added without a lock: `dict.setdefault` is atomic, and the
expiry that it returns is either the caller's own object or another thread's. Batches of marks are a set, with a log
of the keys to remove and when. While there are batches, single marks take the lock too.

A batch and a single mark must see each other. That needs the global interpreter lock, which orders the reads and
writes of all threads. A free-threaded build has none, so there every mark takes the lock.
"""

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from threading import Lock

from semel.clock import Clock, SystemClock
from semel.core.commands import Forget, Lookup
from semel.core.machine import mark_record
from semel.errors import StoreFull
from semel.keys.limits import SHORT_CHARS, check
from semel.types import Absent, Forgotten, Record

__all__ = ["Marker", "MemoryMarks", "SteadyClock"]

REFRESH_NS = 5_000_000_000
"""How long a window is used before it is read again."""
SCAN_EVERY_NS = 1_000_000_000
"""How often a full store scans all single marks, if several windows have mixed their order."""
MARK_NS = 20
"""The least time that one mark takes. So free room for n marks lasts at least n times this, without counting."""
BATCH_MIN = 16
"""Fewer keys than this become single marks: a batch costs a list and an entry in the log."""
HAS_GIL = "t" not in sys.abiflags
"""Whether this build of Python always has the global interpreter lock. A free-threaded build may run with the lock
switched on, but may also switch it off later: it counts as having none."""

MIXED = -1
"""Stands among the windows if single marks are not in the order of their expiry."""

Marker = Callable[..., bool]


class SteadyClock:
    """A clock in nanoseconds that never goes back, even if the computer's date is changed."""

    def __init__(self, clock: Clock, last_us: Callable[[], int] = lambda: 0) -> None:
        """`last_us`: the latest time that the store has used, if its clock is not the computer's own."""
        self.real: bool = type(clock) is SystemClock
        """Whether the clock is the computer's own, so that time passes while marks are added."""
        self._epoch_ns = time.time_ns() - time.monotonic_ns() if self.real else 0
        self._clock = clock
        self._last_us = last_us
        self._last = 0
        self.now: Callable[[], int] = time.monotonic_ns if self.real else self._forward

    def date_us(self, moment: int) -> int:
        """Convert a time of this clock to microseconds since 1970."""
        return (moment + self._epoch_ns) // 1000

    def _forward(self) -> int:
        self._last = max(self._last, self._clock.now_us() * 1000, self._last_us() * 1000)
        return self._last


class MemoryMarks:
    """The marks of one consumer. Times here are nanoseconds of a clock that never goes back."""

    def __init__(self, steady: SteadyClock, *, lock_free: bool = HAS_GIL) -> None:
        """`lock_free`: whether single marks may be added without the lock."""
        self._steady = steady
        self._lock_free = lock_free
        self._clock = steady.now
        self._singles: dict[str, int] = {}
        """Key to expiry; expired keys stay until there is a reason to remove them."""
        self._batched: set[str] = set()
        self._log: dict[int, deque[tuple[int, list[str]]]] = {}
        """(expiry, keys) of each batch, by window: batches of one window expire in the order in which they came."""
        self._batching = False
        """Whether single marks must take the lock."""
        self._windows: set[int] = set()
        """The windows of single marks: if there is only one, the dict is in the order of expiry."""
        self._scanned_at = 0
        self.after_fork()

    def after_fork(self) -> None:
        """Replace the lock: another thread of the parent may have held it."""
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._singles) + len(self._batched)

    def add(self, keys: Sequence[str], window_us: int) -> list[bool]:
        """Mark the keys. Returns for each whether it was new; a second copy within the batch is not."""
        with self._lock:
            now, window = self._clock(), window_us * 1000
            if len(keys) < BATCH_MIN:
                self._windows.add(window)
                return [self._add_one(key, now, now + window) for key in keys]
            self._drop_batches(now)
            self._batching = True  # before reading the singles: a mark that is not seen there sees this flag
            batched, singles, before = self._batched, self._singles, len(self._batched)
            if batched.isdisjoint(keys):
                batched.update(keys)
                few = len(singles) < len(keys)
                if len(batched) - before == len(keys) and (
                    batched.isdisjoint(singles) if few else singles.keys().isdisjoint(keys)
                ):
                    self._note(now + window, window, list(keys))
                    return [True] * len(keys)
                batched.difference_update(keys)  # some are copies of each other or of singles: add one by one
            add, held = batched.add, singles.get
            firsts = [not (key in batched or held(key, 0) > now or add(key)) for key in keys]
            self._note(now + window, window, [key for key, new in zip(keys, firsts, strict=True) if new])
            return firsts

    def refresh(self, keys: Sequence[str], window_us: int) -> list[bool]:
        """As `add`, and the windows of known keys start again. Keys become single marks, one by one."""
        with self._lock:
            now, window = self._clock(), window_us * 1000
            self._windows.update((window, MIXED))
            return [self._refresh_one(key, now, now + window) for key in keys]

    def marker(
        self,
        window_us: Callable[[], int],
        room: Callable[[], int],
        full: Callable[[], StoreFull],
        of_type: Callable[[str, str], bool] | None = None,
    ) -> Marker:
        """Return a function that marks one key. It is a closure: attribute lookups would cost as much as the mark.

        It reads the window every few seconds, and reads the free room again before the last known room can be used
        up. `of_type` marks a key with an event type, which may have another window.
        """
        clock, setdefault = self._clock, self._singles.setdefault
        real, lock_free = self._steady.real, self._lock_free
        due = quick_until = window = 0

        def mark(key: str, *, event_type: str = "", meta: object = None) -> bool:  # noqa: ARG001 - for hooks
            """As `Semel.mark`."""
            if event_type and of_type is not None:
                return of_type(key, event_type)
            now = clock()
            if now < quick_until and type(key) is str:
                mine = now + window
                held = setdefault(key, mine)
                if held is mine:
                    # Read after the mark is stored: a batch that sets the flag later than this line sees the mark.
                    if not self._batching and 0 < len(key) <= SHORT_CHARS and key.isprintable():
                        return True
                    self._take_back(key, mine)
                elif held > now:
                    return False
            return slowly(check(key), now)

        def slowly(key: str, now: int) -> bool:
            nonlocal due, quick_until, window
            if now >= due:
                window = window_us() * 1000
                with self._lock:
                    self._windows.add(window)
                    self._clear_front(now)
                free = room()
                due = now + min(REFRESH_NS, free * MARK_NS) if real else 0
                quick_until = due if lock_free else 0
                if free <= 0 and not self.knows(key):
                    raise full()
            with self._lock:
                return self._add_one(key, now, now + window)

        return mark

    def knows(self, key: str) -> bool:
        """Whether the key is marked and its window runs."""
        with self._lock:
            return self._knows(key, self._clock())

    def make_room(self) -> None:
        """Remove expired marks, as far as that is cheap."""
        with self._lock:
            now = self._clock()
            self._drop_batches(now)
            self._clear_front(now)
            if len(self._windows) > 1 and now >= self._scanned_at + SCAN_EVERY_NS:
                self._clear_all(now)

    def purge(self) -> int:
        """Remove all expired marks; returns their number."""
        with self._lock:
            now = self._clock()  # removals are counted one by one: other threads add marks without the lock
            return self._drop_batches(now) + self._clear_all(now)

    def count_expired(self) -> int:
        """Return the number of expired marks that are still held."""
        with self._lock:
            now = self._clock()
            singles = sum(expiry <= now for _, expiry in self._all_singles())
            return singles + sum(
                len(keys) for log in self._log.values() for expiry, keys in log if expiry <= now
            )

    def apply(self, item: Lookup | Forget, now_us: int) -> Record | Absent | Forgotten:
        """Apply the item to one mark, which is answered as a done record without owner or value."""
        key = item.id[2]
        with self._lock:
            now = self._clock()
            if not self._knows(key, now):
                return Absent()
            batch = next(
                ((expiry, keys) for log in self._log.values() for expiry, keys in log if key in keys), None
            )  # a scan of the log: only operators ask for this
            if isinstance(item, Forget):
                self._singles.pop(key, None)
                if batch is not None:
                    self._batched.discard(key)
                    batch[1].remove(key)
                return Forgotten(now_us)
            expiry = self._singles[key] if batch is None else batch[0]
            return mark_record(item.id, self._steady.date_us(expiry))

    # --- under the lock ---

    def _add_one(self, key: str, now: int, mine: int) -> bool:
        """Mark one key until `mine`, an int object that no other thread holds. Returns whether the key was new."""
        if self._batching:
            self._drop_batches(now)
            if key in self._batched:
                return False
        held = self._singles.setdefault(key, mine)
        if held is mine:
            return True
        if held > now:
            return False
        del self._singles[key]  # expired: add it again at the end, to keep the order of expiry
        return self._singles.setdefault(key, mine) is mine

    def _refresh_one(self, key: str, now: int, mine: int) -> bool:
        if self._add_one(key, now, mine):
            return True
        held = self._singles.get(key, 0)
        if key in self._batched:
            held, keys = next(
                (expiry, keys) for log in self._log.values() for expiry, keys in log if key in keys
            )
            if held >= mine:
                return False
            self._singles[key] = mine  # before it leaves its batch: it must never be missing
            self._batched.discard(key)
            keys.remove(key)
        elif held < mine:
            self._singles[key] = mine  # in place: a mark without the lock must not find it missing
        return False

    def _knows(self, key: str, now: int) -> bool:
        self._drop_batches(now)
        return key in self._batched or self._singles.get(key, 0) > now

    def _note(self, expiry: int, window: int, keys: list[str]) -> None:
        if keys:
            self._log.setdefault(window, deque()).append((expiry, keys))

    def _drop_batches(self, now: int) -> int:
        """Remove the expired batches; returns the number of their marks."""
        dropped = 0
        for window, log in list(self._log.items()):
            while log and log[0][0] <= now:
                keys = log.popleft()[1]
                self._batched.difference_update(keys)
                dropped += len(keys)
            if not log:
                del self._log[window]
        if not self._log:
            self._batching = False
        return dropped

    def _clear_front(self, now: int) -> None:
        """Remove expired single marks, up to the first that is not expired."""
        over: list[str] = []
        try:
            for key, expiry in self._singles.items():
                if expiry > now:
                    break
                over.append(key)
        except RuntimeError:
            pass  # another thread added a mark without the lock; the keys found so far are expired all the same
        for key in over:
            del self._singles[key]

    def _clear_all(self, now: int) -> int:
        """Remove every expired single mark; returns their number."""
        self._scanned_at = now
        over = [key for key, expiry in self._all_singles() if expiry <= now]
        for key in over:
            del self._singles[key]
        return len(over)

    def _all_singles(self) -> list[tuple[str, int]]:
        while True:
            try:
                return list(self._singles.items())
            except RuntimeError:  # another thread added a mark without the lock; rare, so the loop ends
                continue

    def _take_back(self, key: str, mine: int) -> None:
        """Remove a mark that should not have been added: a batch is running, or the key is invalid."""
        with self._lock:
            if self._singles.get(key) is mine:
                del self._singles[key]
