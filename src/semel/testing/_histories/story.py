"""Shorten a history that nothing explains, and tell it so that a person can follow it."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from msgspec import Struct

from semel.core.commands import Claim, Forget, Granted, Known, Lookup, Renew, Resolve, Settle
from semel.testing._histories.order import OrderSearch
from semel.testing._histories.recording import HistoryCall
from semel.testing._histories.times import EMPTY, ModelState, Rules, possible_times
from semel.types import Absent, Busy, Completed, Forgotten, Id, Lost, Record, Renewed, Unknown

SHORTEN_STEPS_MAX = 5_000
"""Steps of one search while a history is shortened. If they are not enough, a call stays in it."""


class Unexplained(Struct):
    """A key whose answers no order of its calls explains."""

    id: Id
    calls: list[HistoryCall]
    """The shortest part of the history that was found, in the order in which the calls began."""
    begin: ModelState = EMPTY
    """What the store held before these calls; every order of the calls before leads to it."""
    left_out: int = 0
    """Calls of that time whose answers make no difference."""
    story: list[str] = []

    def __str__(self) -> str:
        return "\n".join(self.story)


def shorten(
    record_id: Id, calls: Sequence[HistoryCall], rules: Rules, *, repeats: int, skew_us: int
) -> Unexplained:
    """Return the shortest part of an unexplained history that nothing explains, with its story."""

    def is_explained(part: Sequence[HistoryCall], begin: ModelState = EMPTY, repeats: int = 0) -> bool:
        """Whether there is an order, or the search is too long to tell."""
        found = OrderSearch(
            part, rules, begin=begin, repeats=repeats, skew_us=skew_us, steps_max=SHORTEN_STEPS_MAX
        ).run()
        return found.explained or not found.complete

    ends = sorted(call.ended_ns for call in calls if call.answered)
    low, high = 0, len(ends) - 1  # the history up to the end at `high` is not explained
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if is_explained(until(calls, ends[middle])) else (low, middle)
    part = until(calls, ends[high])
    begin, part = _after_quiet_point(part, rules, is_explained, skew_us=skew_us)
    kept = list(part)
    for at, call in enumerate(part):
        weaker = [*kept[:at], call.without_answer(), *kept[at + 1 :]]
        if call.answered and not is_explained(weaker, begin):
            kept = weaker
    essential = [call for call in kept if call.answered]
    if is_explained(essential, begin, repeats):  # by requests that were sent again: then all calls are needed
        begin, kept, essential = EMPTY, list(calls), [call for call in calls if call.answered]
    found = Unexplained(record_id, essential, begin, len(kept) - len(essential))
    found.story = list(_tell(found, rules, skew_us=skew_us))
    return found


def until(calls: Sequence[HistoryCall], ended_ns: int) -> list[HistoryCall]:
    """Return the history as it was known at that time: what had not ended then has no answer."""
    return [
        call if call.ended_ns <= ended_ns else call.without_answer()
        for call in calls
        if call.begun_ns <= ended_ns
    ]


def _after_quiet_point(
    calls: list[HistoryCall], rules: Rules, is_explained: Callable[..., bool], *, skew_us: int
) -> tuple[ModelState, list[HistoryCall]]:
    """Return the calls after the last moment at which none was under way and the record was certain."""
    for at in range(len(calls) - 1, 0, -1):
        before, after = calls[:at], calls[at:]
        if max(call.ended_ns for call in before) >= after[0].begun_ns:
            continue
        ends = OrderSearch(before, rules, skew_us=skew_us, steps_max=SHORTEN_STEPS_MAX).ends()
        if ends is not None and len(ends) == 1:
            (begin,) = ends
            if not is_explained(after, begin):
                return begin, after
    return EMPTY, calls


# --- words ---


def _tell(found: Unexplained, rules: Rules, *, skew_us: int) -> Iterator[str]:
    calls = found.calls
    zero_ns = min(call.begun_ns for call in calls)
    zero_us = min(call.clock_us[0] for call in calls)
    yield f"No order of these calls explains the answers about key {found.id[2]!r}"
    yield f"of consumer {found.id[1]!r}. Times in milliseconds since the first of them."
    yield f"Before them: {_words(found.begin.record, zero_us) if found.begin.record else 'no record'}."
    who = max(len(call.worker) for call in calls)
    for number, call in enumerate(calls, 1):
        begun, ended = (call.begun_ns - zero_ns) / 1e6, (call.ended_ns - zero_ns) / 1e6
        yield (
            f"  {number}. {begun:9.3f} to {ended:9.3f}  {call.worker:{who}}  {_request(call.item)}"
            f" -> {_words(call.answer, zero_us)}"
        )
    search = OrderSearch(calls, rules, begin=found.begin, skew_us=skew_us, steps_max=SHORTEN_STEPS_MAX)
    result = search.run()
    if result.explained:  # the others are needed: each may have been carried out or not
        yield "With the other calls of that time it is so in every order."
    else:
        yield from _closest(search, result.order, zero_us)
    if found.left_out:
        yield f"{found.left_out} other calls of that time make no difference, carried out or not."


def _closest(search: OrderSearch, order: list[int], zero_us: int) -> Iterator[str]:
    state = search.begin
    for at in order:
        after = search.states_after(state, search.calls[at])
        if not after:
            return
        state = after[0]
    left = [at for at in range(len(search.calls)) if at not in order]
    names = ", ".join(str(at + 1) for at in order) or "none"
    yield f"The order that explains most: {names}. Then the machine answers:"
    for at in left:
        call = search.calls[at]
        low, high = call.clock_us
        times = possible_times(state.record, call, low - search.skew_us, high + search.skew_us) or [high]
        answers = {_words(search.rules(state.record, call.item, now_us)[0], zero_us) for now_us in times}
        yield f"  {at + 1}. with {' or '.join(sorted(answers))}, the store: {_words(call.answer, zero_us)}"


def _request(item: Any) -> str:
    match item:
        case Claim():
            mode = " in quarantine" if item.quarantine else ""
            return f"claim by {_owner(item.owner)} for {item.lease_us / 1e3:g} ms{mode}"
        case Renew():
            step = f", step {item.step[0]!r}" if item.step else ""
            return f"renew by {_owner(item.owner)} for {item.lease_us / 1e3:g} ms{step}"
        case Settle():
            return f"settle by {_owner(item.owner)} to {item.to} with {item.value!r}"
        case Resolve():
            return f"resolve to {item.to} with {item.value!r}"
        case Forget():
            return "forget, by force" if item.force else "forget"
        case Lookup():
            return "look up"
        case _:
            return repr(item)


def _owner(owner: bytes) -> str:
    return owner[-3:].hex() if owner else "nobody"


def _words(answer: Any, zero_us: int) -> str:
    def at(time_us: int) -> str:
        return f"{(time_us - zero_us) / 1e3:.3f}"

    match answer:
        case Granted():
            return f"granted: attempt {answer.attempt}, fence {at(answer.fence)}, until {at(answer.lease_until_us)}"
        case Known():
            return f"{answer.state} with {answer.value!r}, fence {at(answer.fence)}, at {at(answer.settled_at_us)}"
        case Busy():
            return f"busy for {answer.retry_after_s * 1e3:.3f} ms"
        case Renewed():
            return f"renewed until {at(answer.lease_until_us)}"
        case Completed():
            words = [name for name in ("already", "recreated") if getattr(answer, name)]
            words += [] if answer.kept else ["not kept"]
            return f"completed at {at(answer.at_us)}{''.join(f', {word}' for word in words)}"
        case Forgotten():
            return f"forgotten, fence {at(answer.fence)}"
        case Unknown():
            return f"unknown since {at(answer.since_us)}"
        case Lost() | Absent():
            return type(answer).__name__.lower()
        case Record():
            mine = f"{answer.state}, owner {_owner(answer.owner)}, attempt {answer.attempt}, fence {at(answer.fence)}"
            if answer.state == "claimed":
                return f"{mine}, until {at(answer.lease_until_us)}"
            return f"{mine}, value {answer.value!r}"
        case _:
            return repr(answer)
