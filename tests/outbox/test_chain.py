"""The whole chain on real servers, every process killed with -9 at random: the ledgers agree."""

import os
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from uuid import uuid4

import msgspec
import pytest
import redis

from tests.cli.shell import ROOT, environment
from tests.outbox.chain import CUSTOMERS, GROUP, Scene
from tests.outbox.tools import Place
from tests.services import postgres
from tests.services import redis as redis_service

STORM_S = 120.0 if os.environ.get("SEMEL_SOAK") else 10.0
ORDERS_MIN = 100
KILLS_MIN = 20
SETTLE_S = 120.0


@pytest.mark.slow
@pytest.mark.timeout(300 + STORM_S)
def test_every_order_moves_money_once_whoever_is_killed(postgres_place: Place, tmp_path: Path) -> None:
    scene = Scene(
        url=postgres_place.url,
        table=f"orders_{uuid4().hex[:8]}",
        ledger=str(make_ledger(tmp_path / "wallets.db")),
        broker=redis_service.place(uuid4()).partition("?")[0],
        stream=f"orders-{uuid4().hex}",
        storm_s=STORM_S,
        orders_min=ORDERS_MIN,
    )
    postgres.execute(scene.url, f"CREATE TABLE {scene.table} (number int, customer int, amount int)")
    with redis.Redis.from_url(scene.broker) as client:
        client.xgroup_create(scene.stream, GROUP, "0", mkstream=True)
        words = tmp_path / "words"
        with (
            words.open("wb") as errors,
            subprocess.Popen(
                [sys.executable, "-m", "tests.outbox.chain", msgspec.json.encode(scene)],
                cwd=ROOT, env=environment(PYTHONPATH=f"{ROOT / 'src'}:{ROOT}"),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            ) as crew,
        ):  # fmt: skip
            assert crew.stdout is not None
            kills = int(crew.stdout.readline() or 0)
            taken = dict(postgres.execute(scene.url, f"SELECT number, amount FROM {scene.table}"))
            try:
                await_movements(scene.ledger, len(taken))
            finally:
                crew.communicate()
        published = client.xlen(scene.stream)
    assert crew.returncode == 0, words.read_text()
    assert kills >= KILLS_MIN
    assert len(taken) >= ORDERS_MIN
    assert published >= len(taken)
    agree(scene.ledger, taken)
    sys.stdout.write(f"{len(taken)} orders, {kills} kills, {published} published\n")


def make_ledger(path: Path) -> Path:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE movements (at, number, customer, amount)")
        connection.execute("CREATE TABLE balances (customer, amount)")
        connection.executemany("INSERT INTO balances VALUES (?, 0)", [(each,) for each in range(CUSTOMERS)])
    return path


def await_movements(ledger: str, count: int) -> None:
    between = threading.Event()  # never set: the database sends no signal
    give_up_at = time.monotonic() + SETTLE_S
    with closing(sqlite3.connect(ledger, timeout=30)) as connection:
        while connection.execute("SELECT count(DISTINCT number) FROM movements").fetchone()[0] < count:
            assert time.monotonic() < give_up_at, "orders without a movement"
            between.wait(0.1)


def agree(ledger: str, taken: dict[int, int]) -> None:
    """Every order has one movement, none is lost, none doubled, and the balances are their sums."""
    with closing(sqlite3.connect(ledger)) as connection:
        moved = connection.execute("SELECT number, amount FROM movements").fetchall()
        balances = dict(connection.execute("SELECT customer, amount FROM balances").fetchall())
    assert len(moved) == len(taken)
    assert dict(moved) == taken
    assert balances == {
        customer: sum(amount for number, amount in taken.items() if number % CUSTOMERS == customer)
        for customer in range(CUSTOMERS)
    }
