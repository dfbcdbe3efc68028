"""What a reader of the output sees, on a real Kafka: every id once, in order, whatever happened before."""

import json
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.cimpl import NewTopic

from semel.brokers.dead_letters import letter_of
from semel.errors import UsageError
from semel.streams import Dedup, DedupBatch, RecordOutput
from semel.streams.mark_format import ENTRY_BYTES
from semel.streams.repartition import Repartition
from semel.streams.writer import TransactionWriter
from tests.streams.scene import Stream, event, ids_of

pytestmark = [pytest.mark.slow, pytest.mark.service]

HOUR_S = 3600


@pytest.fixture
def stream(tmp_path: Path) -> Iterator[Stream]:
    made = Stream(tmp_path)
    yield made
    made.close()


class Died(BaseException):
    """The process is gone: nothing of it is said or done any more."""


@pytest.mark.usefixtures("every_kafka")
def test_every_id_once_and_in_order_within_batches_across_them_and_across_restarts(stream: Stream) -> None:
    chance = random.Random(5)
    sent: dict[str, list[str]] = {}
    for number in range(3):
        for _ in range(200):
            customer = f"c{chance.randrange(9)}"
            id_ = f"{customer}-{chance.randrange(60)}"
            sent.setdefault(customer, []).append(id_)
            stream.produce(event(id_), customer, headers=[("h", b"1")], timestamp=1_794_931_610_000 + number)
        stream.flush()
        ran = stream.run(batch=50)
        assert ran.counts.received == 200, "what was committed is not read again"
        assert ran.counts.restored == 0, "the index is kept"
    found: dict[str, list[str]] = {}
    for record in stream.read():
        found.setdefault(record.key().decode(), []).append(json.loads(record.value())["id"])
        assert record.headers() == [("h", b"1")]
        assert record.timestamp()[1] - 1_794_931_610_000 in range(3)
    assert found == {customer: list(dict.fromkeys(ids)) for customer, ids in sent.items()}
    places = {record.key(): record.partition() for record in stream.read(stream.name)}
    assert all(record.partition() == places[record.key()] for record in stream.read())


@pytest.mark.usefixtures("every_kafka")
def test_without_its_index_an_instance_reads_the_marks_again(stream: Stream) -> None:
    ids = [f"e{n}" for n in range(100)]
    stream.send(*ids)
    stream.run()
    shutil.rmtree(stream.folder / "state")
    stream.send(*ids, "new")
    ran = stream.run()
    assert (ran.counts.restored, ran.counts.duplicates, ran.counts.passed) == (100, 100, 1)
    assert Counter(stream.passed()) == Counter([*ids, "new"])


def test_marks_share_records_as_large_as_their_topic_accepts(stream: Stream) -> None:
    config = {"max.message.bytes": "2000", "cleanup.policy": "compact,delete", "retention.ms": "172800000"}
    stream.create(NewTopic(stream.marks, stream.partitions, 1, config=config))
    ids = [f"e{n}" for n in range(300)]
    stream.send(*ids)
    stream.run()
    sizes = [len(record.value()) for record in stream.read(stream.marks)]
    assert sum(sizes) == len(ids) * ENTRY_BYTES
    assert len(ids) * ENTRY_BYTES / 1000 <= len(sizes) < 30
    assert max(sizes) <= 1000
    shutil.rmtree(stream.folder / "state")
    stream.send(*ids)
    ran = stream.run()
    assert (ran.counts.restored, ran.counts.duplicates, ran.counts.passed) == (300, 300, 0)


class DiesAfterCommit(Dedup):
    """Commits, and dies before its index is written."""

    def _note_committed(self, *_arguments: Any) -> None:
        raise Died


def test_an_index_behind_the_topic_catches_up(stream: Stream) -> None:
    stream.send("a", "b")
    stream.run()
    stream.send("c", "d")
    with pytest.raises(Died):
        stream.run(DiesAfterCommit)
    stream.send("c", "d", "a", "e")
    ran = stream.run()
    assert ran.counts.restored == 2, "only what it lacks is read"
    assert (ran.counts.duplicates, ran.counts.passed) == (3, 1)
    assert Counter(stream.passed()) == Counter("abcde")


class IndexFirst(Dedup):
    """The wrong order: the index is written before the commit, which then does not happen."""

    def _transact(self, _member: Any, batch: Any, _outputs: Any) -> Any:
        for each in batch.parts:
            self._add_to_index(each.partition, each.sorted.marks, each.partition.index.offset)
        raise Died


def test_the_other_order_would_lose_events(stream: Stream) -> None:
    stream.send("a")
    with pytest.raises(Died):
        stream.run(IndexFirst)
    assert stream.run().counts.passed == 0
    assert stream.passed() == [], "it is lost: so the index is written after the commit"


