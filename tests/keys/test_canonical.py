"""The canonical text is that of RFC 8785, whatever way it is computed, and equal values get equal texts."""

import json
import struct
import unicodedata
from collections import OrderedDict
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from types import MappingProxyType
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
import rfc8785
from hypothesis import example, given
from hypothesis import strategies as st

from semel.errors import KeyInvalid
from semel.keys import canonical
from semel.keys.canonical import DEPTH_MAX, DIGITS_MAX, dumps

SAFE = 2**53 - 1

# The test vectors published beside RFC 8785 (json-canonicalization, Apache-2.0): input, canonical output.
VECTORS = {
    "arrays": (
        r"""[ 56, { "d": true, "10": null, "1": [ ] } ]""",
        '[56,{"1":[],"10":null,"d":true}]',
    ),
    "french": (
        r"""{ "peach": "This sorting order", "p\u00e9ch\u00e9": "is wrong according to French",
              "p\u00eache": "but canonicalization MUST", "sin": "ingnore locale" }""",
        (
            '{"peach":"This sorting order","p\u00e9ch\u00e9":"is wrong according to French",'
            '"p\u00eache":"but canonicalization MUST","sin":"ingnore locale"}'
        ),
    ),
    "structures": (
        r"""{ "1": {"f": {"f": "hi","F": 5} ,"\n": 56.0}, "10": { }, "": "empty", "a": { },
              "111": [ {"e": "yes","E": "no" } ], "A": { } }""",
        r'{"":"empty","1":{"\n":56,"f":{"F":5,"f":"hi"}},"10":{},"111":[{"E":"no","e":"yes"}],"A":{},"a":{}}',
    ),
    "unicode": (r"""{ "Unnormalized Unicode":"A\u030a" }""", '{"Unnormalized Unicode":"A\u030a"}'),
    "values": (
        r"""{ "numbers": [333333333.33333329, 1E30, 4.50, 2e-3, 0.000000000000000000000000001],
              "string": "\u20ac$\u000F\u000aA'\u0042\u0022\u005c\\\"\/", "literals": [null, true, false] }""",
        (
            '{"literals":[null,true,false],"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27],'
            '"string":"\u20ac$\\u000f\\nA\'B\\"\\\\\\\\\\"/"}'
        ),
    ),
    "weird": (
        r"""{ "\u20ac": "Euro Sign", "\r": "Carriage Return", "\u000a": "Newline", "1": "One",
              "\u0080": "Control\u007f", "\ud83d\ude02": "Smiley",
              "\u00f6": "Latin Small Letter O With Diaeresis", "\ufb33": "Hebrew Letter Dalet With Dagesh",
              "</script>": "Browser Challenge" }""",
        (
            '{"\\n":"Newline","\\r":"Carriage Return","1":"One","</script>":"Browser Challenge",'
            '"\u0080":"Control\u007f","\u00f6":"Latin Small Letter O With Diaeresis","\u20ac":"Euro Sign",'
            '"\U0001f602":"Smiley","\ufb33":"Hebrew Letter Dalet With Dagesh"}'
        ),
    ),
    "order of members, section 3.2.3": (
        r"""{ "\u20ac": "Euro Sign", "\r": "Carriage Return", "\ufb33": "Hebrew Letter Dalet With Dagesh", "1": "One",
              "\ud83d\ude00": "Emoji: Grinning Face", "\u0080": "Control",
              "\u00f6": "Latin Small Letter O With Diaeresis" }""",
        (
            '{"\\r":"Carriage Return","1":"One","\u0080":"Control","\u00f6":"Latin Small Letter O With Diaeresis",'
            '"\u20ac":"Euro Sign","\U0001f600":"Emoji: Grinning Face","\ufb33":"Hebrew Letter Dalet With Dagesh"}'
        ),
    ),
}

# RFC 8785, appendix B: the bits of a double and its text.
NUMBERS = [
    ("0000000000000000", "0"),
    ("8000000000000000", "0"),
    ("0000000000000001", "5e-324"),
    ("8000000000000001", "-5e-324"),
    ("7fefffffffffffff", "1.7976931348623157e+308"),
    ("ffefffffffffffff", "-1.7976931348623157e+308"),
    ("4340000000000000", "9007199254740992"),
    ("c340000000000000", "-9007199254740992"),
    ("4430000000000000", "295147905179352830000"),
    ("44b52d02c7e14af5", "9.999999999999997e+22"),
    ("44b52d02c7e14af6", "1e+23"),
    ("44b52d02c7e14af7", "1.0000000000000001e+23"),
    ("444b1ae4d6e2ef4e", "999999999999999700000"),
    ("444b1ae4d6e2ef4f", "999999999999999900000"),
    ("444b1ae4d6e2ef50", "1e+21"),
    ("3eb0c6f7a0b5ed8c", "9.999999999999997e-7"),
    ("3eb0c6f7a0b5ed8d", "0.000001"),
    ("41b3de4355555553", "333333333.3333332"),
    ("41b3de4355555554", "333333333.33333325"),
    ("41b3de4355555555", "333333333.3333333"),
    ("41b3de4355555556", "333333333.3333334"),
    ("41b3de4355555557", "333333333.33333343"),
    ("becbf647612f3696", "-0.0000033333333333333333"),
    ("43143ff3c1cb0959", "1424953923781206.2"),
]

