"""Partitions by the time inside the id: one winner, Late outside, made ahead, removed by pieces, killed anywhere."""

import asyncio
import logging
import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import psycopg
import pytest

import semel
from semel.core.commands import (
    Admit,
    Claim,
    Count,
    Forget,
    Granted,
    Known,
    Lookup,
    Purge,
    Renew,
    Settle,
    SetWindow,
    SwitchMode,
)
from semel.errors import IdsMismatch, PolicyInvalid, StoreUnavailable, UsageError
from semel.stores.postgres import PostgresStore, batch, from_url, partitions
from semel.stores.postgres.queries import talk_of
from semel.testing import ManualClock
from semel.types import Absent, Completed, Late, Lost, Renewed, Unavailable
from tests.cli.shell import semel as run_semel
from tests.services import postgres
from tests.stores.postgres import places
from tests.waiting import await_true

S = 1_000_000
MINUTE_US, HOUR_US, DAY_US = 60 * S, 3600 * S, 86_400 * S
HOLD = semel.Policy(late="hold")
SCOPE = ("", "events")


def uuid7(time_us: int) -> str:
    """An id minted at that time."""
    bits = (time_us // 1000) << 80 | 7 << 76 | (int.from_bytes(os.urandom(2)) & 0xFFF) << 64
    return str(uuid.UUID(int=bits | 2 << 62 | int.from_bytes(os.urandom(7))))


def claim(key: str, window_us: int = DAY_US, **more: Any) -> Claim:
    return Claim((*SCOPE, key), os.urandom(16), MINUTE_US, window_us, **more)


def settle(item: Claim, granted: Granted, **more: Any) -> Settle:
    return Settle(item.id, item.owner, granted.fence, "done", b"j1", item.window_us, item.lease_us, **more)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def timed(tmp_path: Path, clock: ManualClock) -> Iterator[PostgresStore]:
    """A store with one consumer of UUIDs of version 7, at the test's time."""
    store = places.make(tmp_path, clock)
    store.open()
    assert store.send([Admit(*SCOPE, "lease", "uuid7")]) == ["lease"]
    yield store
    store.close()


def rows(store: PostgresStore, place: str, what: str) -> list[tuple[Any, ...]]:
    return postgres.execute(place, what.format(s=store.place.schema))


def tables(store: PostgresStore, place: str) -> list[str]:
    """The tables that hold or held partitions, whatever the notes say."""
    found = rows(
        store,
        place,
        "SELECT relname FROM pg_class WHERE relnamespace = '{s}'::regnamespace AND relkind = 'r'"
        " AND relname ~ '^timed_[0-9]' ORDER BY 1",
    )
    return [name for (name,) in found]


def purge_fully(store: PostgresStore, clock: ManualClock) -> int:
    """Rounds of a cleaner, a minute apart, till nothing is left to do; how many partitions went."""
    removed = 0
    for _ in range(4):
        (purged,) = store.send([Purge()])
        removed += purged.partitions
        clock.advance(us=MINUTE_US)
    return removed


# --- one winner, and nothing outside ------------------------------------------------------------


def test_an_event_is_claimed_once_whenever_its_copies_come(timed: PostgresStore, clock: ManualClock) -> None:
    keys = [uuid7(clock.now_us() - day * DAY_US) for day in range(6)]
    firsts = [claim(key) for key in keys]
    answers = timed.send(firsts)
    assert all(isinstance(answer, Granted) for answer in answers)
    done = timed.send([settle(item, answer) for item, answer in zip(firsts, answers, strict=True)])
    assert all(answer == Completed(at_us=answer.at_us) for answer in done)
    for _ in range(3):
        clock.advance(us=7 * HOUR_US)  # another partition is the present one
        assert all(isinstance(answer, Known) for answer in timed.send([claim(key) for key in keys]))


def test_routing_by_the_present_time_lets_a_duplicate_through(
    timed: PostgresStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant that the test above exists for."""
    monkeypatch.setattr(batch, "time_in", lambda _ids, _key: clock.now_us())
    key = uuid7(clock.now_us())
    first = claim(key)
    (answer,) = timed.send([first])
    timed.send([settle(first, answer)])
    clock.advance(us=7 * HOUR_US)
    assert isinstance(timed.send([claim(key)])[0], Granted)


def test_racing_threads_have_one_winner_per_id(tmp_path: Path) -> None:
    store = places.make(tmp_path)
    store.open()
    store.send([Admit(*SCOPE, "lease", "uuid7")])
    ((now,),) = rows(store, postgres.place(tmp_path), "SELECT (extract(epoch FROM now()) * 1000000)::bigint")
    keys = [uuid7(now - number * HOUR_US) for number in range(120)]
    barrier = threading.Barrier(6, timeout=30)

    def caller(number: int) -> list[str]:
        mine = keys if number % 2 else keys[::-1]
        barrier.wait()
        won = []
        for at in range(0, len(mine), 30):
            items = [claim(key) for key in mine[at : at + 30]]
            for item, answer in zip(items, store.send(items), strict=True):
                if isinstance(answer, Granted):
                    won.append(item.id[2])
        return won

    try:
        with ThreadPoolExecutor(6) as threads:
            assert Counter(key for won in threads.map(caller, range(6)) for key in won) == Counter(keys)
    finally:
        store.close()


@pytest.mark.parametrize("with_meta", [False, True], ids=["statement", "under a lock"])
def test_ids_too_old_or_too_new_are_late_and_write_nothing(
    timed: PostgresStore, clock: ManualClock, place: str, *, with_meta: bool
) -> None:
    now = clock.now_us()
    more: dict[str, Any] = {"meta": b"{}"} if with_meta else {}
    ages = {
        7 * DAY_US + HOUR_US: True,
        300 * DAY_US: True,
        -6 * MINUTE_US: True,
        0: False,
        -4 * MINUTE_US: False,
    }
    for age_us, late in ages.items():
        (answer,) = timed.send([claim(uuid7(now - age_us), **more)])
        assert isinstance(answer, Late if late else Granted), age_us
        if isinstance(answer, Late):
            assert abs(answer.age_s * 1e6 - age_us) < S
    assert rows(timed, place, "SELECT count(*)::int FROM {s}.timed_records") == [(2,)]
    assert rows(timed, place, "SELECT count(*)::int FROM {s}.records") == [(0,)]


def test_a_record_answers_however_old_its_id_has_become(timed: PostgresStore, clock: ManualClock) -> None:
    item = claim(uuid7(clock.now_us() - 6 * DAY_US), window_us=2 * DAY_US - 1)
    (granted,) = timed.send([item])
    clock.advance(us=DAY_US)  # too old now to be accepted as new
    timed.send([Renew(item.id, item.owner, granted.fence, MINUTE_US)])
    assert isinstance(timed.send([settle(item, granted)])[0], Completed)
    assert isinstance(timed.send([claim(item.id[2])])[0], Known)
    assert isinstance(timed.send([claim(uuid7(clock.now_us() - 7 * DAY_US))])[0], Late)


def test_batches_of_both_kinds_of_consumers_are_split(
    timed: PostgresStore, clock: ManualClock, place: str
) -> None:
    items = [
        item
        for number in range(20)
        for item in (
            claim(uuid7(clock.now_us() - number * DAY_US // 4)),
            Claim(("", "plain", f"key {number}"), os.urandom(16), MINUTE_US, DAY_US),
        )
    ]
    answers = timed.send(items)
    assert all(isinstance(answer, Granted) for answer in answers)
    steps = [
        Renew(item.id, item.owner, answer.fence, MINUTE_US, step=("mail", b"r"))
        for item, answer in zip(items[:4], answers[:4], strict=True)
    ]
    assert all(isinstance(answer, Renewed) for answer in timed.send(steps))
    ends = timed.send([settle(item, answer) for item, answer in zip(items, answers, strict=True)])
    assert all(isinstance(answer, Completed) and not answer.recreated for answer in ends)
    for table in ("records", "timed_records", "events"):
        count = 40 if table == "events" else 20
        assert rows(timed, place, f"SELECT count(*)::int FROM {{s}}.{table}") == [(count,)]
    (stats,) = timed.send([Count()])
    assert stats.consumers == {"events": 20, "plain": 20}


def test_a_statement_looks_into_the_partitions_of_its_ids_alone(
    timed: PostgresStore, clock: ManualClock
) -> None:
    """One index probe for each id, in its own partition, whichever there are."""
    items = [claim(uuid7(clock.now_us() - number * HOUR_US)) for number in range(40)]
    answers = timed.send(items)
    ends: list[Any] = [settle(item, answer) for item, answer in zip(items, answers, strict=True)]
    fresh: list[Any] = [claim(uuid7(clock.now_us() - number * HOUR_US)) for number in range(40)]
    for sent in (ends, fresh, [Lookup(item.id) for item in items], list(items)):
        said = batch.PostgresBatch(sent, timed.consumers, timed.kinds, now=clock.now_us())
        (stage,) = batch.stages(said)
        ask = next(talk_of(said, stage))
        assert ask.name.endswith("_timed")
        with timed._open_pool().connection() as line:
            line.execute("BEGIN")
            row = line.execute(
                f"EXPLAIN (ANALYZE, FORMAT JSON) {timed.statements[ask.name]}", ask.parameters
            ).fetchone()
            line.execute("ROLLBACK")
        assert row is not None
        scans = [
            scan
            for scan in nodes(row[0][0]["Plan"])
            if scan.get("Relation Name", "").startswith("timed_") and scan["Node Type"].endswith("Scan")
        ]
        assert {scan["Node Type"] for scan in scans} <= {"Index Scan", "Index Only Scan"}
        assert sum(scan["Actual Loops"] for scan in scans) in (40, 80), ask.name  # looked at, and written


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for part in plan.get("Plans", ()):
        yield from nodes(part)


# --- what is refused ----------------------------------------------------------------------------


def test_what_must_stay_is_refused(timed: PostgresStore, clock: ManualClock) -> None:
    key = uuid7(clock.now_us())
    refused = timed.send([claim(key, quarantine=True), claim(uuid7(clock.now_us()), journal=b"payload")])
    assert all(isinstance(each, Unavailable) and isinstance(each.error, UsageError) for each in refused)
    item = claim(key)
    (granted,) = timed.send([item])
    (unknown,) = timed.send([Settle(item.id, item.owner, granted.fence, "unknown")])
    assert isinstance(unknown, Unavailable)
    (switched,) = timed.send([SwitchMode(*SCOPE, "quarantine")])
    assert isinstance(switched, Unavailable)
    (wide,) = timed.send([SetWindow(*SCOPE, "", 8 * DAY_US)])
    assert isinstance(wide, Unavailable)
    assert isinstance(wide.error, PolicyInvalid)
    assert timed.send([SetWindow(*SCOPE, "", 7 * DAY_US)]) == [None]


def test_a_key_that_is_no_id_is_refused_by_itself(timed: PostgresStore, clock: ManualClock) -> None:
    bad, good = timed.send([claim("not an id"), claim(uuid7(clock.now_us()))])
    assert isinstance(bad, Unavailable)
    assert isinstance(bad.error, semel.errors.KeyInvalid)
    assert isinstance(good, Granted)
    lookup, forget = timed.send([Lookup((*SCOPE, "not an id")), Forget((*SCOPE, "not an id"))])
    assert lookup == Absent()
    assert isinstance(forget, Unavailable)


def test_clients_declare_their_ids_and_are_held_to_it(place: str) -> None:
    key = semel.keys.uuid7("billing")
    with semel.open(place, consumer="events", ids="uuid7", policy=HOLD) as once:
        assert once.run(key, lambda: 1) == semel.Done(1)
        assert once.run(key, lambda: 2) == semel.Done(1, replayed=True)
        assert once.run(uuid7(HOUR_US), lambda: 3).__class__ is Late
        with pytest.raises(semel.errors.KeyInvalid, match="uuid7"):
            once.run("order-17", lambda: 4)
        with pytest.raises(UsageError, match="journal"):
            once.claim(key, journal=b"payload")
        with pytest.raises(PolicyInvalid, match="late"):
            once.using(semel.Policy())
        assert [record.key for record in once.records.list()] == [key]
    for other in ("ulid", None):
        client = semel.open(place, consumer="events", ids=other, policy=HOLD)
        with pytest.raises(IdsMismatch, match="never changed"):
            client.records.stats()
        client.close()
    client = semel.open(place, consumer="wide", ids="uuid7", policy=HOLD, window="8d")
    with pytest.raises(PolicyInvalid, match="partition_live"):
        client.claim(key)
    client.close()
    wide = semel.open(f"{place}&partition_live=40d&partition_step=1%20month", consumer="wide", ids="uuid7",
                      policy=HOLD, window="30d")  # fmt: skip
    with wide:
        assert wide.run(key, lambda: 1) == semel.Done(1)


def test_the_same_in_an_event_loop(place: str) -> None:
    async def main() -> None:
        async with semel.aopen(place, consumer="events", ids="uuid7", policy=HOLD) as once:
            key = semel.keys.uuid7("billing")

            async def handler() -> int:
                return 1

            assert await once.run(key, handler) == semel.Done(1)
            assert await once.run(key, handler) == semel.Done(1, replayed=True)
            async with semel.AsyncCleaner(once, every="1h") as cleaner:
                assert (await cleaner.clean()).partitions == 0

    asyncio.run(main())


# --- made ahead ---------------------------------------------------------------------------------


def test_partitions_are_made_ahead(timed: PostgresStore, clock: ManualClock, place: str) -> None:
    made = tables(timed, place)
    assert made == [f"timed_202701{day:02d}" for day in range(7, 23)]  # the clock stands at 2027-01-15 08:00
    clock.advance(us=DAY_US)
    timed.send([Purge()])
    assert tables(timed, place) == [*made, "timed_20270123"]
    (stats,) = timed.send([Count()])
    assert 7 * 86400 < stats.ahead_s <= 8 * 86400


def test_steps_follow_the_calendar_and_may_change(tmp_path: Path, clock: ManualClock, place: str) -> None:
    store = places.make(tmp_path, clock)
    for step, live in (("1 month", "40d"), ("6 hours", "40d")):
        other = from_url(f"{place}&partition_step={step}&partition_live={live}")
        other.clock = store.clock
        other.open()
        other.send([Admit(*SCOPE, "lease", "uuid7")])
        other.close()
    store.open()
    months = ["timed_20261201", "timed_20270101"]
    assert tables(store, place) == months
    for _ in range(40):
        clock.advance(us=DAY_US // 2)
        store.send([Purge()])
    (name, lower, upper) = rows(store, place, "SELECT name, lower, upper FROM {s}.partitions ORDER BY lower")[
        2
    ]
    assert (name, upper - lower) == ("timed_20270201", 6 * HOUR_US)
    key = uuid7(clock.now_us())
    assert isinstance(store.send([claim(key)])[0], Granted)
    store.close()


def test_a_claim_that_finds_no_partition_has_them_made(
    timed: PostgresStore, clock: ManualClock, place: str
) -> None:
    clock.advance(us=30 * DAY_US)  # nobody has cleaned for a month
    (stats,) = timed.send([Count()])
    assert stats.ahead_s < 0
    item = claim(uuid7(clock.now_us()))
    (granted,) = timed.send([item])
    assert isinstance(granted, Granted)
    assert isinstance(timed.send([settle(item, granted)])[0], Completed)
    (stats,) = timed.send([Count()])
    assert stats.ahead_s > 6 * 86400
    assert purge_fully(timed, clock) == 16  # those of the month before
    assert isinstance(timed.send([claim(item.id[2])])[0], Known)


def test_too_few_partitions_ahead_are_told_of(
    timed: PostgresStore, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    clock.advance(us=7 * DAY_US)
    with caplog.at_level(logging.WARNING, "semel"):
        timed.send([Count()])
    assert "days ahead" in caplog.text


# --- removed ------------------------------------------------------------------------------------


def test_old_partitions_go_and_their_ids_are_late(
    timed: PostgresStore, clock: ManualClock, place: str
) -> None:
    old = claim(uuid7(clock.now_us() - 3 * DAY_US), meta=b"{}")
    (granted,) = timed.send([old])
    timed.send([settle(old, granted)])
    before = tables(timed, place)
    clock.advance(us=6 * DAY_US)
    (dry,) = timed.send([Purge(dry_run=True)])
    assert (dry.partitions, dry.count) == (6, 1)
    assert purge_fully(timed, clock) == 6
    assert not set(before[:6]) & set(tables(timed, place))
    assert rows(timed, place, "SELECT count(*)::int FROM {s}.extras") == [(0,)]
    assert isinstance(timed.send([claim(old.id[2])])[0], Late)
    (zombie,) = timed.send([settle(old, granted)])
    assert zombie.recreated  # its effect is in the world; a copy would be late
    assert isinstance(timed.send([Renew(old.id, old.owner, granted.fence, MINUTE_US)])[0], Lost)
    assert timed.send([Lookup(old.id)]) == [Absent()]


def test_a_partition_goes_only_when_its_mark_was_in_force_for_a_while(
    timed: PostgresStore, clock: ManualClock, place: str
) -> None:
    before = tables(timed, place)
    clock.advance(us=2 * DAY_US)
    for _ in range(3):  # less than the grace
        (purged,) = timed.send([Purge()])
        assert purged.partitions == 0
        assert purged.lag_s > 0
        clock.advance(us=S)
    assert tables(timed, place)[:2] == before[:2]
    clock.advance(us=MINUTE_US)
    assert timed.send([Purge()])[0].partitions == 2


@pytest.fixture
def reader(place: str) -> Iterator[psycopg.Connection[Any]]:
    """Somebody with a transaction of his own."""
    with psycopg.connect(place.partition("?")[0]) as connection:
        yield connection


def test_detaching_waits_for_open_transactions_and_no_claim_waits_for_it(
    timed: PostgresStore, clock: ManualClock, place: str, reader: psycopg.Connection[Any]
) -> None:
    clock.advance(us=2 * DAY_US)
    timed.send([Purge()])
    clock.advance(us=MINUTE_US)
    reader.execute(f"SELECT count(*) FROM {timed.place.schema}.timed_records")  # holds every partition
    removed: list[int] = []
    manager = threading.Thread(target=lambda: removed.append(timed.send([Purge()])[0].partitions))
    manager.start()
    assert await_true(lambda: blocked_manager(place), 10)
    slowest = 0.0
    for _ in range(20):
        began = time.monotonic()
        assert isinstance(timed.send([claim(uuid7(clock.now_us()))])[0], Granted)
        slowest = max(slowest, time.monotonic() - began)
    manager.join(30)
    assert removed == [0]  # it gave up, half done
    assert slowest < 0.9  # less than the manager waited for its lock
    states = {each[6] for each in rows(timed, place, _STATES)}
    assert states == {True, False}  # one is on its way out
    late = uuid7(clock.now_us() - 9 * DAY_US)
    assert isinstance(timed.send([claim(late)])[0], Late)
    reader.rollback()
    clock.advance(us=MINUTE_US)
    assert purge_fully(timed, clock) == 2  # the first by FINALIZE


_STATES = (
    "SELECT 0, p.name, p.lower, p.upper, true, i.inhrelid IS NOT NULL, coalesce(i.inhdetachpending, false)"
    " FROM {s}.partitions AS p JOIN pg_class AS c ON c.relname = p.name AND c.relnamespace = '{s}'::regnamespace"
    " LEFT JOIN pg_inherits AS i ON i.inhrelid = c.oid"
)


def blocked_manager(place: str) -> bool:
    return bool(
        postgres.execute(
            place,
            "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%DETACH%CONCURRENTLY%'",
        )
    )


class Killed(Exception):
    pass


class Mortal(PostgresStore):
    """Dies after so many statements: its connections are cut without a word, as by kill -9."""

    left = 10**9

    def _converse(self, line: Any, said: Any) -> Any:
        def counted() -> Any:
            rows: Any = None
            while True:
                try:
                    ask = next(said) if rows is None else said.send(rows)
                except StopIteration as end:
                    return end.value
                if not self.left:
                    line.pgconn.finish()
                    raise Killed
                self.left -= 1
                rows = yield ask

        return super()._converse(line, counted())


def test_the_manager_may_be_killed_between_any_two_steps(
    tmp_path: Path, clock: ManualClock, place: str
) -> None:
    sound = places.make(tmp_path, clock)
    sound.open()
    sound.send([Admit(*SCOPE, "lease", "uuid7")])
    schema = sound.place.schema
    deaths, outlived = 0, False
    for steps in range(60):
        kept = claim(uuid7(clock.now_us()), window_us=3 * DAY_US)
        (granted,) = sound.send([kept])
        sound.send([settle(kept, granted)])
        clock.advance(us=DAY_US)  # a partition to make, a mark to raise and a partition to remove
        mortal = Mortal(place.partition("?")[0], schema=schema, clock=sound.clock)
        mortal.open()
        mortal.left = steps
        try:
            for _ in range(3):
                mortal.send([Purge()])
                clock.advance(us=MINUTE_US)
            outlived = True
        except Killed:
            deaths += 1
        finally:
            mortal.close()
        assert isinstance(sound.send([claim(uuid7(clock.now_us()))])[0], Granted)
        assert isinstance(sound.send([claim(kept.id[2])])[0], Known)
        purge_fully(sound, clock)
        consistent(sound, place, clock)
        if outlived:
            break
    assert deaths == steps >= 25
    sound.close()


def consistent(store: PostgresStore, place: str, clock: ManualClock) -> None:
    """What there is, is noted; it has no gap; it reaches from what must be kept to a week ahead."""
    noted = rows(store, place, "SELECT name, lower, upper FROM {s}.partitions ORDER BY lower")
    assert [name for name, _, _ in noted] == tables(store, place)
    assert all(one[2] == other[1] for one, other in pairwise(noted))
    attached = rows(
        store, place, "SELECT count(*)::int FROM pg_inherits WHERE inhparent = '{s}.timed_records'::regclass"
    )
    assert attached == [(len(noted),)]
    assert noted[0][1] <= clock.now_us() - 8 * DAY_US < noted[0][2]
    assert noted[-1][2] >= clock.now_us() + 7 * DAY_US


def test_the_mark_never_falls(timed: PostgresStore, place: str) -> None:
    for low in ("1900000000000000", "1800000000000001"):
        with timed._open_pool().connection() as line:
            line.execute(timed.statements["raise_low"], {"low": low, "at": "1"})
    assert rows(timed, place, "SELECT value FROM {s}.meta WHERE name = 'low_water'") == [
        ("1900000000000000",)
    ]


def test_a_role_that_may_not_make_tables_still_claims(
    place: str, timed: PostgresStore, clock: ManualClock
) -> None:
    schema = timed.place.schema
    name = f"r_{schema}"[:40]
    postgres.execute(
        place,
        f"CREATE ROLE {name} LOGIN; GRANT USAGE ON SCHEMA {schema} TO {name};"
        f" GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO {name};"
        f" GRANT USAGE ON ALL SEQUENCES IN SCHEMA {schema} TO {name}",
    )
    servant = from_url(place.replace("//semel@", f"//{name}@"))
    servant.clock = timed.clock
    try:
        servant.open()
        servant.send([Admit(*SCOPE, "lease", "uuid7")])
        assert isinstance(servant.send([claim(uuid7(clock.now_us()))])[0], Granted)
        clock.advance(us=30 * DAY_US)
        with pytest.raises(StoreUnavailable, match="semel purge"):
            servant.send([claim(uuid7(clock.now_us()))])
    finally:
        servant.close()
        postgres.execute(place, f"DROP OWNED BY {name}; DROP ROLE {name}")


def test_the_command_line_cleans_and_says_who_else_does(
    place: str, timed: PostgresStore, clock: ManualClock, reader: psycopg.Connection[Any], tmp_path: Path
) -> None:
    made = run_semel("purge", "--store", place, "--json", cwd=tmp_path).json()
    assert (made["partitions"], made["cleaner"]) == (0, None)
    reader.execute(timed.statements["elect"])
    made = run_semel("purge", "--store", place, cwd=tmp_path)
    assert f"pid {reader.info.backend_pid}" in made.err
    stats = run_semel("stats", "--store", place, "--json", cwd=tmp_path).json()
    assert stats["ahead_s"] > 7 * 86400


def test_found_says_what_is_overdue() -> None:
    standing = partitions.PartitionState(100, [], live_us=10)
    assert (standing.ahead_us, standing.lag_s(), standing.overdue()) == (0, 0.0, [])
