"""The whole chain as processes: orders that announce themselves, relays, and wallets that hear of them.

`python -m tests.outbox.chain '{...}'` starts them, kills each with -9 at random and starts another in its place. One
of the relays is the program `semel relay`. After the storm it takes no more orders, says how many it killed, and
goes on until its input is closed.
"""

import asyncio
import os
import random
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import psycopg

import semel
from semel import Message
from semel.outbox.relay import Relay

GROUP = "wallets"
IDLE_S = 0.3
"""A delivery that nobody has acknowledged for so long is taken over."""
CUSTOMERS = 5
LIFE_S = (0.2, 4.0)
"""How long a process lives before it is killed: some are only beginning, most are busy."""
PROGRAM = "semel relay"
PROGRAM_LIFE_S = (1.0, 8.0)
"""The same of one that has to load first."""


class Scene(msgspec.Struct):
    """Where everything is, and for how long the storm lasts."""

    url: str
    table: str
    """Of the orders; the wallets' own begin with its name."""
    broker: str
    stream: str
    storm_s: float
    orders_min: int
    """The storm lasts until there are so many: on a busy computer that takes longer."""
    checked: bool = True
    """Unsound without: wallets do not ask their inbox."""

    @property
    def database(self) -> str:
        return self.url.partition("?")[0]

    @property
    def sink(self) -> str:
        name = "subject" if self.broker.startswith("nats") else "stream"
        return f"{self.broker}?{name}={self.stream}"


def orders(scene: Scene) -> None:
    """Take orders without end: the order and the message about it in one transaction."""
    once, table = semel.open(scene.url, consumer="orders"), scene.table
    with psycopg.connect(scene.database) as connection:
        while True:
            with connection.transaction():
                # One writer at a time: numbers and messages agree in order, also with one that was just killed.
                connection.execute(f"LOCK TABLE {table}")
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


def wallets(scene: Scene, name: str) -> None:
    """Hear of orders and move money, without end."""
    if scene.broker.startswith("nats"):
        asyncio.run(hear_from_nats(scene))
    else:
        hear_from_redis(scene, name)


def hear_from_redis(scene: Scene, name: str) -> None:
    import redis

    client: Any = redis.Redis.from_url(scene.broker)
    with moving(scene) as move:
        while True:
            _, left, *_ = client.xautoclaim(scene.stream, GROUP, name, round(IDLE_S * 1000), count=20)
            new = [] if left else client.xreadgroup(GROUP, name, {scene.stream: ">"}, count=20, block=200)
            entries = left or (new[0][1] if new else [])
            for _, fields in entries:
                move(fields[b"message_id"].decode(), fields[b"data"])
            if entries:
                client.xack(scene.stream, GROUP, *(entry for entry, _ in entries))


async def hear_from_nats(scene: Scene) -> None:
    import nats
    import nats.errors

    client = await nats.connect(scene.broker)
    messages = await client.jetstream().pull_subscribe_bind(GROUP, stream=scene.stream)
    with moving(scene) as move:
        while True:
            with suppress(nats.errors.TimeoutError):
                some = await messages.fetch(20, timeout=0.2)
                for message in some:
                    move((message.headers or {})["Nats-Msg-Id"], message.data)
                for message in some:
                    await message.ack()


@contextmanager
def moving(scene: Scene) -> Iterator[Callable[[str, bytes], None]]:
    """The mark of the event and the movement in one transaction. Nothing in the tables would stop a second one."""
    once = semel.open(scene.url, consumer="wallets", mode="inbox")
    with once, psycopg.connect(scene.database) as connection:
        inbox = once.inbox(connection)

        def move(message_id: str, body: bytes) -> None:
            order = msgspec.json.decode(body)
            with connection.transaction():
                if inbox.first(message_id) or not scene.checked:
                    connection.execute(
                        f"INSERT INTO {scene.table}_moved VALUES (%s, %s)", (order["number"], order["amount"])
                    )
                    connection.execute(
                        f"UPDATE {scene.table}_wallets SET amount = amount + %s WHERE customer = %s",
                        (order["amount"], order["customer"]),
                    )

        yield move


def relay_program(scene: Scene) -> None:
    """Become the real command."""
    arguments = ["-m", "semel", "relay", "--from", scene.url, "--to", scene.sink]
    os.execv(sys.executable, [sys.executable, *arguments])


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
        life_s = PROGRAM_LIFE_S if name == PROGRAM else LIFE_S
        self.alive[name] = (pid, time.monotonic() + self.chance.uniform(*life_s))

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
    roles: dict[str, Callable[[], Any]] = {
        "orders": lambda: orders(scene),
        PROGRAM: lambda: relay_program(scene),
        "relay": lambda: Relay(scene.url, scene.sink).run(),
        "wallet 1": lambda: wallets(scene, "one"),
        "wallet 2": lambda: wallets(scene, "two"),
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
    with psycopg.connect(scene.database) as connection:
        ((count,),) = connection.execute(f"SELECT count(*) FROM {scene.table}")
    return int(count)


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Scene))
