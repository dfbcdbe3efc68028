"""A handler is checked against its mode when it is given, not when the first message comes."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

import semel
from semel.brokers import Route
from semel.errors import UsageError


def one(message: Any) -> None: ...
def two(connection: Any, message: Any) -> None: ...
def none() -> None: ...
def rest(*given: Any) -> None: ...
def optional(message: Any, more: int = 1) -> None: ...
def keyword(message: Any, *, more: int) -> None: ...


@pytest.mark.parametrize("handler", [one, rest, optional, partial(keyword, more=1), partial(two, object())])
def test_handlers_that_take_the_message_alone(handler: Any) -> None:
    Route(handler, once=semel.aopen("memory:", consumer="c"))


@pytest.mark.parametrize("handler", [two, none, keyword])
def test_others_are_refused_with_the_fix(handler: Any) -> None:
    with pytest.raises(UsageError, match=r"write handler\(message\), or choose mode inbox"):
        Route(handler, once=semel.aopen("memory:", consumer="c"))


@pytest.mark.parametrize("handler", [one, none, keyword])
def test_the_inbox_gives_the_transaction_first(handler: Any, tmp_path: Path) -> None:
    once = semel.aopen(f"sqlite:///{tmp_path}/s.db", consumer="c", mode="inbox")
    with pytest.raises(
        UsageError, match=r"the open transaction and the message: write handler\(connection, message\)"
    ):
        Route(handler, once=once)
    Route(two, once=once)
    Route(rest, once=once)
