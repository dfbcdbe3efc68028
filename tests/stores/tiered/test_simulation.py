"""Thousands of bad days: nothing is lost or doubled by the rules, and something by every rule that is broken."""

import os

import pytest

from tests.stores.tiered.simulation import MUTANTS, Day, Violation

SEEDS = 2000 if os.environ.get("SEMEL_SOAK") else 150
MUTANT_SEEDS = 100


@pytest.mark.parametrize("affine", [False, True])
def test_nothing_is_lost_or_doubled(affine: bool) -> None:
    for seed in range(SEEDS):
        try:
            Day(seed, affine=affine).play()
        except Violation as violation:
            pytest.fail(f"seed {seed}: {violation}")


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_rule_is_caught(name: str) -> None:
    caught = 0
    for seed in range(MUTANT_SEEDS):
        try:
            Day(seed, **MUTANTS[name]).play()
        except Violation:
            caught += 1
    assert caught >= 2, f"caught in {caught} of {MUTANT_SEEDS} days"
