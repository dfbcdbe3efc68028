"""A plan for a rate and a window: figures that a person can check by hand."""

from math import isclose
from pathlib import Path

import pytest

from semel.errors import UsageError
from semel.observe.capacity import LAYOUTS, Plan, parse_rate, plan
from semel.stores.postgres.calendar import PartitionStep
from semel.windows import window_us
from tests.cli.shell import semel

GIB = 2**30


@pytest.mark.parametrize(
    ("text", "per_s"),
    [
        ("12k/s", 12_000), ("500", 500), ("500/s", 500), ("3M/h", 3_000_000 / 3600), ("1B/day", 1e9 / 86400),
        ("1.5k/min", 25), ("86400 per day", 1), ("10/seconds", 10),
    ],
)  # fmt: skip
def test_rates(text: str, per_s: float) -> None:
    assert isclose(parse_rate(text), per_s)


@pytest.mark.parametrize("text", ["", "fast", "12k/fortnight", "-5/s", "0/s", "9e99/s", "10B/s", "12kk/s"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_rate(text)


def chosen(rate: str, window: str, layout: str, store: str = "postgresql") -> Plan:
    (found,) = [
        each for each in plan(parse_rate(rate), window_us(window), stores=[store]) if each.layout == layout
    ]
    return found


def test_a_million_a_day_for_a_day() -> None:
    records = chosen("1M/day", "24h", "records")
    bytes_each = next(
        each.bytes_each for each in LAYOUTS if (each.store, each.name) == ("postgresql", "records")
    )
    assert (records.held, records.disk_bytes) == (1_000_000, 1_000_000 * bytes_each)
    assert (records.shards, records.partitions, records.connections, records.fits) == (1, 0, 2, "yes")


def test_partitions_keep_records_for_the_window_the_outage_and_one_step() -> None:
    timed = chosen("1k/s", "24h", "records in partitions")
    assert (timed.partitions, timed.partition_step, timed.partition_live_s) == (16, "1 day", 8 * 86400)
    assert timed.held == 1000 * 9 * 86400


def test_partitions_keep_marks_for_the_window_and_one_step() -> None:
    timed = chosen("1k/s", "24h", "marks in partitions")
    assert (timed.partitions, timed.partition_step, timed.partition_live_s) == (9, "1 day", 2 * 86400)
    assert timed.held == 1000 * 2 * 86400
    assert "ids=opaque" in timed.notes[0]
    assert timed.server_cores == 1  # 14 us
    assert chosen("20k/s", "7d", "marks in partitions").server_cores == 2  # 32 us, and the headroom
    assert chosen("1k/s", "forever", "marks in partitions").fits == "no"


@pytest.mark.parametrize("window", ["1m", "24h", "90d", "3650d"])
def test_the_step_of_a_plan_is_one_that_the_store_takes(window: str) -> None:
    timed = chosen("1k/s", window, "records in partitions")
    assert PartitionStep.of(timed.partition_step).about_us > 0
    assert timed.partitions <= 60


def test_redis_is_split_by_memory_and_by_its_one_core() -> None:
    assert chosen("1B/day", "24h", "records", "redis").shards == 5  # 282 GiB, 64 GiB each
    assert chosen("200k/s", "1m", "records", "redis").shards == 4  # 3.7 cores with the headroom


def test_a_window_without_end_has_no_size_but_a_growth() -> None:
    records = chosen("1k/s", "forever", "records", "sqlite")
    assert (records.held, records.disk_bytes, records.memory_bytes) == (0, None, None)
    assert records.grows_bytes_per_day == 1000 * 86400 * 205
    assert chosen("1k/s", "forever", "records in partitions").fits == "no"
    assert chosen("1k/s", "forever", "packed marks", "memory").fits == "no"


def test_more_than_was_measured_is_called_so() -> None:
    assert chosen("1M/day", "24h", "marks").fits == "yes"
    assert chosen("2M/day", "24h", "marks").fits == "unmeasured"


def test_the_command(tmp_path: Path) -> None:
    told = semel("advise", "--rate", "12k/s", "--window", "24h", cwd=tmp_path)
    assert told.code == 0
    assert len(told.out.splitlines()) == len(LAYOUTS)
    assert "docs/explain/scale.md" in told.err
    document = semel(
        "advise",
        "--rate",
        "12k/s",
        "--window",
        "forever",
        "--store",
        "postgres://db/app",
        "--json",
        cwd=tmp_path,
    ).json()
    assert (document["rate_per_s"], document["window"]) == (12_000, "forever")
    assert {each["store"] for each in document["plans"]} == {"postgresql"}


@pytest.mark.parametrize(
    "wrong",
    [
        ["--rate", "fast"], ["--rate", "1/s", "--window", "off"], ["--rate", "1/s", "--store", "oracle:"],
        ["--rate", "1/s", "--metrics", "x"], ["--store", "redis"], ["--rate", "1/s", "--memory", "much"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_what_cannot_be_planned_is_refused(tmp_path: Path, wrong: list[str]) -> None:
    assert semel("advise", *wrong, cwd=tmp_path).code == 2


def test_the_plan_of_dedup_is_in_instances_and_local_disk() -> None:
    [found] = plan(12_000.0, 86_400_000_000, stores=["kafka"])
    [layout] = [each for each in LAYOUTS if each.store == "kafka"]
    assert found.layout == "dedup"
    assert found.disk_bytes == 12_000 * 86_400 * layout.bytes_each
    assert found.shards == found.client_processes >= 1
    assert not found.server_cores
    assert not found.connections
    [greater] = plan(1_200_000.0, 86_400_000_000, stores=["kafka"])
    assert greater.shards > found.shards
    assert "a partition for each shard" in " ".join(greater.notes)
