"""Settling a claim: complete, fail, release and renew, each checked by owner and fence."""

from typing import Any

from semel.core.commands import Flow, Forget, Granted, Known, Lookup
from semel.testing.contract.harness import (
    ENDS,
    LONG,
    SETTLED,
    SHORT,
    HeldClaim,
    ScenarioContext,
    check,
    equal,
    expect,
    grows,
    scenario,
)
from semel.types import Absent, Busy, Completed, Forgotten, Lost, Record, Renewed


@scenario()
def a_completed_event_is_replayed(b: ScenarioContext) -> Flow[None]:
    """Every duplicate of a completed event gets the stored value and nothing runs."""
    held = yield from b.hold()
    done = expect((yield from held.settle("done", b'j{"id":1}')), Completed, already=False, recreated=False)
    for _ in range(2):
        known = expect((yield from b.claim()), Known, state="done", value=b'j{"id":1}', fence=held.fence)
        equal(known.first_seen_us, held.granted.first_seen_us, "first_seen")
        equal(known.settled_at_us, done.at_us, "settled_at")
    expect((yield from held.claim), Known)


@scenario()
def a_failed_event_is_replayed(b: ScenarioContext) -> Flow[None]:
    """A permanent failure is stored and answers every duplicate."""
    held = yield from b.hold()
    expect((yield from held.settle("failed", b'j["E","no"]')), Completed, already=False, recreated=False)
    expect((yield from b.claim()), Known, state="failed", value=b'j["E","no"]', fence=held.fence)


@scenario()
def a_repeated_completion_is_already_there(b: ScenarioContext) -> Flow[None]:
    """A completion or failure sent again after a lost reply is `already`, and the first value stays."""
    for to in SETTLED:
        held = yield from b.hold(to)
        first = expect((yield from held.settle(to, b"r1")), Completed, already=False)
        yield from b.later(1)
        same = expect((yield from held.settle(to, b"r1")), Completed, already=True, kept=True)
        equal(same.at_us, first.at_us, "the time of a completion that is sent again")
        other = expect((yield from held.settle(to, b"r2")), Completed, already=True, recreated=False)
        equal((other.kept, other.at_us), (False, first.at_us), "whether another value is kept, and when")
        expect((yield from b.claim(to)), Known, value=b"r1", settled_at_us=first.at_us)


@scenario()
def what_is_settled_stays_settled(b: ScenarioContext) -> Flow[None]:
    """A done record does not become failed, nor a failed one done, not even by its own owner."""
    for to in SETTLED:
        held = yield from b.hold(to)
        yield from held.settle(to, b"r1")
        for other in ENDS:
            if other != to:
                expect((yield from held.settle(other, b"r2")), Lost)
        expect((yield from held.renew()), Lost)
        expect((yield from b.claim(to)), Known, state=to, value=b"r1")


@scenario()
def a_wrong_fence_or_owner_is_lost(b: ScenarioContext) -> Flow[None]:
    """A settle or renewal needs the claim's fence and owner; otherwise nothing is written."""
    held = yield from b.hold()
    before = yield from b.record()
    wrong: list[dict[str, Any]] = [
        {"fence": held.fence - 1},
        {"fence": held.fence + 1},
        {"owner": b.owner()},
        {"owner": b"\0" * 16},
        {"owner": b""},
        {"owner": b.owner(), "fence": held.fence + 1},
    ]
    for fields in wrong:
        for to in ENDS:
            expect((yield from held.settle(to, b"rwrong", **fields)), Lost)
        expect((yield from held.renew(3 * LONG, **fields)), Lost)
        expect((yield from held.renew(3 * LONG, ("step", b"rwrong"), **fields)), Lost)
    equal((yield from b.record()), before, "the record after wrong writes")
    expect((yield from held.settle("done", b"rright")), Completed)
    expect((yield from b.claim()), Known, value=b"rright")


@scenario()
def a_wrong_fence_or_owner_is_lost_on_what_is_settled(b: ScenarioContext) -> Flow[None]:
    """Only the owner with the right fence gets `already`."""
    for to in SETTLED:
        held = yield from b.hold(to)
        yield from held.settle(to, b"r1")
        before = yield from b.record(to)
        expect((yield from held.settle(to, b"r2", fence=held.fence - 1)), Lost)
        expect((yield from held.settle(to, b"r2", fence=held.fence + 1)), Lost)
        expect((yield from held.settle(to, b"r2", owner=b.owner())), Lost)
        equal((yield from b.record(to)), before, "the record after wrong writes")


