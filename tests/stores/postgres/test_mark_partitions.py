"""Marks in partitions by arrival: one first across every boundary, looked up in few partitions, dropped when over."""

import asyncio
import json
import random
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest

import semel
from semel.core.commands import Admit, Count, Forget, Lookup, Mark, Marked, Purge, SwitchMode
from semel.core.ids import digest
from semel.errors import IdsMismatch, KeyInvalid, PolicyInvalid, StoreUnavailable, UsageError
from semel.stores.postgres import PostgresStore, from_url
from semel.stores.postgres.schema import script
from semel.testing import ManualClock
from semel.types import Absent, Forgotten, Record, Unavailable
from tests.services import postgres
from tests.stores.postgres import places
from tests.stores.postgres.test_partitions import Killed, Mortal, purge_fully, rows, uuid7
from tests.waiting import await_true

S = 1_000_000
HOUR_US, DAY_US = 3600 * S, 86_400 * S
SCOPE = ("", "clicks")
KEYS = [f"key {number}" for number in range(60)]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def opaque(tmp_path: Path, clock: ManualClock) -> Iterator[PostgresStore]:
    """A store with one consumer of marks whose keys hold no time, at the test's time: 08:00."""
    store = places.make(tmp_path, clock)
    store.open()
    assert store.send([Admit(*SCOPE, "mark", "opaque")]) == ["mark"]
    yield store
    store.close()


def mark(store: PostgresStore, *keys: str, window_us: int = DAY_US, consumer: str = SCOPE[1]) -> list[bool]:
    (answer,) = store.send([Mark("", consumer, list(keys), window_us)])
    assert isinstance(answer, Marked), answer
    return answer.firsts


def tables(store: PostgresStore, place: str) -> list[str]:
    found = rows(
        store,
        place,
        "SELECT relname FROM pg_class WHERE relnamespace = '{s}'::regnamespace AND relkind = 'r'"
        " AND relname ~ '^marks_[0-9]' ORDER BY 1",
    )
    return [name for (name,) in found]


def to_midnight(clock: ManualClock, *, less_us: int = 0) -> None:
    now = clock.now_us()
    clock.advance(us=DAY_US - now % DAY_US - less_us)


# --- what must hold, as scenarios: a wrong function or statement fails one of them ----------------


class Scene:
    """A store, its clock, and connections of other processes that call the functions themselves."""

    def __init__(self, store: PostgresStore, clock: ManualClock, place: str) -> None:
        self.store, self.clock, self.place = store, clock, place
        self.schema = store.place.schema

    def connect(self) -> psycopg.Connection[Any]:
        return psycopg.connect(self.place.partition("?")[0])

    def marked(self, line: psycopg.Connection[Any], key: str, moment: int) -> bool:
        """Mark on a connection whose transaction stays open. Whether the key was new."""
        ((number,),) = rows(self.store, self.place, "SELECT id FROM {s}.consumers WHERE consumer = 'clicks'")
        found = line.execute(
            f"SELECT * FROM {self.schema}.mark_in_slot(%s, %s, %s, %s, %s)",
            (moment, [UUID(bytes=digest((*SCOPE, key)))], [number], [DAY_US], [None]),
        ).fetchall()
        assert found != [(None,)]
        return bool(found)

    def waits(self, line: psycopg.Connection[Any]) -> bool:
        pid = line.info.backend_pid
        return bool(
            postgres.execute(
                self.place,
                f"SELECT 1 FROM pg_stat_activity WHERE pid = {pid} AND wait_event = 'advisory'",
            )
        )


def a_duplicate_is_known_in_every_partition(scene: Scene) -> None:
    """Also by one statement for many keys, some of them new."""
    assert mark(scene.store, "a", window_us=3 * DAY_US) == [True]
    for number in range(7):
        scene.clock.advance(us=9 * HOUR_US)
        assert mark(scene.store, "a", f"new {number}", window_us=3 * DAY_US) == [False, True]


def a_window_that_has_ended_makes_a_key_new(scene: Scene) -> None:
    assert mark(scene.store, "a", window_us=HOUR_US) == [True]
    scene.clock.advance(us=2 * HOUR_US)
    assert mark(scene.store, "a") == [True]  # in the same partition
    scene.clock.advance(us=25 * HOUR_US)
    assert mark(scene.store, "a") == [True]  # in the next one
    assert mark(scene.store, "a") == [False]


