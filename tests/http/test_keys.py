"""From header to key."""

import http_sf
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.errors import RecordCorrupt
from semel.http.responses import Reply, pack, unpack
from semel.http.rules import KEY_CHARS_MAX, KeyMalformed, digest_of_credentials, payload_of, read, record_key
from semel.keys import check

PRINTABLE = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), min_size=1, max_size=KEY_CHARS_MAX)


@given(PRINTABLE)
def test_a_structured_string_comes_back_as_it_was(key: str) -> None:
    assert read([http_sf.ser(key).encode()], strict=True) == key
    assert read([http_sf.ser(key).encode() + b";a=1"], strict=False) == key


@given(st.binary(max_size=300))
def test_whatever_comes_is_a_key_or_malformed(field: bytes) -> None:
    for strict in (True, False):
        try:
            key = read([field], strict=strict)
        except KeyMalformed:
            continue
        assert 0 < len(key) <= KEY_CHARS_MAX
        assert key.isascii()
        assert key.isprintable()


@pytest.mark.parametrize("field", [b"token", b"12", b":YQ==:", b"?1", b'%"f"', b'"a", "b"', b"", b'("a")'])
def test_strict_refuses_every_other_kind_of_item(field: bytes) -> None:
    with pytest.raises(KeyMalformed):
        read([field], strict=True)


def test_spaces_around_a_bare_key_are_not_part_of_it() -> None:
    assert read([b" \t8e03 "], strict=False) == "8e03"
    assert read([b"a b"], strict=False) == "a b"


PARTS = st.tuples(
    st.sampled_from(["POST", "PATCH"]), st.text(max_size=400), st.none() | st.text(max_size=400), PRINTABLE
)


@given(PARTS, PARTS)
def test_two_scopes_never_read_the_same(
    one: tuple[str, str, str | None, str], other: tuple[str, str, str | None, str]
) -> None:
    assert (record_key(*one) == record_key(*other)) is (one == other)
    assert check(record_key(*one))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("POST", "/a b", "c", "k"), ("POST", "/a", "b c", "k")),
        (("POST", "/a", "b", "c k"), ("POST", "/a", "b c", "k")),
        (("POST", "/a", None, "k"), ("POST", "/a", "*", "k")),
        (("POST", "/a", "", "k"), ("POST", "/a", None, "k")),
        (("POST", "/a%20b", "c", "k"), ("POST", "/a b", "c", "k")),
    ],
)
def test_no_part_runs_into_the_next(
    one: tuple[str, str, str | None, str], other: tuple[str, str, str | None, str]
) -> None:
    assert record_key(*one) != record_key(*other)


def test_a_scope_too_long_for_a_store_becomes_its_digest() -> None:
    long = record_key("POST", "/a" * 300, None, "k")
    assert long.startswith("sha256:")
    assert long != record_key("POST", "/a" * 300, None, "l")


def test_the_parts_of_a_payload_do_not_run_into_one_another() -> None:
    assert (
        len({payload_of(b"/a", b"b", b"c"), payload_of(b"/ab", b"", b"c"), payload_of(b"/a", b"", b"bc")})
        == 3
    )


def test_credentials_are_not_kept() -> None:
    name = digest_of_credentials(b"Bearer secret")
    assert name is not None
    assert "secret" not in name
    assert name != digest_of_credentials(b"Bearer other")
    assert digest_of_credentials(b" ") is None


@given(st.integers(100, 599), st.lists(st.tuples(st.binary(), st.binary())), st.binary())
def test_a_reply_comes_back_as_it_was_kept(
    status: int, headers: list[tuple[bytes, bytes]], body: bytes
) -> None:
    kept = unpack(pack(status, [(b"X-" + name, value) for name, value in headers], body))
    assert kept == Reply(status, [((b"x-" + name.lower()), value) for name, value in headers], body)


@pytest.mark.parametrize("kept", [b"", b"\xc1", b"\x90", {"a": 1}, None])
def test_what_is_no_reply_is_not_guessed_at(kept: object) -> None:
    with pytest.raises(RecordCorrupt):
        unpack(kept)
