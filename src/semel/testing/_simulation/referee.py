"""Who sees everything, by a ledger of its own, and says when a promise is broken.

It shares no code with the store: what it expects follows from the answers and the store's clock alone.
"""

from typing import Any

from semel.codec import encode
from semel.core.commands import Claim, Granted, Known, Renew, Resolve, Settle
from semel.testing._simulation.world import WINDOW_US, Violation, World
from semel.types import Busy, Completed, Done, Failed, Forgotten, Id, Renewed, Unknown

MAX_ATTEMPTS = 5


class SimEvent:
    """Something that happened once, however often it is delivered."""

    __slots__ = (
        "completed",
        "duplicates",
        "effects",
        "failed",
        "fences",
        "grants",
        "id",
        "kind",
        "losses",
        "payload",
        "touched",
        "unknown",
        "values",
    )

    def __init__(self, record_id: Id, payload: str, kind: str) -> None:
        self.id = record_id
        self.payload = payload
        self.kind = kind
        """`fine`, `permanent` (raises for good), `poison` (raises always) or `killer` (kills its worker)."""
        self.effects = 0
        self.touched = 0
        """How many attempts a fault touched: each may cost one repetition, and no more."""
        self.losses = 0
        """How often the store lost its record."""
        self.grants = 0
        self.completed = False
        self.failed = False
        self.unknown = False
        self.duplicates = 0
        self.fences: list[int] = []
        """Of the effects that a fenced sink applied, in their order."""
        self.values: list[bytes | None] = []


class SimAttempt:
    """One claim call with its retries, and what its process knows about it."""

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
        """What its handler returns."""
        return f"{self.event.payload} by {self.name}"

    def touch(self) -> None:
        """A fault struck this attempt."""
        if not self.touched:
            self.touched = True
            self.event.touched += 1


class SimClaim:
    """The one claim on a key, as the referee understands it."""

    __slots__ = ("attempt", "fence", "owner", "until")

    def __init__(self, attempt: SimAttempt, owner: bytes, fence: int, until: int) -> None:
        self.attempt = attempt
        self.owner = owner
        self.fence = fence
        self.until = until