def a_longer_window_counts_to_its_end(scene: Scene) -> None:
    """The partition was first used for short windows alone, and is afterwards looked up for short ones."""
    mark(scene.store, "short", window_us=HOUR_US)
    mark(scene.store, "long", window_us=3 * DAY_US)
    for _ in range(2):
        scene.clock.advance(us=DAY_US)
        assert mark(scene.store, "long", window_us=HOUR_US) == [False]


def a_mark_that_runs_at_midnight_counts(scene: Scene) -> None:
    """Its transaction is open while the day ends: the next partition waits for it."""
    mark(scene.store, "today")
    to_midnight(scene.clock, less_us=S)
    early = scene.clock.now_us()
    scene.clock.advance(us=2 * S)

    def mark_patiently() -> list[bool]:
        while True:
            with suppress(StoreUnavailable):  # it waits for a second; a slow computer needs longer
                return mark(scene.store, "a")

    with scene.connect() as line, ThreadPoolExecutor(1) as thread:
        first = scene.marked(line, "a", early)
        other = thread.submit(mark_patiently)
        with scene.connect() as watcher:
            assert await_true(
                lambda: (
                    other.done()
                    or bool(
                        watcher.execute(
                            "SELECT 1 FROM pg_stat_activity WHERE wait_event = 'advisory'"
                            f" AND query LIKE '%%{scene.schema}%%next_slot%%'"
                        ).fetchall()
                    )
                ),
                10,
            )
        line.commit()
        assert [first, *other.result()] == [True, False]


def a_mark_that_waited_for_the_next_partition_uses_it(scene: Scene) -> None:
    """It came before the day ended, and waits behind the change: its partition is no longer the current one."""
    mark(scene.store, "today")
    to_midnight(scene.clock, less_us=S)
    early = scene.clock.now_us()
    with (
        scene.connect() as holder,
        scene.connect() as changer,
        scene.connect() as late,
        ThreadPoolExecutor(2) as threads,
    ):
        scene.marked(holder, "other", early)
        change = threads.submit(
            changer.execute, f"SELECT {scene.schema}.next_slot({early + 2 * S})", prepare=False
        )
        assert await_true(lambda: scene.waits(changer) or change.done(), 10)
        waiting = threads.submit(scene.marked, late, "a", early)
        assert await_true(lambda: scene.waits(late) or waiting.done(), 10)
        holder.commit()
        change.result()
        changer.commit()
        first = waiting.result()  # its transaction is still open
        scene.clock.advance(us=2 * S)
        other = threads.submit(mark, scene.store, "a")
        assert await_true(lambda: other.done() or _is_blocked(scene), 10)
        late.commit()
        assert [first, *other.result()] == [True, False]


def _is_blocked(scene: Scene) -> bool:
    return bool(
        postgres.execute(
            scene.place,
            "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
            f" AND query LIKE '%\"{scene.schema}\".mark_in_slot%'",
        )
    )


def an_id_from_the_future_is_marked_once(scene: Scene) -> None:
    """Its copies come when partitions before the time in it would not be looked into."""
    scene.store.send([Admit("", "timed", "mark", "uuid7")])
    now = scene.clock.now_us()
    ahead = uuid7(now + 30 * HOUR_US)
    assert mark(scene.store, uuid7(now), consumer="timed") == [True]
    assert mark(scene.store, ahead, consumer="timed", window_us=3 * DAY_US) == [True]
    for _ in range(3):
        scene.clock.advance(us=20 * HOUR_US)
        assert mark(scene.store, ahead, consumer="timed", window_us=3 * DAY_US) == [False]


def a_partition_stays_while_a_mark_in_it_runs(scene: Scene) -> None:
    """Nobody sees the mark yet, so that the partition looks empty."""
    assert scene.store.send([Purge()])[0].partitions == 0  # makes today's partition the current one
    early = scene.clock.now_us()
    with scene.connect() as line:
        assert scene.marked(line, "a", early)
        to_midnight(scene.clock)
        scene.clock.advance(us=6 * HOUR_US)
        (purged,) = scene.store.send([Purge()])
        line.commit()
        assert purged.partitions == 0
    assert mark(scene.store, "a") == [False]


