"""Render docs/explain/guarantees.md from the table that the tests compare with measurements.

`python -m tests.faults.render_guarantees` writes the page; `--check` only says whether it is up to date.
"""

import sys
import textwrap
from pathlib import Path

from tests.faults.table import GUARANTEES, LOST, NEVER, ONCE, POWER_FAILS, STEPS, WINDOWS, Cell

PAGE = Path(__file__).resolve().parents[2] / "docs" / "explain" / "guarantees.md"

STRONGEST = "exactly " + "once"
"""In two halves: the words themselves stand only on the page, beside the table that shows them."""

PROMISES: dict[str, str] = {
    "inbox": (
        f"{STRONGEST.capitalize()} in this database: the mark and the effect commit together or not at all."
        " Whatever the handler does outside of that transaction is at least once; write an outbox row instead."
    ),
    "lease, keyed sink": (
        "The handler may run again, at most `max_attempts` times; a sink that honours the idempotency key which the"
        f" handler is given sees one effect. The key is the same on every attempt: {STRONGEST}, for as long as that"
        " sink remembers its keys."
    ),
    "lease, fenced sink": (
        "A fence stops zombies, not re-runs: a worker that lost its claim cannot write after its successor, but a"
        " death between effect and completion repeats the effect."
    ),
    "lease, plain sink": (
        "At least once. The effect repeats only where a worker dies, stalls or is cut off between its effect and the"
        " moment its completion is stored; at most once more for each such attempt."
    ),
    "lease, probe": (
        "As lease with a plain sink, and before an event runs again `Policy(probe=...)` asks the called system whether"
        " an earlier attempt had its effect. The numbers hold for a probe whose answers are true and final: *did not"
        " happen* means that no call of an earlier attempt can still arrive. A probe that only looks cannot see what is"
        " under way, and one that cannot tell lets the event run again: then it is a plain sink."
    ),
    "quarantine": (
        "Never run again unasked. Where nobody can know whether the effect happened, the record says `unknown` and"
        " stays until a prober or an operator resolves it."
    ),
    "quarantine, probe": (
        "The probe is asked first, with the same conditions: what it can tell is recorded or run again, and only what"
        " it cannot tell stays `unknown` for a person."
    ),
    "mark": (
        "At most once while the mark lives: never twice, and lost where the worker dies after marking, where a mark"
        " gets no answer, and where the handler raises."
    ),
    "transaction": (
        "Kafka to Kafka, for readers of what is committed: a redelivery never produces twice, because the offset moves"
        " in the transaction that holds the output. A copy that the producer sent again runs where a worker dies,"
        " stalls or is cut off between that commit and the moment its completion is stored, and where the store lost"
        " the key."
    ),
    "transaction, marks": (
        f"{STRONGEST.capitalize()} from Kafka to Kafka, for readers of what is committed, where copies of an event come"
        " in its own partition: each key is also kept in a compacted topic, in the same transaction. Whatever the"
        " handler does elsewhere is at least once."
    ),
    "observe": "Nothing is suppressed: it only counts what would have been a duplicate. For introducing semel.",
}
USE_FOR: dict[str, str] = {
    "inbox": "money, stock: anything that lives in one database",
    "lease, keyed sink": "calls to systems that take an idempotency key",
    "lease, fenced sink": "storage that can compare a number",
    "lease, plain sink": "calls that may repeat now and then",
    "lease, probe": "calls to systems that can be asked",
    "quarantine": "mails, payments without idempotency of their own",
    "quarantine, probe": "payments that can be looked up",
    "mark": "metrics, warming a cache",
    "transaction": "stream topologies whose producers repeat little",
    "transaction, marks": "stream topologies",
    "observe": "looking before you leap",
}

INTRODUCTION = """\
# What holds, and when

<!-- Rendered from the table in tests/faults/table.py by `python -m tests.faults.render_guarantees`; do not edit. -->

The number is how often the effect is in the world in the end, when the source delivers the event
again until it is acknowledged. It is measured: each flow is stopped at each of its steps, on every
embedded store, the inbox on PostgreSQL as well, and real processes are killed with `kill -9` or
stopped past their lease; a test fails where a measurement and this page differ. How that is done is
told in [how it is proved](how-it-is-proved.md). The columns of transactions are measured on a real
Kafka broker, with the event delivered again by the group and sent again by its producer.
"""

