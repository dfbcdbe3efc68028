"""What operators ask for: scans, statistics, windows and modes."""

from typing import Any

from semel.core.commands import (
    Admit,
    Count,
    Flow,
    Forget,
    Granted,
    Known,
    Lookup,
    Mark,
    Page,
    ReadSettings,
    Scan,
    SetWindow,
    StoreSettings,
    SwitchMode,
)
from semel.testing.contract.harness import (
    ENDS,
    LONG,
    SHORT,
    Advance,
    HeldClaim,
    ScenarioContext,
    check,
    equal,
    expect,
    scenario,
)
from semel.types import Absent, Busy, Completed, Forgotten, Id, Late, Lost, Record, Stats

WILD = ["a%b", "a_b", "a*b", "a?b", "a[b]", "a\\b", "a'b", "axb", "A%b", "\u00e4%b"]


def _scan(b: ScenarioContext, **filters: Any) -> Flow[list[str]]:
    """The keys of one scan, page by page; a record must not come twice."""
    keys: list[str] = []
    cursor: str | None = None
    while True:
        page = expect((yield from Scan(tenant=b.tenant, cursor=cursor, **filters)), Page)
        check(len(page.records) <= filters.get("limit", 100), "a page is longer than its limit")
        keys += [record.key for record in page.records]
        cursor = page.cursor
        if cursor is None:
            equal(len(set(keys)), len(keys), "keys that came, without repetition")
            return keys


@scenario()
def a_scan_shows_the_records_as_they_stand(b: ScenarioContext) -> Flow[None]:
    """By state: orphans of quarantine are unknown, what has expired or was forgotten is not there."""
    yield from b.finish("done")
    failed = yield from b.hold("failed")
    yield from failed.settle("failed", b"r")
    yield from b.hold("running")
    yield from b.hold("orphan", lease=SHORT, quarantine=True)
    yield from b.finish("expired", window=SHORT)
    yield from b.hold("gone", lease=SHORT, window=0)
    yield from b.finish("forgotten")
    yield from Forget(b.id("forgotten"))
    yield from b.later()
    equal(sorted((yield from _scan(b))), ["done", "failed", "orphan", "running"], "all keys")
    for state, key in (("done", "done"), ("failed", "failed"), ("claimed", "running"), ("unknown", "orphan")):
        equal((yield from _scan(b, state=state)), [key], f"keys in state {state}")
    page = expect((yield from Scan(tenant=b.tenant, state="done")), Page)
    equal(page.records, [(yield from b.record("done"))], "the scanned record")


@scenario()
def a_scan_is_filtered(b: ScenarioContext) -> Flow[None]:
    """By tenant, consumer, key prefix and age, each alone and together."""
    for key in ("a1", "a2", "b1"):
        yield from b.finish(key)
    yield from b.finish(b.id("a3", consumer="other"))
    yield from b.finish(b.id("a4", tenant="-other"))
    cut = (yield from b.now()) + 1
    yield from b.later(1)
    yield from b.finish("a5")
    equal(sorted((yield from _scan(b))), ["a1", "a2", "a3", "a5", "b1"], "by tenant")
    equal((yield from _scan(b, consumer="other")), ["a3"], "by consumer")
    equal(sorted((yield from _scan(b, prefix="a"))), ["a1", "a2", "a3", "a5"], "by prefix")
    equal(sorted((yield from _scan(b, seen_before=cut))), ["a1", "a2", "a3", "b1"], "by age")
    together = yield from _scan(b, prefix="a", seen_before=cut, consumer="consumer", state="done")
    equal(sorted(together), ["a1", "a2"], "by all of them")
    equal((yield from _scan(b, consumer="nobody")), [], "of nobody")


@scenario()
def a_prefix_is_no_pattern(b: ScenarioContext) -> Flow[None]:
    """Wildcards, quotes and case in a prefix mean themselves."""
    for key in WILD:
        yield from b.finish(key)
    for key in WILD:
        equal((yield from _scan(b, prefix=key)), [key], f"keys that begin with {key}")
        wanted = sorted(other for other in WILD if other.startswith(key[:2]))
        equal(sorted((yield from _scan(b, prefix=key[:2]))), wanted, f"keys that begin with {key[:2]}")


