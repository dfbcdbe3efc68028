"""Behind a real transaction pooler, where each transaction has another session."""

import asyncio
import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest

import semel
from semel.core.commands import Claim, Granted, Known, Settle
from semel.core.protocols import AnyStore
from semel.errors import StoreRefused, StoreUnavailable
from semel.stores.postgres import PostgresStore, from_url
from semel.testing import ManualClock, store_contract
from semel.testing.contract.harness import Scenario
from semel.testing.store_contract import Colour, Harness
from semel.types import Busy, Done
from tests.services import pgbouncer, postgres
from tests.stores.postgres import places
from tests.stores.postgres.attacker import KEYS
from tests.stores.postgres.test_processes import launch
from tests.stores.shells import Ticking
from tests.waiting import WITHIN_S, await_true, until

MINUTE_US = 60 * 1_000_000
SOAK = bool(os.environ.get("SEMEL_SOAK"))


@pytest.fixture(scope="module")
def pooler() -> Iterator[str]:
    with pgbouncer.before(postgres.url()) as at:
        yield at


@pytest.fixture
def pooled(pooler: str, tmp_path: Path) -> str:
    """A place behind the pooler."""
    return f"{pooler}?{postgres.place(tmp_path).partition('?')[2]}&pooler=true"


SCENARIOS = store_contract.scenarios(places.CAPABILITIES)
IN_COLOUR: list[tuple[Scenario, Colour]] = [
    (scenario, colour)
    for number, scenario in enumerate(SCENARIOS)
    for colour in (("sync", "async") if SOAK else (("sync", "async")[number % 2],))
]
"""What the colours say is the same: in the ordinary run each promise is looked at in one of them."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "colour"), IN_COLOUR, ids=[f"{scenario.name}-{colour}" for scenario, colour in IN_COLOUR]
)
def test_the_contract_holds_behind_a_pooler(scenario: Scenario, colour: Colour, pooled: str) -> None:
    clock = ManualClock()
    ticking = Ticking(clock)

    def connect() -> AnyStore:
        store = from_url(pooled)
        store.clock = ticking
        return store.twin() if colour == "async" else store

    store_contract.check(scenario, Harness(connect, clock=clock), colour)


def test_processes_behind_a_pooler_have_one_winner_per_key(pooled: str) -> None:
    store = from_url(pooled)
    store.open()
    attackers = [launch(pooled, "race") for _ in range(4)]
    for attacker in attackers:
        assert attacker.stdin is not None
        attacker.stdin.write("go\n")
        attacker.stdin.flush()
    results = [json.loads(attacker.communicate(timeout=60)[0]) for attacker in attackers]
    store.close()
    for part in ("won", "done", "marked"):
        assert Counter(key for result in results for key in result[part]) == Counter(KEYS), part


def test_more_clients_than_the_pooler_has_servers(pooled: str) -> None:
    """Every thread has a connection of its own; the pooler shares its few among them."""
    store = from_url(pooled.replace("pool_max=16", "pool_max=12"))
    store.open()

    def work(number: int) -> list[Any]:
        found: list[Any] = []
        for turn in range(10):
            mine = Claim(("", "c", f"{number}-{turn}"), os.urandom(16), MINUTE_US, MINUTE_US)
            (granted,) = store.send([mine])
            (again,) = store.send([Claim(mine.id, os.urandom(16), MINUTE_US, MINUTE_US)])
            store.send([Settle(mine.id, mine.owner, granted.fence, "done", b"j1", MINUTE_US)])
            (known,) = store.send([Claim(mine.id, os.urandom(16), MINUTE_US, MINUTE_US)])
            found += [granted, again, known]
        return found

    with ThreadPoolExecutor(12) as threads:
        answers = [answer for found in threads.map(work, range(12)) for answer in found]
    store.close()
    assert Counter(type(answer) for answer in answers) == {Granted: 120, Busy: 120, Known: 120}


def test_waiters_behind_a_pooler_poll(pooled: str) -> None:
    policy = semel.Policy(lease_s=60, wait_s=30)
    with (
        semel.open(pooled, consumer="c", policy=policy) as owner,
        semel.open(pooled, consumer="c", policy=policy) as waiter,
        ThreadPoolExecutor(1) as threads,
    ):
        claim: Any = owner.claim("k")
        waiting = threads.submit(waiter.run, "k", lambda: -1)
        assert await_true(lambda: bool(waiter._runtime.watches._rooms), 10)
        owner.complete(claim, 1)
        assert waiting.result(20) == Done(1, replayed=True)


def test_without_the_option_it_says_which_one_is_missing(pooled: str) -> None:
    store = from_url(pooled.replace("&pooler=true", ""))
    with pytest.raises(StoreRefused, match="pooler=true"):
        store.open()


def test_a_first_use_while_callers_hold_every_connection_says_what_to_do(pooled: str) -> None:
    once = semel.open(f"{pooled}&wait_s=0.5", consumer="wallet", mode="inbox")
    with contextlib.ExitStack() as stack:
        stack.callback(once.close)
        bare = pooled.partition("?")[0]
        connections = [
            stack.enter_context(psycopg.connect(bare, prepare_threshold=None))
            for _ in range(pgbouncer.SERVERS)
        ]
        for each in connections:
            each.execute("SELECT 1")  # each holds a session of the pooler until it commits
        with pytest.raises(StoreUnavailable, match=r"connect before the first of them: `with semel\.open"):
            once.inbox(connections[0]).first("k")
        for each in connections:
            each.rollback()
        assert once.inbox(connections[0]).first("k")


@pytest.fixture
def held(pooler: str, pooled: str) -> Iterator[list[psycopg.Connection[Any]]]:
    """Every connection of the pooler, each in a transaction; the consumer was used before, by another process."""
    with semel.open(pooled, consumer="wallet", mode="inbox") as once:
        once.windows.set("off", event_type="trace")
    with contextlib.ExitStack() as stack:
        connections = [
            stack.enter_context(psycopg.connect(pooler, prepare_threshold=None))
            for _ in range(pgbouncer.SERVERS)
        ]
        for each in connections:
            each.execute("SELECT 1")
        yield connections


def test_the_first_use_of_a_known_consumer_needs_no_connection_of_its_own(
    pooled: str, held: list[psycopg.Connection[Any]]
) -> None:
    once = semel.open(f"{pooled}&wait_s=30", consumer="wallet", mode="inbox")
    with contextlib.closing(once), ThreadPoolExecutor(1) as threads:

        def work() -> list[bool]:
            box = once.inbox(held[0])
            firsts = [box.first("k"), box.first("k"), once.inbox(held[0]).first("k")]
            box.store("k", "a value")
            assert box.replay("k") == semel.Done("a value", replayed=True)
            return [*firsts, *(box.first("t", event_type="trace") for _ in range(2))]

        assert threads.submit(work).result(WITHIN_S) == [True, False, False, True, True]
        assert isinstance(once.store, PostgresStore)
        assert not once.store.identity, "it is not connected yet"
        for each in held:
            each.commit()
        assert await_true(once._connect_behind)
        assert not once.inbox(held[0]).first("k")


def test_the_same_in_an_event_loop(pooler: str, pooled: str, held: list[psycopg.Connection[Any]]) -> None:
    async def scene() -> None:
        held[0].rollback()
        async with await psycopg.AsyncConnection.connect(pooler, prepare_threshold=None) as connection:
            await connection.execute("SELECT 1")
            once = semel.aopen(f"{pooled}&wait_s=30", consumer="wallet", mode="inbox")
            async with asyncio.timeout(WITHIN_S):
                assert await once.inbox(connection).first("k")
            await connection.commit()
            await until(once._connect_behind)
            assert not await once.inbox(connection).first("k")
            await once.close()

    asyncio.run(scene())


def test_a_connection_to_another_address_is_not_believed(
    pooled: str, held: list[psycopg.Connection[Any]]
) -> None:
    """It may lead to another database, and that has semel's tables too: only the store's own connection can tell."""
    once = semel.open(f"{pooled}&wait_s=0.5", consumer="wallet", mode="inbox")
    with contextlib.closing(once), psycopg.connect(postgres.url()) as direct:
        assert direct.info.port != held[0].info.port
        with pytest.raises(StoreUnavailable):
            once.inbox(direct).first("k")


def test_an_inbox_goes_on_while_its_callers_hold_every_connection_of_the_pool(
    pooler: str, pooled: str
) -> None:
    held = [psycopg.connect(pooler, prepare_threshold=None) for _ in range(pgbouncer.SERVERS)]
    with semel.open(pooled, consumer="wallet", mode="inbox") as once, ThreadPoolExecutor(1) as threads:
        for connection in held:
            connection.execute("SELECT 1")  # begins a transaction: its session is nobody else's now
        once._runtime.expire_settings()
        first = threads.submit(once.inbox(held[0]).first, "k")
        try:
            assert first.result(WITHIN_S)
        finally:
            for connection in held:
                connection.close()
