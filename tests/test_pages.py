"""The Python blocks of the pages run as printed, in order, on real servers: only the addresses differ.

Names that a block takes as given (a handler, a bank, a connection) are made here. A block that runs until it is
stopped is stopped when what it is to do has been done.
"""

import ast
import asyncio
import inspect
import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import uuid4

import pytest
from prometheus_client import REGISTRY

from semel.client.client import Semel
from semel.client.client_async import AsyncSemel
from tests.services import kafka, postgres, redis
from tests.waiting import until

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
ELSEWHERE = {
    "README.md",
    "docs/howto/chaos.md",
    "docs/howto/come-from.md",
    "docs/howto/existing-data.md",
    "docs/howto/write-a-store.md",
    "docs/reference/python.md",
    "docs/tutorial/first-steps.md",
}
"""`test_tutorial.py`, `test_guides.py`, `tests/chaos` and `tests/contract` run these; the reference runs nothing."""
A_URL = "import semel; url = 'sqlite:///events.db'"

GIVEN: dict[str, dict[int, str]] = {
    "docs/howto/agents.md": {
        3: """
import asyncio
async def twice(): return [await answer_ticket("t-1") for _ in range(2)]
assert await twice() == ["refunded 500 for o-1"] * 2
await once.close()
""",
    },
    "docs/howto/change-stores.md": {
        2: "assert once.run('evt_1', lambda: 'again').replayed; once.close(); store.close()",
    },
    "docs/howto/celery.md": {
        2: "assert charge.apply(('o-1',)).get() == charge.apply(('o-1',)).get() == 'charged o-1'",
        5: "assert job('o-1') == job('o-1') == 'refunded o-1'",
        7: """
async def twice(): return [await send_job({}, "o-1") for _ in range(2)]
assert await twice() == ["sent o-1"] * 2
class Instance: task_id, map_index = "pay", -1
assert airflow_task("o-1", "run-1", Instance()) == airflow_task("o-1", "run-1", Instance()) == "paid o-1"
await jobs.close()
await queue.shutdown()
broker.close(); app.close(); once.close()
""",
    },
    "docs/howto/choose-a-key.md": {},
    "docs/howto/consume.md": {
        2: """
import psycopg
async def credit(connection: psycopg.AsyncConnection, paid: dict) -> None: done.append(("credit", paid))
async def count(paid: dict) -> None: done.append(("count", paid))
def is_done(): return len(done) == 2
import semel
with semel.producer("kafka://localhost:9092?topic=orders", source="shop") as sending:
    sending.send(semel.Message("order.paid", {"n": 1}))
    sending.send(semel.Message("order.sent", {"n": 2}))
""",
        4: "once = semel.aopen('memory:', consumer='c')",
    },
    "docs/howto/dashboard.md": {1: A_URL},
    "docs/howto/dedup.md": {
        1: """
import semel
from confluent_kafka.cimpl import NewTopic
from tests.services import kafka
[made.result() for made in kafka.admin().create_topics([NewTopic("orders.invoices", 1, 1)]).values()]
with semel.producer("kafka://localhost:9092?topic=orders", source="shop") as sending:
    sending.send(semel.Message("order.paid", {"id": "o-1"}))
    sending.send(semel.Message("order.paid", {"id": "o-1"}))
def finished(): return dedup.counts.received == 2
def invoice(order): return order.upper()
""",
        2: "assert (dedup.counts.passed, dedup.counts.duplicates) == (1, 1)",
    },
    "docs/howto/django-and-flask.md": {
        2: """
from tests.django_connections import connection_to
connection_to("page", {"ENGINE": "django.db.backends.dummy"})
""",
        4: "assert app.extensions['semel'].mode == 'lease'",
    },
    "docs/howto/http.md": {
        2: """
from flask import Flask
from django.core.wsgi import get_wsgi_application
from tests.django_connections import connection_to
connection_to("page", {"ENGINE": "django.db.backends.dummy"})
app = Flask("shop")
""",
        3: """
from fastapi import APIRouter, Depends
from semel.asgi import by_authorization
once = semel.aopen("memory:", consumer="shop-api")
""",
    },
    "docs/howto/inbox.md": {
        2: """
from sqlalchemy import create_engine, orm
from sqlalchemy.orm import Session
connection = psycopg.connect("postgresql://localhost/app")
connection.execute("CREATE TABLE wallet (id int PRIMARY KEY, balance int)")
connection.execute("CREATE TABLE payment (id serial PRIMARY KEY)")
connection.execute("INSERT INTO wallet VALUES (1, 0)")
connection.commit()
def balance(): return connection.execute("SELECT balance FROM wallet").fetchone()[0]
for _ in range(2):
    on_payment(connection, "evt_0", 7)
connection.commit()
assert balance() == 7
connection.commit()
engine = create_engine("postgresql://localhost/app".replace("postgresql", "postgresql+psycopg"))
class Base(orm.DeclarativeBase): ...
class Payment(Base):
    __tablename__ = "payment"
    id: orm.Mapped[int] = orm.mapped_column(primary_key=True)
    def __init__(self, *_): ...
event_id, amount, order = "evt_1", 5, {}
""",
        3: """
assert connection.execute("SELECT count(*) FROM payment").fetchone() == (1,)
connection.commit()
engine.dispose()
from urllib.parse import urlsplit
from django.db import models, transaction
from django.db.models import F
from tests import django_connections
own, parts = connection, urlsplit("postgresql://localhost/app")
connection = django_connections.connection_to("inbox_page", {
    "ENGINE": "django.db.backends.postgresql", "NAME": parts.path[1:], "HOST": parts.hostname, "PORT": parts.port,
    "USER": parts.username})
transaction.atomic = __import__("functools").partial(transaction.atomic, using="inbox_page")
class DjangoWallet(models.Model):
    balance = models.IntegerField()
    class Meta:
        app_label, db_table = "page", "wallet"
class Wallet: objects = DjangoWallet.objects.using("inbox_page")
event_id = "evt_2"
""",
        4: """
transaction.atomic = transaction.atomic.func
django_connections.forget(connection)
connection = own
assert balance() == 12
connection.commit()
def credit(connection): connection.execute("UPDATE wallet SET balance = balance + 100")
event_id = "evt_3"
""",
        5: """
assert balance() == 112
connection.commit()
from semel import Delivery
deliveries = [Delivery(key=key, body=key) for key in "aba"]
def credit_all(new): done.append([each.key for each in new])
""",
        6: """
assert done == [["a", "b"]]
assert [each.replayed for each in outcomes] == [False, False, True]
def charge(connection, order): return "receipt"
event_id = "evt_4"
""",
        7: "event_id = 'evt_5'",
        8: "connection.rollback(); assert balance() == 212; connection.close(); wallet.close()",
    },
    "docs/howto/kafka-transactions.md": {
        2: """
import semel
from semel.brokers.kafka.transactions import KafkaTransaction
with semel.producer("kafka://localhost:9092?topic=orders", source="shop") as sending:
    sending.send(semel.Message("order.paid", "quiet"))
def is_done(): return "transaction" in globals() and transaction.counts.acked > 0
""",
    },
    "docs/howto/observe.md": {1: A_URL},
    "docs/howto/operate.md": {
        1: A_URL + "; import re",
        2: """
def fail(): raise ValueError("card 4242 refused")
for client, kept in ((once, ["card **** refused"]), (silent, [])):
    client.run(f"evt_{len(kept)}", fail)
    assert [each.message for each in client.records.lookup(f"evt_{len(kept)}").errors] == kept
    client.close()
""",
    },
    "docs/howto/outbox.md": {
        1: """
import psycopg
with psycopg.connect("postgresql://localhost/shop") as made:
    made.execute("CREATE TABLE orders (number int, cents int)")
""",
        2: """
once = semel.open("postgresql://localhost/shop", consumer="wallet")
connection = psycopg.connect("postgresql://localhost/shop")
""",
        3: """
on_payment({"id": "evt_1"})
connection.close()
from redis import Redis
def is_done(): return Redis.from_url("redis://localhost/0").xlen("orders") == 3
""",
    },
    "docs/howto/retention.md": {
        1: "import semel; url = 'postgresql://localhost/app'; serve = lambda: None",
        2: "async def serve(): done.append(1)",
        3: "assert done == [1]",
    },
    "docs/howto/serve.md": {1: "import semel"},
    "docs/howto/test-your-handlers.md": {3: "once = semel.open(MemoryStore(clock=clock), consumer='billing')"},
    "docs/howto/tiers.md": {2: "store.close()", 3: "store.close()"},
    "docs/howto/unknown-outcomes.md": {
        1: """
from dataclasses import dataclass
@dataclass
class Order: id: str
@dataclass
class Receipt: id: str
class bank:
    Unreachable = OSError
    made = {}
    def charge(order, reference):
        bank.made[reference] = Receipt(order.id)
        raise OSError("the answer was lost")
    def find(reference): return bank.made.get(reference)
""",
        2: """
assert isinstance(charge.call(Order("o-1")), semel.Errored)
assert charge(Order("o-1")) == Receipt("o-1") and len(bank.made) == 1
once.close()
""",
    },
    "docs/howto/webhooks.md": {1: "import os; os.environ['STRIPE_SECRET'] = 'whsec_' + 'a' * 32"},
    "docs/howto/websockets.md": {
        1: """
import semel
from contextlib import asynccontextmanager
from websockets.asyncio.server import serve
async def feed(socket):
    await socket.send('{"id": "evt-1", "type": "measured"}')
    await socket.wait_closed()
source = await serve(feed, "127.0.0.1", 0)
FEED = f"ws://127.0.0.1:{source.sockets[0].getsockname()[1]}"
async def handle(event): done.append(event.id)
def is_known(scope): return True
def is_done(): return done == ["evt-1"]
""",
        2: "source.close(); await source.wait_closed()",
    },
    "docs/reference/events.md": {1: A_URL},
    "docs/reference/keys.md": {},
    "docs/reference/metrics.md": {1: A_URL},
    "docs/reference/stores/bloom.md": {},
    "docs/reference/stores/postgres.md": {},
    "docs/reference/stores/redis.md": {},
    "docs/reference/stores/sqlite.md": {},
}  # fmt: skip
"""By page and block, counted from 1: the code that makes what the block takes as given. Code of a number behind the
last one looks at what has happened. `is_done` is for a block that does not end by itself, and `done` is a list."""


