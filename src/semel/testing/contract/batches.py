"""Many items in one call: each is independent, answers come by position."""

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
    SetWindow,
    StoreSettings,
)
from semel.testing.contract.harness import (
    ENDS,
    LONG,
    SHORT,
    AwaitNotification,
    HeldClaim,
    ReadNotifications,
    Reopen,
    ScenarioContext,
    Send,
    StartWatching,
    StopWatching,
    check,
    equal,
    expect,
    scenario,
)
from semel.types import Absent, Busy, Completed, Forgotten, Lost, Mismatch, Record, Renewed, Stats, Unknown

MANY = 1000


@scenario()
def an_empty_batch_has_no_answers(b: ScenarioContext) -> Flow[None]:
    """An empty batch returns no answers, and the next call works."""
    equal((yield from Send([])), [], "answers")
    yield from b.hold()


@scenario()
def answers_come_by_position(b: ScenarioContext) -> Flow[None]:
    """Items of every kind in one call: each answer has the position of its item."""
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
    """As many items as one request may hold, claimed in one call and settled in one call."""
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
    """Owners, leases, windows and fingerprints belong to each item, not to the batch."""
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
            lease_until_us=granted.first_seen_us + claim.lease_us, quarantine=claim.quarantine,
        )  # fmt: skip
    yield from b.later()
    equal((yield from b.record("quarantine")).state, "unknown", "state")
    expect((yield from b.claim("short lease")), Granted, attempt=2)
    expect((yield from b.claim("long lease")), Busy)


@scenario()
def one_items_fate_is_not_anothers(b: ScenarioContext) -> Flow[None]:
    """A lost, mismatching or busy item between two good ones does not affect them."""
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
    check((yield from b.record("first")).value == b"r1", "the first item has another item's value")
    check((yield from b.record("third")).value == b"r3", "the third item has another item's value")


@scenario("durable")
def answers_survive_reopening(b: ScenarioContext) -> Flow[None]:
    """After it was closed and opened again, a store answers for every kind of record as before."""
    done = yield from b.finish("done", b"\x00value", fingerprint=b"\1one")
    failed = yield from b.hold("failed")
    yield from failed.settle("failed", b"error")
    running = yield from b.hold("running", journal=b"payload")
    yield from running.renew(step=("mail", b"sent"))
    unknown = yield from b.hold("unknown", quarantine=True)
    yield from unknown.settle("unknown")
    gone = yield from b.hold("gone")
    tombstone = expect((yield from Forget(b.id("gone"), force=True)), Forgotten)
    yield from Reopen()
    expect((yield from b.claim("done")), Known, value=b"\x00value", fence=done.fence)
    expect((yield from b.claim("failed")), Known, state="failed", value=b"error")
    expect((yield from b.claim("running")), Busy, recoverable=True)
    expect(
        (yield from running.claim),
        Granted,
        fence=running.fence,
        steps=(("mail", b"sent"),),
        journal=b"payload",
    )
    expect((yield from b.claim("unknown")), Unknown)
    expect((yield from gone.settle("done", b"r")), Lost)
    heir = yield from b.hold("gone")
    check(heir.fence > tombstone.fence, "the fence did not grow past the tombstone's")
    expect((yield from running.settle("done", b"r")), Completed, recreated=False)


@scenario("durable")
def marks_and_settings_survive_reopening(b: ScenarioContext) -> Flow[None]:
    """Marks, modes and windows are kept, too."""
    mark = Mark(b.tenant, "marks", ["a", "b"], b.us(LONG))
    equal(expect((yield from mark), Marked).firsts, [True, True], "firsts")
    yield from Admit(b.tenant, "consumer", "quarantine")
    yield from SetWindow(b.tenant, "consumer", "order", b.us(SHORT))
    yield from Reopen()
    equal(expect((yield from mark), Marked).firsts, [False, False], "firsts")
    settings = expect((yield from ReadSettings()), StoreSettings)
    equal(settings.modes.get((b.tenant, "consumer")), "quarantine", "the mode")
    equal(settings.windows.get((b.tenant, "consumer", "order")), b.us(SHORT), "the window")


@scenario("durable")
def time_and_fences_go_on_after_reopening(b: ScenarioContext) -> Flow[None]:
    """The clock, leases and attempts continue after a restart of the process."""
    held = yield from b.hold("orphan", lease=SHORT)
    before = yield from b.now()
    yield from Reopen()
    check((yield from b.now()) >= before, "the store's time went back")
    expect((yield from b.claim("fresh")), Granted)
    yield from b.later()
    yield from Reopen()
    heir = yield from b.hold("orphan")
    equal(heir.granted.attempt, 2, "attempt")
    check(heir.fence > held.fence, "the fence did not grow")


@scenario("notifies")
def watchers_are_notified_of_changes_that_end_a_wait(b: ScenarioContext) -> Flow[None]:
    """Watchers are notified when a record becomes done, failed, released, quarantined or forgotten."""
    yield from StartWatching()
    for to in ENDS:
        held = yield from b.hold(to)
        expect((yield from held.settle(to, b"r")), Completed)
        check((yield from AwaitNotification(b.id(to))), f"no notification of a record that became {to}")
    yield from b.hold("forgotten")
    expect((yield from Forget(b.id("forgotten"), force=True)), Forgotten)
    check((yield from AwaitNotification(b.id("forgotten"))), "no notification of a forgotten record")
    yield from StopWatching()


@scenario("notifies")
def a_watch_that_ended_gets_no_notification(b: ScenarioContext) -> Flow[None]:
    """The function that `watch` returns ends that watch; other watches continue."""
    yield from StartWatching()
    yield from b.finish("one")
    check((yield from AwaitNotification(b.id("one"))), "no notification of a finished record")
    yield from StopWatching()
    yield from b.finish("two")
    check(
        b.id("two") not in (yield from ReadNotifications()), "a notification came after the watch had ended"
    )
    yield from StartWatching()
    yield from b.finish("three")
    check((yield from AwaitNotification(b.id("three"))), "no notification to a second watch")
    yield from StopWatching()


@scenario("notifies")
def watchers_are_not_notified_of_lost_writes(b: ScenarioContext) -> Flow[None]:
    """A lost write changes nothing, so it causes no notification."""
    held = yield from b.hold()
    yield from StartWatching()
    expect((yield from held.settle("done", fence=held.fence + 1)), Lost)
    expect((yield from b.claim()), Busy)
    yield from b.finish("other")
    check((yield from AwaitNotification(b.id("other"))), "no notification of a finished record")
    check(b.id() not in (yield from ReadNotifications()), "a lost write caused a notification")
    yield from StopWatching()
