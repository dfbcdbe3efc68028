"""What `explain` reads from real brokers that are really set up wrong; and that it leaves them as they were."""

import asyncio
import json
import math
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import aio_pika
import boto3
import nats
import pytest
from confluent_kafka.cimpl import NewTopic
from nats.js.api import ConsumerConfig, StorageType
from nats.js.errors import NotFoundError

from semel.brokers.probes import look_at
from semel.errors import SourceUnavailable, UsageError
from semel.observe.doctor import of_source
from semel.observe.probes import SourceFacts
from tests.cli.shell import Ended, Warm, semel
from tests.services import kafka, rabbitmq, redis, server, sqs
from tests.services import nats as nats_service
from tests.waiting import await_true

DAY_S = 86400.0


@pytest.fixture(scope="module", autouse=True)
def _end_the_warm_program() -> Iterator[None]:
    yield
    Warm.end()


def looked_at(url: str) -> SourceFacts:
    return asyncio.run(look_at(url))


def explained(url: str, *options: str, cwd: Path, **env: str) -> Ended:
    return semel("explain", "--from", url, "--require", "lease", "--json", *options, cwd=cwd, env=env)


def broken(answer: Ended) -> list[str]:
    return [each["what"] for each in answer.json()["weakened_by"] if each["breaks"]]


def one(found: list[str], words: str) -> None:
    assert [words in each for each in found].count(True) == 1, found


# --- SQS ----------------------------------------------------------------------------------------

AWS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}


class Queues:
    """Queues of a test's own."""

    def __init__(self) -> None:
        self.endpoint = sqs.url()
        self.sqs: Any = boto3.client("sqs", region_name="eu-west-1", endpoint_url=self.endpoint)
        self.name = f"t-{os.urandom(6).hex()}"

    def make(self, suffix: str = "", **attributes: str) -> str:
        made = self.sqs.create_queue(QueueName=self.name + suffix, Attributes=attributes)["QueueUrl"]
        asked = self.sqs.get_queue_attributes(QueueUrl=made, AttributeNames=["QueueArn"])
        return str(asked["Attributes"]["QueueArn"])

    def url(self, suffix: str = "", **options: Any) -> str:
        more = "".join(f"&{name}={value}" for name, value in options.items())
        return f"sqs://eu-west-1/{self.name}{suffix}?endpoint={self.endpoint}{more}"


@pytest.fixture
def queues(monkeypatch: pytest.MonkeyPatch) -> Iterator[Queues]:
    for name, value in AWS.items():
        monkeypatch.setenv(name, value)
    made = Queues()
    yield made
    for url in made.sqs.list_queues(QueueNamePrefix=made.name).get("QueueUrls", ()):
        made.sqs.delete_queue(QueueUrl=url)
    made.sqs.close()


@contextmanager
def service(attributes: dict[str, dict[str, str]]) -> Iterator[str]:
    """What the service says of queues, in its own protocol: the server of these tests keeps no retention."""

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            name = asked.get("QueueName") or asked["QueueUrl"].rpartition("/")[2]
            known = name in attributes
            told: Any = (
                {"QueueUrl": f"http://sqs/1/{name}"}
                if "QueueName" in asked
                else {"Attributes": attributes.get(name)}
            )
            if not known:
                told = {"__type": "com.amazonaws.sqs#QueueDoesNotExist", "message": "no such queue"}
            self.send_response(200 if known else 400)
            self.send_header("Content-Type", "application/x-amz-json-1.0")
            self.end_headers()
            self.wfile.write(json.dumps(told).encode())

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answers) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.server_port}"
        finally:
            listening.shutdown()
            thread.join()


