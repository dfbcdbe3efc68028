"""The statements of `queries.sql`, by name, for one schema."""

import re
from functools import lru_cache
from importlib.resources import files

__all__ = ["channel_of", "outbox_channel_of", "statements"]

_BLOCK = re.compile(
    r"^-- (fragment|query): (\w+)\n(.*?)(?=^-- (?:fragment|query): |\Z)", re.MULTILINE | re.DOTALL
)
_FRAGMENT = re.compile(r"\{(\w+)\}")
_ONLY = re.compile(r"\{(plain|timed) ([^{}]*)\}")
TABLES = {"plain": "records", "timed": "timed_records"}
"""Where records are: all together, or in partitions by the time inside their ids."""
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
        filled = _FRAGMENT.sub(
            lambda match: fragments.get(match[1], match[0]), _COMMENT.sub("", text).strip()
        )
        if kind == "fragment":
            fragments[name] = filled
        else:
            queries[name] = _for_table(filled, schema, "plain")
            if "{records}" in filled:
                queries[f"{name}_timed"] = _for_table(filled, schema, "timed")
    return queries | {"begin": "BEGIN", "commit": "COMMIT", "rollback": "ROLLBACK"}


def _for_table(text: str, schema: str, kind: str) -> str:
    """The statement for one of the two tables."""
    chosen = _ONLY.sub(lambda match: match[2] if match[1] == kind else "", text)
    return chosen.replace("{records}", f'"{schema}".{TABLES[kind]}')
