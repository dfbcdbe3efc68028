"""Errors of attempts: kept in the record, in order, bounded, until the event is new again."""

from semel.core.commands import Flow, Forget, Granted, Known, Page, Resolve, Scan
from semel.testing.contract.harness import LONG, SHORT, HeldClaim, ScenarioContext, equal, expect, scenario
from semel.types import AttemptError, Completed, ErrorInfo, Forgotten, Lost, Unknown

LEASE_ENDED = "lease ended"
LEASE_ENDED_MESSAGE = "the worker died, hung or was cut off: its lease ended before it settled"
KEPT = 5


def _info(text: str) -> ErrorInfo:
    return ErrorInfo(
        "app.Refused", text, f"  app/{text}.py:1 in run\n  app/db.py:2 in write", "host:7:00000001"
    )


def _entry(attempt: int, text: str, at_us: int) -> AttemptError:
    info = _info(text)
    return AttemptError(attempt, info.kind, info.message, info.traceback, info.worker, at_us)


def _lease_end(held: HeldClaim) -> AttemptError:
    """Return the error of a claim whose owner sent no sign of life any more."""
    worker, granted = held.claim.owner[:4].hex(), held.granted
    return AttemptError(granted.attempt, LEASE_ENDED, LEASE_ENDED_MESSAGE, "", worker, granted.lease_until_us)


@scenario()
def the_error_of_each_attempt_is_kept(b: ScenarioContext) -> Flow[None]:
    """A release, an unknown outcome and a failure keep their error, with the attempt and the store's time."""
    first = yield from b.hold(event_type="order", fingerprint=b"\x01print", meta=b"{}")
    released = expect((yield from first.settle("released", error=_info("first"))), Completed)
    uncounted = yield from b.hold()
    given_back = expect(
        (yield from uncounted.settle("released", count_attempt=False, error=_info("stopped"))), Completed
    )
    second = yield from b.hold(quarantine=True)
    expect((yield from second.renew(step=("paid", b"r1"))), object)
    unknown = expect((yield from second.settle("unknown", error=_info("second"))), Completed)
    errors: tuple[AttemptError, ...] = (
        _entry(1, "first", released.at_us),
        _entry(2, "stopped", given_back.at_us),
        _entry(2, "second", unknown.at_us),
    )
    record = yield from b.record()
    equal((record.state, record.attempt, record.errors), ("unknown", 2, errors), "the unknown record")
    equal((record.event_type, record.steps), ("order", (("paid", b"r1"),)), "the rest of the record")
    failed = expect((yield from second.settle("failed", b'j["E","no"]', error=_info("last"))), Completed)
    errors = (*errors, _entry(2, "last", failed.at_us))
    expect((yield from b.claim()), Known, state="failed", value=b'j["E","no"]')
    equal((yield from b.record()).errors, errors, "the errors of the failed record")
    page = expect((yield from Scan(b.tenant)), Page)
    equal([each.errors for each in page.records], [errors], "the errors in a scan")


@scenario()
def a_success_keeps_the_errors_before_it(b: ScenarioContext) -> Flow[None]:
    """A completion writes no error and removes none; neither does a settle that is lost."""
    for key in ("plain", "valued"):
        first = yield from b.hold(key)
        released = expect((yield from first.settle("released", error=_info("first"))), Completed)
        second = yield from b.hold(key)
        expect((yield from first.settle("failed", b"r", error=_info("late"))), Lost)
        yield from second.settle("done", None if key == "plain" else b"r1")
        expect((yield from b.claim(key)), Known, state="done", value=None if key == "plain" else b"r1")
        equal((yield from b.record(key)).errors, (_entry(1, "first", released.at_us),), "the errors")


@scenario()
def the_last_errors_are_kept(b: ScenarioContext) -> Flow[None]:
    """Of many attempts the record keeps the last errors, the oldest first."""
    ended = []
    for number in range(KEPT + 2):
        held = yield from b.hold()
        ended.append(expect((yield from held.settle("released", error=_info(f"try {number}"))), Completed))
    kept = tuple(_entry(number + 1, f"try {number}", ended[number].at_us) for number in range(2, KEPT + 2))
    equal((yield from b.record()).errors, kept, "the errors")


