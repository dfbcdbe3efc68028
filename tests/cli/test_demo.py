"""`semel demo`: its promises, its control, and that nothing of it stays behind."""

import json
import signal
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from semel.cli.demo.queue import PHASES, draw
from semel.cli.demo.report import audit
from semel.cli.demo.run import DemoProgress
from semel.cli.demo.worker import DemoFolder
from semel.testing.redelivery import VISIBILITY_S, RedeliveryQueue
from tests.cli.processes import SEMEL, WITHIN_S, Terminal, semel, start, warm
from tests.leftovers import await_none_left, marked_processes
from tests.services.guard import MARKER
from tests.waiting import await_true

__all__ = ["warm"]

pytestmark = [pytest.mark.usefixtures("warm"), pytest.mark.slow]

SMALL = ("demo", "--events", "30", "--workers", "2", "--kills", "4")


def run(*arguments: str, cwd: Path) -> tuple[int, dict[str, Any]]:
    ended = semel(*arguments, "--json", cwd=cwd)
    assert ended.stderr == b""
    return ended.returncode, json.loads(ended.stdout)


@pytest.mark.parametrize("seed", [1, 2])
def test_nothing_is_lost_and_nothing_happens_twice(tmp_path: Path, seed: int) -> None:
    code, told = run(*SMALL, "--seed", str(seed), cwd=tmp_path)
    assert code == 0
    assert told["ok"] is True
    assert (told["seed"], told["events"], told["kills"], told["lost"], told["twice"]) == (seed, 30, 4, 0, 0)
    assert told["deliveries"] > 30
    inbox, lease = told["inbox"], told["lease"]
    assert inbox["kills_by_phase"] == lease["kills_by_phase"] == dict.fromkeys(PHASES, 1)
    assert (lease["lost"], lease["repeats_unexplained"], lease["sink"]) == (0, 0, {"lost": 0, "twice": 0})
    for storm in (inbox, lease):
        assert storm["duplicates_suppressed"] == storm["replays"] > 0
        assert storm["answers_differ"] == 0
        assert storm["pauses"] > 0
        assert storm["takeovers"] >= 2
    assert told["control"] is None
    assert list(tmp_path.iterdir()) == []


def test_more_kills_than_events_and_many_workers(tmp_path: Path) -> None:
    code, told = run("demo", "--events", "12", "--workers", "6", "--kills", "30", "--seed", "7", cwd=tmp_path)
    assert code == 0, told
    assert (told["lost"], told["twice"], told["lease"]["lost"]) == (0, 0, 0)
    assert told["kills"] >= 20


def test_the_control_shows_doubles(tmp_path: Path) -> None:
    code, told = run(*SMALL, "--seed", "1", "--control", cwd=tmp_path)
    assert code == 0
    assert told["control"]["twice"] == told["twice"] > 5
    assert told["control"]["kills_by_phase"] == dict.fromkeys(PHASES, 1)
    assert told["inbox"] is told["lease"] is None


