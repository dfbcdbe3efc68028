"""What goes wrong between client and server: cut, swallowed, flushed, killed, full."""

import contextlib
import logging
import os
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from semel.core.commands import Forget, Granted, Item, Known, Lookup, Mark, Marked
from semel.errors import RecordCorrupt, StoreClosed, StoreFull, StoreRefused, StoreUnavailable
from semel.stores.redis import RedisStore
from semel.testing.proxy import Proxy, ProxyMode
from semel.types import Absent, Completed, Record, Unavailable
from tests.services import redis
from tests.stores.redis.tools import MINUTE_US, Make, S, claim, done, finish, kinds, named, opened
from tests.waiting import await_true


def through(proxy: Proxy, at: str) -> str:
    """The same store, reached by the proxy."""
    _, _, rest = at.rpartition(":")
    path = rest.partition("/")[2]
    return f"redis://127.0.0.1:{proxy.port}/{path}"


def proxied(at: str) -> Proxy:
    return Proxy(int(at.split(":")[2].partition("/")[0]))


# --- connections --------------------------------------------------------------------------------


HOW: tuple[ProxyMode, ...] = ("cut_request", "half_reply", "cut_reply")


@pytest.mark.parametrize("how", HOW)
def test_a_claim_whose_connection_was_cut_is_ones_own(make: Make, tmp_path: Path, how: ProxyMode) -> None:
    """Before it arrived, in the midst of the answer, or instead of it."""
    at = redis.place(tmp_path)
    with proxied(at) as proxy:
        store = make(through(proxy, at))
        finish(store, "warm")
        for number in range(10):
            proxy.cut_next(how, 1)
            held = claim(f"key {number}")
            (granted,) = store.send([held])
            assert isinstance(granted, Granted)
            assert granted.attempt == 1
            proxy.cut_next(how, 1)
            (completed,) = store.send([done(held, granted)])
            assert isinstance(completed, Completed)
            assert completed.already is (how != "cut_request")
        assert proxy.cuts == 20


@pytest.mark.parametrize("how", HOW)
def test_a_mark_whose_connection_was_cut_is_not_repeated(make: Make, tmp_path: Path, how: ProxyMode) -> None:
    at = redis.place(tmp_path)
    with proxied(at) as proxy:
        store = make(through(proxy, at))
        store.send([Mark("", "marks", ["warm"], MINUTE_US)])
        proxy.cut_next(how, 1)
        (answer,) = store.send([Mark("", "marks", ["a"], MINUTE_US)])
        assert isinstance(answer, Unavailable)
        assert isinstance(answer.error, StoreUnavailable)
        assert proxy.cuts == 1
        arrived = how != "cut_request"
        assert store.send([Mark("", "marks", ["a", "b"], MINUTE_US)]) == [Marked([not arrived, True])]


def test_replies_that_never_come_end_the_wait(make: Make, tmp_path: Path) -> None:
    at = redis.place(tmp_path)
    with proxied(at) as proxy:
        store = make(through(proxy, at), answer_s=0.2)
        finish(store, "warm")
        held = claim("key")
        for mode in ("swallow", "blackhole"):
            proxy.mode = mode
            (answer,) = store.send([held])
            assert isinstance(answer, Unavailable)
        proxy.mode = "pass"
        (granted,) = store.send([held])
        assert isinstance(granted, Granted)
        assert granted.attempt == 1


def _are_gone(pairs: set[Any], proxy: Proxy) -> bool:
    return pairs.isdisjoint(proxy._pairs)


def test_a_cut_connection_is_replaced(make: Make, tmp_path: Path) -> None:
    at = redis.place(tmp_path)
    with proxied(at) as proxy:
        store = make(through(proxy, at), answer_s=60)  # one that waits for a dead connection is too late here
        for number in range(5):
            finish(store, f"key {number}")
            cut = set(proxy._pairs)
            proxy.cut()
            assert await_true(partial(_are_gone, cut, proxy))  # listeners connect again at once
        assert kinds(store.send([claim(f"key {number}") for number in range(5)])) == ["Known"] * 5


def test_a_batch_is_one_round_trip(make: Make, own: redis.Own) -> None:
    """While no reply is handed on, all of it arrives; and when they are, nothing more is asked."""
    with Proxy(own.port) as proxy:
        store = make(through(proxy, own.url))
        finish(store, "warm")
        finish(store, "warmer")  # single items take another script after the first
        store.send([claim("warm"), Mark("", "consumer", ["warm"], S)])  # now the server knows all scripts
        running = [claim(f"key {number}") for number in range(100)]
        granted = store.send(running)
        settles: list[Item] = [done(held, one) for held, one in zip(running, granted, strict=True)]
        fresh = [claim(f"new {number}") for number in range(100)]
        batches: list[list[Any]] = [
            [claim("single")],
            [*settles, *fresh, Mark("", "consumer", ["m"], S)],
            [claim(f"many {number}") for number in range(1000)],
            [Mark("", "consumer", [f"many {number}" for number in range(1000)], S)],
        ]
        for batch in batches:
            answers: list[Any] = []
            before = _written(own)
            proxy.mode = "hold"
            sending = threading.Thread(
                target=lambda batch=batch, answers=answers: answers.extend(store.send(batch))
            )
            sending.start()
            keys = sum(len(item.keys) if isinstance(item, Mark) else 1 for item in batch)
            arrived = await_true(lambda before=before, keys=keys: _written(own) >= before + keys, 10)  # type: ignore[misc]
            asked = proxy.asked_bytes
            proxy.mode = "pass"
            sending.join(10)
            assert arrived, f"a batch of {keys} waited for an answer before it was sent"
            assert proxy.asked_bytes == asked
            assert len(answers) == len(batch)


