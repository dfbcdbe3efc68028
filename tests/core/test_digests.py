"""Different names have different digests, whatever their parts look like when joined."""

from hypothesis import given
from hypothesis import strategies as st

from semel.core.ids import DIGEST_BYTES, digest, fingerprint, idempotency_key, scope
from semel.types import Id

# Few letters and the separators that people use: most examples would collide if the parts were only joined.
parts = st.text(alphabet="a1:|", max_size=4)
ids = st.tuples(parts, parts, parts)


@given(ids, ids)
def test_parts_that_read_alike_are_apart(one: Id, other: Id) -> None:
    assert (digest(one) == digest(other)) == (one == other)
    assert (idempotency_key(one) == idempotency_key(other)) == (one == other)


@given(ids, parts, ids, parts)
def test_steps_that_read_alike_are_apart(one: Id, step: str, other: Id, other_step: str) -> None:
    same = (one, step) == (other, other_step)
    assert (idempotency_key(one, step) == idempotency_key(other, other_step)) == same


@given(st.tuples(parts, parts), st.tuples(parts, parts))
def test_scopes_that_read_alike_are_apart(one: tuple[str, str], other: tuple[str, str]) -> None:
    assert (scope(*one) == scope(*other)) == (one == other)


def test_the_known_collisions_of_joined_parts_are_none() -> None:
    groups = [
        [("acme", "eu:42", "k"), ("acme:eu", "42", "k"), ("acme", "eu", "42:k")],
        [("", "ab", "c"), ("a", "b", "c"), ("", "a", "bc"), ("ab", "", "c")],
        [("1:a", "", "b"), ("", "1:a", "b"), ("", "", "1:ab")],
    ]
    for group in groups:
        assert len({digest(each) for each in group}) == len(group)


def test_unicode_counts_by_its_bytes() -> None:
    assert digest(("\u00e9", "x", "k")) != digest(("\u00e9x", "", "k"))
    assert digest(("", "c", "\u00fc")) != digest(("", "c", "u\u0308"))


def test_digests_stay_what_they_are() -> None:
    # Stored records are found by these: a change would make every key of every store new.
    assert digest(("", "billing", "evt_1")).hex() == "f40157fedd339781f5b49f49ffbb5962"
    assert digest(("acme", "billing", "evt_1")).hex() == "d919c7e05629d7072c4fdf75ed87aad8"
    assert idempotency_key(("", "billing", "evt_1")) == "a4643e45dd2ac745cb835e1b72eb590d"
    assert idempotency_key(("", "billing", "evt_1"), "email") == "1c94cca48552545c3e36cc5876cc4e49"
    assert fingerprint(b"payload").hex() == "01239f59ed55e737c77147cf55ad0c1b03"


def test_an_idempotency_key_is_the_same_on_every_attempt_and_shows_nothing() -> None:
    key = idempotency_key(("acme", "billing", "evt_1"), "email")
    assert key == idempotency_key(("acme", "billing", "evt_1"), "email")
    assert len(key) == 32
    assert "evt_1" not in key


def test_a_fingerprint_begins_with_its_version() -> None:
    assert fingerprint(b"")[:1] == b"\x01"
    assert len(fingerprint(b"x")) == 1 + DIGEST_BYTES
    assert fingerprint(b"x") != fingerprint(b"y")
