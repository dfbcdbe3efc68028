"""Statements with one word wrong: the contract must notice each of them."""

from pathlib import Path

import pytest

from semel.stores.postgres import PostgresStore
from semel.testing import ManualClock, store_contract
from semel.testing.store_contract import Harness
from tests.stores.postgres import places

MUTANTS = {
    "a claim ignores the lease": ("claim", "r.state & 7 = 0 AND r.lease_until > t.now", "false"),
    "a claim ignores the window": ("claim", "r.expires_at > t.now", "false"),
    "a takeover starts its attempts anew": ("claim", "THEN r.attempt + 1 ELSE 1 END", "THEN 1 ELSE 1 END"),
    "a takeover forgets the fingerprint": (
        "claim",
        "coalesce(nullif(excluded.fingerprint, ''::bytea), r.fingerprint)",
        "excluded.fingerprint",
    ),
    "a takeover forgets when the event was first seen": (
        "claim",
        "THEN coalesce(r.first_seen, r.fence) ELSE",
        "THEN excluded.fence ELSE",
    ),
    "a fence may stand still": ("claim", "fence = greatest(r.fence + 1, excluded.fence)", "fence = r.fence"),
    "an orphan of quarantine is run again": ("claim", "r.state & 15 = 8", "r.state & 15 = 99"),
    "a late event runs": ("claim", "WHEN t.now - i.event_time > i.span THEN 6", "WHEN false THEN 6"),
    "another payload is not noticed": ("claim", "THEN 5", "THEN 0"),
    "a settle needs no owner": ("settle", "OR r.owner <> i.owner", ""),
    "a settle needs no fence": ("settle", "r.fence <> i.fence OR", ""),
    "a release keeps its owner": (
        "settle",
        "CASE WHEN c.goal = 5 THEN ''::bytea ELSE r.owner END",
        "r.owner",
    ),
    "a release forgets to give back the attempt": ("settle", "r.attempt - c.gives", "r.attempt"),
    "a sliding window runs from completion": (
        "settle",
        "WHEN r.state & 16 <> 0 THEN coalesce(",
        "WHEN false THEN coalesce(",
    ),
    "a renewal leaves the expiry": ("renew", "r.expires_at + c.lease_until - r.lease_until", "r.expires_at"),
    "a renewal needs no fence": ("renew", "AND x.fence = i.fence", ""),
    "a mark is prolonged by its duplicates": ("mark", "c.expires_at <= i.now", "true"),
    "a purge takes what still stands": ("purge", "r.expires_at > t.now", "false"),
}


def caught(statement: str, old: str, new: str, folder: Path) -> bool:
    clock = ManualClock()

    def connect() -> PostgresStore:
        store = places.make(folder, clock)
        text = store.statements[statement]
        assert old in text
        store.statements = {**store.statements, statement: text.replace(old, new)}
        if statement == "mark":
            store.statements["mark"] = store.statements["mark"].replace(
                "WHERE m.expires_at <= (SELECT now FROM t)", ""
            )
        return store

    for scenario in store_contract.scenarios(places.CAPABILITIES):
        try:
            store_contract.check(scenario, Harness(connect, clock=clock))
        except AssertionError:
            return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_word_is_noticed(name: str, tmp_path: Path) -> None:
    statement, old, new = MUTANTS[name]
    assert caught(statement, old, new, tmp_path)