def _written(own: redis.Own) -> int:
    """How many keys the server has set, whoever told it to."""
    told = own.ask("INFO", "commandstats")
    return int(told.get("cmdstat_set", {}).get("calls", 0))


def test_closing_ends_a_call_that_waits(tmp_path: Path) -> None:
    at = redis.place(tmp_path)
    with proxied(at) as proxy:
        store = RedisStore(through(proxy, at), answer_s=30.0)
        store.open()
        proxy.mode = "blackhole"
        ended: list[BaseException] = []
        asked = threading.Event()

        def wait() -> None:
            asked.set()
            try:
                store.send([claim("key")])
            except StoreClosed as error:
                ended.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        asked.wait()
        assert proxy.kept_back.wait(10)  # else the proxy, when it lets all pass again, may hand the claim on
        store.close()
        waiting.join(10)
        assert len(ended) == 1
        with pytest.raises(StoreClosed):
            store.send([claim("key")])
        proxy.mode = "pass"
        store.open()
        assert kinds(store.send([claim("key")])) == ["Granted"]
        store.close()


def test_a_forked_child_has_connections_of_its_own(tmp_path: Path) -> None:
    with opened(redis.place(tmp_path)) as store:
        finish(store, "before")
        child = os.fork()
        if not child:
            status = 1
            with contextlib.suppress(BaseException):
                status = kinds(store.send([claim("before"), claim("child")])) != ["Known", "Granted"]
            os._exit(status)
        assert kinds(store.send([claim("before"), claim("parent")])) == ["Known", "Granted"]
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert kinds(store.send([claim("child")])) == ["Busy"]


# --- the server ---------------------------------------------------------------------------------


def test_scripts_are_sent_again_after_they_were_flushed(make: Make, own: redis.Own) -> None:
    store = make(own.url)
    for number in range(5):
        own.ask("SCRIPT", "FLUSH")
        finish(store, f"key {number}")
        own.ask("SCRIPT", "FLUSH")
        assert store.send([Mark("", "marks", [str(number)], MINUTE_US)]) == [Marked([True])]
    assert kinds(store.send([claim(f"key {number}") for number in range(5)])) == ["Known"] * 5


def test_what_was_answered_survives_the_servers_death(make: Make, own: redis.Own) -> None:
    """With `always`. With `everysec` the server answers before it writes, for two seconds, while a sync takes long."""
    own.ask("CONFIG", "SET", "appendfsync", "always")
    own.settings["appendfsync"] = "always"
    store = make(own.url, retry_s=5.0)
    answered: list[str] = []
    stop = threading.Event()
    progress = threading.Event()

    def work() -> None:
        number = 0
        while not stop.is_set():
            claims = [claim(f"key {number + at}") for at in range(50)]
            number += 50
            answers = store.send(claims)
            good = [
                (held, one) for held, one in zip(claims, answers, strict=True) if isinstance(one, Granted)
            ]
            ends = store.send([done(held, one) for held, one in good])
            answered.extend(
                held.id[2] for (held, _), end in zip(good, ends, strict=True) if isinstance(end, Completed)
            )
            progress.set()

    worker = threading.Thread(target=work)
    worker.start()
    try:
        for _ in range(3):
            before = len(answered)
            assert await_true(lambda before=before: len(answered) > before + 500, 20)  # type: ignore[misc]
            own.restart()
    finally:
        stop.set()
        worker.join()
    for start in range(0, len(answered), 500):
        looked = store.send([claim(key) for key in answered[start : start + 500]])
        assert kinds(looked) == ["Known"] * len(looked)


def test_a_flushed_store_is_reported(make: Make, own: redis.Own, caplog: pytest.LogCaptureFixture) -> None:
    store = make(own.url)
    inner: Any = getattr(store, "inner", store)
    held = claim("running")
    (granted,) = store.send([held])
    assert inner.stores_lost == 0
    own.ask("FLUSHALL")
    with caplog.at_level(logging.WARNING, "semel"):
        (completed,) = store.send([done(held, granted)])
    assert completed.recreated
    assert inner.stores_lost == 1
    assert "has lost its records" in caplog.text
    store.send([claim("another")])
    assert inner.stores_lost == 1
    (found,) = store.send([Lookup(held.id)])
    assert isinstance(found, Record)
    assert found.value == b"rvalue"
    assert [record.key for record in store.send([_scan()])[0].records if record.state == "done"] == [
        "running"
    ]


