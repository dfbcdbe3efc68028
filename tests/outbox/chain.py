"""The whole chain as processes: orders that announce themselves, relays, and wallets that hear of them.

`python -m tests.outbox.chain '{...}'` forks them, kills each with -9 at random and forks another in its place.
After the storm it takes no more orders, says how many it killed, and goes on until its input is closed.
"""

import os
import random
import select
import signal
import sqlite3
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import msgspec
import psycopg
import redis

import semel
from semel import Message
from semel.outbox.relay import Relay

GROUP = "wallets"
IDLE_MS = 300
"""A delivery that nobody has acknowledged for so long is taken over."""
CUSTOMERS = 5
LOCK_WAIT_MS = 30_000
LIFE_S = (0.0, 1.0)
"""How long a process lives before it is killed."""


class Scene(msgspec.Struct):
    """Where everything is, and for how long the storm lasts."""

    url: str
    table: str
    ledger: str
    broker: str
    stream: str
    storm_s: float
    orders_min: int
    """The storm lasts until there are so many: on a busy computer that takes longer."""


def orders(url: str, table: str) -> None:
    """Take orders without end: the order and the message about it in one transaction."""
    once = semel.open(url, consumer="orders")
    with psycopg.connect(url.partition("?")[0]) as connection:
        while True:
            with connection.transaction():
                connection.execute(
                    f"LOCK TABLE {table}"
                )  # one writer at a time: numbers and messages agree in order
                ((last,),) = connection.execute(f"SELECT coalesce(max(number), 0) FROM {table}")
                number, customer = last + 1, (last + 1) % CUSTOMERS
                connection.execute(
                    f"INSERT INTO {table} VALUES (%s, %s, %s)", (number, customer, number * 10)
                )
                once.outbox(connection).publish(
                    Message(
                        "order.taken",
                        {"number": number, "customer": customer, "amount": number * 10},
                        aggregate=("customer", str(customer)),
                    )
                )


def wallets(path: str, broker: str, stream: str, name: str) -> None:
    """Move money: the mark of the event and the movement in one transaction, then the acknowledgement."""
    once = semel.open(f"sqlite:///{path}", consumer="wallets", mode="inbox")
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute(f"PRAGMA busy_timeout = {LOCK_WAIT_MS}")
    client = redis.Redis.from_url(broker)
    inbox = once.inbox(connection)
    while True:
        for entry, fields in deliveries(client, stream, name):
            event = semel.keys.body("number")(fields[b"data"])
            connection.execute("BEGIN IMMEDIATE")
            if inbox.first(fields[b"message_id"].decode()):
                move(connection, int(event), fields[b"data"])
            connection.execute("COMMIT")
            client.xack(stream, GROUP, entry)


def deliveries(client: Any, stream: str, name: str) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """What another consumer left behind, else what is new."""
    _, left, *_ = client.xautoclaim(stream, GROUP, name, IDLE_MS, count=20)
    if left:
        return list(left)
    new = client.xreadgroup(GROUP, name, {stream: ">"}, count=20, block=200)
    return list(new[0][1]) if new else []


def move(connection: sqlite3.Connection, number: int, body: bytes) -> None:
    """Nothing in these tables would stop a second movement."""
    order = msgspec.json.decode(body)
    connection.execute(
        "INSERT INTO movements (at, number, customer, amount) VALUES (?, ?, ?, ?)",
        (time.time(), number, order["customer"], order["amount"]),
    )
    connection.execute(
        "UPDATE balances SET amount = amount + ? WHERE customer = ?", (order["amount"], order["customer"])
    )


# --- lives and deaths ---------------------------------------------------------------------------


class Crew:
    """Processes by name, each replaced when it ends."""

    def __init__(self, roles: dict[str, Callable[[], Any]], chance: random.Random) -> None:
        self.roles = roles
        self.chance = chance
        self.alive: dict[str, tuple[int, float]] = {}
        self.kills = 0

    def start(self, name: str) -> None:
        pid = os.fork()
        if not pid:
            try:
                self.roles[name]()
            except BaseException:  # noqa: BLE001 - the process ends here, whatever it was
                traceback.print_exc()
            finally:
                os._exit(1)
        self.alive[name] = (pid, time.monotonic() + self.chance.uniform(*LIFE_S))

    def kill(self, name: str) -> None:
        pid, _ = self.alive.pop(name)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        self.kills += 1

    def tend(self, *, deadly: bool) -> None:
        """Replace those whose time has come, and those that ended by themselves."""
        for name, (pid, until) in list(self.alive.items()):
            if deadly and time.monotonic() >= until:
                self.kill(name)
                self.start(name)
            elif os.waitpid(pid, os.WNOHANG)[0]:
                self.start(name)


def main(scene: Scene) -> None:
    """The storm, then the calm."""
    wallet = (scene.ledger, scene.broker, scene.stream)
    relay = f"{scene.broker}?stream={scene.stream}"
    roles: dict[str, Callable[[], Any]] = {
        "orders": lambda: orders(scene.url, scene.table),
        "relay 1": lambda: Relay(scene.url, relay).run(),
        "relay 2": lambda: Relay(scene.url, relay).run(),
        "wallet 1": lambda: wallets(*wallet, "one"),
        "wallet 2": lambda: wallets(*wallet, "two"),
    }
    crew = Crew(roles, random.Random(os.urandom(8)))
    for name in roles:
        crew.start(name)
    end_at = time.monotonic() + scene.storm_s
    while time.monotonic() < end_at or taken(scene) < scene.orders_min:
        crew.tend(deadly=True)
        select.select([], [], [], 0.02)
    crew.kill("orders")
    sys.stdout.write(f"{crew.kills}\n")
    sys.stdout.flush()
    while not select.select([sys.stdin], [], [], 0.02)[0]:
        crew.tend(deadly=crew.chance.random() < 0.02)  # what was done is not done again
    for name in list(crew.alive):
        crew.kill(name)


def taken(scene: Scene) -> int:
    with psycopg.connect(scene.url.partition("?")[0]) as connection:
        ((count,),) = connection.execute(f"SELECT count(*) FROM {scene.table}")
    return int(count)


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Scene))
