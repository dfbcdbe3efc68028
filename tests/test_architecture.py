"""ARCHITECTURE.md names the tree as it is: every path exists, every package is named, the path of `run` is whole."""

import re
import sys
from collections.abc import Iterator
from importlib import import_module
from itertools import groupby
from pathlib import Path
from types import FrameType

import pytest

import semel

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "semel"
PAGE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
RUN_MODULES_MAX = 17
"""How many modules one `run` on SQLite may pass, and below how often it may go from one file to another."""
RUN_SWITCHES_MAX = 42
RUN_SECTION = PAGE.partition("### `run` on SQLite\n")[2].partition("\n### ")[0]

_PATH = re.compile(r"[\w/]+\.(?:py|sql|lua)\b|\b(?:\w+/)+(?=[\s`,)]|$)", re.MULTILINE)
_DOTTED = re.compile(r"\bsemel(?:\.[A-Za-z_]\w*)+")


def paths_in(text: str) -> set[str]:
    """The modules and folders that a text names: `core/flows.py`, `stores/sqlite/`."""
    return set(_PATH.findall(text))


def packages() -> Iterator[str]:
    for path in sorted(SOURCE.rglob("__init__.py")):
        if path.parent != SOURCE:
            yield f"{path.parent.relative_to(SOURCE).as_posix()}/"


def resolves(name: str) -> bool:
    """Whether a dotted name is a module, or a name in one."""
    thing: object = semel
    parts = name.split(".")
    for end in range(2, len(parts) + 1):
        if hasattr(thing, parts[end - 1]):
            thing = getattr(thing, parts[end - 1])
            continue
        try:
            thing = import_module(".".join(parts[:end]))
        except ImportError:
            return False
    return True


def test_every_path_exists() -> None:
    named = paths_in(PAGE)
    assert len(named) > 100
    assert sorted(path for path in named if not (SOURCE / path).exists() and not (ROOT / path).exists()) == []


def test_every_dotted_name_resolves() -> None:
    assert sorted(name for name in set(_DOTTED.findall(PAGE)) if not resolves(name)) == []


@pytest.mark.parametrize("package", list(packages()))
def test_every_package_is_named(package: str) -> None:
    assert f"| `{package}` |" in PAGE


def handle(event: str) -> int:
    return len(event)


@pytest.fixture
def run_path(tmp_path: Path) -> list[str]:
    """The module of each call of semel's own functions, in order, that the second `run` on SQLite makes."""
    path: list[str] = []

    def note(frame: FrameType, event: str, _argument: object) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(SOURCE):
            path.append(file.relative_to(SOURCE).as_posix())

    with semel.open(f"sqlite:///{tmp_path}/events.db", consumer="billing", window="24h") as once:
        once.run("evt_1", handle, "the first call connects")
        once._runtime.fresh_until = float(
            "inf"
        )  # however slow the computer is, the settings are not read again
        before = sys.getprofile()
        sys.setprofile(note)
        try:
            once.run("evt_2", handle, "an event")
        finally:
            sys.setprofile(before)
    return path


def test_the_modules_on_the_path_of_run_are_those_named(run_path: list[str]) -> None:
    table = "".join(line for line in RUN_SECTION.splitlines(keepends=True) if line.startswith("| `"))
    named = [line.split("`")[1] for line in table.splitlines()]
    assert named == list(dict.fromkeys(run_path))


def test_the_path_of_run_is_short(run_path: list[str]) -> None:
    switches = sum(1 for module, _ in groupby(run_path))
    assert len(set(run_path)) <= RUN_MODULES_MAX
    assert switches <= RUN_SWITCHES_MAX


@pytest.mark.parametrize(
    "text", ["see `core/no_such_module.py`", "in `no_such_package/` it is", "`no_such_module.py`"]
)
def test_a_wrong_path_is_found(text: str) -> None:
    assert [path for path in paths_in(text) if not (SOURCE / path).exists()] != []
