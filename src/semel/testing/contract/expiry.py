"""How long things are remembered: windows, expiry, purging, sliding windows, late events."""

from semel.core.commands import Count, Flow, Granted, Known, Lookup, Purge, Purged
from semel.testing.contract.harness import (
    LONG,
    SETTLED,
    SHORT,
    ScenarioContext,
    check,
    equal,
    expect,
    scenario,
)
from semel.types import FOREVER, Absent, Busy, Completed, Late, Lost, Renewed, Stats, Unknown

EXPIRED, FEW = 26, 2
OLD_PRINT, NEW_PRINT = b"\1old", b"\1new"


@scenario()
def a_window_counts_from_completion(b: ScenarioContext) -> Flow[None]:
    """A finished key is remembered for its window from its completion, however long it ran."""
    held = yield from b.hold(lease=LONG, window=SHORT)
    yield from b.later()
    done = expect((yield from held.settle("done", b"rv")), Completed, recreated=False)
    record = yield from b.record()
    equal(record.expires_at_us, done.at_us + b.us(SHORT), "expires_at")


@scenario()
def the_window_of_the_completion_counts(b: ScenarioContext) -> Flow[None]:
    """A window that was changed while the handler ran applies to its completion."""
    for to in SETTLED:
        held = yield from b.hold(to, lease=LONG, window=SHORT)
        done = expect((yield from held.settle(to, b"rv", window_us=b.us(LONG))), Completed)
        record = yield from b.record(to)
        equal(record.expires_at_us, done.at_us + b.us(LONG), "expires_at")


@scenario()
def lease_and_window_are_two_numbers(b: ScenarioContext) -> Flow[None]:
    """A short lease does not shorten the window of a completion; a short window does not end a lease."""
    yield from b.finish("short lease", lease=SHORT, window=LONG)
    yield from b.hold("short window", lease=LONG, window=SHORT)
    orphan = yield from b.hold("orphan", lease=SHORT, window=LONG)
    yield from b.later()
    expect((yield from b.claim("short lease")), Known)
    expect((yield from b.claim("short window")), Busy)
    equal(
        (yield from b.record("orphan")).expires_at_us,
        orphan.granted.lease_until_us + b.us(LONG),
        "expires_at",
    )


@scenario()
def a_window_that_is_over_means_absent(b: ScenarioContext) -> Flow[None]:
    """A settled key whose window is over is new in every respect, except for its fence."""
    before = yield from b.now()
    for to in SETTLED:
        held = yield from b.hold(to, window=SHORT, fingerprint=OLD_PRINT, event_type="old")
        yield from held.settle(to, b"rv")
    yield from b.later()
    for to in SETTLED:
        expect((yield from Lookup(b.id(to))), Absent)
        heir = yield from b.hold(to, fingerprint=NEW_PRINT)
        expect(heir.granted, Granted, attempt=1, steps=(), journal=None)
        check(heir.granted.first_seen_us > before + b.us(SHORT), "first_seen is the old one's")
        record = yield from b.record(to)
        equal(
            (record.fingerprint, record.value, record.event_type),
            (NEW_PRINT, None, ""),
            "fields of the new record",
        )


@scenario()
def an_orphan_expires_like_the_rest(b: ScenarioContext) -> Flow[None]:
    """A claim that was neither settled nor taken over is absent after lease and window: attempt 1, no steps."""
    held = yield from b.hold(lease=SHORT, window=SHORT, fingerprint=OLD_PRINT)
    expect((yield from held.renew(SHORT, ("mail", b"r"))), Renewed)
    released = yield from b.hold("released", lease=SHORT, window=SHORT, fingerprint=OLD_PRINT)
    expect((yield from released.settle("released", delay=SHORT)), Completed)
    yield from b.later(2 * SHORT + 1)
    for key in ("key", "released"):
        expect((yield from Lookup(b.id(key))), Absent)
        heir = yield from b.hold(key, fingerprint=NEW_PRINT)
        expect(heir.granted, Granted, attempt=1, steps=())
        check(heir.granted.first_seen_us > held.granted.first_seen_us, "first_seen is the old one's")
        check(heir.fence > held.fence, "the fence did not grow")


