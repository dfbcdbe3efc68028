"""Windows without end: kept where the store can promise it, refused before anything is claimed where it cannot."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

import semel
from semel import Policy, keys
from semel.errors import PolicyInvalid
from semel.stores.migrating import migrating
from semel.windows import FOREVER_US, exact_text, is_endless, window_us
from tests.client.clients import Place, only_sqlite
from tests.services import postgres, redis

pytestmark = pytest.mark.anyio

LONG = ["forever", "91d", "3650d", 100 * 86400]


def test_the_word_and_its_number() -> None:
    assert window_us("forever") == FOREVER_US == window_us(FOREVER_US / 1e6)
    assert exact_text(FOREVER_US) == "forever"
    assert is_endless(FOREVER_US)
    assert not is_endless(window_us("3650d"))
    now_in_2155_us = 185 * 365 * 86400 * 10**6
    assert now_in_2155_us + FOREVER_US < 2**53  # exact in JSON and in Lua's doubles


@pytest.mark.parametrize("window", ["3651d", "99y", "for ever", "Forever", 10**10])
def test_other_long_windows_are_refused(window: Any) -> None:
    with pytest.raises(PolicyInvalid):
        window_us(window)
    with pytest.raises(PolicyInvalid):
        Policy(window_s=window)


@pytest.mark.parametrize("window", LONG)
def test_memory_refuses_it_at_once(window: Any) -> None:
    with pytest.raises(PolicyInvalid, match="memory: cannot promise a window of"):
        semel.open("memory:", consumer="billing", window=window)
    with semel.open("memory:", consumer="billing", window="90d") as once:
        with pytest.raises(PolicyInvalid, match="cannot promise"):
            once.using(Policy(window_s=window))
        with pytest.raises(PolicyInvalid, match="cannot promise"):
            once.windows.set(window)
        assert once.windows.list() == {}
        once.windows.set(None)


@only_sqlite
@pytest.mark.parametrize("window", LONG)
async def test_a_durable_store_keeps_it(place: Place, window: Any) -> None:
    client = place.open(window=window)
    assert (await client.run("k", lambda: 1)).replayed is False
    place.clock.skip(89 * 86400)
    await client.records("purge")
    again = await client.run("k", lambda: 2)
    assert (again.value, again.replayed) == (1, True)
    record = place.record("k")
    assert record is not None
    assert record.expires_at_us - record.settled_at_us == window_us(window)


@only_sqlite
async def test_a_policy_and_a_stored_window_may_be_endless(place: Place) -> None:
    client = place.open(window="1h")
    await client.using(window_s="forever").run("by policy", lambda: 1)
    await client.windows("set", "forever", event_type="refund")
    await client.using(event_type="refund").run("by type", lambda: 1)
    assert await client.windows("get", "refund") == FOREVER_US
    for key in ("by policy", "by type"):
        record = place.record(key)
        assert record is not None
        assert is_endless(record.expires_at_us - record.settled_at_us)


@only_sqlite
async def test_marks_may_be_endless(place: Place) -> None:
    client = place.open(mode="mark", window="forever")
    assert await client.mark("k")
    place.clock.skip(20 * 365 * 86400)
    await client.records("purge")
    assert not await client.mark("k")


def test_an_inbox_may_be_endless_on_sqlite(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/app.db?adopt=true"
    with (
        semel.open(url, consumer="billing", mode="inbox", window="forever") as once,
        closing(sqlite3.connect(tmp_path / "app.db", isolation_level=None)) as connection,
    ):
        for first in (True, False):
            connection.execute("BEGIN")
            assert once.inbox(connection).first("evt_1") is first
            connection.execute("COMMIT")
        (record,) = once.records.list()
    assert is_endless(record.expires_at_us - record.settled_at_us)


@pytest.mark.service
def test_an_inbox_may_be_endless_on_postgres() -> None:
    url = postgres.place("endless inbox")
    with semel.open(url, consumer="billing", mode="inbox", window="forever") as once:
        for first in (True, False):
            with psycopg.connect(url.partition("?")[0]) as connection:
                assert once.inbox(connection).first("evt_1") is first
        assert once.records.purge().count == 0
        (record,) = once.records.list()
    assert is_endless(record.expires_at_us - record.settled_at_us)


@pytest.mark.service
def test_partitions_refuse_it() -> None:
    once = semel.open(
        postgres.place("endless ids"),
        consumer="orders",
        ids="uuid7",
        window="forever",
        policy=Policy(late="hold"),
    )
    with closing(once), pytest.raises(PolicyInvalid, match="a window of forever is not shorter than"):
        once.run("0190a5e4-5c00-7000-8000-000000000000", lambda: 1)


@pytest.mark.service
@pytest.mark.parametrize(
    "settings",
    [{"appendonly": "no"}, {"maxmemory_policy": "volatile-lru", "maxmemory": "100mb"}],
    ids=["no file", "evicting"],
)
def test_redis_refuses_it_where_records_may_be_lost(tmp_path: Path, settings: dict[str, str]) -> None:
    with redis.own(tmp_path, redis.Own, **settings) as server:
        url = server.url + ("&" if "?" in server.url else "?") + "allow_eviction=true"
        once = semel.open(url, consumer="billing", window="forever")
        with closing(once), pytest.raises(PolicyInvalid, match="cannot promise a window of forever"):
            once.run("k", lambda: 1)
        with semel.open(url, consumer="billing", window="90d") as once:
            assert once.run("k", lambda: 1) == semel.Done(1)


def test_a_move_promises_what_both_stores_do(tmp_path: Path) -> None:
    def move(new: str) -> Any:
        return migrating(old=f"sqlite:///{tmp_path}/old.db", new=new)

    both = move(f"sqlite:///{tmp_path}/new.db")
    with closing(both), semel.open(both, consumer="billing", window="forever") as once:
        assert once.run("k", lambda: 1) == semel.Done(1)
        assert [record.key for record in once.records.list()] == ["k"]
    with pytest.raises(PolicyInvalid, match="cannot promise"):
        semel.open(move("memory:"), consumer="billing", window="forever")


def test_a_key_of_contents_may_not_be_endless() -> None:
    with pytest.raises(PolicyInvalid, match="use 90d at most"):
        keys.sliding("forever", "order")
