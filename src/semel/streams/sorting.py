"""Tell first events from duplicates: the one decision of `semel dedup`, without I/O."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from semel.streams.mark_format import TIME_BYTES, pack_time, unpack_mark

__all__ = ["Candidates", "Sorted", "sort_events"]


class Candidates(NamedTuple):
    """The readable records of one partition, as columns of equal length."""

    records: Sequence[Any]
    digests: Sequence[bytes]
    prints: Sequence[bytes]
    """The prints of their bodies."""
    times_us: Sequence[int] | int
    """Their own times, or the time of all of them."""


class Sorted(NamedTuple):
    """The records of one partition in one batch, each list in their order."""

    firsts: list[Any]
    duplicates: list[Any]
    mismatches: list[Any]
    """Known keys that came with another body."""
    late: list[Any]
    marks: dict[bytes, bytes]
    """The marks of the first events, packed, by digest."""
    latest_us: int
    """The latest time of all marks of the partition."""


def sort_events(
    candidates: Candidates, known: Sequence[bytes | None], latest_us: int, window_us: int
) -> Sorted:
    """Sort the records of one partition, in their order; `known` has the packed mark of each, if there is one.

    The partition's time is the latest time of its marks, and of the record itself. A mark counts while it is younger
    than the window at that time. A record is late if it is not: nobody can tell whether it was seen before.
    """
    records, digests, prints, times_us = candidates
    sorted_ = Sorted([], [], [], [], {}, latest_us)
    if not isinstance(times_us, int):
        return _sort_timed(candidates, times_us, known, sorted_, window_us)
    if times_us <= latest_us - window_us:
        sorted_.late.extend(records)
        return sorted_
    firsts, marks = sorted_.firsts, sorted_.marks
    time = pack_time(times_us)
    clock_us = max(times_us, latest_us)
    for record, digest, body_print, stored in zip(records, digests, prints, known, strict=True):
        mark = marks.get(digest) or stored
        if mark is None or not _repeats(sorted_, record, mark, body_print, clock_us - window_us):
            firsts.append(record)
            marks[digest] = time + body_print
    return sorted_._replace(latest_us=clock_us) if firsts else sorted_


def _sort_timed(
    candidates: Candidates,
    times_us: Sequence[int],
    known: Sequence[bytes | None],
    sorted_: Sorted,
    window_us: int,
) -> Sorted:
    """Sort records that have times of their own."""
    records, digests, prints, _ = candidates
    firsts, marks, latest_us = sorted_.firsts, sorted_.marks, sorted_.latest_us
    for record, digest, body_print, at_us, stored in zip(
        records, digests, prints, times_us, known, strict=True
    ):
        if at_us <= latest_us - window_us:
            sorted_.late.append(record)
            continue
        clock_us = max(at_us, latest_us)
        mark = marks.get(digest) or stored
        if mark is None or not _repeats(sorted_, record, mark, body_print, clock_us - window_us):
            firsts.append(record)
            marks[digest] = pack_time(at_us) + body_print
            latest_us = clock_us
    return sorted_._replace(latest_us=latest_us)


def _repeats(sorted_: Sorted, record: Any, mark: bytes, body_print: bytes, over_us: int) -> bool:
    """Put a record aside whose key has a mark that is not over; returns whether it is."""
    if unpack_mark(mark).at_us <= over_us:
        return False
    (sorted_.duplicates if mark[TIME_BYTES:] == body_print else sorted_.mismatches).append(record)
    return True
