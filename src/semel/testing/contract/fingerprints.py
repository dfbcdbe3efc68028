"""One key, two payloads: fingerprints are compared with every record that still counts."""

from semel.core.commands import Flow, Forget, Granted, Known
from semel.testing.contract.bench import SHORT, ScenarioContext, equal, expect, scenario
from semel.types import Busy, Completed, Mismatch, Unknown

ONE, TWO = b"\1payload one", b"\1payload two"
OTHER_VERSION = b"\2payload two"


@scenario()
def another_payload_is_a_mismatch(b: ScenarioContext) -> Flow[None]:
    """Against what is done, failed, running, released, orphaned or unknown: never run, nothing shown."""
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
    """An equal fingerprint changes no answer."""
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
    """Where the record had none, or one of another version, it has the reclaim's from then on."""
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
