"""Events that must not run again by themselves: quarantine, unknown records, resolve."""

from msgspec.structs import replace

from semel.core.commands import Flow, Forget, Granted, Known, Lookup, Page, Resolve, Scan, Settle
from semel.testing.contract.harness import (
    LONG,
    SETTLED,
    SHORT,
    HeldClaim,
    ScenarioContext,
    check,
    equal,
    expect,
    scenario,
)
from semel.types import Absent, Busy, Completed, Forgotten, Lost, Record, Renewed, Unknown


def _orphan(b: ScenarioContext, key: str = "key") -> Flow[HeldClaim]:
    """Return a quarantined claim whose owner died."""
    held = yield from b.hold(key, lease=SHORT, quarantine=True)
    yield from b.later()
    return held


@scenario()
def a_quarantined_orphan_is_not_run_again(b: ScenarioContext) -> Flow[None]:
    """After its lease every claim, its own included, gets `Unknown`, dated from the end of the lease."""
    held = yield from _orphan(b)
    for claim in (b.claim(quarantine=True), b.claim(), held.claim):
        unknown = expect((yield from claim), Unknown)
        now = yield from b.now()
        check(
            held.granted.lease_until_us <= unknown.since_us <= now,
            f"{unknown} is not dated from the end of the lease",
        )
    record = yield from b.record()
    expect(record, Record, state="unknown", owner=held.claim.owner, fence=held.fence, attempt=1)


@scenario()
def an_orphan_is_unknown_before_anybody_claims(b: ScenarioContext) -> Flow[None]:
    """A lookup or scan shows it as unknown as soon as its lease is over, without a sweep."""
    held = yield from _orphan(b)
    expect((yield from b.record()), Record, state="unknown", owner=held.claim.owner, fence=held.fence)


@scenario()
def a_quarantined_claim_runs_like_any_other(b: ScenarioContext) -> Flow[None]:
    """While its lease runs others get `Busy`, its owner gets its own claim back and can complete it."""
    held = yield from b.hold(quarantine=True)
    expect((yield from held.claim), Granted, fence=held.granted.fence, attempt=1)
    expect((yield from b.claim(quarantine=True)), Busy)
    expect((yield from held.settle("done", b"r")), Completed, already=False, recreated=False)
    expect((yield from b.claim(quarantine=True)), Known, state="done", value=b"r")


@scenario()
def a_late_owner_may_still_settle_an_unknown_record(b: ScenarioContext) -> Flow[None]:
    """The owner of an unknown record can complete or fail it, with or without a claim in between."""
    for to in SETTLED:
        for asked in (False, True):
            key = f"{to}-{asked}"
            held = yield from _orphan(b, key)
            if asked:
                expect((yield from b.claim(key, quarantine=True)), Unknown)
            expect((yield from held.settle(to, b"r")), Completed, already=False, recreated=False)
            expect((yield from b.claim(key)), Known, state=to, value=b"r", fence=held.fence)
            record = yield from b.record(key)
            equal(record.expires_at_us, record.settled_at_us + b.us(LONG), "expires_at")


@scenario()
def an_unknown_record_is_not_revived(b: ScenarioContext) -> Flow[None]:
    """Its late owner's renewal and release are `Lost`: only a completion or failure settles it."""
    orphan = yield from _orphan(b, "orphan")
    settled = yield from b.hold("settled", quarantine=True)
    expect((yield from settled.settle("unknown")), Completed)
    for key, held in (("orphan", orphan), ("settled", settled)):
        for _ in range(2):
            expect((yield from held.renew()), Lost)
            expect((yield from held.renew(step=("step", b"r"))), Lost)
            expect((yield from held.settle("released")), Lost)
            expect((yield from b.claim(key, quarantine=True)), Unknown)
        expect((yield from held.settle("done", b"r", owner=b.owner())), Lost)
        expect((yield from held.settle("done", b"r", fence=held.fence + 1)), Lost)


@scenario()
def a_claim_may_be_settled_as_unknown(b: ScenarioContext) -> Flow[None]:
    """A handler whose result is not known settles its record as unknown; a second time is `already`."""
    held = yield from b.hold(quarantine=True)
    settled = expect((yield from held.settle("unknown")), Completed, already=False, recreated=False)
    expect((yield from held.settle("unknown")), Completed, already=True, recreated=False)
    equal((yield from b.claim(quarantine=True)), Unknown(settled.at_us), "the answer of a claim")
    expect((yield from b.record()), Record, state="unknown", owner=held.claim.owner, fence=held.fence)
    expect((yield from held.settle("done", b"r")), Completed, already=False)
    expect((yield from b.claim(quarantine=True)), Known, value=b"r")


