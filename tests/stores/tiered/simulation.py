"""Bad days for tiers, each from one seed: crashes at every step, flushes, resets, forgetting, copies held up.

The real rules (`Tier`) run on a real cache and a real truth in memory; what is simulated is who comes when.
"""

import os
from collections import Counter
from collections.abc import Generator
from random import Random
from typing import Any

from semel.core.commands import Claim, Forget, Granted, Item, Known, Settle
from semel.stores.bloom import Bloom
from semel.stores.memory.store import MemoryStore
from semel.stores.tiered import MemoryCache, TieredStore
from semel.stores.tiered.protocols import Copy, CopyWrite
from semel.stores.tiered.rules import CommittedAnswer, Tier, WantedKey
from semel.testing import ManualClock
from semel.types import Completed, Forgotten

KEYS = 25
WORKERS = 4
LEASE_US, WINDOW_US = 30 * 10**6, 3600 * 10**6
STEPS = 400

Work = Generator[None, None, None]


class Violation(AssertionError):
    """An event was lost, or had its effect twice without a reason."""


class Day:
    """One seed."""

    def __init__(
        self,
        seed: int,
        tier: type[Tier] = Tier,
        cache: type[MemoryCache] = MemoryCache,
        *,
        affine: bool = False,
    ) -> None:
        self.chance = Random(seed)
        self.clock = ManualClock()
        self.truth = MemoryStore(clock=self.clock)
        self.cache = cache(now_us=self.clock.now_us)
        self.affine = affine
        self.stores = [self._store(tier) for _ in range(2)]
        self.waiting: list[str] = []
        """Deliveries that nobody works on."""
        self.working: dict[int, tuple[str, Work]] = {}
        self.effects: Counter[str] = Counter()
        self.excused: Counter[str] = Counter()
        """How often an effect may repeat: a crash between effect and completion, a lease that ran out."""
        self.since_forget: Counter[str] = Counter()
        """Effects since the key was last forgotten."""
        self.forgets: Counter[str] = Counter()
        self.at_effect: set[int] = set()

    def _store(self, tier: type[Tier]) -> TieredStore:
        bloom = Bloom(capacity=12, window="1h", error_rate=0.1, clock=self.clock)
        store = TieredStore(
            self.cache, self.truth, cache_window_us=WINDOW_US, filter=bloom, affine=self.affine
        )
        store._tier.__class__ = tier
        return store

    # --- one delivery ---

    def _send(self, store: TieredStore, item: Item) -> Generator[None, None, Any]:
        steps = store._tier.carry_out([item])
        reply: Any = None
        while True:
            yield
            try:
                step = steps.send(reply)
            except StopIteration as stop:
                return stop.value[0]
            yield
            reply = store._perform(step)

    def _work(self, number: int, key: str) -> Work:
        store = self.stores[number % 2]
        held = Claim(("", "c", key), self.chance.randbytes(16), LEASE_US, WINDOW_US)
        forgets = self.forgets[key]
        answer = yield from self._send(store, held)
        if isinstance(answer, Known):
            if not self.since_forget[key] and forgets == self.forgets[key]:
                raise Violation(f"{key} was called done, and had no effect")
            return
        if not isinstance(answer, Granted):
            self.waiting.append(key)
            return
        self.at_effect.add(number)
        self.effects[key] += 1
        self.since_forget[key] += 1
        yield
        settle = Settle(held.id, held.owner, answer.fence, "done", b"r", WINDOW_US, LEASE_US)
        settled = yield from self._send(store, settle)
        self.at_effect.discard(number)
        if not isinstance(settled, Completed):
            self.waiting.append(key)

    # --- what happens ---

    def play(self) -> None:
        """Raises `Violation`."""
        for number in range(KEYS):
            self.waiting += [f"evt {number}"] * self.chance.randint(1, 4)
        self.chance.shuffle(self.waiting)
        for _ in range(STEPS):
            self._step(self.chance.random())
        while self.waiting or self.working:  # from here on nothing goes wrong, and the claims of the dead end
            if self.chance.random() < 0.01:
                self._let_leases_end()
            self._step(1.0)
        for number in range(KEYS):
            key = f"evt {number}"
            if not self.since_forget[key]:
                raise Violation(f"{key} was lost")
            if self.effects[key] > 1 + self.excused[key] + self.forgets[key]:
                raise Violation(f"{key} had its effect {self.effects[key]} times")

    def _step(self, luck: float) -> None:
        if luck < 0.02:
            self.cache.clear()
        elif luck < 0.03:
            store = self.chance.choice(self.stores)
            store._tier._filter = store.filter = Bloom(
                capacity=12, window="1h", error_rate=0.1, clock=self.clock
            )
        elif luck < 0.04:
            self._let_leases_end()
        elif luck < 0.08 and self.working:
            self._crash(self.chance.choice(list(self.working)))
        elif luck < 0.12:
            self._forget(self.chance.choice([f"evt {number}" for number in range(KEYS)]))
        elif self.waiting and len(self.working) < WORKERS:
            number = min(set(range(WORKERS)) - set(self.working))
            key = self.waiting.pop(self.chance.randrange(len(self.waiting)))
            self.working[number] = (key, self._work(number, key))
        elif self.working:
            number = self.chance.choice(list(self.working))
            try:
                next(self.working[number][1])
            except StopIteration:
                del self.working[number]

    def _crash(self, number: int) -> None:
        key, _ = self.working.pop(number)
        if number in self.at_effect:
            self.at_effect.discard(number)
            self.excused[key] += 1
        self.waiting.append(key)

    def _let_leases_end(self) -> None:
        self.clock.advance(us=LEASE_US)
        for key, _ in self.working.values():
            self.excused[key] += 1

    def _forget(self, key: str) -> None:
        """By an operator, while others may be about to write a copy; the event is then delivered again."""
        store = self.chance.choice(self.stores)
        (answer,) = store.send([Forget(("", "c", key))])
        if isinstance(answer, Forgotten):
            self.forgets[key] += 1
            self.since_forget[key] = 0
            self.waiting.append(key)


