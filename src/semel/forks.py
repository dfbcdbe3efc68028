"""What a forked child must do afresh: locks, threads and random numbers do not survive a fork."""

import os
from collections.abc import Callable
from typing import Protocol
from weakref import WeakSet

__all__ = ["new_owner", "restart_after_fork"]

OWNER_BYTES = 16
_POOL_BYTES = OWNER_BYTES * 256


class Restartable(Protocol):
    """Something that holds locks or threads."""

    def after_fork(self) -> None:
        """Forget them; runs in the child, before anything else of ours."""
        ...


_live: "WeakSet[Restartable]" = WeakSet()


def restart_after_fork(thing: Restartable) -> None:
    """Have `thing.after_fork()` called in every child, for as long as `thing` lives."""
    _live.add(thing)


class _Owners:
    """128 bits from the operating system per claim, fetched 256 at a time: a system call each is half of a claim."""

    def __init__(self) -> None:
        self._pool: list[bytes] = []

    def __call__(self) -> bytes:
        while True:
            try:
                return self._pool.pop()
            except IndexError:
                drawn = os.urandom(_POOL_BYTES)
                self._pool += [drawn[at : at + OWNER_BYTES] for at in range(0, _POOL_BYTES, OWNER_BYTES)]

    def after_fork(self) -> None:
        """Two processes must never share an owner."""
        self._pool = []


_owners = _Owners()
new_owner: Callable[[], bytes] = _owners.__call__
"""The random id of one claim call."""


def _after_fork() -> None:
    _owners.after_fork()
    for thing in list(_live):
        thing.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
