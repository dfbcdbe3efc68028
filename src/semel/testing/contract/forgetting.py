"""Making a key new again: forget, its tombstone, and what it refuses."""

from semel.core.commands import Flow, Forget, Granted, Known, Lookup
from semel.testing.contract.bench import (
    ENDS,
    LONG,
    SHORT,
    Advance,
    ScenarioContext,
    HeldClaim,
    check,
    equal,
    expect,
    scenario,
)
from semel.types import Absent, Busy, Completed, Forgotten, Late, Lost

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
        check(heir.granted.first_seen > old.first_seen, f"first_seen of {key} is the old one's")
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
