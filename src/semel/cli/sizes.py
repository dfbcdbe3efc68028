"""Sizes and numbers on the command line: `64KiB`, `16MiB`, `1 line`, `2 lines`."""

import re

import typer

__all__ = ["parse_bytes", "plural", "size_text"]

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([a-z]*)", re.IGNORECASE)


def plural(number: int, thing: str) -> str:
    """So many things: `1 line`, `2 lines`."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def parse_bytes(text: str, option: str) -> int:
    """The bytes of a size option."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2].lower() not in _UNITS:
        raise typer.BadParameter(
            f"{text!r} is not a size; write it like 64KiB, 16MiB or 1000", param_hint=repr(option)
        )
    return round(float(match[1]) * _UNITS[match[2].lower()])


def size_text(size_bytes: int) -> str:
    """A size in its largest binary unit: `64 KiB`."""
    size, units = float(size_bytes), ["bytes", "KiB", "MiB", "GiB"]
    while size >= 2**10 and len(units) > 1:
        size /= 2**10
        units.pop(0)
    return f"{size:.4g} {units[0]}"