def test_every_page_with_python_is_run() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")]
    found = {str(page.relative_to(ROOT)) for page in pages if BLOCK.search(page.read_text(encoding="utf-8"))}
    assert found == GIVEN.keys() | ELSEWHERE


@pytest.mark.slow
@pytest.mark.service
@pytest.mark.parametrize("page", GIVEN)
def test_the_blocks_of_a_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "page", ModuleType("page"))  # Taskiq puts tasks into their module
    for name in ("STRIPE_SECRET", "DJANGO_SETTINGS_MODULE"):
        monkeypatch.setenv(name, "")  # so that it is as before in the end
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = dict(enumerate(BLOCK.findall(text), 1))
    given = GIVEN[page]
    put_real_addresses = addresses("\n".join([*blocks.values(), *given.values()]))
    for collector in list(REGISTRY._collector_to_names):  # of another page
        REGISTRY.unregister(collector)
    numbers = sorted(blocks.keys() | given.keys())
    asyncio.run(
        run_blocks(
            [(put_real_addresses(given.get(n, "")), put_real_addresses(blocks.get(n, ""))) for n in numbers]
        )
    )


def addresses(text: str) -> Callable[[str], str]:
    """What puts the addresses of real servers, with a place of the page's own, in the place of the page's."""
    own = uuid4().hex[:12]
    real: list[tuple[str, str]] = []
    if "postgresql://" in text:
        postgres.execute(postgres.url(), f"CREATE DATABASE page_{own}")
        real.append((r"postgresql://[\w.@]+/(app|shop)", f"{postgres.url().rpartition('/')[0]}/page_{own}"))
    if "redis://" in text:
        real.append((r"redis://[\w.]+(:6379)?/0", redis.place(own).partition("?")[0]))
    if "kafka://" in text:
        from confluent_kafka.cimpl import NewTopic

        topics = [NewTopic(f"o{own}{suffix}", 1, 1) for suffix in ("", ".loud", ".marks", ".dead")]
        for made in kafka.admin().create_topics(topics).values():
            made.result()
        real += [(r"localhost:9092", kafka.servers()), (r"\borders\b", f"o{own}")]
    real.append((r'"wss://source.example/feed"', "FEED"))

    def put(code: str) -> str:
        for pattern, address in real:
            code = re.sub(pattern, address, code)
        return code

    return put


