"""The server goes away, comes back, stands still, or is not what it should be."""

import asyncio
import os
import signal
import threading
import time
from collections import Counter
from typing import Any

import psycopg
import pytest

from semel.core.commands import Claim, Granted, Mark, Settle
from semel.errors import StoreClosed, StoreError, StoreFull, StoreRefused, StoreUnavailable
from semel.stores.postgres import AsyncPostgresStore, PostgresStore
from semel.stores.postgres.errors import to_store_error
from semel.types import Completed, Unavailable
from tests.services import postgres
from tests.services.postgres import Own
from tests.waiting import await_true

MINUTE_US = 60 * 1_000_000


@pytest.fixture(scope="module")
def own() -> Any:
    with postgres.own() as mine:
        yield mine


def claim(key: str = "k", owner: bytes | None = None) -> Claim:
    return Claim(("", "c", key), owner or os.urandom(16), MINUTE_US, MINUTE_US)


def persist(store: PostgresStore, items: list[Any], until: float) -> list[Any]:
    """Repeat the same items until they are answered, as clients do."""
    while True:
        try:
            answers = store.send(items)
        except StoreUnavailable:
            answers = [Unavailable(StoreUnavailable())]
        if not any(isinstance(answer, Unavailable) for answer in answers):
            return answers
        assert time.monotonic() < until, "the server was not found again"
        threading.Event().wait(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGQUIT, signal.SIGKILL])
def test_a_restart_in_mid_batch_loses_and_doubles_nothing(own: Own, how: signal.Signals) -> None:
    store = PostgresStore(own.url, schema=f"restart_{how.name.lower()}", wait_s=20)
    store.open()
    ended = threading.Event()
    rounds: list[tuple[list[Claim], list[Any], list[Any]]] = []

    def work() -> None:
        number = 0
        while not ended.is_set():
            claims = [claim(f"{number}-{n}") for n in range(200)]
            granted = persist(store, claims, time.monotonic() + 60)
            settles = [
                Settle(c.id, c.owner, a.fence, "done", b"j1", MINUTE_US, MINUTE_US)
                for c, a in zip(claims, granted, strict=True)
            ]
            rounds.append((claims, granted, persist(store, settles, time.monotonic() + 60)))
            number += 1

    worker = threading.Thread(target=work)
    worker.start()
    for _ in range(3):
        before = len(rounds)
        assert await_rounds(rounds, before + 3)
        own.restart(how)
    assert await_rounds(rounds, len(rounds) + 2)
    ended.set()
    worker.join(60)
    for _claims, granted, done in rounds:
        assert all(isinstance(answer, Granted) and answer.attempt == 1 for answer in granted)
        assert all(isinstance(answer, Completed) and not answer.recreated for answer in done)
    again = store.send([claim(f"{number}-{n}") for number in range(len(rounds)) for n in range(200)])
    assert Counter(getattr(answer, "value", None) for answer in again) == {b"j1": len(rounds) * 200}
    store.close()


def await_rounds(rounds: list[Any], count: int) -> bool:
    return await_true(lambda: len(rounds) >= count, 60)


def test_an_idle_connection_that_was_cut_is_not_used_again(own: Own) -> None:
    store = PostgresStore(own.url, schema="idle")
    store.open()
    store.send([claim("a")])
    ours = "FROM pg_stat_activity WHERE application_name = 'semel'"
    postgres.execute(own.url, f"SELECT pg_terminate_backend(pid) {ours}")
    assert await_true(lambda: not postgres.execute(own.url, f"SELECT pid {ours}"), 10)
    (marked,) = store.send([Mark("", "m", ["a"], MINUTE_US)])  # marks are never said twice
    assert marked.firsts == [True]
    store.close()


def test_a_server_that_stands_still_is_unavailable_in_time(own: Own) -> None:
    first = PostgresStore(own.url, schema="still")
    first.open()  # makes the tables, which may take longer than the wait below
    first.close()
    store = PostgresStore(own.url, schema="still", wait_s=1.0)
    store.open()
    store.send([claim("a"), Mark("", "m", ["known"], MINUTE_US)])
    mine = claim("b")
    backends = [
        pid
        for (pid,) in postgres.execute(
            own.url, "SELECT pid FROM pg_stat_activity WHERE application_name = 'semel'"
        )
    ]
    for pid in backends:
        os.kill(pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        with pytest.raises(StoreUnavailable, match="no answer"):
            store.send([Mark("", "m", ["a"], MINUTE_US)])
        assert time.monotonic() - began < 5
    finally:
        for pid in backends:
            os.kill(pid, signal.SIGCONT)
    assert isinstance(store.send([mine])[0], Granted)
    store.close()


def test_nobody_at_home_is_unavailable_without_telling_secrets() -> None:
    store = PostgresStore("postgresql://me:s3cret@127.0.0.1:1/db", wait_s=1)
    with pytest.raises(StoreUnavailable) as raised:
        store.open()
    for text in (str(raised.value), repr(store), store.name, repr(raised.value.__cause__)):
        assert "s3cret" not in text


def test_a_closed_store_says_so(own: Own) -> None:
    store = PostgresStore(own.url, schema="closing")
    store.open()
    store.close()
    store.close()
    with pytest.raises(StoreClosed):
        store.send([claim()])
    store.open()
    assert isinstance(store.send([claim()])[0], Granted)
    store.close()


@pytest.mark.parametrize(
    ("setting", "word"),
    [("synchronous_commit=off", "synchronous_commit"), ("default_transaction_read_only=on", "read-only")],
)
def test_what_weakens_is_reported_and_what_breaks_is_refused(own: Own, setting: str, word: str) -> None:
    store = PostgresStore(f"{own.url}?options=-c%20{setting.replace('=', '%3D')}", schema="checks")
    if word == "read-only":
        with pytest.raises(StoreRefused, match=word):
            store.open()
        return
    before = store.capabilities.durable
    store.open()
    assert (before, store.capabilities.durable) == (True, False)
    assert word in store.weaknesses[0]
    store.close()


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        ("53100", StoreFull),
        ("25006", StoreRefused),
        ("42P01", StoreRefused),
        ("42501", StoreRefused),
        ("57P01", StoreUnavailable),
        ("53300", StoreUnavailable),
        ("57014", StoreUnavailable),
        ("22021", StoreError),
    ],
)
def test_the_drivers_errors_are_said_in_our_words(state: str, kind: type[StoreError]) -> None:
    error = to_store_error(psycopg.errors.lookup(state)("what happened"), "postgresql://here/db")
    assert type(error) is kind
    assert "postgresql://here/db" in str(error)


