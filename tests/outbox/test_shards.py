"""PostgreSQL: many relays, whole aggregates to each, late commits, sessions that die."""

import asyncio
import signal
import sys
from typing import Any

import psycopg
import pytest

from semel import Message
from semel.core.relay_flow import OutboxRow, Published
from semel.outbox.postgres import SHARDS, PostgresRows
from semel.outbox.relay import Relay
from semel.outbox.sinks import sink_for
from semel.stores.postgres import from_url
from tests.cli.shell import ROOT, environment
from tests.outbox.brokers import Redis
from tests.outbox.tools import ListSink, Place, drain, first_order
from tests.services import postgres
from tests.waiting import until

pytestmark = pytest.mark.anyio


async def opened(place: Place) -> PostgresRows:
    rows = PostgresRows(from_url(place.url))
    await rows.open()
    return rows


async def test_relays_share_the_shards_and_inherit_them(postgres_place: Place) -> None:
    first = await opened(postgres_place)
    await first.share()
    assert len(first._shards) == SHARDS
    second, third = await opened(postgres_place), await opened(postgres_place)
    relays = [first, second, third]
    for _ in range(3):
        for each in relays:
            await each.share()
    owned = [each._shards for each in relays]
    assert sorted(map(len, owned)) == [20, 22, 22]
    assert set().union(*owned) == set(range(SHARDS))
    await second.close()

    async def have_inherited() -> bool:
        """The server gives locks back when the session has ended there, shortly after the close."""
        for each in (first, third):
            await each.share()
        return [len(first._shards), len(third._shards)] == [32, 32]

    await until(have_inherited)
    await first.close()
    await third.close()


async def test_an_aggregate_has_one_shard_and_others_are_spread(postgres_place: Place) -> None:
    postgres_place.orders(200, 2)
    postgres_place.write(*(Message("loose") for _ in range(100)))
    where = f"{postgres_place.schema}.outbox"
    spread = postgres.execute(
        postgres_place.url,
        f"SELECT count(DISTINCT shard)::int, min(shard)::int, max(shard)::int FROM {where}"
        f" UNION ALL SELECT max(n)::int, 0, 0 FROM (SELECT count(DISTINCT shard) AS n FROM {where}"
        " WHERE aggregate_id IS NOT NULL GROUP BY aggregate_id) AS each",
    )
    assert spread[0][0] > 48
    assert spread[0][1] >= 0
    assert spread[0][2] < SHARDS
    assert spread[1][0] == 1