def a_partition_goes_when_its_last_mark_is_over(scene: Scene) -> None:
    mark(scene.store, "a", window_us=3 * DAY_US)
    mark(scene.store, "b", window_us=HOUR_US)
    before = tables(scene.store, scene.place)
    scene.clock.advance(us=2 * DAY_US)
    scene.store.send([Purge()])
    assert mark(scene.store, "a", "b", window_us=HOUR_US) == [False, True]
    assert set(before[:1]) <= set(tables(scene.store, scene.place))
    scene.clock.advance(us=2 * DAY_US)
    assert scene.store.send([Purge(dry_run=True)])[0].count >= 2
    assert purge_fully(scene.store, scene.clock) >= 1
    assert before[0] not in tables(scene.store, scene.place)
    assert mark(scene.store, "a") == [True]


SCENARIOS: list[Callable[[Scene], None]] = [
    a_duplicate_is_known_in_every_partition,
    a_window_that_has_ended_makes_a_key_new,
    a_longer_window_counts_to_its_end,
    a_mark_that_runs_at_midnight_counts,
    a_mark_that_waited_for_the_next_partition_uses_it,
    an_id_from_the_future_is_marked_once,
    a_partition_stays_while_a_mark_in_it_runs,
    a_partition_goes_when_its_last_mark_is_over,
]

