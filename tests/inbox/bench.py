"""What a scenario of the inbox needs: clients, connections of one kind, and somebody else to race with."""

import contextlib
import hashlib
import sqlite3
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Literal

import psycopg

import semel
from semel.core.commands import Claim, Granted, Lookup
from semel.stores.registry import store_for
from tests.inbox.kinds import Kind, had
from tests.services import postgres
from tests.stores.postgres.places import Lenient

CONSUMER = "wallet"
HOUR_US = 3600 * 1_000_000


class Bench:
    """A database with a wallet in it, and a store in the same database."""

    def __init__(self, kind: type[Kind], folder: Path) -> None:
        self.kind = kind
        if kind.dialect == "sqlite":
            self.url = f"sqlite:///{folder / 'app.db'}"
            self.store_url = self.url
            self.wallet = "wallet"
        else:
            self.store_url = postgres.place(folder)
            self.url = self.store_url.partition("?")[0]
            self.wallet = "wallet_" + hashlib.sha256(str(folder).encode()).hexdigest()[:16]
        with self.other() as other:
            other.execute(f"CREATE TABLE {self.wallet} (balance INTEGER CHECK (balance >= 0))")
            other.execute(f"INSERT INTO {self.wallet} VALUES (0)")
            other.commit()

    @classmethod
    def at(cls, kind: type[Kind], url: str, store_url: str, wallet: str) -> "Bench":
        """A database that is there already."""
        bench = cls.__new__(cls)
        bench.kind, bench.url, bench.store_url, bench.wallet = kind, url, store_url, wallet
        return bench

    def policy(self, **options: Any) -> semel.Policy:
        """A policy that goes with the ids of the kind."""
        late: Literal["run", "hold"] = "run" if self.kind.ids is None else "hold"
        return semel.Policy(late=late, **options)

    @contextlib.asynccontextmanager
    async def client(
        self, mode: semel.Mode = "inbox", window: str | float = "1h", **policy: Any
    ) -> AsyncIterator[Any]:
        """A client of the colour of the kind."""
        opened: Any = (semel.open if self.kind.sync else semel.aopen)(
            self.store_url,
            consumer=CONSUMER,
            mode=mode,
            window=window,
            ids=self.kind.ids,
            policy=self.policy(**policy),
        )
        try:
            yield opened
        finally:
            await had(opened.close())

    @contextlib.asynccontextmanager
    async def connection(self, *, autocommit: bool = False, url: str = "") -> AsyncIterator[Kind]:
        """A connection of the kind."""
        connection = self.kind(url or self.url, autocommit=autocommit)
        await connection.open()
        try:
            yield connection
        finally:
            with contextlib.suppress(Exception):
                await connection.rollback()
            await connection.close()

    async def credit(self, connection: Kind, amount: int = 1) -> None:
        await connection.execute(f"UPDATE {self.wallet} SET balance = balance + {amount}")

    # --- from outside ---

    @contextlib.contextmanager
    def other(self) -> Iterator[Any]:
        """A connection of somebody else's, usable from any thread."""
        if self.kind.dialect == "sqlite":
            other: Any = sqlite3.connect(self.url.removeprefix("sqlite:///"), check_same_thread=False)
        else:
            other = psycopg.connect(self.url)
        try:
            yield other
        finally:
            other.close()

    @contextlib.contextmanager
    def rival(self) -> Iterator[tuple[Any, Any]]:
        """Somebody else's connection, and an inbox on it."""
        with (
            semel.open(
                self.store_url,
                consumer=CONSUMER,
                mode="inbox",
                window="1h",
                ids=self.kind.ids,
                policy=self.policy(),
            ) as client,
            self.other() as other,
        ):
            yield other, client.inbox(other)

    @contextlib.contextmanager
    def later(self, function: Any, after_s: float = 0.15) -> Iterator[None]:
        """Call it in another thread after a while."""
        timer = threading.Timer(after_s, function)
        timer.start()
        try:
            yield
        finally:
            timer.join()

    def balance(self) -> int:
        with self.other() as other:
            (found,) = other.execute(f"SELECT balance FROM {self.wallet}").fetchone()
            return int(found)

    @contextlib.contextmanager
    def store(self) -> Iterator[Any]:
        store: Any = store_for(self.store_url)
        if hasattr(store, "adopt"):
            store.adopt()
        if self.kind.ids is not None and self.kind.dialect == "postgresql":
            store.batch_type = Lenient
        store.open()
        try:
            yield store
        finally:
            store.close()

    def record(self, key: str) -> Any:
        with self.store() as store:
            return store.send([Lookup(("", CONSUMER, key))])[0]

    def claim(self, key: str, lease_us: int = HOUR_US, **more: Any) -> Granted:
        """A claim of another mode's on the key, as left behind by a consumer that was switched."""
        with self.store() as store:
            (granted,) = store.send([Claim(("", CONSUMER, key), b"o" * 16, lease_us, HOUR_US, **more)])
            assert isinstance(granted, Granted)
            return granted
