"""A relay in a process of its own that halts before its second batch, rows in hand, until a line comes in.

`python -m tests.outbox.slow_relay DATABASE SINK SILENT_MAX_S` says `here` when it halts, and ends when told to stop.
"""

import signal
import sys
from collections.abc import Sequence
from typing import Any

from semel.core.relay_flow import OutboxRow, Sent
from semel.outbox.postgres import PostgresRows
from semel.outbox.relay import Relay
from semel.outbox.sinks import sink_for
from semel.stores.postgres import from_url


class Halting:
    """A sink in front of another."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.name, self.ordered, self.batch_max = inner.name, inner.ordered, inner.batch_max
        self.open, self.close = inner.open, inner.close
        self.batches = 0

    async def publish(self, rows: Sequence[OutboxRow], /) -> list[Sent]:
        self.batches += 1
        if self.batches == 2:
            sys.stdout.write("here\n")
            sys.stdout.flush()
            sys.stdin.readline()  # the whole process waits, its signs of life too
        return list(await self.inner.publish(rows))


def main(database: str, sink: str, silent_max_s: str) -> None:
    rows = PostgresRows(from_url(database), silent_max_s=float(silent_max_s))
    relay = Relay(rows, Halting(sink_for(sink)), rows_max=7, poll_s=0.05)
    signal.signal(signal.SIGTERM, lambda _number, _frame: relay.stop())
    relay.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
