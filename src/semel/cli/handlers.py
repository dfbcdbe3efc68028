"""Find the handler that a command line names: `app:handler`."""

import sys
from importlib import import_module
from typing import Any

from semel.cli.exits import BAD_CONFIGURATION, USAGE, Stop

__all__ = ["loaded"]


def loaded(spec: str) -> Any:
    """The object that `module:name` names, looked for in the working directory first. Raises `Stop`."""
    module_name, colon, name = spec.partition(":")
    if not colon or not module_name or not name:
        raise Stop(f"{spec!r} names no handler; write module:function, such as app:handle", USAGE)
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found: Any = import_module(module_name)
    except ModuleNotFoundError as error:
        raise Stop(f"{spec}: no module named {error.name!r} here", BAD_CONFIGURATION) from error
    try:
        for part in name.split("."):
            found = getattr(found, part)
    except AttributeError:
        raise Stop(f"{spec}: {module_name} has no {name!r}", BAD_CONFIGURATION) from None
    return found
