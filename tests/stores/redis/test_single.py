"""A claim or settle that comes alone takes a short way: the same answers and bytes, a smaller script."""

import random
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis as driver

from semel.core.commands import Answer, Claim, Forget, Granted, Item, Known, Lookup, Renew, Settle
from semel.core.ids import digest
from semel.core.protocols import Store
from semel.errors import RecordCorrupt, StoreFull, StoreRefused, StoreUnavailable
from semel.stores.redis.base import RedisState
from semel.stores.redis.single import CLAIMS_MAX
from semel.testing import ManualClock
from semel.testing.proxy import ProxyMode
from semel.types import Busy, Completed, Id, Lost, Mismatch, Record, Renewed, Unavailable
from tests.services import redis
from tests.stores.redis.test_faults import HOW, proxied, through
from tests.stores.redis.tools import MINUTE_US, Make, S, claim, done, finish, kinds

DAY_US = 86_400 * S
SLOW_MS = 30_000
"""How long two calls may take on a busy computer."""
SHORT_CLAIM, SHORT_SETTLE, FULL = "claim_one", "settle_one", "full"


def warm(store: Store) -> None:
    """From here on the store knows the epoch, and the server the scripts: single items take the short way."""
    finish(store, "warm")
    finish(store, "warmer")


def core_of(store: Any) -> RedisState:
    core: RedisState = getattr(store, "inner", store).core
    return core


