"""Windows that start again at every sighting of a finished key."""

from collections.abc import Sequence
from typing import Any

from semel.core.commands import Count, Flow, Granted, Known, Lookup, Mark, Marked
from semel.testing.contract.harness import (
    FAR,
    LONG,
    SETTLED,
    SHORT,
    AtOnce,
    ScenarioContext,
    Send,
    check,
    equal,
    expect,
    scenario,
)
from semel.types import Absent, Busy, Completed, Mismatch, Record, Stats, Unknown

WINDOW, PAUSE = 10, 6
"""A window, and a pause that two of are longer than it, in units."""
CALLERS = 8
MANY = 40
ONE, TWO = b"\1one", b"\1two"


@scenario("refreshes", "manual")
def a_sighting_starts_the_window_again(b: ScenarioContext) -> Flow[None]:
    """A finished key that is seen again within its window is remembered for a whole window from then on."""
    for to in SETTLED:
        held = yield from b.hold(to, window=WINDOW)
        done = expect((yield from held.settle(to, b"rv")), Completed)
        for _ in range(3):
            yield from b.later(PAUSE)
            before = yield from b.now()
            known = expect(
                (yield from b.claim(to, window=WINDOW, refresh=True)), Known, state=to, value=b"rv"
            )
            equal((known.settled_at_us, known.fence), (done.at_us, held.fence), "settled_at and fence")
            record = yield from b.record(to)
            began_at = record.expires_at_us - b.us(WINDOW)
            check(before <= began_at, f"the window began at {began_at}, before the sighting")
            check(known.rest_us in (0, b.us(WINDOW)), f"the rest is {known.rest_us}, not the window")
            equal((record.state, record.settled_at_us, record.value), (to, done.at_us, b"rv"), "the record")
        yield from b.later(WINDOW + 1)
        expect((yield from b.claim(to, window=WINDOW, refresh=True)), Granted, attempt=1)


@scenario("refreshes")
def other_sightings_move_nothing(b: ScenarioContext) -> Flow[None]:
    """A sighting that does not ask for it, a look-up and a sighting with a shorter window leave the expiry alone."""
    yield from b.finish(window=LONG)
    before = yield from b.record()
    yield from b.later(1)
    expect((yield from b.claim(window=LONG)), Known)
    expect((yield from b.claim(window=1, refresh=True)), Known)
    expect((yield from b.claim(window=0, refresh=True)), Known)
    equal((yield from b.record()), before, "the record")


@scenario("refreshes")
def a_longer_window_of_a_sighting_counts(b: ScenarioContext) -> Flow[None]:
    """The window of the sighting counts, from the sighting on; a record with more parts keeps them."""
    held = yield from b.hold(window=LONG, fingerprint=ONE, event_type="order", meta=b"note")
    expect((yield from held.renew(LONG, ("mail", b"r"))), object)
    yield from held.settle("done", b"rv")
    before = yield from b.record()
    at = yield from b.now()
    expect((yield from b.claim(window=2 * LONG, refresh=True, fingerprint=ONE)), Known)
    after = yield from b.record()
    check(after.expires_at_us >= at + b.us(2 * LONG), "the longer window does not count")
    parts = (
        "fence",
        "owner",
        "attempt",
        "first_seen_us",
        "fingerprint",
        "steps",
        "event_type",
        "meta",
        "value",
    )
    for name in parts:
        equal(getattr(after, name), getattr(before, name), name)


@scenario("refreshes")
def another_payload_is_no_sighting(b: ScenarioContext) -> Flow[None]:
    """A claim with another fingerprint is a mismatch, and does not move the window."""
    yield from b.finish(window=LONG, fingerprint=ONE)
    before = yield from b.record()
    expect((yield from b.claim(window=2 * LONG, refresh=True, fingerprint=TWO)), Mismatch)
    equal((yield from b.record()), before, "the record")


