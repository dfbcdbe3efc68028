"""Tell first events from duplicates: the one decision of `semel dedup`, without I/O."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from semel.streams.mark_format import KeyMark

__all__ = ["Candidate", "Sorted", "sort_events"]


class Candidate(NamedTuple):
    """A readable record: its digest, its time and the print of its body."""

    record: Any
    digest: bytes
    at_us: int
    body_print: int


class Sorted(NamedTuple):
    """The records of one partition in one batch, each list in their order."""

    firsts: list[Any]
    duplicates: list[Any]
    mismatches: list[Any]
    """Known keys that came with another body."""
    late: list[Any]
    marks: dict[bytes, KeyMark]
    """The marks of the first events."""
    latest_us: int
    """The latest time of all marks of the partition."""


def sort_events(
    candidates: Sequence[Candidate], known: Sequence[KeyMark | None], latest_us: int, window_us: int
) -> Sorted:
    """Sort the records of one partition, in their order; `known` has the mark of each, if there is one.

    The partition's time is the latest time of its marks, and of the record itself. A mark counts while it is younger
    than the window at that time. A record is late if it is not: nobody can tell whether it was seen before.
    """
    firsts: list[Any] = []
    duplicates: list[Any] = []
    mismatches: list[Any] = []
    late: list[Any] = []
    marks: dict[bytes, KeyMark] = {}
    for (record, digest, at_us, body_print), stored in zip(candidates, known, strict=True):
        if at_us <= latest_us - window_us:
            late.append(record)
            continue
        clock_us = max(at_us, latest_us)
        mark = marks.get(digest) or stored
        if mark is not None and clock_us - mark.at_us < window_us:
            (duplicates if mark.body_print == body_print else mismatches).append(record)
            continue
        firsts.append(record)
        marks[digest] = KeyMark(at_us, body_print)
        latest_us = clock_us
    return Sorted(firsts, duplicates, mismatches, late, marks, latest_us)