class Ways:
    """Notes which scripts are sent for the items of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._sent: list[str] = []
        core = core_of(store)
        self._note(core.single, "command_of", lambda call, *_: call.script.name)
        self._note(core.exchange, "carry_out", lambda *_: FULL)
        self._note(core.exchange, "carry_out_again", lambda *_: FULL)

    def _note(self, where: Any, name: str, named: Callable[..., str]) -> None:
        do = getattr(where, name)

        def noted(*args: Any, **more: Any) -> Any:
            self._sent.append(named(*args))
            return do(*args, **more)

        setattr(where, name, noted)

    def of(self, item: Item) -> tuple[list[str], Any]:
        """How one item is answered, and what."""
        self._sent.clear()
        (answer,) = self._store.send([item])
        return list(self._sent), answer


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(make: Make, tmp_path: Path, clock: ManualClock) -> Store:
    store = make(redis.place(tmp_path), clock=clock)
    warm(store)
    return store


@pytest.fixture
def ways(store: Store) -> Ways:
    return Ways(store)


def renew(held: Claim, granted: Granted, step: tuple[str, bytes | None] | None = None) -> Renew:
    return Renew(held.id, held.owner, granted.fence, held.lease_us, step)


# --- which way ------------------------------------------------------------------------------------


def test_the_plain_case_takes_the_short_way(store: Store, ways: Ways) -> None:
    held = claim("key", fingerprint=b"\x01a", event_type="order")
    way, granted = ways.of(held)
    assert (way, type(granted)) == ([SHORT_CLAIM], Granted)
    way, busy = ways.of(claim("key"))
    assert (way, busy) == ([SHORT_CLAIM], Busy(60.0))
    way, completed = ways.of(done(held, granted))
    assert (way, completed) == ([SHORT_SETTLE], Completed(at_us=completed.at_us))
    for fingerprint in (None, b"\x01a", b"\x02b"):
        way, known = ways.of(claim("key", fingerprint=fingerprint))
        assert (way, type(known)) == ([SHORT_CLAIM], Known)
        assert (known.state, known.value, known.fence) == ("done", b"rvalue", granted.fence)
    assert ways.of(claim("key", fingerprint=b"\x01b")) == ([SHORT_CLAIM], Mismatch())
    (record,) = store.send([Lookup(held.id)])
    assert isinstance(record, Record)
    assert (record.id, record.event_type, record.fingerprint) == (held.id, "order", b"\x01a")
    assert (record.owner, record.settled_at_us) == (held.owner, completed.at_us)


@pytest.mark.parametrize(
    "value",
    [None, b"", b"jnull", b"jwhy", b"j" + bytes(3_000_000)],
    ids=lambda value: "none" if value is None else f"{len(value)} bytes",
)
def test_values_and_failures_are_kept(ways: Ways, value: bytes | None) -> None:
    held = claim("key")
    _, granted = ways.of(held)
    failed = Settle(held.id, held.owner, granted.fence, "failed", value, DAY_US, MINUTE_US)
    way, completed = ways.of(failed)
    assert (way, type(completed)) == ([SHORT_SETTLE], Completed)
    way, known = ways.of(claim("key"))
    assert (way, known.state, known.value) == ([SHORT_CLAIM], "failed", value)


@pytest.mark.parametrize(
    "more",
    [
        {"quarantine": True},
        {"sliding": True},
        {"journal": b"payload"},
        {"meta": b"note"},
        {"event_time_us": 1_700_000_000 * S, "refuse_late": True},
        {"event_time_us": 1_700_000_000 * S, "apart_us": S},
        {"window_us": 2**53 - 1},
    ],
    ids=",".join,
)
def test_a_claim_that_brings_more_takes_the_full_way(ways: Ways, more: dict[str, Any]) -> None:
    held = claim("key", **more)
    way, granted = ways.of(held)
    assert way == [FULL]
    if isinstance(granted, Granted):
        assert ways.of(done(held, granted))[0] == [FULL]


def test_other_ends_take_the_full_way(ways: Ways) -> None:
    for to in ("released", "unknown"):
        held = claim(to)
        _, granted = ways.of(held)
        end = Settle(held.id, held.owner, granted.fence, to, None, DAY_US, MINUTE_US)
        way, completed = ways.of(end)
        assert (way, type(completed)) == ([FULL], Completed)


def test_the_first_item_takes_the_full_way(make: Make, tmp_path: Path) -> None:
    """It learns the epoch."""
    warm(make(redis.place(tmp_path)))
    ways = Ways(make(redis.place(tmp_path)))
    assert [ways.of(claim(key))[0] for key in ("a", "b")] == [[FULL], [SHORT_CLAIM]]


def test_a_claim_of_another_object_is_settled_the_full_way(make: Make, tmp_path: Path) -> None:
    first, second = make(redis.place(tmp_path)), make(redis.place(tmp_path))
    warm(second)
    held = claim("key")
    (granted,) = first.send([held])
    way, completed = Ways(second).of(done(held, granted))
    assert (way, type(completed)) == ([FULL], Completed)


def test_on_a_cluster_all_take_the_full_way(make: Make, tmp_path: Path) -> None:
    store = make(redis.cluster(tmp_path))
    warm(store)
    ways, held = Ways(store), claim("key")
    way, granted = ways.of(held)
    assert (way, ways.of(done(held, granted))[0]) == ([FULL], [FULL])


def test_who_waits_for_replicas_settles_the_full_way(make: Make, tmp_path: Path) -> None:
    store = make(redis.place(tmp_path), wait_replicas=1, wait_replicas_s=0.01)
    warm(store)
    ways, held = Ways(store), claim("key")
    way, granted = ways.of(held)
    assert (way, ways.of(done(held, granted))[0]) == ([SHORT_CLAIM], [FULL])
    assert core_of(store).exchange.unreplicated == 3


def test_two_items_take_the_full_way(store: Store) -> None:
    ways = Ways(store)
    store.send([claim("a"), claim("b")])
    assert ways._sent == [FULL]


def test_what_cannot_be_stored_is_refused_with_a_message(ways: Ways) -> None:
    long = "x" * 70_000
    bad = [claim("\ud800"), claim(long), claim("key", event_type=long), claim("key", owner=b"x" * 300)]
    for item in bad:
        way, answer = ways.of(item)
        assert (way, type(answer)) == ([FULL], Unavailable)


def test_unreadable_keys_are_nowhere(make: Make, own: redis.Own) -> None:
    store = make(own.url, readable_keys=False)
    warm(store)
    ways, held = Ways(store), claim("secret")
    way, granted = ways.of(held)
    assert (way, ways.of(done(held, granted))[0]) == ([SHORT_CLAIM], [SHORT_SETTLE])
    with driver.Redis(port=own.port) as client:
        assert all(b"secret" not in stored for stored in bytes_of(client).values())


# --- what the short way does not decide -----------------------------------------------------------


def test_a_repeated_claim_is_ones_own(ways: Ways, clock: ManualClock) -> None:
    held = claim("key")
    _, granted = ways.of(held)
    clock.advance(10)
    way, again = ways.of(held)
    assert way == [SHORT_CLAIM, FULL]
    assert (again.fence, again.attempt) == (granted.fence, 1)
    assert again.lease_until_us == granted.lease_until_us + 10 * S
    way, completed = ways.of(done(held, granted))
    assert (way, completed.already) == ([SHORT_SETTLE, FULL], False)


def test_a_record_that_changed_since_is_settled_the_full_way(
    ways: Ways, store: Store, clock: ManualClock
) -> None:
    for step in (None, ("charge", b"j1")):
        held = claim(f"step {step}")
        _, granted = ways.of(held)
        clock.advance(1)
        assert kinds(store.send([renew(held, granted, step)])) == [Renewed.__name__]
        way, completed = ways.of(done(held, granted))
        assert (way, completed.already) == ([SHORT_SETTLE, FULL], False)
        assert isinstance(ways.of(claim(f"step {step}"))[1], Known)


def test_a_late_settle_after_a_takeover_is_lost(ways: Ways, clock: ManualClock) -> None:
    first, second = claim("key"), claim("key")
    _, old = ways.of(first)
    clock.advance(61)
    way, new = ways.of(second)
    assert (way, new.attempt, new.fence > old.fence) == ([SHORT_CLAIM, FULL], 2, True)
    assert ways.of(done(first, old)) == ([SHORT_SETTLE, FULL], Lost())
    assert ways.of(done(second, new, b"jsecond"))[0] == [FULL]
    assert ways.of(done(first, old))[1] == Lost()
    assert ways.of(claim("key"))[1].value == b"jsecond"


def test_a_settle_after_its_lease_counts_while_nobody_took_over(ways: Ways, clock: ManualClock) -> None:
    held = claim("key")
    _, granted = ways.of(held)
    clock.advance(61)
    way, completed = ways.of(done(held, granted))
    assert (way, completed.already, completed.recreated) == ([SHORT_SETTLE], False, False)


def test_a_settle_after_its_record_expired_is_recreated_or_not(ways: Ways, clock: ManualClock) -> None:
    held = claim("key")
    _, granted = ways.of(held)
    clock.advance(120)  # to the microsecond
    way, completed = ways.of(done(held, granted))
    assert (way, completed.recreated) == ([SHORT_SETTLE, FULL], True)


def test_an_expired_record_is_claimed_the_full_way(ways: Ways, clock: ManualClock) -> None:
    held = claim("key")
    _, granted = ways.of(held)
    ways.of(done(held, granted))
    clock.advance(60)
    way, again = ways.of(claim("key"))
    assert (way, again.attempt, again.fence > granted.fence) == ([SHORT_CLAIM, FULL], 1, True)


def test_a_settle_needs_fence_and_owner(ways: Ways) -> None:
    held = claim("key")
    _, granted = ways.of(held)
    other = Granted(granted.fence + 1, 1, 0, 0)
    assert ways.of(done(held, other)) == ([FULL], Lost())
    assert ways.of(done(claim("key"), granted)) == ([FULL], Lost())
    assert ways.of(done(Claim(held.id, b"", 1, 1), granted)) == ([FULL], Lost())
    assert isinstance(ways.of(done(held, granted))[1], Completed)


def test_the_claim_of_one_key_does_not_settle_another(ways: Ways) -> None:
    held, other = claim("key"), claim("other")
    _, granted = ways.of(held)
    _, theirs = ways.of(other)
    wrong = Settle(other.id, held.owner, granted.fence, "done", b"j", MINUTE_US, MINUTE_US)
    assert ways.of(wrong) == ([SHORT_SETTLE, FULL], Lost())
    assert isinstance(ways.of(done(other, theirs))[1], Completed)


def test_a_strangers_key_is_nobodys_record(make: Make, own: redis.Own) -> None:
    store = make(own.url)
    warm(store)
    finish(store, "list", "text", "short", "cut", "running")
    ways = Ways(store)
    with driver.Redis(port=own.port) as client:
        client.delete(key_of(("", "consumer", "list")))
        client.lpush(key_of(("", "consumer", "list")), "x")
        client.set(key_of(("", "consumer", "text")), "no record at all, but long enough to be one")
        client.set(key_of(("", "consumer", "short")), b"\1")
        whole = client.get(key_of(("", "consumer", "cut")))
        assert isinstance(whole, bytes)
        client.set(key_of(("", "consumer", "cut")), whole[:-3])
        client.set(key_of(("", "consumer", "running")), b"\1\0\1" + b"\xff" * 40)
    for key in ("list", "text", "short", "cut", "running"):
        way, answer = ways.of(claim(key))
        assert (way, type(answer)) == ([SHORT_CLAIM, FULL], Unavailable), key
        assert isinstance(answer.error, RecordCorrupt)


def key_of(record_id: Id) -> bytes:
    name = digest(record_id)
    return b"semel:{%d}:%b" % (name[0] & 63, name)


def test_claims_that_are_never_settled_are_not_kept_for_ever(ways: Ways, store: Store) -> None:
    kept = core_of(store).single._claims
    held = claim("first")
    _, granted = ways.of(held)
    for number in range(CLAIMS_MAX):
        ways.of(claim(f"key {number}"))
        assert len(kept) <= CLAIMS_MAX
    way, completed = ways.of(done(held, granted))
    assert (way, type(completed)) == ([FULL], Completed)


# --- the same as the full script ------------------------------------------------------------------


class Script:
    """Random items on few keys, the same for every store that plays them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.claims: list[Claim] = []
        self.granted: dict[bytes, int] = {}

    def next_item(self) -> Item:
        """Mostly plain items; some that leave records behind which are not."""
        pick = self.random.random()
        if self.claims and pick < 0.45:
            return self.next_settle(self.next_held())
        if self.claims and pick < 0.5:
            return self.random.choice(self.claims)  # again
        if self.claims and pick < 0.55:
            held = self.next_held()
            return Renew(
                held.id, held.owner, self.granted.get(held.owner, 1), held.lease_us, self.next_step()
            )
        if pick < 0.58:
            return Forget(("", "c", self.next_key()), force=True)
        return self.next_claim()

    def next_held(self) -> Claim:
        """One of the last claims, usually a granted one."""
        last = self.claims[-6:]
        granted = [held for held in last if held.owner in self.granted]
        return self.random.choice(granted[-2:] or last)

    def next_key(self) -> str:
        return f"{len(self.claims) // 12}-{self.random.randrange(6)}"  # some stay unknown for ever

    def next_step(self) -> tuple[str, bytes | None] | None:
        return self.random.choice((None, ("step", None), ("other", b"j")))

    def next_claim(self) -> Claim:
        pick = self.random.choice
        sliding = self.random.random() < 0.05
        # The server's own expiry runs in real time: no record may come near it on a slow computer.
        window_us = DAY_US if sliding else pick((60 * S, 70 * S, DAY_US))
        made = Claim(
            ("", "c", self.next_key()),
            self.random.randbytes(16),
            pick((1, 50 * S, 100 * S)),
            window_us,
            fingerprint=pick((None, None, b"", b"\x01a", b"\x01b", b"\x02a")),
            event_type=pick(("", "order")),
            event_time_us=pick((None,) * 19 + (1_600_000_000 * S,)),
            refuse_late=self.random.random() < 0.5,
            quarantine=self.random.random() < 0.05,
            sliding=sliding,
            journal=pick((None,) * 19 + (b"payload",)),
            meta=pick((None,) * 19 + (b"note",)),
        )
        self.claims.append(made)
        return made

    def next_settle(self, sent: Claim) -> Settle:
        to: Any = self.random.choice(("done",) * 4 + ("failed", "released", "unknown"))
        fence = self.granted.get(sent.owner, 1) + self.random.choice((0,) * 9 + (1,))
        value = self.random.choice((None, b"", b"jnull", b"j1")) if to in ("done", "failed") else None
        return Settle(
            sent.id, sent.owner, fence, to, value,
            self.random.choice((sent.window_us, DAY_US)), sent.lease_us, sent.sliding,
        )  # fmt: skip

    def note(self, item: Item, answer: Answer) -> None:
        if isinstance(item, Claim) and isinstance(answer, Granted):
            self.granted[item.owner] = answer.fence


