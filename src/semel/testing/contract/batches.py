"""Many items in one call: each its own, answers by position."""

from semel.core.commands import (
    Admit,
    Count,
    Flow,
    Forget,
    Granted,
    Item,
    Known,
    Lookup,
    Mark,
    Marked,
    Page,
    Purge,
    Purged,
    ReadSettings,
    Resolve,
    Scan,
    StoreSettings,
)
from semel.testing.contract.bench import LONG, SHORT, ScenarioContext, HeldClaim, Send, check, equal, expect, scenario
from semel.types import Absent, Busy, Completed, Forgotten, Lost, Mismatch, Record, Renewed, Stats, Unknown

MANY = 1000


@scenario()
def an_empty_batch_has_no_answers(b: ScenarioContext) -> Flow[None]:
    """Nothing is asked, nothing is answered, and the next call is."""
    equal((yield from Send([])), [], "answers")
    yield from b.hold()


@scenario()
def answers_come_by_position(b: ScenarioContext) -> Flow[None]:
    """Items of every kind in one call: each answer stands where its item stood."""
    yield from b.finish("done")
    running = yield from b.hold("running", fingerprint=b"\1one")
    ends = yield from b.hold("ends")
    goes = yield from b.hold("goes")
    unknown = yield from b.hold("unknown", quarantine=True)
    yield from unknown.settle("unknown")
    yield from b.finish("forget")
    items: list[tuple[Item, type]] = [
        (b.claim("new"), Granted),
        (Mark(b.tenant, "marks", ["a", "b"], b.us(LONG)), Marked),
        (b.claim("done"), Known),
        (ReadSettings(), StoreSettings),
        (running.settle("done", owner=b.owner()), Lost),
        (b.claim("running", fingerprint=b"\1two"), Mismatch),
        (ends.settle("done", b"r"), Completed),
        (Lookup(b.id("absent")), Absent),
        (goes.renew(), Renewed),
        (b.claim("goes"), Busy),
        (Count(b.tenant), Stats),
        (b.claim("unknown"), Unknown),
        (Purge(), Purged),
        (Forget(b.id("forget")), Forgotten),
        (Admit(b.tenant, "consumer", "lease"), str),
        (Scan(tenant=b.tenant), Page),
        (Resolve(b.id("nothing"), 1, "absent"), Lost),
        (Lookup(b.id("done")), Record),
    ]
    answers = yield from Send([item for item, _ in items])
    equal(len(answers), len(items), "how many answers there are")
    for answer, (_item, kind) in zip(answers, items, strict=True):
        expect(answer, kind)


@scenario()
def a_batch_of_a_thousand_is_carried_out(b: ScenarioContext) -> Flow[None]:
    """As many items as the wire takes, claimed and settled in one call each."""
    claims = [b.claim(f"key {number}") for number in range(MANY)]
    answers = yield from Send(claims)
    held = [
        HeldClaim(claim, expect(answer, Granted, attempt=1), b.unit_us)
        for claim, answer in zip(claims, answers, strict=True)
    ]
    answers = yield from Send([each.settle("done", b"%d" % number) for number, each in enumerate(held)])
    for answer in answers:
        expect(answer, Completed, already=False, recreated=False)
    answers = yield from Send([b.claim(f"key {number}") for number in reversed(range(MANY))])
    for number, answer in zip(reversed(range(MANY)), answers, strict=True):
        expect(answer, Known, value=b"%d" % number)


@scenario()
def every_item_has_its_own_owner_and_times(b: ScenarioContext) -> Flow[None]:
    """Nothing is per batch: owners, leases, windows and fingerprints are each item's own."""
    claims = [
        b.claim("short lease", lease=SHORT, window=LONG),
        b.claim("long lease", lease=LONG, window=SHORT, fingerprint=b"\1one"),
        b.claim("sliding", lease=SHORT, window=2 * LONG, sliding=True),
        b.claim("quarantine", lease=SHORT, quarantine=True),
        b.claim("late", event_time_us=1, refuse_late=False),
    ]
    answers = yield from Send(claims)
    for claim, answer in zip(claims, answers, strict=True):
        granted = expect(answer, Granted)
        record = yield from b.record(claim.id)
        expect(
            record, Record, owner=claim.owner, fingerprint=claim.fingerprint, sliding=claim.sliding,
            lease_until=granted.first_seen + claim.lease_us, quarantine=claim.quarantine,
        )  # fmt: skip
    yield from b.later()
    equal((yield from b.record("quarantine")).state, "unknown", "state")
    expect((yield from b.claim("short lease")), Granted, attempt=2)
    expect((yield from b.claim("long lease")), Busy)


@scenario()
def one_items_fate_is_not_anothers(b: ScenarioContext) -> Flow[None]:
    """A lost, mismatching or busy item between two good ones touches neither."""
    first = yield from b.hold("first")
    second = yield from b.hold("second")
    third = yield from b.hold("third")
    answers = yield from Send(
        [
            first.settle("done", b"r1"),
            second.settle("done", b"r2", fence=second.fence - 1),
            third.settle("failed", b"r3"),
        ]
    )
    expect(answers[0], Completed)
    expect(answers[1], Lost)
    expect(answers[2], Completed)
    equal((yield from b.record("second")).state, "claimed", "state of the lost item")
    check((yield from b.record("first")).value == b"r1", "the first item's value is not its own")
    check((yield from b.record("third")).value == b"r3", "the third item's value is not its own")
