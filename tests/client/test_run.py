"""`run`: every outcome, and what it leaves in the store."""

import asyncio
import dataclasses
import functools
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest

import semel
from semel import Busy, Done, Errored, Failed, Late, Mismatch
from tests.client.clients import Either, Place

pytestmark = pytest.mark.anyio


class Declined(Exception):
    pass


def fails(error: BaseException) -> Any:
    def handler(*_args: Any) -> Any:
        raise error

    return handler


def counted() -> tuple[list[Any], Any]:
    calls: list[Any] = []

    def handler(value: Any = None) -> Any:
        calls.append(value)
        return value

    return calls, handler


async def test_a_duplicate_does_not_run_again(client: Either) -> None:
    calls, handler = counted()
    assert await client.run("k", handler, 1) == Done(1)
    assert await client.run("k", handler, 2) == Done(1, replayed=True)
    assert calls == [1]


@pytest.mark.parametrize(
    "value",
    [
        None, 0, "", [], {}, False, 0.0, (), (1, (2,)), {3, 1}, frozenset({"a"}), Decimal("1.10"), b"", b"\x00raw",
        datetime(2027, 1, 2, tzinfo=UTC), datetime(2027, 1, 2), date(2027, 1, 2), timedelta(seconds=1.5),  # noqa: DTZ001
        UUID(int=7), 2**80, {1: "int key"}, [{"deep": (None, b"x")}],
    ],
    ids=repr,
)  # fmt: skip
async def test_values_come_back_as_they_went_in(client: Either, value: Any) -> None:
    _, handler = counted()
    first = await client.run("k", handler, value)
    again = await client.run("k", handler, "other")
    assert (first, again) == (Done(value), Done(value, replayed=True))
    assert type(again.value) is type(value)


@dataclasses.dataclass
class Receipt:
    number: int
    total: Decimal


async def test_an_object_comes_back_by_the_return_annotation(client: Either) -> None:
    def charge(number: int) -> Receipt:
        return Receipt(number, Decimal("9.90"))

    assert await client.run("k", charge, 1) == Done(Receipt(1, Decimal("9.90")))
    assert await client.run("k", charge, 2) == Done(Receipt(1, Decimal("9.90")), replayed=True)


async def test_a_transient_failure_is_released_and_may_run_again(client: Either, place: Place) -> None:
    error = ValueError("no")
    assert await client.run("k", fails(error)) == Errored(error, 1)
    record = place.record("k")
    assert record is not None
    assert record.owner == b""
    calls, handler = counted()
    assert await client.run("k", handler, 5) == Done(5)
    assert calls == [5]


async def test_a_permanent_failure_is_stored_and_replayed(place: Place) -> None:
    client = place.open(policy=semel.Policy(permanent=(Declined,)))
    error = Declined("card refused")
    assert await client.run("k", fails(error)) == Failed(error)
    calls, handler = counted()
    again = await client.run("k", handler)
    assert isinstance(again, Failed)
    assert again.replayed
    assert isinstance(again.error, semel.errors.HandlerFailed)
    assert (again.error.kind.rpartition(".")[2], again.error.message) == ("Declined", "card refused")
    assert calls == []


async def test_attempts_count_and_are_limited(place: Place) -> None:
    client = place.open(policy=semel.Policy(max_attempts=2))
    seen: list[int] = []

    def handler() -> None:
        seen.append(semel.current().attempt)
        raise ValueError

    assert (await client.run("k", handler)).attempt == 1
    last = await client.run("k", handler)
    assert isinstance(last, Failed)
    assert isinstance(last.error, semel.errors.AttemptsExhausted)
    assert isinstance(last.error.__cause__, ValueError)
    assert seen == [1, 2]
    replayed = await client.run("k", handler)
    assert isinstance(replayed.error, semel.errors.HandlerFailed)
    assert "ValueError" in str(replayed.error)


