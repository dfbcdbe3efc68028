"""Events with equal keys and their own times: near is one event, apart is two, old is late."""

from typing import Any

from semel.core.commands import Claim, Flow, Forget, Granted, Known, Lookup, Resolve, SetWindow
from semel.core.machine import AHEAD_US
from semel.testing.contract.harness import (
    LONG,
    SETTLED,
    SHORT,
    HeldClaim,
    ScenarioContext,
    Send,
    check,
    equal,
    expect,
    scenario,
)
from semel.types import (
    FOREVER,
    Absent,
    Busy,
    Completed,
    Forgotten,
    Late,
    Lost,
    Mismatch,
    Record,
    Renewed,
    Unknown,
)

APART = 60
"""Units of distance from which two events with equal keys are two events."""
OLD_PRINT, NEW_PRINT = b"\1old", b"\1new"


def at(
    b: ScenarioContext,
    time_us: int,
    key: str = "key",
    *,
    apart: float = APART,
    lateness: float = LONG,
    **more: Any,
) -> Claim:
    """Return a claim of an event that happened at `time_us`."""
    more = {"event_time_us": time_us, "apart_us": b.us(apart), "sliding": True} | more
    return b.claim(key, window=apart + lateness, **more)


def hold(b: ScenarioContext, time_us: int, key: str = "key", **more: Any) -> Flow[HeldClaim]:
    """Claim an event that must be free."""
    claim = at(b, time_us, key, **more)
    return HeldClaim(claim, expect((yield from claim), Granted), b.unit_us)


@scenario()
def equal_events_near_in_time_are_one(b: ScenarioContext) -> Flow[None]:
    """Less than the window before or after the accepted one is the same event, wherever the clock stands."""
    now = yield from b.now()
    apart = b.us(APART)
    held = yield from hold(b, now)
    for near in (0, 1, apart - 1, 1 - apart):
        expect((yield from at(b, now + near)), Busy)
    yield from held.settle("done", b"rv")
    failed = yield from hold(b, now, "failed")
    yield from failed.settle("failed", b"re")
    for near in (0, 1, apart - 1, 1 - apart):
        expect((yield from at(b, now + near)), Known, state="done", value=b"rv", fence=held.fence)
        expect((yield from at(b, now + near, "failed")), Known, state="failed", value=b"re")


@scenario()
def equal_events_apart_in_time_are_two(b: ScenarioContext) -> Flow[None]:
    """A genuine repeat after the window is new in every respect, except for its fence. Then its copies are known."""
    now = yield from b.now()
    for to in SETTLED:
        former = yield from hold(b, now, to, fingerprint=OLD_PRINT, event_type="old")
        yield from former.renew(step=("mail", b"r"))
        expect((yield from at(b, now + b.us(APART) - 1, to, fingerprint=OLD_PRINT)), Busy)  # it moves nothing
        yield from former.settle(to, b"rv")
        again = yield from hold(b, now + b.us(APART), to, fingerprint=NEW_PRINT)
        expect(again.granted, Granted, attempt=1, steps=(), journal=None)
        check(again.fence > former.fence, "the fence did not grow")
        check(
            again.granted.first_seen_us > former.granted.first_seen_us,
            "first_seen is that of the earlier event",
        )
        expect(
            (yield from b.record(to)), Record, anchor_us=now + b.us(APART), fingerprint=NEW_PRINT, value=None,
            event_type="", steps=(),
        )  # fmt: skip
        expect((yield from former.settle("done", b"r")), Lost)
        expect((yield from again.settle(to, b"r2")), Completed, recreated=False)
        expect((yield from at(b, now + b.us(2 * APART) - 1, to)), Known, value=b"r2")


