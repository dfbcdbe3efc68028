"""Report what clients do to hooks. This reporter serves clients without hooks: it reports nothing."""

from collections.abc import Mapping, Sequence
from typing import Any

from semel.core.commands import Answer, Claim, Flow, Item
from semel.core.protocols import AsyncStore, Store
from semel.core.settlement import Task
from semel.runtime.keeper import LiveClaim
from semel.types import Delivery, Id, Outcome

__all__ = ["Reporter"]


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
    ) -> Flow[Outcome[Any]]:
        """Return the flow of a task; with hooks, one that reports each step.

        `awaits`: the handler is awaited. `observes`: it runs whatever the store answers.
        """
        del task, handler, delivery, awaits, observes
        return flow

    def report_copy(
        self, record_id: Id, handler: Any, delivery: Delivery[Any], outcome: Outcome[Any], *, parks: bool
    ) -> None:
        """Report the outcome of a later copy of a key in a batch. `parks`: a runner keeps it if the first is busy."""

    def report_claimed(self, claims: Sequence[Claim], answers: Sequence[Answer]) -> None:
        """Report the answers to claims made with `claim`."""

    def report_settled(self, items: Sequence[Item], answers: Sequence[Answer]) -> None:
        """Report the answers to settles of claims made with `claim`."""

    def report_marked(
        self,
        scope: tuple[str, str],
        keys: Sequence[str],
        firsts: Sequence[bool],
        event_type: str,
        meta: Mapping[str, str] | None,
    ) -> None:
        """Report marked keys, in mode mark or in a transaction. `scope`: tenant and consumer."""

    def report_expired(self, kept: LiveClaim) -> None:
        """Report a claim whose lease could not be renewed in time."""

    def report_stuck_dead_letter(self, record_id: Id, source: str, error: BaseException) -> None:
        """Report a dead letter that could not be written; its message stays at the broker."""
