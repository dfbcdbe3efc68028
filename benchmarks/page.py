"""Write the results of the suite: the page of the documentation, the plots, and the part of the README."""

import re
from collections.abc import Iterator
from math import log10
from pathlib import Path

import msgspec

from benchmarks.aims import OBSTACLES, aims_table
from benchmarks.growth import Point
from benchmarks.layers import Layer
from benchmarks.methods import Method

__all__ = ["Report", "Row", "page_text", "readme_text", "svg", "write"]

ROOT = Path(__file__).resolve().parents[1]
BUSY = 2.0
"""A load above the number of cores: the page says that the computer was busy."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One contender in one phase, medians of the rounds."""

    store: str
    shape: str
    contender: str
    phase: str
    rate: float
    client_us: float
    server_us: float
    p50_us: float | None = None
    p99_us: float | None = None
    ratio: float | None = None
    """Processor time of client and server, relative to by hand, one by one."""
    ratio_least: float | None = None
    """The least ratio of a round, between the two costs of that round."""
    noise: float = 0.0
    """The spread of the rounds, as a share of their median."""
    bytes_each: float | None = None
    """What the store grew by for each first event."""

    @property
    def place(self) -> tuple[str, str, str, str]:
        """The identity of a row, by which two runs are compared."""
        return self.store, self.shape, self.contender, self.phase

    @property
    def cpu_us(self) -> float:
        """Processor time of client and server."""
        return self.client_us + self.server_us


class Report(msgspec.Struct, kw_only=True):
    """The figures, and the computer and versions they were measured on."""

    versions: dict[str, str]
    quick: bool
    rounds: int
    cores: int
    loads: tuple[float, float]
    """The least and the greatest load of the computer while measuring."""
    rows: list[Row] = []
    growth: list[Point] = []
    growth_disk: str = "disk"
    """Where the files were while the stores grew: on a `disk`, or in `memory`, where writes cost no waiting."""
    growth_loads: tuple[float, float] = (0.0, 0.0)
    """The loads while the stores grew, which may have been another day."""
    methods: list[Method] = []
    layers: list[Layer] = []
    layers_loads: tuple[float, float] = (0.0, 0.0)

    @property
    def busy(self) -> bool:
        """Whether other work disturbed the measuring."""
        return self.loads[1] > BUSY * self.cores


COLOURS = {
    "semel": "#2563eb",
    "by hand": "#64748b",
    "idemkit": "#d97706",
    "powertools": "#db2777",
    "dbos": "#059669",
    "asgi-idempotency-header": "#7c3aed",
}
CURVES = ("#2563eb", "#dc2626", "#d97706", "#7c3aed", "#059669")
WIDTH, ROW, LEFT, TOP = 760, 17, 290, 40
PLOT_HEIGHT = 300


def write(report: Report, results: Path, *, docs: bool) -> None:
    """Write the figures and plots into `results`; with `docs` also the page and the README."""
    results.mkdir(parents=True, exist_ok=True)
    (results / "suite.json").write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    (results / "suite.svg").write_text(_bars(report.rows), encoding="utf-8")
    if report.growth:
        (results / "growth.svg").write_text(_lines(report.growth), encoding="utf-8")
    if docs:
        (ROOT / "docs" / "explain" / "benchmarks.md").write_text(page_text(report), encoding="utf-8")
        if report.rows:
            readme = ROOT / "README.md"
            readme.write_text(readme_text(report, readme.read_text(encoding="utf-8")), encoding="utf-8")


def page_text(report: Report) -> str:
    """Return the page of the documentation."""
    return "\n".join(_page(report)) + "\n"


def readme_text(report: Report, readme: str) -> str:
    """Return the README with these figures in it."""
    return re.sub(
        r"(<!-- figures -->\n).*?(<!-- end of figures -->)",
        lambda found: found[1] + "\n".join(_summary(report)) + "\n" + found[2],
        readme,
        flags=re.DOTALL,
    )


# --- plots ---


