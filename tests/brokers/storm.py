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
from pathlib import Path
from typing import Any

import semel
import semel.brokers
from semel.testing.broker_contract import Broker, Sent
from tests.cli.processes import ROOT, environment

WORKERS = 3
WITHIN_S = 90.0
LEDGER = "SEMEL_TEST_LEDGER"


def handler(message: semel.brokers.Arrival) -> None:
    """Two effects: one plain, one keyed. What `semel consume` runs in the workers."""
    current = semel.current()
    with sqlite3.connect(os.environ[LEDGER], timeout=60, isolation_level=None) as ledger:
        ledger.execute("INSERT INTO plain VALUES (?)", (current.key,))
        ledger.execute("INSERT OR IGNORE INTO keyed VALUES (?, ?)", (current.idempotency_key, current.key))
    ledger.close()


class Storm:
    """Workers on one broker and one store, killed and replaced until everything is settled."""

    def __init__(self, url: str, folder: Path, seed: int) -> None:
        self._command = [
            sys.executable, "-m", "semel", "consume", "tests.brokers.storm:handler", "--from", url,
            "--store", f"sqlite:///{folder}/records.db", "--lease", "1s", "--retry-delay", "50ms", "--batch", "20",
        ]  # fmt: skip
        self._ledger = folder / "ledger.db"
        self._chance = random.Random(seed)
        self.kills = 0

    async def run(self, broker: Broker, events: int) -> None:
        """Pour the messages in, kill until half is done, then let it end; check that the ledgers agree."""
        with sqlite3.connect(self._ledger) as ledger:
            ledger.execute("PRAGMA journal_mode = WAL")
            ledger.execute("CREATE TABLE plain (key TEXT)")
            ledger.execute("CREATE TABLE keyed (idempotency_key TEXT PRIMARY KEY, key TEXT)")
        keys = [f"k{n}" for n in range(events)]
        deliveries = keys + self._chance.sample(keys, events * 3 // 10)
        self._chance.shuffle(deliveries)
        await broker.send([Sent(key) for key in deliveries])
        workers = [self._worker() for _ in range(WORKERS)]
        try:
            async with asyncio.timeout(WITHIN_S):
                while await broker.unsettled():
                    await asyncio.sleep(0.1 + self._chance.random() / 4)
                    if self.kills < 2 * WORKERS and self._noted() > events * self.kills // 10:
                        self._kill(workers)
        finally:
            for worker in workers:
                worker.send_signal(signal.SIGTERM)
            for worker in workers:
                worker.wait(30)
        self._agree(keys)

    def _worker(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command, cwd=ROOT, env=environment(**{LEDGER: str(self._ledger)}))

    def _kill(self, workers: list[Any]) -> None:
        at = self._chance.randrange(len(workers))
        workers[at].kill()
        workers[at].wait()
        self.kills += 1
        workers[at] = self._worker()

    def _noted(self) -> int:
        with sqlite3.connect(self._ledger, timeout=60) as ledger:
            return int(ledger.execute("SELECT count(*) FROM keyed").fetchone()[0])

    def _agree(self, keys: list[str]) -> None:
        with sqlite3.connect(self._ledger) as ledger:
            keyed = Counter(key for (key,) in ledger.execute("SELECT key FROM keyed"))
            plain = Counter(key for (key,) in ledger.execute("SELECT key FROM plain"))
        assert self.kills > 0, "a storm without kills proves nothing"
        assert keyed == Counter(keys), "through a sink that honours the key: none lost, none doubled"
        assert set(plain) == set(keys), "none lost"
        repeats = sum(plain.values()) - len(keys)
        assert repeats <= self.kills * 10, "an effect repeats only where a worker was killed with it in hand"
