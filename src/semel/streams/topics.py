"""Check the topics of a deduplication before it starts, and create those that are missing. All calls block."""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from time import monotonic, sleep
from typing import Any

import msgspec
from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import ConfigResource
from confluent_kafka.admin._resource import ResourceType
from confluent_kafka.cimpl import NewTopic

from semel.brokers.kafka.client import CLIENT_LOG, error_of
from semel.errors import SourceRefused, SourceUnavailable, UsageError
from semel.windows import exact_text

__all__ = ["TopicFacts", "TopicPlan", "inspect_topics", "marks_retention_ms", "prepare_topics"]

_log = logging.getLogger("semel.streams")

ASK_S = 10.0
CREATE_S = 30.0
AGAIN_S = 0.2
MARGIN_MIN_S = 3600.0
"""Marks stay in their topic at least this much longer than the window: clocks differ, and files are deleted whole."""
SEGMENT_MIN_MS = 10 * 60 * 1000
SEGMENT_MAX_MS = 7 * 86400 * 1000
NAME = re.compile(r"[A-Za-z0-9._-]{1,249}")


class TopicPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The topics of one deduplication."""

    source: str
    marks: str = ""
    """Empty: none are kept."""
    outputs: tuple[str, ...] = ()
    """Topics that are written, beside the dead letters."""
    dead: str = ""
    window_us: int = 0
    event_time: bool = False


class TopicFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the brokers know of the topics."""

    partitions: Mapping[str, int]
    marks_id: str
    """The id of the marks topic; empty: brokers before 2.8 have none."""
    batch_bytes_max: int
    """The smallest limit of the written topics for one batch of records."""
    copies: Mapping[str, int]
    """The fewest replicas that a partition of each topic has."""
    settings: Mapping[str, Mapping[str, str]]
    """The settings of the written topics that exist, by their names; of the source too, if asked for."""
    created: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    """Why the marks would let duplicates pass, with what to do."""
    warnings: tuple[str, ...] = ()


