"""Windows without end: a finished key stays, and nothing overflows."""

from semel.core.commands import Count, Flow, Forget, Granted, Known, Lookup, Mark, Marked, SetWindow
from semel.testing.contract.harness import (
    LONG,
    OVER,
    SETTLED,
    SHORT,
    Reopen,
    ScenarioContext,
    check,
    equal,
    expect,
    scenario,
)
from semel.types import Completed, Forgotten, Record, Renewed, Stats
from semel.windows import FOREVER_US, WINDOW_LONGEST_S, is_endless

YEAR_US = 365 * 86400 * 1_000_000
AGES = 20
"""Years that pass: more than any window with an end."""


@scenario("endless")
def a_window_without_end_keeps_the_key(b: ScenarioContext) -> Flow[None]:
    """A settled key with a window without end expires a hundred years after its completion, to the microsecond."""
    for to in SETTLED:
        held = yield from b.hold(to, window_us=FOREVER_US)
        done = expect((yield from held.settle(to, b"rv")), Completed, recreated=False)
        record = yield from b.record(to)
        equal(record.expires_at_us, done.at_us + FOREVER_US, f"expires_at of {to}")
        known = expect((yield from b.claim(to, window_us=FOREVER_US)), Known, state=to, value=b"rv")
        check(not known.rest_us or is_endless(known.rest_us), f"rest_us is {known.rest_us}")


@scenario("endless")
def a_purge_leaves_records_without_end_alone(b: ScenarioContext) -> Flow[None]:
    """A purge removes what has expired, and neither records nor marks with a window without end."""
    yield from b.finish("short", window=SHORT)
    yield from b.finish("forever", window_us=FOREVER_US)
    yield from b.finish("sliding", window_us=FOREVER_US, sliding=True)
    expect((yield from _mark(b, "mark", FOREVER_US)), Marked, firsts=[True])
    yield from b.much_later()
    yield from b.purge()
    for key in ("forever", "sliding"):
        expect((yield from b.claim(key)), Known)
    expect((yield from _mark(b, "mark", FOREVER_US)), Marked, firsts=[False])
    expect((yield from b.claim("short")), Granted)
    equal(expect((yield from Count(b.tenant)), Stats).expired, 0, "expired")


@scenario("endless", "manual")
def a_key_without_end_outlasts_decades(b: ScenarioContext) -> Flow[None]:
    """After twenty years and a purge, records and marks without end answer as on the first day; others are new."""
    yield from b.finish("forever", window_us=FOREVER_US)
    yield from b.finish("longest", window_us=WINDOW_LONGEST_S * 10**6)
    expect((yield from _mark(b, "mark", FOREVER_US)), Marked, firsts=[True])
    yield from b.later(5 * YEAR_US / b.unit_us)
    yield from b.purge()
    expect((yield from b.claim("longest")), Known)
    yield from b.later(AGES * YEAR_US / b.unit_us)
    yield from b.purge()
    expect((yield from b.claim("longest")), Granted, attempt=1)
    expect((yield from b.claim("forever")), Known, value=b"rvalue")
    expect((yield from _mark(b, "mark", FOREVER_US)), Marked, firsts=[False])
    record = yield from b.record("forever")
    check(is_endless(record.expires_at_us - record.settled_at_us), "its window has an end")


@scenario("endless")
def a_claim_with_a_window_without_end_is_as_any_other(b: ScenarioContext) -> Flow[None]:
    """Renewal, release, take-over, forget and a lost record work as with any other window."""
    held = yield from b.hold(lease=SHORT, window_us=FOREVER_US)
    expect((yield from held.renew(SHORT, ("mail", b"r"))), Renewed)
    yield from b.later(2 * OVER)
    heir = yield from b.hold(lease=LONG, window_us=FOREVER_US)
    expect(heir.granted, Granted, attempt=2, steps=(("mail", b"r"),))
    expect((yield from heir.settle("released")), Completed)
    last = yield from b.hold(window_us=FOREVER_US)
    expect(last.granted, Granted, attempt=3)
    yield from last.settle("done", b"rv")
    expect((yield from Forget(b.id())), Forgotten)
    expect((yield from b.claim(window_us=FOREVER_US)), Granted, attempt=1)
    lost = last.settle("done", b"rv", id=b.id("lost"))
    expect((yield from lost), Completed, recreated=True)
    equal(
        (yield from b.record("lost")).expires_at_us,
        last.fence + FOREVER_US + b.us(LONG),
        "expires_at, recreated",
    )


@scenario("endless")
def a_stored_window_without_end_moves_records_both_ways(b: ScenarioContext) -> Flow[None]:
    """Existing records get a window without end, and get an end again."""
    held = yield from b.finish(window=LONG)
    scope = (held.claim.id[0], held.claim.id[1], "")
    settled_at = (yield from b.record()).settled_at_us
    for window_us in (FOREVER_US, b.us(LONG)):
        equal((yield from SetWindow(*scope, window_us, existing=True)), None, "the answer")
        equal((yield from b.record()).expires_at_us, settled_at + window_us, "expires_at")


@scenario("endless", "durable")
def a_window_without_end_survives_a_restart(b: ScenarioContext) -> Flow[None]:
    """Another store object on the same records reads the same expiry."""
    yield from b.finish(window_us=FOREVER_US)
    before = yield from b.record()
    expect((yield from _mark(b, "mark", FOREVER_US)), Marked, firsts=[True])
    yield from Reopen()
    equal((yield from b.record()), before, "the record")
    mark = expect((yield from Lookup(b.id("mark", consumer="marks"))), Record, state="done")
    check(is_endless(mark.expires_at_us - before.settled_at_us), "the mark's window has an end")
    expect((yield from _mark(b, "mark", FOREVER_US)), Marked, firsts=[False])


def _mark(b: ScenarioContext, key: str, window_us: int) -> Mark:
    return Mark(b.tenant, "marks", [key], window_us)
