"""`semel explain --dedup` and `semel doctor --dedup`: the contract, compared with real topics and records."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka.cimpl import NewTopic

from semel.streams.examine import examine_dedup
from tests.cli.shell import semel
from tests.services import server
from tests.streams.scene import Stream, event
from tests.waiting import await_true

pytestmark = [pytest.mark.slow, pytest.mark.service]


@pytest.fixture
def stream(tmp_path: Path) -> Iterator[Stream]:
    made = Stream(tmp_path)
    yield made
    made.close()


def broken(stream: Stream) -> list[str]:
    found = examine_dedup(stream.url, key="id")
    return [each.what for each in found.weaknesses if each.breaks]


@pytest.mark.usefixtures("every_kafka")
def test_a_contract_that_is_kept_holds_and_nothing_is_joined_or_created(stream: Stream) -> None:
    stream.send("a", "b", "a")
    found = examine_dedup(stream.url, to=stream.output, key="id")
    assert (found.holds, found.looked, found.waiting, found.members) == (True, 3, 3, 0)
    assert (found.started, found.partitions) == (False, {stream.name: 3})
    assert any("the message key is the id, in 3 records" in each for each in found.notes)
    assert [name for name in stream.admin.list_topics(timeout=30).topics if name.startswith(stream.name)] == [
        stream.name
    ]
    stream.run()
    again = examine_dedup(stream.url, to=stream.output, key="id", window_us=24 * 3600 * 10**6)
    assert (again.holds, again.started, again.waiting) == (True, True, 0)
    assert again.partitions == {stream.name: 3, stream.marks: 3, stream.output: 3}
    assert again.kept_us is not None
    assert again.kept_us > 24 * 3600 * 10**6


def test_copies_in_two_partitions_are_found(stream: Stream) -> None:
    for partition in (0, 2):
        stream.produce(event("scattered"), "scattered", partition=partition)
    stream.flush()
    [apart, *_] = broken(stream)
    assert "Copies of 1 id among 2 records lie in several partitions, and pass: scattered." in apart


def test_copies_under_other_message_keys_are_found_where_they_still_share_a_partition(stream: Stream) -> None:
    for key in ("one", "two"):
        stream.produce(event("renamed"), key, partition=1)
    stream.flush()
    assert any("have several message keys" in each for each in broken(stream))


def test_records_without_a_message_key_break_it(stream: Stream) -> None:
    stream.produce(event("a"))
    stream.flush()
    assert any("no message key" in each for each in broken(stream))


def test_message_keys_of_another_field_are_told_and_do_not_break_it(stream: Stream) -> None:
    for id_ in ("a", "b", "a"):
        stream.produce(event(id_), "customer-1")
    stream.flush()
    found = examine_dedup(stream.url, key="id")
    assert found.holds
    assert any("message keys are not the ids, in 3 of 3 records" in each for each in found.notes)


@pytest.mark.parametrize(
    ("partitions", "config", "said"),
    [
        (4, {}, "has 3 partitions and its marks"),
        (3, {"retention.ms": "1000"}, "shorter than the window"),
        (3, {"unclean.leader.election.enable": "true"}, "may elect a leader that lacks records"),
    ],
)
def test_marks_that_do_not_fit_are_errors_of_the_doctor(
    stream: Stream, partitions: int, config: dict[str, str], said: str
) -> None:
    stream.send("a")
    stream.create(
        NewTopic(stream.marks, partitions, 1, config={"cleanup.policy": "compact,delete", **config})
    )
    options = ("--dedup", stream.url, "--key", "id", "--window", "24h")
    answer = semel("doctor", *options, "--json", cwd=stream.folder)
    assert answer.code == 1
    told = answer.json()
    assert told["healthy"] is False
    assert any(said in each["what"] for each in told["findings"] if each["level"] == "error")
    told_partitions = [each["what"] for each in told["findings"] if each["check"] == "partitions"]
    assert bool(told_partitions) is (partitions == 3)
    explained = semel("explain", *options, cwd=stream.folder)
    assert explained.code == 0
    assert "holds\tNO: 1 finding breaks it" in explained.out
    assert said in explained.out


def test_a_compacted_input_breaks_it(stream: Stream) -> None:
    compacted = f"{stream.name}.compacted"
    stream.create(NewTopic(compacted, 3, 1, config={"cleanup.policy": "compact"}))
    found = examine_dedup(f"kafka://{stream.address}/{compacted}?group=g", key="id")
    assert any("is compacted" in each.what for each in found.weaknesses if each.breaks)


def test_a_repartitioned_stream_is_examined_behind_its_keyed_topic(stream: Stream) -> None:
    for partition in range(3):
        stream.produce(b'{"id": "a"}', partition=partition)
    stream.flush()
    options = ("dedup", "--from", stream.url, "--to", stream.output, "--key", "id", "--until-idle")
    assert semel(*options, "--repartition", cwd=stream.folder).code == 0
    told = semel("explain", "--dedup", stream.url, "--key", "id", "--json", cwd=stream.folder).json()
    assert (told["repartitioned"], told["holds"]) == (True, True)
    assert told["partitions"] == {f"{stream.name}.g.keyed": 3, f"{stream.name}.g.keyed.g.marks": 3}


def test_an_instance_that_runs_is_counted(stream: Stream) -> None:
    stream.send("a")
    with stream.dedup() as dedup:
        while not (batch := dedup.receive()).parts:
            pass
        assert dedup.commit(batch)

        def is_counted() -> bool:
            dedup.commit(dedup.receive(0.1))  # so that it stays in the group, however slow the computer is
            return examine_dedup(stream.url, key="id").members == 1

        assert await_true(is_counted)


def test_the_doctor_needs_no_store_and_says_who_reads(stream: Stream) -> None:
    stream.send("a", "b")
    stream.run()
    stream.send("c")
    answer = semel("doctor", "--dedup", stream.url, "--key", "id", cwd=stream.folder)
    assert answer.code == 0, answer.err
    assert "0 instances run, 1 record waits" in answer.out
    assert "start an instance of semel dedup" in answer.out
    assert "has one copy of each record" in answer.out
    explained = semel("explain", "--dedup", stream.url, "--key", "id", cwd=stream.folder)
    assert "contract\tAn event and its copies must be in one partition" in explained.out
    assert "holds\tas far as 3 records of the input tell" in explained.out


def test_wrong_use_and_absent_brokers_have_their_exit_codes(tmp_path: Path) -> None:
    refused = semel("doctor", "--marks", "m", cwd=tmp_path)
    assert (refused.code, "give --dedup URL too" in refused.err) == (2, True)
    away = f"kafka://127.0.0.1:{server.NOBODY}/in?group=g"
    assert semel("explain", "--dedup", away, cwd=tmp_path).code == 69


def test_a_missing_topic_is_a_finding(stream: Stream) -> None:
    url = f"kafka://{stream.address}/nothing-here?group=g"
    answer = semel("doctor", "--dedup", url, "--json", cwd=stream.folder)
    assert answer.code == 78
    assert "there is no topic nothing-here" in answer.json()["findings"][0]["what"]
