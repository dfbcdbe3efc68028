"""The Pythons that are promised are those that `make matrix` tests."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from tools.matrix.matrix import TARGETS, Result, find_interpreter, summary_of, table_of

ROOT = Path(__file__).resolve().parent.parent
TESTED = [target.python for target in TARGETS]


def test_every_promised_python_is_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    promised = [line.rpartition(" :: ")[2] for line in project["classifiers"] if ":: Python :: 3." in line]
    assert promised == TESTED
    assert project["requires-python"] == f">={TESTED[0]}"


def test_the_documents_name_the_same_pythons() -> None:
    listed = f"{', '.join(TESTED[:-1])} or {TESTED[-1]}"
    for name in ("README.md", "CONTRIBUTING.md", "docs/tutorial/first-steps.md"):
        assert f"Python {listed}" in (ROOT / name).read_text(encoding="utf-8"), name
    page = (ROOT / "docs/reference/python-versions.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| (3\.\d+) \| yes", page, re.MULTILINE) == TESTED


def test_an_unknown_target_is_refused_with_the_known_ones() -> None:
    ended = subprocess.run(
        [sys.executable, str(ROOT / "tools/matrix/matrix.py"), "--only", "potato"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 2
    assert "no such target: potato; there are: bookworm, python3.12, trixie, forky" in ended.stderr


def test_the_summary_is_the_line_in_which_pytest_counts() -> None:
    lines = ["...", "FAILED tests/a.py", "==== 1 failed, 3 passed in 2.00s ====", "left behind by a test", ""]
    assert summary_of(lines) == "1 failed, 3 passed in 2.00s"
    assert summary_of(["installing", "no such package", "  "]) == "no such package"
    assert summary_of([]) == "it printed nothing"


def test_the_table_has_a_row_for_each_target() -> None:
    results = [
        Result(TARGETS[0], "passed", "3 passed", 90.0),
        Result(TARGETS[1], "not run", "none found", 0.0),
    ]
    assert table_of(results).splitlines() == [
        "target      Python  result   minutes  details",
        "bookworm    3.11    passed   1.5      3 passed",
        "python3.12  3.12    not run  0.0      none found",
    ]


def test_an_interpreter_that_does_not_run_is_not_found() -> None:
    assert find_interpreter("2.99") is None
