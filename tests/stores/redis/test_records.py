"""What lies in the server: keys, expiry, sizes, and what can be listed of it."""

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis as driver

from semel.codec import encode
from semel.core.commands import (
    Admit,
    Count,
    Forget,
    Granted,
    Known,
    Lookup,
    Mark,
    Purge,
    ReadSettings,
    Renew,
    Scan,
    Settle,
    SetWindow,
    SwitchMode,
)
from semel.errors import PolicyInvalid, StoreRefused
from semel.stores.redis import RedisStore, calls, listing
from semel.stores.redis.records import NULL
from semel.testing.contract.payloads import KEYS
from semel.types import Completed, Record, Unavailable
from tests.services import redis
from tests.stores.redis.tools import MINUTE_US, S, claim, done, finish, kinds, opened, spied

NAME = re.compile(
    rb"t[0-9a-f]{16}:\{\d{1,2}\}(?::.{16}|m.{16}|epoch|journal|windows|modes|scopes)", re.DOTALL
)
DAY_US = 24 * 3600 * S
WIDTH_MAX_BYTES = 180


@pytest.fixture
def at(tmp_path: Path) -> str:
    return redis.place(tmp_path)


@pytest.fixture
def store(at: str) -> Iterator[RedisStore]:
    with opened(at) as one:
        yield one


@pytest.fixture
def raw(at: str) -> Iterator[driver.Redis]:
    with driver.Redis.from_url(at.partition("?")[0]) as client:
        yield client


def all_keys(raw: driver.Redis, at: str) -> list[bytes]:
    prefix = at.partition("prefix=")[2].encode()
    found: Any = raw.keys(prefix + b":*")
    return list(found)


def key_of(raw: driver.Redis, at: str, key: str) -> bytes:
    from semel.core.ids import digest

    each = digest(("", "consumer", key))
    return b"%b:{%d}:%b" % (at.partition("prefix=")[2].encode(), each[0] & 63, each)


def test_nothing_in_a_key_reaches_the_servers_names(store: RedisStore, raw: driver.Redis, at: str) -> None:
    finish(store, *KEYS)
    store.send([Mark("{tenant}", "*", KEYS, MINUTE_US)])
    store.send([claim("journaled", journal=b"payload")])
    keys = all_keys(raw, at)
    assert len(keys) > 2 * len(KEYS)
    assert [key for key in keys if not NAME.fullmatch(key)] == []
    assert len({key[: key.index(b"}")] for key in keys}) > 20


def test_keys_that_would_steer_are_spread(store: RedisStore, raw: driver.Redis, at: str) -> None:
    finish(store, *(f"{{x}}{number}" for number in range(200)))
    assert len({key[: key.index(b"}")] for key in all_keys(raw, at)}) > 55


def test_the_server_cleans_up_only_what_is_over(store: RedisStore, raw: driver.Redis, at: str) -> None:
    def left_ms(key: str) -> int:
        left: Any = raw.pttl(key_of(raw, at, key))
        return int(left)

    held = claim("key", lease_us=10 * S, window_us=20 * S)
    (granted,) = store.send([held])
    assert 30_000 <= left_ms("key") <= 31_500
    store.send([Renew(held.id, held.owner, granted.fence, 60 * S)])
    assert 80_000 - 200 <= left_ms("key") <= 81_500
    store.send([done(held, granted)])
    assert 20_000 - 200 <= left_ms("key") <= 21_500
    slid = claim("slid", lease_us=50 * S, window_us=20 * S, sliding=True)
    store.send([slid])
    assert left_ms("slid") >= 50_000 - 200
    for key, more in (("journal", {"journal": b"payload"}), ("quarantine", {"quarantine": True})):
        held = claim(key, **more)
        (granted,) = store.send([held])
        assert left_ms(key) == -1
        store.send([done(held, granted)])
        assert 0 < left_ms(key) <= 61_500
    held = claim("unknown")
    (granted,) = store.send([held])
    store.send([Settle(held.id, held.owner, granted.fence, "unknown")])
    assert left_ms("unknown") == -1