@scenario()
def an_orphan_is_remembered_for_its_window(b: ScenarioContext) -> Flow[None]:
    """After the lease and within the window, attempts, steps and fingerprint still count."""
    held = yield from b.hold(lease=SHORT, window=LONG)
    expect((yield from held.renew(SHORT, ("mail", b"r"))), Renewed)
    yield from b.later()
    heir = yield from b.hold()
    expect(heir.granted, Granted, attempt=2, steps=(("mail", b"r"),))


@scenario()
def an_expired_claim_is_not_renewed(b: ScenarioContext) -> Flow[None]:
    """Renewal and release of an absent record are `Lost`; a completion is `recreated`."""
    held = yield from b.hold(lease=SHORT, window=SHORT)
    yield from b.later(2 * SHORT + 1)
    expect((yield from held.renew()), Lost)
    expect((yield from held.renew(step=("step", b"r"))), Lost)
    expect((yield from held.settle("released")), Lost)
    expect((yield from held.settle("unknown")), Lost)
    expect((yield from held.settle("done", b"r")), Completed, recreated=True)
    expect((yield from Lookup(b.id())), Absent)


@scenario()
def a_window_of_nothing_remembers_nothing(b: ScenarioContext) -> Flow[None]:
    """With a window of zero a completed key is new at once, and a running one is still busy."""
    held = yield from b.hold(window=0)
    expect((yield from b.claim(window=0)), Busy)
    expect((yield from held.settle("done", b"r")), Completed, recreated=False)
    heir = yield from b.hold(window=0)
    equal(heir.granted.attempt, 1, "attempt")


@scenario()
def a_duplicate_gets_the_rest_of_its_window(b: ScenarioContext) -> Flow[None]:
    """The answer holds the rest of the window at that time, never more; a store may also leave it out."""
    held = yield from b.hold(window=LONG)
    expect((yield from held.settle("done", b"r")), Completed)
    yield from b.later()
    known = expect((yield from b.claim()), Known)
    record = yield from b.record()
    left = record.expires_at_us - (yield from b.now())
    check(known.rest_us == 0 or left <= known.rest_us <= b.us(LONG - SHORT), f"rest_us is {known.rest_us}")


# --- purge --------------------------------------------------------------------------------------


@scenario()
def a_purge_changes_no_answer(b: ScenarioContext) -> Flow[None]:
    """The answer for every kind of record is the same with and without a purge."""
    for purged in (False, True):
        name = str(purged)
        yield from b.finish(f"done {name}", window=LONG)
        yield from b.finish(f"expired {name}", window=SHORT, fingerprint=OLD_PRINT)
        failed = yield from b.hold(f"failed {name}", window=SHORT)
        yield from failed.settle("failed", b"r")
        running = yield from b.hold(f"running {name}", window=SHORT, sliding=True)
        orphan = yield from b.hold(f"orphan {name}", lease=SHORT, window=LONG)
        gone = yield from b.hold(f"gone {name}", lease=SHORT, window=SHORT, fingerprint=OLD_PRINT)
        yield from b.much_later()
        if purged:
            yield from b.purge()
        expect((yield from b.claim(f"done {name}")), Known, value=b"rvalue")
        for key in ("expired", "failed", "gone"):
            heir = yield from b.hold(f"{key} {name}", fingerprint=NEW_PRINT)
            equal(heir.granted.attempt, 1, f"attempt of {key}")
            check(heir.fence > gone.fence, f"the fence of {key} did not grow")
        expect((yield from b.claim(f"running {name}")), Busy)
        expect((yield from running.settle("done", b"r")), Completed, recreated=False)
        heir = yield from b.hold(f"orphan {name}")
        equal(heir.granted.attempt, 2, "attempt of orphan")
        check(heir.fence > orphan.fence, "the fence of orphan did not grow")


