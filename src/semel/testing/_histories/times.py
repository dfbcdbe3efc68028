"""When a call may have been carried out: what its answer says of the store's time, and what is left open.

A call takes effect between its begin and its end. Most answers contain the store's time to the microsecond; for the
others the machine's answer changes only where a lease or an expiry passes, so a few times stand for all. A call
without an answer may have written a record at a time that nobody knows: the record is then `loose`, and what later
answers say about its lease narrows the range.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from semel.core.commands import Claim, Forget, Granted, Known, RecordItem, Renew, Resolve, Settle
from semel.testing._histories.recording import HistoryCall
from semel.types import Busy, Completed, Forgotten, Late, Record, Renewed, Unknown

Rules = Callable[[Record | None, Any, int], tuple[Any, Record | None]]
"""As `semel.core.machine.decide`."""

_TIMES = ("fence", "lease_until_us", "expires_at_us", "first_seen_us", "settled_at_us")


class ModelState(Struct, frozen=True):
    """What the store may hold for a key at one point of an order."""

    record: Record | None = None
    loose: tuple[int, tuple[str, ...]] | None = None
    """The fields of the record that may be later than they say, all by the same time, and by how much at most."""


EMPTY = ModelState()


def move_times(record: Record, fields: tuple[str, ...], by_us: int) -> Record:
    """Return the record with these times moved."""
    if not by_us:
        return record
    return replace(record, **{name: getattr(record, name) + by_us for name in fields})


def times_in(calls: Iterable[HistoryCall]) -> tuple[int, ...]:
    """Return every time that the answers of a key speak of: the time of an unanswered call is one, or is never seen."""
    calls = list(calls)
    spans = {getattr(call.item, name, 0) for call in calls for name in ("lease_us", "delay_us")}
    found: set[int] = set()
    for call in calls:
        answer = call.answer
        if isinstance(answer, Granted | Known | Completed | Record | Forgotten):
            found.update(
                getattr(answer, name, 0) for name in ("fence", "first_seen_us", "settled_at_us", "at_us")
            )
        for ended_us in _lease_ends(answer):
            found.update(ended_us - span for span in spans)
    return tuple(sorted(found))


def _lease_ends(answer: Any) -> Iterator[int]:
    """Return the times in an answer that may be the end of a lease."""
    match answer:
        case Granted() | Renewed():
            yield answer.lease_until_us
        case Unknown():
            yield answer.since_us
        case Record():
            yield from (answer.lease_until_us, answer.settled_at_us)
            yield from (error.at_us for error in answer.errors)
        case _:
            pass


def breaks(record: Record | None) -> tuple[int, ...]:
    """Return the times at which the machine's answers about a record change."""
    return () if record is None else (record.lease_until_us, record.expires_at_us)


def exact_time(item: RecordItem, answer: Any) -> int | None:
    """Return the store's time when it gave this answer, if the answer alone tells it."""
    match item, answer:
        case ((Claim() | Renew()), (Granted() | Renewed())):
            return int(answer.lease_until_us - item.lease_us)
        case ((Settle() | Resolve()), Completed(already=False)):
            return int(answer.at_us)
        case Claim(event_time_us=int() as event_us), Late():
            return event_us + round(answer.age_s * 1e6)
        case _:
            return None


def possible_times(record: Record | None, call: HistoryCall, low: int, high: int) -> list[int]:
    """Return times that stand for all at which the machine could give this answer about this record."""
    exact = exact_time(call.item, call.answer)
    if exact is not None:
        return [exact] if low <= exact <= high else []
    found = {low, high, *breaks(record)}
    answer = call.answer
    if record is not None:
        if isinstance(answer, Busy):
            found.add(record.lease_until_us - round(answer.retry_after_s * 1e6))
        elif isinstance(answer, Known) and answer.rest_us:
            found.add(record.expires_at_us - answer.rest_us)
    if isinstance(answer, Forgotten) and isinstance(call.item, Forget | Resolve):
        found.add(answer.fence)
    return [time_us for time_us in sorted(found) if low <= time_us <= high]


