"""Values come back as they went in, or are refused; nothing that is read is ever run."""

import dataclasses
import enum
import math
import pickle
from collections import OrderedDict, namedtuple
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.msgpack import Ext

from semel.codec import (
    DEPTH_MAX,
    ERROR_CHARS_MAX,
    decode,
    decode_error,
    encode,
    encode_error,
    encode_reason,
    reason_in,
)
from semel.errors import HandlerFailed, RecordCorrupt, ValueNotEncodable, ValueNotKept, ValueTooLarge

ZONES = [
    None,
    UTC,
    timezone(timedelta(hours=-3, minutes=-30)),
    timezone(timedelta(seconds=1)),
    ZoneInfo("Europe/Berlin"),
]

hashable = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=["Cs"])),
    st.binary(),
    st.decimals(allow_nan=False),
    st.datetimes(timezones=st.sampled_from(ZONES)),
    st.dates(),
    st.times(timezones=st.sampled_from(ZONES[:4])),
    st.timedeltas(),
    st.uuids(),
    st.complex_numbers(allow_nan=False),
)
keys = st.one_of(hashable, st.tuples(hashable, hashable), st.frozensets(hashable, max_size=3))
values = st.recursive(
    st.one_of(hashable, st.binary().map(bytearray)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.sets(keys, max_size=4),
        st.frozensets(keys, max_size=4),
        st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4),
    ),
    max_leaves=12,
)


def shape(value: Any) -> Any:
    """A value with its types, so that 1, True and 1.0 differ, and a list is no tuple."""
    kind = type(value)
    if kind in (list, tuple):
        return (kind, [shape(part) for part in value])
    if kind in (set, frozenset):
        return (kind, sorted(repr(shape(part)) for part in value))
    if kind is dict:
        return (kind, [(shape(name), shape(part)) for name, part in value.items()])
    if kind is datetime:
        return (kind, value.replace(tzinfo=None), value.fold, value.tzinfo, value.utcoffset())
    if kind is time:
        return (kind, value, value.fold, value.tzinfo)
    return (kind, repr(value))


@given(values)
def test_values_come_back_as_they_went_in(value: Any) -> None:
    assert shape(decode(encode(value))) == shape(value)


@pytest.mark.parametrize(
    "value",
    [None, 0, False, True, "", [], {}, (), set(), frozenset(), b"", 0.0, -0.0, 1.0, 2**63, -(2**63) - 1, 2**63 - 1,
     10**400, float("inf"), [float("-inf")], Decimal("50.00"), Decimal("-0"), Decimal("Infinity"), [None], (None,),
     {"a": (1, [2, {3}])}, {1: "one", "1": "text"}, {None: 1}, {(1, 2): {b"x": UUID(int=7)}}, bytearray(b"\0\xff"),
     datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Berlin")), date.max, date.min, timedelta.min,
     time(23, 59, 59, 999999, fold=1), complex(1, -0.0), "\u2028\0\U0001f511", [[[[[[[[]]]]]]]]],
)  # fmt: skip
def test_what_others_fold_into_one_stays_apart(value: Any) -> None:
    assert shape(decode(encode(value))) == shape(value)


@pytest.mark.parametrize("number", [float("nan"), Decimal("NaN"), Decimal("sNaN"), complex(float("nan"), 1)])
def test_not_a_number_comes_back_as_one(number: Any) -> None:
    back = decode(encode([number]))[0]
    assert type(back) is type(number)
    assert repr(back) == repr(number)
    assert math.isnan(decode(encode(float("nan"))))


def test_the_plain_ones_are_readable() -> None:
    assert encode(None) == b"jnull"
    assert encode({"id": 1}) == b'j{"id":1}'
    assert encode(b"\0raw") == b"r\0raw"
    assert encode((1,))[:1] == b"m"


# --- what is refused ----------------------------------------------------------------------------


class Plain:
    pass


class Text(str):
    __slots__ = ()


class Colour(enum.Enum):
    RED = "red"


class Zone(tzinfo):
    def utcoffset(self, moment: Any) -> timedelta:
        return timedelta(0)

    def dst(self, moment: Any) -> None:
        return None

    def tzname(self, moment: Any) -> str:
        return "here"