def marks_retention_ms(window_us: int, *, event_time: bool) -> int:
    """Return how long the marks topic must keep a mark.

    The brokers count from the time at which a mark is written. With the events' own times, a stream that stands still
    needs its marks longer than the window, so they are kept twice as long.
    """
    window_ms = -(-window_us // 1000)
    margin_ms = max(round(MARGIN_MIN_S * 1000), window_ms // 10)
    return window_ms * (2 if event_time else 1) + margin_ms


def prepare_topics(client: Mapping[str, Any], plan: TopicPlan, *, dry_run: bool = False) -> TopicFacts:
    """Check the topics, and create missing ones as the source is: as many partitions, as many copies.

    Raises `UsageError` with what to do where the contract does not hold, `SourceUnavailable` if no broker answers.
    """
    facts = _ask(client, plan, dry_run=dry_run)
    if facts.problems:
        raise UsageError(facts.problems[0])
    return facts


def inspect_topics(client: Mapping[str, Any], plan: TopicPlan) -> TopicFacts:
    """Return the facts without changing anything; a broken contract is among them."""
    return _ask(client, plan, dry_run=True, of_source=True)


def _ask(client: Mapping[str, Any], plan: TopicPlan, *, dry_run: bool, of_source: bool = False) -> TopicFacts:
    """Ask the brokers. `of_source`: also for the source's settings, which a reader needs no right to see."""
    for name in (plan.source, plan.marks, plan.dead, *plan.outputs):
        if name and not NAME.fullmatch(name):
            raise UsageError(
                f"{name!r} is no name for a topic; use up to 249 letters, digits, dots, hyphens and underscores"
                " (name the marks with --marks)"
            )
    admin = None
    give_up_at = monotonic() + CREATE_S
    try:
        admin = AdminClient(dict(client), logger=CLIENT_LOG)
        while True:
            try:
                return _prepare(admin, plan, dry_run=dry_run, of_source=of_source)
            except KafkaException as error:
                # Another instance has just created the topic, and this broker has not heard of it.
                is_behind = error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART
                if not is_behind or monotonic() >= give_up_at:
                    raise error_of("kafka", error.args[0]) from error
                sleep(AGAIN_S)
    finally:
        del (
            admin
        )  # an error would keep it: the garbage collector may end it inside a callback of its own, for ever


def _prepare(admin: AdminClient, plan: TopicPlan, *, dry_run: bool, of_source: bool) -> TopicFacts:
    known: Mapping[str, Any] = admin.list_topics(timeout=ASK_S).topics
    if plan.source not in known:
        raise SourceRefused(f"there is no topic {plan.source}; create it first")
    partitions = len(known[plan.source].partitions)
    copies = _copies(known[plan.source])
    wanted = list(_planned_topics(plan, partitions, copies))
    missing = [each for each in wanted if each.topic not in known]
    if missing and not dry_run:
        _create(admin, missing)
        known = _await_topics(admin, [each.topic for each in wanted])
    counts = {
        name: len(known[name].partitions)
        for name in {plan.source, *(each.topic for each in wanted)} & known.keys()
    }
    written = [name for name in (plan.marks, plan.dead, *plan.outputs) if name in known]
    settings = _settings(admin, [plan.source, *written] if of_source else written)
    limits = [int(settings[name].get("max.message.bytes") or 0) for name in written]
    return TopicFacts(
        partitions=counts,
        marks_id=_id_of(admin, plan.marks) if plan.marks in counts else "",
        batch_bytes_max=min(filter(None, limits), default=1_000_000),
        copies={name: _copies(known[name]) for name in counts},
        settings=settings,
        created=tuple(each.topic for each in missing),
        problems=tuple(_problems(plan, counts, settings[plan.marks])) if plan.marks in counts else (),
        warnings=tuple(_warnings(plan, known, copies, settings)),
    )


def _copies(topic: Any) -> int:
    return min(len(each.replicas) for each in topic.partitions.values())


def _planned_topics(plan: TopicPlan, partitions: int, copies: int) -> Iterator[NewTopic]:
    for name in dict.fromkeys(plan.outputs):
        yield NewTopic(name, partitions, copies)
    if plan.dead:
        yield NewTopic(plan.dead, 1, copies)
    if plan.marks:
        retention_ms = marks_retention_ms(plan.window_us, event_time=plan.event_time)
        segment_ms = max(SEGMENT_MIN_MS, min(SEGMENT_MAX_MS, plan.window_us // 4000))
        yield NewTopic(
            plan.marks,
            partitions,
            copies,
            config={
                "cleanup.policy": "compact,delete",
                "retention.ms": str(retention_ms),
                "segment.ms": str(segment_ms),
                # Their age is counted by the brokers' clock: an event's own time may be long ago, or wrong.
                "message.timestamp.type": "LogAppendTime",
                "unclean.leader.election.enable": "false",
            },
        )


def _create(admin: AdminClient, topics: Sequence[NewTopic]) -> None:
    made = admin.create_topics(list(topics))
    for name, answer in made.items():
        try:
            answer.result(CREATE_S)
        except KafkaException as refused:
            error = refused.args[0]
            if error.code() == KafkaError.TOPIC_ALREADY_EXISTS:  # another instance was faster
                continue
            if error.retriable():
                raise SourceUnavailable(f"the topic {name} could not be created: {error.str()}") from refused
            raise UsageError(
                f"there is no topic {name}, and it cannot be created ({error.str()}); create it first"
            ) from refused
        _log.info("created the topic %s", name)


def _await_topics(admin: AdminClient, names: Sequence[str]) -> Mapping[str, Any]:
    """Return the metadata once every partition has a leader: a topic that was made is not yet one that answers."""
    give_up_at = monotonic() + CREATE_S
    while True:
        known: Mapping[str, Any] = admin.list_topics(timeout=ASK_S).topics
        led = all(
            name in known and all(each.leader >= 0 for each in known[name].partitions.values())
            for name in names
        )
        if led:
            return known
        if monotonic() >= give_up_at:
            raise SourceUnavailable(f"new topics have no leaders after {CREATE_S:g} s: {', '.join(names)}")


def _settings(admin: AdminClient, names: Sequence[str]) -> dict[str, dict[str, str]]:
    if not names:
        return {}
    asked = [ConfigResource(ResourceType.TOPIC, name) for name in dict.fromkeys(names)]
    answers = admin.describe_configs(asked, request_timeout=ASK_S)
    return {
        resource.name: {entry.name: entry.value for entry in answer.result(ASK_S).values()}
        for resource, answer in answers.items()
    }


def _id_of(admin: AdminClient, topic: str) -> str:
    described = admin.describe_topics(TopicCollection([topic]), request_timeout=ASK_S)[topic].result(ASK_S)
    return "" if described.topic_id is None else str(described.topic_id)


def _problems(plan: TopicPlan, counts: Mapping[str, int], settings: Mapping[str, str]) -> Iterator[str]:
    """Yield why the marks topic would let duplicates pass."""
    have, need = counts[plan.marks], counts[plan.source]
    if have != need:
        yield (
            f"{plan.source} has {need} partitions and its marks {plan.marks} have {have}: a mark lies in the partition"
            " of its event, and partitions that were added move keys away from their marks. Either give the marks as"
            f" many (kafka-topics.sh --alter --topic {plan.marks} --partitions {need}): then, for one window, copies"
            " pass whose first event lies in another partition. Or put a topic with a fixed number of partitions in"
            " between with --repartition, and start new marks with --marks"
        )
    policy = set(settings["cleanup.policy"].replace(" ", "").split(","))
    kept_ms = int(settings.get("retention.ms") or -1)
    if "delete" in policy and 0 <= kept_ms < -(-plan.window_us // 1000):
        wanted_ms = marks_retention_ms(plan.window_us, event_time=plan.event_time)
        yield (
            f"{plan.marks} keeps marks for {exact_text(kept_ms * 1000)}, shorter than the window of"
            f" {exact_text(plan.window_us)}; set its retention.ms to {wanted_ms}:"
            f" kafka-configs.sh --alter --topic {plan.marks} --add-config retention.ms={wanted_ms}"
        )
    kept_bytes = int(settings.get("retention.bytes") or -1)
    if "delete" in policy and kept_bytes >= 0:
        yield (
            f"{plan.marks} has retention.bytes={kept_bytes}, which deletes marks before the window is over;"
            " set it to -1"
        )


def _warnings(
    plan: TopicPlan, known: Mapping[str, Any], copies: int, settings: Mapping[str, Mapping[str, str]]
) -> Iterator[str]:
    """Yield what weakens the result without refusing it."""
    for name in dict.fromkeys((plan.marks, *plan.outputs)):
        if name not in known:
            continue
        have = _copies(known[name])
        if have < copies:
            yield f"{name} has {have} copies of each record and {plan.source} has {copies}: it is lost first"
        if settings[name].get("unclean.leader.election.enable") == "true":
            yield f"{name} may elect a leader that lacks records (unclean.leader.election.enable)"
    if plan.marks in known and "delete" not in settings[plan.marks]["cleanup.policy"]:
        yield f"{plan.marks} grows for ever; set cleanup.policy=compact,delete and retention.ms"
