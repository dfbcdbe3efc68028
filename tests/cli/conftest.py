"""A store with a record of every kind, made once for the tests that only look."""

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from decimal import Decimal
from pathlib import Path

import pytest

import semel
from tests.cli.shell import Warm

PERMANENT = semel.Policy(permanent=(ValueError,), run_max_s=7200)


def fail() -> None:
    raise ValueError("no such order")


def vanish() -> None:
    raise RuntimeError("timed out")


def fill(path: Path) -> None:
    """Write one record of every kind."""
    url = f"sqlite:///{path}"
    # A lease that outlasts any run of the tests: what is running must still run for the last of them.
    with semel.open(url, consumer="billing", lease="1h", policy=semel.Policy(run_max_s=7200)) as billing:
        billing.run("evt_done", lambda: {"paid": True})
        billing.run("evt_decimal", lambda: Decimal("1.50"))
        billing.run("evt_bad", lambda: 1)
        billing.using(PERMANENT).run("evt_failed", fail)
        billing.run("evt_released", vanish)
        billing.claim("evt_running", event_type="invoice")
    with semel.open(url, consumer="mails", mode="quarantine") as mails:
        mails.run("evt_unknown", vanish)
        mails.run("evt_done", lambda: None)
    with semel.open(url, consumer="metrics", mode="mark") as metrics:
        metrics.mark("evt_marked")
    with semel.open(url, consumer="short", window="20ms") as short:
        short.run_many([semel.Delivery(key=f"short_{n}", body=n) for n in range(25)], str)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE semel_records SET value = X'6DC1' WHERE key = 'evt_bad'")


@pytest.fixture(scope="session")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "events.db"
    fill(path)
    return path


@pytest.fixture
def place(filled: Path, tmp_path: Path) -> Path:
    """A folder of its own with `events.db`, and a `semel.toml` that names it."""
    shutil.copy(filled, tmp_path / "events.db")
    (tmp_path / "semel.toml").write_text('store = "sqlite:///events.db"\n', encoding="utf-8")
    return tmp_path


@pytest.fixture(scope="session", autouse=True)
def _end_the_warm_program() -> Iterator[None]:
    yield
    Warm.end()
