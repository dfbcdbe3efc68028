"""One claim or settle alone: by its own statement where it is plain, and as the statements for many would."""

import asyncio
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psycopg
import pytest

from semel.core.commands import Answer, Claim, Forget, Granted, Item, Known, Lookup, Purge, Settle
from semel.core.ids import digest
from semel.stores.postgres import AsyncPostgresStore, PostgresStore, from_url
from semel.stores.postgres.single import SingleCall
from semel.testing import ManualClock
from semel.types import Absent, Busy, Completed, Lost, Mismatch
from tests.services import postgres
from tests.stores.postgres import places
from tests.stores.shells import InLoop, Ticking
from tests.waiting import await_true

SECOND_US = 1_000_000
MINUTE_US = 60 * SECOND_US
DAY_US = 86_400 * SECOND_US


def claim(key: str = "k", owner: bytes | None = None, **more: Any) -> Claim:
    return Claim(("", "c", key), owner or os.urandom(16), MINUTE_US, DAY_US, **more)


def settle(sent: Claim, granted: Granted, **more: Any) -> Settle:
    chosen: dict[str, Any] = {"to": "done", "value": b"j1", "window_us": DAY_US, "lease_us": MINUTE_US} | more
    return Settle(sent.id, sent.owner, granted.fence, **chosen)


