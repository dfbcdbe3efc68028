"""Claims, take-overs, attempts and fences."""

from msgspec.structs import replace

from semel.core.commands import Count, Flow, Forget, Granted, Known, Lookup
from semel.testing.contract.harness import (
    FAR,
    LONG,
    SHORT,
    Advance,
    AtOnce,
    ScenarioContext,
    StepBack,
    check,
    equal,
    expect,
    grows,
    scenario,
)
from semel.types import Absent, Busy, Completed, Forgotten, Stats

FENCE_END = 2**53
"""Fences stay below it, so that JSON and Lua carry them whole."""
CALLERS = 8
OWNERS = 32


@scenario()
def a_new_key_is_granted(b: ScenarioContext) -> Flow[None]:
    """The first claim of a key is granted as attempt 1, from the store's clock."""
    before = yield from b.now()
    held = yield from b.hold(lease=LONG)
    granted = expect(held.granted, Granted, attempt=1, steps=(), journal=None)
    after = yield from b.now()
    check(
        before <= granted.first_seen_us <= after,
        f"first_seen {granted.first_seen_us} is not the store's time",
    )
    equal(granted.lease_until_us, granted.first_seen_us + b.us(LONG), "lease_until")
    check(granted.first_seen_us <= granted.fence < FENCE_END, f"the fence {granted.fence} is below the clock")


@scenario()
def a_lookup_claims_nothing(b: ScenarioContext) -> Flow[None]:
    """A lookup of an absent key creates no record: the key stays absent and is new to the next claim."""
    expect((yield from Lookup(b.id())), Absent)
    held = yield from b.hold()
    first = yield from b.record()
    equal(first.owner, held.claim.owner, "owner")
    equal((yield from b.record()), first, "the record after a lookup")


@scenario()
def a_repeated_claim_gets_its_own_back(b: ScenarioContext) -> Flow[None]:
    """A claim sent again after a lost reply gets the same claim; otherwise the event is lost."""
    held = yield from b.hold()
    again = expect((yield from held.claim), Granted, fence=held.granted.fence, attempt=1)
    equal(again.first_seen_us, held.granted.first_seen_us, "first_seen")
    expect((yield from held.settle()), Completed, already=False, recreated=False)


@scenario()
def a_repeated_claim_has_its_whole_lease(b: ScenarioContext) -> Flow[None]:
    """The caller counts the lease from the try that was answered, so the lease must not begin before it."""
    held = yield from b.hold(lease=LONG)
    before = yield from b.record()
    yield from Advance(b.us(1))
    again = expect((yield from held.claim), Granted, fence=held.granted.fence)
    after = yield from b.record()
    check(
        again.lease_until_us >= held.granted.lease_until_us + b.us(1),
        f"the lease of {again} does not begin with this try",
    )
    equal(after.lease_until_us, again.lease_until_us, "the stored lease")
    moved = after.expires_at_us - before.expires_at_us
    equal(moved, after.lease_until_us - before.lease_until_us, "the expiry moves with the lease")


@scenario()
def another_owner_is_busy(b: ScenarioContext) -> Flow[None]:
    """While a lease runs every other owner gets `Busy` with the rest of the lease."""
    yield from b.hold(lease=LONG)
    first = expect((yield from b.claim()), Busy, recoverable=False)
    check(0 < first.retry_after_s <= b.us(LONG) / 1e6, f"{first} is not the rest of the lease")
    yield from b.later(10)
    second = expect((yield from b.claim()), Busy)
    passed_s = first.retry_after_s - second.retry_after_s
    check(passed_s >= b.us(10) / 1e6, f"the rest of the lease shrank by {passed_s} s only")
    check(second.retry_after_s > 0, f"{second} is not the rest of the lease")


@scenario()
def a_busy_answer_prolongs_nothing(b: ScenarioContext) -> Flow[None]:
    """A busy answer does not change the running claim's lease, attempt or owner."""
    yield from b.hold(lease=LONG)
    before = yield from b.record()
    expect((yield from b.claim(lease=2 * LONG)), Busy)
    equal((yield from b.record()), before, "the record after a busy claim")


@scenario()
def a_lease_that_is_over_is_taken_over(b: ScenarioContext) -> Flow[None]:
    """The next claim after the lease runs as the next attempt, with a greater fence."""
    old = yield from b.hold(lease=SHORT)
    yield from b.later()
    new = yield from b.hold()
    equal(new.granted.attempt, 2, "attempt")
    equal(new.granted.first_seen_us, old.granted.first_seen_us, "first_seen")
    grows([old.fence, new.fence], "fences")


@scenario()
def every_attempt_is_counted(b: ScenarioContext) -> Flow[None]:
    """Attempts and fences grow with every take-over, so that a message that kills its workers is detected."""
    fences = []
    for attempt in (1, 2, 3, 4):
        held = yield from b.hold(lease=SHORT)
        equal(held.granted.attempt, attempt, "attempt")
        fences.append(held.fence)
        yield from b.later()
    grows(fences, "fences")


@scenario()
def its_own_lease_over_is_a_new_attempt(b: ScenarioContext) -> Flow[None]:
    """A claim repeated after its own lease ended is a take-over: next attempt, new fence."""
    old = yield from b.hold(lease=SHORT)
    yield from b.later()
    new = yield from b.hold(owner=old.claim.owner)
    equal(new.granted.attempt, 2, "attempt")
    grows([old.fence, new.fence], "fences")


