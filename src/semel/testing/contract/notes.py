"""What a record carries for its next attempt: steps and the journaled payload."""

from semel.core.commands import Flow, Forget, Granted, Known, Page, Scan
from semel.testing.contract.bench import LONG, SETTLED, SHORT, ScenarioContext, check, equal, expect, scenario
from semel.types import FOREVER, Busy, Completed, Id, Lost, Record, Renewed

STEPS_MAX = 64
"""As many steps as a handler may have."""


@scenario()
def steps_are_given_to_the_next_attempt(b: ScenarioContext) -> Flow[None]:
    """In the order of their making and byte for byte, after a release and after a crash alike."""
    steps: tuple[tuple[str, bytes | None], ...] = (("charge", b"r\x00\xff"), ("none", None), ("mail", b""))
    released = yield from b.hold("released")
    orphan = yield from b.hold("orphan", lease=SHORT)
    for held in (released, orphan):
        for step in steps:
            expect((yield from held.renew(SHORT if held is orphan else LONG, step)), Renewed)
    equal((yield from b.record("released")).steps, steps, "steps of the running claim")
    equal((yield from released.claim), Granted(
        released.fence, 1, (yield from b.record("released")).lease_until, released.granted.first_seen, steps
    ), "the repeated claim")  # fmt: skip
    expect((yield from released.settle("released")), Completed)
    yield from b.later()
    for key in ("released", "orphan"):
        heir = yield from b.hold(key)
        expect(heir.granted, Granted, attempt=2, steps=steps)
        expect((yield from heir.renew(step=("last", b"r"))), Renewed)
        expect((yield from heir.settle("released")), Completed)
        again = yield from b.hold(key)
        expect(again.granted, Granted, attempt=3, steps=(*steps, ("last", b"r")))


@scenario()
def a_repeated_step_is_kept_once(b: ScenarioContext) -> Flow[None]:
    """A step sent again after a lost reply is there once, with its first value, and still renews."""
    held = yield from b.hold(lease=SHORT)
    expect((yield from held.renew(SHORT, ("mail", b"first"))), Renewed)
    renewed = expect((yield from held.renew(LONG, ("mail", b"second"))), Renewed)
    record = yield from b.record()
    equal(record.steps, (("mail", b"first"),), "steps")
    equal(record.lease_until, renewed.lease_until, "lease_until")


@scenario()
def a_step_renews_the_lease(b: ScenarioContext) -> Flow[None]:
    """A step is a renewal that carries a note: lease and expiry move by the same amount."""
    held = yield from b.hold(lease=LONG, window=LONG)
    before = yield from b.record()
    renewed = expect((yield from held.renew(2 * LONG, ("mail", b"r"))), Renewed)
    after = yield from b.record()
    equal(after.lease_until, renewed.lease_until, "lease_until")
    check(after.lease_until > before.lease_until, "the step did not renew the lease")
    moved = after.lease_until - before.lease_until
    equal(after.expires_at - before.expires_at, moved, "how far the expiry moved")


@scenario()
def a_renewal_keeps_the_steps(b: ScenarioContext) -> Flow[None]:
    """A plain renewal between two steps drops neither."""
    held = yield from b.hold()
    yield from held.renew(step=("one", b"1"))
    yield from held.renew()
    yield from held.renew(step=("two", b"2"))
    equal((yield from b.record()).steps, (("one", b"1"), ("two", b"2")), "steps")


@scenario()
def a_zombies_step_is_not_written(b: ScenarioContext) -> Flow[None]:
    """A step of an attempt that was taken over is `Lost`, and its successor's record has none of it."""
    zombie = yield from b.hold(lease=SHORT)
    yield from b.later()
    yield from b.hold()
    expect((yield from zombie.renew(step=("mail", b"r"))), Lost)
    equal((yield from b.record()).steps, (), "steps")


