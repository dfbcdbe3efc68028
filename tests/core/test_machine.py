"""Corners of the machine that no store shows by itself."""

from typing import Any

import pytest
from msgspec.structs import replace

from semel.core.commands import Claim, Forget, Granted, Lookup, Renew, Settle
from semel.core.machine import NOBODY, TOMBSTONE_US, check, decide, differs, standing
from semel.errors import RecordCorrupt
from semel.types import FOREVER, Absent, Busy, Completed, Forgotten, Lost, Record, Unknown

S = 1_000_000
NOW = 1_800_000_000 * S
ID = ("", "consumer", "key")
OWNER = b"o" * 16


def record(**more: Any) -> Record:
    fields: dict[str, Any] = {
        "id": ID, "state": "claimed", "owner": OWNER, "fence": NOW - S, "lease_until_us": NOW + S, "attempt": 1,
        "expires_at_us": NOW + 60 * S, "first_seen_us": NOW - S,
    }  # fmt: skip
    return Record(**(fields | more))


def claim(**more: Any) -> Claim:
    fields: dict[str, Any] = {"id": ID, "owner": b"n" * 16, "lease_us": 30 * S, "window_us": 60 * S}
    return Claim(**(fields | more))


def test_a_lease_is_over_at_its_end_not_after_it() -> None:
    assert isinstance(decide(record(lease_until_us=NOW + 1), claim(), NOW)[0], Busy)
    assert isinstance(decide(record(lease_until_us=NOW), claim(), NOW)[0], Granted)


def test_a_window_is_over_at_its_end_not_after_it() -> None:
    done = record(state="done", lease_until_us=0, settled_at_us=NOW - S)
    assert standing(replace(done, expires_at_us=NOW + 1), NOW) is not None
    assert standing(replace(done, expires_at_us=NOW), NOW) is None


def test_a_lease_outlives_its_expiry() -> None:
    assert standing(record(expires_at_us=NOW - S, lease_until_us=NOW + 1), NOW) is not None
    assert standing(record(expires_at_us=NOW - S, lease_until_us=NOW), NOW) is None


def test_a_fence_is_the_clock_or_one_more_than_the_last() -> None:
    for fence, expected in ((NOW - 5, NOW), (NOW, NOW + 1), (NOW + 7, NOW + 8)):
        answer, written = decide(record(fence=fence, lease_until_us=NOW), claim(), NOW)
        assert answer.fence == expected
        assert written is not None
        assert written.fence == expected


def test_the_fence_goes_on_from_an_expired_record() -> None:
    gone = record(state="done", fence=NOW + 7, expires_at_us=NOW)
    answer, _ = decide(gone, claim(), NOW)
    assert (answer.fence, answer.attempt) == (NOW + 8, 1)


def test_an_event_is_late_only_past_its_window() -> None:
    edge = claim(event_time_us=NOW - 60 * S, refuse_late=True)
    assert isinstance(decide(None, edge, NOW)[0], Granted)
    answer, written = decide(None, edge, NOW + 1)
    assert answer.age_s == pytest.approx(60.000001)
    assert written is None


def test_what_never_expires_is_no_sum() -> None:
    for more in ({"quarantine": True}, {"journal": b"p"}, {"quarantine": True, "sliding": True}):
        _, written = decide(None, claim(**more), NOW)
        assert written is not None
        assert written.expires_at_us == FOREVER


def test_an_orphan_in_quarantine_is_unknown_since_its_lease_ended() -> None:
    orphan = record(quarantine=True, lease_until_us=NOW - 5, expires_at_us=FOREVER)
    assert decide(orphan, claim(), NOW)[0] == Unknown(NOW - 5)
    seen = decide(orphan, Lookup(ID), NOW)[0]
    assert (seen.state, seen.owner, seen.fence) == ("unknown", OWNER, orphan.fence)


def test_nobody_owns_nothing() -> None:
    released = record(owner=NOBODY)
    assert isinstance(decide(released, Renew(ID, NOBODY, released.fence, S), NOW)[0], Lost)
    for to in ("done", "failed", "released", "unknown"):
        assert isinstance(decide(released, Settle(ID, NOBODY, released.fence, to), NOW)[0], Lost)


def test_a_tombstone_is_as_long_as_the_longest_lease() -> None:
    answer, written = decide(record(state="done"), Forget(ID), NOW)
    assert answer == Forgotten(NOW)
    assert written is not None
    assert (written.state, written.expires_at_us) == ("forgotten", NOW + TOMBSTONE_US)
    assert isinstance(decide(written, Lookup(ID), NOW)[0], Absent)
    assert isinstance(decide(written, Settle(ID, OWNER, NOW - S, "done"), NOW + TOMBSTONE_US - 1)[0], Lost)
    late = Settle(ID, OWNER, NOW - S, "done", window_us=90 * 86400 * S)
    assert decide(written, late, NOW + TOMBSTONE_US)[0] == Completed(recreated=True, at_us=NOW + TOMBSTONE_US)


def test_what_is_decided_is_sound() -> None:
    for item in (claim(), claim(quarantine=True), claim(journal=b"p", sliding=True)):
        _, written = decide(None, item, NOW)
        assert written is not None
        assert check(written) is written


@pytest.mark.parametrize(
    "more",
    [
        {"state": "strange"},
        {"fence": 0},
        {"attempt": -1},
        {"state": "failed", "owner": NOBODY},
        {"state": "unknown", "owner": NOBODY, "expires_at_us": FOREVER},
        {"state": "unknown", "expires_at_us": NOW},
    ],
)
def test_a_record_in_no_known_state_is_corrupt(more: dict[str, Any]) -> None:
    with pytest.raises(RecordCorrupt):
        check(record(**more))


@pytest.mark.parametrize(
    ("mine", "stored", "answer"),
    [
        (b"\1a", b"\1b", True),
        (b"\1a", b"\1a", False),
        (b"\1a", b"\2b", False),
        (None, b"\1a", False),
        (b"\1a", None, False),
        (b"", b"\1a", False),
        (None, None, False),
    ],
)
def test_fingerprints_differ_only_within_a_version(
    mine: bytes | None, stored: bytes | None, answer: bool
) -> None:
    assert differs(mine, stored) is answer