@pytest.mark.parametrize("value", [None, NULL, b"rvalue"])
@pytest.mark.parametrize(("lease_s", "exact"), [(30, False), (600, True)])
def test_a_settled_record_is_removed_after_its_window(
    store: RedisStore, raw: driver.Redis, at: str, value: bytes | None, lease_s: int, exact: bool
) -> None:
    """Never before; and little later, even where the server is not told anew when to remove it."""
    held = claim("key", lease_us=lease_s * S, window_us=100 * S)
    (granted,) = store.send([held])
    store.send([done(held, granted, value)])
    (record,) = store.send([Lookup(held.id)])
    assert isinstance(record, Record)
    assert (record.state, record.value) == ("done", value)
    assert record.expires_at_us == record.settled_at_us + 100 * S
    left: Any = raw.pttl(key_of(raw, at, "key"))
    assert 100_000 - 5_000 < left <= 100_000 + 1_001 + (0 if exact else 60_000)
    if not exact and value != b"rvalue":
        assert left > 100_000 + 1_001  # it was left as the claim had set it, which costs nothing
    (known,) = store.send([claim("key")])
    assert isinstance(known, Known)
    assert known.value == value


def test_nothing_is_a_value_of_its_own(store: RedisStore, raw: driver.Redis, at: str) -> None:
    assert encode(None) == NULL
    claims = {value: claim(str(value)) for value in (None, NULL, b"j0", b"r")}
    granted = store.send(list(claims.values()))
    settles = [done(held, one, value) for (value, held), one in zip(claims.items(), granted, strict=True)]
    mixed: list[Any] = [*settles[:2], Lookup(("", "consumer", "absent")), *settles[2:]]
    store.send(mixed)
    looked = store.send([Lookup(held.id) for held in claims.values()])
    assert [record.value for record in looked if isinstance(record, Record)] == list(claims)
    assert [answer.value for answer in store.send([claim(str(value)) for value in claims])] == list(claims)
    sizes = [raw.strlen(key_of(raw, at, held.id[2])) for held in claims.values()]
    assert sizes[1] == sizes[0] + len(str(NULL)) - len(str(None))  # but for their keys they are equally long
    page = store.send([Scan()])[0]
    assert sorted(str(record.value) for record in page.records) == sorted(map(str, claims))


def test_a_lost_completion_of_nothing_is_written_again(store: RedisStore) -> None:
    held = claim("lost")
    settle = Settle(held.id, held.owner, _now(store), "done", NULL, DAY_US, DAY_US)
    assert store.send([settle]) == [Completed(recreated=True, at_us=store.send([settle])[0].at_us)]
    (known,) = store.send([claim("lost")])
    assert known.value == NULL


def test_a_record_is_small(store: RedisStore, raw: driver.Redis, at: str) -> None:
    with opened(at.replace("prefix=t", "prefix=u") + "&readable_keys=false") as unreadable:
        finish(unreadable, *(f"key {number}" for number in range(50)), value=None)
    prefix = at.partition("prefix=t")[2].encode()
    found: Any = raw.keys(b"u" + prefix + b":{*}:*")
    sizes: list[Any] = [raw.memory_usage(key) for key in found]
    assert max(sizes) <= WIDTH_MAX_BYTES


def test_unreadable_keys_are_nowhere(raw: driver.Redis, at: str) -> None:
    with opened(at + "&readable_keys=false") as store:
        finish(store, "very secret")
        store.send([claim("careful secret", quarantine=True)])
        held = claim("lost secret")
        store.send([Settle(held.id, held.owner, _now(store), "done", b"r", DAY_US, DAY_US)])
        texts: list[Any] = [raw.get(key) for key in all_keys(raw, at) if b"}:" in key]
        assert not any(b"very secret" in text or b"lost secret" in text for text in texts)
        assert any(b"careful secret" in text for text in texts)
        (page,) = store.send([Scan()])
        shown = {record.key for record in page.records}
        assert len(shown) == 3
        assert "careful secret" in shown
        assert all(re.fullmatch("[0-9a-f]{32}", key) for key in shown - {"careful secret"})
        assert {record.consumer for record in page.records} == {"consumer"}


def _now(store: RedisStore) -> int:
    now: int = store.send([Count()])[0].now_us
    return now


