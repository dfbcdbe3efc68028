"""Follow a path like `order.lines.0.id` through attributes, mapping keys and list indexes."""

import re
from collections.abc import Mapping
from typing import Any, Final

from semel.errors import KeyInvalid, KeyMissing

__all__ = ["SEGMENTS_MAX", "parse", "walk"]

SEGMENTS_MAX = 32
"""As deep as any event nests; a longer path is a mistake."""

_DOT = re.compile(r"(?<!\\)\.")
_ABSENT: Final = object()


def parse(path: str) -> tuple[str, ...]:
    r"""Split a path at its dots; `\.` is a dot inside a name. Raises `KeyInvalid` for an empty path or name."""
    segments = tuple(part.replace("\\.", ".") for part in _DOT.split(path))
    if not all(segments) or len(segments) > SEGMENTS_MAX:
        raise KeyInvalid(
            f"{path!r} is not a path; write names and list indexes with dots between them, like order.lines.0.id, "
            f"at most {SEGMENTS_MAX}"
        )
    return segments


def walk(root: Any, segments: tuple[str, ...]) -> Any:
    """Return what the path leads to; `None` is a value. Raises `KeyMissing` where it leads nowhere.

    In a mapping a segment is a key and never an attribute (`items` is a field, not a method); in a list or tuple a
    number is an index; everywhere else a segment is an attribute. A mapping that makes up missing values is not
    asked to.
    """
    value = root
    for depth, segment in enumerate(segments):
        if isinstance(value, Mapping):
            value = value.get(segment, _ABSENT)
        elif isinstance(value, list | tuple) and segment.isdecimal():
            index = int(segment)
            value = value[index] if index < len(value) else _ABSENT
        else:
            value = getattr(value, segment, _ABSENT)
        if value is _ABSENT:
            found = ".".join(segments[:depth]) or "the event"
            raise KeyMissing(
                f"no {segment!r} in {found} (path {'.'.join(segments)}); correct the path, or have the producer send it"
            )
    return value
