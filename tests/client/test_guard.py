"""`guard`: the value or the error, and the function's own face."""

import asyncio
import inspect
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import semel
from semel.core.commands import Settle
from tests.client.clients import Either, Gate, Place, down, happens, in_thread

pytestmark = pytest.mark.anyio


class Order:
    def __init__(self, number: str, total: int = 1) -> None:
        self.id = number
        self.total = total


def guarded(client: Either, fn: Any, key: Any = "order.id", **policy: Any) -> Any:
    """The function behind `guard`, awaited in both colours."""
    given = semel.Policy(**policy) if policy else None
    wrapped = client.inner.guard(key=key, name="charge", policy=given)(client.handler(fn))

    async def call(*args: Any, **kwargs: Any) -> Any:
        if client.sync:
            return await in_thread(wrapped, *args, **kwargs)
        return await wrapped(*args, **kwargs)

    call.wrapped = wrapped  # type: ignore[attr-defined]
    return call


async def test_every_call_returns_the_first_value(client: Either) -> None:
    charge = guarded(client, lambda order: order.total)
    assert [await charge(Order("a", total)) for total in (1, 2)] == [1, 1]
    assert await charge(order=Order("b", 5)) == 5


async def test_a_first_failure_raises_itself_and_a_replayed_one_says_so(client: Either) -> None:
    error = ValueError("no")

    def handler(order: Order) -> None:
        raise error

    charge = guarded(client, handler, permanent=(ValueError,))
    with pytest.raises(ValueError, match="no") as raised:
        await charge(Order("a"))
    assert raised.value is error
    with pytest.raises(semel.errors.HandlerFailed, match="ValueError: no"):
        await charge(Order("a"))


async def test_a_transient_failure_raises_itself_each_time(client: Either) -> None:
    def handler(order: Order) -> None:
        raise LookupError(semel.current().attempt)

    charge = guarded(client, handler)
    for attempt in (1, 2):
        with pytest.raises(LookupError) as raised:
            await charge(Order("a"))
        assert raised.value.args == (attempt,)


async def test_still_running(client: Either) -> None:
    gate = Gate()
    first = asyncio.create_task(client.run("charge::a", client.held(gate)))
    await happens(gate.entered)
    charge = guarded(client, lambda order: 1, wait_s=0)
    with pytest.raises(semel.errors.StillRunning) as raised:
        await charge(Order("a"))
    assert 25 < raised.value.retry_after_s <= 30
    gate.opened.set()
    assert await first == semel.Done("value")


async def test_payload_mismatch(client: Either) -> None:
    charge = guarded(client, lambda order: 1, fingerprint=lambda order: str(order.total).encode())
    await charge(Order("a", 1))
    with pytest.raises(semel.errors.PayloadMismatch):
        await charge(Order("a", 2))


async def test_claim_lost(client: Either, place: Place) -> None:
    def handler(order: Order) -> None:
        from semel.core.commands import Forget

        place.spy._store.send([Forget(("", "billing", "charge::a"), force=True)])

    with pytest.raises(semel.errors.ClaimLost):
        await guarded(client, handler)(Order("a"))


async def test_value_not_kept(client: Either) -> None:
    charge = guarded(client, lambda order: 1, keep_value=False)
    assert await charge(Order("a")) == 1
    with pytest.raises(semel.errors.ValueNotKept):
        await charge(Order("a"))


async def test_outcome_unknown(place: Place) -> None:
    client = place.open(mode="quarantine")
    error = ValueError("half way")

    def handler(order: Order) -> None:
        raise error

    charge = guarded(client, handler)
    with pytest.raises(ValueError, match="half way"):
        await charge(Order("a"))
    with pytest.raises(semel.errors.OutcomeUnknown):
        await charge(Order("a"))


async def test_late_event() -> None:
    with pytest.raises(semel.errors.LateEvent):
        semel.unwrap(semel.Late(5), "k")


async def test_store_unavailable(client: Either, place: Place) -> None:
    charge = guarded(client, lambda order: 1, wait_s=0)
    await charge(Order("a"))
    place.spy.before = down()
    with pytest.raises(semel.errors.StoreUnavailable):
        await charge(Order("b"))
    place.spy.before = lambda _items: None


async def test_not_recorded_carries_the_value(place: Place) -> None:
    client = place.open(lease="200ms")  # so long is it tried
    charge = guarded(client, lambda order: order.total)
    place.spy.before = down(Settle)
    with pytest.raises(semel.errors.NotRecorded) as raised:
        await charge(Order("a", 7))
    assert raised.value.value == 7


async def test_the_outcome_for_those_who_want_it(client: Either) -> None:
    wrapped = guarded(client, lambda order: 3).wrapped
    outcomes = []
    for _ in range(2):
        outcome = wrapped.call(Order("a"))
        outcomes.append(outcome if client.sync else await outcome)
    assert outcomes == [semel.Done(3), semel.Done(3, replayed=True)]


async def test_signature_and_name_are_the_functions_own(client: Either) -> None:
    def charge(order: Order, *, note: str = "") -> int:
        """Charge it."""
        return 1

    wrapped = guarded(client, charge).wrapped
    assert inspect.signature(wrapped) == inspect.signature(charge)
    assert (wrapped.__name__, wrapped.__doc__) == ("charge", "Charge it.")
    assert wrapped.key(Order("a")) == "charge::a"


async def test_methods(client: Either) -> None:
    calls: list[Any] = []

    def charge(self: Any, order: Order) -> int:
        calls.append(self)
        return order.total

    class Till:
        pay: Any = client.inner.guard(key="order.id")(client.handler(charge))

    till = Till()
    values = []
    for total in (1, 2):
        value = till.pay(Order("a", total))
        values.append(value if client.sync else await value)
    outcome = till.pay.call(Order("a"))
    assert values == [1, 1]
    assert (outcome if client.sync else await outcome) == semel.Done(1, replayed=True)
    assert calls == [till]


async def test_a_key_may_be_computed_and_is_never_invented(client: Either) -> None:
    charge = guarded(client, lambda order: order.id, key=lambda order: order.id)
    assert await charge(Order("a")) == "a"
    with pytest.raises(semel.errors.KeyMissing):
        await charge(Order(""))
    with pytest.raises(semel.errors.UsageError, match="no parameter"):
        guarded(client, lambda order: 1, key="ordre.id")


async def test_an_async_def_is_served_by_the_twin(place: Place) -> None:
    if place.kind.colour == "async":
        with pytest.raises(TypeError, match="async def"):
            place.open().inner.guard(key="order.id", name="charge")(lambda order: 1)
        return
    client = place.open()
    gate = Gate()

    @client.inner.guard(key="order.id")  # type: ignore[untyped-decorator]
    async def charge(order: Order) -> int:
        await gate.apass()
        return order.total

    assert inspect.iscoroutinefunction(type(charge).__call__)
    first = asyncio.create_task(charge(Order("a", 1)))
    await happens(gate.entered)
    second = asyncio.create_task(charge(Order("a", 2)))
    gate.opened.set()
    assert list(await asyncio.gather(first, second)) == [1, 1]
    assert gate.ran == 1


async def test_an_old_event_by_claim(place: Place) -> None:
    client = place.open(window="1h", policy=semel.Policy(late="hold"))
    with pytest.raises(semel.errors.UsageError, match="time zone"):
        await client.claim("k", event_time=datetime(2020, 1, 1))  # noqa: DTZ001
    late = await client.claim("k", event_time=datetime.now(UTC) - timedelta(days=1))
    assert isinstance(late, semel.Late)
