"""What a cache in front of the truth may say, and for how long."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from semel.core.commands import Forget, Granted, Known, Lookup, Mark, Marked, Resolve, Settle, SetWindow
from semel.errors import PolicyInvalid, StoreClosed, StoreRefused, StoreUnavailable
from semel.stores.memory.store import MemoryStore
from semel.stores.sqlite import SqliteStore
from semel.stores.tiered import Cache, MemoryCache, from_url, tiered, url_of
from semel.stores.tiered.rules import COPY_BYTES_MAX, COUNTS, AskStore, Write
from semel.testing import ManualClock
from semel.types import Absent, Busy, Completed, Forgotten, Mismatch, Record, Unavailable
from tests.services import redis
from tests.stores.tiered import places
from tests.stores.tiered.tools import MINUTE_US, ByHand, Counting, Pair, S, claim, done, finish, kinds

PRINT, OTHER_PRINT = b"\1one", b"\1two"


@pytest.fixture(params=["memory", "redis"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    clock = ManualClock()
    cache: Cache = MemoryCache(now_us=clock.now_us)
    if request.param == "redis":
        cache = places.redis_cache(tmp_path, clock)
    made = Pair(cache, clock)
    yield made
    made.store.close()


def test_a_recent_duplicate_does_not_touch_the_truth(pair: Pair) -> None:
    finish(pair.store, "a", "b", value=b"rkept")
    record = pair.truth.send([Lookup(("", "consumer", "a"))])[0]
    answers, calls = pair.asked(claim("a"), claim("b"))
    assert calls == 0
    assert isinstance(record, Record)
    assert answers[0] == Known("done", b"rkept", record.fence, record.settled_at_us, record.first_seen_us)
    assert pair.tiers()["cache_hits"] == 2


def test_new_events_cost_the_truth_one_call_for_a_batch_and_one_to_complete_it(pair: Pair) -> None:
    claims = [claim(f"new {number}") for number in range(500)]
    answers, calls = pair.asked(*claims)
    assert calls == 1
    assert kinds(answers) == ["Granted"] * 500
    settles = [done(each, answer) for each, answer in zip(claims, answers, strict=True)]
    answers, calls = pair.asked(*settles)
    assert calls == 1
    mixed = [claim("new 1"), claim("never seen"), claim("new 2")]
    answers, calls = pair.asked(*mixed)
    assert kinds(answers) == ["Known", "Granted", "Known"]
    assert calls == 1
    assert [item.id[2] for item in pair.truth.calls[-1]] == ["never seen"]  # type: ignore[union-attr]


def test_a_duplicate_that_only_the_truth_knows_is_copied(pair: Pair) -> None:
    finish(pair.truth, "a")
    assert pair.asked(claim("a"))[1] == 1
    answers, calls = pair.asked(claim("a"))
    assert calls == 0
    assert answers[0].value == b"rvalue"
    assert pair.tiers()["truth_known"] == 1


@pytest.mark.parametrize("to", ["failed", "released", "unknown"])
def test_only_done_is_copied(pair: Pair, to: Any) -> None:
    held = claim("a")
    (granted,) = pair.send(held)
    pair.send(Settle(held.id, held.owner, granted.fence, to, b"r", MINUTE_US))
    for _ in range(2):
        _, calls = pair.asked(claim("a", lease_us=1))
        assert calls == 1
    assert pair.tiers()["cache_hits"] == 0


def test_what_runs_is_never_answered_by_the_cache(pair: Pair) -> None:
    held = claim("a")
    (granted,) = pair.send(held)
    answers, calls = pair.asked(claim("a"))
    assert isinstance(answers[0], Busy)
    assert calls == 1
    assert isinstance(granted, Granted)


def test_a_completion_that_was_there_before_is_not_copied(pair: Pair) -> None:
    """Its value may be another one: an operator has decided, and then the late owner says what it thinks."""
    held = claim("a", quarantine=True, lease_us=S)
    (granted,) = pair.send(held)
    pair.clock.advance(2)
    (decided,) = pair.send(Resolve(held.id, granted.fence, "done", b"rdecided", MINUTE_US))
    assert isinstance(decided, Completed)
    (late,) = pair.send(done(held, granted, b"rlate"))
    assert late == Completed(already=True, at_us=late.at_us, kept=False)
    assert pair.send(claim("a", quarantine=True))[0].value == b"rdecided"
    assert pair.send(claim("a", quarantine=True))[0].value == b"rdecided"


def test_a_recreated_record_is_not_copied(pair: Pair) -> None:
    held = claim("a", lease_us=S, window_us=S)
    (granted,) = pair.send(held)
    pair.clock.advance(10)
    (late,) = pair.send(done(held, granted))
    assert late.recreated
    assert isinstance(pair.send(claim("a"))[0], Granted)


# --- fingerprints -------------------------------------------------------------------------------


def test_a_fingerprint_is_answered_by_the_cache_if_it_was_the_one(pair: Pair) -> None:
    held = claim("a", fingerprint=PRINT)
    pair.send(done(held, pair.send(held)[0]))
    for fingerprint in (PRINT, None):
        answers, calls = pair.asked(claim("a", fingerprint=fingerprint))
        assert (kinds(answers), calls) == (["Known"], 0)
    for _ in range(2):
        answers, calls = pair.asked(claim("a", fingerprint=OTHER_PRINT))
        assert (answers, calls) == ([Mismatch()], 1)


def test_a_fingerprint_that_nobody_here_knows_is_for_the_truth(pair: Pair) -> None:
    """A takeover without a fingerprint keeps the first one's, which no answer tells."""
    first = claim("a", fingerprint=PRINT, lease_us=S)
    pair.send(first)
    pair.clock.advance(2)
    heir = claim("a")
    pair.send(done(heir, pair.send(heir)[0]))
    assert pair.asked(claim("a"))[1] == 0
    assert pair.send(claim("a", fingerprint=OTHER_PRINT)) == [Mismatch()]
    assert isinstance(pair.send(claim("a", fingerprint=PRINT))[0], Known)
    assert pair.asked(claim("a", fingerprint=PRINT))[1] == 0
    assert pair.send(claim("a", fingerprint=OTHER_PRINT)) == [Mismatch()]


