"""What the tests of this folder share: a truth that counts its calls, and stores to drive by hand."""

from collections.abc import Sequence
from typing import Any

from semel.core.commands import Answer, Item
from semel.core.protocols import Capabilities
from semel.errors import StoreUnavailable
from semel.stores.memory.store import MemoryStore
from semel.stores.tiered import Cache, MemoryCache, TieredStore, tiered
from semel.stores.tiered.rules import Step
from semel.testing import ManualClock
from semel.types import Stats
from tests.stores.redis.tools import MINUTE_US, S, claim, done, finish, kinds

__all__ = ["MINUTE_US", "Counting", "Pair", "S", "claim", "done", "finish", "kinds"]


class Counting(MemoryStore):
    """A truth that counts the calls it gets, and can be out of reach."""

    name = "counting:"
    capabilities = Capabilities(durable=True, notifies=True)

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock=clock)
        self.calls: list[list[Item]] = []
        self.down = False

    def send(self, items: Sequence[Item], /) -> list[Answer]:
        if self.down:
            raise StoreUnavailable("the truth is down")
        self.calls.append(list(items))
        return super().send(items)


class Pair:
    """A tiered store on a counting truth, with a clock of the test's."""

    def __init__(self, cache: Cache | None = None, clock: ManualClock | None = None, **options: Any) -> None:
        self.clock = clock or ManualClock()
        self.truth = Counting(self.clock)
        self.cache: Cache = cache or MemoryCache(now_us=self.clock.now_us)
        self.store: TieredStore = tiered(cache=self.cache, truth=self.truth, **options)
        self.store.open()

    def other(self, cache: Cache | None = None, **options: Any) -> TieredStore:
        """Another instance on the same truth; without a cache of its own, on the same cache."""
        return tiered(cache=cache or self.cache, truth=self.truth, **options)

    def send(self, *items: Item) -> list[Answer]:
        return self.store.send(items)

    def asked(self, *items: Item) -> tuple[list[Answer], int]:
        """The answers, and how many calls the truth got for them."""
        before = len(self.truth.calls)
        answers = self.store.send(items)
        return answers, len(self.truth.calls) - before

    def tiers(self) -> dict[str, float]:
        from semel.core.commands import Count

        (stats,) = self.store.send([Count()])
        assert isinstance(stats, Stats)
        return stats.tiers


class ByHand:
    """One call under way, step by step, so that others can come between."""

    def __init__(self, store: TieredStore, *items: Item) -> None:
        self._store = store
        self._steps = store._tier.carry_out(items)
        self.answers: list[Answer] | None = None
        self.step: Step | None = next(self._steps)

    def until(self, kind: type) -> None:
        """Go on until this step is next, which is not yet done."""
        while not isinstance(self.step, kind):
            assert self.step is not None, f"it ended without {kind.__name__}"
            self.go()

    def go(self, reply: Any = ...) -> None:
        """Do the step that is next, or have it answered so."""
        assert self.step is not None
        try:
            self.step = self._steps.send(self._store._perform(self.step) if reply is ... else reply)
        except StopIteration as stop:
            self.step, self.answers = None, stop.value

    def finish(self) -> list[Answer]:
        while self.step is not None:
            self.go()
        assert self.answers is not None
        return self.answers
