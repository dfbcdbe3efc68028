"""A claim or settle that comes alone takes a short way: the same answers, the same promises, fewer statements."""

import json
import os
import random
import sqlite3
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from semel.core.commands import Admit, Claim, Granted, Known, Purge, Renew, Settle
from semel.errors import RecordCorrupt, StoreFull, StoreUnavailable
from semel.stores.sqlite import SqliteStore
from semel.testing import ManualClock
from semel.types import Busy, Completed, ErrorInfo, Lost, Mismatch, Unavailable
from tests.stores.sqlite.tools import (
    HOUR,
    LEASE,
    SECOND,
    claim,
    finish,
    hold,
    line,
    lookup,
    named,
    process,
    say,
    settle,
)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[SqliteStore]:
    """A store that has met its consumer: from then on single items take the short way."""
    store = SqliteStore(tmp_path / "a.db", synchronous="NORMAL", clock=clock)
    finish(store, "warm")
    yield store
    store.close()


@pytest.fixture
def full_way(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The items that took the full way."""
    taken: list[Any] = []
    write = store._write

    def noted(connection: sqlite3.Connection, items: Any) -> Any:
        taken.extend(items)
        return write(connection, items)

    monkeypatch.setattr(store, "_write", noted)
    return taken


def raw(store: SqliteStore, statement: str, *parameters: Any) -> list[Any]:
    connection = sqlite3.connect(store.path)
    with connection:
        rows = connection.execute(statement, parameters).fetchall()
    connection.close()
    return rows


# --- which way ---


def test_the_plain_case_takes_the_short_way(store: SqliteStore, full_way: list[Any]) -> None:
    item, granted = hold(store, "k", fingerprint=b"\1one", event_type="order")
    assert granted == Granted(granted.fence, 1, granted.fence + LEASE, granted.fence)
    (settled,) = store.send([settle(item, granted, b"j1")])
    assert settled == Completed(at_us=settled.at_us)
    assert granted.fence < settled.at_us
    (known,) = store.send([claim("k", fingerprint=b"\1one")])
    assert (known.state, known.value, known.fence) == ("done", b"j1", granted.fence)
    assert (known.settled_at_us, known.first_seen_us) == (settled.at_us, granted.fence)
    item, granted = hold(store, "f")
    store.send([settle(item, granted, b"e", "failed")])
    assert store.send([claim("f")])[0].state == "failed"
    assert full_way == []
    assert lookup(store, "k").event_type == "order"
    assert lookup(store, "k").expires_at_us == settled.at_us + item.window_us


def test_everything_else_takes_the_full_way(
    store: SqliteStore, clock: ManualClock, full_way: list[Any]
) -> None:
    held, granted = hold(store, "held")
    done, its = hold(store, "done", fingerprint=b"\1one")
    store.send([settle(done, its, b"j1")])
    assert full_way == []
    others: list[tuple[Any, Any]] = [
        (claim("held"), Busy),
        (held, Granted),  # its own, repeated
        (claim("done", fingerprint=b"\1two"), Mismatch),
        (settle(held, granted, to="released"), Completed),
        (settle(held, granted), Lost),  # released
        (claim("held"), Granted),  # attempt 2
        (claim("j", journal=b"p"), Granted),
        (claim("m", meta=b"{}"), Granted),
        (claim("q", quarantine=True), Granted),
        (claim("s", sliding=True), Granted),
        (settle(done, its, b"j1"), Completed),  # already
        (Renew(held.id, held.owner, granted.fence, LEASE), Lost),
        (settle(claim("never"), its), Completed),  # recreated
        (settle(held, Granted(2**70, 1, 0, 0)), Lost),
        (claim("\ud800"), Unavailable),
    ]
    for item, answer in others:
        assert isinstance(store.send([item])[0], answer), item
    assert full_way == [item for item, _ in others]
    full_way.clear()
    clock.advance(us=25 * HOUR)
    assert hold(store, "done")[1].fence > its.fence  # expired, and not yet purged
    assert len(full_way) == 1


def test_consumers_with_a_kind_of_ids_take_the_full_way(store: SqliteStore, full_way: list[Any]) -> None:
    store.send([Admit("", "timed", "lease", "uuid7")])
    full_way.clear()
    key = "01989c2e-2f4b-7c31-9a52-0f6a7d1c2b3e"
    item = Claim(("", "timed", key), os.urandom(16), LEASE, HOUR)
    (granted,) = store.send([item])
    store.send([settle(item, granted)])
    again = Claim(item.id, os.urandom(16), LEASE, HOUR)
    assert isinstance(store.send([again])[0], Known)
    assert full_way == [item, settle(item, granted), again]
    assert raw(store, "SELECT length(digest) FROM semel_records WHERE key = ?", key) == [(22,)]


def test_a_duplicate_writes_nothing_and_waits_for_nobody(store: SqliteStore) -> None:
    finish(store, "k", b"j1")
    writer = sqlite3.connect(store.path, isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    log = Path(store.path + "-wal")
    before = log.read_bytes()
    assert store.send([claim("k")])[0].value == b"j1"
    assert log.read_bytes() == before
    writer.execute("ROLLBACK")
    writer.close()


def test_both_ways_answer_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same seeded items one by one on two files, of which one knows the full way only."""
    chance = random.Random(11)
    clocks = ManualClock(), ManualClock()
    short, full = (
        SqliteStore(tmp_path / f"{number}.db", synchronous="NORMAL", clock=clock)
        for number, clock in enumerate(clocks)
    )
    for store in (short, full):
        finish(store, "warm")
    assert full._singles is not None
    monkeypatch.setattr(full._singles, "answer", lambda _item: None)
    held: list[tuple[Claim, Granted, Granted]] = []
    kinds: Counter[str] = Counter()
    for _ in range(1500):
        step = chance.choice([SECOND, SECOND, 40 * SECOND, 2 * HOUR])
        for clock in clocks:
            clock.advance(us=step)
        if held and chance.random() < 0.6:
            item, one, other = chance.choice(held[-8:])
            to = chance.choice(["done", "done", "done", "failed", "released", "unknown"])
            error = None if to == "done" else chance.choice([None, ErrorInfo("app.Refused", "no")])
            items: tuple[Any, ...] = tuple(
                msgspec.structs.replace(settle(item, granted, b"j1", to), error=error)
                for granted in (one, other)
            )
        else:
            new = claim(
                f"k{chance.randint(0, 40)}",
                chance.randbytes(16),
                window_us=chance.choice([0, SECOND, HOUR]),
                fingerprint=chance.choice([None, b"\1one", b"\1two", b"\2one"]),
                event_type=chance.choice(["", "order"]),
                event_time_us=chance.choice([None, clocks[0].now_us() - 2 * HOUR]),
                refuse_late=chance.random() < 0.5,
                quarantine=chance.random() < 0.1,
                sliding=chance.random() < 0.1,
                journal=chance.choice([None] * 9 + [b"p"]),
                meta=chance.choice([None] * 9 + [b"{}"]),
            )
            items = new, new
        (mine,), (theirs,) = short.send([items[0]]), full.send([items[1]])
        assert rounded(mine) == rounded(theirs), items
        assert rounded(lookup(short, items[0].id[2])) == rounded(lookup(full, items[0].id[2]))
        kinds[type(mine).__name__] += 1
        if isinstance(mine, Granted):
            held.append((items[0], mine, theirs))
        if chance.random() < 0.05:
            assert short.send([Purge()])[0].count == full.send([Purge()])[0].count
    assert {"Granted", "Known", "Busy", "Mismatch", "Late", "Unknown", "Completed", "Lost"} <= kinds.keys()
    short.close()
    full.close()


def rounded(answer: Any) -> Any:
    """The answer without the microseconds by which the two clocks differ."""
    if not isinstance(answer, msgspec.Struct):
        return answer
    fields = {name: getattr(answer, name) for name in answer.__struct_fields__}
    for name, value in fields.items():
        if type(value) is int and abs(value) > SECOND // 10:
            fields[name] = round(value, -5)
        elif type(value) is float:
            fields[name] = round(value, 1)
        elif name == "errors":
            fields[name] = tuple(rounded(error) for error in value)
    return type(answer), fields


@pytest.mark.parametrize(
    "damage",
    ["state = 5", "state = 200", "state = 'done'", "owner = 'me'", "fence = 'x'", "value = 'text'", "state = 65",
     "attempt = -1", "attempt = 'x'", "fence = -1861920000000001", "fingerprint = 'x'", "event_type = X'00'",
     "settled = 'x'", "seen = 'x'", "state = 2, owner = X''"],
)  # fmt: skip
def test_a_broken_row_does_not_answer(store: SqliteStore, damage: str) -> None:
    finish(store, "broken")
    raw(store, f"UPDATE semel_records SET {damage} WHERE key = 'broken'")
    (answer,) = store.send([claim("broken")])
    assert isinstance(answer, Unavailable)
    assert isinstance(answer.error, RecordCorrupt)


# --- beside the other way, and beside other objects ---


def test_single_items_and_batches_see_what_the_other_wrote(store: SqliteStore) -> None:
    batch = [claim(f"b{number}") for number in range(3)]
    granted = store.send(batch)
    item, alone = hold(store, "alone")
    more = [claim(f"c{number}") for number in range(3)]
    assert all(isinstance(answer, Granted) for answer in store.send(more))
    store.send([settle(batch[0], granted[0], b"j0")])
    answers = store.send([settle(item, alone, b"j1"), settle(batch[0], granted[0], b"j0"), claim("b0")])
    assert answers[0] == Completed(at_us=answers[0].at_us)
    assert answers[1].already
    assert answers[2].value == b"j0"
    assert store.send([claim("alone")])[0].value == b"j1"
    renewed = store.send([Renew(batch[1].id, batch[1].owner, granted[1].fence, HOUR)])[0]
    assert lookup(store, "b1").lease_until_us == renewed.lease_until_us
    assert raw(store, "SELECT count(DISTINCT id) FROM semel_records") == [(8,)]


class Interposed:
    """A connection that lets another caller in before it begins a transaction."""

    def __init__(self, connection: sqlite3.Connection, let_in: Callable[[], object]) -> None:
        self.connection = connection
        self.let_in = let_in

    @property
    def in_transaction(self) -> bool:
        return self.connection.in_transaction

    def execute(self, statement: str, *parameters: Any) -> sqlite3.Cursor:
        if statement.startswith("BEGIN"):
            self.let_in()
        return self.connection.execute(statement, *parameters)


@pytest.mark.parametrize("settles", [False, True])
def test_one_claim_wins_where_another_comes_between_look_and_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, settles: bool
) -> None:
    one, two = (SqliteStore(tmp_path / "a.db", synchronous="NORMAL") for _ in range(2))
    finish(one, "warm")
    two.open()
    assert two._singles is not None
    let_in = partial(finish if settles else hold, one, "k")
    monkeypatch.setattr(two._singles, "_connection", Interposed(two._singles._connection, let_in))
    assert isinstance(two.send([claim("k")])[0], Known if settles else Busy)
    assert raw(one, "SELECT count(*) FROM semel_records WHERE key = 'k'") == [(1,)]
    one.close()
    two.close()


