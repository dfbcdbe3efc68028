"""Counters of a deduplication, and a picture of where it is."""

import msgspec

__all__ = ["DedupCounters", "DedupProgress"]


class DedupCounters(msgspec.Struct):
    """Committed records since the start, by what became of them."""

    received: int = 0
    passed: int = 0
    """First events, written to the output."""
    duplicates: int = 0
    mismatches: int = 0
    """Known keys with another body; the first body is the one that was passed."""
    late: int = 0
    dead_lettered: int = 0
    skipped: int = 0
    """Records without a value, with `tombstones=skip`."""
    transactions: int = 0
    aborts: int = 0
    """Transactions that were repeated."""
    restored: int = 0
    """Marks that were read from their topic."""


class DedupProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a deduplication is now."""

    counts: DedupCounters
    partitions: int
    """Assigned to this instance."""
    restoring: int
    """Those of them whose marks are being read."""
    restore_left: int
    """Offsets of the marks topic that are still to be read."""
    restore_total: int
    lag: int
    """Records of the assigned partitions that are not read yet."""
    index_bytes: int
