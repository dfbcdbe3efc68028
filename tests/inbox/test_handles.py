"""What an inbox promises, on every kind of handle."""

import contextlib
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

import semel
from semel import Busy, Delivery, Done, Errored
from semel.core.commands import Forget, Lookup
from semel.core.ids import fingerprint
from semel.inbox import aretry, is_undone, retry
from semel.types import Absent
from tests.inbox.bench import CONSUMER, Bench
from tests.inbox.kinds import KINDS, RC, RR, SERIALIZABLE, had, run
from tests.waiting import await_true

Scenario = Callable[..., Coroutine[Any, Any, None]]


@pytest.fixture(params=KINDS)
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Bench:
    return Bench(KINDS[request.param], tmp_path)


@pytest.fixture(params=[name for name, kind in KINDS.items() if kind.dialect == "postgresql"])
def postgres_bench(request: pytest.FixtureRequest, tmp_path: Path) -> Bench:
    return Bench(KINDS[request.param], tmp_path)


def holds(bench: Bench, scenario: Scenario, *arguments: Any) -> None:
    run(scenario(bench, *arguments), sync=bench.kind.sync)


# --- mark and effect ----------------------------------------------------------------------------


async def together(bench: Bench) -> None:
    async with bench.client() as client, bench.connection() as connection:
        for expected in (True, False, False):
            await connection.begin()
            first = await had(client.inbox(connection.handle).first("evt_1"))
            assert first is expected
            if first:
                await bench.credit(connection)
            await connection.commit()


def test_mark_and_effect_commit_together(bench: Bench) -> None:
    holds(bench, together)
    assert bench.balance() == 1
    record = bench.record("evt_1")
    assert (record.state, record.attempt, record.key, record.event_type) == ("done", 1, "evt_1", "")
    assert len(record.owner) == 16
    assert record.fence == record.first_seen_us == record.settled_at_us
    assert record.expires_at_us == record.settled_at_us + 3600 * 1_000_000


async def reused(bench: Bench) -> None:
    mine, other = b"mine", b"other"  # the payload's own bytes, as everywhere
    async with bench.client() as client, bench.connection() as connection:
        await connection.begin()
        assert await had(client.inbox(connection.handle).first("evt_1", fingerprint=mine))
        await connection.commit()
        await connection.begin()
        inbox = client.inbox(connection.handle)
        with pytest.raises(semel.errors.PayloadMismatch, match="evt_1"):
            await had(inbox.first("evt_1", fingerprint=other))
        with pytest.raises(semel.errors.UsageError, match="bytes"):
            await had(inbox.first("evt_1", fingerprint="mine"))
        assert await had(inbox.first("evt_1", fingerprint=mine)) is False
        assert await had(inbox.first("evt_1")) is False
        assert await had(inbox.first("evt_2"))
        await bench.credit(connection)  # the transaction is still usable
        await connection.commit()


async def reused_in_batches(bench: Bench) -> None:
    async def ignore() -> None: ...

    def handler(_new: Any) -> Any:
        return None if bench.kind.sync else ignore()

    async with bench.client() as client, bench.connection() as connection:
        for number in range(10):
            await connection.begin()
            first, other = (
                Delivery(key="k", body=1, fingerprint=print_) for print_ in (b"0", b"%d" % number)
            )
            outcomes = await had(client.inbox(connection.handle).run_batch([first, other], handler))
            await connection.commit()
            duplicate = semel.Done(None, replayed=True)
            expected = semel.Done(None, replayed=bool(number)), semel.Mismatch() if number else duplicate
            assert tuple(outcomes) == expected


def test_a_batch_compares_payloads_too(bench: Bench) -> None:
    holds(bench, reused_in_batches)


def test_a_key_that_comes_with_another_payload_is_no_duplicate(bench: Bench) -> None:
    holds(bench, reused)
    assert bench.balance() == 1
    assert bench.record("evt_1").fingerprint == fingerprint(b"mine")
    assert bench.record("evt_2").fingerprint is None


async def apart(bench: Bench) -> None:
    async with bench.client() as client, bench.connection() as connection:
        held = client.inbox(connection.handle)
        await connection.begin()
        assert await had(held.first("evt_1"))
        await bench.credit(connection)
        assert not await had(held.first("evt_1"))
        await connection.rollback()
        await connection.begin()
        assert await had(held.first("evt_1")), "it remembers what was rolled back"
        await connection.commit()
        await connection.begin()
        assert not await had(held.first("evt_1"))
        await connection.rollback()


