"""Mode inbox with a message that kills its process: it alone goes to the dead letters, and nothing else suffers."""

import asyncio
import os
import subprocess
import sys
from collections import Counter
from typing import Any

import psycopg
import pytest

import semel
import semel.brokers
from semel.brokers.dead_letters import letter_of
from semel.testing.broker_contract import Sent
from tests.brokers.places import Made, kafka, nats, rabbitmq, redis, sqs
from tests.cli.processes import ROOT, environment
from tests.services import postgres
from tests.waiting import WITHIN_S

ATTEMPTS = 3
GOOD = 150
TABLE = "SEMEL_TEST_TABLE"


def transfer(connection: Any, message: semel.brokers.Arrival) -> None:
    """The handler of the workers."""
    if bytes(message.body) == b"killer":
        os._exit(9)
    connection.execute("INSERT INTO " + os.environ[TABLE] + " VALUES (%s)", (semel.current().key,))


def ask(statement: str) -> list[Any]:
    with psycopg.connect(postgres.url()) as connection:
        cursor = connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []


async def deaths_until_settled(broker: Any, command: list[str], table: str) -> int:
    """Start a worker again each time it dies, until the broker holds nothing; how often it died."""
    deaths = 0
    while True:
        worker = subprocess.Popen(command, cwd=ROOT, env=environment(**{TABLE: table}))  # noqa: ASYNC220 - it only starts
        try:
            while worker.poll() is None and await broker.count_unsettled():  # noqa: ASYNC110 - a broker has no event
                await asyncio.sleep(0.1)
        finally:
            if worker.poll() is None:
                worker.terminate()
            ended = worker.wait(WITHIN_S)
        if ended != 9:
            assert ended == 0
            return deaths
        deaths += 1
        assert deaths <= 1 + ATTEMPTS, "the killer is given up"


@pytest.mark.slow
@pytest.mark.timeout(600)  # five starts of the program, on a computer that may be busy
@pytest.mark.parametrize("made", [redis, nats, kafka, rabbitmq, sqs])
def test_a_killer_is_given_up_and_its_neighbours_are_done_once(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    keys = [f"k{number}" for number in range(GOOD)]
    table = f"ledger_{os.urandom(6).hex()}"

    async def scene() -> None:
        broker, url = await made()
        messages = [Sent(key, key.encode()) for key in keys]
        messages.insert(GOOD // 3, Sent("killer", b"killer"))
        await broker.send(messages)
        command = [
            sys.executable, "-m", "semel", "consume", "tests.brokers.test_poison:transfer", "--from", url,
            "--store", postgres.place(broker.name), "--mode", "inbox", "--max-attempts", str(ATTEMPTS),
            "--retry-delay", "50ms",
        ]  # fmt: skip
        deaths = await deaths_until_settled(broker, command, table)
        dead = await broker.dead()
        await broker.close()
        assert [body for _, body in dead] == [b"killer"]
        letter = letter_of(dead[0][0])
        assert letter is not None
        assert "no end of the earlier ones was recorded" in letter.error
        assert deaths == 1 + ATTEMPTS  # the first one ran with others: nobody could say which of them it was

    ask(f"CREATE TABLE {table} (key TEXT)")
    try:
        asyncio.run(scene())
        assert Counter(key for (key,) in ask(f"SELECT key FROM {table}")) == Counter(keys)
    finally:
        ask(f"DROP TABLE {table}")
