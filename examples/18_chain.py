"""From one service's database to another's: outbox, relay, inbox. However often a message arrives, it counts once."""

import io
import json
import sqlite3

import semel
from semel import Message
from semel.outbox import Relay
from semel.outbox.sinks.stdout import StdoutSink

# The shop takes orders; each is announced in the transaction that takes it.
shop = semel.open("sqlite:///shop.db?adopt=true", consumer="shop")
with shop, sqlite3.connect("shop.db") as orders:
    orders.execute("CREATE TABLE orders (number INTEGER, customer TEXT, cents INTEGER)")
    orders.executemany("INSERT INTO orders VALUES (?, ?, ?)", [(1, "ann", 500), (2, "bob", 700)])
    shop.outbox(orders).publish_many(
        [
            Message("order.taken", {"customer": "ann", "cents": 500}, aggregate=("customer", "ann")),
            Message("order.taken", {"customer": "bob", "cents": 700}, aggregate=("customer", "bob")),
        ]
    )
orders.close()

# The relay publishes the committed messages; `semel relay` is the same as a program, with a real broker.
broker = io.BytesIO()
Relay("sqlite:///shop.db?adopt=true", StdoutSink(broker)).run(until_empty=True)
deliveries = [json.loads(line) for line in broker.getvalue().splitlines()]

# The wallets get each order twice, as after a killed broker or relay.
wallets = semel.open("sqlite:///wallets.db", consumer="wallets", mode="inbox")
connection = sqlite3.connect("wallets.db")
connection.execute("CREATE TABLE wallets (customer TEXT PRIMARY KEY, cents INTEGER)")
with wallets:
    for event in deliveries + deliveries:
        with connection:
            if wallets.inbox(connection).first(event["id"]):
                connection.execute(
                    "INSERT INTO wallets VALUES (:customer, :cents)"
                    " ON CONFLICT DO UPDATE SET cents = cents + :cents",
                    event["data"],
                )
print(len(deliveries) * 2, "deliveries")
print(connection.execute("SELECT * FROM wallets ORDER BY customer").fetchall())
connection.close()

# prints:
# 4 deliveries
# [('ann', 500), ('bob', 700)]
