"""Marks in three tables, a small, a middle and a large one, so that a batch of random digests writes few pages.

In one B-tree a batch of 500 random digests writes up to 500 pages. Here it writes the pages of the small table. When
that is full, its rows move into the middle table, and from there, one range of digests at a time, into the large one:
a page of the large table is then written for many rows. All moves are in the transaction that marks, so a crash
undoes them with it, and other processes see whole moves only.
"""

import sqlite3
from collections.abc import Sequence
from functools import lru_cache

from semel.stores.sqlite import encoding

__all__ = ["LEVELS", "expiry_of", "forget", "mark", "purge", "refresh"]

LEVELS = ("semel_marks_0", "semel_marks_1", "semel_marks_2")
SMALL_MAX = 4096
"""Rows of the small table: about 30 pages, all of which a batch writes."""
MIDDLE_MAX = 65_536
"""Rows of the middle table. The pages written for a mark are least if it is the geometric mean of the other two: that
is so for a million marks in the large table."""
RANGES = 64
"""Rows move from the middle to the large table by this part of all digests at a time: about 1,000 rows."""
EXAMINED_PER_REMOVED = 4
"""How many rows a purge reads for each that it may remove, so that the cost of one call is bounded."""

_STEP = 0x10000 // RANGES
_MIDDLE = "marks_middle"
"""The name in `semel_meta` of the middle table's rows and the next range to move, as `rows * RANGES + range`."""
_CURSOR = "marks_purge"
_UNKNOWN = -1


class MarkCounts:
    """How many rows the small table has, for one connection; unknown after another connection wrote to the file."""

    def __init__(self) -> None:
        self.small: int = _UNKNOWN

    def forget(self) -> None:
        """Count again before the next mark."""
        self.small = _UNKNOWN


@lru_cache(maxsize=encoding.BATCH_ROWS_MAX)
def _insert(count: int) -> str:
    """Return the statement that marks `count` digests and returns the new ones.

    ?1 consumer, ?2 expiry, ?3 now; the digests from ?4 on.
    """
    rows = ",".join(f"(?{number},?1,?2)" for number in range(4, 4 + count))
    return (
        f"INSERT INTO semel_marks_0 (digest, consumer_id, expires_at) VALUES {rows}"
        " ON CONFLICT (digest) DO UPDATE SET expires_at = excluded.expires_at"
        " WHERE semel_marks_0.expires_at <= ?3 RETURNING digest"
    )


@lru_cache(maxsize=encoding.BATCH_ROWS_MAX)
def _select_live(count: int) -> str:
    """Return the statement that finds `count` digests in the lower tables. ?1 now; the digests from ?2 on."""
    asked = ",".join(f"?{number}" for number in range(2, 2 + count))
    return " UNION ALL ".join(
        f"SELECT digest FROM {level} WHERE digest IN ({asked}) AND expires_at > ?1" for level in LEVELS[1:]
    )


def mark(
    connection: sqlite3.Connection,
    counts: MarkCounts,
    digests: Sequence[bytes],
    consumer_id: int,
    now: int,
    expires_at: int,
) -> list[bool]:
    """Mark the digests, inside the caller's transaction; returns for each whether it was new."""
    firsts: list[bool] = []
    for some in encoding.chunks(digests):
        sent = encoding.pad_digests(some)
        live = {row[0] for row in connection.execute(_select_live(len(sent)), (now, *sent))}
        wanted = [key for key in some if key not in live] if live else some
        if not wanted:
            firsts += [False] * len(some)
            continue
        sent = encoding.pad_digests(wanted)
        new = connection.execute(_insert(len(sent)), (consumer_id, expires_at, now, *sent)).fetchall()
        if len(new) == len(some):
            firsts += [True] * len(some)
        else:
            fresh = {row[0] for row in new}
            firsts += [key in fresh for key in some]
        if new:
            _make_room(connection, counts, len(new), now)
    return firsts


def refresh(connection: sqlite3.Connection, digests: Sequence[bytes], now: int, expires_at: int) -> bool:
    """Let live marks expire then, unless they would later. They stay in their tables. Returns whether one changed."""
    changed = 0
    for some in encoding.chunks(digests):
        sent = encoding.pad_digests(some)
        for level in LEVELS:
            changed += connection.execute(_refresh(level, len(sent)), (now, expires_at, *sent)).rowcount
    return changed > 0


@lru_cache(maxsize=encoding.BATCH_ROWS_MAX)
def _refresh(level: str, count: int) -> str:
    """Return the statement for `count` digests of one table. ?1 now, ?2 the new expiry; the digests from ?3 on."""
    asked = ",".join(f"?{number}" for number in range(3, 3 + count))
    return f"UPDATE {level} SET expires_at = ?2 WHERE digest IN ({asked}) AND expires_at > ?1 AND expires_at < ?2"


