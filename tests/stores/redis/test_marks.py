"""Plain marks: single commands with the server's clock, scripts otherwise, and the same marks either way."""

import logging
from typing import Any

import pytest
import redis as driver

from semel.core.commands import Count, Forget, Lookup, Mark, Marked
from semel.core.protocols import Store
from semel.errors import StoreFull
from semel.stores.redis import calls, marks
from semel.testing.proxy import Proxy
from semel.types import Absent, Forgotten, Record, Unavailable
from tests.services import redis
from tests.stores.redis.tools import MINUTE_US, Make, claim, kinds, opened


def mark(store: Store, *keys: str, consumer: str = "marks", window_us: int = MINUTE_US) -> list[bool]:
    (answer,) = store.send([Mark("", consumer, list(keys), window_us)])
    assert isinstance(answer, Marked), answer
    return list(answer.firsts)


def scripts_run(own: redis.Own) -> int:
    told = own.ask("INFO", "commandstats")
    return sum(int(told.get(f"cmdstat_{name}", {}).get("calls", 0)) for name in ("eval", "evalsha"))


def test_marks_alone_need_no_script(make: Make, own: redis.Own) -> None:
    store = make(own.url)
    keys = [f"key {number}" for number in range(700)]
    assert mark(store, *keys) == [True] * 700
    assert mark(store, *keys, "another") == [False] * 700 + [True]
    firsts = store.send(
        [Mark("", "a", ["x"], MINUTE_US), Mark("", "b", ["x"], MINUTE_US), Mark("", "a", ["x"], MINUTE_US)]
    )
    assert firsts == [Marked([True]), Marked([True]), Marked([False])]
    assert scripts_run(own) == 0


def test_marks_of_commands_and_of_scripts_are_the_same(make: Make, own: redis.Own) -> None:
    """A batch that holds anything else goes by script, and so does all that must stop where the store was emptied."""
    plainly, scripted = make(own.url), make(own.url, on_store_lost="fail")
    assert mark(plainly, "a", "b") == [True, True]
    assert mark(scripted, "a", "c") == [False, True]
    assert scripts_run(own) > 0
    assert mark(plainly, "b", "c", "d") == [False, False, True]
    mixed = plainly.send([Mark("", "marks", ["a", "c", "e"], MINUTE_US), claim("x")])
    assert mixed[0] == Marked([False, False, True])


def test_a_mark_is_looked_up_counted_and_forgotten(make: Make, own: redis.Own) -> None:
    store = make(own.url)
    mark(store, "a", "b")
    name = ("", "marks", "a")
    stats, found = store.send([Count(), Lookup(name)])
    assert (stats.marks, stats.consumers) == (2, {"marks": 2})
    assert isinstance(found, Record)
    assert abs(found.expires_at_us - stats.now_us - MINUTE_US) < 10_000_000
    assert isinstance(store.send([Forget(name)])[0], Forgotten)
    assert isinstance(store.send([Lookup(name)])[0], Absent)
    assert mark(store, "a", "b") == [True, False]


@pytest.mark.parametrize(("window_us", "window_ms"), [(1, 1), (1_000, 1), (1_001, 2), (MINUTE_US, 60_000)])
def test_a_mark_lasts_no_less_than_its_window(own: redis.Own, window_us: int, window_ms: int) -> None:
    """The server counts in milliseconds; what is over is rounded up."""
    with opened(own.url) as store:
        assert mark(store, "a", window_us=window_us) == [True]
        exchange = store._core.exchange
        (part,) = exchange.plain_marks(0, Mark("", "marks", ["a"], window_us))
        assert (
            b"\r\nPX\r\n$%d\r\n%d\r\n" % (len(str(window_ms)), window_ms)
            in marks._call(exchange, part, first=True).packed
        )
        if window_us == MINUTE_US:
            with driver.Redis(port=own.port) as raw:
                left: Any = raw.pttl(part.keys[0])
                assert window_ms - 30_000 < left <= window_ms


def test_a_window_of_nothing_marks_nothing(make: Make, own: redis.Own) -> None:
    store = make(own.url)
    assert [mark(store, "a", window_us=0) for _ in range(2)] == [[True], [True]]


def test_what_the_server_refuses_is_asked_for_again(make: Make, own: redis.Own) -> None:
    """At the memory limit a plain command is refused whatever it would do; the script still answers what is known."""
    store = make(own.url)
    mark(store, "known")
    own.ask("CONFIG", "SET", "maxmemory", "1")
    assert mark(store, "known") == [False]
    (answer,) = store.send([Mark("", "marks", ["known", "new"], MINUTE_US)])
    assert isinstance(answer, Unavailable)
    assert isinstance(answer.error, StoreFull)
    own.ask("CONFIG", "SET", "maxmemory", "0")
    assert mark(store, "known", "new") == [False, True]


def test_a_flush_is_noticed_by_marks_alone(
    make: Make, own: redis.Own, caplog: pytest.LogCaptureFixture
) -> None:
    store, other = make(own.url), make(own.url)
    inner: Any = getattr(store, "inner", store)
    mark(store, "a")
    mark(other, "b")
    own.ask("FLUSHALL")
    with caplog.at_level(logging.WARNING, "semel"):
        assert mark(other, "c") == [True]  # writes a new epoch
        assert mark(store, "a") == [True]
    assert inner.stores_lost == 1
    assert "has lost its records" in caplog.text
    assert mark(store, "a") == [False]
    assert inner.stores_lost == 1


def test_answers_that_come_in_crumbs_are_put_together(make: Make, own: redis.Own) -> None:
    class Crumbs(Proxy):
        def _hand_on(self, client: Any, data: bytes) -> bool:
            return all(
                super(Crumbs, self)._hand_on(client, data[at : at + 3]) for at in range(0, len(data), 3)
            )

    with Crumbs(own.port) as proxy:
        store = make(own.url.replace(str(own.port), str(proxy.port)))
        keys = [f"key {number}" for number in range(60)]
        assert mark(store, *keys) == [True] * 60
        assert mark(store, *keys[:30], "z") == [False] * 30 + [True]
        assert kinds(store.send([claim("key")])) == ["Granted"]


def test_an_epoch_that_nobody_wrote_confuses_no_connection(make: Make, own: redis.Own) -> None:
    store = make(own.url)
    mark(store, "a")
    own.ask("SET", "semel:{0}epoch", "two\r\nlines")
    (answer,) = store.send([Mark("", "marks", ["b"], MINUTE_US)])
    assert isinstance(answer, Unavailable)
    own.ask("SET", "semel:{0}epoch", "one line")
    assert mark(store, "a", "b", "c") == [False, False, True]
    assert kinds(store.send([claim("key")])) == ["Granted"]


@pytest.mark.parametrize("total", [1, 31, 47, 48, 100, 500, 1000, 5000])
def test_pieces_hold_every_item_once(total: int) -> None:
    slices = list(calls.pieces(total))
    assert [at for each in slices for at in range(each.start, each.stop)] == list(range(total))
    assert all(each.stop - each.start <= calls.ITEMS_MAX for each in slices)
