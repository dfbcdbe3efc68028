"""Money: the mark and the effect in your own transaction, so that both commit or neither does."""

import sqlite3

import semel

db = sqlite3.connect("wallet.db")
db.execute("CREATE TABLE wallet (owner TEXT PRIMARY KEY, cents INTEGER)")
db.execute("INSERT INTO wallet VALUES ('ada', 0)")
db.commit()

wallet = semel.open("sqlite:///wallet.db", consumer="wallet", mode="inbox")


def credit(event: str, cents: int, *, crash: bool = False) -> None:
    """Credit the wallet once per event, whatever happens on the way."""
    with db:  # the transaction is yours: semel never commits it
        if wallet.inbox(db).first(event):
            db.execute("UPDATE wallet SET cents = cents + ? WHERE owner = 'ada'", (cents,))
            if crash:
                raise SystemExit("power cut")


try:
    credit("evt-1", 500, crash=True)
except SystemExit as cut:
    print(cut, "- rolled back together")
credit("evt-1", 500)
credit("evt-1", 500)
print("balance", db.execute("SELECT cents FROM wallet").fetchone()[0])
wallet.close()
db.close()

# prints:
# power cut - rolled back together
# balance 500
