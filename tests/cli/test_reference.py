"""The pages about the commands are what `--help` prints today."""

from tests.cli.render_reference import FOLDER, pages


def test_the_pages_are_fresh() -> None:
    there = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md")}
    assert there == pages(), "run: python -m tests.cli.render_reference"