def _scan() -> Any:
    from semel.core.commands import Scan

    return Scan(consumer="consumer")


def test_a_flushed_store_may_be_refused(make: Make, own: redis.Own) -> None:
    store = make(own.url, on_store_lost="fail")
    finish(store, "before")
    own.ask("FLUSHALL")
    for _ in range(2):
        with pytest.raises(StoreRefused, match="has lost its records"):
            store.send([claim("after")])
    assert own.ask("KEYS", "*") == []
    other = make(own.url)
    assert kinds(other.send([claim("after")])) == ["Granted"]


def test_an_evicting_server_is_refused(make: Make, tmp_path: Path) -> None:
    with redis.own(tmp_path, maxmemory_policy="allkeys-lru", appendonly="no") as own:
        with pytest.raises(StoreRefused, match="allow_eviction"):
            make(own.url)
        assert own.ask("KEYS", "*") == []
        with opened(own.url, allow_eviction=True) as store:
            costs = store.facts().costs
            assert "eviction (allkeys-lru)" in costs[0]
            assert "no persistence" in costs[1]
            assert not store.capabilities.durable
            finish(store, "key")


def test_a_lasting_server_says_so(tmp_path: Path) -> None:
    with opened(redis.place(tmp_path)) as store:
        facts = store.facts()
        assert (facts.persistence, facts.eviction, facts.masters) == ("aof", "noeviction", 1)
        assert store.capabilities.durable


def test_at_the_memory_limit_ends_go_through(make: Make, own: redis.Own) -> None:
    store = make(own.url)
    finish(store, "known")
    held = claim("held")
    (granted,) = store.send([held])
    own.ask("CONFIG", "SET", "maxmemory", "1")
    full, known = store.send([claim("new"), claim("known")])
    assert isinstance(full, Unavailable)
    assert isinstance(full.error, StoreFull)
    assert isinstance(known, Known)
    (mark,) = store.send([Mark("", "marks", ["a"], MINUTE_US)])
    assert isinstance(mark.error, StoreFull)
    assert store.send([done(held, granted)])[0].recreated is False
    own.ask("CONFIG", "SET", "maxmemory", "0")
    assert kinds(store.send([claim("new"), claim("held")])) == ["Granted", "Known"]
    assert store.send([Mark("", "marks", ["a"], MINUTE_US)]) == [Marked([True])]


def test_a_strangers_key_is_nobodys_record(make: Make, own: redis.Own) -> None:
    store = make(own.url)
    finish(store, "good", "list", "text", "short", "cut")
    held = claim("claimed")
    store.send([held])
    keys = _keys_of(own, "good", "list", "text", "short", "cut", "claimed")
    import redis as driver

    with driver.Redis(port=own.port) as client:
        client.delete(keys["list"])
        client.lpush(keys["list"], "x")
        client.set(keys["text"], "no record at all, but long enough to be one")
        client.set(keys["short"], b"\1")
        whole = client.get(keys["cut"])
        assert isinstance(whole, bytes)
        client.set(keys["cut"], whole[:-3])
        client.set(keys["claimed"], b"\1\0\1" + b"\xff" * 40)
    for item in (claim, lambda key: Lookup(("", "consumer", key)), lambda key: Forget(("", "consumer", key))):
        answers = store.send([item(key) for key in ("list", "text", "good", "short", "cut", "claimed")])
        for key, answer in zip(("list", "text", "good", "short", "cut", "claimed"), answers, strict=True):
            if key == "good":
                assert not isinstance(answer, Unavailable | Absent)
            else:
                assert isinstance(answer, Unavailable), (key, answer)
                assert isinstance(answer.error, RecordCorrupt)


def _keys_of(own: redis.Own, *keys: str) -> dict[str, bytes]:
    from semel.core.ids import digest

    return {
        key: b"semel:{%d}:%b" % (digest(name)[0] & 63, digest(name))
        for key, name in zip(keys, named(*keys), strict=True)
    }


def test_a_server_that_lets_nobody_in_is_refused(make: Make, tmp_path: Path) -> None:
    with redis.own(tmp_path, appendonly="no") as own:
        own.ask("CONFIG", "SET", "requirepass", "s3cret")
        with pytest.raises(StoreRefused, match="refuses this user") as raised:
            make(f"redis://:wr0ng@127.0.0.1:{own.port}/0")
        assert "wr0ng" not in str(raised.value)
        store = make(f"redis://:s3cret@127.0.0.1:{own.port}/0")
        assert kinds(store.send([claim("key")])) == ["Granted"]


def test_a_server_that_is_not_there_is_unavailable(make: Make, own: redis.Own) -> None:
    store = make(own.url, retry_s=0.2)
    finish(store, "key")
    own.stop()
    held = claim("key 2")
    assert kinds(store.send([held, Mark("", "marks", ["a"], S)])) == ["Unavailable"] * 2
    own.start()
    assert kinds(store.send([held, claim("key")])) == ["Granted", "Known"]
