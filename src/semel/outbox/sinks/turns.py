"""The order of an aggregate towards a broker that may refuse one message and take the next: one at a time."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence

from semel.core.relaying import Published, OutboxRow, Sent, NotPublished

__all__ = ["BEGIN_MAX_S", "HELD", "LATER", "chains", "in_turns", "stretches"]

BEGIN_MAX_S = 2.0
"""After that nothing more of a batch is begun, so that what is confirmed is marked, and a relay that is told to
stop, soon; the rest comes with the next batch."""
HELD = NotPublished("an earlier one of its aggregate was not published")
LATER = NotPublished("left for the next batch")


async def in_turns(
    rows: Sequence[OutboxRow], send: Callable[[OutboxRow], Awaitable[Sent]], *, begin_max_s: float = BEGIN_MAX_S
) -> list[Sent]:
    """Send each aggregate's rows one after another, and the aggregates beside one another.

    Behind a row that is not published, none of its aggregate is sent. A broker's own order is not enough for
    that: what was sent in one go may be refused in the middle and taken at the end.
    """
    answers: list[Sent] = [LATER] * len(rows)
    give_up_at = time.monotonic() + begin_max_s

    async def follow(places: Sequence[int]) -> None:
        for done, at in enumerate(places):
            answers[at] = await send(rows[at])
            if not isinstance(answers[at], Published):
                for behind in places[done + 1 :]:
                    answers[behind] = HELD
                return
            if time.monotonic() >= give_up_at:
                return

    await asyncio.gather(*map(follow, chains(rows)))
    return answers


def chains(rows: Sequence[OutboxRow]) -> Iterable[list[int]]:
    """The places of each aggregate's rows; a row without one is alone."""
    made: dict[tuple[str, str] | int, list[int]] = {}
    for at, row in enumerate(rows):
        made.setdefault(at if row.aggregate is None else row.aggregate, []).append(at)
    return made.values()


def stretches(rows: Sequence[OutboxRow]) -> list[list[int]]:
    """The places of the rows in rounds: in each, an aggregate's rows go to one destination."""
    made: list[list[int]] = [[]]
    reached: dict[tuple[str, str], tuple[int, str]] = {}
    for at, row in enumerate(rows):
        number = 0
        if row.aggregate is not None:
            number, where = reached.get(row.aggregate, (0, row.destination))
            number += where != row.destination
            reached[row.aggregate] = (number, row.destination)
        if number == len(made):
            made.append([])
        made[number].append(at)
    return made
