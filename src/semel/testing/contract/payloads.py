"""Payloads: fingerprints, values, names, steps and journals."""

from collections.abc import Iterator

from semel.core.commands import Flow, Forget, Granted, Known, Lookup, Page, Scan
from semel.testing.contract.harness import (
    LONG,
    SETTLED,
    SHORT,
    HeldClaim,
    ScenarioContext,
    check,
    equal,
    expect,
    scenario,
)
from semel.types import FOREVER, Absent, Busy, Completed, Id, Lost, Mismatch, Record, Renewed, Unknown

ONE, TWO = b"\1payload one", b"\1payload two"
OTHER_VERSION = b"\2payload two"


@scenario()
def another_payload_is_a_mismatch(b: ScenarioContext) -> Flow[None]:
    """Against a done, failed, running, released, orphaned or unknown record: it does not run and shows no value."""
    yield from b.finish("done", fingerprint=ONE)
    failed = yield from b.hold("failed", fingerprint=ONE)
    yield from failed.settle("failed", b"r")
    yield from b.hold("running", fingerprint=ONE)
    released = yield from b.hold("released", fingerprint=ONE)
    yield from released.settle("released")
    unknown = yield from b.hold("unknown", fingerprint=ONE)
    yield from unknown.settle("unknown")
    yield from b.hold("orphan", lease=SHORT, fingerprint=ONE)
    yield from b.later()
    for key in ("done", "failed", "running", "released", "unknown", "orphan"):
        before = yield from b.record(key)
        equal((yield from b.claim(key, fingerprint=TWO)), Mismatch(), f"the answer of {key}")
        equal((yield from b.record(key)), before, f"the record of {key} after a mismatch")


@scenario()
def the_same_payload_passes(b: ScenarioContext) -> Flow[None]:
    """An equal fingerprint does not change any answer."""
    yield from b.finish("done", fingerprint=ONE)
    yield from b.hold("running", fingerprint=ONE)
    held = yield from b.hold("released", fingerprint=ONE)
    yield from held.settle("released")
    unknown = yield from b.hold("unknown", fingerprint=ONE)
    yield from unknown.settle("unknown")
    expect((yield from b.claim("done", fingerprint=ONE)), Known, value=b"rvalue")
    expect((yield from b.claim("running", fingerprint=ONE)), Busy)
    expect((yield from b.claim("released", fingerprint=ONE)), Granted, attempt=2)
    expect((yield from b.claim("unknown", fingerprint=ONE)), Unknown)


@scenario()
def fingerprints_are_compared_where_both_exist(b: ScenarioContext) -> Flow[None]:
    """Without one on either side, or with another version, there is nothing to compare."""
    yield from b.finish("with", fingerprint=ONE)
    yield from b.finish("without")
    expect((yield from b.claim("with")), Known)
    expect((yield from b.claim("without", fingerprint=TWO)), Known)
    expect((yield from b.claim("with", fingerprint=OTHER_VERSION)), Known)


@scenario()
def an_owner_with_another_payload_is_a_mismatch(b: ScenarioContext) -> Flow[None]:
    """The running owner itself, claiming again with another payload, does not get its claim back."""
    held = yield from b.hold(fingerprint=ONE)
    expect((yield from b.claim(owner=held.claim.owner, fingerprint=TWO)), Mismatch)
    expect((yield from held.settle()), Completed, already=False, recreated=False)


@scenario()
def a_take_over_keeps_the_fingerprint(b: ScenarioContext) -> Flow[None]:
    """A reclaim without a fingerprint does not open the key to another payload."""
    released = yield from b.hold("released", fingerprint=ONE)
    yield from released.settle("released")
    yield from b.hold("orphan", lease=SHORT, fingerprint=ONE)
    yield from b.later()
    for key in ("released", "orphan"):
        heir = yield from b.hold(key)
        equal((yield from b.record(key)).fingerprint, ONE, f"the fingerprint of {key}")
        expect((yield from b.claim(key, fingerprint=TWO)), Mismatch)
        yield from heir.settle("done", b"r")
        expect((yield from b.claim(key, fingerprint=TWO)), Mismatch)
        expect((yield from b.claim(key, fingerprint=ONE)), Known)