def test_a_late_settle_after_a_takeover_is_lost(store: SqliteStore, clock: ManualClock) -> None:
    zombie, first = hold(store, "k")
    clock.advance(us=LEASE)
    heir, second = hold(store, "k")
    assert (second.attempt, second.fence > first.fence) == (2, True)
    assert store.send([settle(zombie, first, b"old")]) == [Lost()]
    assert isinstance(store.send([settle(heir, second, b"new")])[0], Completed)
    assert store.send([settle(zombie, first, b"old")]) == [Lost()]
    assert store.send([claim("k")])[0].value == b"new"


def test_a_late_settle_of_the_same_owner_is_lost_too(store: SqliteStore, clock: ManualClock) -> None:
    item, first = hold(store, "k")
    clock.advance(us=LEASE)
    (second,) = store.send([item])  # a retry of the call, after its lease
    assert second.attempt == 2
    assert store.send([settle(item, first, b"old")]) == [Lost()]
    assert isinstance(store.send([settle(item, second, b"new")])[0], Completed)


def test_a_settle_after_its_lease_counts_while_nobody_took_over(
    store: SqliteStore, clock: ManualClock, full_way: list[Any]
) -> None:
    item, granted = hold(store, "k")
    clock.advance(us=LEASE + 5 * SECOND)
    assert isinstance(store.send([settle(item, granted, b"j1")])[0], Completed)
    assert full_way == []
    assert lookup(store, "k").value == b"j1"


