"""Find the duplicates in a relation of events. Memory holds groups of repeated keys only, one at a time.

Keys are grouped by a 64-bit hash first; the rows of repeated hashes are then compared by the keys themselves, so a
collision costs a little work and changes no count.
"""

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

from msgspec import Struct

from semel.cli.audit.reading import EventColumns

__all__ = ["BINS_S", "Audit", "Measure", "measure"]

BINS_S = (1, 10, 60, 300, 900, 3600, 4 * 3600, 12 * 3600, 86400, 2 * 86400, 7 * 86400, 30 * 86400)
"""The upper bounds of the bars, in seconds; one more is for the rest. Each is also a window to try."""
FETCH = 50_000
LAGS_MAX = 5_000_000
"""The most lags kept for the picture; beyond it every second one is dropped, again and again."""


class Measure(Struct, frozen=True):
    """What to look for."""

    key: str
    time: str
    content: tuple[str, ...] = ()
    content_window_us: int = 0
    source: str | None = None
    body: tuple[str, ...] = ()
    """The columns that make the body; empty: all but key, time and source."""


class Audit(Struct):
    """What was found."""

    rows: int = 0
    keys: int = 0
    surplus: int = 0
    """Rows that are not the first of their key."""
    repeated_keys: int = 0
    without_key: int = 0
    without_time: int = 0
    """Surplus rows of keys with a row without a time: they have no lag."""
    changed_keys: int = 0
    """Keys whose rows differ in their body."""
    changed_rows: int = 0
    """Surplus rows whose body is not that of the first row."""
    content_duplicates: int = 0
    """Rows with another key, but with equal content within the window."""
    content_groups: int = 0
    bins: list[int] = []
    caught: dict[int, int] = {}
    """By window in seconds: how many surplus rows it would have stopped."""
    sources: dict[str, tuple[int, int]] = {}
    """By source: rows, and surplus rows."""
    lags: Any = None
    """Seconds, ascending; thinned if there are very many."""
    span_s: float = 0.0

    @property
    def found(self) -> bool:
        """Whether there are any duplicates."""
        return bool(self.surplus or self.content_duplicates)


def measure(
    run: Callable[[str, str], Any],
    columns: EventColumns,
    wanted: Measure,
    on_lag: Callable[[str, int, float], object],
) -> Audit:
    """Measure. `run(what, statement)` executes a statement; `on_lag(key, time_us, lag_s)` is called for each lag."""
    key, when = columns.name(wanted.key), columns.time_us(wanted.time)
    source = columns.name(wanted.source) if wanted.source else "filename"
    used = {wanted.key, wanted.time, wanted.source, "filename"}
    body = [
        columns.name(each) for each in wanted.body or [name for name in columns.types if name not in used]
    ]
    content = [columns.name(each) for each in wanted.content]
    run("reading", "DROP TABLE IF EXISTS hashes")
    run(
        "reading",
        f"CREATE TABLE hashes AS SELECT hash({key}::VARCHAR) AS h FROM {columns.relation}"  # noqa: S608
        f" WHERE {key} IS NOT NULL GROUP BY h HAVING count(*) > 1",
    )
    found = Audit(bins=[0] * (len(BINS_S) + 1), caught=dict.fromkeys(BINS_S, 0), lags=array("d"))
    totals = run(
        "counting",
        f"SELECT {source}::VARCHAR, count(*), count(*) FILTER (WHERE {key} IS NULL),"  # noqa: S608
        f" min({when}), max({when}) FROM {columns.relation} GROUP BY 1",
    ).fetchall()
    rows_by_source = {str(each[0]): each[1] for each in totals}
    found.rows = sum(each[1] for each in totals)
    found.without_key = sum(each[2] for each in totals)
    begins, ends = (
        [each[3] for each in totals if each[3] is not None],
        [each[4] for each in totals if each[4] is not None],
    )
    found.span_s = (max(ends) - min(begins)) / 1e6 if begins else 0.0
    hashed = f"hash({', '.join(f'{name}::VARCHAR' for name in body)})" if body else "0"
    repeated = run(
        "sorting",
        f"SELECT {key}::VARCHAR AS k, {when} AS t, {source}::VARCHAR AS s, {hashed} AS b"  # noqa: S608
        f" FROM {columns.relation} WHERE {key} IS NOT NULL AND hash({key}::VARCHAR) IN (SELECT h FROM hashes)"
        " ORDER BY k, t NULLS LAST",
    )
    surplus_by_source: Counter[str] = Counter()
    for name, group in groupby(_rows(repeated), key=lambda row: row[0]):
        _add_key(found, name, group, surplus_by_source, on_lag)
    found.keys = found.rows - found.without_key - found.surplus
    found.sources = {name: (rows, surplus_by_source[name]) for name, rows in sorted(rows_by_source.items())}
    if content:
        _find_content(run, columns, content, key, when, wanted.content_window_us, found)
    found.lags = array("d", sorted(found.lags))
    return found


