"""The inbox has no window between mark and effect: whatever breaks, both are there or neither is."""

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

import semel
from semel.testing.faults import Died
from tests.faults.table import GUARANTEES, NEVER, Cell
from tests.faults.worker_process import KEY, Job, effects, inbox_client, prepare, work
from tests.services import postgres

INBOX = GUARANTEES["inbox"]


@pytest.fixture(params=["sqlite", "postgres"])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> Job:
    """The same row of the table on both databases that have an inbox."""
    server = postgres.place(tmp_path) if request.param == "postgres" else ""
    job = Job(str(tmp_path), "inbox", server=server)
    prepare(job)
    return job


@pytest.fixture
def job(tmp_path: Path) -> Job:
    job = Job(str(tmp_path), "inbox")
    prepare(job)
    return job


def breaks_at(point: str, error: BaseException) -> Callable[[str], None]:
    """The connection breaks there: an error that the worker sees, or its death."""

    def trap(reached: str) -> None:
        if reached == point:
            raise error

    return trap


@pytest.mark.parametrize(
    ("point", "window"),
    [
        ("after_claim", "claim_reply_lost"),
        ("after_effect", "effect_reply_lost"),
        ("after_complete", "complete_reply_lost"),
    ],
)
def test_a_reply_that_is_lost_repeats_the_transaction_and_not_the_effect(
    either: Job, point: str, window: str
) -> None:
    assert work(either, breaks_at(point, ConnectionError("no answer"))) is False
    assert work(either) is True
    assert Cell(effects(either)) == INBOX[window]


@pytest.mark.parametrize(
    ("point", "window"),
    [
        ("before_claim", "before_claim"),
        ("after_claim", "after_claim"),
        ("after_effect", "after_effect"),
        ("before_complete", "after_effect"),
        ("after_complete", "before_ack"),
    ],
)
def test_a_death_at_any_point_leaves_both_or_neither(either: Job, point: str, window: str) -> None:
    with pytest.raises(Died):
        work(either, breaks_at(point, Died()))
    assert work(either) is True
    assert Cell(effects(either)) == INBOX[window]
    assert work(either) is True
    assert Cell(effects(either)) == INBOX[window], "one more duplicate changed something"


def test_a_database_on_a_server_that_is_restored_loses_mark_and_effect_together(tmp_path: Path) -> None:
    with postgres.own() as server:
        job = Job(str(tmp_path), "inbox", server=server.url)
        prepare(job)
        base, _, name = server.url.rpartition("/")
        with psycopg.connect(f"{base}/template1", autocommit=True) as other:
            other.execute(f"CREATE DATABASE backup TEMPLATE {name}")
        assert work(job) is True
        assert effects(job) == 1
        with psycopg.connect(f"{base}/template1", autocommit=True) as other:
            other.execute(f"DROP DATABASE {name}")
            other.execute(f"ALTER DATABASE backup RENAME TO {name}")
        assert effects(job) == 0
        assert work(job) is True
        assert Cell(effects(job)) == INBOX["store_lost"]


def test_a_database_that_is_restored_from_a_backup_loses_mark_and_effect_together(
    job: Job, tmp_path: Path
) -> None:
    backup = tmp_path / "backup.db"
    with closing(sqlite3.connect(job.database)) as database, closing(sqlite3.connect(backup)) as copy:
        database.backup(copy)
    assert work(job) is True
    assert effects(job) == 1
    for leftover in tmp_path.glob("events.db-*"):
        leftover.unlink()
    shutil.copy(backup, job.database)
    assert effects(job) == 0
    assert work(job) is True
    assert Cell(effects(job)) == INBOX["store_lost"]


def test_a_rollback_takes_the_mark_with_it(job: Job) -> None:
    with inbox_client(job) as once:
        connection = sqlite3.connect(job.database, isolation_level=None)
        connection.execute("BEGIN IMMEDIATE")
        assert once.inbox(connection).first(KEY)
        connection.execute("ROLLBACK")
        connection.close()
    assert work(job) is True
    assert effects(job) == 1


def test_an_effect_that_breaks_a_rule_of_the_business_is_not_taken_for_a_duplicate(job: Job) -> None:
    with inbox_client(job) as once:
        connection = sqlite3.connect(job.database, isolation_level=None)
        connection.execute("CREATE TABLE ledger (amount INTEGER CHECK (amount > 0))")
        connection.execute("BEGIN IMMEDIATE")
        assert once.inbox(connection).first(KEY)
        with pytest.raises(sqlite3.IntegrityError):
            connection.execute("INSERT INTO ledger VALUES (-1)")
        connection.execute("ROLLBACK")
        connection.close()
    assert work(job) is True
    assert effects(job) == 1


def test_windows_that_cannot_exist_are_said_not_to() -> None:
    missing = [window for window, cell in INBOX.items() if cell is NEVER]
    assert missing == ["claim_late", "effect_late", "complete_late"]


def test_a_mark_without_a_transaction_is_refused(job: Job) -> None:
    with inbox_client(job) as once:
        connection = sqlite3.connect(job.database, isolation_level=None)
        with pytest.raises(semel.errors.NoTransaction):
            once.inbox(connection).first(KEY)
        connection.close()


def test_the_first_use_may_be_inside_a_transaction_that_already_writes(job: Job) -> None:
    with (
        inbox_client(job, connect=False) as once,
        closing(sqlite3.connect(job.database, isolation_level=None)) as connection,
    ):
        connection.execute("BEGIN IMMEDIATE")
        assert once.inbox(connection).first(KEY)
