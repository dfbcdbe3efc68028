"""Marks in memory: the smallest thing that can be remembered, as fast as a dict or a set.

Single marks are a dict from key to expiry, and are made without a lock: `dict.setdefault` is atomic, and the
expiry that comes back is the caller's own object or somebody else's. Batches of marks are a set, with a log of
what to take out of it and when. While there are batches, single marks go through the lock too.

A batch and a single mark must see each other: that needs the global interpreter lock, which orders what all
threads read and write. A free-threaded build has none, so there every mark goes through the lock.
"""

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from threading import Lock

from semel.clock import Clock, SystemClock
from semel.core.commands import Forget, Lookup
from semel.core.ids import digests_of
from semel.core.machine import mark_record
from semel.errors import StoreFull
from semel.keys.limits import SHORT_CHARS, check
from semel.types import Absent, Forgotten, Record

__all__ = ["CompactMarks", "Marker", "MemoryMarks", "Steady"]

REFRESH_NS = 5_000_000_000
"""How long a window is used before it is asked for again."""
SCAN_EVERY_NS = 1_000_000_000
"""How often a full store looks at all single marks, where several windows have mixed their order."""
MARK_NS = 20
"""No mark takes less: so long the room for one mark lasts, without counting them."""
BATCH_MIN = 16
"""Fewer keys than this are single marks: a batch costs a list and an entry in the log."""
HAS_GIL = "t" not in sys.abiflags
"""Whether this build of Python orders the steps of all threads. A free-threaded build may run with the lock
switched on, but may also switch it off later: it counts as having none."""

Marker = Callable[..., bool]


class Steady:
    """Nanoseconds of a clock that never goes back, whatever becomes of the date."""

    def __init__(self, clock: Clock, last_us: Callable[[], int] = lambda: 0) -> None:
        """`last_us`: what the store has already taken for now, where its clock is not the computer's own."""
        self.real: bool = type(clock) is SystemClock
        """Whether it is the computer's own, so that time passes while marks are made."""
        self._epoch_ns = time.time_ns() - time.monotonic_ns() if self.real else 0
        self._clock = clock
        self._last_us = last_us
        self._last = 0
        self.now: Callable[[], int] = time.monotonic_ns if self.real else self._forward

    def date_us(self, moment: int) -> int:
        """The date of a moment, in microseconds."""
        return (moment + self._epoch_ns) // 1000

    def _forward(self) -> int:
        self._last = max(self._last, self._clock.now_us() * 1000, self._last_us() * 1000)
        return self._last