def _rows(result: Any) -> Iterator[tuple[Any, ...]]:
    while some := result.fetchmany(FETCH):
        yield from some


def _add_key(
    found: Audit,
    key: str,
    rows: Iterator[Any],
    by_source: Counter[str],
    on_lag: Callable[[str, int, float], object],
) -> None:
    """Count the rows of one key, in the order of their times. A single row only shares its hash with another key."""
    _, first_us, _, body = next(rows)
    ran_us = dict.fromkeys(BINS_S, first_us)
    before, changed = found.surplus, found.changed_rows
    for _, at_us, source, other in rows:
        found.surplus += 1
        found.changed_rows += other != body
        by_source[str(source)] += 1
        if at_us is None or first_us is None:
            found.without_time += 1
            continue
        lag_s = (at_us - first_us) / 1e6
        found.bins[bisect_left(BINS_S, lag_s)] += 1
        _keep(found, lag_s)
        on_lag(key, at_us, lag_s)
        for window_s in BINS_S:
            if at_us - ran_us[window_s] < window_s * 10**6:
                found.caught[window_s] += 1
            else:  # the window is over, so it runs again, and is remembered from here
                ran_us[window_s] = at_us
    found.repeated_keys += found.surplus > before
    found.changed_keys += found.changed_rows > changed


def _keep(found: Audit, lag_s: float) -> None:
    found.lags.append(lag_s)
    if len(found.lags) > LAGS_MAX:
        found.lags = found.lags[::2]


def _find_content(
    run: Callable[[str, str], Any],
    columns: EventColumns,
    content: list[str],
    key: str,
    when: str,
    window_us: int,
    found: Audit,
) -> None:
    """Count rows with another key and the content of an earlier row within the window, as `keys.sliding` does."""
    hashed = f"hash({', '.join(f'{name}::VARCHAR' for name in content)})"
    run("content", "DROP TABLE IF EXISTS contents")
    run(
        "content",
        f"CREATE TABLE contents AS SELECT {hashed} AS h FROM {columns.relation} GROUP BY h HAVING"  # noqa: S608
        " count(*) > 1",
    )
    names = ", ".join(f"{name}::VARCHAR" for name in content)
    places = ", ".join(str(place + 1) for place in range(len(content)))
    rows = run(
        "content",
        f"SELECT {names}, {key}::VARCHAR, {when} AS t FROM {columns.relation}"  # noqa: S608
        f" WHERE {hashed} IN (SELECT h FROM contents) AND {when} IS NOT NULL ORDER BY {places}, t",
    )
    for _, group in groupby(_rows(rows), key=lambda row: row[: len(content)]):
        anchor_us, seen, before = None, set[str](), found.content_duplicates
        for *_, name, at_us in group:
            if anchor_us is None or at_us - anchor_us >= window_us:
                anchor_us, seen = at_us, {name}
            elif name not in seen:  # the same key again is a duplicate by its key
                found.content_duplicates += 1
                seen.add(name)
        found.content_groups += found.content_duplicates > before
