"""Where effects go: a sink that does what it is told, one that knows idempotency keys, one that checks fences."""

from typing import Literal, TypeAlias

from semel.digests import idempotency_key
from semel.testing._sim.referee import SimAttempt, SimEvent
from semel.testing._sim.store import Flaws
from semel.testing._sim.world import World
from semel.types import DidNotHappen, Happened, Id

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
