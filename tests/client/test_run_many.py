"""`run_many`: one claim for all, each outcome its own."""

import asyncio
import dataclasses
import threading
from pathlib import Path
from threading import Event, Lock
from typing import Any

import pytest

import semel
from semel import Busy, Delivery, Done, Errored, Failed, Mismatch, Unavailable
from semel.core.commands import Claim, Settle
from semel.stores.sqlite import SqliteStore
from tests.client.clients import GUARD_S, Either, Gate, Place, Spy, down, happens, only_async, only_sync
from tests.waiting import until

pytestmark = pytest.mark.anyio


def deliveries(*keys: str, **options: Any) -> list[Delivery[str]]:
    return [Delivery(key=key, body=f"{key}{at}", **options) for at, key in enumerate(keys)]


async def test_outcomes_in_input_order_and_copies_folded(client: Either) -> None:
    calls: list[str] = []

    def handler(body: str) -> str:
        calls.append(body)
        return body

    outcomes = await client.run_many(deliveries("a", "b", "a", "c", "b"), handler)
    assert outcomes == [
        Done("a0"), Done("b1"), Done("a0", replayed=True), Done("c3"), Done("b1", replayed=True),
    ]  # fmt: skip
    assert calls == ["a0", "b1", "c3"]


async def test_a_copy_with_another_fingerprint_is_a_mismatch(client: Either) -> None:
    given = [
        Delivery(key="a", body=at, fingerprint=print_) for at, print_ in enumerate((b"x", b"y", b"x", None))
    ]
    assert await client.run_many(given, lambda body: body) == [
        Done(0), Mismatch(), Done(0, replayed=True), Done(0, replayed=True),
    ]  # fmt: skip


async def test_the_policys_fingerprint_is_taken_of_each_body(place: Place) -> None:
    client = place.open(policy=semel.Policy(fingerprint=lambda body: str(body).encode()))
    given = [Delivery(key="a", body=body) for body in (1, 2, 1)]
    assert await client.run_many(given, lambda body: body) == [Done(1), Mismatch(), Done(1, replayed=True)]
    assert await client.run("a", lambda body: body, 2) == Mismatch()
    assert await client.run_many(given[1:2], lambda body: body) == [Mismatch()]


async def test_one_failure_touches_no_other(place: Place) -> None:
    client = place.open(policy=semel.Policy(permanent=(LookupError,)))
    errors = {"b": ValueError("b"), "c": LookupError("c")}

    def handler(body: str) -> str:
        if body[0] in errors:
            raise errors[body[0]]
        return body

    outcomes = await client.run_many(deliveries("a", "b", "c", "d", "c"), handler)
    assert outcomes == [
        Done("a0"), Errored(errors["b"], 1), Failed(errors["c"]), Done("d3"), Failed(errors["c"], replayed=True),
    ]  # fmt: skip
    assert client.kept == {}


async def test_a_stored_value_that_does_not_read_touches_no_other(client: Either) -> None:
    @dataclasses.dataclass
    class Thing:
        size: int

    def make() -> Any:
        return Thing(1)

    make.__annotations__["return"] = Thing
    await client.run("bad", make)

    def count(body: str) -> int:
        return len(body)

    bad, good = await client.run_many(deliveries("bad", "good"), count)
    assert isinstance(bad, Unavailable)
    assert isinstance(bad.error, semel.errors.RecordCorrupt)
    assert good == Done(5)


async def test_one_round_trip_for_all_claims(place: Place) -> None:
    client = place.open()
    await client.run("warm", lambda: None)
    place.spy.clear()
    await client.run_many(deliveries(*(f"k{number}" for number in range(300))), lambda body: body)
    claims = [batch for batch in place.spy.batches if any(isinstance(item, Claim) for item in batch)]
    assert [len(batch) for batch in claims] == [300]


@pytest.mark.parametrize("concurrency", [1, 3])
async def test_two_thousand_deliveries(client: Either, concurrency: int) -> None:
    given = [Delivery(key=f"k{number % 1500}", body=number) for number in range(2000)]
    outcomes = await client.run_many(given, lambda body: body, concurrency=concurrency)
    assert outcomes == [Done(at % 1500, replayed=at >= 1500) for at in range(2000)]
    assert client.kept == {}


