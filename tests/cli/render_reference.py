"""Write the pages about the commands from their `--help`: `python -m tests.cli.render_reference`."""

import typer

from semel.cli.app import app
from tests.cli.shell import ROOT, Warm, semel

FOLDER = ROOT / "docs/reference/cli"


def command_paths() -> list[tuple[str, ...]]:
    """Every command, by the words that name it; the root is the empty one."""
    root = typer.main.get_command(app)
    found: list[tuple[str, ...]] = [()]
    pending: list[tuple[tuple[str, ...], object]] = [((), root)]
    while pending:
        words, group = pending.pop(0)
        for name, command in getattr(group, "commands", {}).items():
            found.append((*words, name))
            pending.append(((*words, name), command))
    return found


def help_of(words: tuple[str, ...]) -> str:
    """What the real program prints, 100 columns wide and without colours."""
    answer = semel(*words, "--help", cwd=ROOT, env={"NO_COLOR": "1", "LC_ALL": "C.UTF-8"})
    assert answer.code == 0, answer.err
    return "\n".join(line.rstrip() for line in answer.out.strip("\n").splitlines())


def pages() -> dict[str, str]:
    """The text of every page by its name."""
    paths = command_paths()
    texts = {words: help_of(words) for words in paths}
    made: dict[str, str] = {}
    for first in sorted({words[0] for words in paths if words}):
        parts = [words for words in paths if words[:1] == (first,)]
        blocks = [
            f"{'#' * len(words)} semel {' '.join(words)}\n\n```text\n{texts[words]}\n```\n" for words in parts
        ]
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
    Warm.end()


if __name__ == "__main__":
    main()
