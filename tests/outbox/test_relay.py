"""The relay on real databases: nothing lost, order kept, dead rows stop their aggregate, deaths at every step."""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import semel
from semel import Message
from semel.core.commands import Flow, Purged
from semel.core.relay_flow import (
    NotPublished,
    Published,
    PublishRefused,
    PublishRows,
    RelayResult,
    Retrying,
    SettleRows,
    TakeRows,
    relay_step,
)
from semel.outbox.relay import Relay
from tests.outbox.tools import ListSink, Place, drain, first_order
from tests.waiting import until

pytestmark = pytest.mark.anyio

QUICK = Retrying(attempts_max=3, first_s=0.02, max_s=0.05)


class Killed(BaseException):
    """The process is gone."""


class Dying(Relay):
    """A relay that dies before or after one kind of command."""

    def __init__(self, *args: Any, at: type, after: bool, step: Any = relay_step, **more: Any) -> None:
        super().__init__(*args, **more)
        self.at, self.after, self.step = at, after, step

    async def die(self) -> None:
        """One step, with a death in it."""
        await self._open()
        await self.rows.share()

        async def perform(command: Any) -> Any:
            if isinstance(command, self.at) and not self.after:
                raise Killed
            answer = await self._perform(command)
            if isinstance(command, self.at):
                raise Killed
            return answer

        from semel.runtime.generators import adrive

        try:
            await adrive(self.step(self._retrying, ordered=self.sink.ordered), perform)
        except Killed:
            pass
        finally:
            await self._close()


def settles_first(retrying: Retrying, *, ordered: bool) -> Flow[RelayResult]:
    """Unsound on purpose: what is taken is marked as published before it is."""
    taken = yield from TakeRows()
    if taken.rows:
        yield from SettleRows([row.id for row in taken.rows], [])
        yield from PublishRows(taken.rows)
    return RelayResult(len(taken.rows), len(taken.rows))


async def lost_after_deaths(place: Place, step: Callable[..., Any]) -> set[str]:
    """Kill relays at every point, then let one live; what never arrived."""
    ids = place.orders(3, 2)
    sink = ListSink()
    for at in (TakeRows, PublishRows, SettleRows):
        for after in (False, True):
            await Dying(place.rows(), sink, at=at, after=after, step=step).die()
    await drain(place, sink)
    assert {entry.state for entry in await place.entries()} == {"published"}
    return set(ids) - set(sink.ids())


async def test_nothing_is_lost_wherever_a_relay_dies(place: Place) -> None:
    assert await lost_after_deaths(place, relay_step) == set()


async def test_a_relay_that_marks_first_is_caught(place: Place) -> None:
    assert await lost_after_deaths(place, settles_first) != set()


async def test_a_death_between_publishing_and_marking_repeats_under_the_same_ids(place: Place) -> None:
    ids = place.orders(2, 2)
    sink = ListSink(ordered=True)
    await Dying(place.rows(), sink, at=PublishRows, after=True).die()
    assert sorted(sink.ids()) == sorted(ids)
    await drain(place, sink)
    assert sorted(sink.ids()) == sorted(ids * 2)
    assert all(numbers == sorted(numbers) for numbers in first_order(sink.got).values())


@pytest.mark.parametrize("ordered", [False, True])
async def test_order_holds_per_aggregate_under_failures(place: Place, ordered: bool) -> None:
    ids = place.orders(4, 12)
    calls = 0

    def answer(row: Any) -> Any:
        nonlocal calls
        calls += 1
        return (Published(), PublishRefused("no", of_message=calls % 2 == 0), NotPublished("?"))[
            calls * 7 % 11 % 3
        ]

    sink = ListSink(answer, ordered=ordered)
    relay = Relay(
        place.rows(), sink, retrying=Retrying(attempts_max=1000, first_s=0.001, max_s=0.002), poll_s=0.01
    )
    running = asyncio.create_task(relay.arun())
    await until(lambda: len(set(sink.ids())) == len(ids), 60)
    relay.stop()
    await running
    assert calls > len(ids)
    assert set(sink.ids()) == set(ids)
    order = first_order(sink.got)
    assert len(order) == 4
    assert all(numbers == sorted(numbers) for numbers in order.values())


async def test_a_dead_row_stops_its_aggregate_alone(place: Place) -> None:
    ids = place.orders(2, 3)
    bad = ids[0]
    sink = ListSink(lambda row: PublishRefused("too odd", of_message=True) if row.id == bad else Published())

    async def has_died() -> bool:
        await drain(place, sink, retrying=QUICK)
        return any(entry.state == "dead" for entry in await place.entries())

    await until(has_died)
    assert sink.ids() == ids[1::2]
    dead, *others = [entry for entry in await place.entries() if entry.state != "published"]
    assert (dead.row.id, dead.state, dead.row.attempts, dead.error) == (bad, "dead", 3, "too odd")
    assert [(entry.row.id, entry.state) for entry in others] == [(each, "pending") for each in ids[2::2]]


