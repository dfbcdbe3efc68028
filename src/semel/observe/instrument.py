"""Report the events of a delivery to hooks: of a flow, of a plain verb, or of a transaction.

A `FlowObserver` wraps a flow: it sees each command and each answer and passes them on. So the protocol
does not depend on it, it works for sync and async, and without hooks it costs nothing.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any

import msgspec
from msgspec.structs import replace

from semel.codec import decode_error
from semel.core.commands import (
    Answer,
    Ask,
    Claim,
    Command,
    Flow,
    Granted,
    Invoke,
    Item,
    Known,
    Lookup,
    Settle,
)
from semel.core.settlement import NotStarted, answer_of
from semel.errors import RecordCorrupt
from semel.observe import events
from semel.observe.events import Hooks, Reason
from semel.runtime.reporter import DeliveryObserver
from semel.types import (
    Busy,
    CannotTell,
    Completed,
    Delivery,
    DidNotHappen,
    Done,
    Errored,
    Failed,
    Happened,
    Id,
    Late,
    Lost,
    Mismatch,
    Outcome,
    Record,
    Unavailable,
    Unknown,
)

__all__ = [
    "FlowObserver",
    "report_claimed",
    "report_copies",
    "report_marked",
    "report_settled",
]


class FlowObserver(DeliveryObserver):
    """Reports the events of one delivery."""

    def __init__(
        self,
        hooks: Hooks,
        claim: Claim,
        handler: str = "",
        source: str = "",
        redelivered: bool | None = None,  # noqa: FBT001 - as it stands in a Delivery
        *,
        again: bool = False,
        parks: bool = False,
    ) -> None:
        self._hooks = hooks
        self._claim = claim
        self._who = (*claim.id, claim.owner, handler, source)
        self._type = claim.event_type
        self._redelivered = redelivered
        self._again = again
        self._parks = parks
        """Whether a busy delivery is held back and retried."""
        self._answer: Any = None
        self._waited = False
        self._origin: dict[str, str] | None = None
        self._error: BaseException | None = None
        self._known = False
        """Whether its claim is only recorded: the event had happened before."""

    def watch(self, flow: Flow[Outcome[Any]], *, awaits: bool, observes: bool) -> Flow[Outcome[Any]]:
        """Return the flow with reports. `awaits`: its handler is awaited. `observes`: nothing is suppressed."""
        hooks = self._hooks
        received = self.note_received()
        carried = hooks.record_metadata(received) if hooks.carries else None
        try:
            answer: Any = None
            while True:
                try:
                    command = flow.send(answer)
                except StopIteration as end:
                    self.note_outcome(end.value, observes=observes)
                    return end.value  # type: ignore[no-any-return]
                kind = type(command)
                if kind is Claim:
                    answer = yield self._carrying(command, carried)
                    if self.note_claim_answer(answer) and hooks.carries:
                        self._origin = _words((yield Lookup(self._claim.id)))
                elif kind is Invoke:
                    answer = yield self._around(command, awaits=awaits)
                elif kind is Ask:
                    began = time.perf_counter()
                    answer = yield command
                    self._note_probe(answer, time.perf_counter() - began)
                else:
                    answer = yield command
        except BaseException:
            hooks(events.Dropped(*self._who, event_type=self._type))
            raise

    def note_received(self) -> events.Received:
        """Report that the delivery came in."""
        received = events.Received(
            *self._who, _read_meta(self._claim.meta), self._again, event_type=self._type
        )
        self._hooks(received)
        return received

    @staticmethod
    def _carrying(command: Command[Any], carried: dict[str, str] | None) -> Command[Any]:
        assert isinstance(command, Claim)
        if not carried:
            return command
        mine = {} if command.meta is None else msgspec.json.decode(command.meta, type=dict[str, str])
        return replace(command, meta=msgspec.json.encode({**mine, **carried}))

    def note_claim_answer(self, answer: Any) -> bool:
        """Report the answer to a claim. Returns whether to read the metadata of an earlier delivery."""
        self._answer = answer
        kind = type(answer)
        if kind is Granted:
            self._hooks.note_time(answer.lease_until_us - self._claim.lease_us)
            self._hooks(
                events.ClaimedEvent(
                    *self._who,
                    answer.attempt,
                    answer.first_seen_us,
                    self._claim.window_us / 1e6,
                    event_type=self._type,
                )
            )
        elif kind is Busy and not self._waited:
            self._waited = True
            self._hooks(events.BusyEvent(*self._who, answer.retry_after_s, event_type=self._type))
        return kind is Known

    def _around(self, command: Command[Any], *, awaits: bool) -> Command[Any]:
        """Wrap the handler, to report its call in its own thread and context."""
        assert isinstance(command, Invoke)
        if command.claim is None:
            return command
        call, attempt = command.call, 1 if command.granted is None else command.granted.attempt

        def around() -> Any:
            began = self.note_began(attempt)
            try:
                value = call()
            except BaseException as error:
                self.note_ended(began, error)
                raise
            self.note_ended(began, None)
            return value

        async def aaround() -> Any:
            began = self.note_began(attempt)
            try:
                value = await call()
            except BaseException as error:
                self.note_ended(began, error)
                raise
            self.note_ended(began, None)
            return value

        return Invoke(aaround if awaits else around, command.claim, command.granted)

    def _note_probe(self, ran: Any, duration_s: float) -> None:
        told = answer_of(ran)
        text = told.reason if isinstance(told, CannotTell) else ""
        self._hooks(events.Probed(*self._who, _ANSWERS[type(told)], text, duration_s, event_type=self._type))

    def note_began(self, attempt: int) -> float:
        """Report that the handler is about to be called. Returns the time, for `note_ended`."""
        self._hooks(events.Began(*self._who, attempt, event_type=self._type))
        return time.perf_counter()

    def note_ended(self, began: float, error: BaseException | None) -> None:
        """Report that the handler has returned or raised."""
        duration_s = time.perf_counter() - began
        self._hooks(events.EndedEvent(*self._who, duration_s, error, event_type=self._type))

    def note_outcome(self, outcome: Outcome[Any], *, observes: bool = False) -> None:
        """Report how the delivery ended. `observes`: nothing was suppressed."""
        answer = self._answer
        if observes and answer is not None and not isinstance(answer, Granted | Unavailable):
            self.duplicate(answer, suppressed=False)
        match outcome:
            case Done(replayed=True) | Failed(replayed=True) | Mismatch() | Busy():
                self.duplicate(outcome if answer is None else answer)
            case Unknown() if not isinstance(answer, Granted):
                self.duplicate(outcome)
            case _:
                self._hooks(self._event_of(outcome))

    def _event_of(self, outcome: Outcome[Any]) -> events.DeliveryEvent:
        """Return the event for the end of a delivery that is no duplicate."""
        who, kind = self._who, self._type
        match outcome:
            case Done(recorded=False, guarded=guarded):
                unsafe = events.Unrecorded if guarded else events.Unguarded
                return unsafe(*who, event_type=kind)
            case Failed(error):
                return events.FailedEvent(*who, error, self._attempt, event_type=kind)
            case Errored(error) if isinstance(error, NotStarted):
                return events.Dropped(*who, event_type=kind)
            case Errored(error, attempt, retry_after_s):
                return events.Released(*who, error, retry_after_s, attempt, event_type=kind)
            case Lost():
                return events.LostEvent(*who, event_type=kind)
            case Late(age_s):
                return events.LateArrivalEvent(*who, age_s, event_type=kind)
            case Unknown(_, error):
                return events.Quarantined(*who, error, event_type=kind)
            case Unavailable(error):
                return events.Unreachable(*who, error, event_type=kind)
            case _:
                return events.CompletedEvent(*who, event_type=kind)

    def expect(self, *, error: BaseException | None = None, known: bool = False) -> None:
        """Say what the next settle means."""
        self._error, self._known = error, known

    def note_settled(self, item: Item, answer: Answer) -> None:
        """Report the answer to a settle of its claim."""
        if not isinstance(item, Settle) or isinstance(answer, Unavailable):
            return
        error = self._error or NotStarted()
        if isinstance(answer, Lost):
            self.note_outcome(answer)
        elif item.to == "failed":
            self.note_outcome(Failed(error))
        elif item.to == "released":
            self.note_outcome(Errored(error, self._attempt, item.delay_us / 1e6))
        elif self._known:
            self._hooks(
                events.Dropped(*self._who, event_type=self._type)
            )  # the claim is not in flight any more
            self.duplicate(Completed())
        else:
            self.note_outcome(Done(None))

    @property
    def _attempt(self) -> int:
        return self._answer.attempt if isinstance(self._answer, Granted) else 0

    def duplicate(self, answer: Any, *, suppressed: bool = True) -> None:
        """Report a duplicate and its reason."""
        lag_s = self._hooks.since_s(answer.first_seen_us) if isinstance(answer, Known) else None
        self._hooks(
            events.Duplicate(
                *self._who,
                self._reason(answer),
                _state(answer),
                lag_s,
                suppressed,
                self._origin,
                self._parks and isinstance(answer, Busy),
                event_type=self._type,
            )
        )

    def _reason(self, answer: Any) -> Reason:
        if isinstance(answer, Mismatch):
            return "reuse"
        if self._redelivered is not None:
            return "redelivery" if self._redelivered else "producer"
        return "race" if self._waited or isinstance(answer, Busy) else "redelivery"


_ANSWERS: dict[type, str] = {
    Happened: "happened",
    DidNotHappen: "did_not_happen",
    CannotTell: "cannot_tell",
}


def _state(answer: Any) -> str:
    if isinstance(answer, Known):
        return answer.state
    match answer:
        case Busy():
            return "claimed"
        case Unknown():
            return "unknown"
        case Mismatch():
            return ""
        case _:
            return "marked"


def _words(answer: Any) -> dict[str, str] | None:
    """Read the metadata of a record."""
    return _read_meta(answer.meta) if isinstance(answer, Record) else None


def _read_meta(meta: bytes | None) -> dict[str, str] | None:
    if meta is None:
        return None
    try:
        return msgspec.json.decode(meta, type=dict[str, str])
    except msgspec.MsgspecError:
        return None


# --- the plain verbs ----------------------------------------------------------------------------


def report_claimed(
    hooks: Hooks, claims: Sequence[Claim], answers: Sequence[Answer], source: str = ""
) -> None:
    """Report the answers to claims by hand."""
    for claim, answer in zip(claims, answers, strict=True):
        observer = FlowObserver(hooks, claim, source=source)
        observer.note_received()
        observer.note_claim_answer(answer)
        match answer:
            case Granted():
                pass
            case Late() | Unavailable():
                observer.note_outcome(answer)
            case _:
                observer.duplicate(answer)


_SETTLED: dict[str, type[events.DeliveryEvent]] = {
    "done": events.CompletedEvent,
    "unknown": events.Quarantined,
}


def report_settled(
    hooks: Hooks,
    items: Iterable[Item],
    verdicts: Iterable[Answer],
    event_types: Iterable[str] | None = None,
    error: BaseException | None = None,
    source: str = "",
) -> None:
    """Report the settlement of claims by hand; `event_types`: those of their claims. `error`: of their block."""
    for item, verdict, kind in zip(
        items, verdicts, event_types or repeat(""), strict=event_types is not None
    ):
        if not isinstance(item, Settle):
            continue
        who = (*item.id, item.owner, "", source)
        if isinstance(verdict, Completed) and item.to == "failed":
            hooks(events.FailedEvent(*who, error=error or _kind(item.value), event_type=kind))
        elif isinstance(verdict, Completed) and item.to == "released":
            hooks(events.Released(*who, error, item.delay_us / 1e6, event_type=kind))
        elif isinstance(verdict, Completed):
            hooks(_SETTLED[item.to](*who, event_type=kind))
        elif isinstance(verdict, Lost):
            hooks(events.LostEvent(*who, event_type=kind))
        else:
            hooks(events.Unrecorded(*who, event_type=kind))


def _kind(failure: bytes | None) -> str:
    """Return the kind of error of a stored failure."""
    try:
        return decode_error(failure).kind
    except RecordCorrupt:
        return "undecodable"


def report_marked(
    hooks: Hooks,
    tenant: str,
    consumer: str,
    keys: Sequence[str],
    firsts: Sequence[bool | Outcome[Any]],
    handler: str = "",
    source: str = "",
    *,
    event_type: str = "",
    meta: Mapping[str, str] | None = None,
) -> None:
    """Report marked keys, of mode mark or of an inbox transaction."""
    for key, first in zip(keys, firsts, strict=True):
        who = (tenant, consumer, key, b"", handler, source)
        hooks(events.Received(*who, meta, event_type=event_type))
        if isinstance(first, Errored):
            hooks(events.Released(*who, first.error, event_type=event_type))
        elif isinstance(first, bool) and first:
            hooks(events.MarkedEvent(*who, event_type=event_type))
        elif isinstance(first, Late):
            hooks(events.LateArrivalEvent(*who, first.age_s, event_type=event_type))
        else:
            reason: Reason = "reuse" if isinstance(first, Mismatch) else "redelivery"
            hooks(events.Duplicate(*who, reason, _state(first), event_type=event_type))


def report_copies(
    hooks: Hooks,
    id: Id,  # noqa: A002
    handler: str,
    delivery: Delivery[Any],
    outcome: Outcome[Any],
    *,
    parks: bool = False,
) -> None:
    """Report a later copy of a key in one batch: it came while the first one ran.

    `parks`: if the first did not finish, both are held back and retried.
    """
    who = (*id, b"", handler, delivery.source)
    hooks(events.Received(*who, delivery.meta, delivery.again, event_type=delivery.event_type))
    reason: Reason = "reuse" if isinstance(outcome, Mismatch) else "race"
    parked = parks and isinstance(outcome, Busy | Errored | Unavailable | Lost)
    hooks(events.Duplicate(*who, reason, "claimed", parked=parked, event_type=delivery.event_type))
