"""Events told apart by their own times, through every verb that claims."""

import random
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import semel
from semel import keys
from semel.core.commands import Claim, Lookup
from semel.types import Busy, Done, Errored, Failed, Late
from tests.client.clients import Either, Place
from tests.client.test_guard import guarded

pytestmark = pytest.mark.anyio

BY_TIME = keys.sliding("5m", "who", event_time="at", lateness="1h")
NOON = datetime.now(UTC)
"""Half an hour before the test began: within the lateness, by every clock that the tests use."""


@pytest.fixture(autouse=True)
def noon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.NOON", datetime.now(UTC) - timedelta(minutes=30))


def event(minutes: float, who: str = "ann", **more: Any) -> dict[str, Any]:
    return {"who": who, "at": (NOON + timedelta(minutes=minutes)).isoformat(), **more}


async def test_guard_runs_once_for_what_is_near_and_again_for_what_is_apart(client: Either) -> None:
    ran: list[float] = []

    def greet(event: dict[str, Any]) -> int:
        ran.append(event["number"])
        return len(ran)

    greeted = guarded(client, greet, key=BY_TIME)
    for minutes, value in ((0, 1), (1 / 60, 1), (-4.9, 1), (4.99, 1), (5, 2), (9.9, 2), (10, 3)):
        assert await greeted(event(minutes, number=minutes)) == value
    assert ran == [0, 5, 10]
    with pytest.raises(semel.errors.LateEvent, match="older than what is remembered"):
        await greeted(event(0, number=0))
    with pytest.raises(semel.errors.LateEvent, match="ahead of the store's clock"):
        await greeted(event(24 * 60, "bob", number=0))
    with pytest.raises(semel.errors.LateEvent):
        await greeted(event(-60, "eve", number=0))
    assert ran == [0, 5, 10]


@pytest.mark.parametrize("late", ["run", "reject"])
async def test_what_cannot_be_told_is_late_whatever_the_policy(place: Place, late: Any) -> None:
    client = place.open(policy=semel.Policy(late=late))
    outcomes = await client.run_many([BY_TIME.delivery(event(-120))], lambda body: body)
    assert isinstance(outcomes[0], Late)


async def test_run_many_folds_what_is_near_and_runs_the_rest_in_the_order_of_their_times(
    place: Place,
) -> None:
    client = place.open(policy=semel.Policy(wait_s=0))
    ran: list[float] = []

    def handle(event: dict[str, Any]) -> float:
        ran.append(event["number"])
        return float(event["number"])

    minutes = [0, 2, 4.9, 5, 9, 10.5, -1]
    shuffled = random.Random(7).sample(minutes, len(minutes))
    deliveries = [BY_TIME.delivery(event(number, number=number)) for number in shuffled]
    outcomes = await client.run_many(deliveries, handle)
    assert ran == [-1, 4.9, 10.5]
    first = {-1: -1, 0: -1, 2: -1, 4.9: 4.9, 5: 4.9, 9: 4.9, 10.5: 10.5}
    assert outcomes == [Done(first[number], replayed=first[number] != number) for number in shuffled]


async def test_run_many_does_not_lose_a_repeat_whose_former_fails(place: Place) -> None:
    client = place.open(policy=semel.Policy(wait_s=0))

    def handle(event: dict[str, Any]) -> None:
        if event["number"] == 0:
            raise LookupError("not now")

    deliveries = [BY_TIME.delivery(event(number, number=number)) for number in (0, 6)]
    outcomes = await client.run_many(deliveries, handle)
    assert isinstance(outcomes[0], Errored)
    assert isinstance(outcomes[1], Busy), "the former may still come again"
    assert not outcomes[1].recoverable


async def test_a_batch_sends_one_claim_of_a_key_at_a_time(place: Place) -> None:
    client = place.open()
    deliveries = [BY_TIME.delivery(event(number)) for number in (0, 6, 12)]
    await client.run_many(deliveries, lambda body: None)
    for batch in place.spy.batches:
        claimed = [item.id for item in batch if isinstance(item, Claim)]
        assert len(set(claimed)) == len(claimed)
    claims = place.spy.sent(Claim)
    assert [claim.event_time_us for claim in claims] == [each.event_time_us for each in deliveries]


async def test_claims_carry_their_time(client: Either) -> None:
    at = NOON.replace(microsecond=0)
    key = BY_TIME(event(0))
    claim = await client.claim(key, event_time=at, sliding=BY_TIME)
    assert isinstance(claim, semel.Claimed)
    await client.complete(claim, "first")
    near = await client.claim(key, event_time=at + timedelta(minutes=4), sliding=BY_TIME)
    assert near == Done("first", replayed=True)
    apart = await client.claim(key, event_time=at + timedelta(minutes=5), sliding=BY_TIME)
    assert isinstance(apart, semel.Claimed)
    assert apart.attempt == 1
    await client.fail(apart, "no")
    assert isinstance(await client.claim(key, event_time=at + timedelta(minutes=6), sliding=BY_TIME), Failed)
    assert isinstance(await client.claim(key, event_time=at, sliding=BY_TIME), Late)


async def test_claim_many_folds_by_key_and_lets_others_ask_again(client: Either) -> None:
    outcomes = await client.claim_many([BY_TIME.delivery(event(number)) for number in (0, 1, 6)])
    assert isinstance(outcomes[0], semel.Claimed)
    assert [type(outcome) for outcome in outcomes[1:]] == [Busy, Busy]
    await client.complete(outcomes[0], "first")
    outcomes = await client.claim_many([BY_TIME.delivery(event(number)) for number in (0, 6, 1)])
    assert outcomes[0] == Done("first", replayed=True)
    assert outcomes[1:] == [Busy(0.0), Busy(0.0)], "they have not been asked"


async def test_an_arrival_window_is_carried_by_deliveries_too(place: Place) -> None:
    client = place.open()
    by_content = keys.sliding("5m", "who")
    await client.run_many([by_content.delivery(event(0))], lambda body: 1)
    assert [(each.sliding, each.window_us, each.apart_us) for each in place.spy.sent(Claim)] == [
        (True, 300_000_000, 0)
    ]


async def test_a_time_is_needed_and_marks_have_none(place: Place) -> None:
    client = place.open()
    with pytest.raises(semel.errors.UsageError, match="event_time"):
        await client.claim("k", sliding=BY_TIME)
    marking = place.open(consumer="marks", mode="mark")
    with pytest.raises(semel.errors.ModeMismatch, match="mark"):
        await marking.run_many([BY_TIME.delivery(event(0))], lambda body: body)


async def test_a_crashed_attempt_is_taken_up_by_its_copy(place: Place) -> None:
    client = place.open()
    key = BY_TIME(event(0))
    first = await client.claim(key, event_time=NOON, sliding=BY_TIME)
    assert isinstance(first, semel.Claimed)
    await client.release(first)
    outcomes = await client.run_many([BY_TIME.delivery(event(2))], lambda body: semel.current().attempt)
    assert outcomes == [Done(2)]
    (record,) = place.spy.send([Lookup(("", client.inner.consumer, key))])
    assert record.anchor_us == round(NOON.timestamp() * 1e6)