class LosesTheAnswer(TransactionWriter):
    """Commits, and never hears of it."""

    lost = 0

    def _commit(self, producer: Any) -> None:
        super()._commit(producer)
        if self.lost < 2:
            self.lost += 1
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "the answer is lost"))


class LosesTheRequest(LosesTheAnswer):
    """Does not commit, and cannot know that."""

    def _commit(self, producer: Any) -> None:
        if self.lost < 2:
            self.lost += 1
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "the request is lost"))
        super()._commit(producer)


@pytest.mark.parametrize("kind", [LosesTheAnswer, LosesTheRequest])
@pytest.mark.usefixtures("every_kafka")
def test_a_commit_without_an_answer_is_found_out(
    stream: Stream, kind: type[TransactionWriter], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("semel.streams.dedup.TransactionWriter", kind)
    ids = [f"e{n}" for n in range(60)]
    stream.send(*ids, *ids[:30])
    ran = stream.run(batch=20)
    assert ran.counts.aborts >= 2, "both lost answers; a busy computer may repeat another one"
    assert Counter(stream.passed()) == Counter(ids)
    stream.send(*ids)
    assert stream.run().counts.passed == 0


# --- windows ---


def test_the_window_is_counted_by_the_events_own_time_and_late_events_follow_the_policy(
    stream: Stream,
) -> None:
    def send(id_: str, hours: int) -> None:
        stream.produce(event(id_), "one", headers=[("at", str(1_794_000_000 + hours * HOUR_S).encode())])

    for id_, hours in (("a", 0), ("a", 23), ("a", 24), ("b", 30), ("late", 6), ("a", 30), ("c", 7)):
        send(id_, hours)
    stream.flush()
    ran = stream.run(time="header:at")
    assert ids_of(stream.read()) == ["a", "a", "b", "late", "c"], (
        "late events pass by default, in their place"
    )
    assert (ran.counts.late, ran.counts.duplicates) == (1, 2)
    for id_, hours in (("late", 6), ("d", 31)):
        send(id_, hours)
    stream.flush()
    assert stream.run(time="header:at", late="drop").counts.late == 1
    send("late", 5)
    stream.flush()
    stream.run(time="header:at", late_to=f"{stream.name}.late")
    assert ids_of(stream.read()) == ["a", "a", "b", "late", "c", "d"]
    [record] = stream.read(f"{stream.name}.late")
    assert record.headers()[-1] == ("semel-dedup", b"late")


def test_after_the_window_of_arrival_a_key_is_new_again(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1_794_931_610_000_000]
    for module in ("batches", "dedup"):
        monkeypatch.setattr(f"semel.streams.{module}.now_us", lambda: clock[0])
    stream.send("a", "b")
    stream.run()
    clock[0] += 23 * HOUR_S * 10**6
    stream.send("a")
    assert stream.run().counts.duplicates == 1
    clock[0] += 1 * HOUR_S * 10**6
    stream.send("a", "a")
    ran = stream.run()
    assert (ran.counts.passed, ran.counts.duplicates) == (1, 1)
    assert Counter(stream.passed()) == Counter(["a", "a", "b"])


# --- what does not go to the output ---


def test_copies_and_other_bodies_are_put_aside(stream: Stream) -> None:
    for body in (event("a", v=1), event("a", v=1), event("a", v=2), event("b")):
        stream.produce(body, "one")
    stream.flush()
    ran = stream.run(duplicates_to=f"{stream.name}.copies", mismatches_to=f"{stream.name}.others")
    assert (ran.counts.passed, ran.counts.duplicates, ran.counts.mismatches) == (2, 1, 1)
    assert [record.value() for record in stream.read()] == [event("a", v=1), event("b")], (
        "the first value wins"
    )
    [copy] = stream.read(f"{stream.name}.copies")
    [other] = stream.read(f"{stream.name}.others")
    assert (copy.value(), copy.headers()) == (event("a", v=1), [("semel-dedup", b"duplicate")])
    assert (other.value(), other.headers()) == (event("a", v=2), [("semel-dedup", b"mismatch")])


@pytest.mark.usefixtures("every_kafka")
def test_bad_input_becomes_dead_letters_with_its_reason(stream: Stream) -> None:
    stream.create(NewTopic(stream.output, stream.partitions, 1, config={"max.message.bytes": "2000"}))
    stream.produce(b"nonsense", "k", headers=[("h", b"1")])
    stream.produce(event("a", ts="never"), "k")
    stream.produce(event("b", ts=1_794_931_610, text=random.Random(1).randbytes(5000).hex()), "k")
    stream.produce(event("c", ts=1_794_931_610), "k")
    stream.produce(None, "k")
    stream.flush()
    ran = stream.run(time="ts")
    assert stream.passed() == ["c"]
    assert ran.counts.dead_lettered == 4
    dead = {}
    for record in stream.read(f"{stream.name}.dead"):
        letter = letter_of({name: value.decode() for name, value in record.headers()})
        assert letter is not None
        dead[letter.reason, record.value()] = letter
    assert {reason for reason, _ in dead} == {"no-key", "bad-time", "refused"}
    assert dead["no-key", b"nonsense"].consumer == "g"
    assert "never" in dead["bad-time", event("a", ts="never")].error
    assert dead["refused", None].body_at.startswith(f"{stream.name}/"), "its body is where it was"
    assert stream.run(time="ts", options="&tombstones=skip").counts.received == 0


def test_records_without_a_value_can_be_skipped(stream: Stream) -> None:
    stream.produce(None, "k")
    stream.send("a")
    ran = stream.run(options="&tombstones=skip")
    assert (ran.counts.skipped, ran.counts.passed, ran.counts.dead_lettered) == (1, 1, 0)


# --- the contract ---


def test_other_partition_counts_are_refused_with_what_to_do(stream: Stream) -> None:
    stream.create(NewTopic(stream.marks, stream.partitions + 1, 1))
    with pytest.raises(UsageError, match=r"3 partitions and its marks .* have 4.*--repartition"):
        stream.run()
    with pytest.raises(UsageError, match="3 partitions"):
        stream.dedup().check()


@pytest.mark.parametrize(
    ("config", "said"),
    [({"retention.ms": "1000"}, "retention.ms to"), ({"retention.bytes": "5000"}, "retention.bytes")],
)
def test_marks_that_would_go_too_early_are_refused(stream: Stream, config: dict[str, str], said: str) -> None:
    stream.create(NewTopic(stream.marks, stream.partitions, 1, config=config))
    with pytest.raises(UsageError, match=said):
        stream.run()


def test_topics_of_another_cluster_or_the_source_itself_are_refused(stream: Stream) -> None:
    with pytest.raises(UsageError, match="one cluster"):
        Dedup(stream.url, "kafka://elsewhere:9092/out", key="id")
    with pytest.raises(UsageError, match="never end"):
        Dedup(stream.url, stream.name, key="id")
    with pytest.raises(UsageError, match="one topic"):
        Dedup(stream.url.replace(stream.name, "a,b"), "out", key="id")
    with pytest.raises(UsageError, match="off"):
        Dedup(stream.url, "out", key="id", window="off")
    with pytest.raises(UsageError, match="no topic"):
        Dedup(stream.url.replace(stream.name, "nowhere-at-all"), "out", key="id").check()


def test_an_output_with_other_partitions_is_written_by_key(stream: Stream) -> None:
    stream.create(NewTopic(stream.output, 7, 1))
    stream.send(*[f"e{n}" for n in range(50)])
    stream.run()
    assert len(stream.passed()) == 50
    assert len({record.partition() for record in stream.read()}) > 3


@pytest.mark.usefixtures("every_kafka")
def test_scattered_copies_are_found_behind_a_keyed_topic(stream: Stream) -> None:
    ids = [f"e{n}" for n in range(40)]
    for partition in range(3):
        for id_ in ids:
            stream.produce(event(id_), f"key of {id_}", partition=partition)
    stream.produce(b"nonsense", partition=1)
    stream.flush()
    first = Repartition(stream.url, "id")
    first.run(until_idle=True)
    ran = Dedup(
        first.url_behind(), stream.output, key="id", repartitioned=True, state=stream.folder / "state"
    )
    ran.run(until_idle=True)
    assert (ran.counts.received, ran.counts.passed, ran.counts.duplicates) == (120, 40, 80)
    assert Counter(stream.passed()) == Counter(ids)
    assert all(record.key().decode().startswith("key of") for record in stream.read()), "message keys stay"
    assert len(stream.read(f"{stream.name}.dead")) == 1


# --- inside one's own loop ---


def test_ones_own_loop_writes_its_own_outputs(stream: Stream) -> None:
    shouted = f"{stream.name}.loud"
    stream.create(NewTopic(shouted, 1, 1))
    stream.send("a", "b", "a")
    with Dedup(stream.url, key="id", state=stream.folder / "state") as dedup:
        while dedup.counts.received < 3:
            batch = dedup.receive(1.0)
            made = [RecordOutput(shouted, record.value().upper(), record.key()) for record in batch.firsts]
            if batch.parts:
                with pytest.raises(UsageError, match="not committed"):
                    dedup.receive()
            assert dedup.commit(batch, made)
        with pytest.raises(UsageError, match="last receive"):
            dedup.commit(DedupBatch([None]))  # type: ignore[list-item]
        assert dedup.progress().partitions == 3
    assert Counter(record.value() for record in stream.read(shouted)) == Counter(
        [b'{"ID": "A"}', b'{"ID": "B"}']
    )
    with pytest.raises(UsageError, match="not open"):
        dedup.receive()
