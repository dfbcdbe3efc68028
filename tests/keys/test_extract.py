"""Extractors read the key where they are told to, and nowhere else."""

import json
from collections import defaultdict, namedtuple
from dataclasses import dataclass
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel import keys
from semel.errors import KeyInvalid, KeyMissing
from semel.keys import Envelope

Line = namedtuple("Line", ["sku", "count"])  # noqa: PYI024  # a tuple with names, as users have them


@dataclass
class Order:
    id: Any
    lines: Any = ()


def as_json(value: object) -> bytes:
    return json.dumps(value).encode()


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("order.id", "o-1"),
        ("order.lines.0.sku", "s-1"),
        ("order.lines.1.sku", "s-2"),
        ("order.lines.1.0", "s-2"),
        ("plain.items", "i-1"),
        ("plain.0", "zero"),
        (r"plain.a\.b", "dotted"),
        ("number", "7"),
        ("uuid", "0198c0de-0000-7000-8000-00000000abcd"),
        ("bytes", "evt"),
    ],
)
def test_path_goes_through_attributes_members_and_indexes(path: str, key: str) -> None:
    event = {
        "order": Order("o-1", [{"sku": "s-1"}, Line("s-2", 3)]),
        "plain": {"items": "i-1", "0": "zero", "a.b": "dotted"},
        "number": 7,
        "uuid": UUID("0198c0de-0000-7000-8000-00000000abcd"),
        "bytes": b"evt",
    }
    assert keys.path(path)(event) == key
    assert keys.extractor(path)(event) == key


@pytest.mark.parametrize(
    "path", ["order.nr", "order.id.deeper", "order.lines.5", "order.lines.-1", "order.none", "empty", "x"]
)
def test_path_that_leads_nowhere_is_missing(path: str) -> None:
    event = {"order": {"id": "o-1", "lines": [1], "none": None}, "empty": ""}
    with pytest.raises(KeyMissing):
        keys.path(path)(event)


def test_mapping_that_invents_values_is_not_asked_to() -> None:
    inventive: defaultdict[str, str] = defaultdict(lambda: "made up")
    with pytest.raises(KeyMissing):
        keys.path("id")(inventive)
    assert not inventive


@pytest.mark.parametrize("value", [True, 1.5, Decimal(1), ["a"], {"a": 1}, {1}, object(), b"\xff"])
def test_field_that_is_no_id_is_refused(value: object) -> None:
    with pytest.raises(KeyInvalid):
        keys.path("id")({"id": value})


def test_method_is_no_id() -> None:
    with pytest.raises(KeyInvalid, match="not an id"):
        keys.path("name.upper")({"name": "x"})


@pytest.mark.parametrize("path", ["", ".", "a.", ".a", "a..b", "a." * 40 + "a"])
def test_malformed_path_is_refused_when_it_is_written(path: str) -> None:
    for make in (keys.path, keys.body, keys.content, keys.extractor):
        with pytest.raises(KeyInvalid):
            make(path)


def test_own_function_is_checked() -> None:
    assert keys.extractor(lambda event: event["a"] + event["b"])({"a": "x", "b": "y"}) == "xy"
    assert keys.extractor(lambda event: 7)(None) == "7"
    with pytest.raises(KeyMissing):
        keys.extractor(lambda event: None)({})
    with pytest.raises(KeyInvalid):
        keys.extractor(lambda event: "a\n")({})
    with pytest.raises(ZeroDivisionError):
        keys.extractor(lambda event: 1 // 0)({})


def test_extractor_is_left_as_it_is() -> None:
    for own in (
        keys.path("id"),
        keys.header("x"),
        keys.body("id"),
        keys.content(),
        keys.cloudevent(),
        keys.sliding("5m"),
        keys.Identity(),
    ):
        assert keys.extractor(own) is own
        assert type(own).__name__ in repr(own)
    with pytest.raises(TypeError, match="path like"):
        keys.extractor(7)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "headers",
    [
        {"X-Event": "e-1"},
        {"x-event": b"e-1"},
        [("X-EVENT", b"e-1"), ("other", b"x")],
        [(b"x-event", b" e-1\t")],
        [("x-event", "e-1"), ("X-Event", "e-1")],
    ],
)
def test_header_is_found_in_any_case_and_type(headers: Any) -> None:
    assert keys.header("X-Event")(Envelope(headers=headers)) == "e-1"


@pytest.mark.parametrize(
    "message",
    [
        Envelope(),
        Envelope(headers={"x-event": ""}),
        Envelope(headers={"x-event": None}),
        {"x-event": "e"},
        object(),
    ],
)
def test_absent_or_empty_header_is_missing(message: Any) -> None:
    with pytest.raises(KeyMissing):
        keys.header("X-Event")(message)


