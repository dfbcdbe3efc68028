"""The fixture `chaos`, as its plugin has it, and the file of effects that handlers write to."""

from pathlib import Path

import pytest

from semel.testing.pytest_plugin import chaos
from tests.chaos import handlers

__all__ = ["chaos"]


@pytest.fixture(autouse=True)
def effects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "effects.txt"
    file.touch()
    monkeypatch.setenv(handlers.EFFECTS, str(file))
    monkeypatch.setenv(handlers.FILE, str(tmp_path / "racy.db"))
    return file
