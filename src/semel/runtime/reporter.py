"""Report what clients do to hooks. This reporter serves clients without hooks: it reports nothing."""

from collections.abc import Mapping, Sequence
from typing import Any

from semel.core.commands import Answer, Claim, Flow, Item
from semel.core.protocols import AsyncStore, Store
from semel.core.settlement import Task
from semel.runtime.keeper import LiveClaim
from semel.types import Delivery, Id, Outcome

__all__ = ["NOT_OBSERVED", "DeliveryObserver", "Reporter"]


class DeliveryObserver:
    """Reports the events of one delivery. Does nothing; with hooks, a subclass calls them.

    For code that runs deliveries without a flow: handlers inside a transaction.
    """

    def note_claim_answer(self, answer: Any) -> bool:
        """Report the store's answer to the claim, if it is granted or busy."""
        del answer
        return False

    def note_began(self, attempt: int) -> float:
        """Report that the handler is about to be called. Returns the time, for `note_ended`."""
        del attempt
        return 0.0

    def note_ended(self, began: float, error: BaseException | None) -> None:
        """Report that the handler has returned or raised."""

    def note_outcome(self, outcome: Outcome[Any]) -> None:
        """Report how the delivery ended."""

    def expect(self, *, error: BaseException | None = None, known: bool = False) -> None:
        """Say what the next settle means: an error for which it is released, or a duplicate that is only recorded."""

    def note_settled(self, item: Item, answer: Answer) -> None:
        """Report the answer to a settle of its claim; not one that the store did not answer, which is repeated."""


NOT_OBSERVED = DeliveryObserver()


class Reporter:
    """Does nothing; its subclass `semel.observe.reporter.HookReporter` calls hooks."""

    listens: bool = False
    """Whether there are hooks: callers check it before they build data only for a report."""

    def instrument(self, store: Store | AsyncStore) -> Store | AsyncStore:
        """Return the store; with hooks, one that reports its round trips."""
        return store

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
        """Return the flow of a task; with hooks, one that reports each step.

        `awaits`: the handler is awaited. `observes`: it runs whatever the store answers. `source`: of a delivery that
        names none.
        """
        del task, handler, delivery, awaits, observes, source
        return flow

    def observe(self, claim: Claim, handler: Any, delivery: Delivery[Any]) -> DeliveryObserver:
        """Report a delivery of a runner that has no flow as received. Returns the observer for what follows."""
        del claim, handler, delivery
        return NOT_OBSERVED

    def report_copy(
        self, record_id: Id, handler: Any, delivery: Delivery[Any], outcome: Outcome[Any], *, parks: bool
    ) -> None:
        """Report the outcome of a later copy of a key in a batch. `parks`: a runner keeps it if the first is busy."""

    def report_claimed(self, claims: Sequence[Claim], answers: Sequence[Answer]) -> None:
        """Report the answers to claims made with `claim`."""

    def report_settled(
        self,
        items: Sequence[Item],
        answers: Sequence[Answer],
        claims: Sequence[Claim],
        error: BaseException | None = None,
    ) -> None:
        """Report the answers to settles of claims made with `claim`. `error`: why they are released or failed."""

    def report_marked(
        self,
        scope: tuple[str, str],
        keys: Sequence[str],
        firsts: Sequence[bool | Outcome[Any]],
        event_type: str,
        meta: Mapping[str, str] | None,
    ) -> None:
        """Report marked keys, in mode mark or in a transaction. `scope`: tenant and consumer.

        `firsts`: whether each was new; an outcome if it was not marked.
        """

    def report_expired(self, kept: LiveClaim) -> None:
        """Report a claim whose lease could not be renewed in time."""

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
        """Report a written dead letter. Of the delivery, its source and its event type count."""

    def report_stuck_dead_letter(self, record_id: Id, source: str, error: BaseException) -> None:
        """Report a dead letter that could not be written; its message stays at the broker."""
