"""One name, one meaning; and names that leave the process stay as they are."""

import ast
from collections import defaultdict
from pathlib import Path

from semel.observe import events

ROOT = Path(__file__).resolve().parents[1]

EVENTS = {
    "began", "busy", "claimed", "completed", "counted", "dead_letter", "deadletterstuck", "dropped", "duplicate",
    "ended", "expired", "failed", "late", "lost", "marked", "probed", "purged", "quarantined", "received", "released",
    "storefailed", "storelost", "storesent", "unguarded", "unreachable", "unrecorded",
}  # fmt: skip
"""What logs and the history call the events: people search for these."""


def test_no_class_name_is_defined_twice() -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted(ROOT.glob("src/semel/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_events_keep_the_names_that_logs_and_history_have() -> None:
    kinds = {getattr(events, name) for name in events.__all__ if name[0].isupper()}
    named = {
        kind.name
        for kind in kinds
        if isinstance(kind, type) and issubclass(kind, events.HookEvent) and kind.__subclasses__() == []
    }
    assert named == EVENTS


def test_decisions_are_numbered_without_holes() -> None:
    numbers = [int(path.name[:4]) for path in sorted(ROOT.glob("docs/decisions/[0-9]*.md"))]
    assert numbers == list(range(1, len(numbers) + 1))