@scenario()
def a_record_holds_all_the_steps_there_may_be(b: ScenarioContext) -> Flow[None]:
    """As many as a handler may have, in order."""
    held = yield from b.hold()
    steps = tuple((f"step {number}", b"%d" % number) for number in range(STEPS_MAX))
    for step in steps:
        expect((yield from held.renew(step=step)), Renewed)
    yield from held.settle("released")
    heir = yield from b.hold()
    equal(heir.granted.steps, steps, "steps")


# --- journal ------------------------------------------------------------------------------------


@scenario()
def a_journaled_payload_is_kept_with_its_claim(b: ScenarioContext) -> Flow[None]:
    """Claim and payload are one write: whoever takes over gets the payload, and others learn that it is safe."""
    for key, payload in (("some", b"payload\x00\xff"), ("empty", b"")):
        held = yield from b.hold(key, lease=SHORT, journal=payload)
        equal(held.granted.journal, payload, "journal")
        expect((yield from held.renew(LONG)), Renewed)
        expect((yield from b.claim(key)), Busy, recoverable=True)
        equal((yield from b.record(key)).journal, payload, "journal of the record")
        expect((yield from held.settle("released")), Completed)
        heir = yield from b.hold(key)
        expect(heir.granted, Granted, attempt=2, journal=payload)


@scenario()
def a_journal_is_written_only_if_new(b: ScenarioContext) -> Flow[None]:
    """A duplicate's payload neither replaces the first one's nor reaches a settled record."""
    held = yield from b.hold("first", lease=SHORT, journal=b"first")
    yield from b.later()
    heir = yield from b.hold("first", journal=b"second")
    equal(heir.granted.journal, b"first", "journal after a take-over")
    expect((yield from b.claim("first", journal=b"third")), Busy, recoverable=True)
    equal((yield from b.record("first")).journal, b"first", "journal after a busy claim")
    expect((yield from held.settle("done")), Lost)
    yield from b.finish("done", b"rvalue", journal=b"payload")
    expect((yield from b.claim("done", journal=b"again")), Known, value=b"rvalue")
    equal((yield from b.record("done")).journal, None, "journal of a settled record")


@scenario()
def a_take_over_may_bring_the_first_journal(b: ScenarioContext) -> Flow[None]:
    """Where the record had no payload, it is kept with the claim that brings one."""
    held = yield from b.hold()
    expect((yield from held.settle("released")), Completed)
    heir = yield from b.hold(lease=SHORT, window=SHORT, journal=b"payload")
    expect(heir.granted, Granted, attempt=2, journal=b"payload")
    expect((yield from b.record()), Record, journal=b"payload", expires_at=FOREVER)


@scenario()
def orphans_with_a_journal_are_found(b: ScenarioContext) -> Flow[None]:
    """A sweep sees the journaled claims whose lease is over, and no others."""
    yield from b.hold("plain orphan", lease=SHORT)
    yield from b.hold("orphan", lease=SHORT, journal=b"payload")
    released = yield from b.hold("released", journal=b"payload")
    yield from released.settle("released", delay=SHORT)
    held = yield from b.hold("delayed", journal=b"payload")
    yield from held.settle("released", delay=LONG)
    yield from b.hold("running", lease=LONG, journal=b"payload")
    for to in SETTLED:
        held = yield from b.hold(to, lease=SHORT, journal=b"payload")
        yield from held.settle(to, b"r")
    yield from b.hold("forgotten", lease=SHORT, journal=b"payload")
    yield from Forget(b.id("forgotten"), force=True)
    yield from b.later()
    found = yield from _orphans(b)
    equal(found, {b.id("orphan"): b"payload", b.id("released"): b"payload"}, "orphans")
    yield from b.hold("orphan")
    equal((yield from _orphans(b)), {b.id("released"): b"payload"}, "orphans after a take-over")


def _orphans(b: ScenarioContext) -> Flow[dict[Id, bytes | None]]:
    page = expect((yield from Scan(tenant=b.tenant, orphaned=True)), Page, cursor=None)
    return {record.id: record.journal for record in page.records}
