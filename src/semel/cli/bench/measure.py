"""Measure a rate, and compare it with a limit measured beside it."""

import gc
import itertools
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from statistics import median
from typing import NamedTuple
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit
from xml.sax.saxutils import escape

from msgspec import Struct

from semel.cli.output import USAGE, CommandExit
from semel.core.protocols import Store

__all__ = [
    "REPEATS",
    "Fresh",
    "Job",
    "Measurement",
    "Scratch",
    "bars",
    "compare",
    "new_name",
    "rate",
    "scratch_for",
    "svg",
    "with_options",
]

REPEATS = 5
_round = itertools.count()


class Measurement(Struct, frozen=True, kw_only=True):
    """One comparison: the measured rate, the raw limit and the target ratio."""

    store: str
    what: str
    rate: float
    """Per second."""
    limit: str
    limit_rate: float
    aim: float | None = None
    """The target ratio; `None`: no target."""

    @property
    def ratio(self) -> float:
        """The measured rate divided by the limit."""
        return self.rate / self.limit_rate


class Job(Struct, frozen=True):
    """Does `count` operations per call. `fresh` prepares the next call, outside the measured time."""

    run: Callable[[], object]
    count: int
    fresh: Callable[[], object] = lambda: None


class Fresh:
    """Ids that were never used before, 36 characters each, made before the clock starts."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.keys: list[str] = []

    def __call__(self) -> None:
        """Make the next ids."""
        turn = next(_round)
        self.keys = [
            f"0198c0de-{turn >> 16 & 0xFFFF:04x}-7000-{turn & 0xFFFF:04x}-{at:012x}"
            for at in range(self.count)
        ]

    def batches(self, size: int) -> Iterator[list[str]]:
        """Yield the ids in batches."""
        for at in range(0, len(self.keys), size):
            yield self.keys[at : at + size]


def rate(job: Job, seconds: float = 0.0) -> float:
    """Operations per second: of one run, or of as many as fit into `seconds`."""
    done, spent = 0, 0.0
    while not done or spent < seconds:
        job.fresh()
        gc.disable()
        try:
            start = time.perf_counter()
            job.run()
            spent += time.perf_counter() - start
        finally:
            gc.enable()
        done += job.count
    return done / spent


def compare(
    store: str,
    what: str,
    subject: Job,
    limit: str,
    limit_job: Job,
    aim: float | None = None,
    seconds: float = 0.0,
) -> Measurement:
    """Measure both in turns, so that other load affects both alike. Returns medians."""
    gc.collect()
    pairs = [(rate(limit_job, seconds), rate(subject, seconds)) for _ in range(REPEATS)]
    return Measurement(
        store=store,
        what=what,
        rate=median(mine for _, mine in pairs),
        limit=limit,
        limit_rate=median(theirs for theirs, _ in pairs),
        aim=aim,
    )


KINDS = {
    "memory": "memory",
    "sqlite": "sqlite",
    "postgresql": "postgres",
    "postgres": "postgres",
    "redis": "redis",
    "rediss": "redis",
    "valkey": "redis",
    "valkeys": "redis",
}
"""The module that measures the raw limit, by the scheme of the URL."""


class Scratch(NamedTuple):
    """A place to measure in, and the raw operations of the same backend without semel."""

    kind: str
    """The name of the backend in a row."""
    target: str | Store
    """The URL to open clients on."""
    single_limit: str
    """The name of the limit of single operations."""
    single: Callable[[], Job]
    """Runs one raw operation at a time."""
    batch_limit: str
    """The name of the limit of batches; `{size}` stands for the batch size."""
    batch: Callable[[int], Job]
    """Runs raw batches of this size with the same durability."""


def new_name() -> str:
    """Return a name that is not in use."""
    return f"semel_bench_{secrets.token_hex(4)}"


def with_options(url: str, **options: str) -> str:
    """The URL with these options instead of its own."""
    parts = urlsplit(url)
    kept = [(name, text) for name, text in parse_qsl(parts.query) if name not in options]
    return urlunsplit(parts._replace(query=urlencode([*kept, *options.items()])))


@contextmanager
def scratch_for(url: str) -> Iterator[Scratch]:
    """Open a scratch place on the server or disk of the URL; removed at the end. Raises for unknown schemes."""
    scheme = url.partition(":")[0].partition("+")[0]
    if scheme not in KINDS:
        raise CommandExit(
            f"no raw limit is known for {scheme}: stores; bench knows {', '.join(KINDS)}", USAGE
        )
    made: Callable[[str], AbstractContextManager[Scratch]]
    made = import_module(f"semel.cli.bench.raw_{KINDS[scheme]}").scratch
    with made(url) as place:
        yield place


FONT = 'font-family="sans-serif" font-size="12"'
BAR_HEIGHT, GAP, LEFT, WIDTH, TOP = 18, 10, 300, 420, 44
EIGHTHS = " ▏▎▍▌▋▊▉"


def bars(rows: Sequence[Measurement], columns: int) -> list[str]:
    """Return a line per row: its name, the ratio as a bar and as a number. At most `columns` wide."""
    named = max(len(row.what) for row in rows)
    room = max(8, columns - named - 10)
    top = max(1.0, *(row.ratio for row in rows))
    lines = []
    for row in rows:
        eighths = round(row.ratio / top * room * 8)
        bar = "█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()
        lines.append(f"{row.what:>{named}} {bar:<{room}} {row.ratio:6.2f}".rstrip())
    limit = round(room / top)
    return [*lines, f"{'':>{named}} {'│':>{limit}} 1.00 = the raw limit"]


def svg(rows: Sequence[Measurement], title: str) -> str:
    """Return an SVG with a bar per row, as long as its ratio, and a tick at the target."""
    top = max([1.0, *(row.ratio / (row.aim or max(row.ratio, 1.0)) for row in rows)])
    wide, high = LEFT + WIDTH + 190, TOP + len(rows) * (BAR_HEIGHT + GAP) + 20
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}" {FONT}>',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="12" y="24" font-size="15" font-weight="bold">{escape(title)}</text>',
    ]
    for at, row in enumerate(rows):
        y = TOP + at * (BAR_HEIGHT + GAP)
        goal = row.aim or max(row.ratio, 1.0)
        length = WIDTH * (row.ratio / goal) / top
        colour = "#0072b2" if row.aim is None else "#009e73" if row.ratio >= row.aim else "#d55e00"
        aim = "" if row.aim is None else f" (aim {row.aim:g})"
        lines += [
            f'<text x="{LEFT - 8}" y="{y + 13}" text-anchor="end">{escape(f"{row.store}: {row.what}")}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR_HEIGHT}" fill="{colour}"/>',
            f'<text x="{LEFT + length + 6:.1f}" y="{y + 13}">{row.ratio:.2f} x {escape(row.limit)}{aim}</text>',
        ]
        if row.aim is not None:
            x = LEFT + WIDTH / top
            lines.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y - 2}" y2="{y + BAR_HEIGHT + 2}" stroke="#000"/>'
            )
    return "\n".join([*lines, "</svg>", ""])
