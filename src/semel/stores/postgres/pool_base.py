"""What both pools share: adapters, how long the server is waited for, and which idle connection may be used."""

import select
import time
from collections.abc import Generator
from typing import Any, TypeVar

import psycopg
from psycopg.abc import AdaptContext
from psycopg.adapt import AdaptersMap, Dumper
from psycopg.pq import Format, TransactionStatus

from semel.stores.postgres import encoding

__all__ = ["CHECK_S", "CONTEXT", "LEFT_TO_THE_PARENT", "NoAnswer", "is_idle", "is_usable", "within"]

T = TypeVar("T")
CHECK_S = 0.1
"""How often a wait for the server looks whether its time is over."""


class _PackedDumper(Dumper):
    """Arrays come packed already."""

    format = Format.BINARY

    def dump(self, obj: Any) -> bytes:
        return obj.data  # type: ignore[no-any-return]


class _Context:
    """The driver's adapters and ours."""

    def __init__(self) -> None:
        self.adapters = AdaptersMap(psycopg.adapters)
        for kind, oid in encoding.ARRAY_OIDS.items():
            self.adapters.register_dumper(
                kind, type(f"{kind.__name__}Dumper", (_PackedDumper,), {"oid": oid})
            )

    @property
    def connection(self) -> None:
        return None


CONTEXT: AdaptContext = _Context()


class NoAnswer(psycopg.OperationalError):
    """The server has not answered in time."""


def within(talk: Generator[Any, Any, T], wait_s: float) -> Generator[Any, Any, T]:
    """The same talk, ended when nothing has come for `wait_s`. The driver reports each short wait in vain by 0."""
    give_up_at = time.monotonic() + wait_s
    try:
        wish = next(talk)
        while True:
            ready = yield wish
            if ready:
                give_up_at = time.monotonic() + wait_s
            elif time.monotonic() >= give_up_at:
                raise NoAnswer(f"no answer within {wait_s:g} s")
            wish = talk.send(ready)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


def is_idle(connection: psycopg.BaseConnection[Any]) -> bool:
    """Whether a connection is open and outside any transaction."""
    return not connection.closed and connection.pgconn.transaction_status == TransactionStatus.IDLE


def is_usable(connection: psycopg.BaseConnection[Any]) -> bool:
    """Whether an idle connection may be used: nothing has come on it, as it does when the server goes away."""
    if not is_idle(connection):
        return False
    poll = select.poll()
    poll.register(connection.pgconn.socket, select.POLLIN)
    return not poll.poll(0)


LEFT_TO_THE_PARENT: list[Any] = []
"""Connections that a fork copied: to collect one would close the parent's."""