@scenario("refreshes")
def what_is_not_finished_is_not_refreshed(b: ScenarioContext) -> Flow[None]:
    """Running, released, unknown and forgotten keys answer as ever: a sighting is then a claim like any other."""
    yield from b.hold("running", lease=LONG, window=SHORT)
    running = yield from b.record("running")
    expect((yield from b.claim("running", window=LONG, refresh=True)), Busy)
    equal((yield from b.record("running")), running, "the running claim")
    held = yield from b.hold("unknown", quarantine=True)
    yield from held.settle("unknown")
    unknown = yield from b.record("unknown")
    expect((yield from b.claim("unknown", window=LONG, refresh=True, quarantine=True)), Unknown)
    equal((yield from b.record("unknown")), unknown, "the unknown record")
    released = yield from b.hold("released")
    yield from released.settle("released")
    expect((yield from b.claim("released", refresh=True)), Granted, attempt=2)
    expect((yield from b.claim("new", refresh=True)), Granted, attempt=1)


@scenario("refreshes")
def event_times_are_not_refreshed(b: ScenarioContext) -> Flow[None]:
    """Where event times decide, the expiry is that of the event: no sighting moves it."""
    now = yield from b.now()
    timed: dict[str, Any] = {"event_time_us": now, "apart_us": b.us(SHORT), "sliding": True}
    yield from b.finish(window=LONG, **timed)
    before = yield from b.record()
    expect((yield from b.claim(window=2 * LONG, refresh=True)), Known)
    expect((yield from b.claim(window=2 * LONG, refresh=True, **timed)), Known)
    equal((yield from b.record()), before, "the record")


@scenario("refreshes", "manual")
def a_sliding_window_starts_again_too(b: ScenarioContext) -> Flow[None]:
    """A window that runs from the claim starts again at a sighting as well."""
    yield from b.finish(window=WINDOW, sliding=True)
    yield from b.later(PAUSE)
    expect((yield from b.claim(window=WINDOW, sliding=True, refresh=True)), Known)
    yield from b.later(PAUSE)
    expect((yield from b.claim(window=WINDOW, sliding=True)), Known)
    yield from b.later(PAUSE)
    expect((yield from b.claim(window=WINDOW, sliding=True)), Granted, attempt=1)


@scenario("refreshes", "manual")
def a_purge_leaves_what_was_seen_again_alone(b: ScenarioContext) -> Flow[None]:
    """A purge after the first window removes what was not seen again, and nothing else."""
    for key in ("seen", "unseen"):
        yield from b.finish(key, window=FAR)
    marks = ["seen", "unseen"]
    expect((yield from _mark(b, marks, FAR)), Marked, firsts=[True, True])
    yield from b.later(FAR / 2 + 1)
    expect((yield from b.claim("seen", window=FAR, refresh=True)), Known)
    expect((yield from _mark(b, ["seen"], FAR)), Marked, firsts=[False])
    yield from b.later(FAR / 2)
    yield from b.purge()
    expect((yield from b.claim("seen", window=FAR)), Known)
    expect((yield from Lookup(b.id("unseen"))), Absent)
    expect((yield from Lookup(b.id("seen", consumer="marks"))), Record)
    equal(expect((yield from Count(b.tenant)), Stats).marks, 1, "marks")
    expect((yield from _mark(b, marks, FAR)), Marked, firsts=[False, True])


@scenario("refreshes", "manual")
def sightings_in_a_batch_are_each_their_own(b: ScenarioContext) -> Flow[None]:
    """Sightings, other duplicates and first claims share a batch; each has its own answer and effect."""
    for key in ("seen", "other", "longer"):
        yield from b.finish(key, window=WINDOW)
    other = yield from b.record("other")
    yield from b.later(PAUSE)
    answers = yield from Send(
        [
            b.claim("seen", window=WINDOW, refresh=True),
            b.claim("other", window=WINDOW),
            b.claim("new", window=WINDOW, refresh=True),
            b.claim("longer", window=LONG, refresh=True),
        ]
    )
    equal([type(answer) for answer in answers], [Known, Known, Granted, Known], "the answers")
    equal((yield from b.record("other")), other, "the record of the other duplicate")
    yield from b.later(PAUSE)
    kinds = []
    for key in ("seen", "other", "longer"):
        kinds.append(type((yield from b.claim(key, window=WINDOW))))
    equal(kinds, [Known, Granted, Known], "the answers after the first window")