def test_an_sqs_queue_that_keeps_longer_than_the_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in AWS.items():
        monkeypatch.setenv(name, value)
    policy = json.dumps({"deadLetterTargetArn": "arn:aws:sqs:eu-west-1:1:lost", "maxReceiveCount": "12"})
    queue = {"VisibilityTimeout": "30", "MessageRetentionPeriod": "345600", "RedrivePolicy": policy}
    lost = {"VisibilityTimeout": "30", "MessageRetentionPeriod": "1209600"}
    with service({"orders": queue, "lost": lost}) as endpoint:
        url = f"sqs://eu-west-1/orders?endpoint={endpoint}"
        facts = looked_at(url)
        assert (facts.deadline_s, facts.horizon_s, facts.redrive_s) == (30, 4 * DAY_S, 14 * DAY_S)
        assert (facts.deliveries_max, facts.buries) == (12, "lost")
        answer = explained(url, cwd=tmp_path, **AWS)
        assert answer.code == 1
        assert len(broken(answer)) == 2
        one(broken(answer), "shorter than the 96h for which sqs://")
        one(broken(answer), "shorter than the 14d for which dead letters")
        assert all(each["fix"] for each in answer.json()["weakened_by"])
        assert explained(url, "--window", "16d", cwd=tmp_path, **AWS).code == 0


@pytest.mark.slow
def test_an_sqs_queue_with_a_short_visibility_timeout(queues: Queues, tmp_path: Path) -> None:
    dead = queues.make("-lost")
    queues.make(
        VisibilityTimeout="5", RedrivePolicy=f'{{"deadLetterTargetArn":"{dead}","maxReceiveCount":"3"}}'
    )
    facts = looked_at(queues.url(deadline_s=20))
    assert (facts.deadline_s, facts.deliveries_max, facts.buries) == (20, 3, f"{queues.name}-lost")
    answer = explained(queues.url(deadline_s=20), cwd=tmp_path, **AWS)
    told = [each["what"] for each in answer.json()["weakened_by"] if not each["breaks"]]
    one(told, "The lease of 30s is longer than the 20s after which sqs://")
    one(told, "The visibility timeout of the queue itself is 5 s")
    one(told, "gives a message up after 3 deliveries")
    assert all(each["fix"] for each in answer.json()["weakened_by"])


@pytest.mark.slow
def test_a_lease_that_uses_up_all_deliveries_of_an_sqs_queue(queues: Queues, tmp_path: Path) -> None:
    dead = queues.make("-lost")
    queues.make(
        MessageRetentionPeriod="86400",
        RedrivePolicy=f'{{"deadLetterTargetArn":"{dead}","maxReceiveCount":"3"}}',
    )
    answer = explained(queues.url(deadline_s=2), cwd=tmp_path, **AWS)
    one(broken(answer), "all of them within the lease")
    assert answer.code == 1
    assert explained(queues.url(deadline_s=2), "--lease", "2s", cwd=tmp_path, **AWS).code == 0
    assert explained(queues.url(deadline_s=2), "--mode", "mark", cwd=tmp_path, **AWS).code == 1


@pytest.mark.slow
def test_an_sqs_queue_whose_ids_are_hashes_of_the_content(queues: Queues, tmp_path: Path) -> None:
    queues.make(".fifo", FifoQueue="true", ContentBasedDeduplication="true", MessageRetentionPeriod="3600")
    facts = looked_at(queues.url(".fifo"))
    assert (facts.content_ids, facts.dedupe_s) == (True, 300.0)
    answer = explained(queues.url(".fifo"), cwd=tmp_path, **AWS)
    assert answer.code == 1
    one(broken(answer), "hashes of the content")


@pytest.mark.slow
def test_an_sqs_queue_that_is_not_there(queues: Queues, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="create the queue first"):
        looked_at(queues.url())
    assert explained(queues.url(), cwd=tmp_path, **AWS).code == 78
    assert queues.sqs.list_queues(QueueNamePrefix=queues.name).get("QueueUrls", []) == []


# --- NATS ---------------------------------------------------------------------------------------


@contextmanager
def stream(**config: Any) -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """A stream with these settings, its URL, and a way to ask about it."""
    name, at = f"t{os.urandom(6).hex()}", nats_service.url()

    def ask(work: Callable[[Any], Any]) -> Any:
        async def connected() -> Any:
            line = await nats.connect(at)
            try:
                return await work(line.jetstream())
            finally:
                await line.close()

        return asyncio.run(connected())

    ask(lambda jetstream: jetstream.add_stream(name=name, subjects=[name], **config))
    try:
        yield f"{at}?stream={name}&durable=d", name, ask
    finally:
        ask(lambda jetstream: jetstream.delete_stream(name))


