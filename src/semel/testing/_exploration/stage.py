"""One state on the stage: the simulated store, sink and referee are set to it, changed, and saved again."""

from collections.abc import Hashable
from typing import Any, NamedTuple

from msgspec.structs import replace

from semel.core import flows
from semel.core.commands import Scan
from semel.core.settlement import Task
from semel.testing._exploration.positions import Position, Program, plain
from semel.testing._exploration.scenes import BUDGETS, Bounds, ExploredScene
from semel.testing._simulation.handler import handler_of, play
from semel.testing._simulation.modes import Mode, task_for
from semel.testing._simulation.referee import WHOLE, Referee, SimAttempt, SimEvent
from semel.testing._simulation.store import Flaws, SimSink, SimStore
from semel.testing._simulation.world import START_US, Violation, World
from semel.types import Record

GONE = -1
"""The position of a worker that has ended or died."""
TOUCHED, LOST, STALLED, EFFECTED, OLD_COPY = 1, 2, 4, 8, 16
SELF = b"\xff" * 8 + bytes(8)
"""The owner in a flow's commands; the worker puts its own number into the first half."""

State = tuple[int, ...]
"""All that decides the future: two clocks, and the numbers of the parts below."""


class Seat(NamedTuple):
    """One delivery: its program, the position of its flow, what its process knows, and until when it holds a claim."""

    program: int
    position: int
    flags: int = 0
    deadline_us: int = 0


class LateSend(NamedTuple):
    """A request or effect under way, whose sender no longer waits for it. `item`: an item, or the part of an effect."""

    seat: int
    fence: int
    item: Any