def test_mark_and_effect_roll_back_together(bench: Bench) -> None:
    holds(bench, apart)
    assert bench.balance() == 0


async def savepoints(bench: Bench) -> None:
    async with bench.client() as client, bench.connection() as connection:
        held = client.inbox(connection.handle)
        await connection.begin()
        assert await had(held.first("outer"))
        with contextlib.suppress(LookupError):
            async with connection.savepoint():
                assert await had(held.first_many(["a", "b"])) == [True, True]
                raise LookupError
        async with connection.savepoint():
            assert await had(held.first_many(["a", "outer"])) == [True, False]
        await connection.commit()
        await connection.begin()
        assert await had(held.first_many(["a", "b", "outer"])) == [False, True, False]
        await connection.rollback()


def test_a_rollback_to_a_savepoint_makes_it_first_again(bench: Bench) -> None:
    holds(bench, savepoints)


async def uncommitted(bench: Bench) -> None:
    async with bench.client() as client, bench.connection() as connection:
        held = client.inbox(connection.handle)
        await connection.begin()
        assert await had(held.first("evt_1"))
        await had(held.store("evt_1", 1))
        assert await had(held.replay("evt_1")) == Done(1, replayed=True)
        assert bench.record("evt_1") == Absent()
        await connection.rollback()
        assert bench.record("evt_1") == Absent()


def test_it_never_commits(bench: Bench) -> None:
    holds(bench, uncommitted)


async def own_errors(bench: Bench) -> None:
    async with bench.client() as client, bench.connection() as connection:
        held = client.inbox(connection.handle)
        await connection.begin()
        assert await had(held.first("evt_1"))
        with pytest.raises(Exception, match=r"(?i)check") as raised:
            await bench.credit(connection, -5)
        assert "Integrity" in type(raised.value).__name__ or "CheckViolation" in type(raised.value).__name__
        await connection.rollback()
        await connection.begin()
        assert await had(held.first("evt_1"))
        await connection.rollback()


def test_the_callers_own_errors_stay_the_callers(bench: Bench) -> None:
    holds(bench, own_errors)


# --- many, values, windows ----------------------------------------------------------------------


async def many(bench: Bench) -> None:
    async with bench.client() as client, bench.connection() as connection:
        held = client.inbox(connection.handle)
        await connection.begin()
        assert await had(held.first_many(["a", "b", "a", "c", "b"])) == [True, True, False, True, False]
        assert await had(held.first_many([])) == []
        odd = ['quote"', "back\\slash", "brace{},NULL", "\u00e4\u4e2d\U0001f600", "NULL", "%s $1 ?"]
        assert await had(held.first_many(odd)) == [True] * len(odd)
        keys = [f"k{number}" for number in range(700)]
        assert await had(held.first_many(keys)) == [True] * 700
        await connection.commit()
        await connection.begin()
        assert sum(await had(held.first_many([*keys, *odd, "new"]))) == 1
        await connection.rollback()
    assert bench.record('quote"').key == 'quote"'


def test_many_are_folded_and_any_text_is_a_key(bench: Bench) -> None:
    holds(bench, many)


async def values(bench: Bench) -> None:
    async with bench.client() as client, bench.connection() as connection:
        held = client.inbox(connection.handle)
        await connection.begin()
        assert await had(held.replay("evt_1")) is None
        with pytest.raises(semel.errors.UsageError, match="call first"):
            await had(held.store("evt_1", 1))
        assert await had(held.first("bare"))
        assert await had(held.replay("bare")) == Done(None, replayed=True, kept=False)
        kept: list[Any] = [None, 0, "", [], (1, 2), b"raw\0\xff", {"a": [1.5]}]
        for number, value in enumerate(kept):
            assert await had(held.first(f"evt_{number}"))
            await had(held.store(f"evt_{number}", value))
            assert await had(held.replay(f"evt_{number}")) == Done(value, replayed=True)
        with pytest.raises(semel.errors.ValueTooLarge):
            await had(held.store("evt_1", "x" * 300_000))
        with pytest.raises(semel.errors.ValueNotEncodable):
            await had(held.store("evt_1", object()))
        await connection.commit()
        await connection.begin()
        assert await had(held.replay("evt_4")) == Done((1, 2), replayed=True)
        await connection.rollback()


def test_values_are_kept_and_replayed(bench: Bench) -> None:
    holds(bench, values)


