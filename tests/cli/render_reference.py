"""Write the pages about the commands from their `--help`: `python -m tests.cli.render_reference`."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "docs/reference/cli"
HELP_ENVIRONMENT = {"COLUMNS": "100", "NO_COLOR": "1", "LC_ALL": "C.UTF-8"}


def command_paths() -> list[tuple[str, ...]]:
    """Every command, by the words that name it; the root is the empty one."""
    import typer

    from semel.cli.app import app

    root = typer.main.get_command(app)
    found: list[tuple[str, ...]] = [()]
    pending = [((), root)]
    while pending:
        words, group = pending.pop(0)
        for name, command in getattr(group, "commands", {}).items():
            found.append((*words, name))
            pending.append(((*words, name), command))
    return found


def help_of(words: tuple[str, ...]) -> str:
    """What the real program prints."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SEMEL_")}
    marker = {name: value for name, value in os.environ.items() if name.startswith("SEMEL_TEST_")}
    answer = subprocess.run(
        [sys.executable, "-m", "semel", *words, "--help"],
        env={**environment, **marker, **HELP_ENVIRONMENT},
        capture_output=True,
        text=True,
        check=True,
    )
    return "\n".join(line.rstrip() for line in answer.stdout.strip("\n").splitlines())


def pages() -> dict[str, str]:
    """The text of every page by its name."""
    paths = command_paths()
    with ThreadPoolExecutor(8) as pool:
        texts = dict(zip(paths, pool.map(help_of, paths), strict=True))
    made: dict[str, str] = {}
    for first in sorted({words[0] for words in paths if words}):
        parts = [words for words in paths if words[:1] == (first,)]
        blocks = [f"{'#' * len(words)} semel {' '.join(words)}\n\n```text\n{texts[words]}\n```\n" for words in parts]
        made[f"{first}.md"] = "\n".join(blocks)
    names = "\n".join(f"- [semel {name.removesuffix('.md')}]({name})" for name in made)
    made["index.md"] = f"# The command line\n\n```text\n{texts[()]}\n```\n\n{names}\n"
    return made


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    written = pages()
    for stale in set(FOLDER.glob("*.md")) - {FOLDER / name for name in written}:
        stale.unlink()
    for name, text in written.items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