async def test_a_failed_event_rests_before_its_next_attempt(place: Place) -> None:
    client = place.open(policy=semel.Policy(retry_delay_s=60, wait_s=0))
    outcome = await client.run("k", fails(ValueError()))
    assert outcome.retry_after_s == 60
    busy = await client.run("k", fails(ValueError()))
    assert isinstance(busy, Busy)
    assert 55 < busy.retry_after_s <= 60


async def test_the_rest_doubles_with_each_attempt(place: Place) -> None:
    client = place.open(policy=semel.Policy(retry_delay_s=0.01))
    waits = [(await client.run("k", fails(ValueError()))).retry_after_s for _ in range(4)]
    assert waits == [0.01, 0.02, 0.04, 0.08]


async def test_another_payload_under_the_same_key_is_a_mismatch(place: Place) -> None:
    client = place.open(policy=semel.Policy(fingerprint=lambda value: str(value).encode()))
    calls, handler = counted()
    assert await client.run("k", handler, 1) == Done(1)
    assert await client.run("k", handler, 2) == Mismatch()
    assert await client.run("k", handler, 1) == Done(1, replayed=True)
    assert calls == [1]


@pytest.mark.parametrize("late", ["run", "hold", "reject"])
async def test_an_event_older_than_its_window_is_treated_as_the_policy_says(place: Place, late: Any) -> None:
    client = place.open(window="1h", policy=semel.Policy(late=late))
    old = semel.Delivery(
        key="k", body=1, event_time_us=int((datetime.now(UTC) - timedelta(hours=2)).timestamp() * 1e6)
    )
    fresh = semel.Delivery(key="f", body=2, event_time_us=int(datetime.now(UTC).timestamp() * 1e6))
    outcomes = await client.run_many([old, fresh, semel.Delivery(key="n", body=3)], lambda body: body)
    assert outcomes[1:] == [Done(2), Done(3)]
    if late == "run":
        assert outcomes[0] == Done(1)
    else:
        assert isinstance(outcomes[0], Late)
        assert 7190 < outcomes[0].age_s < 7300


async def test_a_late_event_that_is_known_is_answered(place: Place) -> None:
    client = place.open(window="1h", policy=semel.Policy(late="reject"))
    await client.run("k", lambda: 1)
    two_hours_ago = datetime.now(UTC) - timedelta(hours=2)
    assert await client.claim("k", event_time=two_hours_ago) == Done(1, replayed=True)
    assert isinstance(await client.claim("other", event_time=two_hours_ago), Late)


async def test_values_are_not_kept_where_the_policy_says_so(place: Place) -> None:
    client = place.open(policy=semel.Policy(keep_value=False))
    assert await client.run("k", lambda: 5) == Done(5, kept=False)
    assert await client.run("k", lambda: 6) == Done(None, replayed=True, kept=False)


class Broken:
    def model_dump_json(self) -> str:
        raise KeyError("what the user's class may do")


def large() -> str:
    return "x" * 2000


def object_() -> Any:
    return object()


def broken() -> Broken:
    return Broken()


@pytest.mark.parametrize("handler", [large, object_, broken])
async def test_an_effect_is_completed_although_its_value_cannot_be_kept(place: Place, handler: Any) -> None:
    client = place.open(policy=semel.Policy(value_bytes_max=1000))
    with pytest.warns(RuntimeWarning, match=handler.__qualname__):
        first = await client.run("k", handler)
    assert isinstance(first, Done)
    assert (first.kept, first.recorded) == (False, True)
    assert first.reason
    assert await client.run("k", handler) == Done(None, replayed=True, kept=False, reason=first.reason)
    record = place.record("k")
    assert record is not None
    assert record.state == "done"


async def test_a_value_that_no_longer_decodes_raises_and_never_reruns(client: Either) -> None:
    def charge() -> Receipt:
        return Receipt(1, Decimal(1))

    def counts() -> int:
        raise AssertionError

    await client.run("k", charge)
    with pytest.raises(semel.errors.RecordCorrupt):
        await client.run("k", counts)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), asyncio.CancelledError()], ids=repr)