def test_a_settle_with_another_window_moves_the_purge_index(store: SqliteStore, full_way: list[Any]) -> None:
    item, granted = hold(store, "k")
    short = msgspec.structs.replace(settle(item, granted), window_us=HOUR)
    assert isinstance(store.send([short])[0], Completed)
    assert full_way == [short]
    ((purge_at, expires_at),) = raw(
        store, "SELECT purge_at, (fence + expires) / 60000000 FROM semel_records WHERE key = 'k'"
    )
    assert 0 <= purge_at - expires_at <= 3


def test_two_objects_share_one_time_while_the_clock_steps_back(tmp_path: Path) -> None:
    clock = ManualClock()
    one, two = (SqliteStore(tmp_path / "a.db", clock=clock) for _ in range(2))
    finish(one, "warm")
    held, granted = hold(two, "held")
    last = granted.fence
    for number in range(5):
        item, answer = hold(one, f"one{number}")
        assert answer.fence > last
        clock.step_back(us=HOUR)
        (settled,) = two.send([settle(item, answer, b"j1")])  # one settles what the other claimed
        assert settled.at_us > answer.fence
        clock.step_back(us=HOUR)
        (known,) = one.send([claim(f"one{number}")])
        assert known.settled_at_us == settled.at_us
        assert abs(known.rest_us - item.window_us) < SECOND
        last = hold(two, f"two{number}")[1].fence
        assert last > settled.at_us
        assert raw(one, "SELECT last_us FROM semel_clock") == [(last,)]
    assert last - granted.fence < SECOND
    assert isinstance(two.send([settle(held, granted)])[0], Completed)
    one.close()
    two.close()