async def windows(bench: Bench) -> None:
    async with bench.client() as client, bench.connection() as connection:
        await had(client.windows.set("off", event_type="off"))
        await had(client.windows.set("1s", event_type="short"))
        held = client.inbox(connection.handle)
        await connection.begin()
        assert await had(held.first_many(["a", "a"], event_type="off")) == [True, True]
        assert await had(held.first("brief", event_type="short"))
        await had(held.store("brief", "old"))
        await connection.commit()
        with bench.store() as store:
            look = Lookup(("", CONSUMER, "brief"))
            marked_before_us = (await had(client.records.stats())).now_us
            assert await_true(lambda: store.send([look]) == [Absent()])
        await connection.begin()
        assert await had(held.replay("brief")) is None
        assert await had(held.first("brief"))
        assert await had(held.replay("brief")) == Done(None, replayed=True, kept=False)
        await connection.commit()
        after = bench.record("brief")
        assert after.fence > marked_before_us
        assert (after.attempt, after.first_seen_us, after.event_type) == (1, after.settled_at_us, "")
        assert bench.record("a") == Absent()
        with bench.store() as store:
            (forgotten,) = store.send([Forget(("", CONSUMER, "brief"))])
        await connection.begin()
        assert await had(held.first("brief"))
        await connection.commit()
        assert bench.record("brief").fence > forgotten.fence


def test_what_has_expired_or_was_forgotten_is_first_again(bench: Bench) -> None:
    holds(bench, windows)


# --- what it refuses ----------------------------------------------------------------------------


async def autocommit(bench: Bench) -> None:
    async with bench.client() as client, bench.connection(autocommit=True) as connection:
        held = client.inbox(connection.handle)
        await connection.begin()
        for verb in (held.first, lambda key: held.store(key, 1)):
            with pytest.raises(semel.errors.NoTransaction, match="mark and effect would not commit together"):
                await had(verb("evt_1"))
        with pytest.raises(semel.errors.NoTransaction):
            await had(held.run_batch([Delivery(key="a", body=1)], lambda new: None))
        assert await had(held.replay("evt_1")) is None
    assert bench.record("evt_1") == Absent()


def test_without_a_transaction_it_refuses(bench: Bench) -> None:
    holds(bench, autocommit)


async def elsewhere(bench: Bench, other: Bench) -> None:
    async with (
        bench.client() as client,
        other.client() as second,
        bench.connection(url=other.url) as connection,
    ):
        await had(second.records.stats())
        held = client.inbox(connection.handle)
        for verb in (held.first, held.replay):
            await connection.begin()
            with pytest.raises(semel.errors.WrongDatabase, match="for both"):
                await had(verb("evt_1"))
            await connection.rollback()


def test_another_database_is_refused(bench: Bench, tmp_path: Path) -> None:
    other = elsewhere_of(bench, tmp_path)
    holds(bench, elsewhere, other)
    assert other.record("evt_1") == Absent()


def elsewhere_of(bench: Bench, folder: Path) -> Bench:
    """Another database, with semel's tables of the same name in it."""
    if bench.kind.dialect == "sqlite":
        (folder / "other").mkdir()
        return Bench(bench.kind, folder / "other")
    name = f"other_{bench.wallet}"
    with bench.other() as admin:
        admin.autocommit = True
        admin.execute(f"CREATE DATABASE {name}")
    url = bench.url.rpartition("/")[0] + f"/{name}"
    other = Bench.at(bench.kind, url, f"{url}?{bench.store_url.partition('?')[2]}", bench.wallet)
    with other.store():
        return other


async def absent_tables(bench: Bench) -> None:
    async with (
        bench.client() as client,
        bench.connection(url=bench.url.rpartition("/")[0] + "/template1") as connection,
    ):
        await connection.begin()
        with pytest.raises(semel.errors.WrongDatabase, match="one database for both"):
            await had(client.inbox(connection.handle).first("evt_1"))
        await connection.rollback()


def test_a_database_without_the_tables_is_refused(postgres_bench: Bench) -> None:
    holds(postgres_bench, absent_tables)


async def other_mode(bench: Bench) -> None:
    with bench.store():
        pass  # the tables are made beside the wallet
    async with bench.client("lease") as client:
        await had(client.run("k", nothing if bench.kind.sync else anothing))
        with pytest.raises(semel.errors.ModeMismatch):
            client.inbox(None)
    async with bench.client() as client, bench.connection() as connection:
        await connection.begin()
        with pytest.raises(semel.errors.ModeMismatch, match="'lease', not 'inbox'"):
            await had(client.inbox(connection.handle).first("evt_1"))
        await connection.rollback()


