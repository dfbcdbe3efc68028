"""Quarantine: once a handler has started, only its own word says that nothing happened."""

import asyncio
from typing import Any

import pytest

import semel
from semel import Delivery, Done, Errored, Failed, Lost, Unknown
from semel.core.commands import Settle
from semel.core.settlement import RESOLVED_MEANWHILE
from tests.client.clients import Either, Gate, Place, happens, only_async, only_sqlite
from tests.waiting import until

pytestmark = pytest.mark.anyio


@pytest.fixture
def careful(place: Place) -> Either:
    return place.open(mode="quarantine", policy=semel.Policy(permanent=(LookupError,)))


def fails(error: BaseException) -> Any:
    def handler(*_body: Any) -> Any:
        raise error

    return handler


async def test_a_good_end_is_as_everywhere(careful: Either) -> None:
    assert await careful.run("k", lambda: 1) == Done(1)
    assert await careful.run("k", lambda: 2) == Done(1, replayed=True)


async def test_not_applied_releases(careful: Either) -> None:
    error = semel.NotApplied("nothing happened")
    assert await careful.run("k", fails(error)) == Errored(error, 1)
    assert await careful.run("k", lambda: semel.current().attempt) == Done(2)


async def test_a_permanent_error_fails(careful: Either) -> None:
    error = LookupError("no such account")
    assert await careful.run("k", fails(error)) == Failed(error)


async def test_any_other_error_is_unknown_and_never_rerun(careful: Either, place: Place) -> None:
    error = ValueError("half way")
    mine = await careful.run("k", fails(error))
    assert isinstance(mine, Unknown)
    assert mine.error is error
    again = await careful.run("k", lambda: pytest.fail("it ran again"))
    assert again == Unknown(mine.since_us)
    assert place.record("k").state == "unknown"  # type: ignore[union-attr]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1)], ids=repr)
async def test_an_interrupt_is_unknown_and_goes_on_its_way(
    careful: Either, place: Place, error: BaseException
) -> None:
    caught: list[BaseException] = []
    try:
        await careful.run("k", fails(error))
    except BaseException as raised:  # noqa: BLE001 - a loop would be ended by it
        caught.append(raised)
    assert caught == [error]
    assert place.record("k").state == "unknown"  # type: ignore[union-attr]


@only_async
async def test_cancellation_is_unknown(place: Place) -> None:
    client = place.open(mode="quarantine")
    entered = asyncio.Event()

    async def handler() -> None:
        entered.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(client.inner.run("k", handler))
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert place.record("k").state == "unknown"  # type: ignore[union-attr]


async def test_a_crash_is_unknown_and_the_late_owner_may_complete(place: Place) -> None:
    client = place.open(mode="quarantine", lease="40ms", policy=semel.Policy(wait_s=10))
    claim = await client.claim("k")  # bare: as good as dead
    outcome = await client.run("k", lambda: pytest.fail("it ran again"))
    assert isinstance(outcome, Unknown)
    assert isinstance(await client.complete(claim, "late"), semel.Completed)
    assert await client.run("k", lambda: 2) == Done("late", replayed=True)


async def test_before_the_handler_starts_release_is_free(careful: Either, place: Place) -> None:
    claim = await careful.claim("k")
    await careful.release(claim, count_attempt=False)
    assert await careful.run("k", lambda: semel.current().attempt) == Done(1)


async def test_those_of_a_batch_that_did_not_start_are_not_unknown(careful: Either, place: Place) -> None:
    def handler(body: int) -> None:
        raise KeyboardInterrupt

    caught: list[BaseException] = []
    try:
        await careful.run_many([Delivery(key=f"k{at}", body=at) for at in range(3)], handler)
    except BaseException as raised:  # noqa: BLE001
        caught.append(raised)
    assert type(caught[0]) is KeyboardInterrupt
    await until(lambda: all(not place.record(f"k{at}").owner for at in (1, 2)))  # type: ignore[union-attr]
    states = [place.record(f"k{at}").state for at in range(3)]  # type: ignore[union-attr]
    assert states == ["unknown", "claimed", "claimed"]