def test_a_nats_stream_that_keeps_longer_than_the_window(tmp_path: Path) -> None:
    with stream(max_age=3 * DAY_S) as (url, name, ask):
        facts = looked_at(url)
        assert (facts.horizon_s, facts.deadline_s, facts.durable) == (3 * DAY_S, 30.0, True)
        assert facts.version.startswith("NATS 2.")
        assert "does not exist yet" in facts.notes[0]
        answer = explained(url, cwd=tmp_path)
        assert answer.code == 1
        one(broken(answer), "shorter than the 72h")
        assert explained(url, "--window", "80h", cwd=tmp_path).code == 0
        with pytest.raises(NotFoundError):  # nothing was made by looking
            ask(lambda jetstream: jetstream.consumer_info(name, "d"))


def test_a_nats_stream_without_an_end_in_memory_and_a_hasty_consumer(tmp_path: Path) -> None:
    with stream(storage=StorageType.MEMORY) as (url, name, ask):
        hasty = ConsumerConfig(durable_name="d", ack_wait=5, max_deliver=4, ack_policy="explicit")  # type: ignore[arg-type]
        ask(lambda jetstream: jetstream.add_consumer(name, hasty))
        facts = looked_at(url)
        assert (facts.horizon_s, facts.deadline_s, facts.deliveries_max) == (math.inf, 5.0, 4)
        assert facts.durable is False
        answer = explained(url, cwd=tmp_path)
        assert answer.json()["sources"][0]["horizon_s"] == "ever"
        for words in ("for ever", "in memory", "puts it nowhere", "all of them within the lease"):
            one(broken(answer), words)
        told = explained(url, "--redelivers-for", "12h", "--lease", "5s", cwd=tmp_path)
        assert len(broken(told)) == 2  # what was said counts for more than what the broker says


def test_a_nats_stream_with_a_short_age_fits(tmp_path: Path) -> None:
    with stream(max_age=3600.0) as (url, _, _ask):
        assert explained(url, "--window", "2h", cwd=tmp_path).code == 0
        one(
            broken(explained(url, "--window", "50m", cwd=tmp_path)),
            "The window of 50m is shorter than the 1h",
        )


def test_no_stream_and_no_server(tmp_path: Path) -> None:
    url = f"{nats_service.url()}?stream=none{os.urandom(4).hex()}&durable=d"
    with pytest.raises(UsageError, match="no such stream"):
        looked_at(url)
    nowhere = f"nats://127.0.0.1:{server.free_port()}?stream=s&durable=d"
    with pytest.raises(SourceUnavailable):
        looked_at(nowhere)
    assert explained(nowhere, cwd=tmp_path).code == 69
    assert explained("pigeon://x", cwd=tmp_path).code == 78


@pytest.mark.parametrize("command", ["explain", "doctor", "dlq list"])
def test_a_wrong_password_is_no_outage(command: str, tmp_path: Path) -> None:
    """Exit code 78: no time heals it."""
    host = nats_service.secured().removeprefix("nats://")
    store = () if command == "dlq list" else ("--store", "memory:")
    source = f"nats://semel:wr0ng@{host}?stream=S&durable=d"
    answer = semel(*command.split(), "--from", source, *store, cwd=tmp_path)
    assert answer.code == 78, answer.err
    assert "refuses these credentials" in answer.err
    assert "wr0ng" not in answer.out + answer.err


