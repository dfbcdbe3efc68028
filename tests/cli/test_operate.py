"""The page about operating a store names what there is: settings, fields, exit codes, commands that parse."""

import re
import shlex
from pathlib import Path

import pytest

from semel.cli import output
from semel.cli.settings import NAMES
from tests.cli.shell import ROOT, semel
from tests.cli.test_records import WHOLE

PAGE = (ROOT / "docs/howto/operate.md").read_text(encoding="utf-8")
COMMANDS = sorted(set(re.findall(r"^\$ semel (.*)$", PAGE, re.MULTILINE)) - {"--install-completion"})


def test_every_field_of_a_record_is_named() -> None:
    assert [name for name in sorted(WHOLE) if f"`{name}`" not in PAGE] == []


def test_every_setting_is_named() -> None:
    assert [name for name in NAMES if f"| `{name}` |" not in PAGE] == []


def test_every_exit_code_is_named() -> None:
    codes = {
        value
        for name, value in vars(output).items()
        if name.isupper() and not name.endswith("_MAX") and isinstance(value, int)
    }
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)} == codes


@pytest.mark.parametrize("command", [each for each in COMMANDS if "--watch" not in each])
def test_every_command_on_the_page_is_understood(place: Path, command: str) -> None:
    answer = semel(*shlex.split(command), cwd=place)
    assert "Try: semel" not in answer.err  # what follows every wrong option or argument
    assert answer.code in {0, 1, 2, 5, 75}, answer.err  # 2: what asks for a yes