NOBODY = Lookup(("", "c", "nobody's"))
"""A second item: it sends the first one the full way, and changes nothing."""


@pytest.mark.parametrize("readable_keys", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_both_ways_answer_and_write_alike(make: Make, tmp_path: Path, seed: int, readable_keys: bool) -> None:
    clock = ManualClock()
    one, many = (
        make(redis.place(tmp_path / name), clock=clock, readable_keys=readable_keys)
        for name in ("one", "many")
    )
    warm(one)
    warm(many)
    ways, script, taken = Ways(one), Script(seed), Counter[str]()
    with client_of(one) as ones, client_of(many) as manys:
        for client, each in ((ones, one), (manys, many)):
            client.delete(*(core_of(each).exchange.layout.prefix + key for key in bytes_of(client, each)))
        for number in range(300):
            clock.advance(script.random.choice((0, 1e-6, 1, 1, 1, 40, 90)))
            item = script.next_item()
            way, answer = ways.of(item)
            other = many.send([item, NOBODY])[0]
            assert answer == other, (number, item)
            assert bytes_of(ones, one) == bytes_of(manys, many), (number, item)
            script.note(item, answer)
            taken[" ".join(way)] += 1
    assert min(taken[way] for way in (SHORT_CLAIM, SHORT_SETTLE)) >= 10, taken
    assert min(taken[f"{way} {FULL}"] for way in (SHORT_CLAIM, SHORT_SETTLE)) > 0, taken


def client_of(store: Store) -> driver.Redis:
    place = core_of(store).place
    return driver.Redis(port=place.addresses[0][1], db=place.db)


def bytes_of(client: driver.Redis, store: Store | None = None) -> dict[bytes, bytes]:
    """Every record that is not too old, by its key without the prefix."""
    prefix = b"semel" if store is None else core_of(store).exchange.layout.prefix
    keys: Any = client.keys(prefix + b":{*}:*")
    stored: Any = client.mget(keys) if keys else []
    return {key.removeprefix(prefix): each for key, each in zip(keys, stored, strict=True)}


@pytest.mark.parametrize(
    ("lease_us", "window_us"), [(MINUTE_US, DAY_US), (1, DAY_US), (3 * DAY_US, MINUTE_US)]
)
def test_the_server_keeps_records_equally_long(
    store: Store, ways: Ways, lease_us: int, window_us: int
) -> None:
    held = [claim(key, lease_us=lease_us, window_us=window_us) for key in ("one", "many")]

    def lifetimes() -> tuple[int, int]:
        names = [digest(each.id) for each in held]
        with client_of(store) as client:
            prefix = core_of(store).exchange.layout.records
            ends: Any = [client.pexpiretime(prefix[name[0] & 63] + name) for name in names]
        return ends[0], ends[1]

    granted = [ways.of(held[0])[1], store.send([held[1], NOBODY])[0]]
    first, second = lifetimes()
    assert 0 <= second - first < SLOW_MS
    ways.of(done(held[0], granted[0]))
    store.send([done(held[1], granted[1]), NOBODY])
    first, second = lifetimes()
    assert 0 <= second - first < SLOW_MS


def test_the_servers_time_is_the_same_in_both(make: Make, tmp_path: Path) -> None:
    store = make(redis.place(tmp_path))
    warm(store)
    fences: list[int] = []
    for number in range(20):
        fences.append(store.send([claim(f"single {number}")])[0].fence)
        fences.append(store.send([claim(f"many {number}"), NOBODY])[0].fence)
    assert fences == sorted(fences)
    with client_of(store) as client:
        seconds, micros = client.time()
    assert 0 <= seconds * S + micros - fences[-1] < MINUTE_US


# --- the server, the connections, the listeners ---------------------------------------------------


def test_scripts_are_sent_again_after_they_were_flushed(make: Make, own: redis.Own) -> None:
    store = make(own.url)
    warm(store)
    ways = Ways(store)
    for number in range(3):
        own.ask("SCRIPT", "FLUSH")
        held = claim(f"key {number}")
        way, granted = ways.of(held)
        assert (way, granted.attempt) == ([SHORT_CLAIM, SHORT_CLAIM], 1)
        assert ways.of(claim(f"key {number}"))[0] == [SHORT_CLAIM]
        own.ask("SCRIPT", "FLUSH")
        way, completed = ways.of(done(held, granted))
        assert (way, completed.already) == ([SHORT_SETTLE, SHORT_SETTLE], False)


def test_a_flushed_store_is_noticed(make: Make, own: redis.Own) -> None:
    store = make(own.url)
    warm(store)
    ways, held = Ways(store), claim("running")
    _, granted = ways.of(held)
    own.ask("FLUSHALL")
    way, again = ways.of(claim("warm"))
    assert (way, type(again)) == ([SHORT_CLAIM, FULL], Granted)
    assert core_of(store).exchange.stores_lost == 1
    own.ask("FLUSHALL")
    way, completed = ways.of(done(held, granted))
    assert (way, completed.recreated) == ([SHORT_SETTLE, FULL], True)
    assert core_of(store).exchange.stores_lost == 2
    assert ways.of(claim("next"))[0] == [SHORT_CLAIM]


def test_a_flushed_store_may_be_refused(make: Make, own: redis.Own) -> None:
    store = make(own.url, on_store_lost="fail")
    warm(store)
    held = claim("running")
    way, granted = Ways(store).of(held)
    assert way == [SHORT_CLAIM]
    own.ask("FLUSHALL")
    for item in (done(held, granted), claim("after")):
        with pytest.raises(StoreRefused, match="has lost its records"):
            store.send([item])
    assert own.ask("KEYS", "*") == []


@pytest.mark.parametrize("on_store_lost", ["continue", "fail"])
def test_a_settle_notices_another_epoch(make: Make, own: redis.Own, on_store_lost: str) -> None:
    """Even where its own record is still there, as after a partial restore."""
    store = make(own.url, on_store_lost=on_store_lost)
    warm(store)
    ways, held = Ways(store), claim("key")
    _, granted = ways.of(held)
    own.ask("SET", "semel:{0}epoch", "another")
    if on_store_lost == "fail":
        with pytest.raises(StoreRefused, match="has lost its records"):
            ways.of(done(held, granted))
    else:
        way, completed = ways.of(done(held, granted))
        assert (way, type(completed)) == ([SHORT_SETTLE, FULL], Completed)
    assert core_of(store).exchange.stores_lost == 1


def test_at_the_memory_limit_ends_go_through(make: Make, own: redis.Own) -> None:
    store = make(own.url)
    warm(store)
    finish(store, "known")
    ways, held = Ways(store), claim("held")
    _, granted = ways.of(held)
    own.ask("CONFIG", "SET", "maxmemory", "1")
    way, full = ways.of(claim("new"))
    assert (way, type(full.error)) == ([SHORT_CLAIM, FULL], StoreFull)
    assert type(ways.of(claim("known"))[1]) is Known
    way, completed = ways.of(done(held, granted))
    assert (way, completed.already, completed.recreated) == ([SHORT_SETTLE], False, False)
    own.ask("CONFIG", "SET", "maxmemory", "0")
    assert kinds([ways.of(claim("new"))[1]]) == ["Granted"]


@pytest.mark.parametrize("how", HOW)
def test_a_cut_connection_is_tried_once_more(make: Make, tmp_path: Path, how: ProxyMode) -> None:
    at = redis.place(tmp_path)
    with proxied(at) as proxy:
        store = make(through(proxy, at))
        warm(store)
        ways, held = Ways(store), claim("key")
        proxy.cut_next(how, 1)
        way, granted = ways.of(held)
        assert (way, granted.attempt) == ([SHORT_CLAIM, FULL], 1)
        proxy.cut_next(how, 2)
        way, refused = ways.of(claim("other"))
        assert (way, type(refused.error)) == ([SHORT_CLAIM, FULL], StoreUnavailable)
        proxy.mode = "pass"
        held = claim("third")
        way, granted = ways.of(held)
        assert way == [SHORT_CLAIM]
        proxy.cut_next(how, 1)
        way, completed = ways.of(done(held, granted))
        assert (way, completed.already) == ([SHORT_SETTLE, FULL], how != "cut_request")
        assert proxy.cuts == 4


def test_a_settle_tells_those_who_wait_elsewhere(make: Make, tmp_path: Path) -> None:
    """And nobody publishes where nobody listens."""
    store, other = make(redis.place(tmp_path)), make(redis.place(tmp_path))
    warm(store)
    heard = threading.Event()
    told: list[Id] = []

    def listen(record_id: Id) -> None:
        told.append(record_id)
        heard.set()

    ways, held = Ways(store), claim("key")
    _, granted = ways.of(held)
    stop = other.watch(listen)
    assert kinds(other.send([claim("key")])) == ["Busy"]
    assert ways.of(done(held, granted))[0] == [SHORT_SETTLE]
    assert heard.wait(10)
    assert told == [held.id]
    stop()


def test_ones_own_listeners_hear_of_a_settle(make: Make, tmp_path: Path) -> None:
    store = make(redis.place(tmp_path))
    warm(store)
    told: list[Id] = []
    stop = store.watch(told.append)
    ways, held = Ways(store), claim("key")
    _, granted = ways.of(held)
    assert told == []
    assert ways.of(done(held, granted))[0] == [SHORT_SETTLE]
    assert told == [held.id]
    stop()


def test_who_may_not_publish_is_told_so(make: Make, own: redis.Own) -> None:
    """As on the full way: the settle is written, and the caller gets the server's error."""
    own.ask("ACL", "SETUSER", "mute", "on", ">pass", "~*", "resetchannels", "+@all")
    store = make(f"redis://mute:pass@127.0.0.1:{own.port}/0")
    warm(store)
    listener = make(own.url)
    stop = listener.watch(lambda _id: None)
    listener.send([NOBODY])  # it is subscribed now
    held = claim("key")
    way, granted = Ways(store).of(held)
    assert way == [SHORT_CLAIM]
    (answer,) = store.send([done(held, granted)])
    assert isinstance(answer, Unavailable)
    assert "channel" in str(answer.error)  # the words of the server, which differ between versions
    assert kinds(store.send([claim("key")])) == ["Known"]
    stop()


# --- races ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("single_threads", [8, 4], ids=["all alone", "alone and in batches"])
def test_racing_threads_have_one_winner_per_key(make: Make, tmp_path: Path, single_threads: int) -> None:
    store = make(redis.place(tmp_path))
    warm(store)
    keys = [f"key {number}" for number in range(60)]
    won: list[str] = []
    barrier = threading.Barrier(8)

    def race(number: int) -> None:
        size = 1 if number < single_threads else 5
        order = keys if number % 2 else keys[::-1]
        barrier.wait(30)
        for start in range(0, len(order), size):
            claims = [claim(key) for key in order[start : start + size]]
            answers = store.send(claims)
            good = [
                (held, one) for held, one in zip(claims, answers, strict=True) if isinstance(one, Granted)
            ]
            for held, granted in good:
                (completed,) = store.send([done(held, granted)])
                assert completed == Completed(at_us=completed.at_us)
                won.append(held.id[2])

    threads = [threading.Thread(target=race, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert Counter(won) == Counter(keys)
