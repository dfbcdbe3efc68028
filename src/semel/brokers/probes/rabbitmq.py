"""Probe a RabbitMQ queue: over AMQP, and through the management API if the URL names it."""

from base64 import b64encode
from collections.abc import Iterator, Mapping
from math import inf
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, unquote, urlsplit
from urllib.request import Request, urlopen

import aio_pika
import msgspec
from aio_pika.exceptions import ChannelNotFoundEntity
from msgspec.structs import replace

from semel.brokers.probes import ManagementUnavailable
from semel.brokers.rabbitmq import CONNECT_S, UNREACHABLE, RabbitConnection, RabbitQueue, from_url
from semel.brokers.source import no_answer
from semel.errors import UsageError
from semel.observe.guarantees import Weakness
from semel.observe.probes import SourceFacts
from semel.runtime.tasks import call_in_daemon_thread

CONSUMER_TIMEOUT_S = 1800.0
"""The server's default for how long it waits for an ack before it closes the channel."""
LIMITED_SINCE, DELIVERIES_MAX = 4, 20
"""Since this version a quorum queue gives a message up after this number of deliveries, unless configured otherwise."""
ANSWER_BYTES_MAX = 1 << 20
MANAGEMENT_S = 5.0
"""The timeout of the management API: less than callers wait for all facts, so that they learn what did not answer."""
PASSING = (502, 503, 504)
"""The answers of a proxy before a management API that is away."""


async def look(url: str) -> SourceFacts:
    """Read the facts with a passive declaration, which declares nothing, and one request to the management API."""
    source = from_url(url)
    try:
        line = await aio_pika.connect(source.server, timeout=CONNECT_S, connection_class=RabbitConnection)
        try:
            version = _version(line)
            waiting = await _waiting(line, source.options.queue)
            delays = [await _waiting(line, name) for name in source.delay_queues]
        finally:
            await line.close()
    except UNREACHABLE as error:
        raise no_answer(source.name, source.error_of(error)) from error
    delayed = sum(each or 0 for each in delays)
    if waiting is not None and source.options.management:
        queue = await call_in_daemon_thread(_queue_in_management, source)
        return replace(_facts(source.name, version, queue), delayed=delayed)
    facts = SourceFacts(
        name=source.name,
        version=version,
        deadline_s=CONSUMER_TIMEOUT_S,
        deadline_name="consumer_timeout, by default",
        waiting=waiting,
        delayed=delayed,
    )
    if waiting is None:
        note = f"the queue {source.options.queue} does not exist yet: semel consume makes it"
        return replace(facts, horizon_s=inf, horizon_name="the life of a message", notes=(note,))
    return replace(facts, weaknesses=(_not_asked(source.name),))


async def _waiting(line: Any, queue: str) -> int | None:
    """Return how many messages wait; `None`: there is no such queue."""
    channel = await line.channel()
    try:
        found = await channel.declare_queue(queue, passive=True)
    except ChannelNotFoundEntity:
        return None
    return int(found.declaration_result.message_count)


def _not_asked(name: str) -> Weakness:
    return Weakness(
        f"How long {name} may send again, how often, and whether it lasts cannot be read over AMQP: it may"
        " be more than the window.",
        fix="add management=http://HOST:15672 to its URL, or say it to `semel explain --redelivers-for`",
    )


def _version(line: Any) -> str:
    properties = getattr(line.transport.connection, "server_properties", None) or {}
    version = properties.get("version", "")
    return f"RabbitMQ {version.decode() if isinstance(version, bytes) else version}".strip()


def _major(version: str) -> int:
    number = version.removeprefix("RabbitMQ ").partition(".")[0]
    return int(number) if number.isdecimal() else 0


def _queue_in_management(source: RabbitQueue) -> Mapping[str, Any]:
    """Return the queue from the management API, read as the user of the AMQP URL."""
    parts = urlsplit(source.server)
    host = quote(unquote(parts.path.removeprefix("/")) or "/", safe="")
    place = (
        f"{source.options.management.rstrip('/')}/api/queues/{host}/{quote(source.options.queue, safe='')}"
    )
    user = f"{unquote(parts.username or 'guest')}:{unquote(parts.password or 'guest')}"
    request = Request(place, headers={"Authorization": f"Basic {b64encode(user.encode()).decode()}"})  # noqa: S310 - http, checked with the options
    try:
        with urlopen(request, timeout=MANAGEMENT_S) as answer:  # noqa: S310 - as above
            queue: Mapping[str, Any] = msgspec.json.decode(answer.read(ANSWER_BYTES_MAX))
            return queue
    except HTTPError as error:
        error.close()  # it holds the connection
        if error.code in PASSING:
            raise ManagementUnavailable(
                f"{source.options.management} does not answer: {error.code} {error.reason}"
            ) from error
        raise UsageError(
            f"the management API answers {error.code} for {source.name}: {error.reason}"
        ) from error
    except (URLError, OSError) as error:
        raise ManagementUnavailable(f"{source.options.management} does not answer: {error}") from error


def _facts(name: str, version: str, queue: Mapping[str, Any]) -> SourceFacts:
    policy: Mapping[str, Any] = queue.get("effective_policy_definition") or {}
    arguments: Mapping[str, Any] = queue.get("arguments") or {}

    def limit(setting: str) -> Any:
        """Return the lower of the queue's argument and its policy, as the server does."""
        given = [each for each in (arguments.get(f"x-{setting}"), policy.get(setting)) if each is not None]
        return (
            min(given) if given and all(isinstance(each, int) for each in given) else next(iter(given), None)
        )

    lasting_ms, patience_ms = limit("message-ttl"), limit("consumer-timeout")
    durable = bool(queue.get("durable")) and not queue.get("exclusive")
    buries = limit("dead-letter-routing-key") or limit("dead-letter-exchange")
    allowed = limit("delivery-limit")
    if allowed is None and queue.get("type") == "quorum" and _major(version) >= LIMITED_SINCE:
        allowed = DELIVERIES_MAX
    return SourceFacts(
        name=name,
        version=version,
        deadline_s=patience_ms / 1000 if patience_ms else CONSUMER_TIMEOUT_S,
        deadline_name="consumer_timeout" if patience_ms else "consumer_timeout, by default",
        horizon_s=lasting_ms / 1000 if lasting_ms is not None else inf,
        horizon_name="message-ttl",
        deliveries_max=allowed if isinstance(allowed, int) and allowed >= 0 else None,
        buries=str(buries or ""),
        durable=durable,
        weaknesses=tuple(
            _of_queue(name, durable=durable, longest=limit("max-length"), overflow=limit("overflow"))
        ),
        waiting=queue.get("messages_ready"),
        in_hand=queue.get("messages_unacknowledged"),
    )


def _of_queue(name: str, *, durable: bool, longest: Any, overflow: Any) -> Iterator[Weakness]:
    if not durable:
        yield Weakness(
            f"The queue of {name} is not durable: when the server restarts, what waits in it is lost and never runs.",
            breaks=True,
            fix="a durable queue, best of type quorum; a queue cannot be changed, so make another",
        )
    if longest is not None and overflow in (None, "drop-head"):
        yield Weakness(
            f"The queue of {name} drops its oldest messages beyond {longest:,} (max-length): their events never run.",
            breaks=True,
            fix="overflow=reject-publish, so that producers get an error",
        )
