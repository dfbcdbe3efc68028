"""First, duplicate, mismatch or late: one decision, in the order of the partition."""

import pytest

from semel.streams.mark_format import (
    KeyMark,
    digest_of,
    pack_mark,
    print_of,
    records_of_marks,
    unpack_mark,
    unpack_marks,
)
from semel.streams.sorting import Candidates, Sorted, sort_events

WINDOW = 100


def sort(*events: tuple[str, int, str], known: dict[str, bytes] | None = None, latest: int = 0) -> str:
    """Sort events `(key, time, body)`; one letter for each: F, d, m, l."""
    found = sort_all(*events, known=known or {}, latest=latest)
    letters = [""] * len(events)
    for letter, numbers in zip("Fdml", found, strict=False):
        for number in numbers:  # type: ignore[attr-defined]
            letters[number] = letter
    return "".join(letters)


def sort_all(
    *events: tuple[str, int, str], known: dict[str, bytes], latest: int, arrive: bool = False
) -> Sorted:
    """Sort events; `arrive`: with one time for all, which must be the same, as they have it by arrival."""
    keys, times, bodies = zip(*events, strict=True)
    candidates = Candidates(
        range(len(events)),
        [digest_of(key) for key in keys],
        [print_of(body.encode()) for body in bodies],
        times[0] if arrive else times,
    )
    return sort_events(candidates, [known.get(key) for key in keys], latest, WINDOW)


def mark(at_us: int, body: str = "x") -> bytes:
    return pack_mark(KeyMark(at_us, print_of(body.encode())))


def test_copies_within_a_batch_are_duplicates_of_the_first() -> None:
    assert sort(("a", 1, "x"), ("b", 1, "x"), ("a", 2, "x"), ("a", 2, "y"), ("b", 3, "x")) == "FFdmd"


def test_copies_of_earlier_batches_are_duplicates() -> None:
    assert sort(("a", 50, "x"), ("a", 50, "y"), known={"a": mark(10)}, latest=10) == "dm"


@pytest.mark.parametrize(("at", "letter"), [(109, "d"), (110, "F"), (111, "F")])
def test_a_mark_counts_until_the_window_is_over(at: int, letter: str) -> None:
    assert sort(("a", at, "x"), known={"a": mark(10)}, latest=10) == letter


def test_after_its_window_a_key_is_first_again_and_then_a_duplicate() -> None:
    assert sort(("a", 10, "x"), ("a", 110, "y"), ("a", 111, "y"), ("a", 112, "x")) == "FFdm"


@pytest.mark.parametrize(("at", "letter"), [(100, "l"), (101, "F")])
def test_an_event_is_late_when_its_mark_would_be_over(at: int, letter: str) -> None:
    assert sort(("a", at, "x"), latest=200) == letter
    assert sort(("b", 200, "x"), ("a", at, "x")) == "F" + letter


def test_a_late_event_is_no_duplicate_and_leaves_no_mark() -> None:
    assert sort(("a", 5, "x"), ("a", 5, "x"), known={"a": mark(5)}, latest=200) == "ll"


def test_the_result_does_not_depend_on_where_batches_end() -> None:
    events = [(f"k{n % 7}", (n * 37) % 400, "x") for n in range(300)]
    whole = sort(*events)
    known: dict[str, bytes] = {}
    latest, letters = 0, ""
    for at in range(0, 300, 11):
        some = events[at : at + 11]
        found = sort_all(*some, known=known, latest=latest)
        letters += sort(*some, known=known, latest=latest)
        known |= {key: found.marks[digest_of(key)] for key, _, _ in some if digest_of(key) in found.marks}
        latest = found.latest_us
    assert letters == whole
    assert {"F", "d", "l"} == set(whole)


@pytest.mark.parametrize("at", [50, 109, 110, 400])
def test_events_of_one_time_are_sorted_as_those_with_times_of_their_own(at: int) -> None:
    events = [("a", at, "x"), ("b", at, "x"), ("b", at, "y"), ("c", at, "x"), ("b", at, "x"), ("a", at, "y")]
    for known in ({}, {"a": mark(10), "c": mark(40, "y")}):
        for latest in (0, 60, 200):
            told = [sort_all(*events, known=known, latest=latest, arrive=each) for each in (True, False)]
            assert told[0] == told[1]


def test_marks_survive_their_bytes() -> None:
    assert unpack_mark(pack_mark(KeyMark(1_794_931_610_000_000, b"\xff" * 8))) == (
        1_794_931_610_000_000,
        b"\xff" * 8,
    )
    for wrong in (b"", b"\x02" + b"x" * 16, b"\x01" + b"x" * 15):
        with pytest.raises(ValueError, match="no mark"):
            unpack_mark(wrong)
    assert print_of(None) != print_of(b"")


def test_packed_marks_sort_by_their_time() -> None:
    times = [1, 255, 256, 1_794_931_610_000_000, 1_794_931_610_000_001]
    assert [unpack_mark(each).at_us for each in sorted(map(mark, reversed(times)))] == times


@pytest.mark.parametrize("number", [1, 2, 3, 7])
def test_marks_survive_their_records(number: int) -> None:
    marks = {digest_of(str(n)): mark(n + 1) for n in range(number)}
    records = list(records_of_marks(marks, most=3))
    assert len(records) == -(-number // 3)
    found: dict[bytes, bytes] = {}
    for key, value in records:
        found |= unpack_marks(key, value)
    assert found == marks


def test_one_mark_has_its_digest_as_the_key_so_that_compaction_leaves_the_latest() -> None:
    assert list(records_of_marks({digest_of("a"): mark(1)})) == [(digest_of("a"), mark(1))]
    marks = {digest_of("a"): mark(1), digest_of("b"): mark(1)}
    ((first, _),), ((second, _),) = (list(records_of_marks(marks)) for _ in range(2))
    assert first != second, "compaction would remove marks that are not repeated"


def test_records_that_hold_no_marks_are_refused() -> None:
    whole = digest_of("a") + mark(1)
    for key, value in (
        (None, mark(1)),
        (b"short", mark(1)),
        (digest_of("a"), b""),
        (digest_of("a"), whole + b"x"),
        (digest_of("a"), whole + digest_of("b") + b"\x02" + b"x" * 16 + whole),
        (digest_of("a"), b"\x02" + b"x" * 16),
    ):
        with pytest.raises(ValueError, match=r"mark|digest"):
            unpack_marks(key, value)