@scenario()
def a_released_quarantine_claim_runs_again(b: ScenarioContext) -> Flow[None]:
    """A claim released before it started is not an orphan, even long after the release."""
    held = yield from b.hold("at once", lease=SHORT, quarantine=True)
    expect((yield from held.settle("released", count_attempt=False)), Completed)
    delayed = yield from b.hold("delayed", lease=SHORT, quarantine=True)
    expect((yield from delayed.settle("released", delay=SHORT)), Completed)
    yield from b.later()
    expect((yield from b.claim("at once", quarantine=True)), Granted, attempt=1)
    expect((yield from b.claim("delayed", quarantine=True)), Granted, attempt=2)


# --- resolve ------------------------------------------------------------------------------------


@scenario()
def resolve_to_done_answers_from_then_on(b: ScenarioContext) -> Flow[None]:
    """The value given to resolve is replayed for the window given with it."""
    held = yield from b.hold(lease=SHORT, quarantine=True, journal=b"payload")
    yield from b.later()
    resolve = Resolve(b.id(), held.fence, "done", b"rprobed", b.us(LONG))
    done = expect((yield from resolve), Completed, already=False, recreated=False)
    expect((yield from b.claim()), Known, state="done", value=b"rprobed", settled_at_us=done.at_us)
    expect((yield from b.record()), Record, expires_at_us=done.at_us + b.us(LONG), journal=None)
    expect((yield from Resolve(b.id(), held.fence, "done", b"r2", b.us(LONG))), Lost)
    expect((yield from held.settle("done", b"rlate")), Completed, already=True, kept=False, at_us=done.at_us)
    expect((yield from held.settle("done", b"rprobed")), Completed, already=True, kept=True)
    expect((yield from b.claim()), Known, value=b"rprobed")


@scenario()
def a_late_value_is_not_called_kept(b: ScenarioContext) -> Flow[None]:
    """After a resolve without a value the late owner's value is not stored, and its answer says so; and so for null."""
    for name, resolved, late in (
        ("none", None, b"rlate"),
        ("null", b"jnull", b"rlate"),
        ("some", b"r1", None),
    ):
        held = yield from b.hold(name, quarantine=True)
        expect((yield from held.settle("unknown")), Completed, kept=True)
        expect(
            (yield from Resolve(b.id(name), held.fence, "done", resolved, b.us(LONG))), Completed, kept=True
        )
        expect((yield from held.settle("done", late)), Completed, already=True, kept=False)
        expect((yield from held.settle("done", resolved)), Completed, already=True, kept=True)
        expect((yield from b.claim(name)), Known, value=resolved)


@scenario()
def resolve_to_absent_lets_it_run_again(b: ScenarioContext) -> Flow[None]:
    """The key is new, and its late owner's completion is `Lost` before and after the next claim."""
    held = yield from _orphan(b)
    forgotten = expect((yield from Resolve(b.id(), held.fence, "absent")), Forgotten)
    check(forgotten.fence > held.fence, "the tombstone has no greater fence")
    expect((yield from Lookup(b.id())), Absent)
    expect((yield from held.settle("done", b"rlate")), Lost)
    heir = yield from b.hold(quarantine=True)
    expect(heir.granted, Granted, attempt=1, steps=())
    check(heir.fence > forgotten.fence, "the fence did not grow past the tombstone's")
    expect((yield from held.settle("done", b"rlate")), Lost)


@scenario()
def resolve_to_absent_keeps_a_journal_for_the_sweep(b: ScenarioContext) -> Flow[None]:
    """The payload stays, as after a release before anything happened, because the source never sends it again."""
    held = yield from b.hold(quarantine=True, journal=b"rpayload")
    expect((yield from held.renew(step=("step", b"r"))), Renewed)
    expect((yield from held.settle("unknown")), Completed)
    forgotten = expect((yield from Resolve(b.id(), held.fence, "absent")), Forgotten)
    check(forgotten.fence > held.fence, "the fence did not grow")
    record = expect(
        (yield from b.record()), Record, state="claimed", owner=b"", journal=b"rpayload", attempt=0
    )
    equal((record.fence, record.steps, record.settled_at_us), (forgotten.fence, (), 0), "the record")
    page = expect((yield from Scan(tenant=b.tenant, orphaned=True)), Page)
    equal([each.key for each in page.records], [b.id()[2]], "records that a sweep finds")
    expect((yield from held.settle("done", b"rlate")), Lost)
    heir = yield from b.hold(quarantine=True)
    expect(heir.granted, Granted, attempt=1, steps=(), journal=b"rpayload")
    check(heir.fence > forgotten.fence, "the fence did not grow past that of the released record")
    expect((yield from held.settle("done", b"rlate")), Lost)


