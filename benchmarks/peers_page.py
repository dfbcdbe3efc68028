"""The plot and the page of `python -m benchmarks.peers`."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

__all__ = ["Row", "write_page", "write_plot"]


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
    noise: float = 0.0
    """The spread of the rounds, as a share of their median."""

    @property
    def place(self) -> tuple[str, str, str, str]:
        """The identity of a row, by which two runs are compared."""
        return self.store, self.shape, self.contender, self.phase


COLOURS = {
    "semel": "#2563eb",
    "by hand": "#64748b",
    "idemkit": "#d97706",
    "powertools": "#db2777",
    "dbos": "#059669",
}
WIDTH, ROW, LEFT, TOP = 760, 17, 250, 40


def write_plot(rows: list[Row], file: Path) -> None:
    """Bars of events per second, first time, on a logarithmic scale."""
    bars = [row for row in rows if row.phase == "first"]
    height = TOP + ROW * len(bars) + 30
    most = 10**6
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"',
        ' font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        '<text x="10" y="20" font-size="13">Events per second, first delivery (logarithmic)</text>',
    ]
    for power in range(2, 7):
        x = LEFT + _scale(10**power, most)
        parts.append(f'<line x1="{x}" y1="{TOP - 8}" x2="{x}" y2="{height - 22}" stroke="#e2e8f0"/>')
        parts.append(
            f'<text x="{x}" y="{height - 8}" text-anchor="middle" fill="#475569">{10**power:,}</text>'
        )
    for at, row in enumerate(bars):
        y = TOP + at * ROW
        label = f"{row.store}, {row.shape}: {row.contender}"
        width = _scale(row.rate, most)
        parts.append(f'<text x="{LEFT - 6}" y="{y + 10}" text-anchor="end">{label}</text>')
        parts.append(
            f'<rect x="{LEFT}" y="{y}" width="{width}" height="12" fill="{COLOURS[row.contender]}"/>'
        )
        parts.append(f'<text x="{LEFT + width + 4}" y="{y + 10}" fill="#334155">{row.rate:,.0f}</text>')
    file.write_text("\n".join([*parts, "</svg>", ""]), encoding="utf-8")


def _scale(rate: float, most: float) -> int:
    from math import log10

    return round((WIDTH - LEFT - 70) * max(log10(rate) - 1, 0) / (log10(most) - 1))


def write_page(rows: list[Row], versions: dict[str, str], file: Path) -> None:
    """Write the page of the documentation, with every row."""
    file.write_text("\n".join(_page(rows, versions)) + "\n", encoding="utf-8")


def _page(rows: list[Row], versions: dict[str, str]) -> Iterator[str]:
    yield from (
        "# Benchmarks against others",
        "",
        "<!-- Written by `python -m benchmarks.peers --out benchmarks/results`; do not edit. -->",
        "",
        "Every figure of this page comes from one run on one computer, with all contenders in turns: medians",
        "of three rounds. *First* is a new event: claim it, run a handler that does nothing, store its value.",
        "*Replay* is a duplicate: return the stored value. *By hand* is a careful version without a library:",
        "two Lua scripts with redis-py; `INSERT ... ON CONFLICT` and `UPDATE` with psycopg; the same on",
        "sqlite3. It has no waiting, no renewal of leases, no fences, no fingerprints and no take-over.",
        "",
        "*Cost* is processor time of client and server per event; by hand, one by one, is 1. Rates",
        "depend on the computer and its other load; the cost much less. A dash: not measured, because",
        "the library has no such store or no such call.",
        "",
        "Versions: " + ", ".join(f"{name} {version}" for name, version in sorted(versions.items())) + ".",
        "",
        "![events per second](../../benchmarks/results/peers.svg)",
    )
    for store in dict.fromkeys(row.store for row in rows):
        yield from ("", f"## {store}", "")
        yield "| called | library | first / s | replay / s | cost first | cost replay | p50 / p99 first, us |"
        yield "|---|---|---|---|---|---|---|"
        mine = [row for row in rows if row.store == store]
        for row in (each for each in mine if each.phase == "first"):
            replay = next(each for each in mine if each.phase == "replay" and each.place[:3] == row.place[:3])
            tail = "-" if row.p50_us is None else f"{row.p50_us:,.0f} / {row.p99_us:,.0f}"
            yield (
                f"| {row.shape} | {row.contender} | {row.rate:,.0f} | {replay.rate:,.0f} | {_ratio(row)} |"
                f" {_ratio(replay)} | {tail} |"
            )


def _ratio(row: Row) -> str:
    return "-" if row.ratio is None else f"{row.ratio:.2f}"
