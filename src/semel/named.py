"""Find what a name such as `app:handle` stands for: in a module, looked for in the working folder first."""

import sys
from importlib import import_module
from typing import Any

from semel.errors import PolicyInvalid

__all__ = ["named"]


def named(spec: str) -> Any:
    """The object that `module:name` names. Raises `PolicyInvalid`, and what the module raises when it is imported."""
    module_name, colon, name = spec.partition(":")
    if not colon or not module_name or not name:
        raise PolicyInvalid(f"{spec!r} names no handler; write module:function, such as app:handle")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found: Any = import_module(module_name)
    except ModuleNotFoundError as error:
        raise PolicyInvalid(f"{spec}: no module named {error.name!r} here") from error
    try:
        for part in name.split("."):
            found = getattr(found, part)
    except AttributeError:
        raise PolicyInvalid(f"{spec}: {module_name} has no {name!r}") from None
    return found
