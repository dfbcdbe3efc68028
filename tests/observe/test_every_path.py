"""Every way in counts the same: a known mixture goes through each, and the scraped counters are the truth."""

import asyncio
import sqlite3
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import semel
from semel import Delivery, GiveUp, Policy
from semel.brokers import Arrival, Runner
from semel.brokers.kafka.transactions import KafkaTransaction, Output
from semel.core.relay_flow import OutboxRow, Published, PublishRefused, Retrying
from semel.errors import PayloadMismatch
from semel.http import Rules
from semel.http.asgi import AsgiIdempotency
from semel.ingest import webhooks
from semel.ingest.sockets import Intake, Listener
from semel.ingest.webhooks import Event, Receiver
from semel.observe.prometheus import PrometheusHook
from semel.outbox import Message
from semel.outbox.relay import Relay
from semel.testing.broker_contract import Sent
from semel.testing.queue import Queue
from tests.brokers.scenes import QUICK
from tests.brokers.topics import Pipe
from tests.ingest import signed
from tests.ingest.source import source
from tests.outbox.tools import ListSink
from tests.waiting import until

NAMES = {
    "events_received": "received", "events_processed": "processed", "events_duplicate": "duplicate",
    "events_failed": "failed", "events_late": "late", "claims_lost": "lost", "dead_letters": "dead",
}  # fmt: skip
"""What is compared: the counters that every way in has in common."""
HERE = __name__
TYPE = "order.paid"


