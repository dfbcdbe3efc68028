"""What a duplicate gets: the annotated type, plain data without an annotation, or the reason why there is nothing."""

import dataclasses
import enum
import warnings
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import attrs
import msgspec
import pydantic
import pytest

import semel
from semel import Done
from semel.observe.formatting import readable, value_text
from tests.client.clients import Either, Place, in_thread

pytestmark = pytest.mark.anyio

WHEN = datetime(2026, 1, 2, tzinfo=UTC)


@dataclasses.dataclass
class Line:
    cents: int


@dataclasses.dataclass
class Data:
    number: int
    price: Decimal
    when: datetime
    lines: tuple[Line, ...] = ()


class Struct(msgspec.Struct):
    number: int
    price: Decimal
    when: datetime
    lines: tuple[Line, ...] = ()


@attrs.define
class Attrs:
    number: int
    price: Decimal
    when: datetime
    lines: tuple[Line, ...] = ()


class Model(pydantic.BaseModel):
    number: int
    price: Decimal
    when: datetime
    lines: tuple[Line, ...] = ()


KINDS = [Data, Struct, Attrs, Model]


def make(kind: Any) -> Any:
    return kind(number=1, price=Decimal("1.20"), when=WHEN, lines=(Line(5),))


PLAIN = {"number": 1, "price": Decimal("1.20"), "when": WHEN, "lines": ({"cents": 5},)}


@pytest.mark.parametrize("kind", KINDS)
async def test_without_an_annotation_plain_data_comes_back(client: Either, place: Place, kind: Any) -> None:
    def handler() -> Any:
        return make(kind)

    assert await client.run("k", handler) == Done(make(kind))
    assert await client.run("k", handler) == Done(PLAIN, replayed=True)
    record = place.record("k")
    assert record is not None
    assert readable(record.value)[1] == "json"
    assert "1.20" in value_text(record.value)


@pytest.mark.parametrize("kind", KINDS)
async def test_with_an_annotation_the_type_comes_back(client: Either, kind: Any) -> None:
    def handler() -> Any:
        return make(kind)

    def annotated() -> kind:
        return make(kind)

    for _ in range(2):
        assert (await client.run("annotated", annotated)).value == make(kind)
    await client.run("later", handler)
    assert await client.run("later", annotated) == Done(make(kind), replayed=True)


async def test_objects_inside_others(client: Either) -> None:
    class Colour(enum.Enum):
        RED = "red"

    def handler() -> Any:
        return {"lines": [Line(1), Line(2)], "colour": Colour.RED}

    await client.run("k", handler)
    replayed = await client.run("k", handler)
    assert replayed == Done({"lines": [{"cents": 1}, {"cents": 2}], "colour": "red"}, replayed=True)


class Response:
    """As a web framework has it: nothing that could be kept."""


def respond(order: str) -> Any:
    return Response()


async def test_what_cannot_be_kept_warns_once_and_the_later_error_says_why(client: Either) -> None:
    respond_once = client.inner.guard(key="order")(client.handler(respond))

    async def call(order: str) -> Any:
        return await (in_thread(respond_once, order) if client.sync else respond_once(order))

    with pytest.warns(RuntimeWarning) as warned:
        assert [type(await call(order)) for order in ("a", "b")] == [Response, Response]
    (warning,) = warned
    assert "respond is not kept" in str(warning.message)
    assert "return plain data" in str(warning.message)
    with pytest.raises(semel.errors.ValueNotKept, match="Response cannot be stored; return plain data"):
        await call("a")


async def test_the_reason_is_in_the_record(place: Place) -> None:
    client = place.open()
    with pytest.warns(RuntimeWarning):
        await client.run_many([semel.Delivery(key="a", body="a")], respond)
    (outcome,) = await client.run_many([semel.Delivery(key="a", body="a")], respond)
    assert "return plain data" in outcome.reason
    record = place.record("a")
    assert record is not None
    assert value_text(record.value).startswith("(not kept: a ")
    assert readable(record.value) == (None, "not_kept")


async def test_who_keeps_no_values_is_not_warned(place: Place) -> None:
    client = place.open(policy=semel.Policy(keep_value=False))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert await client.run("a", lambda: 1) == Done(1, kept=False)
        assert await client.run("a", lambda: 1) == Done(None, replayed=True, kept=False)


def test_a_journaled_payload_comes_back_as_it_went_in_or_is_refused(tmp_path: Any) -> None:
    with semel.open(f"sqlite:///{tmp_path}/events.db", consumer="billing") as once:
        with pytest.raises(semel.errors.ValueNotEncodable):
            once.claim("a", journal=Line(1))
        assert once.records.lookup("a") is None