@scenario("manual")
def a_purge_removes_what_is_over(b: ScenarioContext) -> Flow[None]:
    """A purge removes expired records in batches; a dry run only counts them. A store may also clean up by itself."""
    for number in range(EXPIRED - 1):
        yield from b.finish(f"done {number}", window=SHORT)
    yield from b.hold("gone", lease=SHORT, window=SHORT)
    yield from b.finish("kept", window=2 * LONG)
    yield from b.much_later()
    stats = expect((yield from Count(b.tenant)), Stats, states={"done": 1})
    check(stats.expired <= EXPIRED, f"{stats.expired} of {EXPIRED} expired records are counted")
    check(
        stats.purge_lag_s > 0 or not stats.expired, "purge_lag_s does not show that the oldest record waits"
    )
    dry = expect((yield from Purge(dry_run=True)), Purged)
    check(dry.count >= stats.expired, f"a dry run counts {dry.count} of {stats.expired} expired records")
    equal(expect((yield from Count(b.tenant)), Stats).expired, stats.expired, "expired, after a dry run")
    small = expect((yield from Purge(limit=FEW)), Purged)
    check(small.count <= FEW, f"a purge of at most {FEW} removed {small.count}")
    check(small.more or stats.expired <= FEW, "a purge that left records reports that none are left")
    yield from b.purge()
    stats = expect((yield from Count(b.tenant)), Stats)
    equal((stats.expired, stats.states), (0, {"done": 1}), "expired and states after the purge")
    expect((yield from b.claim("kept")), Known)


# --- records without expiry ----------------------------------------------------------------------


@scenario()
def what_must_be_decided_does_not_expire(b: ScenarioContext) -> Flow[None]:
    """Quarantined, unknown and journaled claims stay after lease and window, with and without a purge."""
    waits = yield from b.hold("quarantine", lease=SHORT, window=SHORT, quarantine=True)
    unknown = yield from b.hold("unknown", lease=SHORT, window=SHORT)
    expect((yield from unknown.settle("unknown")), Completed)
    yield from b.hold("journal", lease=SHORT, window=SHORT, journal=b"payload")
    let_go = yield from b.hold("let go", lease=SHORT, window=SHORT, journal=b"payload")
    expect((yield from let_go.settle("released")), Completed)
    for key in ("quarantine", "unknown", "journal", "let go"):
        equal((yield from b.record(key)).expires_at_us, FOREVER, f"expires_at of {key}")
    yield from b.much_later()
    yield from b.purge()
    expect((yield from b.claim("quarantine", quarantine=True)), Unknown)
    expect((yield from b.claim("unknown")), Unknown)
    for key in ("journal", "let go"):
        heir = yield from b.hold(key)
        expect(heir.granted, Granted, attempt=2, journal=b"payload")
    expect((yield from waits.settle("done", b"r")), Completed, recreated=False)


@scenario()
def renewing_what_has_no_expiry_gives_it_none(b: ScenarioContext) -> Flow[None]:
    """A renewal moves only the lease of a quarantined or journaled claim; completion starts the window."""
    for key, more in (("quarantine", {"quarantine": True}), ("journal", {"journal": b"payload"})):
        held = yield from b.hold(key, window=LONG, **more)
        expect((yield from held.renew(2 * LONG)), Renewed)
        equal((yield from b.record(key)).expires_at_us, FOREVER, f"expires_at of {key}")
        done = expect((yield from held.settle("done", b"r")), Completed)
        equal((yield from b.record(key)).expires_at_us, done.at_us + b.us(LONG), f"expires_at of {key}, done")


# --- sliding ------------------------------------------------------------------------------------