class Spy(PostgresStore):
    """Notes which statement answered each call."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.ways: list[str] = []

    def _ask(self, pool: Any, call: SingleCall) -> Answer:
        answer = super()._ask(pool, call)
        self.ways.append(call.name if answer is not None else f"{call.name}, undecided")
        return answer

    def _send_all(self, pool: Any, items: Sequence[Item], tries: int = 0) -> list[Answer]:
        self.ways.append("full")
        return super()._send_all(pool, items, tries)

    def way_of(self, item: Item) -> tuple[list[str], Answer]:
        """How one item is answered, and what."""
        self.ways.clear()
        (answer,) = self.send([item])
        return list(self.ways), answer


def spy(folder: Path, **more: Any) -> Spy:
    made = Spy(postgres.url(), schema=places.make(folder).place.schema, **more)
    made.open()
    made.send([claim("warm")])  # the consumer has a number from now on
    return made


@pytest.fixture
def spied(tmp_path: Path) -> Iterator[Spy]:
    made = spy(tmp_path)
    yield made
    made.close()


# --- which way ------------------------------------------------------------------------------------


def test_the_plain_case_is_one_statement(spied: Spy) -> None:
    mine = claim(fingerprint=b"\x01a", event_type="order")
    ways, granted = spied.way_of(mine)
    assert (ways, type(granted)) == (["claim_one"], Granted)
    ways, busy = spied.way_of(claim())
    assert (ways, type(busy)) == (["claim_one"], Busy)
    assert 0 < busy.retry_after_s <= 60
    ways, done = spied.way_of(settle(mine, granted))
    assert (ways, done) == (["settle_one"], Completed(at_us=done.at_us))
    ways, known = spied.way_of(claim(fingerprint=b"\x01a"))
    assert (ways, type(known)) == (["claim_one"], Known)
    assert (known.state, known.value, known.fence) == ("done", b"j1", granted.fence)
    (record,) = spied.send([Lookup(mine.id)])
    assert (record.event_type, record.fingerprint, record.settled_at_us) == ("order", b"\x01a", done.at_us)


def test_a_failure_is_kept_too(spied: Spy) -> None:
    mine = claim()
    (granted,) = spied.send([mine])
    ways, _ = spied.way_of(settle(mine, granted, to="failed", value=b"jwhy"))
    assert ways == ["settle_one"]
    ways, known = spied.way_of(claim())
    assert (ways, known.state, known.value) == (["claim_one"], "failed", b"jwhy")


@pytest.mark.parametrize(
    "more",
    [
        {"quarantine": True},
        {"sliding": True},
        {"journal": b"payload"},
        {"meta": b"note"},
        {"event_time_us": 1, "refuse_late": True},
        {"event_time_us": 1, "apart_us": SECOND_US},
    ],
    ids=",".join,
)
def test_a_claim_that_brings_more_is_not_plain(spied: Spy, more: dict[str, Any]) -> None:
    assert spied.way_of(claim(**more))[0] == ["full"]


def test_a_claim_of_a_consumer_that_is_not_known_is_not_plain(spied: Spy) -> None:
    new = Claim(("", "another", "k"), os.urandom(16), MINUTE_US, DAY_US)
    assert spied.way_of(new)[0] == ["full"]


def test_names_that_are_no_text_are_refused_by_the_full_statement(spied: Spy) -> None:
    for bad in (claim("\ud800"), claim(event_type="\ud800")):
        ways, answer = spied.way_of(bad)
        assert ways == ["full"]
        assert "not valid text" in str(answer.error)


def test_what_the_statement_finds_otherwise_is_decided_by_the_full_one(spied: Spy) -> None:
    mine = claim(fingerprint=b"\x01a")
    (granted,) = spied.send([mine])
    undecided = ["claim_one, undecided", "full"]
    assert spied.way_of(mine)[0] == undecided  # its own
    assert spied.way_of(claim(fingerprint=b"\x01b")) == (undecided, Mismatch())
    ended = ["settle_one, undecided", "full"]
    assert spied.way_of(settle(claim(), granted)) == (ended, Lost())  # another owner
    assert spied.way_of(settle(mine, Granted(granted.fence + 1, 1, 0, 0))) == (ended, Lost())
    spied.send([settle(mine, granted)])
    ways, again = spied.way_of(settle(mine, granted))
    assert (ways, again.already) == (ended, True)
    for to in ("released", "unknown"):
        assert spied.way_of(settle(mine, granted, to=to, value=None))[0] == ["full"]


def test_an_empty_owner_ends_nothing(spied: Spy) -> None:
    mine = claim()
    (granted,) = spied.send([mine])
    spied.send([settle(mine, granted, to="released", value=None, delay_us=MINUTE_US)])
    nobodys = settle(Claim(mine.id, b"", 1, 1), granted)
    assert spied.way_of(nobodys) == (["full"], Lost())


def test_behind_a_pooler_nothing_is_prepared(tmp_path: Path) -> None:
    store = spy(tmp_path, pooler=True)
    ways, granted = store.way_of(claim())
    assert (ways, type(granted)) == (["full"], Granted)
    store.close()


def test_ids_with_a_time_are_in_partitions_and_not_plain(tmp_path: Path) -> None:
    places.make_timed(tmp_path)
    store = spy(tmp_path)
    mine = claim()
    ways, granted = store.way_of(mine)
    assert (ways, type(granted)) == (["full"], Granted)
    assert store.way_of(settle(mine, granted))[0] == ["full"]
    store.close()


def test_only_digests_are_kept_where_keys_are_not_readable(tmp_path: Path) -> None:
    store = spy(tmp_path, readable_keys=False)
    assert store.way_of(claim("secret"))[0] == ["claim_one"]
    assert keys_in(store, "secret") == [(None,)]
    store.close()


def keys_in(store: PostgresStore, key: str) -> list[tuple[Any, ...]]:
    place = f"{store.place.schema}.records"
    return postgres.execute(
        postgres.url(), f"SELECT key FROM {place} WHERE digest = %s::uuid", digest(claim(key).id).hex()
    )


# --- the same as the full statement ---------------------------------------------------------------


class Script:
    """Random calls on few keys, the same for every store that plays them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.claims: list[Claim] = []
        self.granted: dict[bytes, int] = {}

    def next_item(self) -> Item:
        """Mostly plain calls; some that leave records behind which are not."""
        pick = self.random.random()
        if self.claims and pick < 0.45:
            return self.next_settle(self.random.choice(self.claims[-3:]))
        if self.claims and pick < 0.52:
            return self.random.choice(self.claims)  # again
        if pick < 0.56:
            return Forget(("", "c", self.next_key()), force=True)
        if pick < 0.6:
            return Purge(limit=100)
        return self.next_claim()

    def next_key(self) -> str:
        return f"{len(self.claims) // 12}-{self.random.randrange(3)}"  # some stay unknown for ever

    def next_claim(self) -> Claim:
        made = Claim(
            ("", "c", self.next_key()),
            self.random.randbytes(16),
            self.random.choice((1, 50 * SECOND_US, 100 * SECOND_US)),
            self.random.choice((1, 70 * SECOND_US, DAY_US)),
            fingerprint=self.random.choice((None, None, b"", b"\x01a", b"\x01b", b"\x02a")),
            event_type=self.random.choice(("", "order")),
            quarantine=self.random.random() < 0.05,
            sliding=self.random.random() < 0.05,
            journal=self.random.choice((None,) * 19 + (b"payload",)),
        )
        self.claims.append(made)
        return made

    def next_settle(self, sent: Claim) -> Settle:
        to: Any = self.random.choice(("done", "done", "failed", "released", "unknown"))
        fence = self.granted.get(sent.owner, 1) + self.random.choice((0,) * 9 + (1,))
        value = self.random.choice((None, b"", b"j1")) if to in ("done", "failed") else None
        return Settle(
            sent.id, sent.owner, fence, to, value,
            self.random.choice((1, 70 * SECOND_US, DAY_US)), sent.lease_us, sent.sliding,
        )  # fmt: skip

    def note(self, item: Item, answer: Answer) -> None:
        if isinstance(item, Claim) and isinstance(answer, Granted):
            self.granted[item.owner] = answer.fence