def nothing() -> None:
    """Do nothing."""


async def anothing() -> None:
    """Do nothing."""


def test_a_consumer_has_one_mode(bench: Bench) -> None:
    holds(bench, other_mode)


# --- others -------------------------------------------------------------------------------------


async def claimed(bench: Bench) -> None:
    async with bench.client() as client, bench.connection() as connection:
        held = client.inbox(connection.handle)
        await connection.begin()
        await had(held.first("before"))
        await connection.commit()
        bench.claim("evt_1")
        bench.claim("over", 1000)
        await connection.begin()
        assert await had(held.first("mine"))
        await bench.credit(connection)
        with pytest.raises(semel.errors.StillRunning, match="evt_1") as raised:
            await had(held.first_many(["new", "evt_1", "newer"]))
        assert 3590 < raised.value.retry_after_s <= 3600
        assert await had(held.first_many(["new", "newer", "mine"])) == [True, True, False], "all or none"
        assert await had(held.first("over")), "its lease is over"
        await connection.commit()
    assert bench.balance() == 1
    assert bench.record("evt_1").state == "claimed"
    assert (bench.record("over").state, bench.record("over").attempt) == ("done", 2)


def test_a_running_claim_is_not_overtaken_and_the_transaction_goes_on(bench: Bench) -> None:
    holds(bench, claimed)


async def quarantined(bench: Bench) -> None:
    async with bench.client() as client, bench.connection() as connection:
        held = client.inbox(connection.handle)
        await connection.begin()
        await had(held.first("before"))
        await connection.commit()
        bench.claim("unsure", 1, quarantine=True)
        await connection.begin()
        with pytest.raises(semel.errors.OutcomeUnknown, match="resolve it"):
            await had(held.first("unsure"))
        assert await had(held.first("new"))
        await connection.rollback()


def test_a_quarantined_event_is_for_somebody_to_decide(bench: Bench) -> None:
    holds(bench, quarantined)


async def waited(bench: Bench, ending: str) -> None:
    async with bench.client() as client, bench.connection() as connection:
        held = client.inbox(connection.handle)
        with bench.rival() as (other, theirs):
            assert theirs.first("evt_1")
            with bench.later(getattr(other, ending)):
                await connection.begin()
                first = await had(held.first("evt_1"))
        assert first is (ending == "rollback")
        await connection.commit()


@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_a_concurrent_duplicate_waits_for_the_first_transaction(bench: Bench, ending: str) -> None:
    holds(bench, waited, ending)


async def patience(bench: Bench) -> None:
    sqlite = bench.kind.dialect == "sqlite"
    setting = "PRAGMA busy_timeout" if sqlite else "SHOW lock_timeout"
    async with bench.client(lock_wait_s=0.1) as client, bench.connection() as connection:
        held = client.inbox(connection.handle)
        with bench.rival() as (other, theirs):
            assert theirs.first("evt_1")
            await connection.begin()
            await connection.execute(
                "PRAGMA busy_timeout = 1234" if sqlite else "SET LOCAL lock_timeout = 1234"
            )
            if not sqlite:
                await connection.execute("CREATE TEMPORARY TABLE mine (n integer)")
                await connection.execute("INSERT INTO mine VALUES (1)")
            before = await connection.execute(setting)
            with pytest.raises(semel.errors.StillRunning):
                await had(held.first_many(["evt_0", "evt_1", "evt_2"]))
            assert await connection.execute(setting) == before
            assert "1234" in str(before)
            if not sqlite:
                assert await connection.execute("SELECT n FROM mine") == [(1,)]
                assert await had(held.first_many(["evt_0", "evt_2"])) == [True, True]
            other.commit()
            assert not await had(held.first("evt_1"))
            assert await connection.execute(setting) == before
        await connection.commit()


def test_it_waits_no_longer_than_it_may_and_leaves_the_transaction_usable(bench: Bench) -> None:
    holds(bench, patience)


# --- isolation levels ---------------------------------------------------------------------------