# --- how long -----------------------------------------------------------------------------------


def test_a_copy_lives_no_longer_than_its_record(pair: Pair) -> None:
    held = claim("a", window_us=10 * S)
    pair.send(done(held, pair.send(held)[0]))
    pair.clock.advance(9)
    assert pair.asked(claim("a"))[1] == 0
    pair.clock.advance(1)
    assert isinstance(pair.send(claim("a"))[0], Granted)


def test_a_copy_made_late_lives_for_what_is_left(pair: Pair) -> None:
    held = claim("a", window_us=10 * S)
    pair.truth.send([done(held, pair.truth.send([held])[0])])
    pair.clock.advance(8)
    assert pair.asked(claim("a"))[1] == 1
    pair.clock.advance(1)
    assert pair.asked(claim("a"))[1] == 0
    pair.clock.advance(1)
    assert isinstance(pair.send(claim("a"))[0], Granted)


def test_a_copy_that_is_held_up_is_not_written_when_its_record_is_over(pair: Pair) -> None:
    held = claim("a", window_us=10 * S)
    pair.truth.send([done(held, pair.truth.send([held])[0])])
    slow = ByHand(pair.store, claim("a"))
    slow.until(Write)
    pair.clock.advance(10)
    slow.finish()
    assert isinstance(pair.send(claim("a"))[0], Granted)


def test_a_copy_lives_no_longer_than_the_window_of_the_cache(tmp_path: Path) -> None:
    clock = ManualClock()
    for cache in (
        MemoryCache(now_us=clock.now_us),
        places.redis_cache(tmp_path, clock, window_us=10 * S),
    ):
        pair = Pair(cache, clock, cache_window="10s")
        finish(pair.store, "a")
        assert pair.asked(claim("a"))[1] == 0
        clock.advance(10)
        answers, calls = pair.asked(claim("a"))
        assert (kinds(answers), calls) == (["Known"], 1)
        pair.store.close()


def test_a_sliding_record_is_over_when_its_first_claim_says(pair: Pair) -> None:
    held = claim("a", window_us=10 * S, sliding=True)
    (granted,) = pair.send(held)
    pair.clock.advance(6)
    pair.send(done(held, granted, sliding=True))
    assert pair.asked(claim("a", sliding=True))[1] == 0
    pair.clock.advance(4)
    assert isinstance(pair.send(claim("a", sliding=True))[0], Granted)


