"""The referee: checks every answer against a ledger of its own and raises `Violation` when a promise is broken.

It shares no code with the store: it uses only the answers and the store's clock.
"""

from collections.abc import Callable
from typing import Any

from semel.codec import encode
from semel.core.commands import Claim, Granted, Known, Renew, Resolve, Settle
from semel.testing._simulation.world import WINDOW_US, Violation, World
from semel.types import Busy, Completed, Done, Failed, Forgotten, Id, Renewed, Unknown

MAX_ATTEMPTS = 5
WHOLE = ("",)
"""The parts of a handler without steps."""


class SimEvent:
    """One event, however often it is delivered."""

    __slots__ = (
        "applied",
        "completed",
        "duplicates",
        "failed",
        "fences",
        "forgets",
        "grants",
        "id",
        "kind",
        "losses",
        "parts",
        "payload",
        "touched",
        "unknown",
        "values",
    )

    def __init__(self, record_id: Id, payload: str, kind: str, parts: tuple[str, ...] = WHOLE) -> None:
        self.id = record_id
        self.payload = payload
        self.kind = kind
        """`fine`, `permanent` (raises for good), `poison` (raises always) or `killer` (kills its worker)."""
        self.parts = parts
        """The steps of its handler, each with an effect of its own; one without a name if it has no steps."""
        self.applied: dict[str, int] = {}
        """How often each part had its effect."""
        self.touched = 0
        """How many attempts a fault touched: each may cost one repetition, and no more."""
        self.losses = 0
        """How often the store lost its record."""
        self.forgets = 0
        """How often an operator made it new again: each may cost one repetition of every part."""
        self.grants = 0
        self.completed = False
        self.failed = False
        self.unknown = False
        self.duplicates = 0
        self.fences: list[int] = []
        """Fences of the effects that a fenced sink applied, in order."""
        self.values: list[bytes | None] = []

    @property
    def effects(self) -> int:
        """How many effects there were, of all parts."""
        return sum(self.applied.values())

    @property
    def happened(self) -> bool:
        """Whether every part had its effect."""
        return len(self.applied) == len(self.parts)

    @property
    def repeated(self) -> int:
        """How many effects there were beyond the first of each part."""
        return self.effects - len(self.applied)

    def apply(self, part: str = "") -> None:
        """Count an effect."""
        self.applied[part] = self.applied.get(part, 0) + 1

    def save(self) -> tuple[Any, ...]:
        """Return all that is known of the event, to be restored later."""
        return (
            tuple(sorted(self.applied.items())),
            self.touched,
            self.losses,
            self.forgets,
            self.grants,
            self.completed,
            self.failed,
            self.unknown,
            tuple(self.fences),
            tuple(self.values),
        )

    def restore(self, saved: tuple[Any, ...]) -> None:
        """Go back to what was saved."""
        applied, self.touched, self.losses, self.forgets, self.grants = saved[:5]
        self.completed, self.failed, self.unknown, fences, values = saved[5:]
        self.applied, self.fences, self.values = dict(applied), list(fences), list(values)


class SimAttempt:
    """One claim call with its retries, and the state that its process has of it."""

    __slots__ = (
        "claim",
        "deadline_us",
        "effected",
        "event",
        "granted",
        "lost",
        "name",
        "over",
        "owner",
        "sent_us",
        "started_us",
        "touched",
        "unanswered",
    )

    def __init__(self, event: SimEvent, owner: bytes, name: str, now: int) -> None:
        self.event = event
        self.owner = owner
        self.name = name
        self.claim: Claim | None = None
        self.granted: Granted | None = None
        self.started_us = now
        self.sent_us = now
        self.unanswered = False
        self.deadline_us = now
        self.lost = False
        self.over = False
        self.touched = False
        self.effected = False

    @property
    def value(self) -> str:
        """The value that its handler returns: each attempt has another."""
        return f"{self.event.payload} with {0 if self.granted is None else self.granted.fence}"

    def touch(self) -> None:
        """Note that a fault struck this attempt."""
        if not self.touched:
            self.touched = True
            self.event.touched += 1