class Fixed:
    """The time that the test says."""

    now = 0

    def now_us(self) -> int:
        return self.now

    def steady_s(self) -> float:
        return self.now / 1e6


@pytest.mark.parametrize("seed", range(8))
def test_one_by_one_it_answers_and_writes_as_the_full_statement_does(tmp_path: Path, seed: int) -> None:
    clock = Fixed()
    clock.now = 1_700_000_000_000_000
    mine, full = spy(tmp_path / "single"), spy(tmp_path / "full", pooler=True)
    for store in (mine, full):
        store.clock = clock
        postgres.execute(postgres.url(), f"DELETE FROM {store.place.schema}.records")
    script = Script(seed)
    ways: list[str] = []
    for number in range(150):
        clock.now += script.random.choice((0, 1, SECOND_US, 40 * SECOND_US, 90 * SECOND_US))
        item = script.next_item()
        (way, answer), (_, other) = mine.way_of(item), full.way_of(item)
        assert answer == other, (number, item)
        assert rows_of(mine) == rows_of(full), (number, item)
        script.note(item, answer)
        ways += way
    assert ways.count("claim_one") > 20
    assert ways.count("settle_one") > 2
    assert "claim_one, undecided" in ways
    mine.close()
    full.close()


def rows_of(store: PostgresStore) -> list[tuple[Any, ...]]:
    return postgres.execute(
        postgres.url(),
        "SELECT digest, state, owner, fence, lease_until, settled_at, expires_at, first_seen, purge_at, attempt,"
        f" fingerprint, event_type, key, value FROM {store.place.schema}.records ORDER BY digest",
    )


def test_the_servers_time_is_the_same_in_both(spied: Spy) -> None:
    """Each statement reads the server's clock in its own words."""
    singles = [claim(f"single {n}") for n in range(20)]
    fences: list[int] = []
    for number, single in enumerate(singles):
        fences += [spied.send([single])[0].fence]
        fences += [answer.fence for answer in spied.send([claim(f"many {number}"), claim(f"more {number}")])][
            :1
        ]
    assert fences == sorted(fences)
    ((server_us,),) = postgres.execute(
        postgres.url(), "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
    )
    assert 0 <= server_us - fences[-1] < MINUTE_US


# --- fences and races -----------------------------------------------------------------------------