def test_a_window_that_is_shortened_for_what_exists_empties_the_cache(pair: Pair) -> None:
    finish(pair.store, "a")
    pair.send(SetWindow("", "consumer", "", S, existing=True))
    pair.clock.advance(2)
    assert isinstance(pair.send(claim("a"))[0], Granted)


def test_a_large_value_is_not_copied(pair: Pair) -> None:
    finish(pair.store, "a", value=b"r" * COPY_BYTES_MAX)
    finish(pair.store, "b", value=b"r" * (COPY_BYTES_MAX + 1))
    assert pair.asked(claim("a"))[1] == 0
    assert pair.asked(claim("b"))[1] == 1
    assert len(pair.send(claim("b"))[0].value) == COPY_BYTES_MAX + 1


# --- forgetting ---------------------------------------------------------------------------------


def test_forget_is_forgotten_by_both(pair: Pair) -> None:
    finish(pair.store, "a")
    (forgotten,) = pair.send(Forget(("", "consumer", "a")))
    assert isinstance(forgotten, Forgotten)
    heir = claim("a")
    (granted,) = pair.send(heir)
    assert granted.fence > forgotten.fence
    pair.send(done(heir, granted, b"rnew"))
    answers, calls = pair.asked(claim("a"))
    assert (answers[0].value, calls) == (b"rnew", 0)


def test_a_copy_that_was_under_way_does_not_bring_back_what_is_forgotten(pair: Pair) -> None:
    finish(pair.truth, "a", "b")
    slow = ByHand(pair.store, claim("a"), claim("b"))
    slow.until(Write)
    other = pair.other()
    assert isinstance(other.send([Forget(("", "consumer", "a"))])[0], Forgotten)
    assert kinds(slow.finish()) == ["Known", "Known"]
    assert isinstance(pair.send(claim("a"))[0], Granted)


def test_nor_does_the_copy_of_a_completion(pair: Pair) -> None:
    held = claim("a")
    (granted,) = pair.send(held)
    slow = ByHand(pair.store, done(held, granted))
    slow.until(Write)
    pair.other().send([Forget(("", "consumer", "a"))])
    slow.finish()
    assert isinstance(pair.send(claim("a"))[0], Granted)


def test_what_is_forgotten_between_look_and_ask_is_copied_anew_only_if_it_is_done_anew(pair: Pair) -> None:
    finish(pair.truth, "a")
    slow = ByHand(pair.store, claim("a", lease_us=S))
    slow.until(AskStore)
    pair.other().send([Forget(("", "consumer", "a"))])
    assert isinstance(slow.finish()[0], Granted)
    pair.clock.advance(2)
    assert isinstance(pair.send(claim("a"))[0], Granted)


class Unreachable(MemoryCache):
    """A cache that can be out of reach."""

    down = False

    def __getattribute__(self, name: str) -> Any:
        if name in ("look", "put", "invalidate", "clear", "open") and object.__getattribute__(self, "down"):
            return _unreachable
        return object.__getattribute__(self, name)


def _unreachable(*_: Any) -> None:
    raise StoreUnavailable("the cache is down")


@pytest.fixture
def fragile() -> tuple[Pair, Unreachable]:
    clock = ManualClock()
    cache = Unreachable(now_us=clock.now_us)
    return Pair(cache, clock), cache


def test_forget_is_not_answered_until_the_cache_has_forgotten(fragile: tuple[Pair, Unreachable]) -> None:
    pair, cache = fragile
    finish(pair.store, "a")
    cache.down = True
    for _ in range(2):
        (answer,) = pair.send(Forget(("", "consumer", "a")))
        assert isinstance(answer, Unavailable)
        assert "do it again" in str(answer.error)
    cache.down = False
    assert isinstance(pair.send(Forget(("", "consumer", "a")))[0], Absent)  # the truth had forgotten before
    assert isinstance(pair.send(claim("a"))[0], Granted)


def test_nor_is_a_window_moved_before_the_cache_is_empty(fragile: tuple[Pair, Unreachable]) -> None:
    pair, cache = fragile
    finish(pair.store, "a")
    cache.down = True
    moved = SetWindow("", "consumer", "", S, existing=True)
    assert isinstance(pair.send(moved)[0], Unavailable)
    cache.down = False
    assert pair.send(moved) == [None]
    pair.clock.advance(2)
    assert isinstance(pair.send(claim("a"))[0], Granted)


