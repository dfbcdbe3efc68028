"""Memory: plain dicts and sets."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from semel.cli.bench.measure import Fresh, Job, Scratch
from semel.stores.memory.store import MemoryStore

__all__ = ["RawMemory", "scratch"]

COUNT = 1_000
WINDOW_US = 86_400_000_000


class RawMemory:
    """Raw operations on a dict and a set."""

    single_limit: str = "dict with a clock"
    batch_limit: str = "set comprehension"

    def __init__(self, count: int = COUNT) -> None:
        self._count = count

    def single(self) -> Job:
        """A dict from id to expiry, with a clock call per id."""
        fresh, seen = Fresh(self._count), dict[str, int]()

        def run() -> None:
            for key in fresh.keys:
                now = time.time_ns() // 1000
                expiry = seen.get(key)
                if expiry is None or expiry <= now:
                    seen[key] = now + WINDOW_US

        return Job(run, self._count, fresh)

    def batch(self, size: int) -> Job:
        """A set, read and filled by comprehension."""
        fresh, seen = Fresh(self._count), set[str]()

        def run() -> None:
            add = seen.add
            for batch in fresh.batches(size):
                [not (key in seen or add(key)) for key in batch]

        return Job(run, self._count, fresh)


@contextmanager
def scratch(_url: str) -> Iterator[Scratch]:
    """Open a scratch place in memory; nothing to remove."""
    raw = RawMemory()
    yield Scratch(
        kind="memory",
        target=MemoryStore(records_max=10**7),
        single_limit=raw.single_limit,
        single=raw.single,
        batch_limit=raw.batch_limit,
        batch=raw.batch,
    )
