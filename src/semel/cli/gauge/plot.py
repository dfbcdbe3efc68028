"""Draw the ratios as bars: SVG by hand, and text for a terminal; no library."""

from collections.abc import Sequence
from xml.sax.saxutils import escape

from semel.cli.gauge.measure import Measurement

__all__ = ["bars", "svg"]

FONT = 'font-family="sans-serif" font-size="12"'
BAR_HEIGHT, GAP, LEFT, WIDTH, TOP = 18, 10, 300, 420, 44
EIGHTHS = " ▏▎▍▌▋▊▉"


def bars(rows: Sequence[Measurement], columns: int) -> list[str]:
    """A line per row: its name, its share of the whole as a bar, the ratio. At most `columns` wide."""
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
    """A bar per row, as long as its share of its limit; a tick where the aim is."""
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