@scenario()
def a_zombie_changes_nothing(b: ScenarioContext) -> Flow[None]:
    """Every write of an owner that was taken over is `Lost`, while its successor runs and afterwards."""
    zombie = yield from b.hold(lease=SHORT)
    yield from b.later()
    heir = yield from b.hold()
    before = yield from b.record()
    yield from _all_lost(zombie)
    equal((yield from b.record()), before, "the successor's record")
    expect((yield from heir.renew()), Renewed)
    expect((yield from heir.settle("done", b"rheir")), Completed, already=False, recreated=False)
    before = yield from b.record()
    yield from _all_lost(zombie)
    equal((yield from b.record()), before, "the successor's result")
    expect((yield from b.claim()), Known, value=b"rheir", fence=heir.fence)


def _all_lost(held: HeldClaim) -> Flow[None]:
    for to in ENDS:
        expect((yield from held.settle(to, b"rlost")), Lost)
    expect((yield from held.renew()), Lost)


@scenario()
def a_lease_over_but_not_taken_over_may_still_end(b: ScenarioContext) -> Flow[None]:
    """Nobody else ran, so the late owner's completion, failure, release and renewal count."""
    for to in SETTLED:
        held = yield from b.hold(to, lease=SHORT)
        yield from b.later()
        expect((yield from held.settle(to, b"rlate")), Completed, already=False, recreated=False)
        expect((yield from b.claim(to)), Known, state=to, value=b"rlate")
    held = yield from b.hold("released", lease=SHORT)
    yield from b.later()
    expect((yield from held.settle("released", delay=LONG)), Completed)
    expect((yield from b.claim("released")), Busy)
    held = yield from b.hold("renewed", lease=SHORT)
    yield from b.later()
    expect((yield from held.renew(LONG)), Renewed)
    expect((yield from b.claim("renewed")), Busy)


# --- release ------------------------------------------------------------------------------------


@scenario()
def a_released_key_is_free_at_once(b: ScenarioContext) -> Flow[None]:
    """After a release the next claim runs as the next attempt and gets the stored steps."""
    held = yield from b.hold(fingerprint=b"\1print", event_type="order")
    yield from held.renew(step=("mail", b"rsent"))
    expect((yield from held.settle("released")), Completed, already=False, recreated=False)
    after = yield from b.record()
    equal((after.state, after.owner, after.attempt), ("claimed", b"", 1), "state, owner and attempt")
    heir = yield from b.hold()
    equal(heir.granted.attempt, 2, "attempt")
    equal(heir.granted.steps, (("mail", b"rsent"),), "steps")
    equal(heir.granted.first_seen_us, held.granted.first_seen_us, "first_seen")
    check(heir.fence > held.fence, "the fence did not grow")
    record = yield from b.record()
    equal((record.fingerprint, record.event_type), (b"\1print", "order"), "fingerprint and event type")


@scenario()
def a_release_gives_up_ownership(b: ScenarioContext) -> Flow[None]:
    """A renewal or completion in flight cannot revive a released claim; a repeated release is `Lost`."""
    held = yield from b.hold()
    expect((yield from held.settle("released", delay=LONG)), Completed)
    before = yield from b.record()
    yield from _all_lost(held)
    for to in ENDS:
        expect((yield from held.settle(to, b"r", owner=b"")), Lost)
    expect((yield from held.renew(owner=b"")), Lost)
    equal((yield from b.record()), before, "the released record")


@scenario()
def a_delayed_release_holds_everybody_off(b: ScenarioContext) -> Flow[None]:
    """Until the delay is over every claim gets `Busy` for the rest of it, the releaser's too."""
    held = yield from b.hold(lease=SHORT)
    expect((yield from held.settle("released", delay=LONG)), Completed)
    for claim in (b.claim(), held.claim):
        busy = expect((yield from claim), Busy, recoverable=False)
        rest_us = busy.retry_after_s * 1e6
        check(b.us(SHORT) < rest_us <= b.us(LONG), f"{busy} is not the rest of the delay")


@scenario()
def a_delayed_release_ends(b: ScenarioContext) -> Flow[None]:
    """When the delay is over the key can be claimed, although the lease would still run."""
    held = yield from b.hold(lease=LONG)
    expect((yield from held.settle("released", delay=SHORT)), Completed)
    yield from b.later()
    heir = yield from b.hold(owner=held.claim.owner)
    equal(heir.granted.attempt, 2, "attempt")