class Referee:
    """The ledger of claims, fences and completions.

    `harm_only`: hold still about broken rules, so that only what is lost, repeated or stuck in the end counts.
    """

    def __init__(self, world: World, *, harm_only: bool = False) -> None:
        self.world = world
        self._harm_only = harm_only
        self.events: dict[Id, SimEvent] = {}
        """The event that each key stands for now; a key whose window is over may stand for a new one."""
        self._held: dict[Id, SimClaim] = {}
        self._fences: dict[Id, int] = {}
        self._completed: dict[Id, tuple[int, bytes | None]] = {}

    def _broken(self, kind: str, text: str) -> None:
        if not self._harm_only:
            raise Violation(kind, text)

    # --- what the store answers ---

    def check_claim(self, item: Claim, answer: Any, attempt: SimAttempt, now: int) -> None:
        """Check the answer to a claim."""
        if type(answer) is Granted:
            self._check_grant(item, answer, attempt, now)
        elif type(answer) is Known:
            self._check_known(item.id, answer, now)
        elif type(answer) is Busy:
            held = self._held.get(item.id)
            if held is not None and held.attempt is attempt and held.until > now:
                self._broken("own claim", f"{attempt.name} waits for itself: its owner was not sent again")
        elif type(answer) is Unknown:
            self.events[item.id].unknown = True

    def _check_grant(self, item: Claim, answer: Granted, attempt: SimAttempt, now: int) -> None:
        held = self._held.get(item.id)
        if held is not None:
            if held.attempt is attempt and held.fence == answer.fence:
                return
            if held.until > now:
                self._broken(
                    "overlap",
                    f"{item.id[2]}: {attempt.name} got the claim while {held.attempt.name} holds it",
                )
        done = self._completed.get(item.id)
        if done is not None and done[0] + WINDOW_US > now:
            self._broken("again", f"{item.id[2]}: claimed again within the window of its completion")
        if answer.fence <= self._fences.get(item.id, 0):
            self._broken("fence", f"{item.id[2]}: fence {answer.fence} does not grow")
        self._fences[item.id] = answer.fence
        self._held[item.id] = SimClaim(attempt, item.owner, answer.fence, answer.lease_until_us)
        self.events[item.id].grants += 1

    def _check_known(self, record_id: Id, answer: Known, now: int) -> None:
        done = self._completed.get(record_id)
        if done is None:
            self._broken("invented", f"{record_id[2]}: answered as known, and nobody completed it")
            return
        if done[0] + WINDOW_US <= now:
            self._broken("expired", f"{record_id[2]}: answered as known after its window")
        if done[1] != answer.value:
            self._broken("value", f"{record_id[2]}: replayed {answer.value!r}, stored was {done[1]!r}")

    def check_renewal(self, item: Renew, answer: Any) -> None:
        """Check the answer to a renewal."""
        if type(answer) is not Renewed:
            return
        held = self._held.get(item.id)
        if held is None or held.owner != item.owner or held.fence != item.fence:
            self._broken("stranger", f"{item.id[2]}: a claim was renewed by one who does not hold it")
            return
        held.until = answer.lease_until_us

    def check_settle(self, item: Settle, answer: Any, now: int) -> None:
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
                self._broken("invented", f"{item.id[2]}: recreated, and the store had lost nothing")
        elif held is None or held.owner != item.owner or held.fence != item.fence:
            self._broken("stranger", f"{item.id[2]}: {item.to} by one who does not hold the claim")
        if item.to in ("done", "failed"):
            self.complete(item.id, item.value, now, failed=item.to == "failed")
        elif item.to == "unknown":
            event.unknown = True
        if held is not None and item.to != "unknown":
            del self._held[item.id]

    def complete(self, record_id: Id, value: bytes | None, now: int, *, failed: bool = False) -> None:
        """A key is finished; twice within a window is once too often."""
        done = self._completed.get(record_id)
        if done is not None and done[0] + WINDOW_US > now:
            self._broken("again", f"{record_id[2]}: completed twice within a window")
        self._completed[record_id] = (now, value)
        event = self.events[record_id]
        event.completed = True
        event.failed = event.failed or failed
        event.values.append(value)

    def check_takeover(self, item: Resolve, answer: Forgotten, attempt: SimAttempt, now: int) -> None:
        """A probe found that nothing had happened, and who asked has the claim."""
        self._held.pop(item.id, None)
        until = now + item.lease_us
        granted = Granted(answer.fence, attempt=1, lease_until_us=until, first_seen_us=now)
        self._check_grant(Claim(item.id, item.owner, item.lease_us, 0), granted, attempt, now)

    def note_forgotten(self, record_id: Id) -> None:
        """Somebody decided that the event may run again."""
        self._held.pop(record_id, None)
        self.events[record_id].unknown = False

    def note_flush(self) -> None:
        """The store lost everything it knew."""
        self._held.clear()
        self._completed.clear()
        for event in self.events.values():
            event.losses += 1

    # --- what the runner does ---

    def check_value(self, event: SimEvent, outcome: Any) -> None:
        """A caller is told that the event is done: what it gets must be what is stored."""
        if type(outcome) is Done and outcome.kept and encode(outcome.value) not in event.values:
            self._broken("value", f"{event.payload}: a caller got {outcome.value!r}, which was never stored")

    def check_effect(self, attempt: SimAttempt, outcome: Any) -> None:
        """In observe mode every delivery has its own effect."""
        if type(outcome) is Done and not attempt.effected:
            self._broken("suppressed", f"{attempt.event.payload}: {attempt.name} did not run")

    def check_ack(self, attempt: SimAttempt, outcome: Any) -> None:
        """The source will not send this copy again: the event has to be finished by now."""
        event = attempt.event
        if type(outcome) is Unknown and outcome.error is not None:
            # Its own attempt, and the store may not have heard of it: then the record says so when the lease ends.
            held = self._held.get(event.id)
            if held is not None and held.attempt is attempt:
                return
        if not (event.completed or event.unknown):
            self._broken("early ack", f"{event.payload}: acknowledged on {outcome!r} before it was done")
        if type(outcome) is Failed and not event.failed:
            self._broken("early ack", f"{event.payload}: acknowledged as failed, and no failure is stored")
