"""Suggest a window from measured redelivery lags: how many duplicates each window catches, and its cost."""

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from math import ceil

from msgspec import Struct

from semel.core.ids import digest
from semel.errors import UsageError
from semel.observe.formatting import plural
from semel.observe.history import HistoryLine

__all__ = ["CANDIDATES_S", "SAFETY", "Advice", "Lags", "Share", "advise", "from_history", "from_metrics"]

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0
CANDIDATES_S = (
    MINUTE, 5 * MINUTE, 15 * MINUTE, HOUR, 4 * HOUR, 12 * HOUR, DAY, 2 * DAY, 4 * DAY, 7 * DAY, 14 * DAY, 30 * DAY,
)  # fmt: skip
"""Windows that are compared; the suggestion is one of them."""
SAFETY = 2.0
"""The factor between the lag to catch and the window: the next outage may be longer than the last."""
CATCH = 0.999
LAGS_MIN = 20
"""With fewer lags the tail is unknown."""
NEAR = 0.5
"""Duplicates later than this part of the window: later ones may exist, but were not visible."""
BYTES: dict[str, int] = {
    "sqlite": 130,
    "redis": 197,
    "postgresql": 285,
    "memory, packed marks": 24,
    "sqlite, marks": 33,
    "redis, compact marks": 10,
    "postgresql, marks": 103,
}
"""Bytes of a record without value and readable key, or of a mark, as measured by the benchmarks."""


class Lags(Struct, frozen=True):
    """How late duplicates came, in seconds, ascending."""

    seconds: tuple[float, ...]
    events: int = 0
    """The number of events besides the duplicates."""
    span_s: float = 0.0
    """The time that was measured."""
    missed: int = 0
    """Duplicates that ran again because the window was over."""
    censored: bool = True
    """Whether duplicates after the window were not visible."""
    observed: int = 0
    """Duplicates that ran because of mode observe; another mode would have stopped them."""


class Share(Struct, frozen=True):
    """The effect of one window."""

    window_s: float
    caught: float
    """The share of all measured duplicates that it catches."""
    records: int
    """The number of keys that it keeps at the measured rate."""
    bytes: dict[str, int]
    """Their size in bytes, by store."""


class Advice(Struct, frozen=True):
    """A window and its reasons."""

    lags: int
    suggested_s: float
    reason: str
    at_quantile_s: float
    """The quantile of the lags at `catch`."""
    catch: float
    safety: float
    shares: tuple[Share, ...]
    current_s: float | None = None
    current_caught: float | None = None
    per_day_bytes: dict[str, int] = {}
    """What the events of one day take, by store: a window without end adds this every day."""
    warnings: tuple[str, ...] = ()


def from_history(lines: Iterable[HistoryLine]) -> Lags:
    """Read lags from a history. An event that completed twice is a duplicate that came after the window."""
    seconds: list[float] = []
    first: dict[bytes, int] = {}
    observed: set[bytes] = set()
    began = ended = events = missed = would_stop = 0
    for line in lines:
        began, ended = began or line.at_us, max(ended, line.at_us)
        if line.event not in ("duplicate", "completed", "marked"):
            continue
        name = digest((line.tenant, line.consumer, line.key))
        if line.event == "duplicate":
            if line.lag_s is not None:
                seconds.append(line.lag_s)
            if line.ran:
                would_stop += 1
                observed.add(name)
        elif (
            name in observed
        ):  # its duplicate was counted already, and it ran because mode observe suppresses nothing
            observed.remove(name)
        else:
            events += 1
            if name in first:
                missed += 1
                seconds.append((line.at_us - first[name]) / 1e6)
            first[name] = line.at_us
    return Lags(
        tuple(sorted(seconds)),
        events - missed,
        (ended - began) / 1e6,
        missed,
        censored=False,
        observed=would_stop,
    )


