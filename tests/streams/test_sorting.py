"""First, duplicate, mismatch or late: one decision, in the order of the partition."""

import pytest

from semel.streams.mark_format import KeyMark, digest_of, pack_mark, print_of, unpack_mark
from semel.streams.sorting import Candidate, sort_events

WINDOW = 100


def sort(*events: tuple[str, int, str], known: dict[str, KeyMark] | None = None, latest: int = 0) -> str:
    """Sort events `(key, time, body)`; one letter for each: F, d, m, l."""
    known = known or {}
    candidates = [
        Candidate(at, digest_of(key), t, print_of(body.encode())) for at, (key, t, body) in enumerate(events)
    ]
    found = sort_events(candidates, [known.get(key) for key, _, _ in events], latest, WINDOW)
    letters = [""] * len(events)
    for letter, numbers in zip("Fdml", found, strict=False):
        for number in numbers:  # type: ignore[attr-defined]
            letters[number] = letter
    return "".join(letters)


def mark(at_us: int, body: str = "x") -> KeyMark:
    return KeyMark(at_us, print_of(body.encode()))


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
    known: dict[str, KeyMark] = {}
    latest, letters = 0, ""
    for at in range(0, 300, 11):
        some = events[at : at + 11]
        candidates = [Candidate(n, digest_of(key), t, print_of(b"x")) for n, (key, t, _) in enumerate(some)]
        found = sort_events(candidates, [known.get(key) for key, _, _ in some], latest, WINDOW)
        letters += sort(*some, known=known, latest=latest)
        known |= {key: found.marks[digest_of(key)] for key, _, _ in some if digest_of(key) in found.marks}
        latest = found.latest_us
    assert letters == whole
    assert {"F", "d", "l"} == set(whole)


def test_marks_survive_their_bytes() -> None:
    assert unpack_mark(pack_mark(KeyMark(1_794_931_610_000_000, 2**64 - 1))) == (
        1_794_931_610_000_000,
        2**64 - 1,
    )
    for wrong in (b"", b"\x02" + b"x" * 16, b"\x01" + b"x" * 15):
        with pytest.raises(ValueError, match="no mark"):
            unpack_mark(wrong)
    assert print_of(None) != print_of(b"")
