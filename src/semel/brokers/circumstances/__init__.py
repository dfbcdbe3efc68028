"""Ask a live broker about a source, without consuming, declaring or changing anything: one file for each broker."""

from semel.brokers.urls import named
from semel.observe.sources import SourceFacts

__all__ = ["look_at"]

_LOOKS: dict[str, str] = {
    "amqp": "semel.brokers.circumstances.rabbitmq:look",
    "amqps": "semel.brokers.circumstances.rabbitmq:look",
    "kafka": "semel.brokers.circumstances.kafka:look",
    "nats": "semel.brokers.circumstances.nats:look",
    "sqs": "semel.brokers.circumstances.sqs:look",
    "redis": "semel.brokers.circumstances.redis_streams:look",
    "rediss": "semel.brokers.circumstances.redis_streams:look",
    "valkey": "semel.brokers.circumstances.redis_streams:look",
    "valkeys": "semel.brokers.circumstances.redis_streams:look",
}


async def look_at(url: str) -> SourceFacts:
    """What the broker says about the source that a URL names; the URL is that of `source_for`.

    Raises `UsageError` for a source that is not there, and `SourceUnavailable` for a broker that does not answer.
    """
    facts: SourceFacts = await named(url, _LOOKS)(url)
    return facts
