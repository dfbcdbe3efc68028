"""A filter before the cache skips reads or is only measured; whatever it says, the answers are the same."""

from collections.abc import Sequence
from typing import Any

import pytest

from semel.core.commands import Granted, Known, Mark, Marked
from semel.core.ids import digest
from semel.errors import PolicyInvalid, StoreUnavailable
from semel.stores.bloom import Bloom, rebuild
from semel.stores.tiered import MemoryCache, tiered
from semel.testing import ManualClock
from tests.stores.postgres import places as postgres_places
from tests.stores.tiered.tools import MINUTE_US, Pair, claim, finish, kinds


class Spied(MemoryCache):
    """A cache that notes how many keys it is asked for."""

    asked = 0

    def look(self, digests: Sequence[bytes], counts: Any) -> Any:
        self.asked += len(digests)
        return super().look(digests, counts)


def spied(
    *, affine: bool, capacity: int = 10_000, clock: ManualClock | None = None
) -> tuple[Pair, Spied, Bloom]:
    clock = clock or ManualClock()
    cache = Spied(now_us=clock.now_us)
    bloom = Bloom(capacity=capacity, window="24h", clock=clock)
    return Pair(cache, clock, filter=bloom, affine=affine), cache, bloom


def test_affine_keys_that_were_never_seen_are_not_looked_for() -> None:
    pair, cache, _ = spied(affine=True)
    finish(pair.store, *map(str, range(100)))
    assert cache.asked <= 2  # a false maybe
    assert kinds(pair.send(*[claim(str(number)) for number in range(100)])) == ["Known"] * 100
    assert cache.asked >= 100
    assert pair.tiers()["filter_skipped"] >= 98


def test_others_are_looked_for_all_the_same_and_the_filter_is_measured() -> None:
    pair, cache, _ = spied(affine=False)
    finish(pair.store, "a")
    pair.other(filter=None)
    finish(pair.other(), "b")  # another instance, whose ids this filter never sees
    assert pair.asked(claim("b"))[1] == 0
    assert cache.asked >= 2
    tiers = pair.tiers()
    assert tiers["filter_missed"] == 1
    assert tiers["filter_skipped"] == 0
    assert 0 < tiers["filter_fill_ratio"] < 0.01


def test_a_filter_that_knows_nothing_loses_nothing() -> None:
    """Reset, or of an instance that the keys have just come to: the truth is asked, and says what is known."""
    clock = ManualClock()
    pair, _, _ = spied(affine=True, clock=clock)
    finish(pair.store, "a")
    reset = pair.other(filter=Bloom(capacity=1000, clock=clock), affine=True)
    assert isinstance(reset.send([claim("a")])[0], Known)
    assert reset.send([Mark("", "m", ["x"], MINUTE_US)]) == [Marked([True])]
    fresh = pair.other(filter=Bloom(capacity=1000, clock=clock), affine=True)
    assert fresh.send([Mark("", "m", ["x"], MINUTE_US)]) == [Marked([False])]


def test_a_saturated_filter_loses_nothing_and_says_so() -> None:
    pair, cache, bloom = spied(affine=True, capacity=30)
    finish(pair.store, *map(str, range(1000)))
    full = bloom.fullness()
    assert full.saturated
    assert full.false_positive_ratio > 0.5
    cache.asked = 0
    answers = pair.send(*[claim(f"new {number}") for number in range(100)])
    assert kinds(answers) == ["Granted"] * 100
    assert cache.asked > 50  # maybe, maybe, maybe
    assert pair.tiers()["filter_false"] > 50


def test_a_filter_out_of_reach_is_done_without() -> None:
    class Broken:
        instant = True

        def open(self) -> None: ...
        def close(self) -> None: ...
        def add_many(self, _digests: Sequence[bytes], /) -> None:
            raise StoreUnavailable("the filter is down")

        def maybe_many(self, _digests: Sequence[bytes], /) -> list[bool]:
            raise StoreUnavailable("the filter is down")

        def fullness(self) -> Any:
            raise StoreUnavailable("the filter is down")

    pair = Pair(filter=Broken(), affine=True)
    finish(pair.store, "a")
    assert isinstance(pair.send(claim("a"))[0], Known)
    assert isinstance(pair.send(claim("b"))[0], Granted)
    assert pair.tiers()["filter_errors"] == 4


def test_a_filter_is_rebuilt_from_the_store() -> None:
    pair, _, _ = spied(affine=True)
    finish(pair.truth, *map(str, range(1200)))
    pair.truth.send([claim("running")])
    bloom = Bloom(capacity=10_000, clock=pair.clock)
    assert rebuild(bloom, pair.store, consumer="consumer") == 1200
    assert all(bloom.maybe_many([digest(("", "consumer", str(number))) for number in range(1200)]))
    assert rebuild(bloom, pair.store, consumer="another") == 0


def test_a_filter_that_waits_for_a_server_is_not_for_event_loops(tmp_path: Any) -> None:
    class Slow(Bloom):
        instant = False

    truth = postgres_places.make(tmp_path)
    store = tiered(cache="memory:", truth=truth, filter=Slow(capacity=10))
    with pytest.raises(PolicyInvalid, match="event loop"):
        store.twin()  # type: ignore[attr-defined]
