"""The store is out of reach: what was sent is sent again as it was, and what happened is not forgotten."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import semel
from semel import Delivery, Done, Errored, Unavailable
from semel.core.commands import Claim, Item, Settle
from tests.client.clients import Either, Place, down

pytestmark = pytest.mark.anyio


def loses_reply(kind: type, times: int = 1) -> Callable[[list[Item]], None]:
    """Applied, but the answer does not come."""
    left = [times]

    def after(items: list[Item]) -> None:
        if left[0] and any(isinstance(item, kind) for item in items):
            left[0] -= 1
            raise semel.errors.StoreUnavailable("the reply was lost")

    return after


async def warm(place: Place, **options: Any) -> Either:
    client = place.open(**options)
    await client.run("warm", lambda: None)
    place.spy.clear()
    return client


async def test_a_claim_whose_reply_was_lost_is_repeated_and_gets_itself_back(place: Place) -> None:
    client = await warm(place)
    place.spy.after = loses_reply(Claim)
    assert await client.run("k", lambda: semel.current().attempt) == Done(1)
    claims = place.spy.sent(Claim)
    assert len(claims) == 2
    assert claims[0] == claims[1]


async def test_claims_of_a_batch_whose_reply_was_lost_get_themselves_back(place: Place) -> None:
    client = await warm(place)
    place.spy.after = loses_reply(Claim)
    given = [Delivery(key=f"k{at}", body=at) for at in range(5)]
    assert await client.run_many(given, lambda _body: semel.current().attempt) == [Done(1)] * 5
    assert len(place.owners()) == 5


async def test_a_claim_that_cannot_be_made_is_unavailable_after_trying(place: Place) -> None:
    client = await warm(place, policy=semel.Policy(wait_s=0.1))
    place.spy.before = down(Claim)
    outcome = await client.run("k", lambda: 1)
    assert isinstance(outcome, Unavailable)
    assert isinstance(outcome.error, semel.errors.StoreUnavailable)
    assert len(place.spy.sent(Claim)) >= 3
    assert len(place.owners()) == 1


async def test_without_waiting_it_is_unavailable_at_once(place: Place) -> None:
    client = await warm(place, policy=semel.Policy(wait_s=0))
    place.spy.before = down(Claim)
    assert isinstance(await client.run("k", lambda: 1), Unavailable)
    assert len(place.spy.sent(Claim)) == 1


async def test_a_completion_is_repeated_until_it_is_heard(place: Place) -> None:
    client = await warm(place)
    place.spy.after = loses_reply(Settle, 3)
    assert await client.run("k", lambda: 5) == Done(5)
    settles = place.settles("done")
    assert len(settles) == 4
    assert len({(item.owner, item.fence, item.value) for item in settles}) == 1
    assert client.kept == {}


async def test_a_completion_that_is_not_heard_until_the_deadline_is_told_so(place: Place) -> None:
    client = await warm(place, lease="200ms")  # so long is it tried
    place.spy.before = down(Settle)
    started = asyncio.get_running_loop().time()
    assert await client.run("k", lambda: 5) == Done(5, recorded=False)
    assert asyncio.get_running_loop().time() - started < 5
    settles = place.settles("done")
    assert len(settles) > 1
    assert len({(item.owner, item.fence) for item in settles}) == 1
    assert client.kept == {}


async def test_a_failure_is_repeated_too(place: Place) -> None:
    client = await warm(place, policy=semel.Policy(permanent=(LookupError,)))
    place.spy.after = loses_reply(Settle)
    error = LookupError("no")

    def handler() -> None:
        raise error

    assert await client.run("k", handler) == semel.Failed(error)
    assert len(place.settles("failed")) == 2


async def test_a_release_that_fails_does_not_hide_the_handlers_error(place: Place) -> None:
    client = await warm(place)
    place.spy.before = down(Settle)
    error = ValueError("mine")

    def handler() -> None:
        raise error

    assert await client.run("k", handler) == Errored(error, 1)
    assert len(place.settles("released")) == 1
    assert client.kept == {}


async def test_in_a_batch_what_is_not_recorded_is_told_so(place: Place) -> None:
    client = await warm(place, lease="200ms")  # so long is it tried
    place.spy.before = down(Settle)
    given = [Delivery(key=f"k{at}", body=at) for at in range(5)]
    assert await client.run_many(given, lambda body: body) == [Done(at, recorded=False) for at in range(5)]
    assert client.kept == {}


async def test_the_first_use_raises_when_nobody_answers(place: Place) -> None:
    place.spy.before = down()
    client = place.open()
    for _ in range(2):
        with pytest.raises(semel.errors.StoreUnavailable):
            await client.run("k", lambda: 1)
    place.spy.before = lambda _items: None
    assert await client.run("k", lambda: 1) == Done(1)


async def test_verbs_raise_and_their_many_answer(place: Place) -> None:
    client = await warm(place)
    claim = await client.claim("k")
    place.spy.before = down()
    for call in (client.complete(claim), client.fail(claim, "x"), client.release(claim), client.renew(claim)):
        with pytest.raises(semel.errors.StoreUnavailable):
            await call
    assert [type(each) for each in await client.complete_many([claim])] == [Unavailable]
    with pytest.raises(semel.errors.StoreUnavailable):
        await client.records("lookup", "k")


async def test_a_sweep_keeps_no_claim_that_it_could_not_settle(place: Place) -> None:
    if place.kind.store != "sqlite":
        return  # a journal needs a store that lasts
    client = await warm(place, lease="50ms")
    await client.claim("k", journal={"a": 1})
    quick = client.using(lease_s=0.2)
    outcomes: list[Any] = []
    place.spy.before = down(Settle)
    while not outcomes:
        outcomes = await quick.sweep(lambda payload: payload)
    assert outcomes == [Done({"a": 1}, recorded=False)]
    assert client.kept == {}
