"""Ask a live broker about a source, without consuming, declaring or changing anything: one file for each broker."""

from semel.brokers.source import load_scheme_function
from semel.errors import SourceUnavailable
from semel.observe.probes import SourceFacts

__all__ = ["ManagementUnavailable", "look_at"]


class ManagementUnavailable(SourceUnavailable):
    """The broker answers, but its management API does not: the facts that only it has are not known."""


_LOOKS: dict[str, str] = {
    "amqp": "semel.brokers.probes.rabbitmq:look",
    "amqps": "semel.brokers.probes.rabbitmq:look",
    "kafka": "semel.brokers.probes.kafka:look",
    "nats": "semel.brokers.probes.nats:look",
    "sqs": "semel.brokers.probes.sqs:look",
    "redis": "semel.brokers.probes.redis_streams:look",
    "rediss": "semel.brokers.probes.redis_streams:look",
    "valkey": "semel.brokers.probes.redis_streams:look",
    "valkeys": "semel.brokers.probes.redis_streams:look",
}


async def look_at(url: str) -> SourceFacts:
    """Return the broker's facts about the source of a URL; the URL is that of `source_for`.

    Raises `UsageError` for a missing source, and `SourceUnavailable` for a broker that does not answer.
    """
    facts: SourceFacts = await load_scheme_function(url, _LOOKS)(url)
    return facts
