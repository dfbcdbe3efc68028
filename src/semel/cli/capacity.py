"""`semel advise --rate`: what each store needs for a rate of events and a window."""

import sys
from typing import Any

from semel.cli.options import parse_bytes, size_text
from semel.cli.output import USAGE, CommandExit, console, print_json, print_rows, say, table
from semel.errors import UsageError
from semel.observe.capacity import LAYOUTS, Plan, parse_rate, plan
from semel.windows import exact_text

__all__ = ["advise_capacity"]

_SCHEMES = {"postgres": "postgresql", "rediss": "redis", "valkey": "redis", "valkeys": "redis"}
HEADERS = (
    "STORE", "LAYOUT", "HELD", "MEMORY", "DISK", "A DAY", "PARTITIONS", "SHARDS", "CORES", "CONNECTIONS", "FITS",
)  # fmt: skip


def advise_capacity(
    rate: str, window_us: int, store: str | None, *, cores: int, memory: str, as_json: bool
) -> None:
    """Print what each layout of the stores needs."""
    try:
        per_s = parse_rate(rate)
    except UsageError as error:
        raise CommandExit(str(error), USAGE) from None
    if not window_us:
        raise CommandExit("the window is off, so nothing is kept; give --window", USAGE)
    plans = plan(
        per_s,
        window_us,
        stores=_stores(store),
        server_cores=cores,
        server_memory_bytes=parse_bytes(memory, "--memory"),
    )
    if as_json:
        document = {"rate_per_s": per_s, "window": exact_text(window_us), "window_s": window_us / 1e6}
        print_json({**document, "plans": [_document(each) for each in plans]})
        return
    rows = [_row(each) for each in plans]
    if not sys.stdout.isatty():
        print_rows(HEADERS, rows)
    else:
        screen = console()
        screen.print(f"{per_s:,.4g} new events a second, window {exact_text(window_us)}\n", markup=False)
        screen.print(table(HEADERS, rows))
    for each in plans:
        for note in each.notes:
            say(f"{each.store}, {each.layout}: {note}.")
    say(
        "From figures that were measured on small computers: docs/explain/scale.md. Measure yours: semel bench."
    )


def _stores(given: str | None) -> tuple[str, ...]:
    if given is None:
        return ()
    scheme = given.partition(":")[0]
    scheme = _SCHEMES.get(scheme, scheme)
    known = sorted({layout.store for layout in LAYOUTS})
    if scheme not in known:
        raise CommandExit(f"no figures for {scheme!r}; choose one of {', '.join(known)}", USAGE)
    return (scheme,)


def _row(each: Plan) -> tuple[str, ...]:
    return (
        each.store,
        each.layout,
        f"{each.held:,}" if each.held else "forever",
        _size(each.memory_bytes),
        _size(each.disk_bytes),
        size_text(each.grows_bytes_per_day),
        f"{each.partitions} of {each.partition_step}" if each.partitions else "-",
        str(each.shards),
        str(each.server_cores) if each.server_cores else "-",
        str(each.connections) if each.connections else "-",
        each.fits,
    )


def _size(bytes_: int | None) -> str:
    return "-" if bytes_ is None else size_text(bytes_)


def _document(each: Plan) -> dict[str, Any]:
    return {
        "store": each.store,
        "layout": each.layout,
        "held": each.held or None,
        "memory_bytes": each.memory_bytes,
        "disk_bytes": each.disk_bytes,
        "bytes_per_day": each.grows_bytes_per_day,
        "partitions": each.partitions or None,
        "partition_step": each.partition_step or None,
        "partition_live_s": each.partition_live_s or None,
        "shards": each.shards,
        "server_cores": each.server_cores or None,
        "client_processes": each.client_processes,
        "connections": each.connections or None,
        "fits": each.fits,
        "notes": list(each.notes),
    }
