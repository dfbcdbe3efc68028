"""Find the handler that a command line names: `app:handler`."""

from typing import Any

from semel.cli.exits import USAGE, CommandExit
from semel.named import named

__all__ = ["loaded"]


def loaded(spec: str) -> Any:
    """The object that `module:name` names. Raises `CommandExit` for what is no such name, and `PolicyInvalid`."""
    module, colon, name = spec.partition(":")
    if not (module and colon and name):
        raise CommandExit(f"{spec!r} names no handler; write module:function, such as app:handle", USAGE)
    return named(spec)
