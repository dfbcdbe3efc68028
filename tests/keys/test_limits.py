"""Keys and consumers outside the limits are refused before a store sees them, and say what to do."""

from collections.abc import Callable
from enum import StrEnum
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from semel import keys
from semel.errors import KeyInvalid, UsageError
from semel.keys.limits import check_all


class Topic(StrEnum):
    ORDERS = "orders"


@pytest.mark.parametrize(
    "key", ["a", "evt_1", "a" * 512, "é" * 256, "billing:0198", "with space", "emoji 😂", "\u0085", "~"]
)
def test_key_within_the_limits_comes_back_as_it_went_in(key: str) -> None:
    assert keys.check(key) == key


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("", "0 bytes"),
        ("a" * 513, "513 bytes"),
        ("é" * 257, "514 bytes"),
        ("😂" * 129, "516 bytes"),
        ("a\nb", "control character"),
        ("a\x00", "control character"),
        ("\x7f", "control character"),
        ("é\x1f", "control character"),
        ("\ud800", "surrogate"),
        (None, "not NoneType"),
        (7, "not int"),
        (b"evt_1", "not bytes"),
        (["evt_1"], "not list"),
    ],
)
def test_key_outside_the_limits_is_refused_with_the_reason(key: Any, reason: str) -> None:
    with pytest.raises(KeyInvalid, match=reason) as caught:
        keys.check(key)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, UsageError)
    assert len(str(caught.value)) < 300, "a message must not carry half a kilobyte of key into the logs"


def is_c0(character: str) -> bool:
    return ord(character) < 32 or ord(character) == 127


def breaks_lines(character: str) -> bool:
    """What would break a line of a log: names have none of it."""
    return is_c0(character) or 128 <= ord(character) < 160 or character in "\u2028\u2029"


def allowed(text: str, bytes_max: int, refused: Callable[[str], bool]) -> bool:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        return False
    return 1 <= size <= bytes_max and not any(map(refused, text))


any_text = st.text(st.characters(exclude_categories=[]), max_size=600)


@given(any_text)
@example("a" * 512)
@example("a" * 513)
@example("\u2028")
@example("\x85")
def test_fast_and_slow_way_draw_the_same_line(text: str) -> None:
    for check, bytes_max, refused in ((keys.check, 512, is_c0), (keys.check_consumer, 128, breaks_lines)):
        if allowed(text, bytes_max, refused):
            assert check(text) == text
        else:
            with pytest.raises(KeyInvalid):
                check(text)


def test_text_of_an_enum_is_taken_not_its_name() -> None:
    assert type(keys.check(Topic.ORDERS)) is str
    assert keys.check(Topic.ORDERS) == "orders"


def test_keys_are_never_folded_or_trimmed() -> None:
    assert keys.check(" A ") == " A "
    assert keys.check("e\u0301") == "e\u0301"


def test_consumer_has_its_own_shorter_limit() -> None:
    assert keys.check_consumer("b" * 128) == "b" * 128
    with pytest.raises(KeyInvalid, match=r"consumer .* has 129 bytes"):
        keys.check_consumer("b" * 129)
    with pytest.raises(KeyInvalid, match="consumer"):
        keys.check_consumer("")


@given(
    st.lists(
        any_text | st.sampled_from(["evt_1", "a\\b", 'a"b', "", "\x7f", "é" * 256, "a" * 513]), max_size=5
    )
)
@example([])
@example(["\ud800"])
@example(["a", 7])
@example(["a", "\x7f"])
@example(["a", "b\n"])
@example(["a", "é" * 257])
@example([Topic.ORDERS])
def test_many_keys_are_refused_when_one_of_them_would_be(some: list[Any]) -> None:
    assert refusal(check_all, some) == refusal(lambda each: [keys.check(key) for key in each], some)


def refusal(check: Callable[[list[Any]], object], some: list[Any]) -> str | None:
    try:
        check(some)
    except KeyInvalid as error:
        return str(error)
    return None
