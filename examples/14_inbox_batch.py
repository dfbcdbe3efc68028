"""Many events in one transaction: one bad event does not hold back the rest."""

import sqlite3

import semel
from semel import Delivery, Done, Errored

db = sqlite3.connect("wallet.db")
db.execute("CREATE TABLE wallet (owner TEXT PRIMARY KEY, cents INTEGER CHECK (cents >= 0))")
db.execute("INSERT INTO wallet VALUES ('ada', 0)")
db.commit()

wallet = semel.open("sqlite:///wallet.db", consumer="wallet", mode="inbox")


def credit_all(new: list[Delivery[int]]) -> None:
    """Called with the events that are new: all of them, or one by one after a failure."""
    for event in new:
        db.execute("UPDATE wallet SET cents = cents + ? WHERE owner = 'ada'", (event.body,))


events = [Delivery(key=key, body=cents) for key, cents in [("a", 500), ("b", -900), ("c", 100), ("a", 500)]]
for _ in range(2):  # delivered, and delivered again
    with db:
        outcomes = wallet.inbox(db).run_batch(events, credit_all)
    for event, outcome in zip(events, outcomes, strict=True):
        match outcome:
            case Done(replayed=True):
                print(event.key, "done before")
            case Done():
                print(event.key, "done")
            case Errored(error=error):
                print(event.key, "failed:", error)
            case _:
                print(event.key, outcome)
    print("balance", db.execute("SELECT cents FROM wallet").fetchone()[0])
wallet.close()
db.close()

# prints:
# a done
# b failed: CHECK constraint failed: cents >= 0
# c done
# a done before
# balance 600
# a done before
# b failed: CHECK constraint failed: cents >= 0
# c done before
# a done before
# balance 600