async def test_an_interrupt_releases_and_goes_on_its_way(
    client: Either, place: Place, error: BaseException
) -> None:
    caught: list[BaseException] = []

    async def run() -> None:
        try:
            await client.run("k", fails(error))
        except BaseException as raised:  # noqa: BLE001 - a loop would be ended by it
            caught.append(raised)

    await run()
    assert type(caught[0]) is type(error)
    record = place.record("k")
    assert record is not None
    counts = isinstance(error, SystemExit) or (client.sync and isinstance(error, asyncio.CancelledError))
    assert (record.owner, record.attempt) == (b"", 1 if counts else 0)
    assert client.kept == {}
    assert await client.run("k", lambda: 1) == Done(1)


async def test_an_async_def_is_refused_by_a_client_that_blocks(place: Place) -> None:
    client = place.open()
    if not client.sync:
        with pytest.raises(TypeError, match="async def"):
            await client.inner.run("k", lambda: 1)
        return

    async def handler() -> None: ...

    with pytest.raises(TypeError, match="aopen"):
        client.inner.run("k", handler)
    assert place.record("k") is None


async def test_the_handler_is_told_who_and_what_it_is(client: Either, place: Place) -> None:
    seen: list[Any] = []

    def handler() -> None:
        me = semel.current()
        seen.append((me.key, me.consumer, me.attempt, me.lost, 25 < me.deadline_s <= 30))
        seen.append((me.idempotency_key, me.fence, me.first_seen_us))
        raise ValueError

    await client.run("k", handler)
    await client.run("k", handler)
    assert seen[0] == ("k", "billing", 1, False, True)
    assert seen[1][0] == seen[3][0]
    assert seen[1][1] < seen[3][1]
    assert seen[1][2] == seen[3][2] == place.record("k").first_seen_us  # type: ignore[union-attr]
    with pytest.raises(semel.errors.NotInHandler):
        semel.current()
    if client.sync:
        client.inner.run("here", handler)  # in this very thread
        with pytest.raises(semel.errors.NotInHandler):
            semel.current()


async def test_a_claim_lost_inside_another_says_nothing_about_the_outer_one(client: Either) -> None:
    error = semel.errors.ClaimLost("the inner one")
    assert await client.run("k", fails(error)) == Errored(error, 1)


async def test_consumers_and_tenants_do_not_see_each_other(place: Place) -> None:
    calls, handler = counted()
    for client in (place.open(), place.open(consumer="mail"), place.open(tenant="acme")):
        assert await client.run("k", handler) == Done(None)
    assert len(calls) == 3


async def test_options_never_clash_with_the_handlers_own(client: Either) -> None:
    def handler(**kwargs: Any) -> Any:
        return kwargs

    given = {"policy": 1, "window": 2, "fn_": 4}
    assert await client.run("k", handler, **given) == Done(given)
    assert await client.using(wait_s=0).run("k", handler) == Done(given, replayed=True)


async def test_an_argument_that_may_be_meant_for_either_is_refused(client: Either) -> None:
    def takes(meta: Any = None) -> Any:
        return meta

    def takes_any(**kwargs: Any) -> Any:
        return kwargs

    with pytest.raises(semel.errors.UsageError, match=r"functools\.partial"):
        await client.run("k", takes, meta={"a": "b"})
    with pytest.raises(semel.errors.UsageError, match=r"functools\.partial"):
        await client.run("k", takes_any, event_type="payment")
    bound = functools.partial(client.handler(takes), meta=5)
    assert await client.run("k", bound, meta={"a": "b"}) == Done(5)


async def test_a_policy_by_using_costs_no_round_trip(place: Place) -> None:
    client = place.open()
    await client.run("k", lambda: 1)
    place.spy.clear()
    await client.using(wait_s=0).run("k", lambda: 1)
    assert len(place.spy.batches) == 1