@scenario()
def a_scan_is_paged(b: ScenarioContext) -> Flow[None]:
    """Pages of any size show every record once, in one order, also while others are added and removed."""
    keys = [f"key {number:02}" for number in range(25)]
    for key in keys:
        yield from b.finish(key)
        yield from b.finish(b.id(key, consumer="other"))
    whole = yield from _scan(b, consumer="consumer")
    equal(sorted(whole), keys, "keys")
    for limit in (1, 7, 24, 25, 26):
        equal((yield from _scan(b, consumer="consumer", limit=limit)), whole, f"keys by pages of {limit}")
    page = expect((yield from Scan(tenant=b.tenant, consumer="consumer", limit=10)), Page)
    yield from Forget(page.records[-1].id)
    yield from b.finish("zz")
    rest = yield from _scan_on(b, page.cursor)
    equal(sorted(rest)[:15], sorted(whole[10:]), "the rest, after a removal at the cursor")


def _scan_on(b: ScenarioContext, cursor: str | None) -> Flow[list[str]]:
    page = expect((yield from Scan(tenant=b.tenant, consumer="consumer", cursor=cursor)), Page)
    return [record.key for record in page.records]


@scenario()
def statistics_count_what_stands(b: ScenarioContext) -> Flow[None]:
    """By state and by consumer, of one tenant; expired and forgotten records do not count as either."""
    yield from b.finish("done 1")
    yield from b.finish("done 2")
    yield from b.hold("running")
    released = yield from b.hold("released")
    yield from released.settle("released")
    yield from b.hold("orphan", lease=SHORT, quarantine=True)
    failed = yield from b.hold(b.id("failed", consumer="other"))
    yield from failed.settle("failed", b"r")
    yield from b.finish(b.id("elsewhere", tenant="-other"))
    yield from b.finish("expired", window=SHORT)
    yield from b.finish("forgotten")
    yield from Forget(b.id("forgotten"))
    yield from b.later()
    stats = expect((yield from Count(b.tenant)), Stats, marks=0)
    equal(stats.states, {"done": 2, "claimed": 1, "released": 1, "unknown": 1, "failed": 1}, "states")
    equal(stats.consumers, {"consumer": 5, "other": 1}, "consumers")
    everywhere = expect((yield from Count()), Stats)
    check(everywhere.states.get("done", 0) > stats.states["done"], "the statistics of all tenants miss some")


@scenario()
def statistics_leave_out_records_of_semel_itself(b: ScenarioContext) -> Flow[None]:
    """Tokens, figures, audit: they are counted only for who names their tenant. Their expiry is upkeep as any."""
    own_tenant, other = f"semel.{b.tenant}", f"other of {b.tenant}"
    yield from b.finish("done")
    yield from b.finish(b.id("audit", consumer="semel.audit"))
    yield from b.finish((own_tenant, other, "token"))
    yield from Mark(own_tenant, other, ["mark"], b.us(LONG))
    stats = expect((yield from Count(b.tenant)), Stats, states={"done": 1})
    equal(stats.consumers, {"consumer": 1}, "consumers")
    everywhere = expect((yield from Count()), Stats)
    check(
        not any(name.startswith("semel.") for name in everywhere.consumers), "a consumer of semel is counted"
    )
    check(other not in everywhere.consumers, "a tenant of semel is counted with all tenants")
    own = expect((yield from Count(own_tenant)), Stats, states={"done": 1})
    equal(own.consumers, {other: 2}, "the consumers of a tenant that was named")


# --- modes --------------------------------------------------------------------------------------


@scenario()
def a_consumers_first_mode_is_recorded(b: ScenarioContext) -> Flow[None]:
    """Whoever comes with another one learns the recorded one; other consumers and tenants have their own."""
    equal((yield from Admit(b.tenant, "consumer", "lease")), "lease", "the mode")
    equal((yield from Admit(b.tenant, "consumer", "quarantine")), "lease", "the mode for another one")
    equal((yield from Admit(b.tenant, "other", "mark")), "mark", "another consumer's mode")
    equal((yield from Admit(b.tenant + "-other", "consumer", "observe")), "observe", "another tenant's mode")
    settings = expect((yield from ReadSettings()), StoreSettings)
    equal(settings.modes.get((b.tenant, "consumer")), "lease", "the mode in the settings")
    equal(settings.modes.get((b.tenant, "other")), "mark", "another consumer's mode in the settings")


