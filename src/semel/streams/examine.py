"""Ask the brokers whether the contract of a deduplication holds. Nothing is consumed, joined or changed."""

from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any

import msgspec
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from semel.brokers.kafka.client import CLIENT_LOG, error_of
from semel.brokers.kafka.options import place_of
from semel.errors import KeyInvalid, KeyMissing
from semel.observe.formatting import plural
from semel.observe.guarantees import Weakness
from semel.streams.contract import LOOKED_MAX, PartitionContract
from semel.streams.dedup import target_topic
from semel.streams.member import StreamOptions
from semel.streams.reading import KeyOf, key_reader
from semel.streams.repartition import keyed_topic
from semel.streams.topics import TopicFacts, TopicPlan, inspect_topics
from semel.windows import exact_text

__all__ = ["DedupExamination", "examine_dedup", "window_text"]

ASK_S = 10.0
SAFE_COPIES = 3
SAFE_IN_SYNC = 2
KEYED = (
    "send each event with its id as the message key, from clients with one partitioner, or use --repartition"
)


class DedupExamination(msgspec.Struct, frozen=True, kw_only=True):
    """What the brokers say about a deduplication."""

    name: str
    source: str
    """The topic that is deduplicated: with `--repartition` the keyed one in between."""
    marks: str
    partitions: dict[str, int]
    """By topic; the source comes first."""
    started: bool
    """Whether its marks exist."""
    kept_us: int | None
    """How long the marks are kept; `None`: for ever, or not started."""
    repartitioned: bool
    members: int
    waiting: int
    """Records that the group has not read."""
    looked: int
    """Records of the source that were looked at."""
    notes: tuple[str, ...]
    weaknesses: tuple[Weakness, ...]

    @property
    def holds(self) -> bool:
        """Whether nothing was found that lets copies pass or loses events."""
        return not any(each.breaks for each in self.weaknesses)


def examine_dedup(
    url: str,
    *,
    to: str = "",
    key: str | Callable[[Any], object] | None = None,
    marks: str = "",
    window_us: int = 0,
) -> DedupExamination:
    """Examine the topics, the latest records and the group of `semel dedup`, with its own options.

    `window_us`: 0 if it is not known. Raises `SourceRefused`, `SourceUnavailable` and `UsageError`.
    """
    servers, options = place_of(url, StreamOptions)
    client = options.client(servers)
    name = f"kafka://{servers}/{options.topic}?group={options.group}"
    plan = TopicPlan(
        source=options.topic,
        marks=marks or f"{options.topic}.{options.group}.marks",
        outputs=tuple(filter(None, [target_topic(to, servers)])),
        window_us=window_us,
    )
    facts = inspect_topics(client, plan)
    behind = keyed_topic(url)
    repartitioned = plan.marks not in facts.partitions and _exists(client, behind)
    if repartitioned:
        plan = msgspec.structs.replace(plan, source=behind, marks=marks or f"{behind}.{options.group}.marks")
        facts = inspect_topics(client, plan)
    try:
        sample = _RecordSample(client, options.group, plan.source, facts.partitions[plan.source])
        sample.read(key_reader(key))
        members = _members(client, options.group, plan.source)
    except KafkaException as error:
        raise error_of(name, error.args[0]) from error
    started = plan.marks in facts.partitions
    notes = [] if repartitioned else list(sample.notes())
    if repartitioned:
        notes.append(f"copies meet in {behind}, which semel partitions by the id")
    if not started:
        notes.append(f"it was not started yet: {plan.marks} does not exist, and is created at the start")
    return DedupExamination(
        name=name,
        source=plan.source,
        marks=plan.marks,
        partitions={each: facts.partitions[each] for each in _topic_names(plan) if each in facts.partitions},
        started=started,
        kept_us=_kept_us(facts, plan.marks) if started else None,
        repartitioned=repartitioned,
        members=members,
        waiting=sample.waiting,
        looked=sample.looked,
        notes=tuple(notes),
        weaknesses=(
            *(Weakness(each, breaks=True) for each in facts.problems),
            *(() if repartitioned else sample.weaknesses()),
            *_of_topics(plan, facts),
        ),
    )


def _topic_names(plan: TopicPlan) -> tuple[str, ...]:
    return (plan.source, plan.marks, *plan.outputs)


def _kept_us(facts: TopicFacts, marks: str) -> int | None:
    settings = facts.settings[marks]
    kept_ms = int(settings.get("retention.ms") or -1)
    return kept_ms * 1000 if kept_ms >= 0 and "delete" in settings["cleanup.policy"] else None


def _exists(client: dict[str, Any], topic: str) -> bool:
    admin = AdminClient(client, logger=CLIENT_LOG)
    return topic in admin.list_topics(timeout=ASK_S).topics


def _members(client: dict[str, Any], group: str, topic: str) -> int:
    """Return how many members of the group have partitions of the topic: a group may read several."""
    admin = AdminClient(client, logger=CLIENT_LOG)
    described = admin.describe_consumer_groups([group], request_timeout=ASK_S)[group]
    try:
        members = described.result(ASK_S).members
    except KafkaException as error:
        if (
            error.args[0].code() == KafkaError.GROUP_ID_NOT_FOUND
        ):  # since 4.0; before, an empty group is described
            return 0
        raise
    return sum(any(each.topic == topic for each in member.assignment.topic_partitions) for member in members)