SHARED = "PERFORM pg_advisory_xact_lock_shared({schema}.slot_lock());"
ALONE = "PERFORM pg_advisory_xact_lock({schema}.slot_lock());"
READ = "    moment := coalesce(moment, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint);\n    IF current_slot"
MUTANTS: dict[str, tuple[str, str, Callable[[Scene], None]]] = {
    "a mark takes no lock": (SHARED, "", a_mark_that_runs_at_midnight_counts),
    "the change takes no lock": (ALONE, "", a_mark_that_runs_at_midnight_counts),
    "a mark keeps its lock for one statement": (
        SHARED,
        SHARED.replace("_xact", "") + SHARED.replace("_xact_lock", "_unlock"),
        a_mark_that_runs_at_midnight_counts,
    ),
    "the change takes a lock that marks share": (
        ALONE,
        SHARED,
        a_mark_that_runs_at_midnight_counts,
    ),
    "a mark reads the current partition before it has the lock": (
        "MOVED",
        "",
        a_mark_that_waited_for_the_next_partition_uses_it,
    ),
    "only the current partition is looked into": (
        "k.slot >= oldest AND",
        "k.slot >= current_slot AND",
        a_duplicate_is_known_in_every_partition,
    ),
    "a mark that is over counts": (
        "AND x.expires_at > moment",
        "",
        a_window_that_has_ended_makes_a_key_new,
    ),
    "a mark that is over is not replaced": (
        "DO UPDATE SET expires_at = excluded.expires_at\n    WHERE m.expires_at <= moment",
        "DO NOTHING",
        a_window_that_has_ended_makes_a_key_new,
    ),
    "the longest window is not noted": (
        "until = greatest(s.until, excluded.until)",
        "until = s.until",
        a_longer_window_counts_to_its_end,
    ),
    "the latest time in an id is not noted": (
        "newest = greatest(s.newest, excluded.newest)",
        "newest = s.newest",
        an_id_from_the_future_is_marked_once,
    ),
}


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.__name__)
def test_marks_in_partitions(
    scenario: Callable[[Scene], None], opaque: PostgresStore, clock: ManualClock, place: str
) -> None:
    scenario(Scene(opaque, clock, place))


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_function_is_noticed(
    name: str, opaque: PostgresStore, clock: ManualClock, place: str
) -> None:
    right, wrong, scenario = MUTANTS[name]
    schema = opaque.place.schema
    text = script(8, schema)
    quoted = f'"{schema}"'
    if right == "MOVED":
        lock = SHARED.replace("{schema}", quoted)
        assert lock in text
        changed = text.replace(f"    {lock}\n", "").replace(
            "    moment := coalesce", f"    {lock}\n    moment := coalesce", 1
        )
    else:
        changed = text.replace(right.replace("{schema}", quoted), wrong.replace("{schema}", quoted))
    assert changed != text
    for function in re.findall(r"^CREATE FUNCTION .*?^END \$\$;", changed, re.MULTILINE | re.DOTALL):
        postgres.execute(place, function.replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION"))
    with pytest.raises(AssertionError):
        scenario(Scene(opaque, clock, place))


def test_a_cleaner_that_waits_for_nobody_is_noticed(
    opaque: PostgresStore, clock: ManualClock, place: str
) -> None:
    right = "p.lower < (SELECT value::bigint"
    assert right in opaque.statements["partitions"]
    opaque.statements = {
        **opaque.statements,
        "partitions": opaque.statements["partitions"].replace(
            right, "p.upper <= t.now OR p.lower < (SELECT value::bigint"
        ),
    }
    with pytest.raises(AssertionError):
        a_partition_stays_while_a_mark_in_it_runs(Scene(opaque, clock, place))


# --- races --------------------------------------------------------------------------------------


def race(place: str, schema: str, boundary: int, number: int, barrier: threading.Barrier) -> Counter[str]:
    """Mark every key, in batches of any size, at times on both sides of midnight. Counts the firsts; `?`: no answer."""
    random.seed(number)
    store = PostgresStore(place.partition("?")[0], schema=schema)
    store.open()
    won: Counter[str] = Counter()
    keys = random.sample(KEYS, len(KEYS))
    try:
        barrier.wait(60)
        while keys:
            size = random.randint(1, 9)
            some, keys = keys[:size], keys[size:]
            store.clock = ManualClock(boundary + random.randint(-5, 5) * S)
            try:
                won.update(key for key, first in zip(some, mark(store, *some), strict=True) if first)
            except StoreUnavailable:
                won.update(f"?{key}" for key in some)
    finally:
        store.close()
    return won


@pytest.mark.parametrize("kills", [False, True], ids=["sound", "connections killed"])
def test_racing_callers_around_midnight_have_one_first_per_key(
    opaque: PostgresStore, clock: ManualClock, place: str, *, kills: bool
) -> None:
    """Their clocks differ, so that some change the partition while others still mark for the day before."""
    schema = opaque.place.schema
    midnight = clock.now_us() + DAY_US - clock.now_us() % DAY_US
    for day in range(3):
        boundary = midnight + day * DAY_US
        clock.advance(us=boundary - 6 * S - clock.now_us())
        known = mark(opaque, "before midnight")  # makes the day before the current one
        assert known == [True]
        barrier = threading.Barrier(6)
        stop = threading.Event()
        with ThreadPoolExecutor(7) as threads:
            runs = [threads.submit(race, place, schema, boundary, number, barrier) for number in range(6)]
            if kills:
                threads.submit(_kill, place, schema, stop)
            try:
                won = sum((run.result() for run in runs), Counter[str]())
            finally:
                stop.set()
        assert max(won[key] for key in KEYS) == 1
        assert all(won[key] or won[f"?{key}"] for key in KEYS)  # without an answer, it is marked or not
        assert not any(mark(opaque, *(key for key in KEYS if won[key])))
        clock.advance(us=boundary + 20 * HOUR_US - clock.now_us())
        rows(opaque, place, "DELETE FROM {s}.timed_marks RETURNING 1")


def _kill(place: str, schema: str, stop: threading.Event) -> None:
    """Terminate backends that mark in the schema, until told to stop."""
    while not stop.wait(0.02):
        postgres.execute(
            place,
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
            f" AND query LIKE '%\"{schema}\".mark_in_slot%' AND state = 'active' LIMIT 1",
        )


def test_the_cleaner_may_be_killed_between_any_two_steps(
    opaque: PostgresStore, clock: ManualClock, place: str
) -> None:
    schema = opaque.place.schema
    for steps in range(100):
        key = f"kept {steps}"
        assert mark(opaque, key, window_us=12 * HOUR_US) == [True]
        clock.advance(us=DAY_US)  # a partition to make, another to become the current one, and one to remove
        mark(opaque, f"next {steps}", window_us=12 * HOUR_US)
        mortal = Mortal(place.partition("?")[0], schema=schema, clock=opaque.clock)
        mortal.open()
        mortal.left = steps
        try:
            mortal.send([Purge()])
            break
        except Killed:
            pass
        finally:
            mortal.close()
        assert mark(opaque, f"next {steps}", window_us=12 * HOUR_US) == [False]
    assert steps >= 15
    purge_fully(opaque, clock)
    noted = rows(opaque, place, "SELECT name FROM {s}.partitions WHERE parent = 'timed_marks' ORDER BY lower")
    assert [name for (name,) in noted] == tables(opaque, place)
    assert 8 <= len(noted) <= 10
    assert len(rows(opaque, place, "SELECT 1 FROM {s}.mark_slots")) <= 2


# --- look-ups ------------------------------------------------------------------------------------


def plans(store: PostgresStore, place: str, consumer: str, keys: list[str], window_us: int) -> list[Any]:
    """Mark, and return the plans of the statements inside the function."""
    notices: list[Any] = []
    with psycopg.connect(place.partition("?")[0], autocommit=True) as line:
        line.add_notice_handler(lambda notice: notices.append(notice.message_primary))
        for setting in ("log_min_duration = 0", "log_nested_statements = on", "log_analyze = on"):
            line.execute(f"LOAD 'auto_explain'; SET auto_explain.{setting}")
        line.execute("SET auto_explain.log_format = json; SET auto_explain.log_level = notice")
        ((number,),) = rows(store, place, f"SELECT id FROM {{s}}.consumers WHERE consumer = '{consumer}'")
        times = [None] * len(keys)
        if consumer == "timed":
            times = [int(key[:8] + key[9:13], 16) * 1000 for key in keys]  # type: ignore[misc]
        assert store.clock is not None
        line.execute(
            f"SELECT * FROM {store.place.schema}.mark_in_slot(%s, %s, %s, %s, %s)",
            (
                store.clock.now_us(),
                [UUID(bytes=digest(("", consumer, key))) for key in keys],
                [number] * len(keys),
                [window_us] * len(keys),
                times,
            ),
        ).fetchall()
    return [
        json.loads(text[text.index("{") :])
        for text in notices
        if "INSERT INTO" in text and "timed_marks" in text
    ]


def partitions_read(plan: dict[str, Any]) -> set[str]:
    found = {plan["Relation Name"]} if "Relation Name" in plan and plan.get("Actual Loops") else set()
    for part in plan.get("Plans", ()):
        found |= partitions_read(part)
    return {
        name for name in found if re.match(r"marks_\d", name) and plan.get("Node Type") != "ModifyTable"
    } | ({name for part in plan.get("Plans", ()) for name in partitions_read(part)})


@pytest.mark.parametrize(
    ("consumer", "days", "read"),
    [("clicks", 0.5, 2), ("clicks", 1, 2), ("clicks", 3, 4), ("timed", 3, 1)],
    ids=["half a day", "a day", "three days", "three days, uuid7 on time"],
)
def test_a_look_up_reads_the_partitions_of_its_window(
    opaque: PostgresStore, clock: ManualClock, place: str, consumer: str, days: float, read: int
) -> None:
    window_us = round(days * DAY_US)
    opaque.send([Admit("", "timed", "mark", "uuid7")])
    for _ in range(6):
        clock.advance(us=DAY_US)
        mark(opaque, f"{clock.now_us()}", window_us=window_us)
        mark(opaque, uuid7(clock.now_us()), consumer="timed", window_us=window_us)
    keys = [uuid7(clock.now_us() - 3600 * S) for _ in range(20)]
    (plan,) = plans(opaque, place, consumer, keys, window_us)
    assert len(partitions_read(plan["Plan"])) <= read


# --- the rest of the store and the client ---------------------------------------------------------


def test_marks_in_partitions_are_found_forgotten_and_counted(
    opaque: PostgresStore, clock: ManualClock, place: str
) -> None:
    mark(opaque, "a", "b")
    to_midnight(clock)
    mark(opaque, "c")
    (found, absent) = opaque.send([Lookup((*SCOPE, "a")), Lookup((*SCOPE, "z"))])
    assert isinstance(found, Record)
    assert absent == Absent()
    assert opaque.send([Count()])[0].consumers == {"clicks": 3}
    assert isinstance(opaque.send([Forget((*SCOPE, "a"))])[0], Forgotten)
    assert mark(opaque, "a", "b", "c") == [True, False, False]
    assert rows(opaque, place, "SELECT count(*)::int FROM {s}.marks") == [(0,)]


def test_what_partitions_cannot_hold_is_refused(opaque: PostgresStore) -> None:
    opaque.send([Admit("", "timed", "mark", "uuid7")])
    refresh, bad = opaque.send([Mark(*SCOPE, ["a"], DAY_US, True), Mark("", "timed", ["order-17"], DAY_US)])
    assert isinstance(refresh, Unavailable)
    assert isinstance(refresh.error, UsageError)
    assert isinstance(bad, Unavailable)
    assert isinstance(bad.error, KeyInvalid)
    (switched,) = opaque.send([SwitchMode(*SCOPE, "lease")])
    assert isinstance(switched, Unavailable)
    assert isinstance(switched.error, PolicyInvalid)


def test_another_isolation_level_is_refused(opaque: PostgresStore, clock: ManualClock, place: str) -> None:
    """A snapshot from before the lock would not see all earlier marks."""
    mark(opaque, "a")
    scene = Scene(opaque, clock, place)
    with scene.connect() as line:
        line.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        with pytest.raises(psycopg.errors.FeatureNotSupported, match="READ COMMITTED"):
            scene.marked(line, "a", clock.now_us())


def test_marks_after_a_month_without_a_cleaner(opaque: PostgresStore, clock: ManualClock, place: str) -> None:
    mark(opaque, "a", window_us=7 * DAY_US)
    clock.advance(us=30 * DAY_US)
    assert mark(opaque, "a") == [True]
    assert mark(opaque, "a") == [False]
    purge_fully(opaque, clock)
    assert len(tables(opaque, place)) <= 10
    assert mark(opaque, "a") == [False]


def test_a_role_that_may_not_make_tables_says_who_may(
    opaque: PostgresStore, clock: ManualClock, place: str
) -> None:
    schema = opaque.place.schema
    name = f"r_{schema}"[:40]
    postgres.execute(
        place,
        f"CREATE ROLE {name} LOGIN; GRANT USAGE ON SCHEMA {schema} TO {name};"
        f" GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO {name};"
        f" GRANT USAGE ON ALL SEQUENCES IN SCHEMA {schema} TO {name}",
    )
    servant = from_url(place.replace("//semel@", f"//{name}@"))
    servant.clock = opaque.clock
    try:
        servant.open()
        assert mark(servant, "a") == [True]
        to_midnight(clock)
        assert mark(servant, "a") == [False]  # it may make another partition the current one
        clock.advance(us=30 * DAY_US)
        with pytest.raises(StoreUnavailable, match="semel purge"):
            mark(servant, "a")
    finally:
        servant.close()
        postgres.execute(place, f"DROP OWNED BY {name}; DROP ROLE {name}")


def test_a_clock_that_goes_back_changes_nothing(
    tmp_path: Path, opaque: PostgresStore, clock: ManualClock
) -> None:
    to_midnight(clock, less_us=S)
    early = ManualClock(clock.now_us())
    clock.advance(us=2 * S)
    assert mark(opaque, "a") == [True]
    back = places.make(tmp_path, early)
    back.open()
    assert mark(back, "a", "b") == [False, True]
    back.close()
    assert mark(opaque, "a", "b") == [False, False]


def test_clients_of_marks_declare_their_ids(place: str) -> None:
    with semel.open(place, consumer="clicks", mode="mark", ids="opaque") as once:
        assert (once.mark("a"), once.mark("a")) == (True, False)
        assert once.mark_many(["a", "b", "b"]) == [False, True, False]
        assert once.run("c", lambda: 1) == semel.Done(1, kept=False)
    with semel.open(place, consumer="orders", mode="mark", ids="uuid7") as once:
        key = semel.keys.uuid7("orders")
        assert (once.mark(key), once.mark(key)) == (True, False)
        with pytest.raises(KeyInvalid, match="uuid7"):
            once.mark("order-17")
    client = semel.open(place, consumer="clicks", mode="mark")
    with pytest.raises(IdsMismatch):
        client.mark("a")
    client.close()
    refused: list[dict[str, Any]] = [
        {"mode": "lease", "policy": semel.Policy(late="hold")},
        {"mode": "inbox"},
        {"mode": "mark", "policy": semel.Policy(refresh_on_sight=True)},
    ]
    for options in refused:
        with pytest.raises(PolicyInvalid):
            semel.open(place, consumer="refused", ids="opaque", **options)


def test_marks_of_clients_in_an_event_loop(place: str) -> None:
    async def main() -> None:
        async with semel.aopen(place, consumer="orders", mode="mark", ids="uuid7") as once:
            keys = [semel.keys.uuid7("orders") for _ in range(5)]
            assert await asyncio.gather(*(once.mark(key) for key in keys * 2)) == [True] * 5 + [False] * 5
            with pytest.raises(KeyInvalid, match="uuid7"):
                await once.mark("order-17")

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["opaque", "uuid7"])
@pytest.mark.parametrize("url", ["memory:", "sqlite:///{folder}/semel.db"])
def test_other_stores_take_the_declaration(tmp_path: Path, kind: str, url: str) -> None:
    with semel.open(url.format(folder=tmp_path), consumer="clicks", mode="mark", ids=kind) as once:
        key = semel.keys.uuid7("clicks")
        assert (once.mark(key), once.mark(key)) == (True, False)
        assert once.records.lookup(key) is not None
        once.records.forget(key)
        assert once.mark(key)
        if kind == "uuid7":
            with pytest.raises(KeyInvalid, match="uuid7"):
                once.mark("order-17")
