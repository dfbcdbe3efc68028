"""What functions are annotated with is read alike on every Python, also where a name is not defined."""

import functools
import sys
import weakref
from typing import Annotated, Any, ClassVar

import msgspec
import pytest

import semel
from semel.brokers.routes import reader
from semel.brokers.source import Arrival
from semel.runtime.handlers import parameter_type, return_type, signature_of


class Order(msgspec.Struct):
    total: int


def defined(source: str) -> Any:
    """The function `f` of this source; on Python 3.14 its annotations are evaluated when they are read."""
    lazy = "" if sys.version_info >= (3, 14) else "from __future__ import annotations\n"
    names: dict[str, Any] = {"Order": Order, "Annotated": Annotated, "Any": Any}
    exec(lazy + source, names)
    return names["f"]


@pytest.mark.parametrize(
    ("source", "returns", "takes"),
    [
        ("def f(a): ...", None, Any),
        ("def f(a: Order) -> Order: ...", Order, Order),
        ("def f(a: Any) -> Any: ...", None, Any),
        ("def f(a: 'Order') -> 'Order': ...", Order, Order),
        ("def f(a: Missing) -> Order: ...", Order, Any),
        ("def f(a: Order) -> Missing: ...", None, Order),
        ("def f(a: Order) -> list[Missing]: ...", None, Order),
        ("def f(a: list[Order]) -> list['Order']: ...", list[Order], list[Order]),
        ("def f(a: Annotated[Order, 1]) -> Annotated[Order, 1]: ...", Annotated[Order, 1], Order),
        ("def f(a: Order.missing) -> Order: ...", Order, Any),
    ],
)
def test_an_annotation_is_read_whatever_the_others_name(source: str, returns: Any, takes: Any) -> None:
    function = defined(source)
    assert (return_type(function), parameter_type(function, "a")) == (returns, takes)
    assert list(signature_of(function).parameters) == ["a"]


def test_a_wrapper_has_the_annotations_of_what_it_wraps() -> None:
    function = defined("def f(a: Order) -> Order: ...")

    class Wrapper:
        kept: ClassVar[int] = 0

        def __init__(self) -> None:
            functools.update_wrapper(self, function)

        def __call__(self, a: Any) -> Any: ...

    assert (return_type(Wrapper()), parameter_type(Wrapper(), "a")) == (Order, Order)


def test_what_has_no_annotations_names_no_type() -> None:
    class Callable:
        def __call__(self, a: int) -> int:
            return a

    for function in (Callable(), functools.partial(int, 1), int, print):
        assert return_type(function) is None


def test_a_guarded_function_may_be_annotated_with_what_type_checkers_alone_know() -> None:
    function = defined("def f(a: Missing, key: str) -> Order: return Order(3)")
    with semel.open("memory:", consumer="orders") as once:
        guarded = once.guard(key="key")(function)
        assert [guarded(1, key="k"), guarded(1, key="k")] == [Order(3), Order(3)]


def test_a_message_is_read_as_its_own_annotation_says() -> None:
    function = defined("def f(message: Order) -> Missing: ...")
    arrival = Arrival(body=b'{"total": 5}', headers=(), transport="queue")
    assert reader(function)(arrival) == Order(5)


def text_annotated(**names: Any) -> Any:
    """A function whose return annotation is text on every Python."""
    exec("def f() -> 'Order': ...", names)
    return names["f"]


def test_a_text_is_evaluated_once_for_each_function() -> None:
    function = text_annotated(Order=Order)
    assert return_type(function) is Order
    del function.__globals__["Order"]
    assert return_type(function) is Order
    assert return_type(text_annotated()) is None


@pytest.mark.parametrize("written", ["list['Order']", "list['Order'] | None", "dict[str, list['Order']]"])
def test_text_inside_an_annotation_is_evaluated(written: str) -> None:
    names: dict[str, Any] = {"Order": Order}
    exec(
        f"def f(key: str) -> {written}: return [Order(3)] if 'dict' not in f.__doc__ else {{'a': [Order(3)]}}",
        names,
    )
    function = names["f"]
    function.__doc__ = written
    assert return_type(function) == eval(written.replace("'", ""), names)
    with semel.open("memory:", consumer="orders") as once:
        first, again = once.run("k", function, "k"), once.run("k", function, "k")
        assert (first, again) == (semel.Done(function("k")), semel.Done(function("k"), replayed=True))
        guarded = once.guard(key="key", name="f")(function)
        assert guarded("k") == guarded("k") == function("k")


def test_text_inside_that_names_nothing_is_no_annotation() -> None:
    names: dict[str, Any] = {}
    exec("def f() -> list['Missing']: return [1]", names)
    assert return_type(names["f"]) is None


def test_a_text_that_names_nothing_yet_is_evaluated_again() -> None:
    function = text_annotated()
    assert return_type(function) is None
    function.__globals__["Order"] = Order
    assert return_type(function) is Order


def test_another_text_is_evaluated_again() -> None:
    function = text_annotated(Order=Order)
    assert return_type(function) is Order
    function.__annotations__["return"] = "int"
    assert return_type(function) is int


def test_a_method_is_remembered_by_its_function() -> None:
    class Billing:
        charge = text_annotated(Order=Order)

    assert return_type(Billing().charge) is Order
    del Billing.charge.__globals__["Order"]
    assert return_type(Billing().charge) is Order


def test_a_function_is_not_kept_alive() -> None:
    function = text_annotated(Order=Order)
    assert return_type(function) is Order
    gone = weakref.ref(function)
    del function.__globals__["f"], function
    assert gone() is None


def test_an_object_that_cannot_be_remembered_is_read_each_time() -> None:
    class Slotted:
        __slots__ = ("__annotations__",)
        __hash__ = None  # type: ignore[assignment]

        def __call__(self) -> None: ...

    handler = Slotted()
    handler.__annotations__ = {"return": "int"}
    assert return_type(handler) is int