async def levels(bench: Bench, level: str) -> None:
    """A duplicate is committed after the transaction has taken its snapshot."""
    async with bench.client() as client, bench.connection() as connection:
        held = client.inbox(connection.handle)
        tries: list[int] = []

        async def handle() -> bool:
            await connection.rollback()
            await connection.begin(level)
            await connection.execute(f"SELECT * FROM {bench.wallet}")
            if not tries:
                with bench.rival() as (other, theirs):
                    theirs.first("evt_1")
                    other.execute(f"UPDATE {bench.wallet} SET balance = balance + 1")
                    other.commit()
            tries.append(1)
            first: bool = await had(held.first("evt_1"))
            if first:
                await bench.credit(connection)
            await connection.commit()
            return first

        if bench.kind.sync:
            assert retry(lambda: run(handle(), sync=True)) is False
        else:
            assert await aretry(handle) is False
        assert len(tries) == (1 if level == RC else 2)
        await connection.begin(level)
        assert await had(held.first("evt_2"))
        await bench.credit(connection)
        await connection.commit()


@pytest.mark.parametrize("level", [RC, RR, SERIALIZABLE])
def test_isolation_levels(postgres_bench: Bench, level: str) -> None:
    holds(postgres_bench, levels, level)
    assert postgres_bench.balance() == 2


def test_only_what_the_database_undid_is_tried_again() -> None:
    tries: list[int] = []

    def transaction() -> None:
        tries.append(1)
        raise LookupError

    with pytest.raises(LookupError):
        retry(transaction)
    assert tries == [1]
    assert not is_undone(LookupError())


# --- batches ------------------------------------------------------------------------------------


async def batches(bench: Bench) -> None:
    async with bench.client() as client, bench.connection() as connection:
        held = client.inbox(connection.handle)
        await connection.begin()
        await had(held.first("known"))
        await connection.commit()
        bench.claim("busy")
        calls: list[list[int]] = []

        async def credit(new: list[Delivery[int]]) -> None:
            calls.append([each.body for each in new])
            for each in new:
                await bench.credit(connection, each.body)

        def handler(new: list[Delivery[int]]) -> Any:
            return run(credit(new), sync=True) if bench.kind.sync else credit(new)

        def deliveries(**amounts: int) -> list[Delivery[int]]:
            return [Delivery(key=key, body=amount) for key, amount in amounts.items()]

        good = [*deliveries(a=1, known=5, b=2), Delivery(key="a", body=1)]
        for ending in (connection.rollback, connection.commit):  # it leaves both to the caller
            calls.clear()
            await connection.begin()
            assert await had(held.run_batch(good, handler)) == [
                Done(None), Done(None, replayed=True), Done(None), Done(None, replayed=True),
            ]  # fmt: skip
            await ending()
            assert calls == [[1, 2]]
        calls.clear()
        await connection.begin()
        await connection.execute(
            f"UPDATE {bench.wallet} SET balance = balance + 10"
        )  # the caller's own, before
        outcomes = await had(held.run_batch(deliveries(c=3, poison=-99, d=4), handler))
        assert [type(each) for each in outcomes] == [Done, Errored, Done]
        assert "CHECK" in str(outcomes[1].error).upper()
        assert calls == [[3, -99, 4], [3], [-99], [4]]
        calls.clear()
        outcomes = await had(held.run_batch(deliveries(e=5, busy=7), handler))
        assert [type(each) for each in outcomes] == [Done, Busy]
        assert calls == [[5]]
        await connection.commit()
        await connection.begin()
        assert await had(held.first_many(["a", "b", "c", "d", "e", "poison"])) == [False] * 5 + [True]
        await connection.rollback()


def test_a_bad_event_does_not_hold_back_the_batch(bench: Bench) -> None:
    holds(bench, batches)
    assert bench.balance() == 1 + 2 + 10 + 3 + 4 + 5


# --- a COMMIT without an answer -----------------------------------------------------------------


async def ambiguous(bench: Bench) -> None:
    async with bench.client(lock_wait_s=0.1) as client, bench.connection() as connection:
        held = client.inbox(connection.handle)
        await connection.begin()
        await had(held.first("evt_1"))
        if bench.kind.dialect == "postgresql":
            with pytest.raises(semel.errors.StillRunning, match="still open"):
                await had(held.committed("evt_1"))
        await connection.rollback()
        assert not await had(held.committed("evt_1"))
        await connection.begin()
        await had(held.first("evt_1"))
        await connection.commit()
        assert await had(held.committed("evt_1"))
        assert not await had(held.committed("evt_2"))
        again = client.inbox(connection.handle)
        await connection.begin()
        assert not await had(again.first("evt_1"))
        await connection.commit()
        assert not await had(again.committed("evt_1")), "it was another attempt's"
    assert bench.record("evt_2") == Absent()


def test_a_commit_without_an_answer_can_be_resolved(bench: Bench) -> None:
    holds(bench, ambiguous)