async def test_a_dead_row_that_is_retried_goes_first(place: Place) -> None:
    ids = place.orders(1, 3)
    healed = False
    sink = ListSink(
        lambda row: Published() if healed or row.id != ids[0] else PublishRefused("no", of_message=True)
    )
    await drain(place, sink, retrying=Retrying(attempts_max=1))
    assert sink.ids() == []
    healed = True
    rows = place.rows()
    await rows.open()
    assert await rows.retry([ids[1]]) == 0
    assert await rows.retry(None) == 1
    await rows.close()
    await drain(place, sink)
    assert sink.ids() == ids


async def test_behind_a_dropped_row_the_others_go_on(place: Place) -> None:
    ids = place.orders(1, 3)
    sink = ListSink(lambda row: PublishRefused("no", of_message=True) if row.id == ids[0] else Published())
    await drain(place, sink, retrying=Retrying(attempts_max=1))
    rows = place.rows()
    await rows.open()
    assert await rows.drop([ids[0]]) == 1
    assert await rows.drop([ids[0]]) == 0
    await rows.close()
    await drain(place, sink)
    assert sink.ids() == ids[1:]
    assert [entry.state for entry in await place.entries()] == ["dropped", "published", "published"]


async def test_by_choice_a_dead_row_is_skipped(place: Place) -> None:
    ids = place.orders(1, 3)
    sink = ListSink(lambda row: PublishRefused("no", of_message=True) if row.id == ids[0] else Published())
    await drain(place, sink, retrying=Retrying(attempts_max=1, skip=True))
    assert sink.ids() == ids[1:]
    assert [entry.state for entry in await place.entries()] == ["dead", "published", "published"]


async def test_a_destination_that_refuses_is_left_alone(place: Place) -> None:
    place.orders(5, 2, destination="broken")
    fine = place.orders(2, 2, destination="fine")
    tried: list[str] = []

    def answer(row: Any) -> Any:
        tried.append(row.destination)
        return PublishRefused("down") if row.destination == "broken" else Published()

    sink = ListSink(answer)
    await drain(place, sink, retrying=Retrying(first_s=60.0), rows_max=3)
    assert tried.count("broken") <= 3  # one batch; then nobody asks it any more
    # Aggregates 0 and 1 have rows for both destinations, and the broken one's came first.
    assert sink.ids() == []
    assert {entry.row.attempts for entry in await place.entries() if entry.row.id in fine} == {0}


async def test_attempts_are_not_counted_while_the_broker_is_away(place: Place) -> None:
    ids = place.orders(2, 1)
    away = 5

    def answer(row: Any) -> Any:
        nonlocal away
        away -= 1
        return NotPublished("nobody there") if away > 0 else Published()

    sink = ListSink(answer)
    relay = Relay(place.rows(), sink, poll_s=0.05, retrying=Retrying(attempts_max=1))
    async with asyncio.timeout(20):
        await relay.arun(until_empty=True)
    assert set(sink.ids()) == set(ids)
    assert {entry.row.attempts for entry in await place.entries()} == {0}


async def test_a_message_waits_for_its_time_and_others_pass_it(place: Place) -> None:
    soon = datetime.now(UTC) + timedelta(seconds=0.4)
    late, now = place.write(
        Message("reminder", 1, aggregate=("order", "1"), not_before=soon),
        Message("order.moved", 2, aggregate=("order", "1")),
    )
    sink = ListSink()
    await drain(place, sink)
    assert sink.ids() == [now]
    relay = Relay(place.rows(), sink, poll_s=0.05)
    running = asyncio.create_task(relay.arun())
    await until(lambda: late in sink.ids())
    relay.stop()
    await running
    assert sink.ids() == [now, late]


async def test_a_row_is_taken_as_it_was_written(place: Place) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    (written,) = place.write(
        Message(
            "order.moved",
            b"\x00\xff",
            aggregate=("order", "ü/1"),
            destination="there",
            headers={"tenant": "ä"},
            source="/shop",
            subject="1",
            content_type="application/x-own",
            traceparent=trace,
        )
    )
    sink = ListSink()
    await drain(place, sink)
    (row,) = sink.got
    assert (row.id, row.payload, row.aggregate) == (written, b"\x00\xff", ("order", "ü/1"))
    assert (row.destination, row.headers, row.source, row.subject) == ("there", {"tenant": "ä"}, "/shop", "1")
    assert (row.content_type, row.traceparent) == ("application/x-own", trace)
    assert abs(row.created_at / 1e6 - datetime.now(UTC).timestamp()) < 60