@scenario()
def a_consumers_kind_of_ids_is_recorded_once(b: ScenarioContext) -> Flow[None]:
    """It is recorded with a consumer's first mode and never changed, neither by others nor with the mode."""
    equal((yield from Admit(b.tenant, "timed", "lease", "ulid")), "lease", "the mode")
    equal((yield from Admit(b.tenant, "timed", "lease", "uuid7")), "lease", "the mode for other ids")
    equal((yield from Admit(b.tenant, "plain", "lease")), "lease", "the mode")
    equal((yield from Admit(b.tenant, "plain", "lease", "ulid")), "lease", "the mode for ids declared later")
    equal((yield from SwitchMode(b.tenant, "timed", "observe")), 0, "unfinished records")
    settings = expect((yield from ReadSettings()), StoreSettings)
    equal(settings.modes.get((b.tenant, "timed")), "observe", "the mode after the switch")
    equal(settings.ids.get((b.tenant, "timed")), "ulid", "the kind of ids in the settings")
    check(
        (b.tenant, "plain") not in settings.ids,
        "a kind of ids was recorded for a consumer that declared none",
    )


@scenario()
def a_mode_is_not_switched_under_running_claims(b: ScenarioContext) -> Flow[None]:
    """Unfinished records of the consumer forbid it, and the answer says how many there are.

    A released one does not: its attempt has ended, and the next delivery runs in any mode.
    """
    yield from Admit(b.tenant, "consumer", "quarantine")
    running = yield from b.hold("running", quarantine=True)
    orphan = yield from b.hold("orphan", lease=SHORT, quarantine=True)
    yield from b.finish("done")
    released = yield from b.hold("released")
    yield from released.settle("released")
    yield from b.hold(b.id("elsewhere", consumer="other"))
    yield from b.later()
    switch = SwitchMode(b.tenant, "consumer", "lease")
    equal((yield from switch), 2, "unfinished records")
    equal((yield from Admit(b.tenant, "consumer", "lease")), "quarantine", "the mode after a refusal")
    yield from running.settle("done")
    equal((yield from switch), 1, "unfinished records")
    yield from orphan.settle("failed")
    equal((yield from switch), 0, "unfinished records")
    equal((yield from Admit(b.tenant, "consumer", "quarantine")), "lease", "the mode after the switch")


# --- windows ------------------------------------------------------------------------------------


@scenario()
def windows_are_stored(b: ScenarioContext) -> Flow[None]:
    """By tenant, consumer and event type: set, changed, switched off, removed."""
    place = (b.tenant, "consumer", "order")

    def read_windows() -> Flow[dict[str, int]]:
        windows = expect((yield from ReadSettings()), StoreSettings).windows
        return {event_type: us for (whose, _, event_type), us in windows.items() if whose == b.tenant}

    equal((yield from read_windows()), {}, "windows of a new tenant")
    for window_us in (b.us(LONG), b.us(SHORT), 0):
        equal((yield from SetWindow(*place, window_us)), None, "the answer")
        equal((yield from read_windows()), {"order": window_us}, "windows")
    yield from SetWindow(b.tenant, "consumer", "", b.us(LONG))
    equal((yield from read_windows()), {"order": 0, "": b.us(LONG)}, "windows")
    yield from SetWindow(*place, None)
    yield from SetWindow(*place, None)
    equal((yield from read_windows()), {"": b.us(LONG)}, "windows after a removal")


@scenario()
def a_new_window_leaves_what_is_stored(b: ScenarioContext) -> Flow[None]:
    """Stored expiries stay, unless they are asked to move."""
    yield from b.finish(event_type="order")
    before = yield from b.record()
    yield from SetWindow(b.tenant, "consumer", "order", b.us(SHORT))
    yield from SetWindow(b.tenant, "consumer", "", b.us(SHORT))
    equal((yield from b.record()), before, "the record after a change of its window")