@scenario()
def an_event_before_the_accepted_one_is_late(b: ScenarioContext) -> Flow[None]:
    """An event so far before the accepted one is late, never new, whatever the state of the accepted one."""
    now = yield from b.now()
    before = now - b.us(APART)
    held = yield from hold(b, now)
    expect((yield from at(b, before)), Late)
    yield from held.settle("released")
    expect((yield from at(b, before)), Late)
    held = yield from hold(b, now)
    yield from held.settle("done", b"rv")
    late = expect((yield from at(b, before)), Late)
    check(late.age_s * 1e6 >= b.us(APART), f"{late} is not the age of the event")
    expect((yield from at(b, before + 1)), Known)


@scenario()
def an_event_behind_or_ahead_of_the_clock_is_late(b: ScenarioContext) -> Flow[None]:
    """An event older than the memory, or too far in the future, is late, with or without `refuse_late`."""
    now = yield from b.now()
    old = now - b.us(LONG) - b.us(10)
    for refuse_late in (False, True):
        late = expect((yield from at(b, old, refuse_late=refuse_late)), Late)
        check(late.age_s * 1e6 >= b.us(LONG), f"{late} is not the age of the event")
        recent = old + b.us(LONG / 2)
        expect((yield from at(b, recent, f"recent {refuse_late}", refuse_late=refuse_late)), Granted)
    ahead = expect((yield from at(b, now + 2 * AHEAD_US)), Late)
    check(ahead.age_s < 0, f"{ahead} does not say that the event is ahead")
    expect((yield from Lookup(b.id())), Absent)
    expect((yield from at(b, now + AHEAD_US // 2)), Granted)
    held = yield from hold(b, now, "a year ahead")
    yield from held.settle("done", b"r")
    expect((yield from at(b, now + 365 * 86400 * 1_000_000, "a year ahead")), Late)
    expect((yield from at(b, now, "a year ahead")), Known)


@scenario()
def an_event_is_late_from_the_microsecond_on(b: ScenarioContext) -> Flow[None]:
    """The age of the event is compared with the lateness alone, not with how long the record is kept."""
    if not b.manual:
        return
    now = yield from b.now()
    yield from hold(b, now - b.us(LONG) + 1_000, "in time")
    expect((yield from at(b, now - b.us(LONG) - 1, "late")), Late)


@scenario()
def a_repeat_waits_for_the_former(b: ScenarioContext) -> Flow[None]:
    """One record holds one event: until it is settled, the next event with the key is busy and not a copy."""
    now = yield from b.now()
    later = now + b.us(APART)
    former = yield from hold(b, now)
    expect((yield from at(b, later)), Busy, recoverable=False)
    yield from former.settle("released")
    busy = expect((yield from at(b, later)), Busy, recoverable=False)
    check(0 < busy.retry_after_s * 1e6 <= b.us(APART), f"{busy} is more than the window")
    heir = yield from hold(b, now)
    equal(heir.granted.attempt, 2, "attempt")
    expect((yield from heir.settle("done", b"r")), Completed)
    expect((yield from at(b, later)), Granted, attempt=1)


@scenario()
def a_former_that_nobody_takes_up_gives_way(b: ScenarioContext) -> Flow[None]:
    """An attempt that died or was released delays the next event for a window, not for ever."""
    now = yield from b.now()
    died = yield from hold(b, now, "died", apart=SHORT, lease=SHORT)
    released = yield from hold(b, now, "released", apart=SHORT)
    yield from released.settle("released")
    later = now + b.us(SHORT)
    for key in ("died", "released") if b.manual else ():  # a busy computer may need longer than the window
        expect((yield from at(b, later, key, apart=SHORT)), Busy, recoverable=False)
    yield from b.later(2 * SHORT + 1)
    for key, former in (("died", died), ("released", released)):
        heir = yield from hold(b, later, key, apart=SHORT)
        equal((heir.granted.attempt, heir.granted.steps), (1, ()), "attempt and steps")
        check(heir.fence > former.fence, "the fence did not grow")
        expect((yield from former.settle("done", b"r")), Lost)


@scenario()
def a_reclaim_keeps_the_anchor(b: ScenarioContext) -> Flow[None]:
    """A take-over runs the accepted event, whatever the time of its own copy; the anchor does not move."""
    now = yield from b.now()
    later = now + b.us(APART / 2)
    yield from hold(b, now, "by time", lease=SHORT)
    yield from hold(b, now, "by another", lease=SHORT)
    yield from b.later()
    heirs = {
        "by time": (yield from hold(b, later, "by time")),
        "by another": (yield from b.hold("by another", window=SHORT)),
    }
    for key, heir in heirs.items():
        equal(heir.granted.attempt, 2, "attempt")
        expect((yield from heir.renew(2 * LONG)), Renewed)
        horizon = now + b.us(APART + LONG)
        record = yield from b.record(key)
        equal(
            (record.anchor_us, record.horizon_us, record.expires_at_us),
            (now, horizon, horizon),
            f"anchor of {key}",
        )
        yield from heir.settle("done", b"r")
        equal((yield from b.record(key)).expires_at_us, horizon, f"expires_at of {key}, done")
        expect((yield from at(b, now + b.us(APART) - 1, key)), Known)
        expect((yield from at(b, now + b.us(APART), key)), Granted, attempt=1)


@scenario()
def an_event_time_window_counts_from_the_event(b: ScenarioContext) -> Flow[None]:
    """The window ends when every copy would be late. No renewal, release, completion or new window moves its end."""
    now = yield from b.now()
    happened = now - b.us(LONG / 2)
    horizon = happened + b.us(APART + LONG)
    held = yield from hold(b, happened)
    expect(
        (yield from b.record()),
        Record,
        expires_at_us=horizon,
        anchor_us=happened,
        horizon_us=horizon,
        sliding=True,
    )
    renewed = expect((yield from held.renew(2 * LONG)), Renewed)
    expect((yield from b.record()), Record, expires_at_us=horizon, lease_until_us=renewed.lease_until_us)
    expect((yield from held.settle("released")), Completed)
    expect((yield from b.record()), Record, expires_at_us=horizon, anchor_us=happened)
    heir = yield from hold(b, happened)
    expect((yield from heir.settle("done", b"r", window_us=b.us(SHORT))), Completed)
    expect((yield from b.record()), Record, expires_at_us=horizon, anchor_us=happened, horizon_us=horizon)
    yield from SetWindow(b.tenant, "consumer", "", b.us(SHORT), existing=True)
    expect((yield from b.record()), Record, expires_at_us=horizon)


@scenario("manual")
def what_is_forgotten_makes_its_copies_late(b: ScenarioContext) -> Flow[None]:
    """After the record expired, purged or not, exactly the possible copies of its event are late."""
    for purged in (False, True):
        key = f"purged {purged}"
        now = yield from b.now()
        held = yield from hold(b, now, key, apart=SHORT, lateness=SHORT)
        yield from held.settle("done", b"r")
        equal((yield from b.record(key)).expires_at_us, now + b.us(2 * SHORT), "expires_at")
        yield from b.later(2 * SHORT + 1)
        if purged:
            yield from b.much_later()
            yield from b.purge()
        for copy in (now, now + b.us(SHORT) - 1, now - b.us(SHORT)):
            expect((yield from at(b, copy, key, apart=SHORT, lateness=SHORT)), Late)
        fresh = yield from b.now()
        heir = yield from hold(b, fresh, key, apart=SHORT, lateness=SHORT)
        equal(heir.granted.attempt, 1, "attempt")
        check(heir.fence > held.fence, "the fence did not grow")


@scenario()
def a_repeat_does_not_end_what_must_be_decided(b: ScenarioContext) -> Flow[None]:
    """Quarantined, unknown and journaled records wait for a decision and keep their key until then."""
    now = yield from b.now()
    later, horizon = now + b.us(APART), now + b.us(APART + LONG)
    yield from hold(b, now, "quarantine", lease=SHORT, quarantine=True)
    free = yield from hold(b, now, "let go", quarantine=True)
    yield from free.settle("released")
    journaled = yield from hold(b, now, "journal", lease=SHORT, journal=b"payload")
    told = yield from hold(b, now, "told")
    expect((yield from told.settle("unknown")), Completed)
    yield from hold(b, now, "running", journal=b"payload")
    expect((yield from at(b, later, "running")), Busy, recoverable=False)
    expect((yield from at(b, now, "running")), Busy, recoverable=True)
    yield from b.much_later()
    for key in ("quarantine", "told"):
        expect((yield from at(b, later, key)), Unknown)
        expect((yield from at(b, now - b.us(APART), key)), Late)
        expect((yield from b.record(key)), Record, state="unknown", anchor_us=now, expires_at_us=FOREVER)
    for key in ("let go", "journal"):
        busy = expect((yield from at(b, later, key)), Busy, recoverable=False)
        check(busy.retry_after_s > 0, f"{busy} has no delay: the caller would loop")
    heir = yield from hold(b, now, "journal")
    expect(heir.granted, Granted, attempt=2, journal=b"payload")
    check(heir.fence > journaled.fence, "the fence did not grow")
    expect((yield from heir.settle("done", b"r")), Completed)
    expect((yield from Resolve(b.id("told"), told.fence, "done", b"r", b.us(SHORT))), Completed)
    quarantined = yield from b.record("quarantine")
    expect((yield from Resolve(b.id("quarantine"), quarantined.fence, "done", b"r", b.us(SHORT))), Completed)
    for key in ("journal", "told", "quarantine"):
        expect((yield from b.record(key)), Record, state="done", anchor_us=now, expires_at_us=horizon)
        expect((yield from at(b, later, key)), Granted, attempt=1)


@scenario()
def a_quarantined_event_is_completed_to_its_horizon(b: ScenarioContext) -> Flow[None]:
    """A record without expiry gets that of its event when completed, in time or by the late owner."""
    now = yield from b.now()
    horizon = now + b.us(APART + LONG)
    for key, lease in (("in time", LONG), ("late", SHORT)):
        held = yield from hold(b, now, key, lease=lease, quarantine=True)
        equal((yield from b.record(key)).expires_at_us, FOREVER, "expires_at, claimed")
        yield from b.later()
        expect((yield from held.settle("done", b"r")), Completed, recreated=False)
        expect((yield from b.record(key)), Record, state="done", expires_at_us=horizon, anchor_us=now)


@scenario()
def a_lost_record_comes_back_with_its_anchor(b: ScenarioContext) -> Flow[None]:
    """The store lost the record but the effect exists: copies are known after the completion, a repeat is new."""
    now = yield from b.now()
    for to in SETTLED:
        claim = at(b, now, to)
        held = HeldClaim(claim, Granted(now, 1, now, now), b.unit_us)
        expect((yield from held.settle(to, b"rv")), Completed, recreated=True)
        horizon = now + b.us(APART + LONG)
        expect(
            (yield from b.record(to)),
            Record,
            anchor_us=now,
            horizon_us=horizon,
            expires_at_us=horizon,
            sliding=True,
        )
        expect((yield from at(b, now + b.us(APART) - 1, to)), Known, value=b"rv")
        expect((yield from at(b, now + b.us(APART), to)), Granted, attempt=1)
    claim = at(b, now - b.us(2 * LONG), "over")
    held = HeldClaim(claim, Granted(now, 1, now, now), b.unit_us)
    expect((yield from held.settle("done", b"rv")), Completed, recreated=True)
    expect((yield from Lookup(b.id("over"))), Absent)


@scenario()
def a_forgotten_event_is_new_again(b: ScenarioContext) -> Flow[None]:
    """The tombstone has no event time: the same event and an earlier one run again; a late one stays late."""
    now = yield from b.now()
    for key, happened in (("same", now), ("earlier", now - b.us(2 * APART))):
        done = yield from hold(b, now, key)
        yield from done.settle("done", b"r")
        expect((yield from Forget(b.id(key))), Forgotten)
        expect((yield from at(b, now - b.us(2 * LONG), key)), Late)
        heir = yield from hold(b, happened, key)
        equal(heir.granted.attempt, 1, "attempt")
        equal((yield from b.record(key)).anchor_us, happened, "anchor")


@scenario()
def payloads_are_compared_within_an_event(b: ScenarioContext) -> Flow[None]:
    """Another payload near in time is a mismatch; a repeat may have a payload of its own."""
    now = yield from b.now()
    held = yield from hold(b, now, fingerprint=OLD_PRINT)
    yield from held.settle("done", b"r")
    expect((yield from at(b, now + 1, fingerprint=NEW_PRINT)), Mismatch)
    expect((yield from at(b, now + b.us(APART), fingerprint=NEW_PRINT)), Granted)


@scenario()
def events_with_and_without_a_time_meet(b: ScenarioContext) -> Flow[None]:
    """If one of the two has no time they cannot be distinguished: they are one event while it is remembered."""
    now = yield from b.now()
    held = yield from hold(b, now, "timed")
    yield from held.settle("done", b"r")
    expect((yield from b.claim("timed")), Known)
    expect((yield from b.claim("timed", event_time_us=now + b.us(LONG), refuse_late=True)), Known)
    yield from b.finish("plain")
    expect((yield from at(b, now + b.us(2 * APART), "plain")), Known)
    plain = yield from b.hold("orphan")
    yield from plain.settle("released")
    expect((yield from hold(b, now, "orphan")).granted, Granted, attempt=2)
    equal((yield from b.record("orphan")).anchor_us, now, "anchor")
    apart = b.us(APART)
    expect((yield from b.claim("timed", apart_us=apart, sliding=True)), Known)
    lost = HeldClaim(b.claim("untimed", apart_us=apart), Granted(now, 1, now, now), b.unit_us)
    expect((yield from lost.settle("done", b"r")), Completed, recreated=True)
    expect((yield from b.record("untimed")), Record, anchor_us=None, horizon_us=0)
    expect((yield from b.claim("untimed claim", apart_us=apart, sliding=True)), Granted)
    expect((yield from b.record("untimed claim")), Record, anchor_us=None, horizon_us=0)


@scenario()
def a_repeated_claim_of_an_event_is_granted_again(b: ScenarioContext) -> Flow[None]:
    """After a lost reply the same owner gets its claim back, and only the lease changes."""
    now = yield from b.now()
    claim = at(b, now)
    first = expect((yield from claim), Granted)
    second = expect((yield from claim), Granted, fence=first.fence, attempt=1)
    check(second.lease_until_us >= first.lease_until_us, "the lease did not start again")
    expect((yield from b.record()), Record, anchor_us=now, expires_at_us=now + b.us(APART + LONG))


@scenario()
def events_of_one_batch_have_their_own_times(b: ScenarioContext) -> Flow[None]:
    """Each item of a batch has its own event time."""
    now = yield from b.now()
    done = yield from hold(b, now, "repeat")
    yield from done.settle("done", b"r")
    answers = yield from Send(
        [
            at(b, now, "first"),
            at(b, now - 1, "second", apart=APART / 2),
            at(b, now - b.us(2 * LONG), "late"),
            b.claim("plain"),
            at(b, now + b.us(APART), "repeat"),
            at(b, now - 2, "journaled", journal=b"p"),
        ]
    )
    for place in (0, 1, 3, 4, 5):
        expect(answers[place], Granted, attempt=1)
    expect(answers[2], Late)
    anchors = {
        "first": now,
        "second": now - 1,
        "plain": None,
        "repeat": now + b.us(APART),
        "journaled": now - 2,
    }
    for key, anchor in anchors.items():
        equal((yield from b.record(key)).anchor_us, anchor, f"anchor of {key}")
    equal((yield from b.record("second")).horizon_us, now - 1 + b.us(APART / 2 + LONG), "horizon")
