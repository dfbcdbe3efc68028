"""Thousands of bad days: no promise is broken, and every broken protocol is found out."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from semel.testing.simulate import MODES, MUTANTS, main, simulate, storm

SOAK = bool(os.environ.get("SEMEL_SOAK"))
SEEDS = 25_000 if SOAK else 500
"""Of each mode: 4,000 in all, 200,000 in the long form."""
SEEDS_QUICK = 25
SEEDS_MUTANT = 1_000
BLOCKS = 8 if SOAK else 1
"""The long form is cut into pieces, so that they share the processors."""

RARE: dict[str, float] = {
    "complete without fence": 0.03,
    "release without owner check": 0.03,
    "release keeps the owner": 0.01,
    "takeover forgets the attempts": 0.03,
    "fresh owner on each try": 0.05,
    "ack before complete": 0.04,
    "fence ignored at a fenced sink": 0.08,
}
"""The least share of seeds that must catch a mutant; of those not named here every eighth does."""


def check(mode: str, seeds: range) -> None:
    summary = storm(mode, seeds)
    print(summary)  # noqa: T201  # shown with -s and on failure
    assert not summary.violations, "\n".join(
        f"python -m semel.testing.simulate --mode {mode} --seed {seed}  # {violation}"
        for seed, violation in summary.violations.items()
    )


@pytest.mark.parametrize("mode", MODES)
def test_no_schedule_breaks_a_promise_quickly(mode: str) -> None:
    check(mode, range(1_000_000, 1_000_000 + SEEDS_QUICK))


@pytest.mark.slow
@pytest.mark.timeout(0 if SOAK else 120)
@pytest.mark.parametrize("block", range(BLOCKS))
@pytest.mark.parametrize("mode", MODES)
def test_no_schedule_breaks_a_promise(mode: str, block: int) -> None:
    each = SEEDS // BLOCKS
    check(mode, range(block * each, (block + 1) * each))


def caught(mutant: str, seeds: int) -> float:
    mode = MUTANTS[mutant].mode
    violations = sum(simulate(mode, seed, mutant=mutant).violation is not None for seed in range(seeds))
    print(f"{mutant}: caught by {violations / seeds:.1%} of {seeds} seeds")  # noqa: T201  # shown with -s
    return violations / seeds


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_broken_protocol_is_caught(mutant: str) -> None:
    seeds = SEEDS_MUTANT if SOAK or mutant in RARE else SEEDS_MUTANT // 4
    assert caught(mutant, seeds) >= RARE.get(mutant, 0.125)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_broken_protocol_is_caught_quickly(mutant: str) -> None:
    mode = MUTANTS[mutant].mode
    first = next(
        (seed for seed in range(SEEDS_MUTANT) if simulate(mode, seed, mutant=mutant).violation is not None),
        None,
    )
    assert first is not None
    print(f"{mutant}: first caught by seed {first}")  # noqa: T201  # shown with -s


HARMS: dict[str, set[str]] = {
    "mark before effect, sold as once": {"lost"},
    "ack on receipt": {"lost"},
    "mark outside the transaction": {"lost"},
    "idempotency key per attempt": {"twice"},
    "fence ignored at a fenced sink": {"zombie"},
    "expired row counted as present": {"expired"},
    "one owner per process": {"overlap"},
    "client clock decides the lease": {"overlap", "fence"},
    "no takeover": {"endless", "unfinished"},
    "one number for lease and window": {"again", "invented"},
    "fresh owner on each try": {"own claim"},
    "drop while busy": {"early ack"},
}


@pytest.mark.parametrize("mutant", HARMS)
def test_a_broken_protocol_is_caught_for_what_it_does(mutant: str) -> None:
    mode = MUTANTS[mutant].mode
    results = [simulate(mode, seed, mutant=mutant).violation for seed in range(30)]
    kinds = {violation.kind for violation in results if violation is not None}
    assert kinds
    assert kinds <= HARMS[mutant]


@pytest.mark.parametrize("mode", MODES)
def test_the_same_seed_plays_the_same(mode: str) -> None:
    first: list[str] = []
    second: list[str] = []
    one, two = simulate(mode, 7, trace=first), simulate(mode, 7, trace=second)
    assert first == second
    assert (one.steps, one.effects, one.deliveries) == (two.steps, two.effects, two.deliveries)


def test_the_same_seed_plays_the_same_in_another_process() -> None:
    command = [sys.executable, "-m", "semel.testing.simulate", "--mode", "lease-plain", "--seed", "11"]
    traces = [
        subprocess.run(
            command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONHASHSEED": salt}
        ).stdout
        for salt in ("1", "2")
    ]
    assert traces[0] == traces[1]
    assert "EFFECT 1 of" in traces[0]


def test_each_fault_happens_within_the_quick_seeds() -> None:
    trace: list[str] = []
    for seed in range(SEEDS_QUICK):
        simulate("lease-plain", seed, trace=trace)
    text = "\n".join(trace)
    for fault in (
        "dies",
        "stalls for",
        "crash before sending",
        "crash after sending",
        "request lost",
        "reply lost",
        "request late",
        "reply late",
        "out of reach",
        "steps back",
        "loses everything",
        "windows are over",
        "Lost(",
        "Errored(",
        "Busy(",
        "recorded=False",
        "replayed=True",
        "already=True",
        "Failed(",
    ):
        assert fault in text, fault


def test_weaker_modes_show_their_price() -> None:
    """A simulation in which nothing ever repeats or is lost would prove nothing."""
    seeds = range(SEEDS_QUICK)
    assert storm("lease-plain", seeds).repeated > 0
    assert storm("lease-fenced", seeds).repeated > 0
    assert storm("mark", seeds).lost > 0
    assert storm("observe", seeds).repeated > 0


def test_a_violation_prints_its_seed_and_how_to_see_it_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--mutant", "ack on receipt", "--seeds", "20"]) == 1
    out = capsys.readouterr().out
    assert "replay with: --mode lease-keyed --seed" in out
    seed = out.split("seed ")[1].split(":")[0]
    assert main(["--mutant", "ack on receipt", "--seed", seed]) == 1
    assert "VIOLATION lost" in capsys.readouterr().out


def test_a_sound_storm_is_a_success(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--mode", "lease", "--seeds", "5"]) == 0
    assert capsys.readouterr().out.count("0 violations") == 4


@pytest.mark.parametrize("arguments", [["--mode", "wishful"], ["--mutant", "none such"]])
def test_a_wrong_name_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(arguments)
    assert refused.value.code == 2
    assert "no m" in capsys.readouterr().err


HABITS = [
    "mark before effect, sold as once",
    "drop while busy",
    "check then act",
    "ack on receipt",
    "fresh owner, and busy means duplicate",
    "expired row counted as present",
    "one owner per process",
    "one number for lease and window",
    "mark outside the transaction",
    "no takeover",
]


@pytest.mark.parametrize("mutant", HABITS)
def test_a_bad_habit_does_harm_that_a_user_would_see(mutant: str) -> None:
    mode = MUTANTS[mutant].mode
    results = (simulate(mode, seed, mutant=mutant, harm_only=True).violation for seed in range(SEEDS_MUTANT))
    harm = next((violation for violation in results if violation is not None), None)
    assert harm is not None
    assert harm.kind in ("lost", "twice", "unfinished", "endless")


def test_every_mutant_is_told_of_in_the_documentation() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "explain" / "how-it-is-proved.md"
    text = " ".join(page.read_text(encoding="utf-8").split())
    assert [mutant for mutant in MUTANTS if mutant not in text] == []
