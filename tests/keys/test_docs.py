"""The pages about keys say what the code does: their examples run, and they name everything that is public."""

import re
from pathlib import Path

import pytest

from semel import keys

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = [DOCS / "reference/keys.md", DOCS / "howto/choose-a-key.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_run_as_printed(page: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, page.name, "exec"), names)


def test_every_function_is_on_the_reference_page() -> None:
    text = PAGES[0].read_text(encoding="utf-8")
    functions = [name for name in keys.__all__ if name.islower()]
    assert [name for name in functions if f"`{name}(" not in text] == []