def test_header_sent_twice_with_two_values_is_no_choice() -> None:
    with pytest.raises(KeyInvalid, match="more than once"):
        keys.header("id")(Envelope(headers=[("id", "a"), ("ID", "b")]))


def test_header_of_other_bytes_than_text_is_refused() -> None:
    with pytest.raises(KeyInvalid, match="UTF-8"):
        keys.header("id")(Envelope(headers={"id": b"\xff\xfe"}))


@pytest.mark.parametrize(
    "body",
    [b'{"order":{"id":"o-1","x":1.5}}', {"order": {"id": "o-1"}}, bytearray(b'{"order":{"id":"o-1"}}')],
)
def test_body_field_is_read_from_bytes_and_objects_alike(body: Any) -> None:
    assert keys.body("order.id")(Envelope(body=body)) == "o-1"
    assert keys.body("order.id")(body) == "o-1"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff",
        b"[]",
        b"null",
        b'{"order":null}',
        b'{"order":{"id":null}}',
        b'{"order":{"id":""}}',
        b"[" * 100_000,
    ],
)
def test_body_without_the_field_is_missing(body: bytes) -> None:
    with pytest.raises(KeyMissing):
        keys.body("order.id")(Envelope(body=body))


def test_body_index_is_read() -> None:
    assert keys.body("lines.1.id")(Envelope(body=b'{"lines":[{"id":1},{"id":2}]}')) == "2"


leaf = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
)
nested = st.recursive(
    leaf,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab0"), inner, max_size=3),
)


@given(nested, st.sampled_from(["a", "a.b", "b.a.a", "a.0", "0"]))
def test_reading_one_field_agrees_with_decoding_everything(value: Any, path: str) -> None:
    def attempt(event: Any) -> Any:
        try:
            return keys.body(path)(event)
        except (KeyMissing, KeyInvalid) as error:
            return type(error)

    assert attempt(as_json(value)) == attempt(value)


def test_content_ignores_what_json_ignores() -> None:
    same = [
        b'{"user":"u","amount":50.00,"lines":[{"b":2,"a":1}]}',
        b'{ "lines": [ {"a":1, "b":2.0} ], "amount": 5e1, "user": "\\u0075" }',
    ]
    assert len({keys.content()(Envelope(body=body)) for body in same}) == 1
    assert len({keys.content("amount", "user")(Envelope(body=body)) for body in same}) == 1
    assert keys.content()(Envelope(body=same[0])) != keys.content()(
        Envelope(body=same[0].replace(b"50.00", b"50.01"))
    )


def test_content_of_named_fields_ignores_the_rest() -> None:
    one, other = ({"user": "u", "amount": 5, "sent_at": at} for at in ("10:00", "10:01"))
    by_name = keys.content("user", "amount")
    assert by_name(one) == by_name(other) == keys.content("amount", "user")(one)
    assert keys.content()(one) != keys.content()(other)


def test_content_of_swapped_fields_differs() -> None:
    transfer = keys.content("payer", "payee")
    assert transfer({"payer": "a", "payee": "b"}) != transfer({"payer": "b", "payee": "a"})


def test_content_without_a_named_field_is_missing_not_merged() -> None:
    with pytest.raises(KeyMissing):
        keys.content("user", "amount")({"user": "u"})
    with pytest.raises(KeyMissing):
        keys.content("user")(Envelope(body=b"not json"))
    with pytest.raises(KeyMissing):
        keys.content()(Envelope(body=b""))
    assert keys.content("user", "coupon")({"user": "u", "coupon": None})


def test_content_of_other_bytes_than_json_is_hashed_as_it_is() -> None:
    whole = keys.content()
    made = [whole(Envelope(body=body)) for body in (b"\xff\x00", b"\xff\x01", b"plain", b'"cGxhaW4="')]
    assert len(set(made)) == 4


def test_content_reads_attributes_of_objects() -> None:
    assert keys.content("order.id")({"order": Order("o-1")}) == keys.content("order.id")(
        {"order": {"id": "o-1"}}
    )
    with pytest.raises(TypeError, match="fields that identify"):
        keys.content()(Order("o-1"))


def test_content_in_floats_is_refused_unless_allowed() -> None:
    with pytest.raises(TypeError, match="Decimal"):
        keys.content("amount")({"amount": 0.5})
    assert keys.content("amount", allow_floats=True)({"amount": 0.5}) == keys.content("amount")(
        b'{"amount":0.50}'
    )


def test_field_named_twice_is_a_mistake() -> None:
    with pytest.raises(KeyInvalid, match="twice"):
        keys.content("user", "user")
