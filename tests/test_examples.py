"""Every example runs, in an empty folder, and prints what its last lines say."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("[0-9][0-9]_*.py"))


def expected(example: Path) -> str:
    """What stands after `# prints:`."""
    _, _, printed = example.read_text().partition("# prints:\n")
    return "".join(line.removeprefix("# ").removeprefix("#") for line in printed.splitlines(keepends=True))


def test_examples_are_numbered_without_gaps() -> None:
    assert [int(example.name[:2]) for example in EXAMPLES] == list(range(1, len(EXAMPLES) + 1))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_example_prints_what_it_says(example: Path, tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, example], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    assert ran.stdout == expected(example)
    assert expected(example), "an example that says nothing proves nothing"
