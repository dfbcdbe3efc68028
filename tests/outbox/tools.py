"""What the tests of the outbox share: places to write to, a sink that fails on demand, relays by hand."""

import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psycopg

import semel
from semel import Message
from semel.core.relay_flow import NotPublished, OutboxRow, Published, Sent
from semel.outbox.relay import Relay
from semel.outbox.tables import Entry, Rows, rows_for
from tests.services import postgres

KINDS = ["sqlite", "postgres"]


class Place:
    """A database with an outbox, and the application's way into it."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.url = postgres.place(folder) if kind == "postgres" else f"sqlite:///{folder}/app.db?adopt=true"
        self.path = folder / "app.db"
        self.once = semel.open(self.url, consumer="orders")
        self.once.store.open()  # type: ignore[union-attr]

    def reopen(self, **options: Any) -> None:
        """The application with other settings."""
        self.once.close()
        self.once = semel.open(self.url, consumer="orders", **options)

    @property
    def schema(self) -> str:
        return str(self.once.store.place.schema)  # type: ignore[union-attr]

    def connect(self) -> Any:
        if self.kind == "postgres":
            return psycopg.connect(self.url.partition("?")[0])
        return sqlite3.connect(self.path, timeout=30)

    def write(self, *messages: Message) -> list[str]:
        """Each in a transaction of its own."""
        ids = []
        connection = self.connect()
        for message in messages:
            with connection.transaction() if self.kind == "postgres" else connection:
                ids.append(self.once.outbox(connection).publish(message))
        connection.close()
        return ids

    def orders(self, aggregates: int, each: int, **more: Any) -> list[str]:
        """Numbered messages of several aggregates, in turns."""
        return self.write(
            *(
                Message("order.moved", {"order": a, "n": n}, aggregate=("order", str(a)), **more)
                for n in range(each)
                for a in range(aggregates)
            )
        )

    async def entries(self, **chosen: Any) -> list[Entry]:
        rows = self.rows()
        await rows.open()
        try:
            return await rows.entries(chosen.get("state"), 0, 10_000)
        finally:
            await rows.close()

    def rows(self) -> Rows:
        return rows_for(self.url)

    def close(self) -> None:
        self.once.close()


class ListSink:
    """Keeps what it is given, in order; `answer` decides about each row."""

    name = "list"
    batch_max = 500

    def __init__(self, answer: Callable[[OutboxRow], Sent] | None = None, *, ordered: bool = False) -> None:
        self.ordered = ordered
        self.got: list[OutboxRow] = []
        self.answer = answer or (lambda row: Published())

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def publish(self, rows: Sequence[OutboxRow], /) -> list[Sent]:
        answers: list[Sent] = []
        stopped: set[Any] = set()
        for row in rows:
            held = self.ordered and row.aggregate is not None and row.aggregate in stopped
            answer = NotPublished("held back") if held else self.answer(row)
            if isinstance(answer, Published):
                self.got.append(row)
            else:
                stopped.add(row.aggregate)
            answers.append(answer)
        return answers

    def ids(self) -> list[str]:
        return [row.id for row in self.got]


def first_order(rows: Sequence[OutboxRow]) -> dict[Any, list[int]]:
    """The numbers of each aggregate's rows as a consumer sees them that drops repeats of an id."""
    seen: set[str] = set()
    order: dict[Any, list[int]] = {}
    for row in rows:
        if row.id not in seen:
            seen.add(row.id)
            order.setdefault(row.aggregate, []).append(row.seq)
    return order


async def drain(place: Place, sink: Any, **options: Any) -> Relay:
    """Publish whatever can be published now."""
    relay = Relay(place.rows(), sink, poll_s=0.05, **options)
    await relay.arun(until_empty=True)
    return relay
