"""What outlives a process, and who is told of changes."""

from semel.core.commands import (
    Admit,
    Flow,
    Forget,
    Granted,
    Known,
    Mark,
    Marked,
    ReadSettings,
    StoreSettings,
    SetWindow,
)
from semel.testing.contract.bench import (
    ENDS,
    LONG,
    SHORT,
    ScenarioContext,
    Hear,
    Heard,
    Listen,
    Reopen,
    Unlisten,
    check,
    equal,
    expect,
    scenario,
)
from semel.types import Busy, Completed, Forgotten, Lost, Unknown


@scenario("durable")
def answers_survive_reopening(b: ScenarioContext) -> Flow[None]:
    """A store closed and opened again answers every kind of record as before."""
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
    """Marks, modes and windows too."""
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
    """Neither the clock nor a lease nor an attempt starts anew with the process."""
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
def watchers_are_told_what_ends_a_wait(b: ScenarioContext) -> Flow[None]:
    """Done, failed, released, quarantined and forgotten: whoever waits for the key hears of it."""
    yield from Listen()
    for to in ENDS:
        held = yield from b.hold(to)
        expect((yield from held.settle(to, b"r")), Completed)
        check((yield from Hear(b.id(to))), f"nothing was heard of a record that became {to}")
    yield from b.hold("forgotten")
    expect((yield from Forget(b.id("forgotten"), force=True)), Forgotten)
    check((yield from Hear(b.id("forgotten"))), "nothing was heard of a forgotten record")
    yield from Unlisten()


@scenario("notifies")
def watchers_hear_no_more_after_they_leave(b: ScenarioContext) -> Flow[None]:
    """The function that `watch` returns ends it, and others go on listening."""
    yield from Listen()
    yield from b.finish("one")
    check((yield from Hear(b.id("one"))), "nothing was heard of a finished record")
    yield from Unlisten()
    yield from b.finish("two")
    check(b.id("two") not in (yield from Heard()), "something was heard after the watch had ended")
    yield from Listen()
    yield from b.finish("three")
    check((yield from Hear(b.id("three"))), "nothing was heard by a second watch")
    yield from Unlisten()


@scenario("notifies")
def watchers_are_not_told_of_lost_writes(b: ScenarioContext) -> Flow[None]:
    """Nothing changed, so nobody is woken."""
    held = yield from b.hold()
    yield from Listen()
    expect((yield from held.settle("done", fence=held.fence + 1)), Lost)
    expect((yield from b.claim()), Busy)
    yield from b.finish("other")
    check((yield from Hear(b.id("other"))), "nothing was heard of a finished record")
    check(b.id() not in (yield from Heard()), "a write that was lost was told")
    yield from Unlisten()
