"""The one step of the rules: items for the old or the new store."""

from collections.abc import Generator, Sequence
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from semel.core.commands import Answer, Item
from semel.errors import StoreUnavailable
from semel.types import Unavailable

__all__ = ["AskSide", "Side", "ask"]

Side: TypeAlias = Literal["old", "new"]


class AskSide(Struct):
    """Send items to one of the stores. Result: its answers."""

    side: Side
    items: Sequence[Item]


def ask(side: Side, items: Sequence[Item]) -> Generator[AskSide, Any, list[Answer]]:
    """Send items, if there are any. A store that does not answer answers each of them with `Unavailable`."""
    if not items:
        return []
    try:
        return list((yield AskSide(side, items)))
    except StoreUnavailable as error:
        return [Unavailable(error)] * len(items)
