"""A handler for AWS Lambda on SQS: runs once for each key, and returns the messages to redeliver.

::

    once = semel.open("postgresql://...", consumer="billing")

    @sqs_handler(once)
    def lambda_handler(order: Order) -> None: ...

The event source mapping needs `ReportBatchItemFailures`; without it one bad message returns the whole batch.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from semel.brokers.routes import event_facts, reader
from semel.brokers.source import Arrival, decode_body, expand_headers
from semel.client.client import Semel
from semel.errors import GiveUp, KeyInvalid, KeyMissing
from semel.keys.identity import Identity
from semel.types import Delivery, Done, Outcome

__all__ = ["sqs_handler"]

_log = logging.getLogger("semel.aws_lambda")

Entry = Callable[[Mapping[str, Any], Any], dict[str, list[dict[str, str]]]]
"""The function that the Lambda runtime calls with the event and its context."""


def sqs_handler(
    once: Semel, *, key: Any = None, concurrency: int = 1
) -> Callable[[Callable[..., Any]], Entry]:
    """Turn `handler(message)` into a Lambda function; the message is decoded as its parameter's annotation.

    Messages that are not done and recorded are reported in `batchItemFailures`: SQS redelivers them, and moves them
    to the queue's dead-letter queue after `maxReceiveCount`. In a FIFO queue the messages behind a failed one of
    its group are reported too, and not run.
    """
    policy = replace(once.policy, wait_s=0.0, permanent=(*once.policy.permanent, GiveUp))
    patient = once.using(policy)
    identity = key if isinstance(key, Identity) else Identity(key=key)

    def decorate(handler: Callable[..., Any]) -> Entry:
        reads = reader(handler)

        def run(arrivals: Sequence[Arrival]) -> list[bool]:
            return _run(patient, identity, arrivals, lambda arrival: handler(reads(arrival)), concurrency)

        def entry(event: Mapping[str, Any], _context: Any) -> dict[str, list[dict[str, str]]]:
            arrivals = [_arrival(record) for record in event["Records"]]
            done = dict[int, bool]()
            for places in _rounds(arrivals):
                due = [at for at in places if not _behind(arrivals, done, at)]
                done.update(dict.fromkeys(places, False))
                done.update(zip(due, run([arrivals[at] for at in due]), strict=True))
            failed = [arrivals[at].position or "" for at in sorted(done) if not done[at]]
            return {"batchItemFailures": [{"itemIdentifier": each} for each in failed]}

        return entry

    return decorate


def _run(
    once: Semel,
    identity: Identity,
    arrivals: Sequence[Arrival],
    handler: Callable[[Arrival], Any],
    concurrency: int,
) -> list[bool]:
    """Run the messages; returns which are done."""
    deliveries: list[Delivery[Arrival]] = []
    places: list[int] = []
    for at, arrival in enumerate(arrivals):
        try:
            event_type, event_time_us = event_facts(arrival)
            deliveries.append(
                Delivery(
                    key=identity(arrival), body=arrival, event_type=event_type, event_time_us=event_time_us
                )
            )
            places.append(at)
        except (KeyMissing, KeyInvalid) as error:
            _log.error("%s: %s", arrival.position, error)
    done = [False] * len(arrivals)
    outcomes: list[Outcome[Any]] = once.run_many(deliveries, handler, concurrency=concurrency)
    for at, outcome in zip(places, outcomes, strict=True):
        done[at] = isinstance(outcome, Done) and (outcome.recorded or not outcome.guarded)
        if not done[at]:
            _log.warning("%s: to be delivered again: %r", arrivals[at].position, outcome)
    return done


def _rounds(arrivals: Sequence[Arrival]) -> list[list[int]]:
    """Return rounds of positions that may run together: all of a standard queue, one per group of a FIFO queue."""
    rounds: list[list[int]] = []
    turn: dict[str, int] = {}
    for at, arrival in enumerate(arrivals):
        number = turn.get(arrival.lane, 0)
        if arrival.lane:
            turn[arrival.lane] = number + 1
        while len(rounds) <= number:
            rounds.append([])
        rounds[number].append(at)
    return rounds


def _behind(arrivals: Sequence[Arrival], done: Mapping[int, bool], at: int) -> bool:
    """Whether an earlier message of the same group is not done."""
    lane = arrivals[at].lane
    return bool(lane) and any(not ok and arrivals[before].lane == lane for before, ok in done.items())


def _arrival(record: Mapping[str, Any]) -> Arrival:
    """Return a record as a delivery; SQS's `messageId` identifies the delivery, and is not a key."""
    system = record.get("attributes", {})
    headers = expand_headers(
        {
            name: each.get("stringValue") or each.get("binaryValue") or ""
            for name, each in record.get("messageAttributes", {}).items()
        }
    )
    return Arrival(
        headers=headers,
        body=decode_body(record["body"], headers.get("encoding")),
        broker_id=system.get("MessageDeduplicationId"),
        position=record["messageId"],
        transport="sqs",
        lane=system.get("MessageGroupId", ""),
        deliveries=int(system.get("ApproximateReceiveCount", 0)),
    )