def _make_room(connection: sqlite3.Connection, counts: MarkCounts, added: int, now: int) -> None:
    """Empty the small table if it is full, and move one range of the middle one if that is."""
    if counts.small == _UNKNOWN:
        (counts.small,) = connection.execute("SELECT count(*) FROM semel_marks_0").fetchone()
    else:
        counts.small += added
    stored = connection.execute("SELECT value FROM semel_meta WHERE name = ?", (_MIDDLE,)).fetchone()
    rows, place = divmod(stored[0], RANGES) if stored is not None else (0, 0)
    if counts.small < SMALL_MAX and rows <= MIDDLE_MAX:
        return
    if counts.small >= SMALL_MAX:
        moved = connection.execute(
            "INSERT OR REPLACE INTO semel_marks_1 SELECT * FROM semel_marks_0 WHERE expires_at > ?", (now,)
        )
        rows += moved.rowcount
        connection.execute("DELETE FROM semel_marks_0")
        counts.small = 0
    if rows > MIDDLE_MAX:
        rows -= _move_down(connection, place, now)
        place = (place + 1) % RANGES
        if not place:  # a row that replaced another was counted twice, and others may have been removed
            (rows,) = connection.execute("SELECT count(*) FROM semel_marks_1").fetchone()
    connection.execute("INSERT OR REPLACE INTO semel_meta VALUES (?, ?)", (_MIDDLE, rows * RANGES + place))


def _move_down(connection: sqlite3.Connection, place: int, now: int) -> int:
    """Move a range of digests into the large table, without expired rows; returns how many left the middle table."""
    bounds = [(place * _STEP).to_bytes(2)]
    within = "digest >= ?"
    if place < RANGES - 1:
        bounds.append(((place + 1) * _STEP).to_bytes(2))
        within += " AND digest < ?"
    connection.execute(
        f"INSERT OR REPLACE INTO semel_marks_2 SELECT * FROM semel_marks_1 WHERE {within} AND expires_at > ?",
        (*bounds, now),
    )
    return connection.execute(f"DELETE FROM semel_marks_1 WHERE {within}", bounds).rowcount


def expiry_of(connection: sqlite3.Connection, digest: bytes) -> int | None:
    """Return when the mark of a digest expires, perhaps earlier than now; `None`: there is no mark."""
    expires_at: int | None
    (expires_at,) = connection.execute(
        "SELECT max(expires_at) FROM semel_marks WHERE digest = ?", (digest,)
    ).fetchone()
    return expires_at


def forget(connection: sqlite3.Connection, digest: bytes) -> None:
    """Remove the mark of a digest from all tables."""
    for level in LEVELS:
        connection.execute(f"DELETE FROM {level} WHERE digest = ?", (digest,))


def purge(connection: sqlite3.Connection, limit: int, at: int) -> tuple[int, bool, bool]:
    """Remove expired marks, from where the last purge stopped: table by table, in the order of their digests.

    Returns the number removed, whether there are more, and whether the cursor was written.
    """
    if limit <= 0:
        return 0, True, False
    stored = connection.execute("SELECT value FROM semel_meta WHERE name = ?", (_CURSOR,)).fetchone()
    level, after = (stored[0][0], stored[0][1:]) if stored is not None else (0, b"")
    removed, unread = 0, limit * EXAMINED_PER_REMOVED
    while level < len(LEVELS):
        rows = connection.execute(
            f"SELECT digest, expires_at FROM {LEVELS[level]} WHERE digest > ? ORDER BY digest LIMIT ?",
            (after, unread),
        ).fetchall()
        gone = [digest for digest, expires_at in rows if expires_at <= at]
        taken = gone[: limit - removed]
        for digests in encoding.chunks(taken):
            connection.execute(
                f"DELETE FROM {LEVELS[level]} WHERE digest IN ({encoding.places(len(digests))})", digests
            )
        removed += len(taken)
        unread -= len(rows)
        if len(gone) > len(taken) or not unread:
            reached = (taken[-1] if taken else after) if len(gone) > len(taken) else rows[-1][0]
            connection.execute(
                "INSERT OR REPLACE INTO semel_meta VALUES (?, ?)", (_CURSOR, bytes((level,)) + reached)
            )
            return removed, True, True
        level, after = level + 1, b""
    if stored is not None:
        connection.execute("DELETE FROM semel_meta WHERE name = ?", (_CURSOR,))
    return removed, False, stored is not None