READING = """\
*flagged*: the record is `unknown` and waits for a decision, and every duplicate is told so. A dash:
the window does not exist in that mode, because there is no such message.

The rows in which nothing dies are as important as the others. A reply that is lost costs nothing
where the same call may be repeated with the same owner, and a message that arrives after its sender
gave up must not undo what others did since. `mark` has neither owner nor claim, so a mark without
an answer is not repeated: it is reported, because guessing would lose or repeat the event.

*The store loses the record* means after the event was done: a flush, an eviction, a failover to an
empty node. With an inbox the effect goes with the record, so they are gone or kept together. A
keyed sink still knows the key.
"""

STEPS_TEXT = """\
## Steps

An effect inside `semel.step` is noted in the record when it returns; a later attempt does not
repeat it. Lease, plain sink, effect inside a step:
"""

UNWAITED_TEXT = """\
## Claims that are not waited for

PostgreSQL with `durable_claims=False` answers a claim before its commit is on disk. The death of a
worker costs what the table above says. A power failure of the store may undo the claims of the last
moments (three times `wal_writer_delay`, 0.6 s, unless the server is set up otherwise): such an
event can be claimed again before its lease would have ended. A completion is on disk when it is
answered, and its claim with it. Claims in quarantine and journaled claims are always waited for.
Lease, plain sink, the power of the store fails:
"""

LIMITS = """\
## What this does not say

- A key is remembered for its window. The same key after that is a new event.
- The sink's own memory counts: a keyed sink that forgets its keys earlier than semel retries is a
  plain one.
- A plain or fenced effect that was sent and not answered may still be under way when the next
  attempt runs.
- With `Policy(on_unavailable="run")` nothing of this holds while the store cannot be reached:
  handlers then run without a claim, and so do duplicates.
- `max_attempts` bounds the attempts: an event that kills its worker each time is failed for good,
  not lost, and its record says so.
- A store that forgets more than it should (see the last row) cannot be made up for by any protocol
  above it.
"""


def cell(value: Cell | None) -> str:
    """One number of the table."""
    if value is NEVER:
        return "-"
    if value == LOST:
        return "**0, lost**"
    return str(value) if value == ONCE else f"**{value}**"


def table() -> str:
    """Windows down, modes across."""
    lines = ["| | " + " | ".join(GUARANTEES) + " |", "|---" * (len(GUARANTEES) + 1) + "|"]
    for window, title in WINDOWS.items():
        cells = " | ".join(cell(cells[window]) for cells in GUARANTEES.values())
        lines.append(f"| {title} | {cells} |")
    return "\n".join(lines) + "\n"


def promises() -> str:
    """One honest sentence per mode."""
    for mode, sentence in PROMISES.items():
        if STRONGEST in sentence.lower():
            assert all(value in (ONCE, NEVER) for value in GUARANTEES[mode].values()), mode
    return "".join(item(f"**{mode}**, for {USE_FOR[mode]}. {PROMISES[mode]}") for mode in GUARANTEES)


def item(text: str) -> str:
    """One item of a list, wrapped as all pages are."""
    return (
        textwrap.fill(text, 100, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False) + "\n"
    )


def steps() -> str:
    """What a step saves."""
    lines = [
        "| | effects |",
        "|---|---|",
        *(f"| {title} | {cell(value)} |" for title, value in STEPS.items()),
    ]
    return "\n".join(lines) + "\n"


def power() -> str:
    """What a power failure of the store costs."""
    lines = [
        "| | effects | with `durable_claims=False` |",
        "|---|---|---|",
        *(
            f"| {title} | {cell(waited)} | {cell(not_waited)} |"
            for title, (waited, not_waited) in POWER_FAILS.items()
        ),
    ]
    return "\n".join(lines) + "\n"


def page() -> str:
    """The whole page."""
    parts = [
        INTRODUCTION,
        table(),
        READING,
        "## By name\n",
        promises(),
        STEPS_TEXT,
        steps(),
        UNWAITED_TEXT,
        power(),
        LIMITS,
    ]
    return "\n".join(parts)


def main() -> int:
    """Write the page, or with `--check` compare it."""
    if "--check" in sys.argv[1:]:
        return int(not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page())
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