@scenario()
def a_replaced_owner_does_not_get_back_in(b: ScenarioContext) -> Flow[None]:
    """The old owner that repeats its claim after a take-over gets `Busy`."""
    old = yield from b.hold(lease=SHORT)
    yield from b.later()
    yield from b.hold()
    expect((yield from old.claim), Busy)


@scenario()
def two_tasks_of_a_process_do_not_both_win(b: ScenarioContext) -> Flow[None]:
    """An owner is one claim call, not a process: of several calls in one process only the first is granted."""
    yield from b.hold()
    for _ in range(OWNERS):
        expect((yield from b.claim()), Busy)


@scenario()
def claims_at_once_have_one_winner(b: ScenarioContext) -> Flow[None]:
    """Claims of the same keys that start together: each key is granted to one of them."""
    keys = [f"race-{number}" for number in range(10)]
    answers = yield from AtOnce([[b.claim(key) for key in keys] for _ in range(CALLERS)])
    for position, key in enumerate(keys):
        given = [caller[position] for caller in answers]
        won = sum(isinstance(answer, Granted) for answer in given)
        equal(won, 1, f"winners of {key}")
        equal(sum(isinstance(answer, Busy) for answer in given), CALLERS - 1, f"losers of {key}")


@scenario()
def take_overs_at_once_have_one_winner(b: ScenarioContext) -> Flow[None]:
    """Claims that start together after a lease has ended: one new owner, with one new attempt."""
    yield from b.hold(lease=SHORT)
    yield from b.later()
    answers = yield from AtOnce([[b.claim()] for _ in range(CALLERS)])
    won = [answer for (answer,) in answers if isinstance(answer, Granted)]
    equal([answer.attempt for answer in won], [2], "attempts of the winners")


@scenario()
def completions_at_once_have_one_effect(b: ScenarioContext) -> Flow[None]:
    """Of concurrent completions one is stored and replayed from then on; the others change nothing."""
    held = yield from b.hold()
    values = [b"%d" % number for number in range(CALLERS)]
    answers = yield from AtOnce([[held.settle("done", value)] for value in values])
    for (answer,) in answers:
        expect(answer, Completed, recreated=False)
    known = expect((yield from b.claim()), Known)
    check(known.value in values, f"{known} is none of the completions")
    expect((yield from held.settle("done", b"late")), Completed, already=True)
    again = expect((yield from b.claim()), Known)
    equal(replace(again, rest_us=known.rest_us), known, "the answer of a duplicate")  # time goes on


@scenario()
def fences_grow_across_expiry_and_purge(b: ScenarioContext) -> Flow[None]:
    """A key that comes back after its record expired, purged or not, has a greater fence."""
    fences = []
    for purge in (False, True, False):
        held = yield from b.finish(lease=LONG, window=SHORT)
        fences.append(held.fence)
        yield from b.much_later()
        if purge:
            yield from b.purge()
    held = yield from b.hold()
    grows([*fences, held.fence], "fences")


@scenario()
def fences_grow_across_forget(b: ScenarioContext) -> Flow[None]:
    """A fence never repeats after a forget, so that writes of the old run are still refused."""
    fences = []
    for _ in range(3):
        held = yield from b.finish()
        forgotten = expect((yield from Forget(b.id())), Forgotten)
        fences += [held.fence, forgotten.fence]
    grows(fences, "fences")


@scenario("manual")
def the_stores_time_never_goes_back(b: ScenarioContext) -> Flow[None]:
    """The store's time still grows when the clock is set back."""
    times = [(yield from b.now())]
    held = yield from b.hold(lease=SHORT)
    fences = [held.fence]
    for _ in range(3):
        yield from StepBack(b.us(FAR))
        times.append((yield from b.now()))
        expect((yield from b.claim()), Busy)
        yield from b.later()
        times.append((yield from b.now()))
        held = yield from b.hold(lease=SHORT)
        fences.append(held.fence)
    grows(times, "the store's time")
    grows(fences, "fences")


@scenario("manual")
def a_clock_set_back_does_not_hold_a_lease(b: ScenarioContext) -> Flow[None]:
    """After the clock was set back by hours, a lease still ends when its own time has passed."""
    yield from b.hold(lease=SHORT)
    yield from StepBack(b.us(100 * FAR))
    yield from b.now()
    yield from b.later()
    held = yield from b.hold()
    equal(held.granted.attempt, 2, "attempt")


@scenario()
def the_time_of_an_event_decides_no_lease(b: ScenarioContext) -> Flow[None]:
    """A producer's clock, however wrong, neither ends nor prolongs a lease."""
    now = yield from b.now()
    future, past = now + b.us(100 * LONG), now - b.us(100 * LONG)
    yield from b.hold("old", lease=LONG, event_time_us=past)
    expect((yield from b.claim("old", event_time_us=future)), Busy)
    held = yield from b.hold("new", lease=SHORT, event_time_us=future)
    check(held.granted.lease_until_us < future, "the lease runs by the event's time")
    yield from b.later()
    again = yield from b.hold("new", event_time_us=past)
    equal(again.granted.attempt, 2, "attempt")


@scenario()
def one_clock_serves_every_caller(b: ScenarioContext) -> Flow[None]:
    """The rest of a lease only shrinks, for every caller: no caller's own clock is used."""
    yield from b.hold(lease=LONG)
    rests = []
    for _ in range(OWNERS):
        rests.append(expect((yield from b.claim()), Busy).retry_after_s)
    check(rests == sorted(rests, reverse=True), f"the rest of one lease grew between callers: {rests}")
    times = []
    for _ in range(3):
        times.append(expect((yield from Count(b.tenant)), Stats).now_us)
    check(times == sorted(times), f"the store's time went back: {times}")