@scenario()
def a_sliding_window_counts_from_the_claim(b: ScenarioContext) -> Flow[None]:
    """The window ends one length after the claim; no renewal, release or completion moves its end."""
    held = yield from b.hold(window=LONG, sliding=True)
    expires_at = held.granted.first_seen_us + b.us(LONG)
    equal((yield from b.record()).expires_at_us, expires_at, "expires_at when claimed")
    yield from b.later(1)
    renewed = expect((yield from held.renew(2 * LONG)), Renewed)
    record = yield from b.record()
    equal(
        (record.expires_at_us, record.lease_until_us),
        (expires_at, renewed.lease_until_us),
        "expiry and lease, renewed",
    )
    expect((yield from held.settle("released")), Completed)
    equal((yield from b.record()).expires_at_us, expires_at, "expires_at when released")
    heir = yield from b.hold(window=LONG, sliding=True)
    expect((yield from heir.settle("done", b"r")), Completed)
    equal((yield from b.record()).expires_at_us, expires_at, "expires_at when done")


@scenario()
def a_sliding_window_counts_from_the_claim_of_a_journal(b: ScenarioContext) -> Flow[None]:
    """An unfinished journaled claim has no expiry; its completion sets the expiry that counts from its claim."""
    held = yield from b.hold(window=LONG, sliding=True, journal=b"payload")
    equal((yield from b.record()).expires_at_us, FOREVER, "expires_at when claimed")
    yield from b.later(1)
    expect((yield from held.settle("done", b"r")), Completed)
    expires_at = held.granted.first_seen_us + b.us(LONG)
    equal((yield from b.record()).expires_at_us, expires_at, "expires_at when done")


@scenario()
def a_sliding_window_ends_while_its_lease_runs(b: ScenarioContext) -> Flow[None]:
    """The window does not end a running lease; if the completion comes after the window, the key is new at once."""
    held = yield from b.hold(lease=LONG, window=SHORT, sliding=True)
    yield from b.later()
    expect((yield from b.claim(sliding=True)), Busy)
    expect((yield from held.renew()), Renewed)
    expect((yield from held.settle("done", b"r")), Completed, recreated=False)
    heir = yield from b.hold(sliding=True)
    equal(heir.granted.attempt, 1, "attempt")


# --- late ---------------------------------------------------------------------------------------


@scenario()
def an_event_older_than_its_window_is_late(b: ScenarioContext) -> Flow[None]:
    """If no record is left, the store cannot know whether the event ran; the store's clock decides."""
    now = yield from b.now()
    old = now - b.us(LONG) - b.us(10)
    late = expect((yield from b.claim(window=LONG, event_time_us=old, refuse_late=True)), Late)
    check(b.us(LONG + 10) <= late.age_s * 1e6, f"{late} is not the age of the event")
    check(late.age_s * 1e6 <= (yield from b.now()) - old, f"{late} is older than the event")
    expect((yield from Lookup(b.id())), Absent)


@scenario()
def an_event_is_late_only_where_nothing_is_known(b: ScenarioContext) -> Flow[None]:
    """A stored record answers for an event of any age. Without a refusal, a time or the age the event runs."""
    now = yield from b.now()
    old = now - b.us(10 * LONG)
    yield from b.finish("done")
    expect((yield from b.claim("done", event_time_us=old, refuse_late=True)), Known)
    yield from b.hold("running")
    expect((yield from b.claim("running", event_time_us=old, refuse_late=True)), Busy)
    held = yield from b.hold("released")
    yield from held.settle("released")
    expect((yield from b.claim("released", event_time_us=old, refuse_late=True)), Granted, attempt=2)
    expect((yield from b.claim("asked to run", event_time_us=old)), Granted)
    expect((yield from b.claim("no time", refuse_late=True)), Granted)
    recent = now - b.us(LONG / 2)
    expect((yield from b.claim("recent", event_time_us=recent, refuse_late=True)), Granted)
    expect((yield from b.claim("future", event_time_us=now + b.us(LONG), refuse_late=True)), Granted)


@scenario()
def an_expired_record_does_not_hide_lateness(b: ScenarioContext) -> Flow[None]:
    """An old event is also late while its expired record is still stored."""
    now = yield from b.now()
    held = yield from b.finish(window=SHORT)
    yield from b.later()
    claim = b.claim(window=SHORT, event_time_us=now - b.us(LONG), refuse_late=True)
    expect((yield from claim), Late)
    heir = yield from b.hold()
    check(heir.fence > held.fence, "the fence did not grow")