@scenario()
def a_new_window_may_move_what_is_stored(b: ScenarioContext) -> Flow[None]:
    """With `existing` settled records of that type expire by the new window; others stay."""
    done = yield from b.hold("done", event_type="order")
    expect((yield from done.settle("done", b"r")), Completed)
    failed = yield from b.hold("failed", event_type="order")
    yield from failed.settle("failed", b"r")
    slid = yield from b.hold("slid", event_type="order", sliding=True)
    yield from b.later(1)
    yield from slid.settle("done", b"r")
    others: list[str | Id] = [
        "running",
        "type",
        b.id("consumer", consumer="other"),
        b.id("tenant", tenant="-other"),
    ]
    yield from b.hold("running", event_type="order")
    yield from b.finish("type", event_type="mail")
    for place in others[2:]:
        yield from b.finish(place, event_type="order")
    before = yield from b.records(*others)
    yield from SetWindow(b.tenant, "consumer", "order", b.us(2 * LONG), existing=True)
    for key in ("done", "failed", "slid"):
        record = yield from b.record(key)
        start = record.first_seen_us if key == "slid" else record.settled_at_us
        equal(record.expires_at_us, start + b.us(2 * LONG), f"expires_at of {key}")
    equal((yield from b.records(*others)), before, "the other records")
    yield from SetWindow(b.tenant, "consumer", "order", 0, existing=True)
    expect((yield from b.hold("done")).granted, object, attempt=1)


@scenario()
def a_window_of_every_type_moves_all(b: ScenarioContext) -> Flow[None]:
    """A consumer's own window, changed with `existing`, moves its records of all types that have none of their own."""
    yield from b.finish("one", event_type="order")
    yield from b.finish("two")
    yield from SetWindow(b.tenant, "consumer", "mail", b.us(LONG))
    yield from b.finish("own", event_type="mail")
    own = yield from b.record("own")
    yield from SetWindow(b.tenant, "consumer", "", b.us(2 * LONG), existing=True)
    for key in ("one", "two"):
        record = expect((yield from b.record(key)), Record)
        equal(record.expires_at_us, record.settled_at_us + b.us(2 * LONG), f"expires_at of {key}")
    equal((yield from b.record("own")), own, "the record whose type has a window of its own")


HOUR_US = 3600 * 1_000_000


@scenario()
def a_forgotten_key_is_new(b: ScenarioContext) -> Flow[None]:
    """Attempt 1, no steps, no journal, no value; only the fence goes on."""
    released = yield from b.hold("journal", journal=b"old payload", lease=LONG)
    yield from released.renew(step=("mail", b"r"))
    yield from released.settle("released")
    failed = yield from b.hold("failed")
    yield from failed.settle("failed", b"r")
    yield from b.finish("done")
    for key in ("journal", "failed", "done"):
        old = yield from b.record(key)
        forgotten = expect((yield from Forget(b.id(key))), Forgotten)
        check(forgotten.fence > old.fence, f"the tombstone of {key} has no greater fence")
        expect((yield from Lookup(b.id(key))), Absent)
        heir = yield from b.hold(key)
        expect(heir.granted, Granted, attempt=1, steps=(), journal=None)
        check(heir.fence > forgotten.fence, f"the fence of {key} did not grow past the tombstone's")
        check(heir.granted.first_seen_us > old.first_seen_us, f"first_seen of {key} is the old one's")
        expect((yield from heir.settle("done", b"rnew")), Completed, recreated=False)
        expect((yield from b.claim(key)), Known, value=b"rnew")


@scenario()
def a_running_claim_is_not_forgotten_unasked(b: ScenarioContext) -> Flow[None]:
    """`Busy` for the rest of the lease, and the claim goes on as if nobody had asked."""
    held = yield from b.hold(lease=LONG)
    before = yield from b.record()
    busy = expect((yield from Forget(b.id())), Busy, recoverable=False)
    check(0 < busy.retry_after_s * 1e6 <= b.us(LONG), f"{busy} is not the rest of the lease")
    equal((yield from b.record()), before, "the record after a refused forget")
    expect((yield from held.settle()), Completed, already=False, recreated=False)
    yield from b.hold("journal", journal=b"payload")
    expect((yield from Forget(b.id("journal"))), Busy, recoverable=True)


