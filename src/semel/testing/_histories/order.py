"""Find an order of the calls of one key in which the machine gives every answer that the store gave.

The search is that of Wing and Gong: at each point any call may come next that began before the first of the
others ended. Points that were reached before with the same record are not searched again, and a call that fits
and changes nothing comes at once: no other order gains by delaying it.
"""

from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct

from semel.core.commands import Lookup
from semel.core.machine import decide
from semel.testing._histories.recording import NEVER_NS, HistoryCall
from semel.testing._histories.times import EMPTY, ModelState, Rules, after_answer, after_no_answer, times_in

STEPS_MAX = 400_000
"""Steps of one search; usual ones take some hundred."""
QUICK_STEPS_MAX = 2_000
"""Steps of the first search, in which no request is repeated."""
SKEW_US = 5_000
"""How far the store's clock may be from that of the workers, on one computer."""


class OrderFound(Struct):
    """The end of a search."""

    order: list[int]
    """The calls in an order that explains them; without one, the order that explains most."""
    steps: int
    explained: bool = False
    complete: bool = True
    """False: the search was given up, so that nothing is known."""


class _Point(Struct):
    """A point of the search: what has been placed, the record then, and what may come next."""

    placed: int
    state: ModelState
    moves: Iterator[tuple[int, int, ModelState]]
    repeats: int


class OrderSearch:
    """The search for one key. `repeats`: how many requests may have been carried out twice, unseen."""

    def __init__(
        self,
        calls: Sequence[HistoryCall],
        rules: Rules = decide,
        *,
        begin: ModelState = EMPTY,
        repeats: int = 0,
        skew_us: int = SKEW_US,
        steps_max: int = STEPS_MAX,
    ) -> None:
        self.calls = sorted(calls, key=lambda call: (call.begun_ns, call.ended_ns))
        self.rules = rules
        self.begin = begin
        self.repeats = repeats
        self.skew_us = skew_us
        self.steps_max = steps_max
        self.steps = 0
        self.times = times_in(self.calls)
        self.until_us = max((max(call.clock_us) for call in self.calls), default=0) + skew_us
        self.answered = sum(1 << at for at, call in enumerate(self.calls) if call.answered)
        self.best: list[int] = []

    def ends(self) -> set[ModelState] | None:
        """Return every record that there may be after the calls; `None`: there are too many orders to tell."""
        found: set[ModelState] = set()
        result = self.run(found.add)
        return found if result.complete else None

    def run(self, on_end: Callable[[ModelState], None] | None = None) -> OrderFound:
        """Search. The result says whether there is an order. With `on_end` it goes on, and reports every end."""
        seen: set[tuple[int, ModelState]] = set()
        order: list[int] = []
        stack = [self._point(0, self.begin, self.repeats)]
        while stack:
            point = stack[-1]
            if point.placed & self.answered == self.answered:
                if on_end is None:
                    return OrderFound(order, self.steps, explained=True)
                on_end(point.state)
            step = next(point.moves, None)
            if step is None:
                stack.pop()
                if order:
                    order.pop()
                continue
            self.steps += 1
            if self.steps > self.steps_max:
                return OrderFound(self.best, self.steps, complete=False)
            at, repeats, state = step
            placed = point.placed if repeats < point.repeats else point.placed | 1 << at
            if (placed | repeats << len(self.calls), state) in seen:
                continue
            seen.add((placed | repeats << len(self.calls), state))
            order.append(at)
            if len(order) > len(self.best):
                self.best = list(order)
            stack.append(self._point(placed, state, repeats))
        return OrderFound(self.best, self.steps)

    def _point(self, placed: int, state: ModelState, repeats: int) -> _Point:
        return _Point(placed, state, self._moves(placed, state, repeats), repeats)

    def _moves(self, placed: int, state: ModelState, repeats: int) -> Iterator[tuple[int, int, ModelState]]:
        """Yield the calls that may come next, each with the record after it."""
        ready = [(at, self.calls[at]) for at in self._ready(placed)]
        fitting: list[tuple[int, list[ModelState]]] = []
        for at, call in ready:
            if call.answered:
                after = self.states_after(state, call)
                if after == [state]:
                    yield at, repeats, state
                    return
                fitting.append((at, after))
        fitting.sort(key=lambda each: self.calls[each[0]].ended_ns)
        for at, states in fitting:
            yield from ((at, repeats, after_it) for after_it in states)
        hidden = self._unseen_calls(ready, state, repeats)
        if any(states for _, states in fitting):
            yield from hidden
            return
        later = []
        for move in hidden:  # first what makes an answer fit that does not
            if any(self.states_after(move[2], call) for _, call in ready if call.answered):
                yield move
            else:
                later.append(move)
        yield from later

    def _unseen_calls(
        self, ready: list[tuple[int, HistoryCall]], state: ModelState, repeats: int
    ) -> Iterator[tuple[int, int, ModelState]]:
        """Yield what may have happened unseen: calls without an answer, and requests that were sent again."""
        for at, call in ready:
            if not call.answered:
                if call.ended_ns < NEVER_NS:
                    yield at, repeats, state  # it may have changed nothing
                yield from ((at, repeats, after_it) for after_it in self._states_after_unseen(state, call))
        again = [each for each in ready if each[1].answered and not isinstance(each[1].item, Lookup)]
        for at, call in sorted(again, key=lambda each: each[1].ended_ns) if repeats else ():
            yield from ((at, repeats - 1, after_it) for after_it in self._states_after_unseen(state, call))

    def _ready(self, placed: int) -> list[int]:
        """Return the calls that may come next: none of the others ended before they began."""
        open_calls = [at for at in range(len(self.calls)) if not placed >> at & 1]
        first_end_ns = min((self.calls[at].ended_ns for at in open_calls), default=0)
        return [at for at in open_calls if self.calls[at].begun_ns <= first_end_ns]

    def states_after(self, state: ModelState, call: HistoryCall) -> list[ModelState]:
        """Return the states after an answered call; none: it cannot come here."""
        low, high = call.clock_us
        return after_answer(state, call, self.rules, low - self.skew_us, high + self.skew_us)

    def _states_after_unseen(self, state: ModelState, call: HistoryCall) -> list[ModelState]:
        until_us = (
            self.until_us if call.answered or call.ended_ns == NEVER_NS else call.clock_us[1] + self.skew_us
        )
        return after_no_answer(state, call, self.rules, self.times, until_us)


def find_order(
    calls: Sequence[HistoryCall],
    rules: Rules = decide,
    *,
    repeats_max: int = 0,
    skew_us: int = SKEW_US,
    steps_max: int = STEPS_MAX,
) -> OrderFound:
    """Search with no repeated request first, for a short time, then with so many.

    `repeats_max`: how many requests the store may have sent again by itself, so that they were carried out twice.
    """
    quick = min(QUICK_STEPS_MAX, steps_max) if repeats_max else steps_max
    found = OrderSearch(calls, rules, skew_us=skew_us, steps_max=quick).run()
    if found.explained or not repeats_max:
        return found
    return OrderSearch(calls, rules, repeats=repeats_max, skew_us=skew_us, steps_max=steps_max).run()
