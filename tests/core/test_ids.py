"""The time inside an id, of each kind, against ids made elsewhere."""

import time

import pytest

import semel
from semel.core.ids import KINDS, TWITTER_EPOCH_MS, check_kind, holds_time, time_in
from semel.errors import KeyInvalid, PolicyInvalid

KNOWN = [
    ("uuid7", "017f22e2-79b0-7cc3-98c4-dc0c0c07398f", 1_645_557_742_000),  # RFC 9562, appendix A.6
    ("uuid7", "billing:017F22E2-79B0-7CC3-98C4-DC0C0C07398F", 1_645_557_742_000),
    ("ulid", "01ARZ3NDEKTSV4RRFFQ69G5FAV", 1_469_922_850_259),  # the example of its specification
    ("ulid", "01arz3ndektsv4rrffq69g5fav", 1_469_922_850_259),
    ("ksuid", "0ujtsYcgvSTl8PAuAdqWYSMnLOv", 1_507_608_047_000),  # the example of its first implementation
    ("snowflake", "1541815603606036480", 1_656_432_460_105),
    ("snowflake:1420070400000", "175928847299117063", 1_462_015_105_796),  # with the epoch of another service
]


@pytest.mark.parametrize(("kind", "key", "time_ms"), KNOWN)
def test_the_time_inside_a_known_id(kind: str, key: str, time_ms: int) -> None:
    assert time_in(kind, key) == time_ms * 1000


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("uuid7", "f47ac10b-58cc-4372-a567-0e02b2c3d479"),  # version 4
        ("uuid7", "017f22e2-79b0-7cc3-18c4-dc0c0c07398f"),  # another variant
        ("uuid7", "017f22e279b07cc398c4dc0c0c07398f"),
        ("uuid7", "017f22e2-79b0-7cc3-98c4-dc0c0c07398f:billing"),
        ("uuid7", ""),
        ("ulid", "81ARZ3NDEKTSV4RRFFQ69G5FAV"),  # more than 128 bits
        ("ulid", "01ARZ3NDEKTSV4RRFFQ69G5FAI"),
        ("ulid", "01ARZ3NDEKTSV4RRFFQ69G5FA"),
        ("ksuid", "0ujtsYcgvSTl8PAuAdqWYSMnLO"),
        ("ksuid", "zzzzzzzzzzzzzzzzzzzzzzzzzzz"),  # more than 160 bits
        ("ksuid", "0ujtsYcgvSTl8PAuAdqWYSMnLO-"),
        ("snowflake", "-1"),
        ("snowflake", "01541815603606036480"),
        ("snowflake", "9223372036854775808"),
        ("snowflake", "1541815603606036480.0"),
        ("snowflake", "\u0661\u0662"),  # digits, but not ours
    ],
)
def test_what_is_not_of_the_kind_is_refused(kind: str, key: str) -> None:
    with pytest.raises(KeyInvalid, match=f"ids='{kind}'"):
        time_in(kind, key)


def test_our_own_ids_are_of_the_kind() -> None:
    before = time.time_ns() // 1_000_000
    found = time_in("uuid7", semel.keys.uuid7("billing")) // 1000
    assert before - 1 <= found <= time.time_ns() // 1_000_000 + 1


@pytest.mark.parametrize("kind", ["", "uuid4", "uuid", "UUID7", "ulid:1", "snowflake:", "snowflake:x", "snowflake:-1",
                                  "snowflake:99999999999999"])  # fmt: skip
def test_other_kinds_are_refused(kind: str) -> None:
    with pytest.raises(PolicyInvalid):
        check_kind(kind)


def test_a_kind_has_one_spelling() -> None:
    assert [check_kind(kind) for kind in ("uuid7", "ulid", "ksuid", "snowflake")] == list(KINDS)[:4]
    assert check_kind(f"snowflake:{TWITTER_EPOCH_MS}") == "snowflake"
    assert check_kind("snowflake:0000000000001") == check_kind("snowflake:1")
    assert check_kind("opaque") == "opaque"
    assert [holds_time(kind) for kind in ("", "opaque", "uuid7", "snowflake:1")] == [False, False, True, True]


def test_ids_without_a_time_are_for_marks() -> None:
    with pytest.raises(PolicyInvalid, match="mark"):
        semel.open("memory:", consumer="c", ids="opaque", policy=semel.Policy(late="hold"))
    with semel.open("memory:", consumer="c", ids="opaque", mode="mark") as once:
        assert (once.mark("any key"), once.mark("any key")) == (True, False)


@pytest.mark.parametrize("mode", ["quarantine", "transaction"])
def test_modes_that_keep_what_must_stay_take_no_ids(mode: semel.Mode) -> None:
    with pytest.raises(PolicyInvalid, match="mode"):
        semel.open("memory:", consumer="c", ids="uuid7", mode=mode, policy=semel.Policy(late="hold"))


def test_late_events_cannot_be_run() -> None:
    with pytest.raises(PolicyInvalid, match="late"):
        semel.open("memory:", consumer="c", ids="uuid7")
    for late in ("hold", "reject"):
        semel.open("memory:", consumer="c", ids="uuid7", policy=semel.Policy(late=late)).close()
