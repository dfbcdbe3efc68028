"""The whole chain on real servers, every process killed with -9 at random: the ledgers agree."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pytest
import redis

from tests.cli.shell import ROOT, environment
from tests.outbox.chain import CUSTOMERS, GROUP, IDLE_S, Scene
from tests.outbox.tools import Place
from tests.services import postgres
from tests.waiting import await_true

STORM_S = 120.0 if os.environ.get("SEMEL_SOAK") else 10.0
ORDERS_MIN = 100
KILLS_MIN = 12
SETTLE_S = 120.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300 + STORM_S)]


@pytest.mark.parametrize("broker", ["redis", "nats"])
def test_every_order_moves_money_once_whoever_is_killed(
    broker: str, postgres_place: Place, tmp_path: Path
) -> None:
    scene = prepared(broker, postgres_place)
    kills, taken = storm(scene, tmp_path)
    assert kills >= KILLS_MIN
    assert len(taken) >= ORDERS_MIN
    assert differences(scene, taken) == []


def test_without_an_inbox_the_same_storm_is_seen_in_the_ledgers(
    postgres_place: Place, tmp_path: Path
) -> None:
    """The test above can fail: wallets that do not ask are caught by it."""
    scene = prepared("redis", postgres_place, checked=False)
    _, taken = storm(scene, tmp_path)
    assert any("movements" in each for each in differences(scene, taken))


def prepared(broker: str, place: Place, **more: Any) -> Scene:
    """A broker with a stream that wallets have subscribed to, and empty ledgers."""
    name = f"orders_{uuid4().hex[:8]}"
    if broker == "redis":
        from tests.services import redis as redis_service

        url = redis_service.place(uuid4()).partition("?")[0]
        with redis.Redis.from_url(url) as client:
            client.xgroup_create(name, GROUP, "0", mkstream=True)
    else:
        from tests.services import nats as nats_service

        url = nats_service.url()
        asyncio.run(subscribe(url, name))
    scene = Scene(place.url, name, url, name, STORM_S, ORDERS_MIN, **more)
    postgres.execute(
        scene.url,
        f"CREATE TABLE {name} (number int, customer int, amount int);"
        f"CREATE TABLE {name}_moved (number int, amount int);"
        f"CREATE TABLE {name}_wallets (customer int, amount int);"
        f"INSERT INTO {name}_wallets SELECT each, 0 FROM generate_series(0, {CUSTOMERS - 1}) AS each",
    )
    return scene


async def subscribe(url: str, name: str) -> None:
    import nats
    from nats.js.api import AckPolicy, ConsumerConfig

    client = await nats.connect(url)
    stream = client.jetstream()
    await stream.add_stream(name=name, subjects=[name])
    config = ConsumerConfig(durable_name=GROUP, ack_policy=AckPolicy.EXPLICIT, ack_wait=IDLE_S)
    await stream.add_consumer(name, config)
    await client.close()


def storm(scene: Scene, folder: Path) -> tuple[int, dict[int, int]]:
    """Let it rage, then wait until every order has moved money: how many were killed, and the orders' amounts."""
    words = folder / "words"
    with (
        words.open("wb") as errors,
        subprocess.Popen(
            [sys.executable, "-m", "tests.outbox.chain", msgspec.json.encode(scene)],
            cwd=ROOT, env=environment(PYTHONPATH=f"{ROOT / 'src'}:{ROOT}"),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
        ) as crew,
    ):  # fmt: skip
        assert crew.stdout is not None
        try:
            kills = int(crew.stdout.readline() or 0)
            taken = dict(postgres.execute(scene.url, f"SELECT number, amount FROM {scene.table}"))
            await_movements(scene, len(taken))
        finally:
            crew.communicate()
    assert crew.returncode == 0, words.read_text()
    return kills, taken


def await_movements(scene: Scene, count: int) -> None:
    counted = f"SELECT count(DISTINCT number)::int FROM {scene.table}_moved"
    all_moved = await_true(lambda: postgres.execute(scene.url, counted)[0][0] >= count, SETTLE_S)
    assert all_moved, "orders without a movement"


def differences(scene: Scene, taken: dict[int, int]) -> list[str]:
    """Every order has one movement, none is lost, none doubled, and the wallets hold their sums; what is not so."""
    moved = postgres.execute(scene.url, f"SELECT number, amount FROM {scene.table}_moved")
    wallets = dict(postgres.execute(scene.url, f"SELECT customer, amount FROM {scene.table}_wallets"))
    sums = {
        customer: sum(amount for number, amount in taken.items() if number % CUSTOMERS == customer)
        for customer in range(CUSTOMERS)
    }
    found = []
    if len(moved) != len(taken):
        found.append(f"{len(moved)} movements of {len(taken)} orders")
    if dict(moved) != taken:
        found.append("orders and movements are not about the same")
    if wallets != sums:
        found.append(f"wallets hold {wallets}, not {sums}")
    return found