async def test_handlers_at_once_are_bounded(client: Either) -> None:
    lock, running, most = Lock(), 0, 0
    full = Event()

    def enter() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
            if running == 4:
                full.set()

    def leave() -> None:
        nonlocal running
        with lock:
            running -= 1

    def handler(_body: str) -> None:
        enter()
        assert full.wait(GUARD_S)
        leave()

    async def ahandler(_body: str) -> None:
        enter()
        await until(full.is_set)
        leave()

    given = deliveries(*(f"k{number}" for number in range(20)))
    outcomes = await client.run_many(given, handler if client.sync else ahandler, concurrency=4)
    assert outcomes == [Done(None)] * 20
    assert most == 4


async def test_completions_leave_while_later_handlers_run(client: Either, place: Place) -> None:
    def is_done(key: str) -> bool:
        record = place.record(key)
        return record is not None and record.state == "done"

    recorded = Event()

    def after(items: list[Any]) -> None:
        if any(isinstance(item, Settle) and item.id[2] == "a" for item in items):
            recorded.set()

    place.spy.after = after

    def handler(body: str) -> bool:
        return body == "a0" or (recorded.wait(GUARD_S) and is_done("a"))

    async def ahandler(body: str) -> bool:
        if body != "a0":
            await until(recorded.is_set)
        return body == "a0" or is_done("a")

    outcomes = await client.run_many(deliveries("a", "b"), handler if client.sync else ahandler)
    assert outcomes == [Done(True), Done(True)]


async def test_completions_that_gather_behind_one_under_way_leave_together(tmp_path: Path) -> None:
    """Also while the next handler runs: whoever brings the answer sends what has gathered meanwhile."""
    spy = Spy(SqliteStore(tmp_path / "semel.db", synchronous="NORMAL"))
    under_way, others_done, all_sent = Event(), Event(), Event()

    def settled(items: list[Any]) -> list[str]:
        return [item.id[2] for item in items if isinstance(item, Settle)]

    def before(items: list[Any]) -> None:
        if "first" in settled(items):
            under_way.set()
            assert others_done.wait(GUARD_S)

    def after(items: list[Any]) -> None:
        if "b" in settled(items):
            all_sent.set()

    spy.before, spy.after = before, after

    def handler(body: str) -> bool:
        if body == "a1":
            return under_way.wait(GUARD_S)
        if body == "last3":
            others_done.set()
            return all_sent.wait(GUARD_S)
        return True

    with semel.open(spy, consumer="c") as once:
        outcomes = await asyncio.to_thread(once.run_many, deliveries("first", "a", "b", "last"), handler)
    spy.close()  # the client does not own it
    assert outcomes == [Done(True)] * 4
    assert [settled(batch) for batch in spy.batches if settled(batch)] == [["first"], ["a", "b"], ["last"]]


async def test_an_event_tried_before_is_run_alone_after_the_others(client: Either, place: Place) -> None:
    claim = await client.claim("poison")
    await client.release(claim)
    order: list[tuple[str, int]] = []

    def handler(body: str) -> None:
        order.append((body, semel.current().attempt))
        if body == "poison1":
            assert all(place.record(key).state == "done" for key in "ac")  # type: ignore[union-attr]

    outcomes = await client.run_many(deliveries("a", "poison", "c"), handler)
    assert outcomes == [Done(None)] * 3
    assert order == [("a0", 1), ("c2", 1), ("poison1", 2)]


async def test_a_busy_one_is_waited_for_after_the_others_ran(client: Either) -> None:
    gate = Gate()
    owner = asyncio.create_task(client.run("held", client.held(gate)))
    await happens(gate.entered)

    def handler(body: str) -> str:
        gate.opened.set()
        return body

    outcomes = await client.run_many(deliveries("held", "free"), handler)
    assert outcomes == [Done("value", replayed=True), Done("free1")]
    await owner


async def test_many_busy_ones_wait_together(place: Place) -> None:
    client = place.open(policy=semel.Policy(wait_s=0.2))
    keys = [f"k{number}" for number in range(20)]
    await client.claim_many(keys)
    started = asyncio.get_running_loop().time()
    outcomes = await client.run_many(deliveries(*keys), lambda body: body)
    assert all(isinstance(each, Busy) for each in outcomes)
    assert asyncio.get_running_loop().time() - started < 2.0


async def test_an_outage_is_waited_out_together_not_one_after_the_other(place: Place) -> None:
    client = place.open(policy=semel.Policy(wait_s=0.2))
    await client.run("warm", lambda: None)
    place.spy.clear()
    place.spy.before = down(Claim)
    started = asyncio.get_running_loop().time()
    outcomes = await client.run_many(deliveries(*(f"k{number}" for number in range(50))), lambda body: body)
    assert all(isinstance(each, Unavailable) for each in outcomes)
    assert asyncio.get_running_loop().time() - started < 3.0
    by_key: dict[str, set[bytes]] = {}
    for item in place.spy.sent(Claim):
        by_key.setdefault(item.id[2], set()).add(item.owner)
    assert {len(owners) for owners in by_key.values()} == {1}
    assert len(place.spy.sent(Claim)) >= 100