@scenario("refreshes")
def sightings_at_once_have_at_most_one_winner(b: ScenarioContext) -> Flow[None]:
    """Concurrent sightings of a finished key are all duplicates; of an expired key one of them wins."""
    yield from b.finish("live", window=LONG)
    yield from b.finish("over", window=SHORT)
    yield from b.later()
    for key, winners in (("live", 0), ("over", 1)):
        answers = yield from AtOnce([[b.claim(key, window=2 * LONG, refresh=True)] for _ in range(CALLERS)])
        equal(sum(isinstance(answer, Granted) for (answer,) in answers), winners, f"winners of {key}")


@scenario("refreshes", "manual")
def a_mark_may_start_its_window_again(b: ScenarioContext) -> Flow[None]:
    """A known key that is marked again is remembered for a window from then on, and is never the first meanwhile."""
    keys = [f"key {number}" for number in range(MANY)]
    expect((yield from _mark(b, keys, WINDOW, refresh=False)), Marked, firsts=[True] * MANY)
    expect((yield from _mark(b, ["alone"], WINDOW, refresh=False)), Marked, firsts=[True])
    for _ in range(3):
        yield from b.later(PAUSE)
        known = yield from _mark(b, [*keys[::2], "alone", "new"], WINDOW)
        equal(expect(known, Marked).firsts[: MANY // 2 + 1], [False] * (MANY // 2 + 1), "known keys")
    answers = yield from _mark(b, keys, WINDOW, refresh=False)
    equal(expect(answers, Marked).firsts, [False, True] * (MANY // 2), "keys seen again, and the others")
    yield from b.later(WINDOW + 1)
    expect((yield from _mark(b, keys, WINDOW)), Marked, firsts=[True] * MANY)


@scenario("refreshes")
def a_mark_is_never_shortened(b: ScenarioContext) -> Flow[None]:
    """A sighting with a shorter window leaves the mark's expiry alone."""
    expect((yield from _mark(b, ["a"], LONG)), Marked, firsts=[True])
    expect((yield from _mark(b, ["a"], SHORT)), Marked, firsts=[False])
    yield from b.later()
    expect((yield from _mark(b, ["a"], SHORT)), Marked, firsts=[False])


@scenario("refreshes")
def refreshed_marks_are_counted_once(b: ScenarioContext) -> Flow[None]:
    """Marks that were seen again count once, and can be forgotten."""
    keys = [f"key {number}" for number in range(MANY)]
    for refresh in (False, True, True):
        yield from _mark(b, keys, LONG, refresh=refresh)
        yield from b.later(1)
    equal(expect((yield from Count(b.tenant)), Stats).marks, MANY, "marks")


@scenario("refreshes")
def refreshed_marks_at_once_have_one_first(b: ScenarioContext) -> Flow[None]:
    """Of concurrent marks of the same keys, new or expired, each key is the first for exactly one."""
    keys = [f"race-{number}" for number in range(10)]
    yield from _mark(b, keys[::2], SHORT)
    yield from b.later()
    answers = yield from AtOnce([[_mark(b, keys, LONG)] for _ in range(CALLERS)])
    firsts = [expect(answer, Marked).firsts for (answer,) in answers]
    equal([sum(column) for column in zip(*firsts, strict=True)], [1] * len(keys), "firsts by key")


def _mark(b: ScenarioContext, keys: Sequence[str], window: float, *, refresh: bool = True) -> Mark:
    return Mark(b.tenant, "marks", list(keys), b.us(window), refresh)
