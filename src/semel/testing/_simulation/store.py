"""A store behind a bad network: the real `machine.decide` on a dict, a clock that steps, requests that stray."""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from semel.core.commands import Claim, Command, Lookup, Mark, Marked, Page, Renew, Resolve, Scan, Settle
from semel.core.ids import idempotency_key
from semel.core.machine import decide, standing
from semel.errors import StoreUnavailable
from semel.testing._simulation.referee import Referee, SimAttempt, SimEvent
from semel.testing._simulation.world import (
    CRASH_AFTER,
    FAIR,
    LATE_REPLY,
    LATE_REQUEST,
    LEASE_US,
    LOST_REPLY,
    LOST_REQUEST,
    WINDOW_US,
    Process,
    Violation,
    World,
)
from semel.types import Completed, DidNotHappen, Forgotten, Happened, Id, Record, Unavailable

LATENCY_US = (500, 4_000)
PATIENCE_US = LEASE_US // 5
"""How long a client waits for an answer before it tries again."""
NO_ANSWER = Unavailable(StoreUnavailable("no answer"))


class SimSeen(Command[bool | Unavailable], frozen=True):
    """Whether a key is marked, as a transaction sees it that has just begun."""

    id: Id


class Commit(Command[bool | Unavailable], frozen=True):
    """Commit a transaction that holds both the mark of a key and its effect."""

    id: Id
    holder: Any


class Flaws(Struct, frozen=True, kw_only=True):
    """Where a store, runner or sink departs from the rules; the defaults are sound."""

    decide: Callable[[Record | None, Any, int], tuple[Any, Record | None]] = decide
    spared_by_purge: Callable[[Record, int], bool] = lambda record, now: standing(record, now) is not None
    client_clock: bool = False
    owner_per_process: bool = False
    fence_ignored: bool = False
    key_per_attempt: bool = False
    mark_commits_alone: bool = False
    ack_on_receipt: bool = False
    window_us: int = WINDOW_US


