"""What the tests of this folder share: items, stores and how to await a server."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from semel.core.commands import Answer, Claim, Granted, Settle
from semel.core.protocols import Store
from semel.stores.redis import RedisStore
from semel.stores.redis.calls import RedisCall
from semel.stores.redis.pipeline import Pipeline
from semel.types import Id

S = 1_000_000
MINUTE_US = 60 * S

Make = Callable[..., Store]
"""Makes an open store from a URL and options."""


def claim(key: str, *, owner: bytes | None = None, consumer: str = "consumer", **more: Any) -> Claim:
    fields: dict[str, Any] = {"lease_us": MINUTE_US, "window_us": MINUTE_US, **more}
    return Claim(("", consumer, key), owner or os.urandom(16), **fields)


def done(held: Claim, granted: Answer, value: bytes | None = b"rvalue", **more: Any) -> Settle:
    assert isinstance(granted, Granted), granted
    fields: dict[str, Any] = {"window_us": held.window_us, "lease_us": held.lease_us, **more}
    return Settle(held.id, held.owner, granted.fence, "done", value, **fields)


def finish(store: Store, *keys: str, value: bytes | None = b"rvalue") -> None:
    """Claim and complete these keys."""
    claims = [claim(key) for key in keys]
    answers = store.send(claims)
    store.send([done(held, answer, value) for held, answer in zip(claims, answers, strict=True)])


def named(*keys: str) -> list[Id]:
    return [("", "consumer", key) for key in keys]


@contextmanager
def opened(url: str, **options: Any) -> Iterator[RedisStore]:
    store = RedisStore(url, **options)
    store.open()
    try:
        yield store
    finally:
        store.close()


def kinds(answers: Sequence[Answer]) -> list[str]:
    return [type(answer).__name__ for answer in answers]


def spied(store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> list[list[RedisCall]]:
    """What the store asks from here on, one list for each time."""
    asked: list[list[RedisCall]] = []
    ask = Pipeline.ask

    def spy(pipeline: Pipeline, calls: list[RedisCall]) -> list[Any]:
        if pipeline._core is store.core:
            asked.append(calls)
        return ask(pipeline, calls)

    monkeypatch.setattr(Pipeline, "ask", spy)
    return asked
