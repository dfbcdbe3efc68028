"""A storm on a real broker: duplicates, and workers killed with -9 in the middle of their work; then the ledgers.

The plain ledger has no unique constraint, so that a double would show; the keyed one honours the idempotency key,
as a payment provider would.
"""

import asyncio
import os
import random
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg

import semel
import semel.brokers
from semel.testing.broker_contract import Broker, Sent
from tests.cli.processes import ROOT, environment

WORKERS = 3
WITHIN_S = 300.0
"""Much longer than it takes. Nine workers are started one after the other, on a busy computer in ten seconds each."""
LEDGER = "SEMEL_TEST_LEDGER"


def handler(message: semel.brokers.Arrival) -> None:
    """Two effects: one plain, one keyed. What `semel consume` runs in the workers."""
    current = semel.current()
    with closing(sqlite3.connect(os.environ[LEDGER], timeout=60, isolation_level=None)) as ledger, ledger:
        ledger.execute("INSERT INTO plain VALUES (?)", (current.key,))
        ledger.execute("INSERT OR IGNORE INTO keyed VALUES (?, ?)", (current.idempotency_key, current.key))


def transfer(connection: Any, message: semel.brokers.Arrival) -> None:
    """The plain effect in the runner's transaction, in the database that holds the marks."""
    connection.execute("INSERT INTO " + os.environ[LEDGER] + " VALUES (%s)", (semel.current().key,))


class Storm:
    """Workers on one broker and one store, killed and replaced until everything is settled."""

    kills_max = 2 * WORKERS

    def __init__(self, url: str, folder: Path, seed: int) -> None:
        self._command = [
            sys.executable, "-m", "semel", "consume", "tests.brokers.storm:handler", "--from", url,
            "--store", f"sqlite:///{folder}/records.db", "--lease", "1s", "--retry-delay", "50ms", "--batch", "20",
        ]  # fmt: skip
        self._ledger = folder / "ledger.db"
        self._chance = random.Random(seed)
        self.kills = 0

    async def run(self, broker: Broker, events: int) -> None:
        """Pour the messages in, kill while they are worked on, then let it end; check that the ledgers agree."""
        self._prepare()
        keys = [f"k{n}" for n in range(events)]
        deliveries = keys + self._chance.sample(keys, events * 3 // 10)
        self._chance.shuffle(deliveries)
        await broker.send([Sent(key) for key in deliveries])
        workers = [self._worker() for _ in range(WORKERS)]
        try:
            async with asyncio.timeout(WITHIN_S):
                while self.kills < self.kills_max and (noted := self._noted()) < events:
                    if noted > events * self.kills // 10:
                        self._kill(workers)
                    await asyncio.sleep(self._chance.random() / 4)
                while await broker.count_unsettled():  # noqa: ASYNC110 - another process's work
                    await asyncio.sleep(0.1)
        finally:
            for worker in workers:
                worker.send_signal(signal.SIGTERM)
            for worker in workers:
                worker.wait(30)
        self._agree(keys)

    def _prepare(self) -> None:
        with closing(sqlite3.connect(self._ledger)) as ledger, ledger:
            ledger.execute("PRAGMA journal_mode = WAL")
            ledger.execute("CREATE TABLE plain (key TEXT)")
            ledger.execute("CREATE TABLE keyed (idempotency_key TEXT PRIMARY KEY, key TEXT)")

    @property
    def _place(self) -> str:
        """Where the workers' handler finds the ledger."""
        return str(self._ledger)

    def _worker(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command, cwd=ROOT, env=environment(**{LEDGER: self._place}))

    def _kill(self, workers: list[Any]) -> None:
        at = self._chance.randrange(len(workers))
        workers[at].kill()
        workers[at].wait()
        self.kills += 1
        workers[at] = self._worker()

    def _noted(self) -> int:
        with closing(sqlite3.connect(self._ledger, timeout=60)) as ledger, ledger:
            return int(ledger.execute("SELECT count(*) FROM keyed").fetchone()[0])

    def _agree(self, keys: list[str]) -> None:
        with closing(sqlite3.connect(self._ledger)) as ledger, ledger:
            keyed = Counter(key for (key,) in ledger.execute("SELECT key FROM keyed"))
            plain = Counter(key for (key,) in ledger.execute("SELECT key FROM plain"))
        assert self.kills > 0, "a storm without kills proves nothing"
        assert keyed == Counter(keys), "through a sink that honours the key: none lost, none doubled"
        assert set(plain) == set(keys), "none lost"
        repeats = sum(plain.values()) - len(keys)
        assert repeats <= self.kills * 10, "an effect repeats only where a worker was killed with it in hand"


class InboxStorm(Storm):
    """The same in mode inbox on PostgreSQL: a plain ledger, beside the marks, is exact."""

    kills_max = WORKERS

    def __init__(self, url: str, database: str, store: str, seed: int) -> None:
        super().__init__(url, Path(), seed)
        at = self._command.index("--store")
        self._command[at : at + 2] = ["--store", store, "--mode", "inbox"]
        self._command[self._command.index("tests.brokers.storm:handler")] = "tests.brokers.storm:transfer"
        self._database = database
        self._table = f"ledger_{os.urandom(6).hex()}"

    def _prepare(self) -> None:
        self._ask(f"CREATE TABLE {self._table} (key TEXT)")

    def _ask(self, statement: str) -> list[Any]:
        with psycopg.connect(self._database) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    @property
    def _place(self) -> str:
        return self._table

    def _noted(self) -> int:
        return int(self._ask(f"SELECT count(*) FROM {self._table}")[0][0])

    def _agree(self, keys: list[str]) -> None:
        plain = Counter(key for (key,) in self._ask(f"SELECT key FROM {self._table}"))
        self._ask(f"DROP TABLE {self._table}")
        assert self.kills > 0, "a storm without kills proves nothing"
        assert plain == Counter(keys), "none lost, none twice, without any help from the ledger"