class SimStore:
    """Records, marks and a clock of its own; every answer is shown to the referee."""

    def __init__(self, world: World, referee: Referee, flaws: Flaws) -> None:
        self.world = world
        self.referee = referee
        self.flaws = flaws
        self.records: dict[Id, Record] = {}
        self.marks: dict[Id, int] = {}
        self.offset_us = 0
        self.down_until_us = 0
        self.watchers: dict[Id, list[Callable[[], None]]] = {}

    def now(self) -> int:
        """The store's own clock."""
        return self.world.now + self.offset_us

    # --- the network ---

    def send(
        self,
        process: Process,
        item: Any,
        attempt: SimAttempt,
        fate: int,
        skew_us: int,
        reply: Callable[..., None],
        *args: Any,
    ) -> None:
        """Carry a request to the store and its answer back, as fate has it; `reply(*args, answer)`."""
        world = self.world
        there = world.between(*LATENCY_US)
        if self.down_until_us > world.now + there:
            fate = LOST_REQUEST
        if fate in (FAIR, CRASH_AFTER):
            world.at(there, self._serve, process, process.life, item, attempt, skew_us, there, reply, args)
            return
        if world.trace is not None:
            world.note(f"{attempt.name}: {type(item).__name__.lower()} strays")
        if type(item) is not Claim or fate == LATE_REPLY:
            attempt.touch()
        if fate == LATE_REPLY:
            back = world.between(LEASE_US // 10, 2 * LEASE_US)
            world.at(there, self._serve, process, process.life, item, attempt, skew_us, back, reply, args)
            return
        if fate == LOST_REPLY:
            world.at(there, self._serve, process, process.life, item, attempt, skew_us, 0, None, ())
        elif fate == LATE_REQUEST:
            late = world.between(LEASE_US // 10, 3 * LEASE_US)
            world.at(late, self._serve, process, process.life, item, attempt, skew_us, 0, None, ())
        given_up = world.between(2 * there, PATIENCE_US)
        world.after(process, given_up, reply, *args, NO_ANSWER)

    def _serve(
        self,
        process: Process,
        life: int,
        item: Any,
        attempt: SimAttempt,
        skew_us: int,
        back_us: int,
        reply: Callable[..., None] | None,
        args: tuple[Any, ...],
    ) -> None:
        answer = self.apply(item, attempt, skew_us)
        if self.world.trace is not None:
            self.world.note(f"{attempt.name}: {_describe(item)} -> {_describe(answer)}")
        if reply is not None and process.life == life:
            self.world.after(process, back_us, reply, *args, answer)

    # --- the store ---

    def apply(self, item: Any, attempt: SimAttempt, skew_us: int = 0) -> Any:
        """Carry out one item, at once and whole."""
        true_now = now = self.world.now + self.offset_us
        if self.flaws.client_clock:
            now += skew_us
        kind = type(item)
        if kind in _RECORD_ITEMS:
            return self._decide(item, attempt, now, true_now)
        if kind is Mark:
            ids = [(item.tenant, item.consumer, key) for key in item.keys]
            return Marked([self._mark(record_id, item.window_us, now) for record_id in ids])
        if kind is SimSeen:
            return self.marks.get(item.id, 0) > now
        if kind is Commit:
            return self._commit(item, now)
        if kind is Scan:
            return self._orphans(item, now)
        raise AssertionError(f"no {kind.__name__} here")

    def _decide(self, item: Any, attempt: SimAttempt, now: int, true_now: int) -> Any:
        kind = type(item)
        answer, record = self.flaws.decide(self.records.get(item.id), item, now)
        if record is not None:
            self.records[item.id] = record
            if kind is not Claim and item.id in self.watchers:
                for wake in self.watchers.pop(item.id):
                    wake()
        if kind is Claim:
            self.referee.check_claim(item, answer, attempt, true_now)
        elif kind is Renew:
            self.referee.check_renewal(item, answer)
        elif kind is Settle:
            self.referee.check_settle(item, answer, true_now)
        elif kind is Resolve and type(answer) is Completed:
            self.referee.complete(item.id, item.value, true_now)
        elif kind is Resolve and type(answer) is Forgotten:
            self.referee.check_takeover(item, answer, attempt, true_now)
        return answer

    def _mark(self, record_id: Id, window_us: int, now: int) -> bool:
        if self.marks.get(record_id, 0) > now:
            return False
        self.marks[record_id] = now + window_us
        self.referee.complete(record_id, None, now)
        return True

    def _commit(self, item: Commit, now: int) -> bool:
        """The mark and the effect: both or neither."""
        event: SimEvent = item.holder.event
        if self.flaws.mark_commits_alone:
            first = item.holder.effected = True
        else:
            first = self._mark(item.id, self.flaws.window_us, now)
        if first:
            event.effects += 1
        return first

    def _orphans(self, item: Scan, now: int) -> Page:
        found = [
            record
            for record in self.records.values()
            if record.journal is not None and record.state == "claimed" and record.lease_until_us <= now
        ]
        return Page(found[: item.limit])

    def purge(self) -> None:
        """Remove what is over; no answer may change by it."""
        now = self.now()
        for record_id, record in list(self.records.items()):
            if not self.flaws.spared_by_purge(record, now):
                del self.records[record_id]
        for record_id, expires_at in list(self.marks.items()):
            if expires_at <= now:
                del self.marks[record_id]

    def flush(self) -> None:
        """Lose everything: a failover to an empty node, an eviction, a hand on the wrong key."""
        self.records.clear()
        self.marks.clear()
        self.referee.note_flush()
        if self.world.trace is not None:
            self.world.note("the store loses everything")

    def resolve(self, event: SimEvent) -> bool:
        """The operator looks into the sink and decides an unknown record; whether it shall run again."""
        record = standing(self.records.get(event.id), self.now())
        if record is None or record.state != "unknown":
            return False
        happened = event.effects > 0
        item = Resolve(event.id, record.fence, "done" if happened else "absent", None, WINDOW_US)
        answer, written = decide(record, item, self.now())
        if written is None:
            raise Violation("unresolved", f"{event.payload}: {answer!r} to the operator")
        self.records[event.id] = written
        if type(answer) is Forgotten:
            self.referee.note_forgotten(event.id)
            return True
        self.referee.complete(event.id, None, self.now())
        return False


def _describe(thing: Any) -> str:
    """A command or answer in a few words, for the trace."""
    name = type(thing).__name__
    parts = [
        f"{field}={getattr(thing, field)!r}"
        for field in ("fence", "attempt", "to", "state", "retry_after_s", "already", "recreated", "firsts")
        if getattr(thing, field, None)
    ]
    return f"{name}({', '.join(parts)})"


_RECORD_ITEMS = {Claim, Renew, Settle, Lookup, Resolve}


SinkKind: TypeAlias = Literal["plain", "keyed", "fenced"]


class SimSink:
    """Counts what really happened; whoever called may be dead by then."""

    def __init__(self, world: World, kind: SinkKind, flaws: Flaws) -> None:
        self.world = world
        self.kind = kind
        self.flaws = flaws
        self._keys: dict[str, None] = {}
        self._fences: dict[Id, int] = {}
        self._values: dict[str, str] = {}
        self._closed: dict[Id, int] = {}
        """Of events that a probe was told have not happened: up to which fence they cannot happen any more."""

    def probe(self, event: SimEvent, fence: int) -> Happened[str] | DidNotHappen:
        """Whether the effect is there. The answer is final: attempts up to this fence come too late from now on."""
        if event.effects:
            return Happened(self._values[event.payload])
        self._closed[event.id] = max(fence, self._closed.get(event.id, 0))
        return DidNotHappen()

    def apply(self, attempt: SimAttempt) -> bool:
        """Do the effect; `False` where the fence is too old, or a probe was told that it did not happen."""
        event = attempt.event
        if attempt.granted is not None and attempt.granted.fence <= self._closed.get(event.id, 0):
            return False
        if self.kind == "keyed":
            key = idempotency_key(event.id) + (attempt.name if self.flaws.key_per_attempt else "")
            if key in self._keys:
                return True
            self._keys[key] = None
        elif self.kind == "fenced" and attempt.granted is not None:
            fence = attempt.granted.fence
            if fence < self._fences.get(event.id, 0) and not self.flaws.fence_ignored:
                return False
            self._fences[event.id] = fence
            event.fences.append(fence)
        event.effects += 1
        self._values.setdefault(event.payload, attempt.value)
        attempt.effected = True
        if self.world.trace is not None:
            self.world.note(f"{attempt.name}: EFFECT {event.effects} of {event.payload}")
        return True

    def forget(self) -> None:
        """The sink's own window is over too."""
        self._keys.clear()