@scenario()
def resolve_to_claimed_goes_on_with_the_next_attempt(b: ScenarioContext) -> Flow[None]:
    """Nothing had happened: attempts, steps and journal stay; the claim belongs to the resolver, not the late owner."""
    held = yield from b.hold(quarantine=True, journal=b"rpayload")
    expect((yield from held.renew(step=("step", b"r"))), Renewed)
    expect((yield from held.settle("unknown")), Completed)
    heir = b.claim(quarantine=True)
    resolve = Resolve(b.id(), held.fence, "claimed", owner=heir.owner, lease_us=heir.lease_us)
    taken = expect((yield from resolve), Forgotten)
    check(taken.fence > held.fence, "the fence did not grow")
    record = expect(
        (yield from b.record()), Record, state="claimed", owner=heir.owner, attempt=2, settled_at_us=0
    )
    equal((record.fence, record.steps), (taken.fence, (("step", b"r"),)), "the record")
    check(record.lease_until_us > (yield from b.now()), "the lease does not run")
    expect((yield from held.settle("done", b"rlate")), Lost)
    expect((yield from resolve), Lost)
    expect((yield from b.claim(quarantine=True)), Busy)
    granted = expect((yield from heir), Granted, fence=taken.fence, attempt=2, steps=(("step", b"r"),))
    equal(granted.journal, b"rpayload", "the journal")
    expect((yield from Settle(heir.id, heir.owner, granted.fence, "done", b"r", b.us(LONG))), Completed)
    expect((yield from b.claim(quarantine=True)), Known, value=b"r")


@scenario()
def an_orphan_resolved_to_claimed_is_unknown_again_when_that_owner_dies(b: ScenarioContext) -> Flow[None]:
    """One resolver may take over an orphan with the fence that it saw, for the length of a lease."""
    held = yield from _orphan(b)
    heir = b.claim(lease=SHORT, quarantine=True)
    take = Resolve(b.id(), held.fence, "claimed", owner=heir.owner, lease_us=heir.lease_us)
    expect((yield from replace(take, fence=held.fence + 1)), Lost)
    taken = expect((yield from take), Forgotten)
    yield from b.later()
    expect((yield from b.record()), Record, state="unknown", fence=taken.fence, attempt=2)


@scenario()
def resolve_compares_the_fence_it_saw(b: ScenarioContext) -> Flow[None]:
    """With another fence than the record's, resolve changes nothing and the record stays unknown."""
    held = yield from _orphan(b)
    for fence in (held.fence - 1, held.fence + 1):
        expect((yield from Resolve(b.id(), fence, "done", b"r", b.us(LONG))), Lost)
        expect((yield from Resolve(b.id(), fence, "absent")), Lost)
    expect((yield from b.claim(quarantine=True)), Unknown)


@scenario()
def resolve_decides_only_what_is_unknown(b: ScenarioContext) -> Flow[None]:
    """For running, released, done, failed, forgotten and absent records resolve is `Lost` and changes nothing."""
    running = yield from b.hold("running", quarantine=True)
    released = yield from b.hold("released", quarantine=True)
    yield from released.settle("released")
    done = yield from b.finish("done")
    failed = yield from b.hold("failed")
    yield from failed.settle("failed", b"r")
    gone = yield from b.finish("forgotten")
    forgotten = expect((yield from Forget(b.id("forgotten"))), Forgotten)
    fences = {
        "running": running.fence,
        "released": released.fence,
        "done": done.fence,
        "failed": failed.fence,
        "forgotten": forgotten.fence,
        "absent": gone.fence,
    }
    for key, fence in fences.items():
        before = yield from Lookup(b.id(key))
        expect((yield from Resolve(b.id(key), fence, "done", b"r", b.us(LONG))), Lost)
        expect((yield from Resolve(b.id(key), fence, "absent")), Lost)
        equal((yield from Lookup(b.id(key))), before, f"the record of {key}")


@scenario()
def an_unknown_record_may_be_forgotten(b: ScenarioContext) -> Flow[None]:
    """Nobody runs it, so forget needs no `force`; a given fence and state are compared."""
    held = yield from _orphan(b)
    expect((yield from Forget(b.id(), state="claimed")), Lost)
    expect((yield from Forget(b.id(), fence=held.fence, state="unknown")), Forgotten)
    expect((yield from b.claim(quarantine=True)), Granted, attempt=1)
    expect((yield from held.settle("done", b"r")), Lost)
