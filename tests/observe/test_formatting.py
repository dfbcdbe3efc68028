"""Text for people: numbers and things agree."""

import re
from pathlib import Path

import pytest

import semel
from semel.observe.formatting import plural


@pytest.mark.parametrize(
    ("number", "told"), [(0, "0 keys were"), (1, "1 key was"), (2, "2 keys were"), (1200, "1,200 keys were")]
)
def test_one_thing_is_not_many(number: int, told: str) -> None:
    assert plural(number, "key was", "keys were") == told
    assert plural(number, "line") == f"{number:,} line{'' if number == 1 else 's'}"


def test_no_message_counts_one_thing_as_many() -> None:
    """A number and a noun are put together by `plural`, never by hand."""
    nouns = "duplicate|message|event|record|claim|key|line|attempt|mark|partition|aggregate|dead letter|expired record"
    by_hand = re.compile(rf"\{{[^{{}}]*:,?\}} (?:{nouns})s\b|'' if [^}}]* == 1 else 's'")
    source = Path(semel.__file__).parent
    found = [
        f"{path.name}: {line.strip()}"
        for folder in ("cli", "observe", "outbox", "server")
        for path in sorted((source / folder).rglob("*"))
        if path.suffix in (".py", ".html")
        for line in path.read_text(encoding="utf-8").splitlines()
        if by_hand.search(line) and "_MAX" not in line
    ]
    assert found == []
