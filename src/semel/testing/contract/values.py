"""What goes in comes out: values, keys, and who they belong to."""

from collections.abc import Iterator

from semel.core.commands import Flow, Granted, Known, Lookup
from semel.testing.contract.bench import SETTLED, ScenarioContext, HeldClaim, equal, expect, scenario
from semel.types import Absent, Completed, Record

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
"""All different, some only just."""


@scenario()
def values_come_back_byte_for_byte(b: ScenarioContext) -> Flow[None]:
    """Empty is not missing, missing is not empty, and a large value is whole; done and failed alike."""
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
    """The same for journals, steps and metadata."""
    for name, value in VALUES.items():
        held = yield from b.hold(name, journal=value, meta=value)
        yield from held.renew(step=(name, value))
        yield from held.settle("released")
        expect((yield from b.claim(name)), Granted, journal=value, steps=((name, value),))
        expect((yield from b.record(name)), Record, meta=value)


@scenario()
def keys_are_taken_as_they_are(b: ScenarioContext) -> Flow[None]:
    """Quotes, wildcards, any script, spaces, case and length: nothing is folded, cut or read as a command."""
    for number, key in enumerate(KEYS):
        yield from b.finish(key, b"%d" % number)
    for number, key in enumerate(KEYS):
        expect((yield from b.claim(key)), Known, value=b"%d" % number)
        equal((yield from b.record(key)).id, b.id(key), "id of the record")


@scenario()
def tenants_and_consumers_are_apart(b: ScenarioContext) -> Flow[None]:
    """The same key of another tenant or consumer is another event; nothing of the one shows in the other."""
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
    """Parts that would be equal when joined, whatever stands between them, name different records."""
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