Pair = namedtuple("Pair", "one two")  # noqa: PYI024 - the plain kind is the point


@pytest.mark.parametrize(
    "value",
    [Plain(), [Plain()], {"a": Plain()}, {Plain: 1}, Text("x"), [Text("x")], Colour.RED, Pair(1, 2), OrderedDict(a=1),
     object, len, iter([]), range(3), ValueError("x"), datetime(2026, 1, 1, tzinfo=Zone()), time(1, tzinfo=Zone()),
     "\ud800", {"\ud800": 1}, ["\udfff"], memoryview(b"x")],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_would_not_come_back_is_refused(value: Any) -> None:
    with pytest.raises(ValueNotEncodable):
        encode(value, as_plain_data=False)


@pytest.mark.parametrize(
    ("value", "plain"),
    [(Colour.RED, "red"), (Pair(1, 2), (1, 2)), (OrderedDict(a=1), {"a": 1})],
    ids=lambda value: type(value).__name__,
)
def test_an_object_without_an_annotation_is_its_plain_data(value: Any, plain: Any) -> None:
    back = decode(encode(value))
    assert (back, type(back)) == (plain, type(plain))


@pytest.mark.parametrize(
    "value", [Plain(), [Plain()], object, len, range(3), ValueError("x"), memoryview(b"x")]
)
def test_what_has_no_plain_data_is_refused(value: Any) -> None:
    with pytest.raises(ValueNotEncodable):
        encode(value)


def test_what_was_not_kept_says_why() -> None:
    stored = encode_reason(ValueNotEncodable("a Response cannot be stored"))
    assert reason_in(stored) == "a Response cannot be stored"
    assert (reason_in(None), reason_in(encode("x"))) == ("", "")
    with pytest.raises(ValueNotKept, match="a Response cannot be stored"):
        decode(stored)


def test_cycles_are_refused() -> None:
    one: list[Any] = []
    one.append(one)
    other: dict[str, Any] = {}
    other["self"] = (other,)
    for value in (one, other):
        with pytest.raises(ValueNotEncodable):
            encode(value)


@pytest.mark.parametrize("wrap", [lambda inner: [inner], lambda inner: (inner,), lambda inner: {"a": inner}])
def test_depth_has_an_end(wrap: Any) -> None:
    value: Any = 1
    for _ in range(DEPTH_MAX):
        value = wrap(value)
    assert shape(decode(encode(value))) == shape(value)
    for _ in range(3):
        value = wrap(value)
    with pytest.raises(ValueNotEncodable):
        encode(value)


def test_a_value_has_a_largest_size() -> None:
    assert len(encode(b"x" * 9, bytes_max=10)) == 10
    with pytest.raises(ValueTooLarge, match="11 bytes"):
        encode(b"x" * 10, bytes_max=10)


# --- what is read -------------------------------------------------------------------------------


def packed(code: int, *parts: Any) -> bytes:
    return b"m" + msgspec.msgpack.encode(Ext(code, msgspec.msgpack.encode(parts)))


@pytest.mark.parametrize(
    "stored",
    [b"", b"?", b"p" + pickle.dumps(1), pickle.dumps({"a": 1}), b"j", b"j{", b"m", b"m\xc1", b"j\xff", b"o{",
     packed(99, 1), packed(4, "abc"), packed(5, "2026-01-01", 0, "No/Where"), packed(5, "2026-01-01", 7, None),
     packed(8, 10**12, 0, 0), packed(9, b"short"), packed(10, 5), packed(6, 5), packed(2, [1]), packed(3, {}),
     b"m" + b"\x91" * 5000, b"m" + msgspec.msgpack.encode(Ext(1, b"\x05"))],
)  # fmt: skip
def test_damage_is_an_error_and_never_a_guess(stored: bytes) -> None:
    with pytest.raises(RecordCorrupt):
        decode(stored)


@given(st.binary(max_size=40))
def test_any_bytes_decode_or_are_corrupt(stored: bytes) -> None:
    for codec in (b"", b"j", b"m", b"o"):
        try:
            decode(codec + stored, dict[str, int])
        except (RecordCorrupt, ValueNotKept):
            continue


def test_a_pickle_is_not_run() -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return (pytest.fail, ("a stored value was run",))

    with pytest.raises(RecordCorrupt, match="unknown codec"):
        decode(pickle.dumps(Bomb()))


# --- objects by annotation ----------------------------------------------------------------------


@dataclasses.dataclass
class Receipt:
    id: int
    lines: list[str]
    paid: Decimal


@dataclasses.dataclass
class Anything:
    what: Any


class Point(msgspec.Struct):
    x: int
    when: datetime


class Order(pydantic.BaseModel):
    id: UUID
    amount: Decimal


class ByIdentity:
    """A class without an equality of its own, and nothing that can be stored."""


@dataclasses.dataclass
class Elsewhere:
    what: "NotImportedHere"  # type: ignore[name-defined]  # noqa: F821


@dataclasses.dataclass
class Touchy:
    what: int

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("do not compare me")

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("value", "returns"),
    [
        (Receipt(1, ["a"], Decimal("1.50")), Receipt),
        (Point(1, datetime(2026, 1, 1, tzinfo=UTC)), Point),
        (Order(id=UUID(int=1), amount=Decimal("2.50")), Order),
        (Colour.RED, Colour),
        (Receipt(1, [], Decimal(1)), Receipt | None),
        ([Receipt(1, [], Decimal(1))], list[Receipt]),
        ({"a": Point(1, datetime(2026, 1, 1, tzinfo=UTC))}, dict[str, Point]),
    ],
)
def test_objects_come_back_by_their_annotation(value: Any, returns: Any) -> None:
    encoded = encode(value, returns)
    assert encoded[:1] == b"o"
    back = decode(encoded, returns)
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize(
    ("value", "returns"),
    [
        (Receipt(1, [], Decimal(1)), Point),
        (Receipt(1, [], Decimal(1)), dict),
        (Receipt(1, [], Decimal(1)), Any),
        (Receipt(1, [], Decimal(1)), "Receipt"),
        (Anything((1, 2)), Anything),
        (Anything(float("nan")), Anything),
        (ByIdentity(), ByIdentity),
        (Elsewhere(1), Elsewhere),
        (Touchy(1), Touchy),
    ],
    ids=lambda value: str(value)[:30],
)
def test_an_object_that_would_come_back_otherwise_is_refused(value: Any, returns: Any) -> None:
    with pytest.raises(ValueNotEncodable):
        encode(value, returns)