def svg(height: int, title: str, parts: list[str]) -> str:
    """Return a picture with a title."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}">',
            f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
            f'<g font-family="sans-serif" font-size="11"><text x="10" y="20" font-size="13">{title}</text>',
            *parts,
            "</g></svg>",
            "",
        ]
    )


def _bars(rows: list[Row]) -> str:
    """Bars of processor time per first event, on a logarithmic scale: shorter is better."""
    bars = [row for row in rows if row.phase == "first"]
    height = TOP + ROW * len(bars) + 30
    parts = []
    for power in range(1, 5):
        x = LEFT + _scale(10**power)
        parts.append(f'<line x1="{x}" y1="{TOP - 8}" x2="{x}" y2="{height - 22}" stroke="#e2e8f0"/>')
        parts.append(
            f'<text x="{x}" y="{height - 8}" text-anchor="middle" fill="#475569">{10**power:,}</text>'
        )
    for at, row in enumerate(bars):
        y, width = TOP + at * ROW, _scale(row.cpu_us)
        label = f"{row.store}, {row.shape}: {row.contender}"
        colour = COLOURS[row.contender]
        parts.append(f'<text x="{LEFT - 6}" y="{y + 10}" text-anchor="end">{label}</text>')
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{width}" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{LEFT + width + 4}" y="{y + 10}" fill="#334155">{row.cpu_us:,.0f}</text>')
    title = "Processor time of client and server per new event, in microseconds (logarithmic; less is better)"
    return svg(height, title, parts)


def _scale(us: float) -> int:
    return round((WIDTH - LEFT - 70) * min(max(log10(max(us, 1)), 0) / 4, 1))


def _lines(points: list[Point]) -> str:
    """How much of its rate at the first size each store keeps."""
    held = sorted({point.held for point in points})
    low, high = log10(held[0]), log10(max(held[-1], held[0] * 10))
    left, right, top, bottom = 50, WIDTH - 250, TOP, PLOT_HEIGHT - 40

    def place(point: Point) -> str:
        x = left + (right - left) * (log10(point.held) - low) / (high - low)
        y = bottom - (bottom - top) * min(point.kept, 1.2) / 1.2
        return f"{x:.0f},{y:.0f}"

    parts = []
    for kept in (0, 0.5, 0.8, 1):
        y = bottom - (bottom - top) * kept / 1.2
        parts.append(f'<line x1="{left}" y1="{y:.0f}" x2="{right}" y2="{y:.0f}" stroke="#e2e8f0"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.0f}" text-anchor="end" fill="#475569">{kept}</text>')
    for size in held:
        x = left + (right - left) * (log10(size) - low) / (high - low)
        name = f"{size // 10**6} M" if size >= 10**6 else f"{size // 1000} k"
        parts.append(f'<text x="{x:.0f}" y="{bottom + 16}" text-anchor="middle" fill="#475569">{name}</text>')
    for at, store in enumerate(dict.fromkeys(point.store for point in points)):
        colour = CURVES[at % len(CURVES)]
        path = " ".join(place(point) for point in points if point.store == store)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{right + 12}" y="{TOP + 12 + at * 18}" fill="{colour}">{store}</text>')
    return svg(PLOT_HEIGHT, "Marks held, and the share of the speed at the first size", parts)


# --- text ---


def _page(report: Report) -> Iterator[str]:
    yield from (
        "# Benchmarks",
        "",
        "<!-- Written by `make bench`; do not edit. -->",
        "",
        "Every figure of this page was measured, on one computer: contenders in turns in one run, growth and",
        "the ways to find duplicates in runs of their own. `make bench` repeats it (`ARGS=--quick`: the short",
        "form) and writes this page;",
        "`make bench-check` compares the ratios of a new run with these.",
        "",
        *_circumstances(report),
        "",
        "*Cost* is processor time of client and server together, in microseconds per event; *ratio* is that",
        "cost divided by the cost of the version by hand. Other work on the computer disturbs the cost",
        "less than the rates. *First* is a new event: claim it, run a handler that does nothing, store its",
        "value. *Replay* is a duplicate: return the stored value. *Bytes* is what the store grew by for a",
        "first event. A dash: not measured, or the library has no such store or call.",
        "",
        "*By hand* is a careful version without a library: two Lua scripts with redis-py; `INSERT ... ON",
        "CONFLICT` and `UPDATE` with psycopg; the same on sqlite3. It has no waiting, no renewal of",
        "leases, no fences, no fingerprints and no take-over.",
        "",
        "![processor time per event](../../benchmarks/results/suite.svg)",
    )
    for store in dict.fromkeys(row.store for row in report.rows):
        yield from ("", f"## {store}", "", *_table([row for row in report.rows if row.store == store]))
    if report.rows:
        yield from ("", "## Aims", "", *_aims(report))
    if report.layers:
        yield from ("", "## Where the time goes", "", *_layers(report))
    if report.growth:
        yield from ("", "## Growth", "", *_growth(report))
    if report.methods:
        yield from ("", "## Ways to find duplicates", "", *_methods(report.methods))


def _circumstances(report: Report) -> Iterator[str]:
    low, high = report.loads
    if report.busy:
        yield f"**The computer was busy**: {report.cores} cores with a load of {low:.0f} to {high:.0f}. Rates are far"
        yield "below what it does when it is quiet; ratios vary by tens of per cent."
    else:
        yield f"The computer has {report.cores} cores; its load was {low:.1f} to {high:.1f}."
    form = "the short form: few events" if report.quick else "the long form"
    yield f"Medians of {report.rounds} round{'s' * (report.rounds > 1)}, {form}. Versions:"
    yield from _wrap(
        ", ".join(f"{name} {version}" for name, version in sorted(report.versions.items())) + "."
    )


def _wrap(text: str) -> list[str]:
    import textwrap

    return textwrap.wrap(text, 99, break_on_hyphens=False)


def _table(rows: list[Row]) -> Iterator[str]:
    yield (
        "| called | library | first / s | replay / s | cost first | cost replay | ratio first / replay"
        " | p50 / p99, us | bytes |"
    )
    yield "|---" * 9 + "|"
    for row in (each for each in rows if each.phase == "first"):
        replay = next(each for each in rows if each.phase == "replay" and each.place[:3] == row.place[:3])
        tail = "-" if row.p50_us is None else f"{row.p50_us:,.0f} / {row.p99_us:,.0f}"
        size = "-" if row.bytes_each is None else f"{row.bytes_each:,.0f}"
        yield (
            f"| {row.shape} | {row.contender} | {row.rate:,.0f} | {replay.rate:,.0f} | {row.cpu_us:,.0f} |"
            f" {replay.cpu_us:,.0f} | {_ratio(row)} / {_ratio(replay)} | {tail} | {size} |"
        )


def _ratio(row: Row) -> str:
    return "-" if row.ratio is None else f"{row.ratio:.2f}"


def _aims(report: Report) -> Iterator[str]:
    yield "What single calls, batches and growth should cost, and what they cost in the tables of this page."
    yield ""
    yield from aims_table(report.rows, report.growth)


def _layers(report: Report) -> Iterator[str]:
    low, high = report.layers_loads
    yield from _wrap(
        "The profile behind the aims that are not reached: processor time of an event in microseconds, the lower"
        " quartile of blocks of few events, in turns. *Store* is the store's own code with its driver, *client* the"
        " rest of the caller's process, *written* the bytes that the caller's process writes to files. The load of the"
        f" computer was {low:.0f} to {high:.0f} on {report.cores} cores: read shares and ratios."
    )
    yield ""
    yield "| store | called | library | phase | client | store | server | written | of by hand |"
    yield "|---" * 9 + "|"
    hand = {
        (each.store, each.called, each.phase): each.total_us
        for each in report.layers
        if each.contender == "by hand"
    }
    for each in report.layers:
        base = hand.get((each.store, each.called, each.phase))
        ratio = "-" if base is None else f"{each.total_us / base:.2f}"
        split = "-" if each.contender == "by hand" or not each.store_us else f"{each.store_us:.0f}"
        written = f"{each.written_bytes:,.0f}" if each.written_bytes else "-"
        yield (
            f"| {each.store} | {each.called} | {each.contender} | {each.phase} | {each.client_us:.0f} | {split} |"
            f" {each.server_us:.0f} | {written} | {ratio} |"
        )
    yield from ("", *OBSTACLES.strip().splitlines())


def _growth(report: Report) -> Iterator[str]:
    points = report.growth
    yield "Marks of random ids in batches of 500, all new. *Keeps* is the cost at the first size divided by"
    yield "the cost here: 1 is flat. Compact marks are laid out for the number at the end of the curve."
    low, high = report.growth_loads
    if high > BUSY * report.cores:
        yield f"**The computer was busy** while they grew: {report.cores} cores, a load of {low:.0f} to {high:.0f}."
        yield "Read the costs and what is kept of them; rates are far below those of a quiet computer. A Redis"
        yield "that rewrites its append-only file does so in another process, whose time counts."
    if report.growth_disk == "memory":
        yield "The files were in memory (tmpfs), so the rates have no waiting for a disk in them; the log and the"
        yield "files were written all the same, and that is in the cost."
    yield from ("", "![growth](../../benchmarks/results/growth.svg)", "")
    yield "| store | marks held | marks / s | client, us | server, us | keeps | bytes each |"
    yield "|---" * 7 + "|"
    for point in points:
        yield (
            f"| {point.store} | {point.held:,} | {point.rate:,.0f} | {point.client_us:.1f} | {point.server_us:.1f} |"
            f" {point.kept:.2f} | {point.bytes_each:.0f} |"
        )


def _methods(found: list[Method]) -> Iterator[str]:
    yield "The comparison that introductions to the subject give, measured here, with semel's marks beside each"
    yield "method. A mark checks its key, expires and, except in memory, is shared by processes."
    yield ""
    yield "| method | called | ids / s | cost, us | MB per million ids | survives |"
    yield "|---" * 6 + "|"
    for each in found:
        yield (
            f"| {each.name} | {each.called} | {each.rate:,.0f} | {each.cpu_us:.1f} |"
            f" {each.megabytes_per_million:,.0f} | {each.survives} |"
        )


SHOWN = {
    "semel": "semel",
    "by hand": "by hand",
    "idemkit": "idemkit",
    "powertools": "Powertools",
    "dbos": "DBOS",
}
"""The columns of the table; contenders without a figure are left out."""


def _summary(report: Report) -> Iterator[str]:
    """The table of the README: single calls and batches, semel beside the others."""
    low, high = report.loads
    state = f"on a busy computer (load {low:.0f} to {high:.0f})" if report.busy else "on a quiet computer"
    yield from _wrap(
        f"Processor time of client and server per event, in microseconds, first / replay, {state} with"
        f" {report.cores} cores, all in turns in one run; events per second in brackets. By hand is a careful version"
        " without a library, which also has no waiting, renewal, fences or take-over."
    )
    yield ""
    found = {row.place: row for row in report.rows}
    measured = {row.contender for row in report.rows}
    contenders = [each for each in SHOWN if each in measured]
    yield f"| | {' | '.join(SHOWN[each] for each in contenders)} |"
    yield "|---" * (len(contenders) + 1) + "|"
    for store, shape in dict.fromkeys(
        (row.store, row.shape) for row in report.rows if row.shape != "HTTP requests"
    ):
        cells = [_cell(found, store, shape, each) for each in contenders]
        yield f"| {store}, {shape} | {' | '.join(cells)} |"
    yield from ("", "![processor time per event](benchmarks/results/suite.svg)", "")


def _cell(found: dict[tuple[str, str, str, str], Row], store: str, shape: str, contender: str) -> str:
    first, replay = (found.get((store, shape, contender, phase)) for phase in ("first", "replay"))
    if first is None or replay is None:
        return "-"
    return f"{first.cpu_us:,.0f} / {replay.cpu_us:,.0f} ({first.rate:,.0f} / {replay.rate:,.0f})"