async def test_payloads_held_at_once_are_bounded(place: Place) -> None:
    place.write(*(Message("big", b"x" * 1000) for _ in range(10)))
    rows = place.rows()
    await rows.open()
    assert await rows.share()
    assert len(await rows.take(100, 3500)) == 3
    assert len(await rows.take(100, 1)) == 1
    assert len(await rows.take(4, 10**6)) == 4
    await rows.close()


async def test_settled_rows_are_kept_as_long_as_the_longest_window(place: Place) -> None:
    place.reopen(window="20ms")
    place.orders(1, 3)
    await drain(place, ListSink(), keep="20ms")
    rows = place.rows()
    await rows.open()
    await rows.share()
    await asyncio.sleep(0.03)  # by the database's clock, which nobody moves, the 20 ms are over
    place.once.windows.set("24h")
    assert await rows.clean(100) == 0
    assert place.once.records.purge().count == 0
    place.once.windows.set("20ms")
    assert await rows.clean(1) == 1
    assert place.once.records.purge(dry_run=True).count == 2
    assert place.once.records.purge(limit=1) == Purged(1, more=True)
    assert semel.Cleaner(place.once).clean().count == 1
    await rows.close()
    assert await place.entries() == []


@pytest.mark.parametrize(("window", "keep"), [("24h", "20ms"), ("20ms", "24h")])
async def test_settled_rows_are_kept_as_long_as_their_writer_remembers(
    place: Place, window: str, keep: str
) -> None:
    """A handler that runs again has to find the row of its first attempt; `keep` may be longer."""
    place.reopen(window=window)
    place.orders(1, 2)
    await drain(place, ListSink(), keep=keep)
    await asyncio.sleep(0.03)  # by the database's clock, which nobody moves, the 20 ms are over
    rows = place.rows()
    await rows.open()
    await rows.share()
    assert await rows.clean(100) == 0
    assert place.once.records.purge().count == 0
    await rows.close()
    assert len(await place.entries()) == 2


async def test_a_relay_waits_for_messages_and_stops_when_told(place: Place) -> None:
    sink, rows = ListSink(), place.rows()
    wait, waits = rows.wait, asyncio.Event()

    async def told(wait_s: float) -> None:
        waits.set()
        await wait(wait_s)

    rows.wait = told  # type: ignore[method-assign]
    relay = Relay(rows, sink, poll_s=30.0)  # only a wake-up is in time
    running = asyncio.create_task(relay.arun())
    await asyncio.wait_for(waits.wait(), 10)
    (written,) = await asyncio.to_thread(place.orders, 1, 1)
    await until(lambda: bool(sink.got), 10)
    relay.stop()
    totals = await asyncio.wait_for(running, 10)
    assert sink.ids() == [written]
    assert totals.published == 1


async def test_stopping_waits_for_the_broker_and_marks_what_it_confirmed(place: Place) -> None:
    ids = place.orders(1, 2)
    given, go = asyncio.Event(), asyncio.Event()

    class Slow(ListSink):
        async def publish(self, rows: Any, /) -> Any:
            given.set()
            await go.wait()
            return await super().publish(rows)

    sink = Slow()
    relay = Relay(place.rows(), sink)
    running = asyncio.create_task(relay.arun())
    await asyncio.wait_for(given.wait(), 10)
    relay.stop()
    ended, _ = await asyncio.wait({running}, timeout=0.05)  # one that does not wait would have ended
    assert not ended
    go.set()
    await asyncio.wait_for(running, 10)
    assert sink.ids() == ids[:1]  # the second was still to be handed over
    assert [entry.state for entry in await place.entries()] == ["published", "pending"]


def test_run_blocks_and_many_relays_share_the_work(place: Place) -> None:
    ids = place.orders(8, 5)
    sink = ListSink()
    totals = Relay(place.url, sink, poll_s=0.05).run(until_empty=True)
    assert totals.published == 40
    assert set(sink.ids()) == set(ids)


async def test_each_failed_attempt_is_a_line_that_says_what_happens_next(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    (bad,) = place.write(Message("order.moved", {"n": 1}))
    sink = ListSink(lambda row: PublishRefused("no such\ntopic", of_message=True))
    relay = Relay(place.rows(), sink, poll_s=0.02, retrying=Retrying(attempts_max=2, first_s=0.02))
    running = asyncio.ensure_future(relay.arun())
    await until(lambda: relay.totals.died == 1)
    relay.stop()
    await running
    first, last = (record for record in caplog.records if hasattr(record, "event"))
    told: dict[str, Any] = vars(first)["semel"]
    assert (vars(first)["event"], told["key"], told["attempt"]) == ("failed", bad, 1)
    assert told["next"].startswith("again in ")
    assert told["error"] == r"'no such\ntopic'"
    assert "\n" not in first.getMessage()
    told = vars(last)["semel"]
    assert (vars(last)["event"], told["key"], told["attempt"]) == ("dead_letter", bad, 2)
    assert "semel outbox retry" in told["next"]
    assert "is dead after 2 attempts: 'no such" in last.getMessage()