MUTANTS = {
    "the mark is committed before the effect": (
        """
import semel.inbox.inbox
first = semel.inbox.inbox.Inbox.first
def early(self, key, **more):
    answer = first(self, key, **more)
    self._handle._connection.execute("COMMIT")
    self._handle._connection.execute("BEGIN IMMEDIATE")
    return answer
semel.inbox.inbox.Inbox.first = early
""",
        "events were lost",
    ),
    "each attempt has an idempotency key of its own": (
        """
import uuid, semel.runtime.context
semel.runtime.context.Context.idempotency_key = property(lambda context: uuid.uuid4().hex)
""",
        "the sink with idempotency keys lost 0 and doubled",
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_broken_semel_is_caught(tmp_path: Path, mutant: str) -> None:
    text, complaint = MUTANTS[mutant]
    (tmp_path / "sitecustomize.py").write_text(text)
    with start(*SMALL, "--seed", "3", "--json", cwd=tmp_path, PYTHONPATH=str(tmp_path)) as demo:
        output, _ = demo.communicate(timeout=WITHIN_S)
    assert demo.returncode == 1
    told = json.loads(output)
    assert any(complaint in each for each in told["inbox"]["broken"] + told["lease"]["broken"])


def test_the_table_on_a_terminal_and_the_display_before_it(tmp_path: Path) -> None:
    terminal = Terminal([*SEMEL, *SMALL, "--seed", "4"], tmp_path)
    assert terminal.wait() == 0, terminal.said
    assert "--seed 4" in terminal.said
    assert "killed -9: " in terminal.said
    assert "inbox: effect and mark in one transaction" in terminal.said
    assert "inbox: lost 0, twice 0." in terminal.said
    assert "lease: lost 0." in terminal.said


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_no_process_is_left_behind(tmp_path: Path, number: int, code: int) -> None:
    marker = f"demo-{tmp_path.name}-{number}"
    demo = start("demo", "--events", "5000", cwd=tmp_path, TMPDIR=str(tmp_path), **{MARKER: marker})
    assert await_true(lambda: len(marked_processes(marker)) >= 6)  # itself, the nursery, four workers
    demo.send_signal(number)
    demo.communicate(timeout=WITHIN_S)
    assert demo.returncode == code
    assert await_none_left(marker, WITHIN_S) == {}
    if number != signal.SIGKILL:
        assert list(tmp_path.iterdir()) == []


def test_figures_that_make_no_storm_are_refused(tmp_path: Path) -> None:
    assert semel("demo", "--kills", "3", cwd=tmp_path).returncode == 2
    assert semel("demo", "--workers", "0", cwd=tmp_path).returncode == 2


# --- the parts: a demo that could not fail would show nothing ---


def counted(tmp_path: Path, mode: Any, ledger: list[str], **hits: int) -> list[str]:
    place = DemoFolder(tmp_path, mode)
    place.prepare()
    connection = sqlite3.connect(place.database)
    connection.executemany("INSERT INTO ledger VALUES (?, 1)", [(event,) for event in ledger])
    connection.commit()
    connection.close()
    place.effects.write_text("".join(f"{event}\n" for event in ledger))
    sink = sqlite3.connect(place.sink)
    sink.executemany("INSERT INTO applied VALUES (?)", [(event,) for event in sorted(set(ledger))])
    sink.commit()
    sink.close()
    progress = DemoProgress(mode, 2, 4)
    progress.kills.update(PHASES)
    progress.hits.update(hits)
    return audit(place, progress, ["a", "b"], 1.0).broken


def test_the_audit_sees_what_is_lost_and_what_is_twice(tmp_path: Path) -> None:
    assert counted(tmp_path, "inbox", ["a", "b"]) == []


@pytest.mark.parametrize(
    ("mode", "ledger", "hits", "complaint"),
    [
        ("inbox", ["a"], {}, "1 event was lost"),
        ("inbox", ["a", "a", "b"], {"a": 1}, "1 event had an effect twice"),
        ("lease", ["a", "b", "b"], {"a": 1}, "1 repeat that no kill, pause or lost claim explains"),
        ("lease", ["a", "b", "b", "b"], {"b": 1}, "1 repeat that no kill, pause or lost claim explains"),
        ("lease", ["a"], {}, "1 event was lost"),
        ("control", ["a", "b"], {}, "the control shows no double: the storm was too mild"),
    ],
)
def test_the_audit_complains(
    tmp_path: Path, mode: str, ledger: list[str], hits: dict[str, int], complaint: str
) -> None:
    assert complaint in counted(tmp_path, mode, ledger, **hits)


def test_the_audit_lets_a_hit_explain_a_repeat(tmp_path: Path) -> None:
    assert counted(tmp_path, "lease", ["a", "b", "b"], b=1) == []


def test_a_seed_draws_one_storm() -> None:
    first, again, other = draw("lease", 5, 50, 8), draw("lease", 5, 50, 8), draw("lease", 6, 50, 8)
    assert (first.sent, first.hits) == (again.sent, again.hits)
    assert first.sent != other.sent
    assert set(first.sent) == set(first.events)
    struck = [hit.phase for hits in first.hits.values() for hit in hits if hit.kind == "kill"]
    assert sorted(struck) == sorted([*PHASES, *PHASES])


def test_the_queue_delivers_until_it_is_acknowledged() -> None:
    queue = RedeliveryQueue(["a"])
    assert queue.take(1, now=0.0) == 0
    assert queue.take(2, now=0.0) is None
    queue.abandon(1)
    assert queue.take(2, now=0.0) == 0
    queue.tick(now=VISIBILITY_S)
    assert queue.take(3, now=VISIBILITY_S) == 0
    queue.nack(0, at=9.0)
    assert queue.tick(now=8.0) == 9.0
    assert queue.take(3, now=8.0) is None
    queue.tick(now=9.0)
    assert queue.take(3, now=9.0) == 0
    assert queue.left == 1
    queue.ack(0)
    assert (queue.left, queue.deliveries) == (0, 4)