async def test_completions_survive_an_outage_together(place: Place) -> None:
    client = place.open(lease="5s")
    await client.run("warm", lambda: None)
    left = [3]

    def before(items: list[Any]) -> None:
        if any(isinstance(item, Settle) for item in items) and left[0]:
            left[0] -= 1
            raise semel.errors.StoreUnavailable("for a moment")

    place.spy.before = before
    outcomes = await client.run_many(deliveries(*(f"k{number}" for number in range(40))), lambda _body: 1)
    assert outcomes == [Done(1)] * 40
    assert left == [0]


@pytest.mark.parametrize("concurrency", [1, 3])
async def test_an_interrupt_in_a_handler_ends_the_batch_and_gives_back_the_rest(
    client: Either, place: Place, concurrency: int
) -> None:
    ran: list[str] = []
    interrupted, pause = threading.Event(), threading.Event()

    def handler(body: str) -> None:
        ran.append(body)
        if body == "k1":
            interrupted.set()
            raise KeyboardInterrupt
        if body != "k0":  # its thread must not be done with all the rest before the other one is heard
            interrupted.wait()
            pause.wait(0.1)

    keys = [f"k{number}" for number in range(100)]
    given = [Delivery(key=key, body=key) for key in keys]
    caught: list[BaseException] = []
    try:
        await client.run_many(given, handler, concurrency=concurrency)
    except BaseException as error:  # noqa: BLE001 - a loop would be ended by it
        caught.append(error)
    assert type(caught[0]) is KeyboardInterrupt
    assert len(ran) < len(keys)
    if concurrency == 1:
        assert ran == ["k0", "k1"]

    def settled() -> bool:
        records = [place.record(key) for key in keys]
        return all(record is not None and (record.state == "done" or not record.owner) for record in records)

    await until(settled)
    attempts = {key: place.record(key).attempt for key in keys if key not in ran}  # type: ignore[union-attr]
    assert set(attempts.values()) == {0}
    assert client.kept == {}


@only_async
@pytest.mark.parametrize("concurrency", [1, 3])
async def test_cancelling_gives_back_what_has_not_started(place: Place, concurrency: int) -> None:
    client = place.open()
    started: list[str] = []

    async def handler(body: str) -> None:
        started.append(body)
        await asyncio.Event().wait()

    given = [Delivery(key=f"k{number}", body=f"k{number}") for number in range(8)]
    task = asyncio.create_task(client.inner.run_many(given, handler, concurrency=concurrency))
    await until(lambda: len(started) == concurrency)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(started) == concurrency
    await until(lambda: all(not place.record(each.key).owner for each in given))  # type: ignore[union-attr]
    assert {place.record(each.key).attempt for each in given} == {0}  # type: ignore[union-attr]
    assert client.kept == {}


@only_async
async def test_a_batch_cancelled_twice_waits_for_its_handlers(place: Place) -> None:
    client = place.open()
    entered, stubborn, ended = asyncio.Event(), asyncio.Event(), []

    async def handler(body: str) -> str:
        entered.set()
        while not stubborn.is_set():
            try:
                await stubborn.wait()
            except asyncio.CancelledError:
                ended.append("told")
        return body

    task = asyncio.create_task(client.inner.run_many(deliveries("a", "b"), handler, concurrency=2))
    await entered.wait()
    for _ in range(2):
        task.cancel()
        await until(lambda: ended)
        ended.clear()
    stubborn.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert {place.record(key).state for key in "ab"} == {"done"}  # type: ignore[union-attr]


@only_sync
async def test_a_pool_interrupted_from_outside_records_what_its_handlers_did(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    from semel.runtime.process import futures

    client = place.open()
    real, strikes = futures.wait, [KeyboardInterrupt()]

    def wait(*args: Any, **kwargs: Any) -> Any:
        if strikes:
            raise strikes.pop()
        return real(*args, **kwargs)

    monkeypatch.setattr(futures, "wait", wait)
    with pytest.raises(KeyboardInterrupt):
        client.inner.run_many(deliveries("a", "b", "c", "d"), lambda body: body, concurrency=2)
    await until(lambda: all(place.record(key).attempt == 0 for key in "cd"))  # type: ignore[union-attr]
    assert {place.record(key).state for key in "ab"} == {"done"}  # type: ignore[union-attr]
