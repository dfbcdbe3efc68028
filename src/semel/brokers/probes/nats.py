"""Probe a JetStream stream and its consumer: max_age, ack_wait, max_deliver, storage."""

from math import inf
from typing import Any

from nats.js.api import StorageType
from nats.js.errors import NotFoundError

from semel.brokers.nats import ASK_S, UNREACHABLE, NatsOptions, connect, from_url, unavailable
from semel.brokers.source import no_answer
from semel.errors import UsageError
from semel.observe.guarantees import Weakness
from semel.observe.probes import SourceFacts


async def look(url: str) -> SourceFacts:
    """Read the facts with one connection and two requests."""
    source = from_url(url)
    try:
        line = await connect(source.server)
        try:
            return await _look(line, source.name, source.options)
        finally:
            await line.close()
    except NotFoundError as error:
        raise UsageError(f"{source.name}: there is no such stream; create it first") from error
    except UNREACHABLE as error:
        raise no_answer(source.name, unavailable(error)) from error


async def _look(line: Any, name: str, options: NatsOptions) -> SourceFacts:
    jetstream = line.jetstream(timeout=ASK_S)
    stream = await jetstream.stream_info(options.stream)
    config, state = stream.config, stream.state
    notes: list[str] = []
    weaknesses: list[Weakness] = []
    ack_wait_s, deliveries_max, waiting, in_hand = options.deadline_s, None, state.messages, None
    try:
        consumer = await jetstream.consumer_info(options.stream, options.durable)
    except NotFoundError:
        notes.append(f"the consumer {options.durable} does not exist yet: semel consume makes it")
    else:
        ack_wait_s = consumer.config.ack_wait or options.deadline_s
        limit = consumer.config.max_deliver or -1
        deliveries_max = limit if limit > 0 else None
        waiting, in_hand = consumer.num_pending, consumer.num_ack_pending
    durable = config.storage != StorageType.MEMORY
    if not durable:
        weaknesses.append(
            Weakness(
                f"{name} keeps its messages in memory: when the server ends they are lost, and their events never run.",
                breaks=True,
                fix=f"nats stream edit does not change storage: create {options.stream} again with --storage file",
            )
        )
    return SourceFacts(
        name=name,
        version=f"NATS {_numbers(line.connected_server_version)}",
        deadline_s=ack_wait_s,
        deadline_name="ack_wait of the consumer",
        horizon_s=config.max_age or inf,
        horizon_name="max_age of the stream",
        deliveries_max=deliveries_max,
        dedupe_s=config.duplicate_window or None,
        durable=durable,
        weaknesses=tuple(weaknesses),
        notes=tuple(notes),
        waiting=waiting,
        in_hand=in_hand,
    )


def _numbers(version: Any) -> str:
    return f"{version.major}.{version.minor}.{version.patch}"
