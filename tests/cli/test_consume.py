"""`semel consume`: outages, refusals, failing handlers, and what is left."""

import asyncio
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import nats
import pika
import pytest
import redis

from semel.brokers.probes import look_at
from semel.observe.doctor import of_source
from semel.testing.broker_contract import Sent
from tests.brokers.topics import Topic
from tests.cli.processes import WITHIN_S, semel, start, warm
from tests.services import kafka as kafka_service
from tests.services import nats as nats_service
from tests.services import postgres as postgres_service
from tests.services import rabbitmq as rabbitmq_service
from tests.services import redis as redis_service
from tests.services import sqs as sqs_service
from tests.services import sqs_refusals
from tests.services.server import NOBODY

__all__ = ["warm"]

pytestmark = [pytest.mark.usefixtures("warm"), pytest.mark.slow]

APP = """
from semel import GiveUp

async def note(message):
    print(message.body.decode(), flush=True)

async def fail(message):
    raise RuntimeError("the bank is closed")

async def give_up(message):
    raise GiveUp("no such account")

def credit(connection, message):
    pass
"""
AWAY = {
    "kafka": f"kafka://127.0.0.1:{NOBODY}/t?group=g",
    "rabbitmq": f"amqp://127.0.0.1:{NOBODY}/?queue=q",
    "nats": f"nats://127.0.0.1:{NOBODY}?stream=S&durable=d",
    "sqs": f"sqs://eu-west-1/q?endpoint=http://127.0.0.1:{NOBODY}",
    "redis": f"redis://127.0.0.1:{NOBODY}/0?stream=s&group=g",
}


@pytest.fixture(autouse=True)
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "app.py").write_text(APP)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")


class Stream:
    """A stream of the shared server, with messages in it."""

    def __init__(self, keys: int) -> None:
        self.name = f"t-{os.urandom(6).hex()}"
        url = redis_service.place("streams").partition("?")[0]
        self.url = f"{url}?stream={self.name}&group=g"
        with redis.Redis.from_url(url) as client:
            for number in range(keys):
                client.xadd(self.name, {"message_id": f"k{number}", "data": b"{}"})

    def groups(self) -> Any:
        """Who consumes from it."""
        with redis.Redis.from_url(self.url.partition("?")[0]) as client:
            return client.xinfo_groups(self.name)


def lines_until(process: subprocess.Popen[bytes], words: str) -> list[str]:
    """What it has said on stderr, up to the line with these words."""
    assert process.stderr is not None
    said: list[str] = []
    for line in process.stderr:
        said.append(line.decode())
        if words in said[-1]:
            return said
    raise AssertionError(f"it ended without {words!r}: {said}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("broker", AWAY)
def test_a_broker_that_is_away_is_reported_once_and_a_signal_ends_it(
    broker: str, number: signal.Signals, tmp_path: Path
) -> None:
    with start("consume", "app:note", "--from", AWAY[broker], "--store", "memory:", cwd=tmp_path) as process:
        try:
            said = lines_until(process, "cannot be reached")
            process.send_signal(number)
            _, rest = process.communicate(timeout=WITHIN_S)
        finally:
            process.kill()
    assert process.returncode == 0
    said += rest.decode().splitlines()
    assert len([line for line in said if "cannot be reached" in line]) == 1
    assert len(said) <= 4, f"the start, the outage, the end: {said}"


def test_a_broker_that_goes_away_later_is_reported_and_comes_back(tmp_path: Path) -> None:
    server = nats_service.Own(tmp_path)
    asyncio.run(_publish(server.url))
    url = f"{server.url}?stream=S&durable=d"
    with start("consume", "app:note", "--from", url, "--store", "memory:", cwd=tmp_path) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"{}\n", "it works"
            server.kill()
            lines_until(process, "cannot be reached")
            server.start()
            lines_until(process, "answers again")
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=WITHIN_S)
        finally:
            process.kill()
            server.kill()
    assert process.returncode == 0


async def _publish(url: str) -> None:
    client = await nats.connect(url)
    await client.jetstream().add_stream(name="S", subjects=["s"])
    await client.jetstream().publish("s", b"{}", headers={"message_id": "k"})
    await client.close()


def test_a_stream_that_is_missing_exits_with_78(tmp_path: Path) -> None:
    url = f"{nats_service.url()}?stream=missing&durable=d"
    ended = semel("consume", "app:note", "--from", url, "--store", "memory:", cwd=tmp_path)
    assert ended.returncode == 78
    assert b"create it first" in ended.stderr


REFUSED = {
    "kafka": lambda: (
        f"kafka://{kafka_service.secured()}/t?group=g&security=SASL_PLAINTEXT&mechanism=PLAIN"
        "&username=semel&password=wrong"
    ),
    "rabbitmq": lambda: f"{rabbitmq_service.url().replace('guest:guest', 'guest:wrong')}?queue=q",
    "rabbitmq, vhost": lambda: f"{rabbitmq_service.url()}missing?queue=q",
    "nats": lambda: f"{nats_service.secured().replace('//', '//semel:wrong@')}?stream=S&durable=d",
    "sqs": lambda: f"sqs://eu-west-1/missing?endpoint={sqs_service.url()}",
    "redis": lambda: (
        redis_service.place("streams").partition("?")[0].replace("//", "//somebody:wrong@")
        + "?stream=s&group=g"
    ),
}


