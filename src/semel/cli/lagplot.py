"""Draw how late duplicates came: a histogram on a logarithmic axis, what each window catches; no library."""

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from math import log10
from xml.sax.saxutils import escape

from semel.windows import exact_text

__all__ = ["svg"]

WIDE, HIGH, LEFT, RIGHT, TOP, BOTTOM = 860, 400, 60, 60, 64, 56
BINS_PER_DECADE = 6
SHORTEST_S = 1.0
"""What came sooner is drawn with what came after a second."""
TICKS_S = (1, 10, 60, 600, 3600, 6 * 3600, 86400, 7 * 86400, 30 * 86400, 365 * 86400)
BARS, CURVE, NOW, SUGGESTED = "#56b4e9", "#000000", "#d55e00", "#009e73"
"""Colours that people tell apart however they see them."""


def svg(seconds: Sequence[float], *, suggested_s: float, current_s: float | None, title: str) -> str:
    """The picture of ascending lags. The left scale is for the bars, the right one for the curve."""
    longest_s = max(seconds[-1], suggested_s, current_s or 0.0) * 1.5
    decades = log10(longest_s / SHORTEST_S)

    def x(at_s: float) -> float:
        return LEFT + (WIDE - LEFT - RIGHT) * log10(max(at_s, SHORTEST_S) / SHORTEST_S) / decades

    floor, height = HIGH - BOTTOM, HIGH - BOTTOM - TOP
    edges = [SHORTEST_S * 10 ** (n / BINS_PER_DECADE) for n in range(int(decades * BINS_PER_DECADE) + 2)]
    bins = [
        bisect_right(seconds, high) - (0 if at == 0 else bisect_right(seconds, low))
        for at, (low, high) in enumerate(itertools.pairwise(edges))
    ]
    most = max(bins)
    lines = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {HIGH}" width="{WIDE}" height="{HIGH}"'
            ' font-family="sans-serif" font-size="12">'
        ),
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="12" y="24" font-size="15" font-weight="bold">{escape(title)}</text>',
    ]
    for low, high, count in zip(edges, edges[1:], bins, strict=False):
        if count:
            tall, right = height * count / most, min(x(high), WIDE - RIGHT)
            lines.append(
                f'<rect x="{x(low):.1f}" y="{floor - tall:.1f}" width="{max(1.0, right - x(low) - 1):.1f}"'
                f' height="{tall:.1f}" fill="{BARS}"><title>{count} up to {high:.3g} s</title></rect>'
            )
    caught = [
        f"{x(edge):.1f},{floor - height * bisect_right(seconds, edge) / len(seconds):.1f}" for edge in edges
    ]
    lines.append(f'<polyline points="{" ".join(caught)}" fill="none" stroke="{CURVE}" stroke-width="1.5"/>')
    for tick_s in (each for each in TICKS_S if each <= longest_s):
        at = x(tick_s)
        lines += [
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{floor}" y2="{floor + 5}" stroke="#000"/>',
            f'<text x="{at:.1f}" y="{floor + 19}" text-anchor="middle">{exact_text(tick_s * 10**6)}</text>',
        ]
    for share in (0.0, 0.5, 1.0):
        y = floor - height * share
        lines += [
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{round(most * share):,}</text>',
            f'<text x="{WIDE - RIGHT + 8}" y="{y + 4:.1f}">{share:.0%}</text>',
        ]
    lines += [
        f'<line x1="{LEFT}" x2="{WIDE - RIGHT}" y1="{floor}" y2="{floor}" stroke="#000"/>',
        (
            f'<text x="{LEFT}" y="{HIGH - 12}">bars: duplicates by how late they came; curve: the share that a window'
            " catches</text>"
        ),
    ]
    for window_s, colour, name, y in (
        (current_s, NOW, "now", TOP - 22),
        (suggested_s, SUGGESTED, "suggested", TOP - 8),
    ):
        if window_s:
            at, text = x(window_s), f"{name}: {exact_text(round(window_s * 1e6))}"
            lines += [
                (
                    f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{y + 2}" y2="{floor}" stroke="{colour}" stroke-width="2"'
                    ' stroke-dasharray="6 3"/>'
                ),
                f'<text x="{at + 4:.1f}" y="{y + 4}" fill="{colour}" font-weight="bold">{escape(text)}</text>',
            ]
    return "\n".join([*lines, "</svg>", ""])
