"""Real processes, killed with -9 or stopped past their lease at named points: the effects are those of the table."""

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

import semel
from semel.types import Record
from tests.faults.scenes import acknowledges
from tests.faults.table import GUARANTEES, Cell
from tests.faults.worker_process import KEY, Job, client, effects, never, prepare, sweep, work
from tests.services import postgres

MODES = {
    "inbox": ("inbox", "plain"),
    "lease, keyed sink": ("lease", "keyed"),
    "lease, fenced sink": ("lease", "fenced"),
    "lease, plain sink": ("lease", "plain"),
    "quarantine": ("quarantine", "plain"),
    "mark": ("mark", "plain"),
    "observe": ("observe", "plain"),
}
WINDOW_OF_POINT = {
    "before_claim": "before_claim",
    "after_claim": "after_claim",
    "before_effect": "after_claim",
    "after_effect": "after_effect",
    "before_complete": "after_effect",
    "after_complete": "before_ack",
    "before_ack": "before_ack",
}
WINDOW_OF_STALL = {"before_effect": "stalled_before_effect", "before_complete": "stalled_after_effect"}
QUICK = {
    ("lease, plain sink", "after_effect"),
    ("lease, keyed sink", "after_effect"),
    ("quarantine", "after_effect"),
}

STORES = [(name, "sqlite") for name in MODES] + [("inbox", "postgres")]
KILLS = [
    pytest.param(
        name,
        store,
        point,
        id=f"{name}-{store}-{point}",
        marks=[] if (name, point) in QUICK else [pytest.mark.slow],
    )
    for name, store in STORES
    for point in WINDOW_OF_POINT
    if name != "mark" or "complete" not in point
]
STALLS = [
    pytest.param(name, store, point, id=f"{name}-{store}-{point}", marks=[pytest.mark.slow])
    for name, store in STORES
    for point in WINDOW_OF_STALL
    if name != "mark" or "complete" not in point
]


@contextmanager
def stopped_at(job: Job) -> Iterator[subprocess.Popen[str]]:
    """A worker process that has reached its point and waits there."""
    command = [sys.executable, "-m", "tests.faults.worker_process", msgspec.json.encode(job).decode()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline().strip() == job.point
            yield child
        finally:
            child.kill()


def redeliver(job: Job) -> None:
    """What a source does: again, until it is acknowledged."""
    for _ in range(5):
        outcome = work(job)
        if outcome is True or acknowledges(outcome):
            return
    raise AssertionError("never acknowledged")


def measured(job: Job) -> Cell:
    flagged = False
    if job.mode == "quarantine":
        with client(job, never) as once:
            record = once.records.lookup(KEY)
        flagged = isinstance(record, Record) and record.state == "unknown"
    return Cell(effects(job), flagged=flagged)


def job_for(name: str, store: str, point: str, folder: Path) -> Job:
    mode, sink = MODES[name]
    server = postgres.place(folder) if store == "postgres" else ""
    return Job(str(folder), mode, sink, point, server=server)


@pytest.mark.parametrize(("name", "store", "point"), KILLS)
def test_a_process_killed_at_a_point_costs_what_the_table_says(
    name: str, store: str, point: str, tmp_path: Path
) -> None:
    job = job_for(name, store, point, tmp_path)
    prepare(job)
    with stopped_at(job) as child:
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
    redeliver(job)
    assert measured(job) == GUARANTEES[name][WINDOW_OF_POINT[point]]


@pytest.mark.parametrize(("name", "store", "point"), STALLS)
def test_a_process_stopped_past_its_lease_costs_what_the_table_says(
    name: str, store: str, point: str, tmp_path: Path
) -> None:
    mode, sink = MODES[name]
    job = job_for(name, store, point, tmp_path)
    prepare(job)
    with stopped_at(job) as zombie:
        stop_between_writes(zombie, job)
        if mode == "inbox":
            assert work(job) is False  # the stopped one holds the transaction: nobody gets past it
        else:
            redeliver(job)
        zombie.send_signal(signal.SIGCONT)
        answer, _ = zombie.communicate("\n")
        assert zombie.returncode == 0
    if mode == "lease":
        assert answer.strip() in ("Lost", "Errored")  # told, never silently overwriting
        assert answer.strip() == "Lost" or sink == "fenced"
    redeliver_after_stall(job)
    assert measured(job) == GUARANTEES[name][WINDOW_OF_STALL[point]]


def stop_between_writes(process: "subprocess.Popen[str]", job: Job) -> None:
    """Stop it, but not while a renewal of its keeper is under way: that would hold up everybody's writes."""
    while True:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        if job.mode == "inbox" or job.server or is_free(job.database):
            return
        process.send_signal(signal.SIGCONT)


def is_free(path: Path) -> bool:
    """Whether a writer gets in at once."""
    connection = sqlite3.connect(path, timeout=0, isolation_level=None)
    try:
        connection.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError:
        return False
    finally:
        connection.close()
    return True


def redeliver_after_stall(job: Job) -> None:
    """The zombie did not acknowledge, so its delivery comes once more; only observe would run it."""
    if job.mode != "observe":
        redeliver(job)


@pytest.mark.parametrize("name", ["lease, plain sink", "lease, keyed sink"])
def test_the_receipt_survives_the_death_of_its_maker(name: str, tmp_path: Path) -> None:
    mode, sink = MODES[name]
    job = Job(str(tmp_path), mode, sink, "after_complete")
    with stopped_at(job) as child:
        child.kill()
        child.wait()
    assert work(job) == semel.Done("receipt", replayed=True)


def test_a_worker_that_nobody_kills_has_one_effect(tmp_path: Path) -> None:
    for name, (mode, sink) in MODES.items():
        folder = tmp_path / name
        folder.mkdir()
        job = Job(str(folder), mode, sink)
        prepare(job)
        redeliver(job)
        assert measured(job) == Cell(1)
        redeliver(job)
        assert measured(job) == Cell(2 if mode == "observe" else 1)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["after_claim", "before_effect", "after_effect", "before_complete"])
def test_a_journaled_event_of_a_killed_process_is_swept_by_another(point: str, tmp_path: Path) -> None:
    job = Job(str(tmp_path), "lease", "keyed", point, journal=True)
    with stopped_at(job) as child:
        child.kill()
        child.wait()
    assert sweep(job) == ["recovered"]
    assert measured(job) == Cell(1)
    assert sweep(job) == []
