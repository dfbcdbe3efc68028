"""Modules of the standard library that cost more to import than semel itself, loaded at their first use.

`from semel.lazily import asyncio` reads and types like `import asyncio`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = ["asyncio", "futures", "inspect", "logging"]


class _Module:
    """A module that is not there yet. Each name is looked up once."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        found = getattr(import_module(self._name), name)
        setattr(self, name, found)
        return found


if TYPE_CHECKING:
    import asyncio
    import inspect
    import logging
    from concurrent import futures
else:
    asyncio = _Module("asyncio")
    futures = _Module("concurrent.futures")
    inspect = _Module("inspect")
    logging = _Module("logging")