@scenario()
def a_take_over_may_bring_the_first_fingerprint(b: ScenarioContext) -> Flow[None]:
    """A record without a fingerprint, or with one of another version, takes that of the take-over."""
    for key, first in (("none", None), ("other version", OTHER_VERSION)):
        held = yield from b.hold(key, fingerprint=first)
        yield from held.settle("released")
        yield from b.hold(key, fingerprint=ONE)
        expect((yield from b.claim(key, fingerprint=TWO)), Mismatch)


@scenario()
def a_forgotten_key_has_no_fingerprint(b: ScenarioContext) -> Flow[None]:
    """After forget the key is new: another payload may use it."""
    yield from b.finish(fingerprint=ONE)
    yield from Forget(b.id())
    expect((yield from b.claim(fingerprint=TWO)), Granted, attempt=1)


VALUE_BYTES = 256 * 1024
"""The default limit of a value."""
KEY_BYTES = 512

VALUES: dict[str, bytes | None] = {
    "none": None,
    "empty": b"",
    "null": b"jnull",
    "zero": b"j0",
    "empty text": b'j""',
    "nul": b"\0",
    "every byte": bytes(range(256)),
    "not utf-8": b"r\xff\xfe\x80",
    "large": b"r" + bytes(range(256)) * (VALUE_BYTES // 256),
}

KEYS = [
    "plain",
    "Plain",
    "PLAIN",
    " plain",
    "plain ",
    "'; DROP TABLE record; --",
    'double "quotes"',
    "back\\slash",
    "per%cent",
    "under_score",
    "star*",
    "question?",
    "[brackets]",
    "{hash}tag",
    "colon:colon",
    "new\nline",
    "tab\ttab",
    "0",
    "00",
    "None",
    "null",
    "schl\u00fcssel",
    "schlu\u0308ssel",
    "\u03c3\u03c2",
    "\u30ad\u30fc",
    "\u05de\u05e4\u05ea\u05d7",
    "\U0001f511",
    "a" * KEY_BYTES,
    "a" * (KEY_BYTES - 1) + "b",
    "\u00e9" * (KEY_BYTES // 2),
]
"""All different, some only slightly."""


@scenario()
def values_come_back_byte_for_byte(b: ScenarioContext) -> Flow[None]:
    """Empty and missing values differ, and a large value is complete, for done and failed records."""
    for to in SETTLED:
        for name, value in VALUES.items():
            held = yield from b.hold(f"{to} {name}")
            expect((yield from held.settle(to, value)), Completed)
    for to in SETTLED:
        for name, value in VALUES.items():
            expect((yield from b.claim(f"{to} {name}")), Known, state=to, value=value)
            expect((yield from b.record(f"{to} {name}")), Record, state=to, value=value)


@scenario()
def payloads_and_notes_come_back_byte_for_byte(b: ScenarioContext) -> Flow[None]:
    """Journals, steps and metadata come back byte for byte, too."""
    for name, value in VALUES.items():
        held = yield from b.hold(name, journal=value, meta=value)
        yield from held.renew(step=(name, value))
        yield from held.settle("released")
        expect((yield from b.claim(name)), Granted, journal=value, steps=((name, value),))
        expect((yield from b.record(name)), Record, meta=value)


@scenario()
def keys_are_taken_as_they_are(b: ScenarioContext) -> Flow[None]:
    """Quotes, wildcards, any script, spaces, case and length: no key is folded, cut or interpreted."""
    for number, key in enumerate(KEYS):
        yield from b.finish(key, b"%d" % number)
    for number, key in enumerate(KEYS):
        expect((yield from b.claim(key)), Known, value=b"%d" % number)
        equal((yield from b.record(key)).id, b.id(key), "id of the record")


@scenario()
def tenants_and_consumers_are_apart(b: ScenarioContext) -> Flow[None]:
    """The same key of another tenant or consumer is another event; neither shows data of the other."""
    places = [b.id(tenant="-a"), b.id(tenant="-b"), b.id(consumer="mail"), b.id(consumer="Mail")]
    held: list[HeldClaim] = []
    for place in places:
        held.append((yield from b.hold(place, fingerprint=b"\1%d" % len(held))))
    for number, each in enumerate(held):
        expect((yield from each.settle("done", b"%d" % number)), Completed, recreated=False)
    for number, place in enumerate(places):
        expect((yield from b.claim(place)), Known, value=b"%d" % number)
    expect((yield from Lookup(b.id())), Absent)


@scenario()
def names_that_read_alike_are_apart(b: ScenarioContext) -> Flow[None]:
    """Names whose parts would be equal when joined, with any separator, are different records."""
    names = list(_alike(b.tenant))
    for name in names:
        yield from b.hold(name)
    for name in names:
        equal((yield from b.record(name)).id, name, "id of the record")


def _alike(tenant: str) -> Iterator[tuple[str, str, str]]:
    for sign in ("", ":", "|", "/", "\t", " ", "1:", "\\"):
        yield (f"{tenant}{sign}x", f"y{sign}1", "2")
        yield (tenant, f"x{sign}y{sign}1", f"2{sign}")
        yield (f"{tenant}{sign}x{sign}y", "1", f"2{sign}{sign}")
        yield (tenant, f"x{sign}y", f"1{sign}2{sign}{sign}")
    yield ("", f"{tenant}x", "y12")
    yield ("", f"{tenant}", "xy12")


STEPS_MAX = 64
"""As many steps as a handler may have."""


@scenario()
def steps_are_given_to_the_next_attempt(b: ScenarioContext) -> Flow[None]:
    """In order and byte for byte, after a release and after a crash."""
    steps: tuple[tuple[str, bytes | None], ...] = (("charge", b"r\x00\xff"), ("none", None), ("mail", b""))
    released = yield from b.hold("released")
    orphan = yield from b.hold("orphan", lease=SHORT)
    for held in (released, orphan):
        for step in steps:
            expect((yield from held.renew(SHORT if held is orphan else LONG, step)), Renewed)
    equal((yield from b.record("released")).steps, steps, "steps of the running claim")
    equal((yield from released.claim), Granted(
        released.fence, 1, (yield from b.record("released")).lease_until_us, released.granted.first_seen_us, steps
    ), "the repeated claim")  # fmt: skip
    expect((yield from released.settle("released")), Completed)
    yield from b.later()
    for key in ("released", "orphan"):
        heir = yield from b.hold(key)
        expect(heir.granted, Granted, attempt=2, steps=steps)
        expect((yield from heir.renew(step=("last", b"r"))), Renewed)
        expect((yield from heir.settle("released")), Completed)
        again = yield from b.hold(key)
        expect(again.granted, Granted, attempt=3, steps=(*steps, ("last", b"r")))


@scenario()
def a_repeated_step_is_kept_once(b: ScenarioContext) -> Flow[None]:
    """A step sent again after a lost reply is stored once, with its first value, and still renews the lease."""
    held = yield from b.hold(lease=SHORT)
    expect((yield from held.renew(SHORT, ("mail", b"first"))), Renewed)
    renewed = expect((yield from held.renew(LONG, ("mail", b"second"))), Renewed)
    record = yield from b.record()
    equal(record.steps, (("mail", b"first"),), "steps")
    equal(record.lease_until_us, renewed.lease_until_us, "lease_until")


@scenario()
def a_step_renews_the_lease(b: ScenarioContext) -> Flow[None]:
    """A step is a renewal that carries a note: lease and expiry move by the same amount."""
    held = yield from b.hold(lease=LONG, window=LONG)
    before = yield from b.record()
    renewed = expect((yield from held.renew(2 * LONG, ("mail", b"r"))), Renewed)
    after = yield from b.record()
    equal(after.lease_until_us, renewed.lease_until_us, "lease_until")
    check(after.lease_until_us > before.lease_until_us, "the step did not renew the lease")
    moved = after.lease_until_us - before.lease_until_us
    equal(after.expires_at_us - before.expires_at_us, moved, "how far the expiry moved")


@scenario()
def a_renewal_keeps_the_steps(b: ScenarioContext) -> Flow[None]:
    """A plain renewal between two steps keeps both."""
    held = yield from b.hold()
    yield from held.renew(step=("one", b"1"))
    yield from held.renew()
    yield from held.renew(step=("two", b"2"))
    equal((yield from b.record()).steps, (("one", b"1"), ("two", b"2")), "steps")


@scenario()
def a_zombies_step_is_not_written(b: ScenarioContext) -> Flow[None]:
    """A step of an attempt that was taken over is `Lost`, and the successor's record does not contain it."""
    zombie = yield from b.hold(lease=SHORT)
    yield from b.later()
    yield from b.hold()
    expect((yield from zombie.renew(step=("mail", b"r"))), Lost)
    equal((yield from b.record()).steps, (), "steps")


@scenario()
def a_record_holds_all_the_steps_there_may_be(b: ScenarioContext) -> Flow[None]:
    """A record keeps the maximum number of steps, in order."""
    held = yield from b.hold()
    steps = tuple((f"step {number}", b"%d" % number) for number in range(STEPS_MAX))
    for step in steps:
        expect((yield from held.renew(step=step)), Renewed)
    yield from held.settle("released")
    heir = yield from b.hold()
    equal(heir.granted.steps, steps, "steps")


# --- journal ------------------------------------------------------------------------------------


@scenario()
def a_journaled_payload_is_kept_with_its_claim(b: ScenarioContext) -> Flow[None]:
    """Claim and payload are one write: a take-over gets the payload, and others see that it is journaled."""
    for key, payload in (("some", b"payload\x00\xff"), ("empty", b"")):
        held = yield from b.hold(key, lease=SHORT, journal=payload)
        equal(held.granted.journal, payload, "journal")
        expect((yield from held.renew(LONG)), Renewed)
        expect((yield from b.claim(key)), Busy, recoverable=True)
        equal((yield from b.record(key)).journal, payload, "journal of the record")
        expect((yield from held.settle("released")), Completed)
        heir = yield from b.hold(key)
        expect(heir.granted, Granted, attempt=2, journal=payload)


@scenario()
def a_journal_is_written_only_if_new(b: ScenarioContext) -> Flow[None]:
    """A duplicate's payload neither replaces the first one's nor is added to a settled record."""
    held = yield from b.hold("first", lease=SHORT, journal=b"first")
    yield from b.later()
    heir = yield from b.hold("first", journal=b"second")
    equal(heir.granted.journal, b"first", "journal after a take-over")
    expect((yield from b.claim("first", journal=b"third")), Busy, recoverable=True)
    equal((yield from b.record("first")).journal, b"first", "journal after a busy claim")
    expect((yield from held.settle("done")), Lost)
    yield from b.finish("done", b"rvalue", journal=b"payload")
    expect((yield from b.claim("done", journal=b"again")), Known, value=b"rvalue")
    equal((yield from b.record("done")).journal, None, "journal of a settled record")


@scenario()
def a_take_over_may_bring_the_first_journal(b: ScenarioContext) -> Flow[None]:
    """A record without a payload keeps the one of the first claim that has one."""
    held = yield from b.hold()
    expect((yield from held.settle("released")), Completed)
    heir = yield from b.hold(lease=SHORT, window=SHORT, journal=b"payload")
    expect(heir.granted, Granted, attempt=2, journal=b"payload")
    expect((yield from b.record()), Record, journal=b"payload", expires_at_us=FOREVER)


@scenario()
def orphans_with_a_journal_are_found(b: ScenarioContext) -> Flow[None]:
    """A sweep finds the journaled claims whose lease is over, and no others."""
    yield from b.hold("plain orphan", lease=SHORT)
    yield from b.hold("orphan", lease=SHORT, journal=b"payload")
    released = yield from b.hold("released", journal=b"payload")
    yield from released.settle("released", delay=SHORT)
    held = yield from b.hold("delayed", journal=b"payload")
    yield from held.settle("released", delay=LONG)
    yield from b.hold("running", lease=LONG, journal=b"payload")
    for to in SETTLED:
        held = yield from b.hold(to, lease=SHORT, journal=b"payload")
        yield from held.settle(to, b"r")
    yield from b.hold("forgotten", lease=SHORT, journal=b"payload")
    yield from Forget(b.id("forgotten"), force=True)
    yield from b.later()
    found = yield from _orphans(b)
    equal(found, {b.id("orphan"): b"payload", b.id("released"): b"payload"}, "orphans")
    yield from b.hold("orphan")
    equal((yield from _orphans(b)), {b.id("released"): b"payload"}, "orphans after a take-over")


def _orphans(b: ScenarioContext) -> Flow[dict[Id, bytes | None]]:
    page = expect((yield from Scan(tenant=b.tenant, orphaned=True)), Page, cursor=None)
    return {record.id: record.journal for record in page.records}