@pytest.mark.parametrize("broker", REFUSED)
def test_a_refusal_exits_with_78(broker: str, tmp_path: Path) -> None:
    assert_refused(REFUSED[broker](), tmp_path)


@pytest.mark.parametrize("code", ["InvalidClientTokenId", "SignatureDoesNotMatch", "AccessDenied"])
def test_sqs_with_wrong_credentials_exits_with_78(code: str, tmp_path: Path) -> None:
    with sqs_refusals.endpoint() as endpoint:
        assert_refused(f"sqs://eu-west-1/q?endpoint={endpoint}/{code}", tmp_path)


def assert_refused(url: str, folder: Path) -> None:
    ended = semel("consume", "app:note", "--from", url, "--store", "memory:", cwd=folder)
    assert ended.returncode == 78, ended.stderr
    assert b"wrong" not in ended.stderr.replace(b"WRONGPASS", b""), "credentials are not shown"
    assert len(ended.stderr.splitlines()) == 2, f"the start and the reason: {ended.stderr!r}"


def test_a_fenced_member_of_a_kafka_group_exits_with_78_and_the_reason(tmp_path: Path) -> None:
    """Nothing is to be done meanwhile: it must not live on, idle and silent."""
    topic = Topic()
    command = [
        "consume",
        "app:note",
        "--from",
        f"{topic.url}&session_s=6&instance=pod-0",
        "--store",
        "memory:",
    ]
    try:
        asyncio.run(topic.send([Sent("a", b"{}")]))
        with start(*command, cwd=tmp_path) as older:
            assert older.stdout is not None
            assert older.stdout.readline() == b"{}\n", "it works, and has nothing to do from now on"
            with start(*command, cwd=tmp_path) as newer:
                try:
                    _, said = older.communicate(timeout=WITHIN_S)
                    newer.send_signal(signal.SIGTERM)
                    newer.communicate(timeout=WITHIN_S)
                finally:
                    older.kill()
                    newer.kill()
    finally:
        asyncio.run(topic.close())
    assert older.returncode == 78, said
    assert b"instance id" in said
    assert newer.returncode == 0


def test_a_handler_for_another_mode_is_refused_with_the_fix(tmp_path: Path) -> None:
    url = Stream(0).url
    ended = semel("consume", "app:credit", "--from", url, "--store", "memory:", cwd=tmp_path)
    assert ended.returncode == 78
    assert b"--mode inbox" in ended.stderr
    ended = semel(
        "consume", "app:note", "--mode", "inbox", "--from", url, "--store", "sqlite:///s.db", cwd=tmp_path
    )
    assert ended.returncode == 78
    assert b"handler(connection, message)" in ended.stderr


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("import no_such_package", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("from json import no_such_name", "ImportError: cannot import name 'no_such_name'"),
        ("import os\nBANK = os.environ['NO_SUCH_BANK']", "KeyError: 'NO_SUCH_BANK'"),
        ("def note(message:", "SyntaxError"),
    ],
)
def test_a_handler_that_cannot_be_imported_is_refused_before_anything_is_received(
    text: str, told: str, tmp_path: Path
) -> None:
    stream = Stream(1)
    (tmp_path / "broken.py").write_text(f"{text}\n\ndef note(message):\n    pass\n")
    ended = semel("consume", "broken:note", "--from", stream.url, "--store", "memory:", cwd=tmp_path)
    assert ended.returncode == 78
    assert f"broken cannot be imported: {told}" in ended.stderr.decode()
    assert "broken.py, line" in ended.stderr.decode()
    assert stream.groups() == []


def test_an_import_that_fails_inside_the_handler_is_its_own_failure(tmp_path: Path) -> None:
    (tmp_path / "lazy.py").write_text("def note(message):\n    import no_such_package\n")
    stream = Stream(1)
    ended = semel(
        "consume", "lazy:note", "--from", stream.url, "--store", "memory:", "--until-idle", cwd=tmp_path
    )
    assert ended.returncode == 75
    assert b"No module named 'no_such_package'" in ended.stderr


def test_failures_are_logged_and_what_is_left_shows_in_the_exit_code(tmp_path: Path) -> None:
    stream = Stream(3)
    arguments = ["--from", stream.url, "--store", "sqlite:///s.db", "--until-idle", "--retry-delay", "10s"]
    ended = semel("consume", "app:fail", *arguments, cwd=tmp_path)
    assert ended.returncode == 75, ended.stderr
    said = ended.stderr.decode()
    assert "3 messages failed and are left" in said
    for key in ("k0", "k1", "k2"):
        assert re.search(rf"failed for key '{key}', attempt 1; again in \d+\.\d s", said)
    assert said.count("RuntimeError: the bank is closed") == 3, "each with its traceback"


