"""`semel demo`: kill workers during a storm of duplicates, and count lost and doubled effects."""

from typing import TYPE_CHECKING, Annotated

import typer

from semel.cli.options import JsonOption, ending_on_signals
from semel.cli.output import FAILED, OK, CommandExit, print_json, say

if TYPE_CHECKING:
    from pathlib import Path

    from semel.cli.demo.queue import Mode
    from semel.cli.demo.report import DemoResult

__all__ = ["demo"]

EVENTS_MIN, EVENTS_MAX = 10, 100_000
WORKERS_MIN, WORKERS_MAX = 2, 32
KILLS_MIN, KILLS_MAX = 4, 1000
SEED_MAX = 2**32
LOG_BYTES_MAX = 2000


def demo(
    events: Annotated[
        int, typer.Option(min=EVENTS_MIN, max=EVENTS_MAX, help="How many events happen.")
    ] = 1000,
    workers: Annotated[int, typer.Option(min=WORKERS_MIN, max=WORKERS_MAX, help="How many processes.")] = 4,
    kills: Annotated[
        int,
        typer.Option(
            min=KILLS_MIN, max=KILLS_MAX, help="How often a worker is killed with -9, in each mode."
        ),
    ] = 12,
    seed: Annotated[
        int | None,
        typer.Option(min=0, max=SEED_MAX, help="Repeat the storm of this seed; default: a new one."),
    ] = None,
    control: Annotated[  # noqa: FBT002 - a switch
        bool, typer.Option("--control", help="The same storm without semel: it must show doubles.")
    ] = False,
    json: JsonOption = False,  # noqa: FBT002
) -> int:
    """Kill workers with -9 during a storm of duplicate deliveries, and count lost and doubled effects.

    Runs real processes on one SQLite file in a temporary folder, in inbox mode and in lease mode. The ledgers
    have no unique keys, so a doubled effect is visible. Exit code 1 if a guarantee is broken.
    """
    import secrets
    import sys
    import tempfile
    from pathlib import Path

    from semel.cli.demo.report import document, print_results

    drawn = secrets.randbelow(SEED_MAX) if seed is None else seed
    modes: tuple[Mode, ...] = ("control",) if control else ("inbox", "lease")
    with ending_on_signals(), tempfile.TemporaryDirectory(prefix="semel-demo-") as folder:
        if not json:
            say(f"semel demo --seed {drawn} --events {events} --workers {workers} --kills {kills}")
        shown = sys.stderr.isatty()
        results = _storms(modes, drawn, Path(folder), (events, workers, kills), shown=shown)
    if json:
        print_json(document(results, drawn, workers))
    else:
        print_results(results, drawn)
    return FAILED if any(result.broken for result in results) else OK


def _storms(
    modes: "tuple[Mode, ...]", seed: int, folder: "Path", sizes: tuple[int, int, int], *, shown: bool
) -> "list[DemoResult]":
    from time import monotonic

    from semel.cli.demo.queue import draw
    from semel.cli.demo.report import audit, display
    from semel.cli.demo.run import Storm, StormError
    from semel.cli.demo.worker import new_nursery

    events, workers, kills = sizes
    log = folder / "workers.log"
    results: list[DemoResult] = []
    nursery = new_nursery(log)
    try:
        with display(kills, shown=shown) as step:
            for mode in modes:
                started_at = monotonic()
                plan = draw(mode, seed, events, kills)
                storm = Storm(mode, plan, nursery, folder, step=step)
                progress = storm.run(workers)
                results.append(audit(storm.place, progress, plan.events, monotonic() - started_at))
    except (StormError, OSError) as error:
        said = log.read_text(errors="replace")[-LOG_BYTES_MAX:]
        raise CommandExit(f"the demo failed: {error}\n{said}".rstrip(), FAILED) from error
    finally:
        nursery.close()
    return results
