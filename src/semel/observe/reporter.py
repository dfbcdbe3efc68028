"""Report what clients do to hooks. Loaded by the first client that has some."""

from collections.abc import Mapping, Sequence
from typing import Any

from semel.core.commands import Answer, Claim, Flow, Item
from semel.core.protocols import AsyncStore, Store
from semel.core.settlement import Task
from semel.observe.events import DeadLettered, DeadLetterStuck, Expired, Hooks, Received
from semel.observe.instrument import (
    FlowObserver,
    report_claimed,
    report_copies,
    report_marked,
    report_settled,
)
from semel.observe.timed_stores import instrument_store
from semel.runtime.handlers import handler_name
from semel.runtime.keeper import LiveClaim
from semel.runtime.reporter import DeliveryObserver, Reporter
from semel.types import Delivery, Id, Outcome

__all__ = ["HookReporter"]


class HookReporter(Reporter):
    """Calls the hooks of a client."""

    listens = True

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks

    def instrument(self, store: Store | AsyncStore) -> Store | AsyncStore:
        """Return a store that reports its round trips."""
        return instrument_store(store, self._hooks)

    def watch(
        self,
        flow: Flow[Outcome[Any]],
        task: Task,
        handler: Any,
        delivery: Delivery[Any] | None,
        *,
        awaits: bool,
        observes: bool,
        source: str = "",
    ) -> Flow[Outcome[Any]]:
        """Return a flow that reports each step of this one."""
        parks = task.before_fail is not None
        observer = self._observer(task.claim, handler, delivery, source, parks=parks)
        return observer.watch(flow, awaits=awaits, observes=observes)

    def observe(self, claim: Claim, handler: Any, delivery: Delivery[Any]) -> DeliveryObserver:
        """Report the delivery as received, and return what reports the rest."""
        observer = self._observer(claim, handler, delivery, "", parks=True)
        observer.note_received()
        return observer

    def _observer(
        self, claim: Claim, handler: Any, delivery: Delivery[Any] | None, source: str, *, parks: bool
    ) -> FlowObserver:
        redelivered, again = (None, False) if delivery is None else (delivery.redelivered, delivery.again)
        source = source if delivery is None else delivery.source or source
        return FlowObserver(
            self._hooks, claim, handler_name(handler), source, redelivered, again=again, parks=parks
        )

    def report_copy(
        self, record_id: Id, handler: Any, delivery: Delivery[Any], outcome: Outcome[Any], *, parks: bool
    ) -> None:
        """Report a copy as received, and as a duplicate of the first."""
        report_copies(self._hooks, record_id, handler_name(handler), delivery, outcome, parks=parks)

    def report_claimed(self, claims: Sequence[Claim], answers: Sequence[Answer]) -> None:
        """Report each claim as received, and its answer."""
        report_claimed(self._hooks, claims, answers)

    def report_settled(
        self,
        items: Sequence[Item],
        answers: Sequence[Answer],
        claims: Sequence[Claim],
        error: BaseException | None = None,
    ) -> None:
        """Report each settled claim."""
        report_settled(self._hooks, items, answers, [claim.event_type for claim in claims], error)

    def report_marked(
        self,
        scope: tuple[str, str],
        keys: Sequence[str],
        firsts: Sequence[bool | Outcome[Any]],
        event_type: str,
        meta: Mapping[str, str] | None,
    ) -> None:
        """Report each key as marked, or as a duplicate."""
        report_marked(self._hooks, *scope, keys, firsts, event_type=event_type, meta=meta)

    def report_expired(self, kept: LiveClaim) -> None:
        """Report the claim as expired."""
        self._hooks(Expired(*kept.claim.id, kept.claim.owner))

    def report_dead_letter(
        self,
        record_id: Id,
        handler: Any,
        delivery: Delivery[Any],
        *,
        reason: str,
        attempts: int,
        error: BaseException | str,
    ) -> None:
        """Report the dead letter."""
        who = (*record_id, b"", handler_name(handler), delivery.source)
        if not record_id[2]:  # without a key it was never claimed, so this is the first that hooks hear of it
            self._hooks(Received(*who, event_type=delivery.event_type))
        self._hooks(DeadLettered(*who, reason, attempts, error, event_type=delivery.event_type))

    def report_stuck_dead_letter(self, record_id: Id, source: str, error: BaseException) -> None:
        """Report the dead letter as stuck."""
        self._hooks(DeadLetterStuck(*record_id, b"", source=source, error=error))
