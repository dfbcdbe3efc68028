"""Statements with one word wrong: the contract must notice each of them."""

from pathlib import Path

import pytest

from semel.stores.postgres import PostgresStore
from semel.testing import ManualClock, store_contract
from semel.testing.store_contract import Harness
from tests.stores.postgres import places

MUTANTS = {
    "a claim ignores the lease": (
        "claim",
        "r.state & 7 = 0 AND r.lease_until > t.now",
        "false",
        "a_repeated_claim_gets_its_own_back",
    ),
    "a claim ignores the window": (
        "claim",
        "r.expires_at > t.now",
        "false",
        "answers_come_by_position",
    ),
    "a takeover starts its attempts anew": (
        "claim",
        "THEN r.attempt + 1 ELSE 1 END",
        "THEN 1 ELSE 1 END",
        "every_item_has_its_own_owner_and_times",
    ),
    "a takeover forgets the fingerprint": (
        "claim",
        "coalesce(nullif(excluded.fingerprint, ''::bytea), r.fingerprint)",
        "excluded.fingerprint",
        "a_take_over_keeps_the_fingerprint",
    ),
    "a takeover forgets when the event was first seen": (
        "claim",
        "THEN coalesce(r.first_seen, r.fence) ELSE",
        "THEN excluded.fence ELSE",
        "a_lease_that_is_over_is_taken_over",
    ),
    "a fence may stand still": (
        "claim",
        "fence = greatest(r.fence + 1, excluded.fence)",
        "fence = r.fence",
        "a_lease_that_is_over_is_taken_over",
    ),
    "an orphan of quarantine is run again": (
        "claim",
        "r.state & 15 = 8",
        "r.state & 15 = 99",
        "what_must_be_decided_does_not_expire",
    ),
    "a late event runs": (
        "claim",
        "WHEN t.now - i.event_time > i.span THEN 6",
        "WHEN false THEN 6",
        "an_event_older_than_its_window_is_late",
    ),
    "another payload is not noticed": (
        "claim",
        "THEN 5",
        "THEN 0",
        "answers_come_by_position",
    ),
    "a settle needs no owner": (
        "settle",
        "OR r.owner <> i.owner",
        "",
        "answers_come_by_position",
    ),
    "a settle needs no fence": (
        "settle",
        "r.fence <> i.fence OR",
        "",
        "one_items_fate_is_not_anothers",
    ),
    "a release keeps its owner": (
        "settle",
        "CASE WHEN c.goal = 5 THEN ''::bytea ELSE r.owner END",
        "r.owner",
        "a_claim_that_nobody_runs_is_forgotten",
    ),
    "a release forgets to give back the attempt": (
        "settle",
        "r.attempt - c.gives",
        "r.attempt",
        "a_released_quarantine_claim_runs_again",
    ),
    "a sliding window runs from completion": (
        "settle",
        "WHEN r.state & 16 <> 0 THEN coalesce(",
        "WHEN false THEN coalesce(",
        "a_sliding_window_counts_from_the_claim",
    ),
    "a renewal leaves the expiry": (
        "renew",
        "r.expires_at + c.lease_until - r.lease_until",
        "r.expires_at",
        "a_renewal_moves_lease_and_expiry_alike",
    ),
    "a renewal needs no fence": (
        "renew",
        "AND x.fence = i.fence",
        "",
        "a_wrong_fence_or_owner_is_lost",
    ),
    "a mark is prolonged by its duplicates": (
        "mark",
        "c.expires_at <= i.now",
        "true",
        "marks_and_settings_survive_reopening",
    ),
    "a purge takes what still stands": (
        "purge",
        "r.expires_at > t.now",
        "false",
        "a_tombstone_lasts_as_long_as_a_lease_may",
    ),
    "one claim: a done record counts after its window": (
        "claim_one",
        "r.state & 7 IN (1, 2) AND r.expires_at > ",
        "r.state & 7 IN (1, 2) AND 0 < ",
        "fences_grow_across_expiry_and_purge",
    ),
    "one claim: a lease that is over is busy": (
        "claim_one",
        "r.state & 7 = 0 AND r.lease_until > ",
        "r.state & 7 = 0 AND 0 < ",
        "a_lease_that_is_over_is_taken_over",
    ),
    "one claim: its own claim is busy": (
        "claim_one",
        "AND r.owner <> $3",
        "",
        "a_repeated_claim_gets_its_own_back",
    ),
    "one claim: another payload is not noticed": (
        "claim_one",
        "WHEN $7 <> r.fingerprint THEN 8",
        "",
        "another_payload_is_a_mismatch",
    ),
    "one claim: the window counts without the lease": (
        "claim_one",
        "1000000)::bigint) + $4 + $5::bigint",
        "1000000)::bigint) + $5::bigint",
        "a_claim_that_nobody_runs_is_forgotten",
    ),
    "one settle: it needs no owner": (
        "settle_one",
        "AND r.owner = $3::bytea",
        "AND $3::bytea IS NOT NULL",
        "a_wrong_fence_or_owner_is_lost",
    ),
    "one settle: it needs no fence": (
        "settle_one",
        "AND r.fence = $4::bigint",
        "AND $4::bigint IS NOT NULL",
        "a_wrong_fence_or_owner_is_lost",
    ),
    "one settle: what is settled is settled again": (
        "settle_one",
        "AND r.state = 0",
        "",
        "a_repeated_completion_is_already_there",
    ),
    "one settle: what expired is settled": (
        "settle_one",
        "AND (r.lease_until > ",
        "AND (true OR r.lease_until > ",
        "an_expired_claim_is_not_renewed",
    ),
    "one settle: the window counts from nothing": (
        "settle_one",
        "1000000)::bigint) + $7::bigint",
        "1000000)::bigint) + 0 * $7::bigint",
        "answers_come_by_position",
    ),
}
"""By what is wrong: the statement, the words, what stands for them, and the promise that shows it."""


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_word_is_noticed(name: str, tmp_path: Path) -> None:
    statement, old, new, shown_by = MUTANTS[name]
    clock = ManualClock()

    def connect() -> PostgresStore:
        store = places.make(tmp_path, clock)
        text = store.statements[statement]
        assert old in text
        store.statements = {**store.statements, statement: text.replace(old, new)}
        if statement == "mark":
            store.statements["mark"] = store.statements["mark"].replace(
                "WHERE m.expires_at <= (SELECT now FROM t)", ""
            )
        return store

    (scenario,) = (each for each in store_contract.scenarios(places.CAPABILITIES) if each.name == shown_by)
    with pytest.raises(AssertionError):
        store_contract.check(scenario, Harness(connect, clock=clock))