def test_an_object_without_its_annotation_is_its_json_and_with_another_corrupt() -> None:
    encoded = encode(Receipt(1, [], Decimal(1)), Receipt)
    assert decode(encoded) == msgspec.json.decode(msgspec.json.encode(Receipt(1, [], Decimal(1))))
    with pytest.raises(RecordCorrupt):
        decode(encoded, Point)


# --- errors -------------------------------------------------------------------------------------


def test_a_failure_is_kept_as_type_and_message() -> None:
    error = decode_error(encode_error(ValueError("no such card")))
    assert isinstance(error, HandlerFailed)
    assert (error.kind, error.message) == ("builtins.ValueError", "no such card")


def test_a_long_or_odd_message_is_kept_as_far_as_it_goes() -> None:
    assert len(decode_error(encode_error(ValueError("x" * 10_000))).message) == ERROR_CHARS_MAX
    assert decode_error(encode_error(ValueError("\ud800"))).message == "?"


def test_an_error_whose_text_is_broken_is_still_kept() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    assert decode_error(encode_error(Mute())).kind.endswith("Mute")


def test_a_failure_without_a_value_is_still_a_failure() -> None:
    assert decode_error(None).kind == "unknown"
    assert decode_error(b"xit was too large").message == "the error was not kept: it was too large"


@pytest.mark.parametrize(
    "stored",
    [b"j1", b"j[]", b'j["a"]', b'j["a",1]', b'j["a","b","c"]', b'j{"a":"b"}', b"rab", b"j[", b'j["\xff","b"]',
     b"m" + msgspec.msgpack.encode(["a", "b"]), b"j" + b"[" * 100_000],
)  # fmt: skip
def test_a_stored_error_of_another_shape_is_corrupt_and_nothing_else(stored: bytes) -> None:
    with pytest.raises(RecordCorrupt):
        decode_error(stored)