class Scraped:
    """A registry with a hook, and what a scrape of it says."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.hook = PrometheusHook(self.registry)

    @property
    def samples(self) -> list[tuple[str, dict[str, str], float]]:
        families = text_string_to_metric_families(generate_latest(self.registry).decode())
        return [
            (NAMES[family.name.removeprefix("semel_")], sample.labels, sample.value)
            for family in families
            if family.name.removeprefix("semel_") in NAMES
            for sample in family.samples
            if sample.name.endswith("_total")
        ]

    def figures(self) -> dict[str, int]:
        """The counters, by name and by reason or error."""
        found: Counter[str] = Counter()
        for name, labels, value in self.samples:
            more = labels.get("reason") or labels.get("error")
            found[f"{name} {more}" if more else name] += int(value)
        return dict(found)

    def who(self, *leaving_out: str) -> set[tuple[str, str, str, str]]:
        """Consumer, handler, event type and source, as they stand on every counter but these."""
        return {
            (labels["consumer"], labels["handler"], labels["event_type"], labels["source"])
            for name, labels, _ in self.samples
            if name not in leaving_out
        }

    def calls(self) -> int:
        """How many calls of handlers were timed."""
        families = text_string_to_metric_families(generate_latest(self.registry).decode())
        return int(
            sum(
                sample.value
                for family in families
                for sample in family.samples
                if sample.name == "semel_handler_duration_seconds_count"
            )
        )


@pytest.fixture
def scraped() -> Scraped:
    return Scraped()


failed_before: set[str] = set()


def handle(what: str) -> str:
    """The handler of the mixture: `dead` never works, `bad` works the second time."""
    if what == "dead":
        raise GiveUp("no such account")
    if what == "bad" and what not in failed_before:
        failed_before.add(what)
        raise ValueError("not yet")
    return what


@pytest.fixture(autouse=True)
def nothing_failed() -> None:
    failed_before.clear()


POLICY = Policy(event_type=TYPE, permanent=(GiveUp,), wait_s=0)
MIXTURE = ("one", "one", "two", "bad", "bad", "bad", "dead", "dead")
TRUTH = {
    "received": 8, "processed": 3, "duplicate redelivery": 3, "failed ValueError": 1, "failed GiveUp": 1,
}  # fmt: skip


def by_run(once: semel.Semel) -> None:
    for what in MIXTURE:
        once.run(what, handle, what)


def by_guard(once: semel.Semel) -> None:
    guarded = once.guard(key=lambda what: what)(handle)
    for what in MIXTURE:
        try:
            guarded(what)
        except (ValueError, GiveUp, semel.SemelError):
            continue


def by_run_many(once: semel.Semel) -> None:
    for what in MIXTURE:
        once.run_many([Delivery(key=what, body=what, event_type=TYPE)], handle)


@pytest.mark.parametrize("way", [by_run, by_guard, by_run_many])
def test_the_verbs_of_a_client(way: Callable[[semel.Semel], None], scraped: Scraped) -> None:
    with semel.open("memory:", consumer="billing", policy=POLICY, hooks=[scraped.hook]) as once:
        way(once)
    assert scraped.figures() == TRUTH
    assert scraped.who() == {("billing", f"{HERE}.handle", TYPE, "")}
    assert scraped.calls() == 5


def test_claims_that_the_caller_settles(scraped: Scraped) -> None:
    with semel.open("memory:", consumer="billing", policy=POLICY, hooks=[scraped.hook]) as once:
        for what in (*MIXTURE, "lost"):
            claim = once.claim(what)
            if not isinstance(claim, semel.Claimed):
                continue
            if what == "lost":
                once.records.forget(what, force=True)
                once.complete(claim)
                continue
            try:
                with claim:
                    handle(what)
            except (ValueError, GiveUp):
                continue
    assert scraped.figures() == {**TRUTH, "received": 9, "lost": 1}
    assert scraped.who() == {("billing", "", TYPE, "")}


def test_late_events_and_copies_in_one_batch(scraped: Scraped) -> None:
    policy = Policy(late="reject", wait_s=0)
    with semel.open("memory:", consumer="billing", policy=policy, hooks=[scraped.hook]) as once:
        fresh = [Delivery(key="one", body="one", event_type=TYPE, source="orders")] * 2
        late = Delivery(key="old", body="old", event_type=TYPE, source="orders", event_time_us=1)
        once.run_many([*fresh, late], handle)
    assert scraped.figures() == {"received": 3, "processed": 1, "duplicate race": 1, "late": 1}
    assert scraped.who() == {("billing", f"{HERE}.handle", TYPE, "orders")}


def test_an_inbox_in_the_callers_transaction(scraped: Scraped, tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    with semel.open(f"sqlite:///{path}", consumer="wallet", mode="inbox", hooks=[scraped.hook]) as once:
        connection = sqlite3.connect(path, isolation_level=None)
        for key, fingerprint in (("a", b"x"), ("a", b"x"), ("b", None)):
            connection.execute("BEGIN IMMEDIATE")
            once.inbox(connection).first(key, event_type=TYPE, fingerprint=fingerprint)
            connection.execute("COMMIT")
        connection.execute("BEGIN IMMEDIATE")
        with pytest.raises(PayloadMismatch):
            once.inbox(connection).first("a", event_type=TYPE, fingerprint=b"y")
        connection.execute("ROLLBACK")

        def fails(_deliveries: Sequence[Delivery[str]]) -> None:
            raise ValueError

        connection.execute("BEGIN IMMEDIATE")
        batch = [Delivery(key=key, body=key, event_type=TYPE) for key in ("c", "d")]
        once.inbox(connection).run_batch(batch, fails)
        connection.execute("COMMIT")
        connection.close()
    assert scraped.figures() == {
        "received": 6, "processed": 2, "duplicate redelivery": 1, "duplicate reuse": 1, "failed ValueError": 2,
    }  # fmt: skip
    assert scraped.who() == {("wallet", "", TYPE, "")}


async def on_message(message: Arrival) -> str:
    return handle(bytes(message.body).decode())


def in_transaction(_connection: Any, message: Arrival) -> str:
    what = bytes(message.body).decode()
    if what == "bad" and semel.current().attempt == 1:  # a batch that failed runs again, one by one
        raise ValueError("not yet")
    return what if what == "bad" else handle(what)


@pytest.mark.parametrize("mode", ["lease", "inbox"])
def test_a_runner(mode: Any, scraped: Scraped, tmp_path: Path) -> None:
    handler = in_transaction if mode == "inbox" else on_message
    queue = Queue()

    def send(*keys: str) -> None:
        for key in keys:
            queue.send(key.encode(), {"ce_type": TYPE, **({} if key == "keyless" else {"message_id": key})})

    async def scene() -> None:
        url, policy = f"sqlite:///{tmp_path / 'app.db'}", Policy(retry_delay_s=0.01, permanent=(GiveUp,))
        once = semel.aopen(url, consumer="billing", mode=mode, policy=policy, hooks=[scraped.hook])
        async with once:
            runner = Runner(queue.source(), handler, once=once)
            running = asyncio.create_task(runner.run())
            for keys in (("one", "one", "two", "bad", "dead", "keyless"), ("one",), ("two",)):
                send(*keys)
                await until(lambda: len(queue) == 0)
            runner.stop()
            await running

    asyncio.run(scene())
    assert scraped.figures() == {
        "received": 9, "processed": 3, "duplicate race": 1, "duplicate producer": 2, "failed ValueError": 1,
        "failed GiveUp": 1, "dead failed": 1, "dead no-key": 1,
    }  # fmt: skip
    assert scraped.who() == {("billing", f"{HERE}.{handler.__name__}", TYPE, "queue")}
    assert scraped.calls() >= 5


async def on_event(event: Event) -> str:
    return handle(event.id)


@pytest.mark.parametrize("answer", ["journaled", "synchronous"])
def test_webhooks(answer: Any, scraped: Scraped, tmp_path: Path) -> None:
    dead: list[str] = []

    async def bury(event: Event, _error: Exception) -> None:
        dead.append(event.id)

    async def scene() -> None:
        once = semel.aopen(
            f"sqlite:///{tmp_path / 'records.db'}",
            consumer="hooks",
            policy=Policy(permanent=(GiveUp,), retry_delay_s=0.0 if answer == "synchronous" else 0.01),
            hooks=[scraped.hook],
        )
        receiver = Receiver(
            once,
            webhooks.standard(signed.SECRET),
            on_event,
            answer=answer,
            now_s=lambda: signed.NOW,
            dead=bury,
        )
        transport = httpx2.ASGITransport(app=receiver)
        async with once, receiver, httpx2.AsyncClient(transport=transport, base_url="http://here") as client:
            for what in ("one", "one", "bad", *(("bad",) if answer == "synchronous" else ()), "dead"):
                await client.post("/", content=signed.BODY, headers=signed.standard(message_id=what))
                await until(lambda: receiver.intake.pending == 0)
            await until(lambda: scraped.figures().get("processed") == 2)

    asyncio.run(scene())
    both = {"processed": 2, "duplicate redelivery": 1, "failed ValueError": 1, "failed GiveUp": 1}
    # The sender repeats a synchronous one that failed; a journaled one is run again without another delivery.
    more = {"received": 5} if answer == "synchronous" else {"received": 4, "dead failed": 1}
    assert scraped.figures() == {**both, **more}
    assert dead == ([] if answer == "synchronous" else ["dead"])
    assert scraped.who() == {("hooks", f"{HERE}.on_event", TYPE, "webhook:standard")}


def heard(listener: Listener, intake: Intake, number: int) -> bool:
    counts = listener.counts  # an event is received before it is pending
    return counts.accepted + counts.duplicates == number and intake.pending == 0


def test_a_socket(scraped: Scraped, tmp_path: Path) -> None:
    async def scene() -> None:
        once = semel.aopen(
            f"sqlite:///{tmp_path / 'records.db'}",
            consumer="feed",
            policy=Policy(permanent=(GiveUp,), retry_delay_s=0.01),
            hooks=[scraped.hook],
        )
        async with source() as feed, once, Intake(once, on_event, source="websocket") as intake:
            listener = Listener(feed.url, intake)
            running = asyncio.create_task(listener.run())
            await feed.await_listeners(1)
            for number, what in enumerate(("one", "one", "bad", "dead", "dead"), 1):
                feed.send({"id": what, "type": TYPE})
                await until(partial(heard, listener, intake, number))
            await until(lambda: scraped.figures().get("processed") == 2)
            listener.stop()
            await running

    asyncio.run(scene())
    assert scraped.figures() == {
        "received": 5, "processed": 2, "duplicate redelivery": 2, "failed ValueError": 1, "failed GiveUp": 1,
    }  # fmt: skip
    assert scraped.who() == {("feed", f"{HERE}.on_event", TYPE, "websocket")}


def test_http_requests(scraped: Scraped) -> None:
    async def app(scope: Any, _receive: Any, send: Any) -> None:
        what = scope["path"].rpartition("/")[2]
        status = 500 if what == "bad1" and what not in failed_before else 201
        failed_before.add(what)
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})

    async def scene() -> None:
        once = semel.aopen("memory:", consumer="api", hooks=[scraped.hook])
        guarded = AsgiIdempotency(app, once, caller=None, rules=Rules(required=True))
        transport = httpx2.ASGITransport(app=guarded)
        async with once, httpx2.AsyncClient(transport=transport, base_url="http://here") as client:
            for what in ("ok1", "ok1", "ok2", "bad1", "bad1"):
                await client.post(f"/v1/orders/{what}", headers={"Idempotency-Key": what})

    asyncio.run(scene())
    assert scraped.figures() == {
        "received": 5, "processed": 3, "duplicate redelivery": 1, "failed ResponseFailed": 1,
    }  # fmt: skip
    assert scraped.who() == {("api", "POST /v1/orders/{id}", "", "http")}


def test_a_relay(scraped: Scraped, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'app.db'}"

    def answer(row: OutboxRow) -> Any:
        what = row.payload.strip(b'"').decode()
        if what == "dead" or (what == "bad" and what not in failed_before):
            failed_before.add(what)
            return PublishRefused("no", of_message=True)
        return Published()

    with semel.open(url, consumer="shop", mode="inbox") as once:
        connection = sqlite3.connect(tmp_path / "app.db", isolation_level=None)
        connection.execute("BEGIN IMMEDIATE")
        for what in ("one", "two", "bad", "dead"):
            once.outbox(connection).publish(Message(TYPE, what))
        connection.execute("COMMIT")
        connection.close()
    relay = Relay(
        url,
        ListSink(answer),
        poll_s=0.05,
        retrying=Retrying(attempts_max=2, first_s=0.01),
        hooks=[scraped.hook],
    )

    async def scene() -> None:
        running = asyncio.create_task(relay.arun())
        await until(lambda: relay.totals.published == 3 and relay.totals.died == 1)
        relay.stop()
        await running

    asyncio.run(scene())
    assert scraped.figures() == {
        "received": 4, "processed": 3, "failed PublishFailed": 3, "dead failed": 1,
    }  # fmt: skip
    assert scraped.who() == {("relay", "list", TYPE, "outbox")}


def test_kafka_transactions(scraped: Scraped) -> None:
    async def scene() -> None:
        pipe = await asyncio.to_thread(Pipe)
        policy = Policy(permanent=(GiveUp,), retry_delay_s=0.01, event_type=TYPE)
        once = semel.aopen(
            "memory:", consumer="billing", mode="transaction", policy=policy, hooks=[scraped.hook]
        )
        async with once, asyncio.timeout(60.0):
            transaction = KafkaTransaction(f"{pipe.url}{QUICK}", to_output, once=once, output=pipe.output)
            running = asyncio.create_task(transaction.run())
            for keys in (("one", "one", "two", "bad", "dead"), ("one",), ("two",)):
                await pipe.send([Sent(key, key.encode()) for key in keys])
                await pipe.settled()
            transaction.stop()
            await running
        await pipe.close()

    asyncio.run(scene())
    found = scraped.figures()
    races = found.pop("duplicate race", 0)  # whether the copy came in the same transaction as the first
    assert found.pop("duplicate redelivery") + races == 3
    assert found == {
        "received": 7, "processed": 3, "failed ValueError": 1, "failed GiveUp": 1, "dead failed": 1,
    }  # fmt: skip
    assert len(scraped.who()) == 1
    ((consumer, handler, _, source),) = scraped.who()
    assert (consumer, handler, bool(source)) == ("billing", f"{HERE}.to_output", True)


async def to_output(message: Arrival) -> Output:
    return Output(handle(bytes(message.body).decode()).encode())
