"""The page about keys names everything that is public; `tests/test_pages.py` runs its examples."""

from pathlib import Path

from semel import keys

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_every_function_is_on_the_reference_page() -> None:
    text = (DOCS / "reference/keys.md").read_text(encoding="utf-8")
    functions = [name for name in keys.__all__ if name.islower()]
    assert [name for name in functions if f"`{name}(" not in text] == []
