"""A store behind a bad network: the real `machine.decide` on a dict, a clock that steps, lost and late requests."""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from semel.core.commands import (
    Claim,
    Command,
    Forget,
    Lookup,
    Mark,
    Marked,
    Page,
    Renew,
    Resolve,
    Scan,
    Settle,
)
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
    """Ask whether a key is marked, at the start of a transaction."""

    id: Id


class Commit(Command[bool | Unavailable], frozen=True):
    """Commit a transaction that holds both the mark of a key and its effect."""

    id: Id
    holder: Any


class Flaws(Struct, frozen=True, kw_only=True):
    """Deliberate faults of a store, runner or sink; the defaults are correct."""

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
    """Records, marks and the store's own clock; the referee checks every answer."""

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
        """Carry a request to the store and its answer back, with the fault `fate`; calls `reply(*args, answer)`."""
        world = self.world
        there = world.between(*LATENCY_US)
        if self.down_until_us > world.now + there:
            fate = LOST_REQUEST
        if fate in (FAIR, CRASH_AFTER):
            world.at(there, self._serve, process, process.life, item, attempt, skew_us, there, reply, args)
            return
        if world.trace is not None:
            world.note(f"{attempt.name}: {type(item).__name__.lower()} is lost or late")
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
            self.world.note(f"{attempt.name}: {describe(item)} -> {describe(answer)}")
        if reply is not None and process.life == life:
            self.world.after(process, back_us, reply, *args, answer)

    # --- the store ---

    def apply(self, item: Any, attempt: SimAttempt, skew_us: int = 0) -> Any:
        """Carry out one item atomically."""
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
            self.referee.on_claim(item, answer, attempt, true_now)
        elif kind is Renew:
            self.referee.on_renewal(item, answer)
        elif kind is Settle:
            self.referee.on_settle(item, answer, true_now)
        elif kind is Resolve and type(answer) is Completed:
            self.referee.complete(item.id, item.value, true_now)
        elif kind is Resolve and type(answer) is Forgotten:
            self.referee.on_take_over(item, answer, attempt, true_now)
        return answer

    def _mark(self, record_id: Id, window_us: int, now: int) -> bool:
        if self.marks.get(record_id, 0) > now:
            return False
        self.marks[record_id] = now + window_us
        self.referee.complete(record_id, None, now)
        return True

    def _commit(self, item: Commit, now: int) -> bool:
        """Commit the mark and the effect: both or neither."""
        event: SimEvent = item.holder.event
        if self.flaws.mark_commits_alone:
            first = item.holder.effected = True
        else:
            first = self._mark(item.id, self.flaws.window_us, now)
        if first:
            event.apply()
        return first

    def _orphans(self, item: Scan, now: int) -> Page:
        found = [
            record
            for record in self.records.values()
            if record.journal is not None and record.state == "claimed" and record.lease_until_us <= now
        ]
        return Page(found[: item.limit])

    def purge(self) -> None:
        """Remove expired records; this must not change any answer."""
        now = self.now()
        for record_id, record in list(self.records.items()):
            if not self.flaws.spared_by_purge(record, now):
                del self.records[record_id]
        for record_id, expires_at in list(self.marks.items()):
            if expires_at <= now:
                del self.marks[record_id]

    def flush(self) -> None:
        """Lose all data: a failover to an empty node, an eviction, an operator's mistake."""
        self.records.clear()
        self.marks.clear()
        self.referee.on_flush()
        if self.world.trace is not None:
            self.world.note("the store loses everything")

    def forget(self, event: SimEvent, *, force: bool = False) -> bool:
        """Forget the record as an operator who wants the event to run again. Returns whether it was forgotten."""
        answer = self.flaws.decide(self.records.get(event.id), Forget(event.id, force), self.now())
        if answer[1] is None:
            return False
        self.records[event.id] = answer[1]
        event.forgets += 1
        self.referee.on_forget(event.id)
        return True

    def resolve(self, event: SimEvent) -> bool:
        """Resolve an unknown record as an operator who looks into the sink. Returns whether it runs again."""
        record = standing(self.records.get(event.id), self.now())
        if record is None or record.state != "unknown":
            return False
        happened = event.happened
        item = Resolve(event.id, record.fence, "done" if happened else "absent", None, WINDOW_US)
        answer, written = decide(record, item, self.now())
        if written is None:
            raise Violation("unresolved", f"{event.payload}: {answer!r} to the operator")
        self.records[event.id] = written
        if type(answer) is Forgotten:
            self.referee.on_forget(event.id)
            return True
        self.referee.complete(event.id, None, self.now())
        return False


def describe(thing: Any) -> str:
    """Return a short text of a command or answer, for the trace."""
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
    """Counts the effects that really happened; the caller may be dead by then."""

    def __init__(self, world: World, kind: SinkKind, flaws: Flaws) -> None:
        self.world = world
        self.kind = kind
        self.flaws = flaws
        self._keys: dict[Id, set[tuple[str, int]]] = {}
        """By event: the parts that it applied, each with 0 or, if the key is one per attempt, its fence."""
        self._fences: dict[Id, int] = {}
        self._values: dict[Id, str] = {}
        self._closed: dict[Id, int] = {}
        """By event that a probe found without effect: the highest fence whose effects are refused from then on."""

    def probe(self, event: SimEvent, fence: int) -> Happened[str] | DidNotHappen:
        """Return whether the effect happened. The answer is final: from now on effects up to this fence are refused."""
        if event.happened:
            return Happened(self._values[event.id])
        self._closed[event.id] = max(fence, self._closed.get(event.id, 0))
        return DidNotHappen()

    def apply(self, attempt: SimAttempt, part: str = "") -> bool:
        """Apply the effect. Returns `False` if the fence is too old or a probe has found that it did not happen."""
        event = attempt.event
        fence = 0 if attempt.granted is None else attempt.granted.fence
        if 0 < fence <= self._closed.get(event.id, 0):
            return False
        if self.kind == "keyed":
            keys = self._keys.setdefault(event.id, set())
            key = (part, fence if self.flaws.key_per_attempt else 0)
            if key in keys:
                return True
            keys.add(key)
        elif self.kind == "fenced" and fence:
            if fence < self._fences.get(event.id, 0) and not self.flaws.fence_ignored:
                return False
            self._fences[event.id] = fence
            event.fences.append(fence)
        event.apply(part)
        self._values.setdefault(event.id, attempt.value)
        attempt.effected = True
        if self.world.trace is not None:
            self.world.note(f"{attempt.name}: EFFECT {event.effects} of {event.payload}{part and ' ' + part}")
        return True

    def save(self, record_id: Id) -> tuple[Any, ...]:
        """Return what the sink knows of one key, to be restored later."""
        keys = frozenset(self._keys.get(record_id, ()))
        return (
            keys,
            self._fences.get(record_id, 0),
            self._values.get(record_id),
            self._closed.get(record_id, 0),
        )

    def restore(self, record_id: Id, saved: tuple[Any, ...]) -> None:
        """Go back to what was saved."""
        keys, self._fences[record_id], value, self._closed[record_id] = saved
        self._keys[record_id] = set(keys)
        self._values.pop(record_id, None)
        if value is not None:
            self._values[record_id] = value

    def forget(self) -> None:
        """Forget all keys: the sink's own window is over too."""
        self._keys.clear()
        self._values.clear()
