"""Options in the URL of a Kafka source, and the clients' configuration that follows from them."""

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import msgspec
from confluent_kafka import KafkaError

from semel.brokers.kafka.client import refuse_credentials
from semel.errors import UsageError
from semel.runtime.urls import parse_url, struct_options

__all__ = ["KafkaOptions", "place_of"]


class KafkaOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options in the URL."""

    group: str
    topic: str = ""
    """One topic, or several with commas, or in the path: kafka://host/topic. `^orders.*`: all but for dead letters."""
    dead: str = ""
    """The topic for dead letters; by default the topic's name with `.dead`."""
    start: Literal["earliest", "latest"] = "earliest"
    """Where a group without offsets begins."""
    tombstones: Literal["pass", "skip"] = "pass"
    """What to do with a record without a value: call the handler with `None`, or skip it."""
    lane: Literal["partition", "key"] = "partition"
    """What keeps its order under `--order`: a whole partition, or the messages of one key."""
    instance: str = ""
    """The `group.instance.id` of a static member: a quick restart then causes no rebalance."""
    session_s: float = 10.0
    """The session timeout: after it the group gives the partitions to other members."""
    poll_s: float = 300.0
    """The poll interval after which the group expels the member; semel polls well before."""
    refresh_s: float = 60.0
    """How soon a new topic is found that matches a pattern."""
    security: str = ""
    """The `security.protocol`, such as SASL_SSL."""
    mechanism: str = ""
    username: str = ""
    password: str = ""
    ca_file: str = ""

    def client(self, servers: str) -> dict[str, Any]:
        """Return the configuration of every client of this broker."""
        settings = {
            "bootstrap.servers": servers,
            "security.protocol": self.security,
            "sasl.mechanism": self.mechanism,
            "sasl.username": self.username,
            "sasl.password": self.password,
            "ssl.ca.location": self.ca_file,
        }
        return {name: value for name, value in settings.items() if value}

    def member(self, servers: str, on_error: Callable[[KafkaError], None]) -> dict[str, Any]:
        """Return the configuration of a member of the group, which commits offsets itself."""
        config: dict[str, Any] = {
            **self.client(servers),
            "group.id": self.group,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": self.start,
            "partition.assignment.strategy": "cooperative-sticky",
            "max.poll.interval.ms": round(self.poll_s * 1000),
            "session.timeout.ms": round(self.session_s * 1000),
            "heartbeat.interval.ms": round(self.session_s * 1000 / 5),
            "isolation.level": "read_committed",  # committed offsets are then waited for until they are final
            "enable.partition.eof": True,
            "error_cb": on_error,
        }
        if self.instance:
            config["group.instance.id"] = self.instance
        return config


AnyOptions = TypeVar("AnyOptions", bound=KafkaOptions)


def place_of(url: str, kind: type[AnyOptions]) -> tuple[str, AnyOptions]:
    """Parse a URL into the brokers and the options. Raises `UsageError`."""
    parts = parse_url(url)
    refuse_credentials(parts.netloc)
    options = struct_options(url, kind, {"topic": path} if (path := parts.path.strip("/")) else None)
    if not options.topic or not options.group:
        raise UsageError("a topic and a group are needed: kafka://localhost:9092/orders?group=billing")
    return parts.netloc or "localhost:9092", options
