"""The statements of `queries.sql`, by name, for one schema."""

import re
from functools import lru_cache
from importlib.resources import files

__all__ = ["channel_of", "outbox_channel_of", "statements"]

_BLOCK = re.compile(
    r"^-- (fragment|query): (\w+)\n(.*?)(?=^-- (?:fragment|query): |\Z)", re.MULTILINE | re.DOTALL
)
_FRAGMENT = re.compile(r"\{(\w+)\}")
_COMMENT = re.compile(r"\s+--[^\n']*$", re.MULTILINE)
_CHANNEL_CHARS_MAX = 57
_OUTBOX_CHANNEL_CHARS_MAX = 50


def channel_of(schema: str) -> str:
    """The channel on which changes in a schema are told; names are cut to what the server takes."""
    return f"semel_{schema[:_CHANNEL_CHARS_MAX]}"


def outbox_channel_of(schema: str) -> str:
    """The channel on which new messages in a schema's outbox are told."""
    return f"semel_outbox_{schema[:_OUTBOX_CHANNEL_CHARS_MAX]}"


@lru_cache(maxsize=64)
def statements(schema: str) -> dict[str, str]:
    """The text of each statement. `schema` has been checked to be a plain name."""
    source = (files("semel.stores.postgres") / "queries.sql").read_text(encoding="utf-8")
    fragments = {"schema": f'"{schema}"', "name": schema, "channel": channel_of(schema)}
    queries: dict[str, str] = {}
    for kind, name, text in _BLOCK.findall(source):
        filled = _FRAGMENT.sub(lambda match: fragments[match[1]], _COMMENT.sub("", text).strip())
        (fragments if kind == "fragment" else queries)[name] = filled
    return queries | {"begin": "BEGIN", "commit": "COMMIT"}