_SAMPLE = re.compile(r"^(\w+?)(?:\{(.*)\})? (\S+)(?: \d+)?$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def from_metrics(text: str, consumer: str | None = None, prefix: str = "semel_") -> Lags:
    """Read lags from Prometheus metrics. Each counts as the upper end of its bucket, so it is rather too long."""
    buckets: dict[float, float] = {}
    events = observed = 0.0
    for name, labels, value in _SAMPLE.findall(text):
        told = dict(_LABEL.findall(labels))
        if consumer not in (None, told.get("consumer")):
            continue
        if name == f"{prefix}redelivery_lag_seconds_bucket":
            bound = float(told["le"])
            buckets[bound] = buckets.get(bound, 0.0) + float(value)
        elif name == f"{prefix}events_processed_total":
            events += float(value)
        elif name == f"{prefix}events_observed_duplicate_total":
            observed += float(value)
    seconds: list[float] = []
    below = 0
    last = 0.0
    for bound, count in sorted(buckets.items()):
        last = bound if bound != float("inf") else 2 * last
        seconds += [last] * (round(count) - below)
        below = round(count)
    return Lags(tuple(seconds), round(events - observed), observed=round(observed))


def advise(
    lags: Lags,
    *,
    current_s: float | None = None,
    catch: float = CATCH,
    safety: float = SAFETY,
    per_day: float | None = None,
    record_bytes: dict[str, int] | None = None,
) -> Advice:
    """Return `safety` times the shortest window that would have caught `catch` of the duplicates.

    `per_day`: new events; default as measured. Raises `UsageError` if there are too few lags.
    """
    if len(lags.seconds) < LAGS_MIN:
        raise UsageError(
            f"only {plural(len(lags.seconds), 'duplicate')} with a lag were seen, and {LAGS_MIN} are needed;"
            " measure for longer, and keep the window that you have"
        )
    if per_day is None:
        per_day = lags.events / lags.span_s * DAY if lags.span_s else 0.0
    quantile_s = _quantile(lags.seconds, catch)
    wanted_s = quantile_s * safety
    reason = f"{catch:.3%} of the duplicates came within {quantile_s:,.0f} s; {safety:g} times that is safe"
    warnings: list[str] = []
    if current_s and lags.censored and quantile_s > NEAR * current_s:
        wanted_s = max(wanted_s, 2 * current_s)
        reason = "duplicates come as late as the window lasts, so later ones were not seen: twice the window, for now"
    if lags.missed:
        warnings.append(f"{plural(lags.missed, 'duplicate')} came after the window and ran again")
    if len(lags.seconds) * (1 - catch) < 1:
        warnings.append(
            f"{plural(len(lags.seconds), 'lag is', 'lags are')} few for {catch:.3%}: the longest one counts, and a"
            " longer one may come"
        )
    suggested_s = next((each for each in CANDIDATES_S if each >= wanted_s), CANDIDATES_S[-1])
    if wanted_s > CANDIDATES_S[-1]:
        warnings.append("no window here is long enough: find out why events come so late")
    sizes = BYTES if record_bytes is None else {**BYTES, **record_bytes}
    return Advice(
        lags=len(lags.seconds),
        suggested_s=suggested_s,
        reason=reason,
        at_quantile_s=quantile_s,
        catch=catch,
        safety=safety,
        shares=tuple(_share(lags.seconds, window_s, per_day, sizes) for window_s in CANDIDATES_S),
        current_s=current_s,
        current_caught=None if current_s is None else _share_caught(lags.seconds, current_s),
        per_day_bytes={store: round(per_day * each) for store, each in sizes.items()},
        warnings=tuple(warnings),
    )


def _share_caught(seconds: Sequence[float], window_s: float) -> float:
    return bisect_right(seconds, window_s) / len(seconds)


def _quantile(seconds: Sequence[float], part: float) -> float:
    """Return the smallest lag with at least this share at or below it."""
    return seconds[min(len(seconds), max(1, ceil(len(seconds) * part))) - 1]


def _share(seconds: Sequence[float], window_s: float, per_day: float, sizes: dict[str, int]) -> Share:
    records = round(per_day * window_s / DAY)
    return Share(
        window_s,
        _share_caught(seconds, window_s),
        records,
        {store: records * each for store, each in sizes.items()},
    )