def _of_topics(plan: TopicPlan, facts: TopicFacts) -> Iterator[Weakness]:
    for name in _topic_names(plan):
        if name not in facts.partitions:
            continue
        settings, copies = facts.settings[name], facts.copies[name]
        if settings.get("unclean.leader.election.enable") == "true":
            yield Weakness(
                f"{name} may elect a leader that lacks records (unclean.leader.election.enable): what it lacks is"
                " lost, or passes again.",
                breaks=True,
                fix=f"unclean.leader.election.enable=false for {name}",
            )
        if copies == 1:
            yield Weakness(
                f"{name} has one copy of each record: the disk that has it is the only one.",
                fix=f"a replication factor of {SAFE_COPIES} with min.insync.replicas={SAFE_IN_SYNC}",
            )
        elif int(settings.get("min.insync.replicas") or 1) < SAFE_IN_SYNC:
            yield Weakness(
                f"{name} confirms a write that one broker has (min.insync.replicas=1): the loss of that broker may"
                " lose it.",
                fix=f"min.insync.replicas={SAFE_IN_SYNC} for {name}",
            )
    if "compact" in facts.settings[plan.source]["cleanup.policy"]:
        yield Weakness(
            f"{plan.source} is compacted: of records with one message key only the last is kept, and the first may"
            " be gone before it is read.",
            breaks=True,
            fix=f"cleanup.policy=delete for {plan.source}",
        )
    if plan.marks in facts.partitions and "delete" not in facts.settings[plan.marks]["cleanup.policy"]:
        yield Weakness(
            f"{plan.marks} grows for ever.", fix="cleanup.policy=compact,delete and retention.ms for it"
        )


class _RecordSample:
    """The latest records of each partition: where ids lie, and under which message keys."""

    def __init__(self, client: dict[str, Any], group: str, topic: str, partitions: int) -> None:
        self.looked = self.waiting = self._without_id = self._other_key = self._copies = 0
        self._topic, self._partitions = topic, partitions
        self._settings = {
            **client,
            "group.id": group,  # its committed offsets are asked for; it is not joined
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "isolation.level": "read_committed",
        }
        self._warning: str | None = None
        self._places: dict[str, tuple[int, bytes | None]] = {}
        self._apart: list[str] = []
        self._renamed: list[str] = []

    def read(self, key_of: KeyOf) -> None:
        """Read at most `LOOKED_MAX` records, for a bounded time."""
        reader: Any = Consumer(self._settings, logger=CLIENT_LOG)
        try:
            starts = self._starts(reader)
            reader.assign(starts)
            left = {each.partition for each in starts}
            contract = PartitionContract(self._partitions)
            give_up_at = monotonic() + ASK_S
            while left and monotonic() < give_up_at and self.looked < LOOKED_MAX:
                records = []
                for record in reader.consume(500, 0.5):
                    if record.error() is None:
                        records.append(record)
                    elif record.error().code() == KafkaError._PARTITION_EOF:
                        left.discard(record.partition())
                self._warning = self._warning or contract.look(records)
                for record in records:
                    self._note(record, key_of)
        finally:
            reader.close()

    def _starts(self, reader: Any) -> list[TopicPartition]:
        """Return where to read from, and count what the group has not read."""
        share = max(1, LOOKED_MAX // self._partitions)
        all_ = [TopicPartition(self._topic, number) for number in range(self._partitions)]
        committed = {each.partition: each.offset for each in reader.committed(all_, ASK_S)}
        starts = []
        for place in all_:
            low, high = reader.get_watermark_offsets(place, timeout=ASK_S) or (0, 0)
            self.waiting += max(0, high - max(low, committed.get(place.partition, low)))
            if high > low:
                starts.append(TopicPartition(self._topic, place.partition, max(low, high - share)))
        return starts

    def _note(self, record: Any, key_of: KeyOf) -> None:
        self.looked += 1
        try:
            id_ = key_of(record)
        except (KeyMissing, KeyInvalid):
            self._without_id += 1
            return
        message_key = record.key()
        self._other_key += message_key != id_.encode()
        before = self._places.setdefault(id_, (record.partition(), message_key))
        if before[0] != record.partition():
            self._apart.append(id_)
        elif before[1] != message_key:
            self._renamed.append(id_)

    def notes(self) -> Iterator[str]:
        """Yield what was found to be as it should."""
        with_id = self.looked - self._without_id
        if not with_id:
            yield (
                "no record was found to look at"
                if not self.looked
                else "no record has an id: is --key right?"
            )
        elif not self._other_key:
            yield f"the message key is the id, in {plural(with_id, 'record')}"
        elif not self._apart and not self._renamed:
            yield (
                f"message keys are not the ids, in {self._other_key:,} of {with_id:,} records: copies must then have"
                " the same message key too, and no record was found to break that"
            )

    def weaknesses(self) -> Iterator[Weakness]:
        """Yield what lets copies pass, with examples."""
        for ids, what in (
            (self._apart, "lie in several partitions, and pass"),
            (self._renamed, "have several message keys, and pass as soon as those lie in several partitions"),
        ):
            if ids:
                some = ", ".join(dict.fromkeys(ids[:3]))
                yield Weakness(
                    f"Copies of {plural(len(set(ids)), 'id')} among {self.looked:,} records {what}: {some}.",
                    breaks=True,
                    fix=KEYED,
                )
        if self._warning is not None:
            yield Weakness(f"In {self._topic} {self._warning}.", breaks=True)
        if self._without_id:
            yield Weakness(
                f"{self._without_id:,} of {self.looked:,} records have no id: they become dead letters.",
                fix="the --key that producers write",
            )


def window_text(found: DedupExamination, window_us: int) -> str:
    """Return the window, and how long the marks are kept."""
    window = exact_text(window_us) if window_us else "not given (--window)"
    if not found.started:
        return window
    kept = "for ever" if found.kept_us is None else f"for {exact_text(found.kept_us)}"
    return f"{window}; the marks are kept {kept}"
