"""`semel chaos`: its exit codes, its report and its JSON; and the fixture as a plugin of pytest."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.processes import semel, warm

__all__ = ["warm"]

pytestmark = [pytest.mark.usefixtures("warm"), pytest.mark.slow]

APP = """
from pathlib import Path

EFFECTS = Path("effects.txt")


def charge(order: dict) -> None:
    with EFFECTS.open("a") as file:
        file.write(order["id"] + "\\n")  # <the effect> & more


def count() -> list:
    return EFFECTS.read_text().split()


def nothing() -> dict:
    return {}
"""
PAGE = Path(__file__).resolve().parents[2] / "docs/howto/chaos.md"
FEW = ("--rounds", "1", "--workers", "2", "--lease", "1s", "--seed", "4")


@pytest.fixture
def app(tmp_path: Path) -> Path:
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "effects.txt").touch()
    return tmp_path


def test_promises_that_held_are_exit_code_0_and_strict_makes_it_1(app: Path) -> None:
    ran = semel(
        "chaos", "app:charge", *FEW, "--effects", "app:count", "--events", "12", "--fault", "kill",
        "--json", "--strict", "--report", "out.html", "--store", "sqlite:///events.db", cwd=app,
    )  # fmt: skip
    told = json.loads(ran.stdout)
    assert ran.stderr == b""
    assert told["held"] is True
    assert ran.returncode == (1 if told["counts"]["doubled"] else 0)
    assert told["counts"]["lost"] == 0
    assert sum(told["counts"].values()) == len(told["events"]) == 12
    assert told["command"] == (
        "semel chaos app:charge --seed 4 --rounds 1 --mode lease --store sqlite:///events.db --effects app:count"
        " --events 12 --workers 2 --fault kill --lease 1s"
    )
    assert told["faults_by_kind"]["kill"] > 0
    assert told["not_injected"] == []  # no other kind was wanted
    page = (app / "out.html").read_text(encoding="utf-8")
    assert "&lt;the effect&gt; &amp; more" in page
    assert "prefers-color-scheme: dark" in page
    assert "<svg" in page
    assert "http" not in page.replace("http://www.w3.org", "")
    assert "$" not in page


def test_broken_promises_are_exit_code_1_and_are_named(app: Path) -> None:
    ran = semel("chaos", "app:charge", *FEW, "--events", "2", "--effects", "app:nothing", cwd=app)
    assert ran.returncode == 1
    assert b"BROKEN: mode lease with a plain sink" in ran.stdout
    assert ran.stdout.count(b"no effect, and no fault that hit it explains that") == 2
    assert b"again: semel chaos app:charge --seed 4 --rounds 1" in ran.stdout
    assert sorted(path.name for path in app.iterdir() if path.suffix) == ["app.py", "effects.txt"]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("app:charge", "--store", "memory:"), 78, b"one process only"),
        (("app:missing",), 78, b"has no 'missing'"),
        (("charge",), 2, b"names no handler"),
        (("app:charge", "--mode", "observe"), 78, b"chaos knows the modes"),
        (("app:charge", "--effects", "app:missing"), 78, b"has no 'missing'"),
        (("app:charge", "--fault", "flood"), 78, b"there is no fault 'flood'"),
        (("app:charge", "--from", "sqs://eu/orders"), 78, b"kafka: and redis: only"),
        (("app:charge", "--report", "missing/out.html"), 2, b"a folder that exists"),
        (("app:charge", "--store", "redis://127.0.0.1:1/0"), 69, b"127.0.0.1:1"),
    ],
)
def test_what_cannot_be_used_is_refused(
    app: Path, arguments: tuple[str, ...], code: int, said: bytes
) -> None:
    ran = semel("chaos", *arguments, "--rounds", "1", cwd=app)
    assert (ran.returncode, said in ran.stderr) == (code, True), ran.stderr
    assert (app / "effects.txt").read_text() == ""


def test_the_fixture_is_a_plugin_as_the_page_says(tmp_path: Path) -> None:
    app, plugin, test = re.findall(
        r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    (tmp_path / "shop.py").write_text(app)
    (tmp_path / "conftest.py").write_text(plugin)
    (tmp_path / "test_shop.py").write_text(test)
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout
    assert "1 passed" in ran.stdout