safe_ints = st.integers(-SAFE, SAFE)
floats = st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


def json_values(*scalars: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    leaves = st.none() | st.booleans() | texts | st.one_of(*scalars)
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
        max_leaves=12,
    )


def to_the_letter(value: object) -> bytes:
    return dumps(value, allow_floats=True, nfc=False)


def written_slowly(value: object) -> bytes:
    out: list[bytes] = []
    canonical._CanonicalWriter(out, allow_floats=True, nfc=False).write(value, DEPTH_MAX)
    return b"".join(out)


@pytest.mark.parametrize("name", VECTORS)
def test_published_vectors_come_out_byte_for_byte(name: str) -> None:
    given_text, expected = VECTORS[name]
    value = json.loads(given_text)
    assert to_the_letter(value) == expected.encode()
    assert written_slowly(value) == expected.encode()
    assert rfc8785.dumps(value) == expected.encode()


@pytest.mark.parametrize(("bits", "expected"), NUMBERS)
def test_number_table_of_the_rfc_comes_out_as_printed(bits: str, expected: str) -> None:
    (number,) = struct.unpack(">d", bytes.fromhex(bits))
    assert to_the_letter(number) == expected.encode()


@pytest.mark.parametrize(
    "number",
    [float("nan"), float("inf"), float("-inf"), Decimal("NaN"), Decimal("sNaN"), Decimal("-Infinity")],
)
def test_what_json_cannot_carry_is_refused_even_where_floats_are_allowed(number: object) -> None:
    with pytest.raises(KeyInvalid, match="not a JSON number"):
        dumps(number, allow_floats=True)


@given(json_values(safe_ints, floats))
@example({"\U0001f602": 1, "\ufb33": 2, "\ue000": 3, "\ud7ff": 4})
@example({"\x00\x1f\x7f\x80\u2028": '\x08\x0c"\\/'})
def test_any_json_value_is_written_as_the_reference_writes_it(value: Any) -> None:
    expected = rfc8785.dumps(value)
    assert to_the_letter(value) == expected
    assert written_slowly(value) == expected


@given(json_values(safe_ints))
def test_the_fast_way_never_differs_from_the_slow_one(value: object) -> None:
    assert to_the_letter(value) == written_slowly(value)


@given(st.floats(allow_nan=False, allow_infinity=False, width=64))
def test_every_double_reads_back_as_itself(number: float) -> None:
    assert float(to_the_letter(number)) == number


def test_floats_are_refused_and_the_error_says_why() -> None:
    for value in (0.3, [0.3], {"amount": 0.3}):
        with pytest.raises(TypeError, match=r"0\.3 .*one payment gets two keys.*Decimal"):
            dumps(value)


@pytest.mark.parametrize(
    "same", ["50", "50.0", "50.00", "5E+1", "0.5E+2", "050", "50.000000000000000000000000000000"]
)
def test_same_number_written_two_ways_is_one_text(same: str) -> None:
    assert dumps(Decimal(same)) == dumps(50) == dumps(50.0, allow_floats=True) == b"50"


def test_zero_has_one_text_whatever_its_sign_and_places() -> None:
    assert {dumps(Decimal(z)) for z in ("0", "-0", "0.00", "0E+9", "-0E-9")} == {b"0"}
    assert dumps(-0.0, allow_floats=True) == b"0"


@given(st.decimals(allow_nan=False, allow_infinity=False), st.decimals(allow_nan=False, allow_infinity=False))
def test_decimals_have_equal_texts_iff_they_are_equal(one: Decimal, other: Decimal) -> None:
    assert (dumps(one) == dumps(other)) == (one == other)
    assert Decimal(dumps(one).decode()) == one


@given(st.integers(), st.integers(0, 30))
@example(2**53, 0)
@example(10**21, 0)
@example(-(10**21) - 1, 0)
@example(123456789012345678, 4)
def test_large_integers_keep_every_digit(mantissa: int, zeros: int) -> None:
    number = mantissa * 10**zeros
    assert dumps(number) == dumps(Decimal(number))
    assert Decimal(dumps(number).decode()) == number


def test_integer_too_long_to_mean_anything_is_refused() -> None:
    assert dumps(10**DIGITS_MAX) == b"1e+1000"
    for number in (7 ** (2 * DIGITS_MAX), 1 << 100_000, Decimal("1" * (DIGITS_MAX + 1))):
        with pytest.raises(KeyInvalid, match="digits is refused"):
            dumps(number)


