"""Name this process, reset its locks, threads and random numbers in a forked child; import late; load by name."""

import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet

from semel.core.ids import WORKER_ID_BYTES
from semel.errors import PolicyInvalid

__all__ = [
    "asyncio",
    "futures",
    "inspect",
    "load_object",
    "logging",
    "new_owner",
    "restart_after_fork",
    "worker_name",
]

OWNER_BYTES = 16
_RANDOM_BYTES = OWNER_BYTES - WORKER_ID_BYTES
_POOL_BYTES = _RANDOM_BYTES * 256
HOST_CHARS_MAX = 100


class Restartable(Protocol):
    """An object with locks or threads."""

    def after_fork(self) -> None:
        """Replace them; runs in the child, before any other code of semel."""
        ...


_live: "WeakSet[Restartable]" = WeakSet()


def restart_after_fork(thing: Restartable) -> None:
    """Call `thing.after_fork()` in every child, for as long as `thing` lives."""
    _live.add(thing)


class _Owners:
    """Owners: the random id of this process, then 96 random bits of the operating system.

    They are fetched 256 at a time: a system call costs half a claim.
    """

    def __init__(self) -> None:
        self.worker_id: bytes = os.urandom(WORKER_ID_BYTES)
        self._name = ""
        self._pool: list[bytes] = []

    def __call__(self) -> bytes:
        while True:
            try:
                return self._pool.pop()
            except IndexError:
                drawn, mine = os.urandom(_POOL_BYTES), self.worker_id
                self._pool += [
                    mine + drawn[at : at + _RANDOM_BYTES] for at in range(0, _POOL_BYTES, _RANDOM_BYTES)
                ]

    def name(self) -> str:
        """Return the name of this process as a worker."""
        if not self._name:
            import socket  # slow to import, and needed only for errors

            host = socket.gethostname()[:HOST_CHARS_MAX]
            self._name = f"{host}:{os.getpid()}:{self.worker_id.hex()}"
        return self._name

    def after_fork(self) -> None:
        """Drop the fetched owners and the id: two processes must never share one."""
        self.worker_id = os.urandom(WORKER_ID_BYTES)
        self._name = ""
        self._pool = []


_owners = _Owners()
new_owner: Callable[[], bytes] = _owners.__call__
"""The random id of one claim call."""
worker_name: Callable[[], str] = _owners.name
"""The name of this process in kept errors: host, process id, and the id with which its owners begin."""


def _after_fork() -> None:
    _owners.after_fork()
    for thing in list(_live):
        thing.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class _Module:
    """A module that is imported at its first use. Each name is looked up once."""

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


def load_object(spec: str) -> Any:
    """Return the object of `module:name`. Raises `PolicyInvalid`, also if the module cannot be imported."""
    module_name, colon, name = spec.partition(":")
    if not colon or not module_name or not name:
        raise PolicyInvalid(f"{spec!r} names no handler; write module:function, such as app:handle")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found: Any = import_module(module_name)
    except Exception as error:
        raise PolicyInvalid(f"{spec}: {_import_problem(module_name, error)}") from error
    try:
        for part in name.split("."):
            found = getattr(found, part)
    except AttributeError:
        raise PolicyInvalid(f"{spec}: {module_name} has no {name!r}") from None
    return found


def _import_problem(module_name: str, error: Exception) -> str:
    """Return why a module cannot be imported, and the line of the error."""
    if (
        isinstance(error, ModuleNotFoundError)
        and error.name
        and f"{module_name}.".startswith(f"{error.name}.")
    ):
        return f"no module named {error.name!r} here"
    from traceback import extract_tb  # needed only for this error

    files = [each for each in extract_tb(error.__traceback__)[1:] if not each.filename.startswith("<frozen")]
    where = f" ({files[-1].filename}, line {files[-1].lineno})" if files else ""
    return f"{module_name} cannot be imported: {type(error).__name__}: {error}{where}"
