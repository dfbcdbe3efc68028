"""The search: every state that the moves reach, breadth first, so that the first violation has the shortest story."""

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

from msgspec import Struct

from semel.testing._exploration.moves import Moves
from semel.testing._exploration.scenes import OPERATOR_MOVES, Bounds, ExploredScene, Move
from semel.testing._exploration.stage import GONE, ExploredStage, Seat, State
from semel.testing._simulation.modes import Mode, judge
from semel.testing._simulation.referee import MAX_ATTEMPTS, SimEvent
from semel.testing._simulation.store import Flaws
from semel.testing._simulation.world import LEASE_US, WINDOW_US, Violation

TRIES_MAX = MAX_ATTEMPTS + 4
"""Deliveries after the last fault; an event that needs more never ends."""
MOVES_MAX = 100
"""Moves of one delivery without faults."""


class Explored(Struct, kw_only=True):
    """The result of a search."""

    scene: str
    mutant: str = ""
    states: int = 0
    moves: int = 0
    """Moves made; each leads to a state, mostly to one that was seen before."""
    ends: int = 0
    """States in which nothing is under way, and which were judged."""
    depth: int = 0
    """Moves of the longest schedule."""
    complete: bool = True
    """Whether every schedule within the bounds was explored."""
    violation: Violation | None = None
    path: tuple[int, ...] = ()
    """The number of each move of the shortest schedule to the violation, among the moves of its state."""

    def __str__(self) -> str:
        return (
            f"{self.mutant or self.scene}: {self.states} states, {self.moves} moves, {self.ends} ends,"
            f" the longest schedule has {self.depth} moves; "
            + ("a promise is broken" if self.violation else "every promise holds")
            + ("" if self.complete or self.violation else ", as far as was explored")
        )