@pytest.mark.parametrize("command", ["consume app:handler", "explain", "doctor"])
def test_credentials_in_the_address_of_kafka_are_refused_and_not_shown(command: str, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text("def handler(message): ...\n", encoding="utf-8")
    source = "kafka://semel:wr0ng@127.0.0.1:1/orders?group=g"
    answer = semel(*command.split(), "--from", source, "--store", "memory:", cwd=tmp_path)
    assert answer.code == 78, answer.err
    assert "username=" in answer.err
    assert "wr0ng" not in answer.out + answer.err


# --- Redis Streams ------------------------------------------------------------------------------


def test_a_redis_stream_that_lasts(tmp_path: Path) -> None:
    with redis.own(tmp_path) as own:
        url = f"{own.url}?stream=orders&group=billing"
        facts = looked_at(url)
        assert (facts.deadline_s, facts.horizon_s, facts.durable) == (30.0, math.inf, True)
        assert "does not exist yet" in facts.notes[0]
        assert own.ask("EXISTS", "orders") == 0  # nothing was made by looking
        own.ask("XADD", "orders", "*", "message_id", "1")
        own.ask("XGROUP", "CREATE", "orders", "billing", "0")
        own.ask("XREADGROUP", "GROUP", "billing", "me", "STREAMS", "orders", ">")
        own.ask("XADD", "orders", "*", "message_id", "2")
        facts = looked_at(url)
        assert (facts.waiting, facts.in_hand, facts.notes) == (1, 1, ())
        one(broken(explained(url, cwd=tmp_path)), "for ever")
        assert explained(url, "--redelivers-for", "24h", cwd=tmp_path).code == 0
        hasty = explained(f"{url}&deadline_s=5", "--redelivers-for", "24h", cwd=tmp_path)
        assert "The lease of 30s is longer than the 5s" in hasty.out


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"maxmemory_policy": "allkeys-lru", "maxmemory": "50mb"},
            "evicts keys when its memory is full (allkeys-lru)",
        ),
        ({"appendonly": "no"}, "no append-only file"),
    ],
)
def test_a_redis_stream_on_a_server_that_forgets(
    tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    with redis.own(tmp_path, **settings) as own:
        url = f"{own.url}?stream=orders&group=billing"
        assert looked_at(url).durable is False
        answer = explained(url, "--redelivers-for", "24h", cwd=tmp_path)
    assert answer.code == 1
    one(broken(answer), words)


def test_a_redis_stream_with_a_time_to_live(tmp_path: Path) -> None:
    with redis.own(tmp_path) as own:
        own.ask("XADD", "orders", "*", "message_id", "1")
        own.ask("EXPIRE", "orders", "600")
        facts = looked_at(f"{own.url}?stream=orders&group=billing")
    assert facts.name == f"{own.url}?stream=orders&group=billing", "a URL that --from takes"
    assert facts.horizon_s == pytest.approx(600, abs=60)
    assert "a time to live" in facts.weaknesses[0].what


# --- RabbitMQ -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def management() -> str:
    """The management API of the server of this run, switched on."""
    return rabbitmq.management()


def declared(durable: bool = True, **arguments: Any) -> str:
    """A queue with these arguments; the URL that names it."""
    at, name = rabbitmq.url(), f"t-{os.urandom(6).hex()}"
    given = {f"x-{each.replace('_', '-')}": value for each, value in arguments.items()}

    async def declare() -> None:
        line = await aio_pika.connect(at)
        async with line:
            channel = await line.channel()
            await channel.declare_queue(name, durable=durable, arguments=given)

    asyncio.run(declare())
    return f"{at}?queue={name}"


@pytest.mark.slow
def test_a_rabbitmq_queue_without_the_management_api(tmp_path: Path) -> None:
    url = declared()
    facts = looked_at(url)
    assert facts.version.startswith("RabbitMQ ")
    assert (facts.deadline_s, facts.horizon_s, facts.waiting) == (1800.0, None, 0)
    answer = explained(url, "--lease", "1h", cwd=tmp_path)
    assert answer.code == 0
    told = [each["what"] for each in answer.json()["weakened_by"]]
    one(told, "cannot be read over AMQP")
    one(told, "The lease of 1h is longer than the 30m")
    assert "guest:guest" not in answer.out
    absent = looked_at(f"{rabbitmq.url()}?queue=none-{os.urandom(4).hex()}")
    assert "does not exist yet" in absent.notes[0]


@pytest.mark.slow
def test_a_rabbitmq_queue_that_keeps_longer_than_the_window(tmp_path: Path, management: str) -> None:
    url = declared(
        queue_type="quorum", message_ttl=48 * 3600 * 1000, delivery_limit=5, dead_letter_exchange="lost"
    )
    facts = looked_at(f"{url}&management={management}")
    assert (facts.horizon_s, facts.deliveries_max, facts.buries, facts.durable) == (
        2 * DAY_S,
        5,
        "lost",
        True,
    )
    answer = explained(f"{url}&management={management}", cwd=tmp_path)
    assert answer.code == 1
    one(broken(answer), "shorter than the 48h")
    assert explained(f"{url}&management={management}", "--window", "50h", cwd=tmp_path).code == 0


@pytest.mark.slow
def test_a_rabbitmq_queue_that_loses(tmp_path: Path, management: str) -> None:
    hasty = looked_at(f"{declared(queue_type='quorum', delivery_limit=5)}&management={management}")
    found = [each.what for each in of_source(hasty, 0.0, 30_000_000) if each.level == "error"]
    one(found, "gives a message up after 5 deliveries and puts it nowhere")
    url = declared(durable=False, max_length=1000)
    answer = explained(f"{url}&management={management}", cwd=tmp_path)
    for words in ("not durable", "drops its oldest messages beyond 1,000", "for ever"):
        one(broken(answer), words)
    wrong = url.replace("guest:guest", "guest:wrong")
    assert explained(f"{wrong}&management={management}", cwd=tmp_path).code == 78


# --- Kafka --------------------------------------------------------------------------------------


@contextmanager
def topic(**config: str) -> Iterator[str]:
    name, at = f"t-{os.urandom(6).hex()}", kafka.servers()
    admin = kafka.admin()
    settings = {each.replace("_", "."): value for each, value in config.items()}
    admin.create_topics([NewTopic(name, 2, 1, config=settings)])[name].result(30)
    assert await_true(lambda: name in admin.list_topics(timeout=10).topics, 30)  # not known at once
    try:
        yield f"kafka://{at}/{name}?group=g-{name}"
    finally:
        admin.delete_topics([name])[name].result(30)


@pytest.mark.slow
def test_a_kafka_topic_that_keeps_longer_than_the_window(tmp_path: Path) -> None:
    with topic(retention_ms=str(7 * 86400 * 1000)) as url:
        facts = looked_at(url)
        assert (facts.horizon_s, facts.deadline_s) == (7 * DAY_S, 300.0)
        answer = explained(url, "--lease", "10m", cwd=tmp_path)
        assert answer.code == 1
        one(broken(answer), "shorter than the 7d")
        told = [each["what"] for each in answer.json()["weakened_by"]]
        one(told, "The lease of 10m is longer than the 5m")
        one(told, "one copy of each message")
        assert explained(url, "--window", "8d", cwd=tmp_path).code == 0
        groups = {each.group_id for each in kafka.admin().list_consumer_groups().result(30).valid}
        assert url.rpartition("=")[2] not in groups  # no group was joined by looking


@pytest.mark.slow
def test_a_kafka_topic_without_an_end_and_one_that_is_compacted(tmp_path: Path) -> None:
    with topic(retention_ms="-1") as url:
        assert looked_at(url).horizon_s == math.inf
    with topic(cleanup_policy="compact", unclean_leader_election_enable="true") as url:
        answer = explained(url, "--redelivers-for", "24h", cwd=tmp_path)
        one(broken(answer), "is compacted")
        one(broken(answer), "unclean.leader.election.enable")
    with pytest.raises(UsageError, match="there is no topic"):
        looked_at(f"kafka://{kafka.servers()}/none-{os.urandom(4).hex()}?group=g")


# --- settings -----------------------------------------------------------------------------------


def test_the_source_is_a_setting_like_any_other(tmp_path: Path) -> None:
    with stream(max_age=3 * DAY_S) as (url, name, _):
        by_variable = semel("explain", "--require", "lease", cwd=tmp_path, env={"SEMEL_SOURCE": url})
        assert by_variable.code == 1
        assert name in by_variable.out
        (tmp_path / "semel.toml").write_text(f'source = "{url}"\nwindow = "80h"\n')
        assert semel("explain", "--require", "lease", cwd=tmp_path).code == 0


def test_several_sources(tmp_path: Path) -> None:
    with stream(max_age=3600.0) as (fits, _, _a), stream(max_age=3 * DAY_S) as (too_long, name, _b):
        found = broken(explained(fits, "--from", too_long, cwd=tmp_path))
        assert len(found) == 1
        assert name in found[0]