def same_answer(answer: Any, expected: Any) -> bool:
    """Whether they agree. A cache may answer without the time that is left; a settled record needs no lease."""
    if isinstance(answer, Known) and isinstance(expected, Known) and not answer.rest_us:
        expected = replace(expected, rest_us=0)
    return bool(answer == expected or _plain(answer) == _plain(expected))


def _plain(answer: Any) -> Any:
    if isinstance(answer, Record) and answer.state != "claimed":
        return replace(answer, lease_until_us=0)
    return answer


# --- one call ---


def after_answer(state: ModelState, call: HistoryCall, rules: Rules, low: int, high: int) -> list[ModelState]:
    """Return the states after a call that the machine answers as the store did; none: it cannot have come here."""
    found: list[ModelState] = []
    for record, rest in _settled_times(state, call, low, high):
        for now_us in possible_times(record, call, low, high):
            expected, written = rules(record, call.item, now_us)
            if not same_answer(call.answer, expected):
                continue
            after = ModelState(record, rest) if written is None else ModelState(written)
            if written is None and rest is not None and record is not None:
                after = _narrow_times(record, rest, call, (low, high))
            if after not in found:
                found.append(after)
    return found


def _settled_times(
    state: ModelState, call: HistoryCall, low: int, high: int
) -> Iterator[tuple[Record | None, tuple[int, tuple[str, ...]] | None]]:
    """Return the record at each of its possible times that makes a difference, with what stays loose of it."""
    if state.loose is None or state.record is None:
        yield state.record, None
        return
    most, fields = state.loose
    record = state.record
    steps = {0, most}
    exact = exact_time(call.item, call.answer)
    for now_us in (low, high) if exact is None else (exact,):
        for name in ("lease_until_us", "expires_at_us"):
            if name in fields:
                at = now_us - getattr(record, name)
                steps |= {at, at + 1}
    if isinstance(call.answer, Busy) and "lease_until_us" in fields:
        rest_us = round(call.answer.retry_after_s * 1e6)
        steps |= {low + rest_us - record.lease_until_us, high + rest_us - record.lease_until_us}
    for step in sorted(steps):
        if 0 <= step <= most:
            yield move_times(record, fields, step), (most - step, fields)


def _narrow_times(
    record: Record, loose: tuple[int, tuple[str, ...]], call: HistoryCall, within: tuple[int, int]
) -> ModelState:
    """Return the record with the times that it may still have after this answer."""
    most, fields = loose
    _, high = within
    if isinstance(call.answer, Busy) and "lease_until_us" in fields:
        rest_us = round(call.answer.retry_after_s * 1e6)
        most = min(most, high + rest_us - record.lease_until_us)
    return ModelState(record, (most, fields) if most > 0 else None)


def after_no_answer(
    state: ModelState, call: HistoryCall, rules: Rules, times: tuple[int, ...], until_us: int
) -> list[ModelState]:
    """Return the states after an unanswered call that took effect. If it changed nothing, there is none."""
    begun_us = call.clock_us[0]
    found: list[ModelState] = []
    for record, _ in _choices(state):
        for now_us in times:
            if begun_us <= now_us <= until_us:
                _, written = rules(record, call.item, now_us)
                if written is not None and written != record:
                    _put(found, ModelState(written))
        edges = sorted({begun_us, *(each for each in breaks(record) if begun_us < each <= until_us)})
        for first_us, last_us in zip(edges, [*(edge - 1 for edge in edges[1:]), until_us], strict=True):
            _, written = rules(record, call.item, first_us)
            if written is None or written == record:
                continue
            _, later = rules(record, call.item, first_us + 1)
            fields = () if later is None else tuple(
                name for name in _TIMES if getattr(later, name) == getattr(written, name) + 1
            )  # fmt: skip
            most = last_us - first_us
            _put(found, ModelState(written, (most, fields) if fields and most > 0 else None))
    return found


def _choices(state: ModelState) -> Iterator[tuple[Record | None, None]]:
    if state.loose is None or state.record is None:
        yield state.record, None
        return
    most, fields = state.loose
    for step in (0, most):
        yield move_times(state.record, fields, step), None


def _put(found: list[ModelState], state: ModelState) -> None:
    if state not in found:
        found.append(state)
