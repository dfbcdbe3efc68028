"""The whole product at once, on each kind of store, with processes killed and stopped at random."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.processes import ROOT, environment
from tests.services import postgres, redis
from tests.whole.plan import draw
from tests.whole.scene import Kind, Ledger

SECONDS = 200 if "SEMEL_SOAK" in os.environ else 12
"""Of each kind of store; then whatever is left is finished in calm."""
WITHIN_S = 6 * SECONDS + 900
SEED = "SEMEL_TEST_SEED"


@pytest.mark.slow
@pytest.mark.timeout(WITHIN_S)
@pytest.mark.parametrize("kind", ["sqlite", "redis", "postgres"])
def test_every_promise_is_kept(kind: Kind, tmp_path: Path) -> None:
    seed = int(os.environ.get(SEED) or random.SystemRandom().randrange(10**6))
    broker = redis.place(tmp_path)
    store = {"sqlite": "", "redis": broker, "postgres": ""}[kind]
    if kind == "postgres":
        store = postgres.place(tmp_path)
    command = [
        sys.executable, "-m", "tests.whole.storm", kind, "--store", store, "--broker", broker.partition("?")[0],
        "--folder", str(tmp_path), "--seed", str(seed), "--seconds", str(SECONDS),
    ]  # fmt: skip
    ended = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False, timeout=WITHIN_S
    )
    logs = "\n".join(f"{log.name}: {log.read_text()[-2000:]}" for log in tmp_path.glob("*.log"))
    assert ended.returncode == 0, f"{SEED}={seed} repeats the plan.\n{ended.stdout}{ended.stderr}\n{logs}"


def test_a_line_that_is_being_written_is_no_line_yet(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.tsv")
    ledger.write("effect", "run", "e1")
    with (tmp_path / "ledger.tsv").open("a") as file:
        file.write("effect\trun\te2\t1\t2\t")
    assert [entry.event for entry in ledger.read()] == ["e1"]


def test_a_seed_repeats_the_plan_and_another_does_not() -> None:
    assert draw("sqlite", 7, 20) == draw("sqlite", 7, 20)
    assert draw("sqlite", 7, 20) != draw("sqlite", 8, 20)
    roles = {act.role for slot in draw("sqlite", 7, 60).slots for act in slot}
    fates = {act.fate for slot in draw("sqlite", 7, 60).slots for act in slot}
    assert fates == {"end", "kill", "stop"}
    assert roles >= {"worker", "serve", "consume", "consume-inbox", "consume-chain", "relay", "listen"}
    assert roles >= {"list", "stats", "purge", "doctor", "bench", "explain", "migrate"}