class MemoryMarks:
    """The marks of one consumer. Times in here are nanoseconds of a clock that never goes back."""

    def __init__(self, steady: Steady, *, lock_free: bool = HAS_GIL) -> None:
        """`lock_free`: whether single marks may be made without the lock."""
        self._steady = steady
        self._lock_free = lock_free
        self._clock = steady.now
        self._singles: dict[str, int] = {}
        """Key to expiry; what is over stays until there is a reason to clear it away."""
        self._batched: set[str] = set()
        self._log: dict[int, deque[tuple[int, list[str]]]] = {}
        """By window, because with one window what comes first expires first: (expiry, keys) of each batch."""
        self._batching = False
        """Whether single marks must go through the lock."""
        self._windows: set[int] = set()
        """The windows of single marks: with one of them, the dict is in the order of expiry."""
        self._scanned_at = 0
        self.after_fork()

    def after_fork(self) -> None:
        """Another thread of the parent may have held the lock."""
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._singles) + len(self._batched)

    def add(self, keys: Sequence[str], window_us: int) -> list[bool]:
        """Mark the keys; says for each whether it was the first, a later copy is not."""
        with self._lock:
            now, window = self._clock(), window_us * 1000
            if len(keys) < BATCH_MIN:
                self._windows.add(window)
                return [self._add_one(key, now, now + window) for key in keys]
            self._drop_batches(now)
            self._batching = True  # before the singles are looked at: whoever is not seen there, sees this
            batched, singles, before = self._batched, self._singles, len(self._batched)
            if batched.isdisjoint(keys):
                batched.update(keys)
                few = len(singles) < len(keys)
                if len(batched) - before == len(keys) and (
                    batched.isdisjoint(singles) if few else singles.keys().isdisjoint(keys)
                ):
                    self._note(now + window, window, list(keys))
                    return [True] * len(keys)
                batched.difference_update(keys)  # copies of each other, or of single marks: one by one
            add, held = batched.add, singles.get
            firsts = [not (key in batched or held(key, 0) > now or add(key)) for key in keys]
            self._note(now + window, window, [key for key, new in zip(keys, firsts, strict=True) if new])
            return firsts

    def marker(
        self,
        window_us: Callable[[], int],
        room: Callable[[], int],
        full: Callable[[], StoreFull],
        of_type: Callable[[str, str], bool] | None = None,
    ) -> Marker:
        """A function that marks one key. A closure: attribute look-ups would cost as much as the mark.

        It asks for the window every few seconds, and for room before what there was can be used up. `of_type` marks
        a key whose event type was named, which may have another window.
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
                    # Looked at after the mark is there: a batch that began before this line has seen it.
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
        """Clear away what is over, as far as that is cheap."""
        with self._lock:
            now = self._clock()
            self._drop_batches(now)
            self._clear_front(now)
            if len(self._windows) > 1 and now >= self._scanned_at + SCAN_EVERY_NS:
                self._clear_all(now)

    def purge(self) -> int:
        """Clear away all that is over; returns how many that were."""
        with self._lock:
            now = self._clock()  # counted one by one: marks are added meanwhile, without the lock
            return self._drop_batches(now) + self._clear_all(now)

    def count_expired(self) -> int:
        """Return how many marks are expired and still held."""
        with self._lock:
            now = self._clock()
            singles = sum(expiry <= now for _, expiry in self._all_singles())
            return singles + sum(
                len(keys) for log in self._log.values() for expiry, keys in log if expiry <= now
            )

    def apply(self, item: Lookup | Forget, now_us: int) -> Record | Absent | Forgotten:
        """Answer for a single mark: it is a done record without owner or value."""
        key = item.id[2]
        with self._lock:
            now = self._clock()
            if not self._knows(key, now):
                return Absent()
            batch = next(
                ((expiry, keys) for log in self._log.values() for expiry, keys in log if key in keys), None
            )  # a walk through the log, which only people ask for
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
        """Mark one key until `mine`, an int that nobody else holds."""
        if self._batching:
            self._drop_batches(now)
            if key in self._batched:
                return False
        held = self._singles.setdefault(key, mine)
        if held is mine:
            return True
        if held > now:
            return False
        del self._singles[key]  # over: it goes to the end, in the order of expiry
        return self._singles.setdefault(key, mine) is mine

    def _knows(self, key: str, now: int) -> bool:
        self._drop_batches(now)
        return key in self._batched or self._singles.get(key, 0) > now

    def _note(self, expiry: int, window: int, keys: list[str]) -> None:
        if keys:
            self._log.setdefault(window, deque()).append((expiry, keys))

    def _drop_batches(self, now: int) -> int:
        """Take away the batches that are over; returns how many marks that were."""
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
        """Take away the single marks that are over, up to the first that is not."""
        over: list[str] = []
        try:
            for key, expiry in self._singles.items():
                if expiry > now:
                    break
                over.append(key)
        except RuntimeError:
            pass  # somebody marked meanwhile, without the lock; what was found so far is over all the same
        for key in over:
            del self._singles[key]

    def _clear_all(self, now: int) -> int:
        """Take away every single mark that is over; returns how many that were."""
        self._scanned_at = now
        over = [key for key, expiry in self._all_singles() if expiry <= now]
        for key in over:
            del self._singles[key]
        return len(over)

    def _all_singles(self) -> list[tuple[str, int]]:
        while True:
            try:
                return list(self._singles.items())
            except RuntimeError:  # somebody marked meanwhile, without the lock; seldom, so it ends
                continue

    def _take_back(self, key: str, mine: int) -> None:
        """The mark was not ours to make: a batch is under way, or the key is none."""
        with self._lock:
            if self._singles.get(key) is mine:
                del self._singles[key]


DIGEST = 16
ENTRY = DIGEST + 6
"""Microseconds since this table was made fit into six bytes for nine years."""
FULL_BYTES = 32 * ENTRY
"""How much a string holds on average: longer ones take longer to search, shorter ones cost more room for each mark."""
NEVER = b"\xff" * (ENTRY - DIGEST)
SWEEP_EVERY = 16
"""Added marks for each string that is looked through: what is over stays for half a lap at most."""


class CompactMarks:
    """The packed marks of one consumer; the same verbs as `Marks`. A linear hash table of strings of bytes."""

    def __init__(self, steady: Steady, tenant: str, consumer: str) -> None:
        self._steady = steady
        self._epoch = steady.now()
        self._scope = (tenant, consumer)
        self._buckets: list[bytes] = [b""]
        self._mask = 0
        """Of the digests' bits, those that chose a bucket before the present lap of splitting."""
        self._split = 0
        """The next bucket to be split; those before it use one bit more."""
        self._hand = 0
        self._until_sweep = SWEEP_EVERY
        self._soonest = NEVER
        """Nothing was ever added that is over before this: until then there is nothing to sweep."""
        self._count = 0
        self.after_fork()

    def after_fork(self) -> None:
        """Another thread of the parent may have held the lock."""
        self._lock = Lock()

    def __len__(self) -> int:
        return self._count

    def add(self, keys: Sequence[str], window_us: int) -> list[bool]:
        """Mark the keys; says for each whether it was the first, a later copy is not."""
        digests = digests_of(*self._scope, keys)
        with self._lock:
            now_us = self._now_us()
            now, expiry = _pack(now_us), _pack(now_us + window_us)
            before, buckets, mask, split = self._count, self._buckets, self._mask, self._split
            number_of, firsts = int.from_bytes, list[bool]()
            for digest in digests:  # as `_place` and `_find` do, without the calls
                number = number_of(digest[:4], "little")
                at = number & mask
                if at < split:
                    at = number & (2 * mask + 1)
                bucket = buckets[at]
                if digest in bucket and (found := _find(bucket, digest)) >= 0:
                    firsts.append(bucket[found + DIGEST : found + ENTRY] <= now)
                    if firsts[-1]:
                        self._replace(at, found, digest + expiry)
                else:
                    buckets[at] = bucket + digest + expiry
                    self._count += 1
                    firsts.append(True)
            self._tidy(self._count - before, now, expiry)
            return firsts

    def marker(
        self,
        window_us: Callable[[], int],
        room: Callable[[], int],
        full: Callable[[], StoreFull],
        of_type: Callable[[str, str], bool] | None = None,
    ) -> Marker:
        """A function that marks one key; `of_type` marks one whose event type was named."""

        def mark(key: str, *, event_type: str = "", meta: object = None) -> bool:  # noqa: ARG001 - for hooks
            if event_type and of_type is not None:
                return of_type(key, event_type)
            if room() <= 0 and not self.knows(check(key)):
                raise full()
            return self.add((check(key),), window_us())[0]

        return mark

    def knows(self, key: str) -> bool:
        """Whether the key is marked and its window runs."""
        with self._lock:
            return self._expiry(self._digest(key)) is not None

    def make_room(self) -> None:
        """Take out what is over."""
        self.purge()

    def purge(self) -> int:
        """Take out all that is over; returns how many that were."""
        with self._lock:
            before, now = self._count, _pack(self._now_us())
            for at in range(len(self._buckets)):
                self._sweep(at, now)
            return before - self._count

    def count_expired(self) -> int:
        """Return how many marks are expired and still held."""
        with self._lock:
            now = _pack(self._now_us())
            return sum(entry[DIGEST:] <= now for bucket in self._buckets for entry in _entries(bucket))

    def apply(self, item: Lookup | Forget, now_us: int) -> Record | Absent | Forgotten:
        """Answer for a single mark: it is a done record without owner or value."""
        with self._lock:
            digest = self._digest(item.id[2])
            expiry = self._expiry(digest)
            if expiry is None:
                return Absent()
            if isinstance(item, Forget):
                at = self._place(digest)
                found = _find(self._buckets[at], digest)
                self._replace(at, found, b"")
                self._count -= 1
                return Forgotten(now_us)
            moment = self._epoch + int.from_bytes(expiry, "big") * 1000
            return mark_record(item.id, self._steady.date_us(moment))

    # --- under the lock ---

    def _now_us(self) -> int:
        return (self._steady.now() - self._epoch) // 1000

    def _digest(self, key: str) -> bytes:
        return digests_of(*self._scope, (key,))[0]

    def _place(self, digest: bytes) -> int:
        """The bucket that a digest belongs to."""
        number = int.from_bytes(digest[:4], "little")
        at = number & self._mask
        return at if at >= self._split else number & (2 * self._mask + 1)

    def _expiry(self, digest: bytes) -> bytes | None:
        """The expiry of a mark whose window runs."""
        bucket = self._buckets[self._place(digest)]
        found = _find(bucket, digest)
        expiry = bucket[found + DIGEST : found + ENTRY]
        return expiry if found >= 0 and expiry > _pack(self._now_us()) else None

    def _tidy(self, added: int, now: bytes, expiry: bytes) -> None:
        """After marks were added: sweep as many strings as are due for it, and split where they grow too long."""
        self._soonest = min(self._soonest, expiry)
        self._until_sweep -= added
        while self._until_sweep <= 0:
            self._until_sweep += SWEEP_EVERY
            if self._soonest <= now:
                self._sweep(self._hand, now)
                self._hand = (self._hand + 1) % len(self._buckets)
        while self._count * ENTRY > FULL_BYTES * len(self._buckets):
            self._grow()

    def _replace(self, at: int, found: int, entry: bytes) -> None:
        bucket = self._buckets[at]
        self._buckets[at] = bucket[:found] + entry + bucket[found + ENTRY :]

    def _sweep(self, at: int, now: bytes) -> None:
        """Take what is over out of one bucket."""
        bucket = self._buckets[at]
        kept = [entry for entry in _entries(bucket) if entry[DIGEST:] > now]
        over = len(bucket) // ENTRY - len(kept)
        if over:
            self._buckets[at] = b"".join(kept)
            self._count -= over

    def _grow(self) -> None:
        """Split the next bucket in two, by one bit more of the digests."""
        bit = self._mask + 1
        stays: list[bytes] = []
        goes: list[bytes] = []
        for entry in _entries(self._buckets[self._split]):
            (goes if int.from_bytes(entry[:4], "little") & bit else stays).append(entry)
        self._buckets[self._split] = b"".join(stays)
        self._buckets.append(b"".join(goes))
        self._split += 1
        if self._split == bit:
            self._mask, self._split = 2 * self._mask + 1, 0


def _pack(time_us: int) -> bytes:
    """Big end first: such bytes compare as their numbers do."""
    return time_us.to_bytes(ENTRY - DIGEST, "big")


def _entries(bucket: bytes) -> list[bytes]:
    return [bucket[at : at + ENTRY] for at in range(0, len(bucket), ENTRY)]


def _find(bucket: bytes, digest: bytes) -> int:
    """Where the entry of a digest starts; -1: there is none. What straddles two entries is no digest."""
    found = bucket.find(digest)
    while found >= 0 and found % ENTRY:
        found = bucket.find(digest, found + 1)
    return found