class SimClaim:
    """The current claim on a key in the referee's ledger."""

    __slots__ = ("attempt", "fence", "owner", "until")

    def __init__(self, attempt: SimAttempt, owner: bytes, fence: int, until: int) -> None:
        self.attempt = attempt
        self.owner = owner
        self.fence = fence
        self.until = until


class Referee:
    """The ledger of claims, fences and completions.

    `harm_only`: do not report broken rules; report only events that are lost, repeated or stuck at the end.
    """

    def __init__(self, world: World, *, harm_only: bool = False) -> None:
        self.world = world
        self._harm_only = harm_only
        self.events: dict[Id, SimEvent] = {}
        """The current event of each key; a key whose window is over may have a new event."""
        self._held: dict[Id, SimClaim] = {}
        self._fences: dict[Id, int] = {}
        self._completed: dict[Id, tuple[int, bytes | None]] = {}

    def _report(self, kind: str, text: str) -> None:
        if not self._harm_only:
            raise Violation(kind, text)

    def save(self, record_id: Id, number: Callable[[SimAttempt], int]) -> tuple[Any, ...]:
        """Return the ledger of one key, to be restored later; `number` stands for an attempt."""
        held = self._held.get(record_id)
        claim = None if held is None else (number(held.attempt), held.owner, held.fence, held.until)
        return claim, self._fences.get(record_id, 0), self._completed.get(record_id)

    def restore(self, record_id: Id, saved: tuple[Any, ...], attempts: list[SimAttempt]) -> None:
        """Go back to what was saved."""
        claim, self._fences[record_id], done = saved
        self._held.pop(record_id, None)
        self._completed.pop(record_id, None)
        if claim is not None:
            self._held[record_id] = SimClaim(attempts[claim[0]], *claim[1:])
        if done is not None:
            self._completed[record_id] = done

    # --- answers of the store ---

    def on_claim(self, item: Claim, answer: Any, attempt: SimAttempt, now: int) -> None:
        """Check the answer to a claim."""
        if type(answer) is Granted:
            self._on_granted(item, answer, attempt, now)
        elif type(answer) is Known:
            self._on_known(item.id, answer, now)
        elif type(answer) is Busy:
            held = self._held.get(item.id)
            if held is not None and held.attempt is attempt and held.until > now:
                self._report(
                    "own claim",
                    f"{attempt.name} waits for its own claim: the retry was sent with another owner",
                )
        elif type(answer) is Unknown:
            self.events[item.id].unknown = True

    def _on_granted(self, item: Claim, answer: Granted, attempt: SimAttempt, now: int) -> None:
        held = self._held.get(item.id)
        if held is not None:
            if held.attempt is attempt and held.fence == answer.fence:
                return
            if held.until > now:
                self._report(
                    "overlap",
                    f"{item.id[2]}: {attempt.name} got the claim while {held.attempt.name} holds it",
                )
        done = self._completed.get(item.id)
        if done is not None and done[0] + WINDOW_US > now:
            self._report("again", f"{item.id[2]}: claimed again within the window of its completion")
        if answer.fence <= self._fences.get(item.id, 0):
            self._report("fence", f"{item.id[2]}: fence {answer.fence} does not grow")
        self._fences[item.id] = answer.fence
        self._held[item.id] = SimClaim(attempt, item.owner, answer.fence, answer.lease_until_us)
        self.events[item.id].grants += 1

    def _on_known(self, record_id: Id, answer: Known, now: int) -> None:
        done = self._completed.get(record_id)
        if done is None:
            self._report("invented", f"{record_id[2]}: answered as known, but nobody completed it")
            return
        if done[0] + WINDOW_US <= now:
            self._report("expired", f"{record_id[2]}: answered as known after its window")
        if done[1] != answer.value:
            self._report("value", f"{record_id[2]}: replayed {answer.value!r}, stored was {done[1]!r}")

    def on_renewal(self, item: Renew, answer: Any) -> None:
        """Check the answer to a renewal."""
        if type(answer) is not Renewed:
            return
        held = self._held.get(item.id)
        if held is None or held.owner != item.owner or held.fence != item.fence:
            self._report("stranger", f"{item.id[2]}: a claim was renewed by an owner that does not hold it")
            return
        held.until = answer.lease_until_us

    def on_settle(self, item: Settle, answer: Any, now: int) -> None:
        """Check the answer to a settle."""
        if type(answer) is not Completed:
            return
        event = self.events[item.id]
        if answer.already:
            event.unknown = event.unknown or item.to == "unknown"
            return
        held = self._held.get(item.id)
        if answer.recreated:
            if not event.losses:
                self._report("invented", f"{item.id[2]}: recreated, but the store had lost nothing")
        elif held is None or held.owner != item.owner or held.fence != item.fence:
            self._report("stranger", f"{item.id[2]}: {item.to} by an owner that does not hold the claim")
        if item.to in ("done", "failed"):
            self.complete(item.id, item.value, now, failed=item.to == "failed")
        elif item.to == "unknown":
            event.unknown = True
        if held is not None and item.to != "unknown":
            del self._held[item.id]

    def complete(self, record_id: Id, value: bytes | None, now: int, *, failed: bool = False) -> None:
        """Note a completion. Two completions within a window break the promise."""
        done = self._completed.get(record_id)
        if done is not None and done[0] + WINDOW_US > now:
            self._report("again", f"{record_id[2]}: completed twice within a window")
        self._completed[record_id] = (now, value)
        event = self.events[record_id]
        event.completed = True
        event.failed = event.failed or failed
        event.values.append(value)

    def on_take_over(self, item: Resolve, answer: Forgotten, attempt: SimAttempt, now: int) -> None:
        """Note that a probe found no effect and that the caller took over the claim."""
        self._held.pop(item.id, None)
        until = now + item.lease_us
        granted = Granted(answer.fence, attempt=1, lease_until_us=until, first_seen_us=now)
        self._on_granted(Claim(item.id, item.owner, item.lease_us, 0), granted, attempt, now)

    def on_forget(self, record_id: Id) -> None:
        """Note that the record was forgotten: the event may run again."""
        self._held.pop(record_id, None)
        self._completed.pop(record_id, None)
        self.events[record_id].unknown = False

    def on_flush(self) -> None:
        """Note that the store lost all its data."""
        self._held.clear()
        self._completed.clear()
        for event in self.events.values():
            event.losses += 1

    # --- actions of the runner ---

    def on_outcome(self, event: SimEvent, outcome: Any) -> None:
        """Check that the value of a done outcome is a stored value."""
        if type(outcome) is Done and outcome.kept and encode(outcome.value) not in event.values:
            self._report("value", f"{event.payload}: a caller got {outcome.value!r}, which was never stored")

    def on_observed_run(self, attempt: SimAttempt, outcome: Any) -> None:
        """Check that a delivery in observe mode had its own effect."""
        if type(outcome) is Done and not attempt.effected:
            self._report("suppressed", f"{attempt.event.payload}: {attempt.name} did not run")

    def on_ack(self, attempt: SimAttempt, outcome: Any) -> None:
        """Check that the event is finished: the source will not send this copy again."""
        event = attempt.event
        if type(outcome) is Unknown and outcome.error is not None:
            # Its own attempt; if the store did not receive it, the record is unknown when the lease ends.
            held = self._held.get(event.id)
            if held is not None and held.attempt is attempt:
                return
        if not (event.completed or event.unknown):
            self._report("early ack", f"{event.payload}: acknowledged on {outcome!r} before it was done")
        if type(outcome) is Failed and not event.failed:
            self._report("early ack", f"{event.payload}: acknowledged as failed, but no failure is stored")
