"""The Lua scripts as they are sent: each with the shared beginning, and known by its SHA-1."""

from functools import lru_cache
from hashlib import sha1
from importlib.resources import files

from msgspec import Struct

__all__ = ["ALLOW_OOM", "Script", "Scripts", "scripts_for"]

ALLOW_OOM = b"#!lua flags=allow-oom\n"
"""A completion only makes the record of an effect that exists: refusing it for want of memory would lose the effect."""


class Script(Struct, frozen=True):
    """One script: what EVAL takes, and what EVALSHA takes instead."""

    name: str
    text: bytes
    sha: bytes


class Scripts(Struct, frozen=True):
    """All of them, for one kind of server."""

    claim: Script
    settle: Script
    mark: Script
    compact: Script


@lru_cache(maxsize=2)
def scripts_for(*, shebang: bool) -> Scripts:
    """The scripts for servers that know flags, or for older ones."""
    return Scripts(
        claim=_load("claim", b""),
        settle=_load("settle", ALLOW_OOM if shebang else b""),
        mark=_load("mark", b""),
        compact=_load("compact", b""),
    )


def _load(name: str, first_line: bytes) -> Script:
    folder = files("semel.stores.redis") / "scripts"
    text = first_line + b"\n".join((folder / f"{part}.lua").read_bytes() for part in ("prelude", name))
    return Script(name, text, sha1(text, usedforsecurity=False).hexdigest().encode())
