"""Report what a relay does with each row to hooks."""

from collections.abc import Iterable, Sequence

from semel.core.relay_flow import OutboxRow, RowFailure
from semel.observe import events
from semel.observe.events import Hook, Hooks

__all__ = ["CONSUMER", "SOURCE", "RowReports"]

CONSUMER = "relay"
SOURCE = "outbox"


class RowReports:
    """Reports the rows of one relay: consumer `relay`, source `outbox`, the sink's kind as the handler.

    A row counts as received when the sink has answered for it, so a sink that is away counts nothing.
    """

    def __init__(self, hooks: Iterable[Hook], sink: str) -> None:
        self._hooks = Hooks(hooks)
        self._handler = sink.partition(":")[0]

    def report(
        self, rows: Sequence[OutboxRow], published: Sequence[str], failures: Sequence[RowFailure]
    ) -> None:
        """Report the settled ones of these rows."""
        done, failed = set(published), {each.id: each for each in failures if each.reason is not None}
        for row in rows:
            who = ("", CONSUMER, row.id, b"", self._handler, SOURCE)
            kind, failure = row.event_type, failed.get(row.id)
            if row.id not in done and failure is None:
                continue
            self._hooks(events.Received(*who, again=row.attempts > 0, event_type=kind))
            if failure is None:
                self._hooks(events.CompletedEvent(*who, event_type=kind))
            elif failure.dead:
                error = PublishFailed(failure.reason)
                self._hooks(events.FailedEvent(*who, error, row.attempts + 1, event_type=kind))
                self._hooks(events.DeadLettered(*who, "failed", row.attempts + 1, error, event_type=kind))
            else:
                error, delay_s = PublishFailed(failure.reason), failure.delay_us / 1e6
                self._hooks(events.Released(*who, error, delay_s, row.attempts + 1, event_type=kind))


class PublishFailed(Exception):
    """The sink refused a row. Only hooks get it; it is never raised."""
