"""A cursor that a store did not give out is refused by every store, in the same words."""

from collections.abc import Callable
from pathlib import Path

import pytest

from semel.core.commands import Answer, Claim, Scan
from semel.core.protocols import Store
from semel.errors import PolicyInvalid
from semel.stores import store_for
from semel.types import Unavailable
from tests.services import postgres, redis

URLS: dict[str, Callable[[Path], str]] = {
    "memory": lambda _: "memory:",
    "sqlite": lambda folder: f"sqlite:///{folder}/events.db",
    "postgres": postgres.place,
    "redis": redis.place,
}


def raise_refusal(answers: list[Answer]) -> None:
    """A store may raise, or answer the one item by its error."""
    for answer in answers:
        if isinstance(answer, Unavailable):
            raise answer.error


@pytest.mark.parametrize("kind", URLS)
@pytest.mark.parametrize("cursor", ["nonsense", "dnonsense", "s1.2", "sx.0.", '["a"]'])
def test_a_strange_cursor_is_refused(kind: str, cursor: str, tmp_path: Path) -> None:
    store = store_for(URLS[kind](tmp_path))
    assert isinstance(store, Store)
    store.open()
    try:
        with pytest.raises(PolicyInvalid, match="is not a cursor of this store"):
            raise_refusal(store.send([Scan(cursor=cursor)]))
    finally:
        store.close()


@pytest.mark.parametrize("kind", URLS)
def test_a_page_goes_on_where_the_last_one_ended(kind: str, tmp_path: Path) -> None:
    store = store_for(URLS[kind](tmp_path))
    assert isinstance(store, Store)
    store.open()
    try:
        keys = {f"key {number}" for number in range(5)}
        store.send([Claim(("", "paged", key), b"o" * 16, 10**7, 10**7) for key in keys])
        found: list[str] = []
        cursor: str | None = None
        while len(found) < len(keys) + 1:
            (page,) = store.send([Scan(consumer="paged", limit=2, cursor=cursor)])
            found += [record.key for record in page.records]
            cursor = page.cursor
            if cursor is None:
                break
        assert len(found) == len(keys)
        assert set(found) == keys
    finally:
        store.close()
