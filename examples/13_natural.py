"""Writes that come out the same however often they are applied: they need no record at all."""

import sqlite3

db = sqlite3.connect("shop.db", isolation_level=None)
db.execute("CREATE TABLE profile (id INTEGER PRIMARY KEY, email TEXT, version INTEGER)")
db.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, state TEXT)")
db.execute(
    "CREATE TABLE payment (event_id TEXT PRIMARY KEY, account INTEGER, cents INTEGER CHECK (cents > 0))"
)
db.execute("INSERT INTO orders VALUES (12, 'placed')")


def on_profile(email: str, version: int) -> None:
    """Set, do not add; an older version never comes back."""
    db.execute(
        "INSERT INTO profile (id, email, version) VALUES (7, ?, ?)"
        " ON CONFLICT (id) DO UPDATE SET email = excluded.email, version = excluded.version"
        " WHERE profile.version < excluded.version",
        (email, version),
    )


def on_paid(order: int) -> str:
    """Change only from the expected state, and check the state if nothing changed."""
    if db.execute("UPDATE orders SET state = 'paid' WHERE id = ? AND state = 'placed'", (order,)).rowcount:
        return "paid"
    found = db.execute("SELECT state FROM orders WHERE id = ?", (order,)).fetchone()
    return "paid before" if found == ("paid",) else f"refused: {found}"


def on_payment(event_id: str, cents: int) -> int:
    """One child row per event; the balance is their sum."""
    db.execute(
        "INSERT INTO payment (event_id, account, cents) VALUES (?, 7, ?) ON CONFLICT (event_id) DO NOTHING",
        (event_id, cents),
    )
    return int(db.execute("SELECT sum(cents) FROM payment WHERE account = 7").fetchone()[0])


on_profile("ada@example.org", 3)
on_profile("old@example.org", 2)  # late
on_profile("ada@example.org", 3)  # again
print(*db.execute("SELECT email, version FROM profile"))
print(on_paid(12), on_paid(12), on_paid(13), sep=" | ")
print(on_payment("evt-1", 500), on_payment("evt-1", 500), on_payment("evt-2", 100))
try:
    on_payment("evt-3", -1)  # a broken rule is not a duplicate
except sqlite3.IntegrityError as error:
    print(error)
db.close()

# prints:
# ('ada@example.org', 3)
# paid | paid before | refused: None
# 500 500 600
# CHECK constraint failed: cents > 0
