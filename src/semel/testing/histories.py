"""Check recorded histories of a store: every answer must be the machine's, in some order of the calls.

Wrap the store of each worker process in a `RecordingStore`, let the workers meet as many faults as you like, and give
the files to `check_history`, or to `python -m semel.testing.histories FILE...`. Per key there must be an order of the
calls in which `semel.core.machine.decide` gives each answer that the store gave. A call takes effect between its begin
and its end; a call without an answer takes effect at any time after its begin, or never.
"""

import sys
from argparse import ArgumentParser
from collections.abc import Sequence

from msgspec import Struct

from semel.core.machine import decide
from semel.testing._histories.order import SKEW_US, STEPS_MAX, find_order
from semel.testing._histories.recording import (
    AsyncRecordingStore,
    History,
    HistoryCall,
    RecordingStore,
    read_history,
)
from semel.testing._histories.story import Unexplained, shorten
from semel.testing._histories.times import Rules
from semel.types import Id

__all__ = [
    "AsyncRecordingStore",
    "CheckedHistory",
    "History",
    "HistoryCall",
    "RecordingStore",
    "Unexplained",
    "check_history",
    "read_history",
]

REPEATS_MAX = 3
"""How many requests about one key a store may have sent again by itself. It need not tell the caller."""


class CheckedHistory(Struct):
    """The result of a check."""

    keys: int = 0
    calls: int = 0
    unanswered: int = 0
    """Calls without an answer: killed workers, lost replies."""
    overlapping: int = 0
    """Calls that began before another call about the same key had ended: without any nothing was tested."""
    steps: int = 0
    unexplained: list[Unexplained] = []
    undecided: list[Id] = []
    """Keys whose search was given up after too many steps."""

    @property
    def explained(self) -> bool:
        """Whether every answer is explained."""
        return not self.unexplained and not self.undecided

    def __str__(self) -> str:
        counts = (
            f"{self.keys:,} keys, {self.calls:,} calls, {self.unanswered:,} without an answer,"
            f" {self.overlapping:,} at the same time as another"
        )
        if self.explained:
            return f"{counts}: the machine explains every answer"
        stories = [str(each) for each in self.unexplained]
        stories += [f"key {each[2]!r} was not decided: too many orders" for each in self.undecided]
        return "\n\n".join([counts, *stories])


def check_history(
    history: History,
    *,
    rules: Rules = decide,
    repeats_max: int = REPEATS_MAX,
    skew_us: int = SKEW_US,
    steps_max: int = STEPS_MAX,
    stories_max: int = 3,
) -> CheckedHistory:
    """Check the calls of each key. `stories_max`: how many unexplained keys are shortened and told.

    `repeats_max`: how many requests about one key may have been carried out twice because the store sent them again.
    `skew_us`: how far the store's clock may be from that of the workers.
    """
    result = CheckedHistory(keys=len(history))
    for record_id, calls in history.items():
        result.calls += len(calls)
        result.unanswered += sum(not call.answered for call in calls)
        result.overlapping += _overlapping(calls)
        found = find_order(calls, rules, repeats_max=repeats_max, skew_us=skew_us, steps_max=steps_max)
        result.steps += found.steps
        if found.explained:
            continue
        if not found.complete:
            result.undecided.append(record_id)
        elif len(result.unexplained) < stories_max:
            result.unexplained.append(shorten(record_id, calls, rules, repeats=repeats_max, skew_us=skew_us))
        else:
            result.unexplained.append(
                Unexplained(record_id, calls, story=[f"key {record_id[2]!r} is not explained either"])
            )
    return result


def _overlapping(calls: Sequence[HistoryCall]) -> int:
    count, latest_ns = 0, 0
    for call in calls:
        count += call.begun_ns < latest_ns
        latest_ns = max(latest_ns, call.ended_ns if call.answered else 0)
    return count


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Returns 0 if every answer is explained, 1 if not, 2 for files of something else."""
    parser = ArgumentParser(
        prog="python -m semel.testing.histories", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "files", nargs="+", help="the files that RecordingStore wrote, of all processes of a run"
    )
    parser.add_argument("--repeats-max", type=int, default=REPEATS_MAX, help="default %(default)s")
    parser.add_argument("--skew-us", type=int, default=SKEW_US, help="default %(default)s")
    options = parser.parse_args(arguments)
    try:
        history = read_history(options.files)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    result = check_history(history, repeats_max=options.repeats_max, skew_us=options.skew_us)
    sys.stdout.write(f"{result}\n")
    return int(not result.explained)


if __name__ == "__main__":
    sys.exit(main())
