"""Report what a relay does with each row: failures to the log, everything to hooks."""

import logging
from collections.abc import Iterable, Sequence

from semel.core.relay_flow import OutboxRow, RowFailure
from semel.observe import events
from semel.observe.events import Hook, Hooks
from semel.observe.formatting import plural
from semel.observe.limited_log import LimitedLog
from semel.observe.log_format import about

__all__ = ["CONSUMER", "SOURCE", "RowReports"]

CONSUMER = "relay"
SOURCE = "outbox"


class RowReports:
    """Reports the rows of one relay: consumer `relay`, source `outbox`, the sink's kind as the handler.

    A row counts as received when the sink has answered for it, so a sink that is away counts nothing.
    """

    def __init__(self, hooks: Iterable[Hook], rows: str, sink: str) -> None:
        listeners = tuple(hooks)
        self._hooks = Hooks(listeners)
        self._listens = bool(listeners)
        self._rows = rows
        self._handler = sink.partition(":")[0]
        self._log = LimitedLog(logging.getLogger("semel"))

    def report(
        self, rows: Sequence[OutboxRow], published: Sequence[str], failures: Sequence[RowFailure]
    ) -> None:
        """Report the settled ones of these rows."""
        done, failed = set(published), {each.id: each for each in failures if each.reason is not None}
        for row in rows if failed else ():
            if row.id in failed and row.id not in done:
                self._log_failure(row, failed[row.id])
        for row in rows if self._listens else ():
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

    def _log_failure(self, row: OutboxRow, failure: RowFailure) -> None:
        attempt, error = row.attempts + 1, _one_line(failure.reason or "")
        if failure.dead:
            after = "semel outbox retry publishes it, semel outbox drop gives it up"
            self._log.warning(
                "%s: message %s (%r) is dead after %s: %s; %s",
                self._rows, row.id, row.event_type, plural(attempt, "attempt"), error, after,
                extra=about("dead_letter", source=SOURCE, consumer=CONSUMER, key=row.id, reason="failed",
                            attempt=attempt, error=error, next=after),
            )  # fmt: skip
        else:
            after = f"again in {failure.delay_us / 1e6:.1f} s"
            self._log.warning(
                "%s: message %s (%r) was not published, attempt %d: %s; %s",
                self._rows, row.id, row.event_type, attempt, error, after,
                extra=about("failed", source=SOURCE, key=row.id, attempt=attempt, error=error, next=after),
            )  # fmt: skip


def _one_line(text: str) -> str:
    return text if text.isprintable() else ascii(text)


class PublishFailed(Exception):
    """The sink refused a row. Only hooks get it; it is never raised."""
