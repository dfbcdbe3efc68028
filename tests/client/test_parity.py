"""Both colours have the same verbs, the same arguments and the same outcomes."""

import inspect
from typing import Any

import pytest

import semel
from semel import Delivery
from semel.client.records import Records, Windows
from semel.client.records_async import AsyncRecords, AsyncWindows
from semel.inbox import AsyncInbox, Inbox
from tests.client.clients import KINDS, Either, Place

PAIRS = [
    (semel.Semel, semel.AsyncSemel),
    (Inbox, AsyncInbox),
    (Records, AsyncRecords),
    (Windows, AsyncWindows),
]
ONLY_SYNC = {"twin"}
"""The twin is the async client."""
PLAIN = {"using", "guard", "inbox", "outbox", "consumer", "mode", "policy", "store", "observed"}
"""Verbs that do no I/O are the same plain functions in both."""


def public(kind: type) -> dict[str, Any]:
    return {name: thing for name, thing in inspect.getmembers(kind) if not name.startswith("_")}


def shape(function: Any) -> list[tuple[str, Any, Any]]:
    """Names, kinds and defaults of the parameters."""
    return [(each.name, each.kind, each.default) for each in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize(("sync", "async_"), PAIRS, ids=lambda kind: kind.__name__)
def test_the_same_names(sync: type, async_: type) -> None:
    assert set(public(sync)) - set(public(async_)) == (ONLY_SYNC if sync is semel.Semel else set())
    assert set(public(async_)) - set(public(sync)) == set()


@pytest.mark.parametrize(("sync", "async_"), PAIRS, ids=lambda kind: kind.__name__)
def test_the_same_arguments_awaited(sync: type, async_: type) -> None:
    plain = PLAIN if sync is semel.Semel else set[str]()
    for name, theirs in public(async_).items():
        mine = public(sync)[name]
        if not callable(mine):
            assert type(mine) is type(theirs), name
            continue
        assert shape(mine) == shape(theirs), name
        awaited = inspect.iscoroutinefunction(theirs) or inspect.isasyncgenfunction(theirs)
        assert awaited == (name not in plain), name
        assert not inspect.iscoroutinefunction(mine), name


def test_the_doors_take_the_same() -> None:
    assert shape(semel.open) == shape(semel.aopen)


def test_docstrings_promise_the_same() -> None:
    for name, theirs in public(semel.AsyncSemel).items():
        if inspect.isfunction(theirs) and name not in PLAIN | {"run_many", "close"}:
            assert inspect.getdoc(theirs) == inspect.getdoc(public(semel.Semel)[name]), name


def without_times(outcome: Any) -> Any:
    if isinstance(outcome, list):
        return [without_times(each) for each in outcome]
    if isinstance(outcome, semel.Claimed):
        return ("Claimed", outcome.key, outcome.attempt)
    if isinstance(outcome, semel.Busy):
        return ("Busy", round(outcome.retry_after_s / 10))
    if isinstance(outcome, semel.Completed):
        return ("Completed", outcome.already, outcome.recreated)
    if isinstance(outcome, semel.Renewed | semel.Forgotten):
        return type(outcome).__name__
    if isinstance(outcome, semel.Record):
        return (outcome.key, outcome.state, outcome.attempt)
    if isinstance(outcome, semel.Failed | semel.Errored):
        return (type(outcome).__name__, type(outcome.error).__name__, str(outcome.error))
    return outcome


async def scenario(client: Either) -> list[Any]:
    """One of everything, in one order."""
    told: list[Any] = []

    def fails(error: Exception) -> Any:
        def handler(*_body: Any) -> Any:
            raise error

        return handler

    told.append(await client.run("a", lambda: (1, {2})))
    told.append(await client.run("a", lambda: 2))
    told.append(await client.run("b", fails(ValueError("transient"))))
    told.append(await client.run("b", lambda: semel.current().attempt))
    told.append(await client.run("c", fails(LookupError("permanent"))))
    told.append(await client.run("c", lambda: 1))
    claim = await client.claim("d")
    told += [claim, await client.claim("d"), await client.using(wait_s=0).run("d", lambda: 1)]
    told += [await client.renew(claim), await client.complete(claim, b"raw"), await client.complete(claim)]
    told.append(await client.claim_many(["d", "e", "e", "a"]))
    given = [Delivery(key=key, body=key, fingerprint=b"1") for key in "fgfb"]
    told.append(await client.run_many(given, lambda body: body * 2, concurrency=2))
    told.append(await client.run_many([Delivery(key="f", body=1, fingerprint=b"2")], lambda body: body))
    told.append(await client.records("forget", "a"))
    told.append(await client.run("a", lambda: "again"))
    told.append(sorted(map(without_times, await client.records("list"))))
    return [without_times(each) for each in told]


@pytest.mark.anyio
async def test_the_same_outcomes(tmp_path: Any) -> None:
    stories = {}
    for kind in KINDS:
        folder = tmp_path / str(kind)
        folder.mkdir()
        place = Place(kind, folder)
        client = place.open(policy=semel.Policy(permanent=(LookupError,)))
        stories[str(kind)] = await scenario(client)
        await client.close()
        place.spy.close()
    first = stories.pop("memory-sync")
    assert len(first) == 18
    for name, story in stories.items():
        assert story == first, name
