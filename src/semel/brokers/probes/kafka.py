"""Probe a Kafka topic: retention, compaction, replicas; and the poll interval of its group."""

from collections.abc import Iterator, Mapping
from math import inf
from typing import Any

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import ConfigResource
from confluent_kafka.admin._resource import ResourceType

from semel.brokers.kafka.client import CLIENT_LOG, ClientErrors, error_of
from semel.brokers.kafka.options import KafkaOptions, place_of
from semel.brokers.kafka.sending import PATTERN, DeadTopics
from semel.brokers.source import no_answer
from semel.errors import UsageError
from semel.observe.guarantees import Weakness
from semel.observe.probes import SourceFacts
from semel.runtime.tasks import call_in_daemon_thread

ASK_S = 10.0


async def look(url: str) -> SourceFacts:
    """Read the facts with two requests to the brokers; no group is joined."""
    servers, options = place_of(url, KafkaOptions)
    return await call_in_daemon_thread(_look, servers, options)


def _look(servers: str, options: KafkaOptions) -> SourceFacts:
    name = f"kafka://{servers}/{options.topic}?group={options.group}"
    topics = options.topic.split(",")
    named = [topic for topic in topics if not topic.startswith(PATTERN)]
    matching = DeadTopics({}, topics, options.dead)
    errors = ClientErrors()
    admin = None
    try:
        settings: dict[str, Any] = {**options.client(servers), "error_cb": errors}
        admin = AdminClient(settings, logger=CLIENT_LOG)
        known = admin.list_topics(timeout=ASK_S).topics
        missing = [topic for topic in named if topic not in known]
        if missing:
            raise UsageError(f"{name}: there is no topic {missing[0]}; create it first")
        topics = [*named, *(topic for topic in known if matching.matches(topic))]
        if not topics:
            return SourceFacts(name=name, version="Kafka", notes=(f"no topic matches {options.topic} yet",))
        asked = [ConfigResource(ResourceType.TOPIC, topic) for topic in topics]
        configs = [
            {entry.name: entry.value for entry in answer.result(ASK_S).values()}
            for answer in admin.describe_configs(asked, request_timeout=ASK_S).values()
        ]
    except KafkaException as error:
        if admin is not None:
            admin.poll(0)  # it reports refused credentials to its callback only
        errors.check(name)
        raise no_answer(name, error_of(name, error.args[0])) from error
    finally:
        del (
            admin
        )  # an error would keep it: the garbage collector may end it inside a callback of its own, for ever
    copies = min(len(each.replicas) for topic in topics for each in known[topic].partitions.values())
    return SourceFacts(
        name=name,
        version="Kafka",
        deadline_s=options.poll_s,
        deadline_name="max.poll.interval.ms, poll_s in the URL",
        horizon_s=max(_retention_s(each) for each in configs),
        horizon_name="retention.ms of the topic",
        durable=True,
        weaknesses=tuple(_of_topics(name, configs, copies)),
    )


def _retention_s(settings: Mapping[str, Any]) -> float:
    lasting_ms = int(settings.get("retention.ms") or -1)
    return lasting_ms / 1000 if lasting_ms >= 0 and "delete" in settings["cleanup.policy"] else inf


def _of_topics(name: str, settings: list[dict[str, Any]], copies: int) -> Iterator[Weakness]:
    if any("compact" in each["cleanup.policy"] for each in settings):
        yield Weakness(
            f"A topic of {name} is compacted: of messages with one key only the last is kept, and events that were not"
            " read before that never run.",
            breaks=True,
            fix="cleanup.policy=delete, or a key for each event",
        )
    if any(each.get("unclean.leader.election.enable") == "true" for each in settings):
        yield Weakness(
            f"{name} may elect a leader that lacks messages (unclean.leader.election.enable): their events never run.",
            breaks=True,
            fix="unclean.leader.election.enable=false",
        )
    if copies == 1:
        yield Weakness(
            f"{name} has one copy of each message: the disk that has it is the only one.",
            fix="a replication factor of 3 with min.insync.replicas=2",
        )
