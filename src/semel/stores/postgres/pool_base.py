"""The part that both pools share: adapters, waiting for the server, and checks of idle connections."""

import asyncio
import select
import time
from collections.abc import Generator, Sequence
from typing import Any, TypeVar

import psycopg
from psycopg.abc import AdaptContext
from psycopg.adapt import AdaptersMap, Dumper
from psycopg.errors import error_from_result
from psycopg.pq import ExecStatus, Format, TransactionStatus
from psycopg.pq.abc import PGresult

from semel.stores.postgres import encoding

__all__ = [
    "CANCEL_S",
    "CHECK_S",
    "CONTEXT",
    "LEFT_TO_THE_PARENT",
    "NoAnswer",
    "is_idle",
    "is_usable",
    "only_result",
    "wait_for_input",
    "wait_for_input_async",
    "within",
]

T = TypeVar("T")
CHECK_S = 0.1
"""How often a wait for the server checks its deadline."""
CAME = True
CANCEL_S = 5.0
"""How long a cancelled statement may take to end; the driver's own limit for its cursors."""


class _PackedDumper(Dumper):
    """Passes arrays on, which are packed already."""

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
    """Run a generator of the driver; raises `NoAnswer` if the server sends nothing for `wait_s`.

    The driver sends 0 after each short wait in which nothing came.
    """
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


def wait_for_input(socket: int, wait_s: float) -> bool:
    """Wait until the socket has input or the other side has closed it; `False`: neither within `wait_s`."""
    poll = select.poll()
    poll.register(socket, select.POLLIN)
    return bool(poll.poll(wait_s * 1000))


async def wait_for_input_async(socket: int, wait_s: float) -> bool:
    """The same in an event loop."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[bool] = loop.create_future()
    loop.add_reader(socket, _resolve, ready, CAME)
    timer = loop.call_later(wait_s, _resolve, ready, not CAME)
    try:
        return await ready
    finally:
        timer.cancel()
        loop.remove_reader(socket)


def _resolve(ready: "asyncio.Future[bool]", came: bool) -> None:  # noqa: FBT001 - the loop passes no keywords
    if not ready.done():
        ready.set_result(came)


def only_result(results: Sequence[PGresult]) -> PGresult:
    """Return the result of a statement. Raises the driver's error if anything failed, up to the commit."""
    for result in results:
        if result.status not in (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK):
            raise error_from_result(result)
    if not results:
        raise psycopg.OperationalError("the server ended a statement without a result")
    return results[0]


def is_idle(connection: psycopg.BaseConnection[Any]) -> bool:
    """Whether a connection is open and outside any transaction."""
    return not connection.closed and connection.pgconn.transaction_status == TransactionStatus.IDLE


def is_usable(connection: psycopg.BaseConnection[Any]) -> bool:
    """Whether an idle connection may be used. Unexpected input means that the server went away."""
    if not is_idle(connection):
        return False
    return not wait_for_input(connection.pgconn.socket, 0)


LEFT_TO_THE_PARENT: list[Any] = []
"""Connections that a fork copied. They are kept here: garbage collection would close the parent's."""
