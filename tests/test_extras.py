"""The hint to install an extra is a command that works where semel came from."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from semel.runtime import extras

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "src").rglob("*.py"))


class _Installed:
    def __init__(self, noted: str | None) -> None:
        self.noted = noted

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return self.noted


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> _Installed:
    """semel as pip puts it, not a clone."""
    found = _Installed(None)
    monkeypatch.setattr(extras, "_SOURCE", tmp_path / "site-packages")
    monkeypatch.setattr(metadata, "distribution", lambda _name: found)
    return found


def test_in_a_clone_it_names_the_clone() -> None:
    assert extras.install_command("redis") == f'pip install -e "{ROOT}[redis]"'


def test_the_command_is_one_that_pip_takes() -> None:
    words = extras.install_command("redis").replace('"', "").split()
    pip = [sys.executable, "-m", *words, "--dry-run", "--no-deps", "--no-build-isolation", "--no-index", "-q"]
    answer = subprocess.run(pip, capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stderr) == (0, "")


def test_installed_from_a_folder_it_names_the_folder(installed: _Installed, tmp_path: Path) -> None:
    folder = tmp_path / "my clone"
    installed.noted = json.dumps({"url": folder.as_uri(), "dir_info": {}})
    assert extras.install_command("redis") == 'pip install "semel[redis]"', "it is gone"
    folder.mkdir()
    assert extras.install_command("redis") == f'pip install "{folder}[redis]"'


def test_installed_from_a_registry_it_names_the_package(installed: _Installed) -> None:
    assert installed.noted is None
    assert extras.install_command("redis") == 'pip install "semel[redis]"'


def test_every_hint_comes_from_here_and_names_an_extra() -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked: set[str] = set()
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        assert path.name == "extras.py" or not re.search(r"pip install", text), path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "install_command":
                asked |= {each.value for each in node.args if isinstance(each, ast.Constant)}  # type: ignore[misc]
    assert len(asked) > 8
    assert asked - set(known["optional-dependencies"]) == set()