def test_items_of_one_batch_are_carried_out_in_order(pair: Pair) -> None:
    finish(pair.store, "a", "b")
    answers = pair.send(Forget(("", "consumer", "a")), claim("a"), claim("b"))
    assert kinds(answers) == ["Forgotten", "Granted", "Known"]


# --- marks --------------------------------------------------------------------------------------


def test_a_won_mark_is_seen_by_the_cache_from_then_on(pair: Pair) -> None:
    assert pair.send(Mark("", "m", ["a", "b"], MINUTE_US)) == [Marked([True, True])]
    answers, calls = pair.asked(Mark("", "m", ["b", "a"], MINUTE_US))
    assert (answers, calls) == ([Marked([False, False])], 0)
    answers, calls = pair.asked(Mark("", "m", ["a", "c", "b", "d"], MINUTE_US))
    assert (answers, calls) == ([Marked([False, True, False, True])], 1)
    assert pair.truth.calls[-1] == [Mark("", "m", ["c", "d"], MINUTE_US)]
    pair.clock.advance(60)
    assert pair.send(Mark("", "m", ["a"], MINUTE_US)) == [Marked([True])]


def test_a_mark_that_was_there_before_is_not_copied(pair: Pair) -> None:
    """Nobody has said how long it will be there."""
    pair.truth.send([Mark("", "m", ["a"], MINUTE_US)])
    pair.clock.advance(59)
    assert pair.asked(Mark("", "m", ["a"], MINUTE_US)) == ([Marked([False])], 1)
    pair.clock.advance(1)
    assert pair.send(Mark("", "m", ["a"], MINUTE_US)) == [Marked([True])]


def test_a_forgotten_mark_is_new(pair: Pair) -> None:
    pair.send(Mark("", "m", ["a"], MINUTE_US))
    slow = ByHand(pair.store, Mark("", "m", ["b"], MINUTE_US))
    slow.until(Write)
    for key in ("a", "b"):
        assert isinstance(pair.send(Forget(("", "m", key)))[0], Forgotten)
    slow.finish()
    assert pair.send(Mark("", "m", ["a", "b"], MINUTE_US)) == [Marked([True, True])]
    assert pair.send(Mark("", "m", ["a", "b"], MINUTE_US)) == [Marked([False, False])]


def test_a_mark_is_no_claim_and_a_claim_no_mark(pair: Pair) -> None:
    pair.send(Mark("", "consumer", ["a"], MINUTE_US))
    assert isinstance(pair.send(claim("a"))[0], Granted)
    finish(pair.store, "b")
    assert pair.send(Mark("", "consumer", ["b"], MINUTE_US)) == [Marked([True])]


# --- trouble ------------------------------------------------------------------------------------


def test_a_cache_that_fails_is_left_alone_for_a_while_and_refilled_when_it_is_back(
    fragile: tuple[Pair, Unreachable], caplog: pytest.LogCaptureFixture
) -> None:
    pair, cache = fragile
    now = [0.0]
    pair.store.breaker._steady_s = lambda: now[0]
    finish(pair.store, "a")
    cache.down = True
    with caplog.at_level(logging.WARNING, "semel"):
        for _ in range(5):
            answers, calls = pair.asked(claim("a"))
            assert (kinds(answers), calls) == (["Known"], 1)
    assert len(caplog.records) == 1
    assert "the truth is asked for everything" in caplog.text
    tiers = pair.tiers()
    assert tiers["cache_errors"] == 1
    assert tiers["cache_skipped"] == 5
    cache.down = False
    cache.clear()
    now[0] = 1.0
    assert pair.asked(claim("a"))[1] == 1
    assert pair.asked(claim("a"))[1] == 0