# --- what must be caught ------------------------------------------------------------------------


def _done(each: WantedKey) -> Copy:
    return Copy("done", 1, 1, 1, b"r")


class BloomPositiveIsDuplicate(Tier):
    """Whatever the filter says maybe to is answered."""

    def _look(self, wanted: list[WantedKey]) -> Any:
        for each in wanted:
            each.copy = _done(each) if each.maybe else None
        return iter(())


class CacheBeforeCommit(Tier):
    """The copy is written when the work begins."""

    def _fact(self, each: WantedKey, items: Any, answers: Any) -> CommittedAnswer | None:
        found = super()._fact(each, items, answers)
        if isinstance(answers[each.position], Granted):
            return CommittedAnswer(each.digest, _done(each), WINDOW_US)
        return found


class CacheMissIsNew(Tier):
    """What the cache does not know is new, without the truth being asked."""

    def _rest(self, items: Any, wanted: list[WantedKey], answers: Any) -> Any:
        _, positions, asked = super()._rest(items, wanted, answers)
        for each in wanted:
            if each.copy is None and each.position in positions:
                answers[each.position] = Granted(os.getpid(), 1, 0, 0)
        left = [position for position in positions if answers[position] is None]
        return [items[position] for position in left], left, asked


class BloomNegativeIsNew(Tier):
    """What the filter never saw is new, without the truth being asked."""

    def _rest(self, items: Any, wanted: list[WantedKey], answers: Any) -> Any:
        _, positions, asked = super()._rest(items, wanted, answers)
        for each in wanted:
            if not each.maybe and each.position in positions:
                answers[each.position] = Granted(os.getpid(), 1, 0, 0)
        left = [position for position in positions if answers[position] is None]
        return [items[position] for position in left], left, asked


class ForgetsInTheTruthAlone(Tier):
    """The cache is not told."""

    def _forget(self, items: Any, answers: Any) -> Any:
        return iter(())


class NoEpoch(MemoryCache):
    """A copy is written whatever has been forgotten since."""

    def put(self, puts: Any, counts: Any) -> int:
        now = self.stamp(b"")
        assert now is not None
        return super().put(
            [
                CopyWrite(put.digest, put.copy, type(now)(now.epoch, put.stamp.at_us), put.rest_us)
                for put in puts
            ],
            counts,
        )


MUTANTS: dict[str, dict[str, Any]] = {
    "bloom positive = duplicate": {"tier": BloomPositiveIsDuplicate},
    "bloom negative = new": {"tier": BloomNegativeIsNew},
    "cache before commit": {"tier": CacheBeforeCommit},
    "cache miss = new": {"tier": CacheMissIsNew},
    "forget in the truth alone": {"tier": ForgetsInTheTruthAlone},
    "a late copy overrules forget": {"cache": NoEpoch},
}
"""Rules that are broken on purpose, by name. The simulation is trusted because it catches each of them."""
