"""Chaos for your own handler: kill its workers with -9, count the effects, compare with the promises."""

import sqlite3
from pathlib import Path

from semel.testing.chaos import ChaosSettings, run_chaos


def credit(db: sqlite3.Connection, order: dict[str, str]) -> None:
    """Credit a wallet in the transaction that also marks the event."""
    db.execute("INSERT INTO credits VALUES (?, 500)", (order["id"],))


if __name__ == "__main__":  # worker processes import this file too
    with sqlite3.connect("wallet.db") as connection:
        connection.execute("CREATE TABLE credits (event TEXT, cents INTEGER)")
    connection.close()

    report = run_chaos(
        ChaosSettings(
            handler=f"{Path(__file__).stem}:credit",
            store="sqlite:///wallet.db?adopt=true",
            mode="inbox",
            effects="sql:SELECT event, count(*) FROM credits GROUP BY event",
            seed=7,
            rounds=1,
            events=10,
            workers=2,
            lease_s=0.5,
            faults=("kill",),
        )
    )
    print("workers killed:", report.faults_by_kind["kill"] > 0)
    print("lost:", len(report.lost), "doubled:", len(report.doubled), "held:", report.held)

# prints:
# workers killed: True
# lost: 0 doubled: 0 held: True
