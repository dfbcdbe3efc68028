"""The index in RocksDB: behind the topic at most, and as large as the window."""

import os
from pathlib import Path

import pytest

from semel.errors import StoreRefused
from semel.streams import rocks
from semel.streams.mark_format import KeyMark, pack_mark
from semel.streams.rocks import PARTS, RocksIndex, RocksIndexes
from tests.waiting import await_true

WINDOW_US = 4_000


def digest(n: int) -> bytes:
    return n.to_bytes(16, "big")


def mark(at_us: int, n: int) -> bytes:
    return pack_mark(KeyMark(at_us, n.to_bytes(8, "big")))


def opened(folder: Path | None) -> RocksIndexes:
    return RocksIndexes(folder, WINDOW_US)


def test_marks_and_their_offset_are_there_after_a_restart(tmp_path: Path) -> None:
    indexes = opened(tmp_path)
    index = indexes.open(0, "topic", 5, 5)
    assert (index.offset, index.latest_us, index.find([digest(1)])) == (5, 0, [None])
    index.add({digest(1): mark(100, 7), digest(2): mark(3_000, 8)}, 9, -1)
    assert index.find([digest(2), digest(3), digest(1)]) == [mark(3_000, 8), None, mark(100, 7)]
    index.close()
    indexes.close()
    indexes = opened(tmp_path)
    index = indexes.open(0, "topic", 0, 9)
    assert (index.offset, index.latest_us) == (9, 3_000)
    assert index.find([digest(1), digest(2)]) == [mark(100, 7), mark(3_000, 8)]
    index.close()
    indexes.close()


@pytest.mark.parametrize(("topic", "low", "high"), [("other", 0, 20), ("topic", 10, 20), ("topic", 0, 8)])
def test_an_index_of_other_marks_is_not_used(tmp_path: Path, topic: str, low: int, high: int) -> None:
    """Another topic of that name; its offset is deleted by retention; or the topic is shorter than that."""
    indexes = opened(tmp_path)
    index = indexes.open(0, "topic", 0, 0)
    index.add({digest(1): mark(100, 7)}, 9, -1)
    index.close()
    index = indexes.open(0, topic, low, high)
    assert (index.offset, index.latest_us, index.find([digest(1)])) == (low, 0, [None])
    index.close()
    indexes.close()


def test_a_damaged_index_is_built_again(tmp_path: Path) -> None:
    indexes = opened(tmp_path)
    index = indexes.open(0, "topic", 0, 0)
    index.add({digest(1): mark(100, 7)}, 9, -1)
    index.close()
    (tmp_path / "0" / "0" / "CURRENT").write_text("nonsense")
    index = indexes.open(0, "topic", 3, 9)
    assert (index.offset, index.find([digest(1)])) == (3, [None])
    index.close()
    indexes.close()


def test_parts_of_the_window_that_are_over_are_dropped_whole(tmp_path: Path) -> None:
    indexes = opened(tmp_path)
    index = indexes.open(0, "topic", 0, 0)
    for number in range(100):
        at_us = number * 500
        index.add({digest(number): mark(at_us, 1)}, number, at_us - WINDOW_US)
        assert len(index._parts) <= PARTS + 2
    assert index.find([digest(0)]) == [None]
    young = [number for number in range(100) if 99 * 500 - number * 500 < WINDOW_US]
    assert None not in index.find([digest(number) for number in young])
    index.close()
    index = indexes.open(0, "topic", 0, 99)
    assert len(index._parts) <= PARTS + 2
    index.close()
    indexes.close()


def test_marks_of_one_batch_go_to_the_parts_of_their_times(tmp_path: Path) -> None:
    indexes = opened(tmp_path)
    index = indexes.open(0, "topic", 0, 0)
    times = [100, WINDOW_US, 2 * WINDOW_US, 3 * WINDOW_US]
    marks = {digest(number): mark(at_us, number) for number, at_us in enumerate(times)}
    index.add(marks, 1, WINDOW_US)
    assert index.latest_us == times[-1]
    assert index.find([digest(0)]) == [None], "it is over"
    assert index.find([digest(3), digest(9), digest(1), digest(2)]) == [
        marks[digest(3)],
        None,
        marks[digest(1)],
        marks[digest(2)],
    ]
    index.add({}, 2, 3 * WINDOW_US)
    assert index.find([digest(1), digest(2), digest(3)]) == [None, None, marks[digest(3)]]
    assert (index.offset, index.latest_us) == (2, times[-1])
    index.close()
    indexes.close()


def test_the_size_follows_the_window(tmp_path: Path) -> None:
    indexes = opened(tmp_path)
    index = indexes.open(0, "topic", 0, 0)
    sizes = []
    for turn in range(12):
        at_us = turn * WINDOW_US
        marks = {os.urandom(16): mark(at_us, 1) for _ in range(20_000)}
        index.add(marks, turn, at_us - WINDOW_US)
        sizes.append(index.size_bytes())
    assert max(sizes) < 8 * 20_000 * 60, "eight turns are more than are kept"
    index.close()
    indexes.close()


def test_a_changed_window_keeps_what_is_there(tmp_path: Path) -> None:
    indexes = opened(tmp_path)
    index = indexes.open(0, "topic", 0, 0)
    index.add({digest(1): mark(100, 7)}, 1, -1)
    index.close()
    indexes.close()
    indexes = RocksIndexes(tmp_path, WINDOW_US // 8)
    index = indexes.open(0, "topic", 0, 1)
    index.add({digest(1): mark(900, 8), digest(2): mark(1_300, 9)}, 2, -1)
    assert index.find([digest(1), digest(2)]) == [mark(900, 8), mark(1_300, 9)]
    index.close()
    indexes.close()


def test_each_instance_has_its_own_folder(tmp_path: Path) -> None:
    first, second = opened(tmp_path), opened(tmp_path)
    assert first.path != second.path
    first.close()
    third = opened(tmp_path)
    assert third.path == first.path
    second.close()
    third.close()


def test_a_temporary_folder_is_removed() -> None:
    indexes = opened(None)
    index: RocksIndex = indexes.open(0, "topic", 0, 0)
    index.close()
    assert indexes.path.exists()
    indexes.close()
    assert not indexes.path.exists()


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreRefused, match="file"):
        opened(tmp_path / "file")


def test_the_log_of_parts_that_are_no_longer_written_does_not_pile_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rocks, "LOG_BYTES_MAX", 100_000)
    indexes = opened(tmp_path)
    index = indexes.open(0, "t", 0, 0)
    for number in range(20):  # each in a part of its own: none of them is full
        marks = {digest(number * 1000 + n): mark(number * WINDOW_US, 1) for n in range(1000)}
        index.add(marks, number, -1)
    logs = tmp_path / "0" / "0"
    assert await_true(lambda: sum(each.stat().st_size for each in logs.glob("*.log")) < 400_000, 30)
    index.close()
    indexes.close()