@scenario()
def a_release_may_give_the_attempt_back(b: ScenarioContext) -> Flow[None]:
    """A claim released before it started, or by a shutdown, does not count as an attempt."""
    attempts = []
    for count_attempt in (False, True, False, False, True):
        held = yield from b.hold()
        attempts.append(held.granted.attempt)
        expect((yield from held.settle("released", count_attempt=count_attempt)), Completed)
    held = yield from b.hold()
    equal([*attempts, held.granted.attempt], [1, 1, 2, 2, 2, 3], "attempts")


@scenario()
def a_release_keeps_the_window_apart(b: ScenarioContext) -> Flow[None]:
    """A release moves the expiry with the lease, so that attempts are remembered for the window."""
    held = yield from b.hold(lease=LONG, window=LONG)
    before = yield from b.record()
    yield from held.settle("released", delay=SHORT)
    after = yield from b.record()
    moved = after.lease_until_us - before.lease_until_us
    equal(after.expires_at_us - before.expires_at_us, moved, "how far the expiry moved")
    check(moved < 0, "the release did not end the lease")


@scenario()
def an_absent_record_is_not_released(b: ScenarioContext) -> Flow[None]:
    """Releasing, renewing or quarantining a record that is not there is `Lost` and writes nothing."""
    now = yield from b.now()
    held = HeldClaim(b.claim(), _granted_at(now), b.unit_us)
    expect((yield from held.settle("released")), Lost)
    expect((yield from held.settle("unknown")), Lost)
    expect((yield from held.renew()), Lost)
    expect((yield from held.renew(step=("step", b"r"))), Lost)
    expect((yield from Lookup(b.id())), Absent)


# --- recreated ----------------------------------------------------------------------------------


def _granted_at(fence: int) -> Granted:
    return Granted(fence, 1, fence, fence)


@scenario()
def a_lost_record_is_recreated(b: ScenarioContext) -> Flow[None]:
    """The store lost the record of an effect that exists: the completion is written and answered `recreated`."""
    for to in SETTLED:
        now = yield from b.now()
        held = HeldClaim(b.claim(to, lease=SHORT, window=LONG), _granted_at(now), b.unit_us)
        expect((yield from held.settle(to, b"rlost")), Completed, recreated=True, already=False)
        record = yield from b.record(to)
        equal(record.expires_at_us, now + b.us(SHORT) + b.us(LONG), "expires_at")
        equal((record.state, record.owner, record.fence), (to, held.claim.owner, now), "state, owner, fence")
        expect((yield from b.claim(to)), Known, state=to, value=b"rlost", fence=now)
        expect((yield from held.settle(to, b"r2")), Completed, already=True, recreated=False)
        expect((yield from held.settle(to, b"r2", owner=b.owner())), Lost)
        expect((yield from b.claim(to)), Known, value=b"rlost")


@scenario()
def a_lost_sliding_record_keeps_its_window(b: ScenarioContext) -> Flow[None]:
    """A recreated record whose window counts from the claim expires at the fence plus the window."""
    now = yield from b.now()
    held = HeldClaim(b.claim(lease=SHORT, window=LONG, sliding=True), _granted_at(now), b.unit_us)
    expect((yield from held.settle("done", b"rlost")), Completed, recreated=True)
    record = yield from b.record()
    equal(record.expires_at_us, now + b.us(LONG), "expires_at")


@scenario()
def what_would_have_expired_is_not_recreated(b: ScenarioContext) -> Flow[None]:
    """A completion so late that its record would have expired gets the same answer and is not written."""
    now = yield from b.now()
    for to in SETTLED:
        for sliding, age in ((False, 2 * LONG + 1), (True, LONG + 1)):
            key = f"{to}-{sliding}"
            held = HeldClaim(b.claim(key, sliding=sliding), _granted_at(now - b.us(age)), b.unit_us)
            expect((yield from held.settle(to, b"rlost")), Completed, recreated=True)
            expect((yield from Lookup(b.id(key))), Absent)
            heir = yield from b.hold(key)
            equal(heir.granted.attempt, 1, "attempt")


