"""Who is told of changes: those of this object at once, those of others by the server's notifications."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from threading import Lock

from semel.core.commands import Answer, Claim, Item
from semel.core.ports import Listener
from semel.digests import DIGEST_BYTES, digest
from semel.types import Busy, Id

__all__ = ["ChangeListeners"]

WAITED_MAX = 100_000
"""How many keys that were answered with `Busy` are remembered: a notification names only the digest."""


class ChangeListeners:
    """The listeners of a store, and the keys that somebody may be waiting for."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._waited: OrderedDict[bytes, Id] = OrderedDict()
        self.listeners: tuple[Listener, ...] = ()

    def add(self, listener: Listener) -> Callable[[], None]:
        """Tell `listener` from now on; returns what ends it."""
        with self._lock:
            self.listeners = (*self.listeners, listener)

        def stop() -> None:
            with self._lock:
                self.listeners = tuple(each for each in self.listeners if each is not listener)

        return stop

    def note(self, items: Sequence[Item], answers: Sequence[Answer]) -> None:
        """Remember the keys that are busy: whoever asked may go on to wait for them."""
        for item, answer in zip(items, answers, strict=True):
            if isinstance(answer, Busy) and isinstance(item, Claim):
                key = digest(item.id)
                with self._lock:
                    self._waited[key] = item.id
                    self._waited.move_to_end(key)
                    if len(self._waited) > WAITED_MAX:
                        self._waited.popitem(last=False)

    def tell(self, changed: Iterable[Id]) -> None:
        """These records have changed."""
        for record_id in changed if self.listeners else ():
            for listener in self.listeners:
                listener(record_id)

    def heard(self, payload: str) -> None:
        """What the server tells: digests in hexadecimal, one after the other."""
        step = 2 * DIGEST_BYTES
        for start in range(0, len(payload), step):
            try:
                record_id = self._waited.get(bytes.fromhex(payload[start : start + step]))
            except ValueError:
                return  # somebody else uses the channel
            if record_id is not None:
                self.tell((record_id,))

    def look_again(self) -> None:
        """Send everybody who waits to look: what changed before we listened was told to nobody."""
        with self._lock:
            waited = list(self._waited.values())
        self.tell(waited)

    def after_fork(self) -> None:
        """Another thread of the parent may have held the lock."""
        self._lock = Lock()