def test_what_a_dead_consumer_holds_shows_in_the_exit_code(tmp_path: Path) -> None:
    stream = Stream(3)
    with redis.Redis.from_url(stream.url.partition("?")[0]) as client:
        client.xgroup_create(stream.name, "g", "0")
        client.xreadgroup("g", "dead", {stream.name: ">"}, count=2)
    ended = semel(
        "consume", "app:note", "--from", stream.url, "--store", "memory:", "--until-idle", cwd=tmp_path
    )
    assert ended.returncode == 75, ended.stderr
    assert b"1 received, 1 acknowledged" in ended.stderr
    assert b"2 messages are held by another consumer" in ended.stderr


def test_messages_that_wait_for_another_attempt_show_in_the_exit_code_of_the_next_run(tmp_path: Path) -> None:
    server, queue = rabbitmq_service.url(), f"t-{os.urandom(6).hex()}"
    url = f"{server}?queue={queue}&kind=classic"
    with pika.BlockingConnection(pika.URLParameters(server)) as connection:
        channel = connection.channel()
        channel.queue_declare(queue, durable=True, arguments={"x-queue-type": "classic"})
        channel.basic_publish("", queue, b"{}", pika.BasicProperties(message_id="a"))
        arguments = ["--from", url, "--store", "sqlite:///s.db", "--until-idle", "--retry-delay", "2m"]
        first, second = (semel("consume", "app:fail", *arguments, cwd=tmp_path) for _ in range(2))
        facts = asyncio.run(look_at(url))
        for name in (queue, f"{queue}.dead", f"{queue}.retry.120s"):
            channel.queue_delete(name)
    assert b"1 message failed and is left" in first.stderr
    assert b"0 received" in second.stderr
    assert b"1 message of an earlier run waits for another attempt" in second.stderr
    assert (first.returncode, second.returncode) == (75, 75)
    assert facts.delayed == 1
    assert any("1 waits for another attempt" in each.what for each in of_source(facts, 0.0, 0))


def test_dead_letters_are_logged_with_their_reason(tmp_path: Path) -> None:
    stream = Stream(2)
    arguments = ["--from", stream.url, "--store", "sqlite:///s.db", "--until-idle"]
    ended = semel("consume", "app:give_up", *arguments, cwd=tmp_path)
    assert ended.returncode == 0, "nothing is left: everything is dealt with"
    said = ended.stderr.decode()
    assert said.count("went to the dead letters: failed") == 2
    assert "no such account" in said


def test_a_window_shorter_than_the_horizon_is_warned_of(tmp_path: Path) -> None:
    stream = Stream(1)
    arguments = ["consume", "app:note", "--from", stream.url, "--store", "memory:", "--window", "1h"]
    with start(*arguments, cwd=tmp_path) as process:
        try:
            said = lines_until(process, "warning: ")
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=WITHIN_S)
        finally:
            process.kill()
    assert "The window of 1h ends" in said[-1]


def test_the_window_is_warned_of_also_if_the_broker_comes_later(tmp_path: Path) -> None:
    with redis_service.own(tmp_path) as server:
        server.stop()
        url = f"{server.url}?stream=s&group=g"
        arguments = ["consume", "app:note", "--from", url, "--store", "memory:", "--window", "1h"]
        with start(*arguments, cwd=tmp_path) as process:
            try:
                lines_until(process, "cannot be reached")
                server.start()
                said = lines_until(process, "warning: ")
                process.send_signal(signal.SIGTERM)
                process.communicate(timeout=WITHIN_S)
            finally:
                process.kill()
    assert "The window of 1h ends" in said[-1]


ADOPTING = """
import semel
from semel.brokers import Route
from semel.policy import InboxColumns, InboxTable

table = InboxTable({table!r}, InboxColumns(event_id="id"))
wallet = semel.aopen({url!r}, consumer="wallet", mode="inbox", policy=semel.Policy(inbox_table=table))

def credit(connection, message):
    connection.execute("INSERT INTO {table}_effects DEFAULT VALUES")

routes = [Route(credit, once=wallet)]
"""


def test_routes_may_use_a_table_of_the_application_as_inbox(tmp_path: Path) -> None:
    url, table = postgres_service.place(tmp_path), f"t_{os.urandom(6).hex()}"
    execute = postgres_service.execute
    execute(url, f"CREATE TABLE {table} (id text PRIMARY KEY)")
    execute(url, f"CREATE TABLE {table}_effects (number bigserial)")
    execute(url, f"INSERT INTO {table} VALUES ('k0')")
    (tmp_path / "adopting.py").write_text(ADOPTING.format(url=url, table=table))
    stream = Stream(3)
    arguments = ["--from", stream.url, "--store", "memory:", "--until-idle"]
    ended = semel("consume", "adopting:routes", *arguments, cwd=tmp_path)
    said = ended.stderr.decode()
    assert ended.returncode == 0, said
    assert "as 'wallet', mode inbox" in said
    assert "3 received, 3 acknowledged, 1 duplicate," in said
    assert "window" not in said, "the rows of such a table have none"
    assert execute(url, f"SELECT id FROM {table} ORDER BY 1") == [("k0",), ("k1",), ("k2",)]
    assert execute(url, f"SELECT count(*) FROM {table}_effects") == [(2,)]