def test_a_cache_that_is_down_at_the_start_is_no_obstacle(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    cache = Unreachable(now_us=clock.now_us)
    cache.down = True
    pair = Pair(cache, clock)
    finish(pair.store, "a")
    assert isinstance(pair.send(claim("a"))[0], Known)
    pair.store.close()


def test_what_the_cache_knows_is_answered_while_the_truth_is_down(pair: Pair) -> None:
    finish(pair.store, "a")
    pair.truth.down = True
    assert kinds(pair.send(claim("a"), claim("b"))) == ["Known", "Unavailable"]
    with pytest.raises(StoreUnavailable):
        pair.send(claim("b"))
    pair.truth.down = False
    assert isinstance(pair.send(claim("b"))[0], Granted)


def test_a_child_of_a_fork_does_not_share_copies_in_memory() -> None:
    pair = Pair()
    finish(pair.store, "a")
    pair.store.after_fork()
    pair.cache.after_fork()  # type: ignore[attr-defined]
    assert pair.asked(claim("a"))[1] == 1


def test_a_closed_store_answers_nothing_until_it_is_opened_again(pair: Pair) -> None:
    finish(pair.store, "a")
    pair.store.close()
    pair.store.close()
    with pytest.raises(StoreClosed):
        pair.send(claim("a"))
    pair.store.open()
    assert pair.asked(claim("a"))[1] == 0


def test_all_is_closed_whatever_one_of_them_says(tmp_path: Path) -> None:
    from semel.stores.bloom import Bloom

    truth = SqliteStore(tmp_path / "truth.db")
    folder = tmp_path / "gone"
    folder.mkdir()
    store = tiered(cache="memory:", truth=truth, filter=Bloom(capacity=10, path=folder / "seen.bloom"))
    store.open()
    folder.rmdir()
    with pytest.raises(FileNotFoundError):
        store.close()
    with pytest.raises(StoreClosed):
        truth.send([claim("a")])


def test_a_cache_that_refuses_is_told_at_the_start_and_nothing_stays_open(tmp_path: Path) -> None:
    truth = SqliteStore(tmp_path / "truth.db")
    url = redis.place(tmp_path).replace("redis://", "redis://nobody:wrong@")
    store = tiered(cache=url, truth=truth)
    with pytest.raises(StoreRefused):
        store.open()
    with pytest.raises(StoreClosed):
        truth.send([claim("a")])


def test_copies_in_memory_are_bounded() -> None:
    clock = ManualClock()
    pair = Pair(MemoryCache(copies_max=2, now_us=clock.now_us), clock)
    finish(pair.store, "a", "b", "c")
    assert [pair.asked(claim(key))[1] for key in ("b", "c", "a", "b")] == [0, 0, 1, 1]
    small = Pair(MemoryCache(bytes_max=10, now_us=clock.now_us), clock)
    finish(small.store, "a", "b", value=b"r12345")
    assert small.asked(claim("b"))[1] == 0
    assert small.asked(claim("a"))[1] == 1


# --- making one ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache": "sqlite:///a.db"}, "cannot be a cache"),
        ({"cache": "memory:?size=3"}, "no option size"),
        ({"cache_window": "1us"}, "cache_window"),
        ({"affine": True}, "filter="),
        ({"cache": object()}, "not a cache"),
    ],
)
def test_what_makes_no_tiers_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyInvalid, match=message):
        tiered(**({"cache": "memory:", "truth": "memory:"} | options))


def test_a_store_that_guesses_is_no_truth() -> None:
    truth = Counting(ManualClock())
    truth.capabilities = truth.capabilities.__class__(durable=True, exact=False)
    with pytest.raises(PolicyInvalid, match="guesses"):
        tiered(cache="memory:", truth=truth)
    with pytest.raises(PolicyInvalid, match="one store"):
        tiered(cache="memory:", truth=tiered(cache="memory:", truth=MemoryStore()))


def test_tiers_have_a_url() -> None:
    table = {
        "cache": "memory:?copies_max=5",
        "truth": "sqlite:///a.db?synchronous=normal",
        "cache_window": "5m",
    }
    url = url_of(table)
    store = from_url(url)
    assert store.name == "tiered:?cache=memory:&truth=sqlite:///a.db&cache_window=5m"
    assert store.cache_window_us == 300 * S
    for bad in ("tiered:", "tiered:?cache=memory:", "tiered:x?cache=memory:&truth=memory:"):
        with pytest.raises(PolicyInvalid, match="tiered:"):
            from_url(bad)
    with pytest.raises(PolicyInvalid, match="no option colour"):
        url_of(table | {"colour": "red"})


def test_every_count_is_explained() -> None:
    page = (Path(__file__).parents[3] / "docs/reference/stores/tiered.md").read_text(encoding="utf-8")
    assert [name for name in COUNTS if f"| `{name}` | {COUNTS[name]} |" not in page] == []