async def test_one_that_lost_its_claim_before_its_turn_is_not_unknown(place: Place) -> None:
    client = place.open(mode="quarantine")

    def handler(body: int) -> None:
        for owner, kept in client.kept.items():
            if kept.claim.id[2] == "k1":
                kept.report_lost()  # as the keeper does when the store does not answer
                assert owner

    outcomes = await client.run_many([Delivery(key=f"k{at}", body=at) for at in range(2)], handler)
    assert outcomes == [Done(None), Lost()]
    record = place.record("k1")
    assert record is not None
    assert (record.state, record.owner, record.attempt) == ("claimed", b"", 0)


async def test_an_operator_decides(careful: Either, place: Place) -> None:
    for key in "ab":
        await careful.run(key, fails(ValueError()))
    (a, b) = (place.record(key) for key in "ab")
    assert a is not None
    assert b is not None
    assert await careful.records("resolve", "a", fence=a.fence - 1, to="done") == Lost()
    assert isinstance(
        await careful.records("resolve", "a", fence=a.fence, to="done", value=(1,)), semel.Completed
    )
    assert await careful.run("a", lambda: 2) == Done((1,), replayed=True)
    assert isinstance(await careful.records("resolve", "b", fence=b.fence, to="absent"), semel.Forgotten)
    assert await careful.run("b", lambda: semel.current().attempt) == Done(1)
    assert await careful.records("resolve", "b", fence=b.fence, to="done") == Lost()


async def test_a_duplicate_waits_for_a_running_one(careful: Either) -> None:
    gate = Gate()
    owner = asyncio.create_task(careful.run("k", careful.held(gate)))
    await happens(gate.entered)
    busy = await careful.using(wait_s=0).run("k", lambda: 1)
    assert isinstance(busy, semel.Busy)
    gate.opened.set()
    assert await owner == Done("value")


async def test_a_value_that_comes_after_resolve_is_not_called_kept(careful: Either, place: Place) -> None:
    gate = Gate()
    owner = asyncio.create_task(careful.run("k", careful.held(gate)))
    await happens(gate.entered)
    record = place.record("k")
    assert record is not None
    place.spy.send([Settle(record.id, record.owner, record.fence, "unknown")])  # as if its lease had ended
    resolved = await careful.records("resolve", "k", fence=record.fence, to="done", value="by hand")
    assert isinstance(resolved, semel.Completed)
    gate.opened.set()
    outcome = await owner
    assert outcome == Done("value", kept=False, reason=RESOLVED_MEANWHILE)
    assert await careful.run("k", lambda: pytest.fail("it ran again")) == Done("by hand", replayed=True)


async def test_what_cannot_be_kept_is_done_all_the_same(careful: Either) -> None:
    with pytest.warns(RuntimeWarning, match="object"):
        outcome = await careful.run("k", object)
    assert isinstance(outcome, Done)
    assert not outcome.kept


async def test_a_lost_claim_with_everything_permanent_is_not_failed(place: Place) -> None:
    client = place.open(policy=semel.Policy(permanent=(Exception,)))

    def handler() -> None:
        semel.current()._run.kept.report_lost()  # as the keeper does when the store does not answer
        raise semel.errors.ClaimLost("so I stop")

    async def ahandler() -> None:
        semel.current()._run.kept.report_lost()
        await asyncio.Event().wait()

    assert await client.run("k", handler if client.sync else ahandler) == Lost()
    record = place.record("k")
    assert record is not None
    assert (record.state, record.owner) == ("claimed", b"")


@only_sqlite
async def test_what_did_not_happen_is_swept_if_its_source_never_sends_again(place: Place) -> None:
    careful = place.open(mode="quarantine")
    (told,) = await careful.run_many(
        [Delivery(key="k", body=1, journal={"n": 1})], fails(ValueError("half way"))
    )
    assert isinstance(told, Unknown)
    record = place.record("k")
    assert record is not None
    assert await careful.sweep(lambda payload: payload) == []
    await careful.records("resolve", "k", fence=record.fence, to="absent")
    assert await careful.sweep(lambda payload: payload) == [Done({"n": 1})]
