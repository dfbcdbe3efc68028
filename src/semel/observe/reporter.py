"""Report what clients do to hooks. Loaded by the first client that has some."""

from collections.abc import Mapping, Sequence
from typing import Any

from semel.core.commands import Answer, Claim, Flow, Item
from semel.core.protocols import AsyncStore, Store
from semel.core.settlement import Task
from semel.observe.events import DeadLetterStuck, Expired, Hooks
from semel.observe.instrument import (
    FlowObserver,
    instrument_store,
    name_of,
    report_claimed,
    report_copies,
    report_marked,
    report_settled,
)
from semel.runtime.keeper import LiveClaim
from semel.runtime.reporter import Reporter
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
    ) -> Flow[Outcome[Any]]:
        """Return a flow that reports each step of this one."""
        source, redelivered = ("", None) if delivery is None else (delivery.source, delivery.redelivered)
        observer = FlowObserver(
            self._hooks,
            task.claim,
            name_of(handler),
            source,
            redelivered,
            again=delivery is not None and delivery.again,
            parks=task.before_fail is not None,
        )
        return observer.watch(flow, awaits=awaits, observes=observes)

    def report_copy(
        self, record_id: Id, handler: Any, delivery: Delivery[Any], outcome: Outcome[Any], *, parks: bool
    ) -> None:
        """Report a copy as received, and as a duplicate of the first."""
        report_copies(self._hooks, record_id, name_of(handler), delivery, outcome, parks=parks)

    def report_claimed(self, claims: Sequence[Claim], answers: Sequence[Answer]) -> None:
        """Report each claim as received, and its answer."""
        report_claimed(self._hooks, claims, answers)

    def report_settled(self, items: Sequence[Item], answers: Sequence[Answer]) -> None:
        """Report each settled claim."""
        report_settled(self._hooks, items, answers)

    def report_marked(
        self,
        scope: tuple[str, str],
        keys: Sequence[str],
        firsts: Sequence[bool],
        event_type: str,
        meta: Mapping[str, str] | None,
    ) -> None:
        """Report each key as marked, or as a duplicate."""
        report_marked(self._hooks, *scope, keys, firsts, event_type=event_type, meta=meta)

    def report_expired(self, kept: LiveClaim) -> None:
        """Report the claim as expired."""
        self._hooks(Expired(*kept.claim.id, kept.claim.owner))

    def report_stuck_dead_letter(self, record_id: Id, source: str, error: BaseException) -> None:
        """Report the dead letter as stuck."""
        self._hooks(DeadLetterStuck(*record_id, b"", source=source, error=error))
