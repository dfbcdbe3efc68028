"""The app in a real Django project, on SQLite and PostgreSQL; a process for each, for Django's settings exist once."""

import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit
from uuid import uuid4

import pytest

from tests.services import postgres, redis

ROOT = Path(__file__).resolve().parents[2]


def run_project(folder: Path, *arguments: str) -> None:
    """The outbox publishes to a Redis of its own, where nobody else writes."""
    command = [sys.executable, "-m", "tests.integrations.django_shop", *arguments]
    with redis.own(folder) as broker:
        answer = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "SINK": broker.url},
            capture_output=True,
            text=True,
            check=False,
        )
    assert answer.stdout == "fine\n", answer.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.service
def test_a_project_on_sqlite(tmp_path: Path) -> None:
    run_project(tmp_path, "sqlite3", str(tmp_path / "shop.db"))


@pytest.mark.slow
@pytest.mark.service
def test_a_project_on_postgresql(tmp_path: Path) -> None:
    name = f"django_{uuid4().hex[:12]}"
    postgres.execute(postgres.url(), f"CREATE DATABASE {name}")
    parts = urlsplit(postgres.url())
    run_project(
        tmp_path, "postgresql", name, parts.hostname or "", str(parts.port or ""), parts.username or ""
    )