def test_large_answers_come_in_parts(store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    value = b"r" + bytes(256 * 1024)
    keys = [f"key {number}" for number in range(40)]
    finish(store, *keys, value=value)
    asked = spied(store, monkeypatch)
    answers = store.send([claim(key) for key in keys])
    assert all(isinstance(answer, Known) and answer.value == value for answer in answers)
    assert len(asked) >= len(keys) * len(value) // (calls.REPLY_BYTES_MAX + len(value))
    looked = store.send([Lookup(("", "consumer", key)) for key in keys])
    assert all(isinstance(record, Record) and record.value == value for record in looked)


@pytest.mark.parametrize("limit", [1, 7, 100])
def test_a_large_store_is_listed_in_the_servers_order(
    store: RedisStore, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "SORTED_MAX", 10)
    monkeypatch.setattr(listing, "SCAN_COUNT", 16)
    keys = {f"key {number}" for number in range(100)}
    finish(store, *keys)
    found: list[str] = []
    cursor: str | None = None
    while True:
        (page,) = store.send([Scan(consumer="consumer", cursor=cursor, limit=limit)])
        assert len(page.records) <= limit
        assert len(page.cursor or "") < 2000 + 64 * limit, "a cursor is part of an address"
        found += [record.key for record in page.records]
        cursor = page.cursor
        if cursor is None:
            break
    assert set(found) == keys
    assert len(found) == len(keys)


def test_a_cursor_of_another_store_is_refused(store: RedisStore) -> None:
    from semel.errors import UsageError

    with pytest.raises(UsageError, match="is not a cursor of this store"):
        store.send([Scan(cursor="dnonsense")])


def test_the_clients_clock_decides_nothing(store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    server_s = _now(store) / 1e6
    for hours in (-5, 5):
        wrong = time.time() + hours * 3600
        monkeypatch.setattr(time, "time", lambda wrong=wrong: wrong)
        monkeypatch.setattr(time, "time_ns", lambda wrong=wrong: int(wrong * 1e9))
        held = claim(f"key {hours}", lease_us=MINUTE_US)
        (granted,) = store.send([held])
        assert isinstance(granted, Granted)
        assert abs(granted.fence / 1e6 - server_s) < 60
        assert granted.lease_until_us == granted.fence + MINUTE_US
        assert kinds(store.send([claim(f"key {hours}")])) == ["Busy"]
        monkeypatch.undo()


def test_one_items_fault_is_its_own(store: RedisStore) -> None:
    good, bad, later = claim("good"), claim("\ud800"), claim("later", event_type="x" * 70_000)
    answers = store.send([good, bad, claim("other"), later])
    assert kinds(answers) == ["Granted", "Unavailable", "Granted", "Unavailable"]
    assert isinstance(answers[1], Unavailable)


def test_stale_entries_of_the_journals_list_are_purged(store: RedisStore, raw: driver.Redis, at: str) -> None:
    held = claim("key", journal=b"payload", lease_us=S // 50)
    store.send([held])
    lists = [key for key in all_keys(raw, at) if key.endswith(b"journal")]
    assert len(lists) == 1
    raw.delete(key_of(raw, at, "key"))
    while raw.exists(lists[0]):
        store.send([Purge()])
    assert kinds(store.send([claim("key", journal=b"payload")])) == ["Granted"]


def test_wait_replicas_counts_what_did_not_arrive(at: str, caplog: pytest.LogCaptureFixture) -> None:
    with opened(at, wait_replicas=1, wait_replicas_s=0.01) as store:
        held = claim("key")
        (granted,) = store.send([held])
        (completed,) = store.send([done(held, granted)])
        assert isinstance(completed, Completed)
        assert store.unreplicated == 1
    assert "did not reach 1 replicas" in caplog.text


def test_an_older_server_is_told_without_flags(store: RedisStore) -> None:
    from semel.stores.redis.calls import ALLOW_OOM, scripts_for

    old, new = scripts_for(shebang=False), scripts_for(shebang=True)
    assert new.settle.text == ALLOW_OOM + old.settle.text
    assert new.claim == old.claim
    store._core.exchange.scripts = old
    finish(store, "key")
    assert kinds(store.send([claim("key")])) == ["Known"]


RIGHTS = (
    "eval evalsha get set setrange del getrange pttl time info role wait ping select publish subscribe pubsub|numsub"
    " scan dbsize hset hget hsetnx hdel hgetall zadd zrem zrangebyscore sadd srem scard sismember exists pexpire"
    " cluster|slots"
)


def test_few_rights_are_enough(tmp_path: Path) -> None:
    with redis.own(tmp_path) as own:
        rights = [f"+{command}" for command in RIGHTS.split()]
        own.ask("ACL", "SETUSER", "semel", "on", ">pass", "~semel:*", "&semel:ended:*", "-@all", *rights)
        for marks in ("plain", "compact"):
            with opened(f"redis://semel:pass@127.0.0.1:{own.port}/0?marks={marks}&wait_replicas=1") as store:
                stop = store.watch(lambda _id: None)
                finish(store, f"key {marks}")
                items: list[Any] = [
                    Admit("", "consumer", "lease"), SetWindow("", "consumer", "", S, existing=True), ReadSettings(),
                    Mark("", marks, ["a"], S), Lookup(("", marks, "a")), Forget(("", marks, "a")), Count(), Scan(),
                    Purge(), claim(f"journal {marks}", journal=b"p"), Scan(orphaned=True),
                ]  # fmt: skip
                assert [answer for answer in store.send(items) if isinstance(answer, Unavailable)] == []
                assert store._pools.current().listener._subscribed.is_set()
                stop()


def test_what_may_not_be_read_is_not_taken_for_absent(tmp_path: Path) -> None:
    """A listing that skipped it would let a mode be changed under running claims."""
    with redis.own(tmp_path) as own:
        own.ask("ACL", "SETUSER", "blind", "on", ">pass", "~*", "&*", "+@all", "-getrange")
        with opened(f"redis://blind:pass@127.0.0.1:{own.port}/0") as store:
            assert kinds(store.send([claim("running")])) == ["Granted"]
            items: list[Any] = [SwitchMode("", "consumer", "quarantine"), Scan(), Count()]
            for item in items:
                with pytest.raises(StoreRefused, match="getrange"):
                    store.send([item])


def test_a_strangers_key_is_left_out_of_listings(store: RedisStore, raw: driver.Redis, at: str) -> None:
    finish(store, "mine", "gone")
    raw.delete(key_of(raw, at, "gone"))
    raw.lpush(key_of(raw, at, "gone"), "a list")
    page, stats = store.send([Scan(), Count()])
    assert [record.key for record in page.records] == ["mine"]
    assert stats.states == {"done": 1}


def test_the_page_says_which_rights() -> None:
    page = Path(__file__).resolve().parents[3] / "docs" / "reference" / "stores" / "redis.md"
    said = re.findall(r"\+([a-z|]+)", page.read_text(encoding="utf-8").partition("## Rights")[2])
    assert sorted(said) == sorted(RIGHTS.split())


def test_finished_records_are_counted_on_the_server(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store holds a window of them: sending each to the client to count it takes a minute for 250,000."""
    finish(store, *(f"key {number}" for number in range(100)))
    store.send([claim("running"), Mark("", "marks", [f"mark {number}" for number in range(20)], MINUTE_US)])
    asked = spied(store, monkeypatch)
    stats, page = store.send([Count(), Scan(state="claimed")])
    assert stats.states == {"done": 100, "claimed": 1}
    assert stats.consumers == {"consumer": 101, "marks": 20}
    assert stats.marks == 20
    assert [record.key for record in page.records] == ["running"]
    read = [call.command for calls in asked for call in calls if call.command[0] in (b"GET", b"GETRANGE")]
    assert len(read) == 1, "the running one, for its page"
    asked.clear()
    store.send([Scan("", "consumer", "claimed")])
    scripts = [call.command for calls in asked for call in calls if call.command[0] == b"EVAL"]
    assert {command[-1] for command in scripts} == {b""}, "the finished ones of the consumer stay there too"


def test_many_journaled_claims_of_another_consumer_hide_none(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each bucket has one list for all consumers. Claims of one batch are on it with the same time."""
    monkeypatch.setattr(listing, "ORPHANS_MAX", 2)
    store.send([claim(str(at), consumer="other", lease_us=1, journal=b"p") for at in range(500)])
    mine = [f"mine {at}" for at in range(9)]
    store.send([claim(key, lease_us=1, journal=b"p") for key in mine])
    assert kinds(store.send([claim("running", journal=b"p")])) == ["Granted"]

    def pages(consumer: str, limit: int) -> Iterator[list[str]]:
        cursor: str | None = None
        while True:
            (page,) = store.send([Scan("", consumer, orphaned=True, cursor=cursor, limit=limit)])
            yield [record.key for record in page.records]
            cursor = page.cursor
            if cursor is None:
                return

    assert sorted(next(pages("consumer", 100))) == mine
    assert [len(page) for page in pages("consumer", 4)] == [4, 4, 1]
    assert sorted(key for page in pages("consumer", 4) for key in page) == mine
    others = [key for page in pages("other", 7) for key in page]
    assert (len(others), len(set(others))) == (500, 500)


def test_a_cursor_of_orphans_that_was_never_given_out(store: RedisStore) -> None:
    with pytest.raises(PolicyInvalid, match="not a cursor"):
        store.send([Scan("", "consumer", orphaned=True, cursor="o1.xyz")])
