"""Examine an outbox for the doctor: what waits too long, what fails, what was given up."""

import time
from collections.abc import Iterator

from semel.errors import SemelError
from semel.observe.doctor import Finding
from semel.outbox.rows import OutboxCounts, Entry, rows_for
from semel.windows import exact_text

__all__ = ["examine"]

STALLED_S = 300.0
"""As the alert: a relay that works has published what is older."""
LOOK_MAX = 500
"""So many of the oldest messages are looked at for those that fail."""


async def examine(url: str) -> list[Finding]:
    """What is wrong with the outbox of a store; nothing where the store cannot have one. Changes no row."""
    try:
        rows = rows_for(url)
    except SemelError:
        return []
    try:
        await rows.open()
        try:
            counts = await rows.counts()
            waiting = await rows.entries("pending", 0, LOOK_MAX)
            dead = await rows.entries("dead", 0, LOOK_MAX)
        finally:
            await rows.close()
    except SemelError as error:
        return [Finding("outbox", "error", str(error), "may this user read the outbox?")]
    return list(_judged(counts, waiting, dead))


def _judged(counts: OutboxCounts, waiting: list[Entry], dead: list[Entry]) -> Iterator[Finding]:
    now = time.time_ns() // 1000
    due = [now - max(each.row.created_at, each.not_before or 0) for each in waiting]
    age_us = max((each for each in due if each >= 0), default=0)  # what is to wait until later does not count
    stalled = age_us > STALLED_S * 1e6
    age = exact_text(age_us // 10**6 * 10**6) if age_us >= 10**6 else "less than 1s"
    what = f"{counts.pending:,} messages wait, the oldest of them due for {age}"
    yield Finding(
        "outbox",
        "warning" if stalled else "ok",
        what if counts.pending else "no message waits to be published",
        "is a relay running? semel relay --to BROKER" if stalled else "",
    )
    failing = [each for each in waiting if each.row.attempts]
    if failing:
        worst = max(failing, key=lambda each: each.row.attempts)
        yield Finding(
            "outbox",
            "warning",
            f"{len(failing):,} messages fail to be published; {worst.row.id} did {worst.row.attempts} times:"
            f" {worst.error or 'no reason was kept'}",
            f"mend what it says; semel outbox show {worst.row.id}",
        )
    if dead:
        behind = {each.row.aggregate for each in dead} & {each.row.aggregate for each in waiting} - {None}
        held = f", and {len(behind):,} aggregates wait behind them" if behind else ""
        yield Finding(
            "outbox",
            "error",
            f"{counts.dead:,} messages were given up{held}: {dead[0].row.id}: {dead[0].error or 'no reason was kept'}",
            "semel outbox list --dead, then semel outbox retry --all or semel outbox drop ID",
        )
