"""The outbox: the message is written in your own transaction, and a relay publishes it afterwards."""

import io
import json
import sqlite3

import semel
from semel.outbox import Relay
from semel.outbox.sinks.stdout import StdoutSink

db = sqlite3.connect("shop.db")
db.execute("CREATE TABLE orders (number INTEGER PRIMARY KEY, cents INTEGER)")
db.commit()

shop = semel.open("sqlite:///shop.db?adopt=true", consumer="shop")


def take(number: int, cents: int) -> None:
    """Take an order; if it is refused, no message is published."""
    with db:  # the transaction is yours: order and message commit together, or neither does
        shop.outbox(db).publish(
            semel.Message("order.taken", {"number": number, "cents": cents}, aggregate=("order", str(number)))
        )
        db.execute("INSERT INTO orders VALUES (?, ?)", (number, cents))


take(1, 500)
take(2, 700)
try:
    take(2, 900)
except sqlite3.IntegrityError as error:
    print("refused:", error)

# A relay is a process of its own: semel relay --from sqlite:///shop.db --to redis://localhost/0
published = io.BytesIO()
totals = Relay("sqlite:///shop.db?adopt=true", StdoutSink(published)).run(until_empty=True)
for line in published.getvalue().splitlines():
    event = json.loads(line)
    print(event["type"], event["data"])
print("published", totals.published)
shop.close()
db.close()

# prints:
# refused: UNIQUE constraint failed: orders.number
# order.taken {'number': 1, 'cents': 500}
# order.taken {'number': 2, 'cents': 700}
# published 2
