"""Marks in memory: the smallest thing that can be remembered, as fast as a dict."""

from collections.abc import Callable, Sequence
from threading import Lock

from semel.core.commands import Forget, Lookup
from semel.keys.limits import KEY_BYTES_MAX, check
from semel.types import Absent, Forgotten, Record

REFRESH_US = 5_000_000
"""How long a window is used before it is asked for again."""


class Marks:
    """The marks of one consumer: key -> expiry.

    Time only goes forward, so marks made with one window expire in the order of their making: what is over
    is taken from the front of a dict, and then everything left in it is still running. Each window has a
    dict of its own; the former ones are asked too, until they are empty.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._window_us = 0
        self._expiry: dict[str, int] = {}
        self._oldest = 0
        """Nothing in `_expiry` expires before this."""
        self._former: dict[int, dict[str, int]] = {}
        """By window: a window that comes back goes on with its own."""
        self._last = 0

    def __len__(self) -> int:
        return len(self._expiry) + sum(map(len, self._former.values()))

    def __contains__(self, key: str) -> bool:
        return key in self._expiry or any(key in marks for marks in self._former.values())

    def add(self, keys: Sequence[str], now: int, window_us: int) -> list[bool]:
        """Mark the keys; says for each whether it was the first, a later copy is not."""
        with self._lock:
            now = self._ready(now, window_us)
            expires_at = now + window_us
            expiry = self._expiry
            if self._former:
                return [self._add_slowly(key, expires_at) for key in keys]
            before, setdefault = len(expiry), expiry.setdefault
            # An int of our own marks our entries: what comes back is ours, or was there before.
            firsts = [setdefault(key, expires_at) is expires_at for key in keys]
            if len(expiry) - before != sum(firsts):
                seen: set[str] = set()
                for at, key in enumerate(keys):
                    firsts[at] = firsts[at] and key not in seen
                    seen.add(key)
        return firsts

    def adder(
        self, clock: Callable[[], int], window: Callable[[], int], room: Callable[[], int]
    ) -> Callable[[str], bool]:
        """A function that marks one key. A closure: attribute look-ups would cost as much as the mark.

        It asks for the window every few seconds, and for room whenever what it was given is used up.
        """
        acquire, release = self._lock.acquire, self._lock.release
        due = last = window_us = left = 0
        marks = self._expiry
        setdefault = marks.setdefault

        def refresh(now: int) -> None:
            nonlocal due, last, window_us, left, marks, setdefault
            asked_us, left = window(), room()
            with self._lock:
                window_us = asked_us
                last = self._ready(now, window_us)
                marks = self._expiry
                setdefault = marks.setdefault
                due = 0 if self._former else min(self._oldest, last + REFRESH_US)

        def one(key: str) -> bool:
            nonlocal last, left
            now = clock()
            if now >= due or now < last or not left:
                refresh(now)
                if not due:
                    return self.add((check(key),), now, window_us)[0]
                now = last  # not before what others have seen, also when the clock was set back
            acquire()
            if self._expiry is not marks:  # somebody marks with another window: our dict is not all there is
                release()
                refresh(now)
                return self.add((check(key),), now, window_us)[0]
            last = now
            expires_at = now + window_us
            try:
                if setdefault(key, expires_at) is not expires_at:
                    return False
            finally:
                release()
            left -= 1
            if type(key) is str and 0 < len(key) <= KEY_BYTES_MAX and key.isascii() and key.isprintable():
                return True
            return self._checked(key)

        return one

    def purge(self, now: int) -> int:
        """Remove what is over."""
        with self._lock:
            before = len(self)
            self._clear(now)
            return before - len(self)

    def expired(self, now: int) -> int:
        """How many are over and still held."""
        with self._lock:
            return sum(
                expiry <= now for marks in (self._expiry, *self._former.values()) for expiry in marks.values()
            )

    def apply(self, item: Lookup | Forget, now: int) -> Record | Absent | Forgotten:
        """Answer for a single mark: it is a done record without owner or value."""
        key = item.id[2]
        with self._lock:
            for marks in (self._expiry, *self._former.values()):
                expiry = marks.get(key, 0)
                if expiry <= now:
                    continue
                if isinstance(item, Forget):
                    del marks[key]
                    return Forgotten(now)
                return Record(
                    id=item.id,
                    state="done",
                    owner=b"",
                    fence=1,
                    lease_until=0,
                    attempt=1,
                    expires_at=expiry,
                    first_seen=0,
                )
        return Absent()

    def _ready(self, now: int, window_us: int) -> int:
        """Make everything in `_expiry` a running mark of this window; returns a time that never goes back."""
        self._last = now = max(now, self._last)
        if window_us != self._window_us:
            if self._expiry:
                self._former[self._window_us] = self._expiry
            self._window_us, self._expiry, self._oldest = window_us, self._former.pop(window_us, {}), 0
        if self._oldest <= now or self._former:
            self._clear(now)
        return now

    def _clear(self, now: int) -> None:
        self._oldest = _clear_front(self._expiry, now) or now + self._window_us
        for marks in self._former.values():
            _clear_front(marks, now)
        self._former = {window_us: marks for window_us, marks in self._former.items() if marks}

    def _add_slowly(self, key: str, expires_at: int) -> bool:
        if any(key in marks for marks in self._former.values()) or key in self._expiry:
            return False
        self._expiry[key] = expires_at
        return True

    def _checked(self, key: str) -> bool:
        """Take back a mark whose key turns out to be no key. Raises `KeyInvalid`."""
        try:
            check(key)
        except BaseException:
            with self._lock:
                self._expiry.pop(key, None)
            raise
        return True


def _clear_front(marks: dict[str, int], now: int) -> int:
    """Drop what is over; returns the expiry of the first that is not, 0 if none is left."""
    over: list[str] = []
    first = 0
    for key, expiry in marks.items():
        if expiry > now:
            first = expiry
            break
        over.append(key)
    for key in over:
        del marks[key]
    return first
