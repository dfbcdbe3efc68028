"""The README's first snippet, its consoles and the tutorial work as printed: commands run, output is compared."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "tutorial" / "first-steps.md"

_FILE = re.compile(r"this as\s+`(\w+\.py)`:\n\n```python\n(.*?)```", re.DOTALL)
_CONSOLE = re.compile(r"```console\n(.*?)```", re.DOTALL)


def parts(text: str) -> list[tuple[str, str]]:
    """The files to save (name, content) and the consoles (empty, content), as they come on the page."""
    found = [(each.start(), each[1], each[2]) for each in _FILE.finditer(text)]
    found += [(each.start(), "", each[1]) for each in _CONSOLE.finditer(text)]
    return [(name, content) for _, name, content in sorted(found)]


def commands(console: str) -> list[tuple[str, str]]:
    """The commands of a console, and what each prints."""
    pieces = re.split(r"^\$ (.*)\n", console, flags=re.MULTILINE)
    assert not pieces[0], "a console begins with a command"
    return list(zip(pieces[1::2], pieces[2::2], strict=True))


def test_every_block_is_run_or_is_said_to_be_a_part() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.count("```python") == len(_FILE.findall(text)) > 0
    assert text.count("```console") == len(_CONSOLE.findall(text)) > 0


def test_the_tutorial_does_what_it_says(tmp_path: Path) -> None:
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": paths, "COLUMNS": "120"}
    for name, content in parts(PAGE.read_text(encoding="utf-8")):
        if name:
            (tmp_path / name).write_text(content, encoding="utf-8")
            continue
        for command, printed in commands(content):
            done = subprocess.run(
                ["/bin/sh", "-c", command], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
            )
            assert (done.stdout, done.stderr) == (printed, ""), command


def test_the_first_snippet_of_the_readme_runs_when_pasted(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (tmp_path / "pasted.py").write_text(
        text.partition("```python\n")[2].partition("```")[0], encoding="utf-8"
    )
    done = subprocess.run(
        [sys.executable, "pasted.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("charging order-1\n" + "receipt for order-1\n" * 2, "")


def test_the_consoles_of_the_readme_print_what_they_say(tmp_path: Path) -> None:
    env = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    consoles = _CONSOLE.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(consoles) == 1
    for command, printed in commands(consoles[0]):
        done = subprocess.run(
            ["/bin/sh", "-c", command], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )
        assert done.stdout + done.stderr == printed, command