async def test_several_relays_keep_order_while_they_come_and_go(postgres_place: Place) -> None:
    ids = postgres_place.orders(20, 10)
    arrived: list[OutboxRow] = []

    class Shared(ListSink):
        async def publish(self, rows: Any, /) -> Any:
            await asyncio.sleep(0.002)  # so that the others come into the middle of it
            arrived.extend(rows)
            return [Published()] * len(rows)

    relays = [Relay(postgres_place.rows(), Shared(ordered=True), rows_max=7, poll_s=0.02) for _ in range(4)]
    tasks = [asyncio.create_task(relay.arun()) for relay in relays]
    await until(lambda: len({row.id for row in arrived}) >= len(ids) // 2)
    relays[0].stop()  # in an orderly way
    rows = relays[1].rows
    assert isinstance(rows, PostgresRows)
    pid = rows._connect().info.backend_pid  # and without a word
    postgres.execute(postgres_place.url, f"SELECT pg_terminate_backend({pid})")
    await until(lambda: len({row.id for row in arrived}) == len(ids), 60)
    for relay in relays:
        relay.stop()
    await asyncio.wait_for(asyncio.gather(*tasks), 30)
    assert {row.id for row in arrived} == set(ids)
    assert all(numbers == sorted(numbers) for numbers in first_order(arrived).values())


class Cursor(PostgresRows):
    """Unsound on purpose: it remembers how far it came, and looks only at what is behind that."""

    seen = 0

    async def take(self, rows_max: int, bytes_max: int) -> list[OutboxRow]:
        rows = [row for row in await super().take(rows_max, bytes_max) if row.seq > self.seen]
        self.seen = max([self.seen, *(row.seq for row in rows)])
        return rows


async def missed_of_late_commits(place: Place, rows: PostgresRows) -> set[str]:
    """A transaction takes its number early and commits after another; what never arrived."""
    late, other = place.connect(), place.connect()
    ids = {place.once.outbox(late).publish(Message("late"))}
    ids.add(place.once.outbox(other).publish(Message("early")))
    other.commit()
    sink = ListSink()
    relay = Relay(rows, sink, poll_s=0.02)
    running = asyncio.create_task(relay.arun())
    await until(lambda: bool(sink.got))
    late.commit()
    ids |= set(await asyncio.to_thread(place.orders, 1, 1))
    await until(lambda: any(row.event_type == "order.moved" for row in sink.got))
    await asyncio.sleep(0.1)  # five more looks of a relay that would never find it
    relay.stop()
    await running
    late.close()
    other.close()
    return ids - set(sink.ids())


async def test_a_late_commit_is_not_skipped(postgres_place: Place) -> None:
    rows = PostgresRows(from_url(postgres_place.url))
    assert await missed_of_late_commits(postgres_place, rows) == set()


async def test_a_relay_with_a_cursor_is_caught(postgres_place: Place) -> None:
    rows = Cursor(from_url(postgres_place.url))
    assert await missed_of_late_commits(postgres_place, rows) != set()


async def test_only_idle_relays_are_told(postgres_place: Place) -> None:
    channel = f"semel_outbox_{postgres_place.schema}"
    with psycopg.connect(postgres_place.url.partition("?")[0], autocommit=True) as listener:
        listener.execute(f'LISTEN "{channel}"')
        postgres_place.orders(1, 1)
        assert list(listener.notifies(timeout=0.1)) == []
        rows = await opened(postgres_place)
        await rows.share()
        await rows.wait(0.01)
        postgres_place.orders(1, 1)
        assert len(list(listener.notifies(timeout=5, stop_after=1))) == 1
        await rows.close()
        postgres_place.orders(1, 1)
        assert list(listener.notifies(timeout=0.1)) == []


async def test_what_is_written_by_hand_is_published(postgres_place: Place) -> None:
    postgres.execute(
        postgres_place.url,
        f"INSERT INTO {postgres_place.schema}.outbox (id, event_type, source, payload)"
        " VALUES (gen_random_uuid(), 'made.by.hand', '/psql', '{\"a\": 1}')",
    )
    sink = ListSink()
    await drain(postgres_place, sink)
    assert [(row.event_type, row.payload) for row in sink.got] == [("made.by.hand", b'{"a": 1}')]


@pytest.mark.slow
async def test_a_relay_that_is_stopped_is_replaced_and_reorders_nothing_when_it_comes_back(
    postgres_place: Place,
) -> None:
    ids = postgres_place.orders(3, 20)
    broker = Redis()
    sink = f"{broker.url}?stream={broker.where}"
    stopped = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.outbox.slow_relay", postgres_place.url, sink, "1.0",
        cwd=ROOT, env=environment(PYTHONPATH=f"{ROOT / 'src'}:{ROOT}"),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert stopped.stdout is not None
    assert stopped.stdin is not None
    try:
        assert await stopped.stdout.readline() == b"here\n"
        stopped.send_signal(signal.SIGSTOP)
        other = Relay(postgres_place.rows(), sink_for(sink), rows_max=5, poll_s=0.05)
        running = asyncio.create_task(other.arun())
        await until(
            lambda: other.totals.published >= 10
        )  # the server has ended the session of the one that hangs
        stopped.stdin.write(b"\n")
        stopped.send_signal(signal.SIGCONT)  # it goes on with rows that have long been another's
        await until(lambda: other.totals.published >= len(ids) - 7 - 7, 60)
        more = await asyncio.to_thread(postgres_place.orders, 3, 5)
        arrived = await arrivals(broker, len(ids) + len(more))
        other.stop()
        await running
    finally:
        stopped.send_signal(signal.SIGTERM)
        await stopped.communicate()
    assert stopped.returncode == 0
    order = {each: number for number, each in enumerate([*ids, *more])}
    firsts = list(dict.fromkeys(arrived))
    assert set(firsts) == set(order)
    assert len(arrived) > len(firsts)  # it did come back with old rows
    for aggregate in range(3):
        numbers = [order[each] for each in firsts if order[each] % 3 == aggregate]
        assert numbers == sorted(numbers)


async def arrivals(broker: Any, count: int) -> list[str]:
    """The ids in a stream, once it has so many different ones."""
    found: list[str] = []

    async def all_there() -> bool:
        found[:] = [each.key for each in await broker.read(0)]
        return len(set(found)) >= count

    await until(all_there)
    return found


async def test_a_session_that_falls_silent_is_ended_by_the_server(postgres_place: Place) -> None:
    rows = await opened(postgres_place)
    ((silent,),) = await rows._ask("SHOW idle_session_timeout")
    await rows.close()
    assert silent == "1min"


async def test_a_pooler_is_refused(postgres_place: Place) -> None:
    from semel.errors import StoreRefused

    with pytest.raises(StoreRefused, match="pooler"):
        await PostgresRows(from_url(f"{postgres_place.url}&pooler=true")).open()


async def test_rows_behind_a_dead_one_cost_an_index_lookup(postgres_place: Place) -> None:
    """Taking uses the partial indexes, also on a table whose statistics are stale."""
    postgres_place.orders(5, 4)
    rows = await opened(postgres_place)
    await rows.share()
    from semel.outbox import postgres as module

    text = "EXPLAIN " + module._TAKE.replace("{t}", module._T, 1)
    plan = await rows._ask(
        text,
        columns=module._SELECTED,
        shards=list(range(SHARDS)),
        rows=500,
        bytes=10**6,
    )
    drawn = "\n".join(line for (line,) in plan)
    await rows.close()
    assert "outbox_unsettled" in drawn
    assert "outbox_stopped" in drawn
    assert "Seq Scan" not in drawn