@scenario()
def a_fence_ahead_of_the_clock_still_grows(b: ScenarioContext) -> Flow[None]:
    """A store that lost its data and whose clock went back continues from the fence of a recreated record."""
    ahead = (yield from b.now()) + b.us(LONG)
    held = HeldClaim(b.claim(), _granted_at(ahead), b.unit_us)
    expect((yield from held.settle("done", b"r")), Completed, recreated=True)
    forgotten = expect((yield from Forget(b.id())), Forgotten)
    heir = yield from b.hold()
    grows([ahead, forgotten.fence, heir.fence], "fences")


@scenario()
def a_lost_record_claimed_again_is_not_overwritten(b: ScenarioContext) -> Flow[None]:
    """After another owner claimed the lost key, the first run's completion is `Lost`."""
    now = yield from b.now()
    lost = HeldClaim(b.claim(), _granted_at(now - 1), b.unit_us)
    heir = yield from b.hold()
    expect((yield from lost.settle("done", b"rlost")), Lost)
    expect((yield from heir.settle("done", b"rheir")), Completed, recreated=False)
    expect((yield from b.claim()), Known, value=b"rheir")


# --- renew --------------------------------------------------------------------------------------


@scenario()
def a_renewal_moves_lease_and_expiry_alike(b: ScenarioContext) -> Flow[None]:
    """The lease runs from the renewal, and the expiry moves by the same amount."""
    held = yield from b.hold(lease=LONG, window=LONG)
    before = yield from b.record()
    yield from b.later(1)
    renewed = expect((yield from held.renew(2 * LONG)), Renewed)
    after = yield from b.record()
    now = yield from b.now()
    equal(after.lease_until_us, renewed.lease_until_us, "lease_until")
    check(
        before.lease_until_us + b.us(LONG) < after.lease_until_us <= now + b.us(2 * LONG),
        "the lease does not run from the renewal",
    )
    moved = after.lease_until_us - before.lease_until_us
    equal(after.expires_at_us - before.expires_at_us, moved, "how far the expiry moved")
    equal((after.attempt, after.fence), (before.attempt, before.fence), "attempt and fence")


@scenario()
def a_renewed_claim_outlives_its_first_lease(b: ScenarioContext) -> Flow[None]:
    """A handler that runs for several leases keeps its key and completes normally."""
    held = yield from b.hold(lease=SHORT, window=SHORT)
    expect((yield from held.renew(LONG)), Renewed)
    yield from b.later(2 * SHORT + 1)
    expect((yield from b.claim()), Busy)
    expect((yield from held.settle("done", b"r", window_us=b.us(LONG))), Completed, recreated=False)


@scenario()
def a_renewal_may_shorten(b: ScenarioContext) -> Flow[None]:
    """A renewal sets the lease to now plus its length, even if that is sooner than before."""
    held = yield from b.hold(lease=LONG)
    expect((yield from held.renew(SHORT)), Renewed)
    yield from b.later()
    heir = yield from b.hold()
    equal(heir.granted.attempt, 2, "attempt")


@scenario()
def a_take_over_updates_event_type_and_metadata(b: ScenarioContext) -> Flow[None]:
    """Event type and metadata of a take-over replace the old ones; without them, the old ones stay."""
    for key, event_type, meta in (("none", "", None), ("better", "order.paid", b"new")):
        held = yield from b.hold(key, event_type="order", meta=b"old")
        expect((yield from held.settle("released")), Completed)
        yield from b.hold(key, event_type=event_type, meta=meta)
        expect((yield from b.record(key)), Record, event_type=event_type or "order", meta=meta or b"old")


@scenario()
def a_record_shows_the_fields_of_its_claim(b: ScenarioContext) -> Flow[None]:
    """A lookup shows event type, metadata, fingerprint and times as the claim gave them."""
    held = yield from b.hold(event_type="order.paid", meta=b"\x00meta\xff", fingerprint=b"\1fp")
    record = yield from b.record()
    expect(
        record, Record, id=b.id(), state="claimed", owner=held.claim.owner, fence=held.fence, attempt=1,
        event_type="order.paid", meta=b"\x00meta\xff", fingerprint=b"\1fp", value=None,
        lease_until_us=held.granted.lease_until_us, first_seen_us=held.granted.first_seen_us,
    )  # fmt: skip
    done = expect((yield from held.settle("done", b"rv")), Completed)
    expect(
        (yield from b.record()), Record, state="done", value=b"rv", settled_at_us=done.at_us,
        expires_at_us=done.at_us + b.us(LONG), event_type="order.paid", meta=b"\x00meta\xff",
    )  # fmt: skip