class Search:
    """A breadth-first search of one scene."""

    def __init__(
        self,
        scene: ExploredScene,
        bounds: Bounds,
        *,
        mode: Mode,
        flaws: Flaws,
        harm_only: bool = False,
        trace: list[str] | None = None,
    ) -> None:
        self._make_stage = partial(ExploredStage, scene, bounds, mode=mode, flaws=flaws, harm_only=harm_only)
        self.stage = self._make_stage(symmetric=trace is None, trace=trace)
        self.moves = Moves(self.stage)
        self._fresh = [event.save() for event in self.stage.events]
        self.result = Explored(scene=scene.name)
        self._judged: set[State] = set()
        """The clocks and records of the ends that were judged: workers and budgets are over there."""

    def run(self, states_max: int) -> Explored:
        """Explore until everything was seen, a promise is broken, or there are too many states."""
        stage, result = self.stage, self.result
        first, _ = stage.save()
        came: dict[State, tuple[State | None, int]] = {first: (None, -1)}
        level = deque([first])
        depth = 0
        while level:
            following: deque[State] = deque()
            for state in level:
                try:
                    for number, reached in self._follow(state):
                        result.moves += 1
                        if reached not in came:
                            came[reached] = (state, number)
                            following.append(reached)
                except Violation as violation:
                    result.violation = violation
                    result.path = self._path(came, first, state)
                    result.states, result.depth, result.ends = len(came), depth, len(self._judged)
                    return result
                if len(came) > states_max:
                    result.complete = False
                    result.states, result.depth, result.ends = len(came), depth, len(self._judged)
                    return result
            level = following
            depth += bool(level)
        result.states, result.depth, result.ends = len(came), depth, len(self._judged)
        return result

    def _follow(self, state: State) -> Iterator[tuple[int, State]]:
        """Make every move of a state; judge it first if nothing is under way."""
        stage = self.stage
        self._last: tuple[int, ...] = ()
        stage.load(state)
        found = self.moves.all()
        if self.is_quiet() and (end := (*state[:2], state[4])) not in self._judged:
            self._judged.add(end)
            self.finish()
            stage.load(state)
        for number, move in enumerate(found):
            if number:
                stage.load(state)
            self._last = (number,)
            self.moves.make(move)
            yield number, stage.save()[0]

    def _path(
        self, came: dict[State, tuple[State | None, int]], first: State, state: State
    ) -> tuple[int, ...]:
        """Return the moves to a violation, as numbers among the moves of workers that keep their names."""
        numbers = list(self._last)
        at: State | None = state
        while at is not None:
            at, number = came[at]
            numbers.append(number)
        stage, path = self.stage, []
        names, plain = list(range(len(stage.seats))), Moves(self._make_stage(symmetric=False))
        at = first
        for number in numbers[-2::-1]:
            stage.load(at)
            move = self._with_names(self.moves.all()[number], names, plain.stage)
            path.append(plain.all().index(move))
            with suppress(Violation):
                plain.make(move)
                self._settle(plain.stage)
            stage.load(at)
            with suppress(Violation):
                self.moves.make(self.moves.all()[number])
                at, order = stage.save()
                names = [names[old] for old in order]
        return tuple(path)

    def _with_names(self, move: Move, names: list[int], plain: ExploredStage) -> Move:
        """Return the move for workers that keep their names."""
        if move.kind in OPERATOR_MOVES:
            return move
        if move.kind == "arrive":
            late = self.stage.late[move.seat]
            return Move("arrive", plain.late.index(late._replace(seat=names[late.seat])))
        seat = names[move.seat] if move.seat >= 0 else -1
        return Move(move.kind, seat, tuple(sorted(names[other] for other in move.others)))

    @staticmethod
    def _settle(stage: ExploredStage) -> None:
        stage.load(stage.save()[0])

    # --- the end of a schedule ---

    def is_quiet(self) -> bool:
        """Whether every worker has ended, died or not yet begun."""
        stage = self.stage
        return all(
            place.position in (GONE, stage.programs[place.program].root.index) for place in stage.seats
        )

    def finish(self) -> None:
        """Let the faults end: deliver until all is acknowledged, and judge. Then windows end, and new events come."""
        stage = self.stage
        workers = len(stage.seats)
        kept, stage.late, stage.seats = stage.seats, [], [Seat(place.program, GONE) for place in stage.seats]
        stage.left = dict.fromkeys(stage.left, 0)
        if stage.world.trace is not None:
            stage.world.note("the faults are over; what is not acknowledged is delivered again")
        self._deliver_rest(workers)
        if stage.mode.quarantine:
            stage.world.now += 2 * LEASE_US
            for program, event in enumerate(stage.messages):
                # What was acknowledged as unknown has a dead letter: the operator sends it again if it is not done.
                if stage.store.resolve(event) or (event.unknown and not event.completed):
                    stage.acked[program] = False
            self._deliver_rest(workers)
        for event in stage.events:
            judge(stage.mode, event)
        self._let_windows_end(workers)
        stage.seats = kept

    def _deliver_rest(self, workers: int) -> None:
        stage = self.stage
        for _ in range(TRIES_MAX):
            waiting = list(self._find_unfinished())
            if not waiting:
                return
            stage.world.now += 2 * LEASE_US
            for program in waiting:
                self._deliver(program, workers)
        if left := list(self._find_unfinished()):
            names = ", ".join(stage.event_of(program).payload for program in left)
            raise Violation("unfinished", f"{names}: still not done {TRIES_MAX} deliveries after the faults")

    def _find_unfinished(self) -> Iterator[int]:
        stage = self.stage
        if stage.mode.journal:
            if any(event.grants and not event.completed for event in stage.events):
                yield stage.sweep
            return
        for program, acked in enumerate(stage.acked):
            if not acked:
                yield program

    def _deliver(self, program: int, workers: int) -> None:
        stage = self.stage
        del stage.seats[workers:]
        stage.seats.append(Seat(program, stage.programs[program].root.index))
        for _ in range(MOVES_MAX):
            if stage.seats[workers].position == GONE:
                return
            self.moves.make(self.moves.of(workers)[0])
        raise Violation("endless", f"a delivery without faults takes more than {MOVES_MAX} moves")

    def _let_windows_end(self, workers: int) -> None:
        stage = self.stage
        stage.world.now += 2 * WINDOW_US
        stage.sink.forget()
        if stage.world.trace is not None:
            stage.world.note("the windows are over; the same keys come as new events")
        kinds = [event.kind for event in stage.events]
        try:
            for number, event in enumerate(stage.events):
                event.restore(self._fresh[number])
                event.kind = "fine"
                stage.payloads[number] = frozenset()
                program = stage.messages.index(event)
                stage.acked[program] = False
                self._deliver(program, workers)
                self._judge_again(event, acked=stage.acked[program])
        finally:
            for event, kind in zip(stage.events, kinds, strict=True):
                event.kind = kind

    def _judge_again(self, event: SimEvent, *, acked: bool) -> None:
        if not (acked or self.stage.mode.journal):
            raise Violation(
                "unfinished", f"{event.payload}: a new event after the window was not done at once"
            )
        judge(self.stage.mode, event)

    # --- stories ---

    def tell(self, path: tuple[int, ...]) -> None:
        """Play a schedule once more, for the trace of this search. Raises its `Violation`."""
        for number in path:
            found = self.moves.all()
            if number >= len(found):
                raise ValueError(f"there is no move {number} here, only {len(found)} moves")
            self.moves.make(found[number])
            self._settle(self.stage)
        if self.is_quiet():
            self.finish()