@scenario()
def a_forced_forget_stops_the_running_claim(b: ScenarioContext) -> Flow[None]:
    """Its owner is `Lost` whatever it sends, before and after the key is claimed again."""
    held = yield from b.hold(lease=LONG)
    expect((yield from Forget(b.id(), force=True)), Forgotten)
    yield from _all_lost(held)
    heir = yield from b.hold()
    equal(heir.granted.attempt, 1, "attempt")
    yield from _all_lost(held)
    expect((yield from heir.settle("done", b"rnew")), Completed, recreated=False)
    expect((yield from b.claim()), Known, value=b"rnew")


def _all_lost(held: HeldClaim) -> Flow[None]:
    for to in ENDS:
        expect((yield from held.settle(to, b"rold")), Lost)
    expect((yield from held.renew()), Lost)


@scenario()
def a_claim_that_nobody_runs_is_forgotten(b: ScenarioContext) -> Flow[None]:
    """Released ones, delayed or not, and orphans need no force."""
    held = yield from b.hold("delayed")
    yield from held.settle("released", delay=LONG)
    held = yield from b.hold("released")
    yield from held.settle("released")
    orphan = yield from b.hold("orphan", lease=SHORT)
    yield from b.later()
    for key in ("delayed", "released", "orphan"):
        expect((yield from Forget(b.id(key))), Forgotten)
    expect((yield from orphan.settle("done", b"r")), Lost)
    for key in ("delayed", "released", "orphan"):
        expect((yield from b.claim(key)), Granted, attempt=1)


@scenario()
def what_is_absent_is_not_forgotten(b: ScenarioContext) -> Flow[None]:
    """`Absent` for a key never seen, expired, or forgotten before."""
    expect((yield from Forget(b.id("never"))), Absent)
    expect((yield from Lookup(b.id("never"))), Absent)
    yield from b.finish("expired", window=SHORT)
    yield from b.finish("forgotten")
    expect((yield from Forget(b.id("forgotten"))), Forgotten)
    expect((yield from Forget(b.id("forgotten"))), Absent)
    expect((yield from Forget(b.id("forgotten"), force=True)), Absent)
    yield from b.later()
    expect((yield from Forget(b.id("expired"))), Absent)


@scenario()
def forget_takes_only_the_record_it_means(b: ScenarioContext) -> Flow[None]:
    """With a fence or a state it compares: a record that has changed meanwhile is `Lost` to it, and stays."""
    held = yield from b.hold()
    yield from held.settle("failed", b"r")
    expect((yield from Forget(b.id(), fence=held.fence - 1)), Lost)
    expect((yield from Forget(b.id(), fence=held.fence + 1)), Lost)
    expect((yield from Forget(b.id(), state="done")), Lost)
    expect((yield from Forget(b.id(), fence=held.fence, state="unknown")), Lost)
    expect((yield from Forget(b.id(), fence=held.fence - 1, state="failed", force=True)), Lost)
    expect((yield from b.claim()), Known, state="failed")
    expect((yield from Forget(b.id(), fence=held.fence, state="failed")), Forgotten)


@scenario("manual")
def a_tombstone_lasts_as_long_as_a_lease_may(b: ScenarioContext) -> Flow[None]:
    """For 12 hours a late completion of the forgotten run is `Lost`, purged or not; then it is absent."""
    for key in ("early", "later"):
        held = yield from b.hold(key, window=40 * 3600)
        expect((yield from Forget(b.id(key), force=True)), Forgotten)
        yield from Advance(12 * HOUR_US - 60_000_000 if key == "early" else 12 * HOUR_US + 60_000_000)
        yield from b.purge()
        answer = yield from held.settle("done", b"r")
        if key == "early":
            expect(answer, Lost)
            expect((yield from Lookup(b.id(key))), Absent)
        else:
            expect(answer, Completed, recreated=True)


@scenario()
def a_forgotten_key_may_be_late(b: ScenarioContext) -> Flow[None]:
    """A tombstone is absent to an old event too."""
    yield from b.finish()
    expect((yield from Forget(b.id())), Forgotten)
    now = yield from b.now()
    claim = b.claim(event_time_us=now - b.us(10 * LONG), refuse_late=True)
    expect((yield from claim), Late)