def test_true_is_not_one() -> None:
    assert dumps([True, 1, False, 0]) == b"[true,1,false,0]"


def test_one_instant_in_two_time_zones_is_one_text() -> None:
    noon = datetime(2026, 11, 15, 12, 0, tzinfo=UTC)
    same = [noon, noon.astimezone(ZoneInfo("Europe/Berlin")), noon.astimezone(timezone(timedelta(hours=-8)))]
    assert {dumps(moment) for moment in same} == {b'"2026-11-15T12:00:00Z"'}
    assert dumps(noon + timedelta(microseconds=5)) == b'"2026-11-15T12:00:00.000005Z"'


def test_the_hour_that_comes_twice_in_autumn_is_two_instants() -> None:
    berlin = ZoneInfo("Europe/Berlin")
    first = datetime(2026, 10, 25, 2, 30, tzinfo=berlin)
    assert dumps(first) == b'"2026-10-25T00:30:00Z"'
    assert dumps(first.replace(fold=1)) == b'"2026-10-25T01:30:00Z"'


def test_datetime_without_zone_is_refused() -> None:
    with pytest.raises(KeyInvalid, match="no time zone"):
        dumps(datetime(2026, 11, 15, 12, 0))  # noqa: DTZ001
    with pytest.raises(KeyInvalid, match="years 1 to 9999"):
        dumps(datetime.min.replace(tzinfo=timezone(timedelta(hours=1))))


def test_dates_uuids_and_bytes_have_one_text() -> None:
    assert dumps(date(2026, 11, 15)) == b'"2026-11-15"'
    text = "0198c0de-0000-7000-8000-00000000abcd"
    assert dumps(UUID(text)) == dumps(UUID(text.upper())) == dumps(text)
    assert (
        dumps(b"\x00\xff?") == dumps(bytearray(b"\x00\xff?")) == dumps(memoryview(b"\x00\xff?")) == b'"AP8/"'
    )


@given(st.text(st.characters(exclude_categories=["Cs"])))
@example("A\u030a")
@example("\ufb33")
def test_unicode_forms_of_one_text_are_one(text: str) -> None:
    forms = {dumps(unicodedata.normalize(form, text)) for form in ("NFC", "NFD")}
    assert forms == {dumps(text)}
    assert len({dumps({unicodedata.normalize(form, text): 1}) for form in ("NFC", "NFD")}) == 1


def test_two_member_names_that_become_one_are_refused() -> None:
    with pytest.raises(KeyInvalid, match="NFC"):
        dumps({"\u00e9": 1, "e\u0301": 2})
    assert to_the_letter({"\u00e9": 1, "e\u0301": 2}) == '{"e\u0301":2,"\u00e9":1}'.encode()


class Plan(Enum):
    FREE = "free"


class Level(IntEnum):
    HIGH = 3


class Colour(StrEnum):
    RED = "red"


class Size(str, Enum):  # noqa: UP042  # the older way, whose str() names the class
    BIG = "big"


def test_equal_values_of_other_types_have_equal_texts() -> None:
    assert dumps(Level.HIGH) == dumps(3)
    assert dumps(Colour.RED) == dumps("red")
    assert dumps({Size.BIG: Size.BIG}) == dumps({"big": "big"})
    assert dumps((1, [2])) == dumps([1, (2,)])
    assert dumps(MappingProxyType({"b": 1, "a": 2})) == dumps(OrderedDict(a=2, b=1)) == b'{"a":2,"b":1}'


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        (Plan.FREE, r"\.value or \.name"),
        ({1, 2}, "sorted"),
        (frozenset(), "sorted"),
        (object(), "fields that identify"),
        (time(12), "fields that identify"),
        (timedelta(1), "fields that identify"),
        (1j, "fields that identify"),
        (range(2), "fields that identify"),
        ({1: "one"}, "JSON knows str only"),
        ({None: "none"}, "JSON knows str only"),
    ],
)
def test_type_without_a_settled_form_is_refused_with_advice(value: object, advice: str) -> None:
    with pytest.raises(TypeError, match=advice):
        dumps(value)
    with pytest.raises(TypeError, match=advice):
        dumps({"deep": [value]})


@pytest.mark.parametrize(
    "value", ["\ud800", ["\udfff"], {"\ud83d": 1}, {"\ud83d": 1.5}, {"a": [1.5, "\ud800"]}]
)
def test_half_a_surrogate_pair_is_refused(value: object) -> None:
    with pytest.raises(KeyInvalid, match="surrogate"):
        dumps(value, allow_floats=True)


def test_endless_value_ends_in_an_error() -> None:
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(KeyInvalid, match="nested deeper"):
        dumps(endless)
    deepest: object = 1
    for _ in range(DEPTH_MAX):
        deepest = [deepest]
    assert dumps(deepest) == written_slowly(deepest)
    with pytest.raises(KeyInvalid, match="nested deeper"):
        dumps({"a": deepest})
