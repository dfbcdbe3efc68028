"""Probe an SQS queue: visibility, retention, redrive, and content-based ids."""

from collections.abc import Mapping

import msgspec

from semel.brokers.sqs import SqsQueue, from_url
from semel.errors import UsageError
from semel.observe.guarantees import Weakness
from semel.observe.probes import SourceFacts

DEDUPE_S = 300.0
"""How long a FIFO queue drops a repeated id: the service's fixed five minutes."""


async def look(url: str) -> SourceFacts:
    """Read the facts with two calls, and one for each dead-letter queue."""
    source = from_url(url)
    try:
        await source.visit()
        attributes = await source.attributes()
        redrive = msgspec.json.decode(attributes.get("RedrivePolicy") or "{}")
        target = str(redrive.get("deadLetterTargetArn", "")).rpartition(":")[2]
        kept_s = [
            lasting_s
            for queue in {target, source.dead_letter_name} - {""}
            if (lasting_s := _retention_s(await _attributes_of(source, queue))) is not None
        ]
    finally:
        await source.close()
    fifo = attributes.get("FifoQueue") == "true"
    return SourceFacts(
        name=source.name,
        version="SQS",
        deadline_s=source.deadline_s,
        deadline_name="the visibility timeout that semel asks for, deadline_s in the URL",
        horizon_s=_retention_s(attributes),
        horizon_name="the queue's MessageRetentionPeriod",
        redrive_s=max(kept_s, default=None),
        redrive_name="MessageRetentionPeriod of the queue of dead letters",
        deliveries_max=int(redrive["maxReceiveCount"]) if redrive else None,
        buries=target,
        dedupe_s=DEDUPE_S if fifo else None,
        content_ids=attributes.get("ContentBasedDeduplication") == "true",
        durable=True,
        weaknesses=tuple(_of_queue(source, attributes)),
        waiting=int(attributes.get("ApproximateNumberOfMessages", 0)),
        in_hand=int(attributes.get("ApproximateNumberOfMessagesNotVisible", 0)),
    )


async def _attributes_of(source: SqsQueue, queue: str) -> Mapping[str, str]:
    try:
        return await source.attributes(queue)
    except UsageError:  # no such queue, or not for this user
        return {}


def _retention_s(attributes: Mapping[str, str]) -> float | None:
    """Return how long a queue keeps a message; AWS always reports it, compatible servers may not."""
    lasting = attributes.get("MessageRetentionPeriod")
    return None if lasting is None else float(lasting)


def _of_queue(source: SqsQueue, attributes: Mapping[str, str]) -> list[Weakness]:
    own_s = float(attributes["VisibilityTimeout"])
    if own_s >= source.deadline_s:
        return []
    return [
        Weakness(
            f"The visibility timeout of the queue itself is {own_s:g} s: a reader that asks for none, such as a Lambda"
            f" function, has {own_s:g} s, and not the {source.deadline_s:g} s of semel consume.",
            fix=f"set-queue-attributes VisibilityTimeout={source.deadline_s:g}, at least the lease",
        )
    ]
