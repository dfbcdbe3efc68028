"""The other modes: observe, mark, inbox, journal, and that a consumer has one."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import semel
from semel import Busy, Delivery, Done, Errored, Failed
from semel.core.commands import Count, Mark
from tests.client.clients import Place, down, only_async, only_sqlite
from tests.waiting import until

pytestmark = pytest.mark.anyio


async def test_a_consumer_has_one_mode(place: Place) -> None:
    await place.open().run("k", lambda: 1)
    with pytest.raises(semel.errors.ModeMismatch, match="'lease'"):
        await place.open(mode="quarantine").run("k", lambda: 1)
    await place.open(mode="quarantine", consumer="other").run("k", lambda: 1)


async def test_verbs_of_another_mode_are_refused(place: Place) -> None:
    lease, mark = place.open(), place.open(consumer="m", mode="mark")
    with pytest.raises(semel.errors.ModeMismatch):
        await lease.mark("k")
    with pytest.raises(semel.errors.ModeMismatch):
        await mark.claim("k")
    if lease.sync:
        with pytest.raises(semel.errors.ModeMismatch):
            lease.inner.inbox(None)


# --- observe ---


async def test_observe_counts_and_suppresses_nothing(place: Place) -> None:
    client = place.open(mode="observe")
    calls: list[int] = []

    def handler(number: int) -> int:
        calls.append(number)
        return number

    for number in range(3):
        outcome = await client.run("k", handler, number)
        assert isinstance(outcome, Done)
        assert (outcome.value, outcome.replayed) == (number, False)
    assert calls == [0, 1, 2]
    assert (client.inner.observed.runs, client.inner.observed.duplicates) == (3, 2)


async def test_observe_runs_every_copy_of_a_batch(place: Place) -> None:
    client = place.open(mode="observe")
    calls: list[int] = []

    def handler(body: int) -> int:
        calls.append(body)
        return body

    outcomes = await client.run_many([Delivery(key="k", body=at) for at in range(4)], handler)
    assert [outcome.value for outcome in outcomes] == [0, 1, 2, 3]
    assert sorted(calls) == [0, 1, 2, 3]
    assert client.inner.observed.duplicates == 3


async def test_observe_shows_errors_as_they_are(place: Place) -> None:
    client = place.open(mode="observe")
    error = ValueError()

    def handler() -> None:
        raise error

    assert await client.run("k", handler) == Errored(error, 1)


# --- mark ---


async def test_a_mark_is_true_once(place: Place) -> None:
    client = place.open(mode="mark")
    assert [await client.mark("k") for _ in range(3)] == [True, False, False]
    assert await client.mark_many(["a", "k", "a", "b"]) == [True, False, False, True]
    assert await client.mark_many([]) == []


async def test_a_mark_is_over_with_its_window(place: Place) -> None:
    client = place.open(mode="mark", window="40s")
    assert await client.mark("k")
    assert not await client.mark("k")
    place.clock.skip(40)
    assert await client.mark("k")


async def test_a_mark_without_an_answer_is_not_guessed_at(place: Place) -> None:
    client = place.open(mode="mark")
    await client.mark("warm")
    place.spy.before = down(Mark)
    with pytest.raises(semel.errors.StoreUncertain):
        await client.mark_many(["k", "l"])
    assert len([batch for batch in place.spy.batches if any(isinstance(item, Mark) for item in batch)]) == 2


async def test_run_marks_first_and_runs_at_most_once(place: Place) -> None:
    client = place.open(mode="mark")
    error = ValueError()

    def handler() -> None:
        raise error

    assert await client.run("k", handler) == Errored(error, 1)
    assert await client.run("k", lambda: 1) == Done(None, replayed=True, kept=False)
    outcomes = await client.run_many([Delivery(key=key, body=key) for key in "aba"], lambda body: body)
    assert [outcome.replayed for outcome in outcomes] == [False, False, True]


async def test_concurrent_marks_have_one_winner(place: Place) -> None:
    client = place.open(mode="mark")
    firsts = await asyncio.gather(*(client.mark("k") for _ in range(40)))
    assert sorted(firsts) == [False] * 39 + [True]


# --- journal ---


async def test_a_journal_needs_a_store_that_lasts(place: Place) -> None:
    client = place.open()
    if place.kind.store == "sqlite":
        claim = await client.claim("k", journal={"a": (1,)})
        assert claim.journal == {"a": (1,)}
        busy = await client.claim("k")
        assert isinstance(busy, Busy)
        assert busy.recoverable
        return
    with pytest.raises(semel.errors.UsageError, match="forgets"):
        await client.claim("k", journal={"a": 1})
    with pytest.raises(semel.errors.UsageError):
        await client.run_many([Delivery(key="k", body=1, journal=b"x")], lambda body: body)


@only_sqlite
async def test_journaled_claims_of_the_dead_are_taken_over(place: Place) -> None:
    client = place.open(lease="50ms", policy=semel.Policy(lease_s=0.05))
    await client.claim_many([Delivery(key=f"k{at}", body=at, journal={"at": at}) for at in range(3)])
    await client.claim("plain")
    patient = client.using(lease_s=5)
    seen: list[Any] = []
    outcomes: list[Any] = []

    def handler(payload: Any) -> Any:
        seen.append((payload, semel.current().attempt))
        return payload

    while len(outcomes) < 3:
        outcomes += await patient.sweep(handler)
    assert sorted(outcome.value["at"] for outcome in outcomes) == [0, 1, 2]
    assert sorted(seen, key=str) == [({"at": at}, 2) for at in range(3)]
    assert await patient.sweep(handler) == []


@only_sqlite
async def test_an_interrupt_ends_the_sweep(place: Place) -> None:
    client = place.open(lease="50ms")
    await client.claim_many([Delivery(key=f"k{at}", body=at, journal=at) for at in range(3)])
    now = place.record("k2").lease_until_us  # type: ignore[union-attr]
    await until(lambda: place.spy._store.send([Count()])[0].now_us > now)
    ran: list[int] = []

    def handler(payload: int) -> None:
        ran.append(payload)
        raise KeyboardInterrupt

    caught: list[BaseException] = []
    try:
        await client.using(lease_s=5).sweep(handler)
    except BaseException as raised:  # noqa: BLE001 - a loop would be ended by it
        caught.append(raised)
    assert type(caught[0]) is KeyboardInterrupt
    assert len(ran) == 1
    assert client.kept == {}


# --- inbox ---


def test_mark_and_effect_commit_together_or_neither(tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    once = semel.open(f"sqlite:///{path}", consumer="wallet", mode="inbox")
    with once, closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE wallet (balance INTEGER)")
        connection.execute("INSERT INTO wallet VALUES (0)")
        connection.commit()

        def credit(*, fails: bool) -> bool:
            with connection:
                connection.execute("BEGIN IMMEDIATE")
                first: bool = once.inbox(connection).first("evt_1")
                if first:
                    connection.execute("UPDATE wallet SET balance = balance + 1")
                if fails:
                    raise LookupError
                return first

        with pytest.raises(LookupError):
            credit(fails=True)
        assert [credit(fails=False) for _ in range(3)] == [True, False, False]
        assert connection.execute("SELECT balance FROM wallet").fetchone() == (1,)


async def test_an_inbox_needs_a_store_that_transactions_reach(place: Place) -> None:
    if place.kind.store == "sqlite":
        assert place.open(consumer="w", mode="inbox").inner.mode == "inbox"
        return
    with pytest.raises(semel.errors.PolicyInvalid, match="inbox"):
        place.open(mode="inbox")


async def test_a_failed_one_is_told_to_every_copy(place: Place) -> None:
    client = place.open(policy=semel.Policy(permanent=(LookupError,)))

    def handler(_body: Any) -> None:
        raise LookupError

    outcomes = await client.run_many([Delivery(key="k", body=at) for at in range(2)], handler)
    assert [(type(outcome), outcome.replayed) for outcome in outcomes] == [(Failed, False), (Failed, True)]


@pytest.mark.parametrize("mode", ["observe", "mark"])
async def test_a_handler_without_a_claim_can_still_ask_who_it_is(place: Place, mode: semel.Mode) -> None:
    client = place.open(mode=mode)
    seen: list[tuple[str, int, str]] = []

    def handler() -> None:
        context = semel.current()
        seen.append((context.key, context.attempt, context.idempotency_key))
        if client.sync:
            assert semel.step("note", str, 7) == "7"

    await client.run("k", handler)
    await client.run("k", handler)
    assert len(seen) == (2 if mode == "observe" else 1)
    assert len(set(seen)) == 1


@only_async
async def test_with_instead_of_async_with_is_an_error_and_not_a_lost_claim(place: Place) -> None:
    client = place.open()
    claim = await client.claim("k")
    with pytest.raises(TypeError, match="async with"), claim:
        pass
    async with claim:
        pass
    assert place.record("k").state == "done"  # type: ignore[union-attr]