def test_an_object_behind_remembers_nothing_for_longer_than_the_others(tmp_path: Path) -> None:
    clock = ManualClock()
    one, two = (SqliteStore(tmp_path / "a.db", clock=clock) for _ in range(2))
    finish(two, "warm")
    finish(one, "short", window_us=10 * SECOND)
    assert isinstance(two.send([claim("short")])[0], Known)
    clock.advance(us=20 * SECOND)
    hold(one, "later")
    clock.step_back(us=20 * SECOND)  # by this clock alone the record would still stand
    assert isinstance(two.send([claim("short")])[0], Granted)
    one.close()
    two.close()


def test_listeners_hear_of_a_single_settle_once(store: SqliteStore) -> None:
    heard: list[str] = []
    store.watch(lambda record_id: heard.append(record_id[2]))
    item, granted = hold(store, "k")
    store.send([claim("k")])
    store.send([settle(item, granted)])
    store.send([settle(item, granted)])
    assert heard == ["k"]


# --- errors ---


def test_a_held_lock_is_waited_for_only_so_long(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "a.db", busy_wait_s=0.2)
    finish(store, "known", b"j1")
    item, granted = hold(store, "held")
    writer = sqlite3.connect(store.path, isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    for refused in (claim("new"), settle(item, granted)):
        with pytest.raises(StoreUnavailable, match=r"has held the lock of .* for 0\.2 s"):
            store.send([refused])
    assert store.send([claim("known")])[0].value == b"j1"
    writer.execute("ROLLBACK")
    writer.close()
    assert isinstance(store.send([settle(item, granted)])[0], Completed)
    finish(store, "new")
    store.close()


def test_a_held_lock_is_waited_for(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "a.db", busy_wait_s=60)
    finish(store, "warm")
    writer = sqlite3.connect(store.path, isolation_level=None, check_same_thread=False)
    writer.execute("BEGIN IMMEDIATE")
    release = threading.Timer(0.2, lambda: writer.execute("ROLLBACK"))
    release.start()
    finish(store, "k")
    release.join()
    writer.close()
    assert lookup(store, "k").state == "done"
    store.close()


def test_a_full_disk_refuses_what_is_new_and_takes_what_is_settled(store: SqliteStore) -> None:
    assert store._writer is not None
    item, granted = hold(store, "held")
    (pages,) = store._writer.execute("PRAGMA page_count").fetchone()
    store._writer.execute(f"PRAGMA max_page_count = {pages}")
    answers = (store.send([claim(f"k{number}", event_type="x" * 1000)])[0] for number in range(1000))
    answer = next(answer for answer in answers if not isinstance(answer, Granted))
    assert isinstance(answer, Unavailable)
    assert isinstance(answer.error, StoreFull)
    assert isinstance(store.send([settle(item, granted)])[0], Completed)
    assert isinstance(store.send([claim("held")])[0], Known)
    store._writer.execute("PRAGMA max_page_count = 100000")
    finish(store, "new")
    assert lookup(store, "new").state == "done"


def test_a_file_that_cannot_be_written_says_so(store: SqliteStore) -> None:
    assert store._writer is not None
    item, granted = hold(store, "held")
    store._writer.execute("PRAGMA query_only = 1")
    for refused in (claim("new"), settle(item, granted)):
        with pytest.raises(StoreUnavailable, match="cannot be written"):
            store.send([refused])
    assert isinstance(store.send([claim("warm")])[0], Known)
    store._writer.execute("PRAGMA query_only = 0")
    assert isinstance(store.send([settle(item, granted)])[0], Completed)


@pytest.mark.parametrize("new", [True, False])
def test_an_interrupt_leaves_no_transaction_behind(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch, *, new: bool
) -> None:
    item, granted = hold(store, "held")
    store.send([claim("a"), claim("b")])

    def interrupted(_last_us: int, _offset_us: int) -> tuple[int, int]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(store.clock, "tick", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.send([claim("k") if new else settle(item, granted)])
    assert store._writer is not None
    assert not store._writer.in_transaction
    assert all(isinstance(answer, Granted) for answer in store.send([claim("k"), claim("l")]))
    assert isinstance(store.send([settle(item, granted)])[0], Completed)


# --- other processes ---

DYING = """
import os, sys
from semel.core.commands import Claim
from semel.stores.sqlite import SqliteStore
store = SqliteStore(sys.argv[1])
store.open()
item = Claim(("", "billing", "k"), os.urandom(16), 50_000, 10**10)
(granted,) = store.send([item])
print(item.owner.hex(), granted.fence, granted.lease_until_us, flush=True)
input()
"""


@pytest.mark.slow
def test_killed_between_claim_and_settle(tmp_path: Path) -> None:
    with SqliteStoreOf(tmp_path) as store:
        with process(DYING, tmp_path / "a.db") as child:
            owner, fence, lease_until = line(child).split()
            child.kill()
            child.wait()
        heir, granted = await_takeover(store)
        assert granted.attempt == 2
        assert granted.fence > int(fence)
        assert granted.fence >= int(lease_until)
        dead = Settle(named("k"), bytes.fromhex(owner), int(fence), "done", b"old", 10**10, 50_000)
        assert store.send([dead]) == [Lost()]
        assert isinstance(store.send([settle(heir, granted, b"new")])[0], Completed)
        assert store.send([dead]) == [Lost()]
        assert store.send([claim("k")])[0].value == b"new"


class SqliteStoreOf:
    """A store that has met its consumer, closed at the end."""

    def __init__(self, folder: Path) -> None:
        self.store = SqliteStore(folder / "a.db")

    def __enter__(self) -> SqliteStore:
        finish(self.store, "warm")
        return self.store

    def __exit__(self, *_error: object) -> None:
        self.store.close()


def await_takeover(store: SqliteStore) -> tuple[Claim, Granted]:
    """Claim `k` until the lease of its owner is over."""
    while True:
        item = claim("k")
        (answer,) = store.send([item])
        if isinstance(answer, Granted):
            return item, answer
        assert isinstance(answer, Busy)


RACING = """
import json, os, random, sys, threading
from semel.core.commands import Claim, Granted, Settle
from semel.stores.sqlite import SqliteStore
from semel.types import Completed
path, seed = sys.argv[1], int(sys.argv[2])
KEYS = [f"k{number}" for number in range(30)]
store = SqliteStore(path, synchronous="NORMAL", busy_wait_s=60)
store.open()
print("ready", flush=True)
input()
grants, ends = [], []

def work(chance):
    for _ in range(60):
        some = chance.sample(KEYS, chance.choice([1, 1, 1, 1, 5]))
        items = [Claim(("", "billing", key), os.urandom(16), 2_000, 10**10) for key in some]
        mine = [pair for pair in zip(items, store.send(items)) if isinstance(pair[1], Granted)]
        grants.extend((item.id[2], answer.fence, answer.attempt) for item, answer in mine)
        # Some never settle, some do so when their lease is over: others take over from them.
        settles = [
            Settle(item.id, item.owner, answer.fence, "done", str(answer.fence).encode(), 10**10, 2_000)
            for item, answer in mine if chance.random() < 0.3
        ]
        if not settles:
            continue
        parts = [settles] if chance.random() < 0.3 else [[each] for each in settles]
        for part in parts:
            for item, answer in zip(part, store.send(part)):
                if isinstance(answer, Completed):
                    ends.append((item.id[2], item.fence))

threads = [threading.Thread(target=work, args=(random.Random(f"{seed}-{number}"),)) for number in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(json.dumps([grants, ends]), flush=True)
store.close()
"""


@pytest.mark.slow
def test_racing_single_items_and_batches_of_threads_and_processes(tmp_path: Path) -> None:
    """Short leases, many takeovers: fences grow with the attempts, and each key is completed once."""
    with SqliteStoreOf(tmp_path) as store, ExitStack() as stack:
        racers = [stack.enter_context(process(RACING, tmp_path / "a.db", seed)) for seed in range(3)]
        assert [line(racer) for racer in racers] == ["ready"] * 3
        for racer in racers:
            say(racer)
        results = [json.loads(line(racer)) for racer in racers]
        grants: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for key, fence, attempt in (each for result in results for each in result[0]):
            grants[key].append((fence, attempt))
        ends = Counter(key for result in results for key, _ in result[1])
        fence_at_end = {key: fence for result in results for key, fence in result[1]}
        assert ends
        assert set(ends.values()) == {1}
        assert sum(len(each) for each in grants.values()) > len(grants)  # there were takeovers
        for key, each in grants.items():
            each.sort()
            assert [attempt for _, attempt in each] == list(range(1, len(each) + 1)), key
            record = lookup(store, key)
            if key in ends:
                assert each[-1][0] == fence_at_end[key] == record.fence
                assert record.value == str(record.fence).encode()
            else:
                assert (record.state, record.fence) == ("claimed", each[-1][0])