class NumberedValues:
    """Equal values get equal numbers."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._numbers: dict[Hashable, int] = {}

    def number(self, value: Hashable) -> int:
        """Return the number of a value."""
        number = self._numbers.get(value)
        if number is None:
            number = self._numbers[value] = len(self.values)
            self.values.append(value)
        return number


class ExploredStage:
    """The parts of the simulation in one state. `load` sets them, `save` returns the state with workers in order."""

    def __init__(
        self,
        scene: ExploredScene,
        bounds: Bounds,
        *,
        mode: Mode,
        flaws: Flaws,
        harm_only: bool = False,
        symmetric: bool = True,
        trace: list[str] | None = None,
    ) -> None:
        self.scene, self.bounds, self.mode, self.flaws = scene, bounds, mode, flaws
        self.world = World(0, trace=trace)
        self.referee = Referee(self.world, harm_only=harm_only)
        self.store = SimStore(self.world, self.referee, flaws)
        self.sink = SimSink(self.world, mode.sink, flaws)
        self.positions: list[Position] = []
        self.events = [self._event(number) for number in range(scene.keys)]
        self.programs: list[Program] = []
        self.messages: list[SimEvent] = []
        """The event of each program; sweeps come last and belong to none."""
        for event in self.events:
            for fingerprint in scene.fingerprints:
                self._add_program(event, fingerprint)
        self.sweep = len(self.programs)
        if bounds.sweeps:
            self.programs.append(Program(self.sweep, self.positions, self._sweep))
        self.seats: list[Seat] = [
            Seat(number, self.programs[number].root.index)
            for worker in range(bounds.deliveries)
            for number in range(len(self.messages))
        ] + [Seat(self.sweep, self.programs[self.sweep].root.index) for _ in range(bounds.sweeps)]
        self.symmetric = (
            symmetric and not scene.together and not flaws.owner_per_process and not flaws.client_clock
        )
        """Whether workers have no names: states that differ only in who is who are one."""
        if self.symmetric:
            self.seats.sort()
        self.attempts = [
            SimAttempt(self.events[0], SELF, f"w{number + 1}", START_US)
            for number in range(len(self.seats) + 1)
        ]
        self.late: list[LateSend] = []
        self.left: dict[str, int] = {name: getattr(bounds, name) for name in BUDGETS}
        self.acked = [False] * len(self.messages)
        self.payloads: list[frozenset[int]] = [frozenset()] * scene.keys
        self._seats, self._late, self._cells, self._budgets = (
            NumberedValues(),
            NumberedValues(),
            NumberedValues(),
            NumberedValues(),
        )
        self._plain_order = list(range(len(self.seats)))
        self._owners = [
            (1 if flaws.owner_per_process else seat + 1).to_bytes(8, "big") + SELF[8:]
            for seat in range(len(self.seats) + 1)
        ]

    # --- programs ---

    def _event(self, number: int) -> SimEvent:
        record_id = ("", "explored", f"k{number + 1}")
        event = SimEvent(record_id, f"e{number + 1}", self.scene.kind, self.mode.parts)
        self.referee.events[record_id] = event
        return event

    def _add_program(self, event: SimEvent, fingerprint: bytes | None) -> None:
        self.messages.append(event)

        def begin() -> Any:
            attempt = SimAttempt(event, SELF, "self", START_US)
            task = self._task(event, fingerprint)
            flow = self.mode.flow(attempt, task, self.flaws)
            if self.mode.parts != WHOLE:
                return flow  # which plays its handler itself
            return play(flow, handler_of(event, in_transaction=self.mode.in_transaction))

        self.programs.append(Program(len(self.programs), self.positions, begin))

    def _sweep(self) -> Any:
        def task(record: Record) -> Task:
            return self._task(self.referee.events[record.id], None)

        return play(flows.sweep(Scan(orphaned=True, limit=1), task), handler_of(self.events[0]))

    def _task(self, event: SimEvent, fingerprint: bytes | None) -> Task:
        task = task_for(self.mode, event, SELF, self.scene.wait_s, self.flaws)
        return replace(task, claim=replace(task.claim, fingerprint=fingerprint)) if fingerprint else task

    # --- workers ---

    def position(self, seat: int) -> Position:
        """Return the position of a worker's flow."""
        return self.positions[self.seats[seat].position]

    def attempt(self, seat: int) -> SimAttempt:
        """Return a worker's attempt, with what its process knows."""
        place = self.seats[seat]
        attempt = self.attempts[seat]
        attempt.event = self.event_of(place.program)
        attempt.owner = self._owners[seat]
        attempt.lost, attempt.effected = bool(place.flags & LOST), bool(place.flags & EFFECTED)
        if place.position != GONE:
            at = self.positions[place.position]
            attempt.claim, attempt.granted, attempt.over = at.claim, at.granted, at.over
        return attempt

    def event_of(self, program: int) -> SimEvent:
        """Return the event that a program handles."""
        return self.messages[program] if program < len(self.messages) else self.events[0]

    def own(self, seat: int, item: Any) -> Any:
        """Return the item with the worker's own owner in it."""
        owner = getattr(item, "owner", b"")
        if len(owner) != len(SELF):
            return item
        return replace(item, owner=self._owners[seat][:8] + owner[8:])

    def touch(self, seat: int) -> None:
        """Note that a fault struck this attempt; once for each."""
        place = self.seats[seat]
        if not place.flags & TOUCHED:
            self.seats[seat] = place._replace(flags=place.flags | TOUCHED)
            self.event_of(place.program).touched += 1

    def advance(self, seat: int, answer: Any) -> None:
        """Send a flow its answer."""
        place = self.seats[seat]
        position = self.programs[place.program].after(self.positions[place.position], plain(answer))
        flags = place.flags & ~STALLED
        self.seats[seat] = place._replace(position=position.index, flags=flags)

    def end(self, seat: int) -> None:
        """Let a worker end or die: nothing of it is left, but its requests under way."""
        self.seats[seat] = Seat(self.seats[seat].program, GONE)

    def holders(self) -> list[int]:
        """Return the workers that hold a claim by all that they know."""
        return [seat for seat in range(len(self.seats)) if self.holds(seat)]

    def holds(self, seat: int) -> bool:
        """Whether a worker holds a claim by all that it knows, so that its keeper renews it."""
        place = self.seats[seat]
        if place.position == GONE or place.flags & LOST:
            return False
        at = self.positions[place.position]
        return at.granted is not None and not at.over and at.command is not None

    def violate(self, kind: str, text: str) -> None:
        """Report a broken promise."""
        raise Violation(kind, text)

    # --- states ---

    def save(self) -> tuple[State, list[int]]:
        """Return the state, and the order in which the workers stand in it: equal up to their names, equal states."""
        ledgers = [self.referee.save(event.id, self._number) for event in self.events]
        order = self._order(ledgers) if self.symmetric else self._plain_order
        seats, late, same = self.seats, self.late, order == self._plain_order
        renamed = order if same else [order.index(old) for old in self._plain_order]
        if not same:
            seats = [seats[old] for old in order]
            late = [each._replace(seat=renamed[each.seat]) for each in late]
        if len(late) > 1:
            late = sorted(late, key=repr)
        cells = [
            self._save_cell(event, ledger, renamed, same=same)
            for event, ledger in zip(self.events, ledgers, strict=True)
        ]
        state = (
            self.world.now,
            self.store.offset_us,
            self._seats.number(tuple(seats)),
            self._late.number(tuple(late)),
            self._cells.number((*cells, *self.payloads, *self.acked)),
            self._budgets.number(tuple(self.left.values())),
        )
        return state, order

    def _order(self, ledgers: list[tuple[Any, ...]]) -> list[int]:
        """Return the workers in their order: by their own state, then by what the rest of the state says of them."""
        seats = self.seats
        owners = [self.store.records[each.id].owner for each in self.events if each.id in self.store.records]
        holders = [ledger[0][0] for ledger in ledgers if ledger[0] is not None]

        def rank(seat: int) -> tuple[Any, ...]:
            mine = self._owners[seat][:8]
            own = [owner[:8] == mine for owner in owners]
            under_way = [repr(each[1:]) for each in self.late if each.seat == seat]
            return seats[seat], own, [holder == seat for holder in holders], under_way

        return sorted(self._plain_order, key=rank)

    def _number(self, attempt: SimAttempt) -> int:
        return self.attempts.index(attempt)

    def _save_cell(
        self, event: SimEvent, ledger: tuple[Any, ...], renamed: list[int], *, same: bool
    ) -> tuple[Any, ...]:
        record = self.store.records.get(event.id)
        if record is not None and record.errors:
            record = replace(record, errors=())  # nothing is decided by them
        if not same:
            held = ledger[0]
            if held is not None:
                ledger = ((renamed[held[0]], self._rename(held[1], renamed), *held[2:]), *ledger[1:])
            if record is not None and record.owner:
                record = replace(record, owner=self._rename(record.owner, renamed))
        return record, self.store.marks.get(event.id, 0), ledger, event.save(), self.sink.save(event.id)

    def _rename(self, owner: bytes, renamed: list[int]) -> bytes:
        if len(owner) != len(SELF):
            return owner
        return self._owners[renamed[owner[7] - 1]][:8] + owner[8:]

    def load(self, state: State) -> None:
        """Set everything to a state."""
        self.world.now, self.store.offset_us, seats, late, cells, budgets = state
        self.seats = list(self._seats.values[seats])
        self.late = list(self._late.values[late])
        saved = self._cells.values[cells]
        keys = len(self.events)
        self.payloads = list(saved[keys : 2 * keys])
        self.acked = list(saved[2 * keys :])
        self.left = dict(zip(BUDGETS, self._budgets.values[budgets], strict=True))
        records, marks = self.store.records, self.store.marks
        records.clear()
        marks.clear()
        for event, (record, mark, ledger, effects, sink) in zip(self.events, saved, strict=False):
            if record is not None:
                records[event.id] = record
            if mark:
                marks[event.id] = mark
            self.referee.restore(event.id, ledger, self.attempts)
            event.restore(effects)
            self.sink.restore(event.id, sink)
