"""`semel dedup` as its user meets it."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka.cimpl import NewTopic

from semel.observe.dedup_progress import SeenDedup, dedups
from semel.runtime.generators import drive
from semel.stores.sqlite import SqliteStore
from tests.cli.processes import semel
from tests.streams.scene import Stream, end
from tests.waiting import WITHIN_S, await_true

pytestmark = [pytest.mark.slow, pytest.mark.service]


@pytest.fixture
def stream(tmp_path: Path) -> Iterator[Stream]:
    made = Stream(tmp_path)
    yield made
    made.close()


def test_from_a_topic_to_another_until_nothing_is_left(stream: Stream) -> None:
    stream.send("a", "b", "a")
    target = f"kafka://{stream.address}/{stream.output}"
    options = (
        "dedup",
        "--from",
        stream.url,
        "--to",
        target,
        "--key",
        "id",
        "--window",
        "24h",
        "--until-idle",
    )
    dry = semel(*options, "--dry-run", cwd=stream.folder)
    assert dry.returncode == 0, dry.stderr
    assert f"would create {stream.marks}" in dry.stderr.decode()
    assert stream.output not in stream.admin.list_topics(timeout=30).topics, "nothing is changed"
    ran = semel(*options, cwd=stream.folder)
    assert ran.returncode == 0, ran.stderr
    assert "same message key, same partitioner" in ran.stderr.decode(), "the contract is told"
    assert "3 received, 2 passed, 1 duplicate, 0 mismatches, 0 late, 0 dead letters" in ran.stderr.decode()
    again = semel(*options, "--json", "--log-format", "json", cwd=stream.folder)
    assert json.loads(again.stdout)["received"] == 0
    assert sorted(stream.passed()) == ["a", "b"]
    assert (stream.folder / "semel-dedup" / "0").is_dir()


def test_scattered_copies_with_repartition(stream: Stream) -> None:
    for partition in range(3):
        stream.produce(b'{"id": "a"}', partition=partition)
    stream.flush()
    options = ("dedup", "--from", stream.url, "--to", stream.output, "--key", "id", "--until-idle")
    ran = semel(*options, "--repartition", "--json", cwd=stream.folder)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["duplicates"] == 2
    assert stream.passed() == ["a"]


def test_topics_that_do_not_fit_are_refused_with_78(stream: Stream) -> None:
    stream.create(NewTopic(stream.marks, 1, 1))
    ran = semel("dedup", "--from", stream.url, "--to", stream.output, "--key", "id", cwd=stream.folder)
    assert ran.returncode == 78
    assert b"kafka-topics.sh --alter" in ran.stderr
    assert stream.marks.encode() in ran.stderr


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--to", "out"], 2, "give --from"),
        (["--from", "kafka://localhost:1/in?group=g"], 2, "give --from"),
        (
            ["--from", "kafka://localhost:1/in?group=g", "--to", "out", "--late", "drop", "--late-to", "x"],
            2,
            "one of",
        ),
        (["--from", "kafka://localhost:1/in?group=g", "--to", "in"], 78, "never end"),
        (["--from", "kafka://localhost:1/in?group=g&nonsense=1", "--to", "out"], 78, "no option nonsense"),
        (["--from", "kafka://localhost:1/in?group=a/b", "--to", "out"], 78, "--marks"),
        (["--from", "kafka://localhost:1/in", "--to", "out"], 78, "group"),
    ],
)
def test_wrong_use_is_explained(options: list[str], code: int, said: str, tmp_path: Path) -> None:
    ran = semel("dedup", *options, cwd=tmp_path)
    assert ran.returncode == code, ran.stderr
    assert said in ran.stderr.decode()


def test_its_progress_is_written_into_the_store_of_a_dashboard(stream: Stream) -> None:
    ids = [f"e{n}" for n in range(20)]
    stream.send(*ids, *ids[:5])
    store = SqliteStore(stream.folder / "board.db")
    with stream.running("--store", f"sqlite:///{store.path}") as process:
        assert await_true(lambda: [each.figures.duplicates for each in _seen(store)] == [5], WITHIN_S)
        [instance] = _seen(store)
        assert instance.name == f"kafka://{stream.address}/{stream.name}?group=g"
        assert (instance.figures.passed, instance.figures.lag, instance.figures.partitions) == (20, 0, 3)
        assert instance.figures.index_bytes > 0
        end(process)
    assert _seen(store) == [], "it has stopped"
    store.close()


def _seen(store: SqliteStore) -> list[SeenDedup]:
    if not Path(store.path).exists():
        return []
    store.open()
    found: list[SeenDedup] = drive(dedups(), store.send)
    return found


def test_it_is_measured_and_stops_without_losing_its_index(stream: Stream) -> None:
    stream.send(*[f"e{n}" for n in range(50)])
    with stream.running("--metrics", ":0", "--log-format", "json", state="kept") as process:
        assert await_true(lambda: stream.output in stream.admin.list_topics(timeout=30).topics, WITHIN_S)
        assert await_true(lambda: len(stream.passed()) == 50, WITHIN_S)
        said = end(process, signal.SIGTERM)
    assert process.returncode == 0
    assert "Metrics at port" in said
    stream.send("e1")
    ran = stream.run(state="kept")
    assert (ran.counts.restored, ran.counts.duplicates) == (0, 1)