async def run_blocks(parts: list[tuple[str, str]]) -> None:
    names: dict[str, Any] = {"__name__": "page", "done": []}
    with ThreadPoolExecutor(1) as thread:
        for given, block in parts:
            names.pop("is_done", None)
            await run_code(given, names, thread)
            running = asyncio.ensure_future(run_code(block, names, thread))
            if "is_done" in names:
                try:
                    await until(partial(has_ended, running, names["is_done"]))
                finally:
                    stop(running, names)
            with suppress(asyncio.CancelledError):
                await running
        for client in names.values():
            if isinstance(client, Semel):
                await asyncio.to_thread(client.close)
            elif isinstance(client, AsyncSemel):
                await client.close()


async def run_code(code: str, names: dict[str, Any], thread: ThreadPoolExecutor) -> None:
    """Run it in the event loop if it awaits, and otherwise in a thread, always the same one."""
    made = compile(code, "page", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if made.co_flags & inspect.CO_COROUTINE:
        await eval(made, names)
    else:
        await asyncio.get_running_loop().run_in_executor(thread, exec, made, names)


def has_ended(running: "asyncio.Future[None]", is_done: Callable[[], bool]) -> bool:
    return running.done() or is_done()


def stop(running: "asyncio.Future[None]", names: dict[str, Any]) -> None:
    for name in ("runner", "relay", "transaction"):
        if name in names:
            names[name].stop()
            return
    running.cancel()