@scenario()
def a_lease_that_ended_is_an_error(b: ScenarioContext) -> Flow[None]:
    """A take-over keeps who had the claim. An owner that claims again after its own lease is no dead worker."""
    first = yield from b.hold(lease=SHORT)
    yield from b.later()
    second = yield from b.hold(lease=SHORT)
    errors: tuple[AttemptError, ...] = (_lease_end(first),)
    equal((yield from b.record()).errors, errors, "after the take-over")
    yield from b.later()
    expect((yield from second.claim), Granted, attempt=3)
    equal((yield from b.record()).errors, errors, "after its own claim again")


@scenario()
def a_quarantined_lease_that_ended_is_an_error(b: ScenarioContext) -> Flow[None]:
    """An orphan in quarantine shows the error as soon as it is unknown, and keeps it when it is decided."""
    for key in ("settled", "resolved"):
        held = yield from b.hold(key, lease=SHORT, quarantine=True)
        yield from b.later()
        equal((yield from b.record(key)).errors, (_lease_end(held),), "before anybody claims")
        if key == "resolved":
            expect((yield from b.claim(key)), Unknown)
            expect((yield from Resolve(b.id(key), held.fence, "done", b"r", b.us(LONG))), Completed)
        else:
            expect((yield from held.settle("done", b"r")), Completed)
        record = yield from b.record(key)
        equal((record.state, record.errors), ("done", (_lease_end(held),)), key)


@scenario()
def a_claim_may_bring_an_error(b: ScenarioContext) -> Flow[None]:
    """An attempt that is recorded when it has already failed brings its error with the claim."""
    for fingerprint in (None, b"\x01print"):
        key = "plain" if fingerprint is None else "printed"
        first = yield from b.hold(key, lease=SHORT, error=_info("first"), fingerprint=fingerprint)
        equal(first.granted.attempt, 1, "the attempt")
        yield from first.settle("released")
        second = yield from b.hold(key, error=_info("second"), fingerprint=fingerprint)
        errors = (
            _entry(1, "first", first.granted.first_seen_us),
            _entry(2, "second", second.fence),
        )
        equal((yield from b.record(key)).errors, errors, "the errors")


@scenario()
def any_text_of_an_error_is_kept(b: ScenarioContext) -> Flow[None]:
    """Its parts come back as `ErrorInfo` holds them: bounded, without control characters."""
    texts = [
        "",
        "zero \0 and \x1b[31m red",
        "half \ud800 of a pair",
        'naïve 決済 🎉 "quoted" \\u0000 \'',
        "x" * 90_000,
    ]
    held: list[AttemptError] = []
    for text in texts:
        one = yield from b.hold()
        info = ErrorInfo(text, text, text, text)
        ended = expect((yield from one.settle("released", error=info)), Completed)
        held.append(
            AttemptError(len(held) + 1, info.kind, info.message, info.traceback, info.worker, ended.at_us)
        )
    equal((yield from b.record()).errors, tuple(held), "the errors")
    yield from (yield from b.hold()).settle("done", b"r1")
    expect((yield from b.claim()), Known, value=b"r1")


@scenario()
def a_new_event_has_no_errors_of_the_old_one(b: ScenarioContext) -> Flow[None]:
    """After its window, or forgotten, a key starts without errors; a lost record that failed keeps its own."""
    for key in ("forgotten", "expired"):
        held = yield from b.hold(key, window=SHORT)
        yield from held.settle("failed", b"r", error=_info("old"))
        if key == "forgotten":
            expect((yield from Forget(b.id(key))), Forgotten)
        else:
            yield from b.later()
        yield from b.hold(key)
        equal((yield from b.record(key)).errors, (), key)
    held = yield from b.hold("lost", lease=SHORT, window=SHORT)
    yield from b.much_later()
    yield from b.purge()
    again = held.settle("failed", b"r", window_us=b.us(LONG), error=_info("kept"))
    recreated = expect((yield from again), Completed, recreated=True)
    equal((yield from b.record("lost")).errors, (_entry(1, "kept", recreated.at_us),), "a recreated record")