@pytest.fixture(params=["sync", "async"])
def coloured(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """A store with one connection, in either colour, which has been used before."""
    inner = PostgresStore(postgres.url(), schema=places.make(tmp_path).place.schema, pool_max=1)
    made: Any = InLoop(inner.twin()) if request.param == "async" else inner
    made.open()
    warm = claim("warm")
    made.send([warm, claim("warmer")])
    (granted,) = made.send([claim("warm again")])
    made.send([settle(claim("warm again"), granted)])
    yield made
    made.close()


def test_a_late_settle_after_a_take_over_is_lost(tmp_path: Path) -> None:
    clock = ManualClock()
    store = spy(tmp_path)
    store.clock = Ticking(clock)
    first, second = claim(), claim()
    (old,) = store.send([first])
    clock.advance(61)
    (new,) = store.send([second])
    assert isinstance(new, Granted)
    assert (new.attempt, new.fence > old.fence) == (2, True)
    ways, late = store.way_of(settle(first, old))
    assert (ways, late) == (["settle_one, undecided", "full"], Lost())
    ways, done = store.way_of(settle(second, new, value=b"jsecond"))
    assert (ways, type(done)) == (["settle_one"], Completed)
    assert store.way_of(settle(first, old))[1] == Lost()
    (known,) = store.send([claim()])
    assert (known.value, known.fence) == (b"jsecond", new.fence)
    store.close()


def test_a_lease_that_is_over_but_not_taken_over_may_still_end(tmp_path: Path) -> None:
    clock = ManualClock()
    store = spy(tmp_path)
    store.clock = Ticking(clock)
    mine = claim()
    (granted,) = store.send([mine])
    clock.advance(61)
    ways, done = store.way_of(settle(mine, granted))
    assert (ways, type(done)) == (["settle_one"], Completed)
    store.close()


class Rival:
    """A transaction that holds a key's row, made or removed, until it is told to end."""

    def __init__(self, schema: str, key: str, *, remove: bool = False) -> None:
        self._db = psycopg.connect(postgres.url())
        now = "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
        row = (digest(claim(key).id).hex(),)
        if remove:
            self._db.execute(f"DELETE FROM {schema}.records WHERE digest = %s::uuid", row)
        else:
            self._db.execute(
                f"INSERT INTO {schema}.records (digest, state, owner, fence, lease_until, attempt, expires_at,"
                f" consumer_id) VALUES (%s, 0, '\\x11', {now}, {now} + 60000000, 1, {now} + 120000000, 1)",
                row,
            )

    def blocks(self) -> list[int]:
        """The sessions that wait for it."""
        rows = postgres.execute(
            postgres.url(),
            "SELECT pid FROM pg_stat_activity WHERE %s = ANY (pg_blocking_pids(pid))",
            self._db.info.backend_pid,
        )
        return [pid for (pid,) in rows]

    def end(self, how: str) -> None:
        getattr(self._db, how)()
        self._db.close()


def schema_of(store: Any) -> str:
    return str(getattr(store, "inner", store).place.schema)


def while_blocked(store: Any, rival: Rival, item: Item, then: Callable[[], object]) -> Answer:
    """The answer of a call that waits for the rival, when something happens meanwhile."""
    answers: list[Answer] = []
    caller = threading.Thread(target=lambda: answers.extend(store.send([item])))
    caller.start()
    assert await_true(lambda: bool(rival.blocks()), 30)
    then()
    caller.join(60)
    return answers[0]


@pytest.mark.parametrize(("ending", "expected"), [("commit", Busy), ("rollback", Granted)])
def test_a_row_that_appears_after_the_snapshot(coloured: Any, ending: str, expected: type) -> None:
    rival = Rival(schema_of(coloured), "raced")
    answer = while_blocked(coloured, rival, claim("raced"), lambda: rival.end(ending))
    assert isinstance(answer, expected)


def test_a_row_that_goes_after_the_snapshot_is_replaced(coloured: Any) -> None:
    """The statement then sees both: the row as it was, and its own."""
    old = claim("purged")
    (granted,) = coloured.send([old])
    coloured.send([settle(old, granted)])
    rival = Rival(schema_of(coloured), "purged", remove=True)
    mine = claim("purged")
    answer = while_blocked(coloured, rival, mine, lambda: rival.end("commit"))
    assert isinstance(answer, Granted)
    assert answer.fence > granted.fence
    (record,) = coloured.send([Lookup(mine.id)])
    assert (record.state, record.owner, record.fence) == ("claimed", mine.owner, answer.fence)


# --- connections ----------------------------------------------------------------------------------


def test_a_new_connection_prepares_again(coloured: Any) -> None:
    def end_sessions() -> None:
        assert postgres.execute(
            postgres.url(),
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity"
            " WHERE query LIKE %s AND pid <> pg_backend_pid() AND application_name = 'semel'",
            f'%"{schema_of(coloured)}"%',
        )

    for turn in range(3):
        mine = claim(f"turn {turn}")
        (granted,) = coloured.send([mine])
        assert isinstance(granted, Granted)
        assert granted.attempt == 1
        end_sessions()
        (done,) = coloured.send([settle(mine, granted)])
        assert done == Completed(at_us=done.at_us)
        end_sessions()


def test_a_session_that_ends_while_its_claim_waits(coloured: Any) -> None:
    """The call begins again on a new connection, once, with the same owner."""
    rival = Rival(schema_of(coloured), "cut")
    mine = claim("cut")

    def end_both() -> None:
        (first,) = rival.blocks()
        postgres.execute(postgres.url(), "SELECT pg_terminate_backend(%s)", first)
        assert await_true(lambda: rival.blocks() not in ([], [first]), 30)  # it is back, and waits again
        rival.end("rollback")

    answer = while_blocked(coloured, rival, mine, end_both)
    assert isinstance(answer, Granted)
    assert answer.attempt == 1


@pytest.mark.parametrize("size", [100, 9_000, 3_000_000])
def test_values_that_do_not_fit_into_one_packet(coloured: Any, size: int) -> None:
    mine = claim("large")
    (granted,) = coloured.send([mine])
    value = b"j" + os.urandom(size)
    assert isinstance(coloured.send([settle(mine, granted, value=value)])[0], Completed)
    (known,) = coloured.send([claim("large")])
    assert known.value == value


def test_threads_share_the_connections_of_the_pool(tmp_path: Path) -> None:
    schema = places.make(tmp_path).place.schema
    store = PostgresStore(postgres.url(), schema=schema, pool_max=2, wait_s=60)
    store.open()
    store.send([claim("warm")])
    most: list[int] = []

    def work(number: int) -> None:
        for turn in range(20):
            mine = claim(f"{number}-{turn}")
            (granted,) = store.send([mine])
            (done,) = store.send([settle(mine, granted)])
            assert isinstance(done, Completed)
        most.append(
            postgres.execute(
                postgres.url(),
                "SELECT count(*) FROM pg_stat_activity WHERE query LIKE %s AND pid <> pg_backend_pid()",
                f'%"{schema}"%',
            )[0][0]
        )

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    store.close()
    assert len(most) == len(threads)
    assert max(most) <= 2


def test_a_cancelled_call_is_cancelled_in_the_server(tmp_path: Path) -> None:
    schema = places.make(tmp_path).place.schema
    store = AsyncPostgresStore(postgres.url(), schema=schema, pool_max=1)

    async def cancel() -> None:
        await store.aopen()
        await store.asend([claim("warm")])
        await store.asend([claim("warm again")])
        rival = await asyncio.to_thread(Rival, schema, "raced")
        task = asyncio.create_task(store.asend([claim("raced")]))
        assert await asyncio.to_thread(await_true, lambda: bool(rival.blocks()), 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not rival.blocks()
        await asyncio.to_thread(rival.end, "rollback")
        assert await store.asend([Lookup(claim("raced").id)]) == [Absent()]
        (granted,) = await store.asend([claim("raced")])
        assert isinstance(granted, Granted)
        await store.aclose()

    asyncio.run(cancel())


def test_an_interrupted_call_is_cancelled_in_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from semel.stores.postgres import pool

    schema = places.make(tmp_path).place.schema
    store = from_url(postgres.place(tmp_path).replace("pool_max=16", "pool_max=1"))
    store.open()
    store.send([claim("warm")])
    store.send([claim("warm again")])
    rival = Rival(schema, "raced")

    def interrupt(_socket: int, _wait_s: float) -> bool:
        """Ctrl-C strikes while the server waits."""
        assert await_true(lambda: bool(rival.blocks()), 30)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pool, "wait_for_input", interrupt)
        with pytest.raises(KeyboardInterrupt):
            store.send([claim("raced")])
    assert not rival.blocks()
    rival.end("rollback")
    assert store.send([Lookup(claim("raced").id)]) == [Absent()]
    assert isinstance(store.send([claim("raced")])[0], Granted)
    store.close()