def test_a_full_disk_is_each_items_own_trouble(own: Own, monkeypatch: pytest.MonkeyPatch) -> None:
    store = PostgresStore(own.url, schema="full")
    store.open()
    held = claim("held")
    (granted,) = store.send([held])
    converse = store._converse

    def full(line: Any, said: Any) -> Any:
        if said.gi_code.co_name == "claims":
            raise psycopg.errors.DiskFull("no space left on device")
        return converse(line, said)

    monkeypatch.setattr(store, "_converse", full)
    settle = Settle(held.id, held.owner, granted.fence, "done", None, MINUTE_US)
    refused, done = store.send([claim("new"), settle])
    assert isinstance(refused, Unavailable)
    assert isinstance(refused.error, StoreFull)
    assert isinstance(done, Completed)
    store.close()


def test_a_store_that_is_closed_while_it_connects_keeps_no_connection(
    own: Own, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        store = AsyncPostgresStore(own.url, schema="closing")
        begun, go = asyncio.Event(), asyncio.Event()
        converse = store._converse

        async def slow(line: Any, said: Any) -> Any:
            begun.set()
            await go.wait()
            return await converse(line, said)

        monkeypatch.setattr(store, "_converse", slow)
        opening = asyncio.create_task(store.aopen())
        await begun.wait()
        closing = asyncio.create_task(store.aclose())
        while not store._closed:  # noqa: ASYNC110 - the store sends no event
            await asyncio.sleep(0)
        go.set()
        await asyncio.gather(opening, closing)
        assert store._pool is None
        with pytest.raises(StoreClosed):
            await store.asend([claim("late")])

    asyncio.run(main())


def test_an_event_loop_may_ask_whether_the_tables_are_there(own: Own) -> None:
    async def main() -> None:
        store = AsyncPostgresStore(own.url, schema="asked")
        assert not await store.aexists()
        await store.aopen()
        assert await store.aexists()
        await store.aclose()

    asyncio.run(main())


def test_a_clock_that_differs_is_logged(
    own: Own, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="semel")
    store = PostgresStore(own.url, schema="clocks")
    store.open()
    store.close()
    assert "clock" not in caplog.text
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 3600)
    store.open()
    store.close()
    assert "its clock is +36" in caplog.text


def test_a_roles_own_isolation_is_not_ours(own: Own) -> None:
    """Under SERIALIZABLE every race would be an error that has to be repeated."""
    postgres.execute(
        own.url,
        "CREATE ROLE strict SUPERUSER LOGIN; ALTER ROLE strict SET default_transaction_isolation = serializable",
    )
    at = own.url.replace("//semel@", "//strict@")
    assert postgres.execute(at, "SHOW transaction_isolation") == [("serializable",)]
    store = PostgresStore(at, schema="isolation")
    store.open()
    with store._open_pool().connection() as line:
        assert line.execute("SHOW transaction_isolation").fetchone() == ("read committed",)
    store.close()


def test_the_clients_clock_decides_nothing(own: Own, monkeypatch: pytest.MonkeyPatch) -> None:
    fences = []
    store = PostgresStore(own.url, schema="clock")
    store.open()
    real = time.time_ns()
    for hours in (0, 5, -5):
        wrong = real + hours * 3600 * 10**9
        monkeypatch.setattr(time, "time", lambda wrong=wrong: wrong / 1e9)
        monkeypatch.setattr(time, "time_ns", lambda wrong=wrong: wrong)
        mine = claim(f"at {hours}")
        (granted,) = store.send([mine])
        fences.append(granted.fence)
        assert granted.lease_until_us - granted.fence == MINUTE_US
        (done,) = store.send([Settle(mine.id, mine.owner, granted.fence, "done", None, MINUTE_US)])
        assert 0 < done.at_us - granted.fence < MINUTE_US
    assert sorted(fences) == fences
    assert fences[-1] - fences[0] < MINUTE_US
    store.close()
