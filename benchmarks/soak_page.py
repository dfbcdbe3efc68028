"""Draw a soak: latency, memory and descriptors of each place over time."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import msgspec

from benchmarks.page import CURVES, WIDTH, svg
from benchmarks.soak_worker import Interval

__all__ = ["Sample", "Soak", "SoakedPlace", "plot"]

LEFT, PANEL, GAP, TOP, HEIGHT = 70, 200, 24, 48, 64
SPACE = 34


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One look at a worker and at the servers behind it."""

    at_s: float
    p50_us: float
    p99_us: float
    worker_kb: int
    worker_descriptors: int
    server_kb: int = 0
    server_descriptors: int = 0


class SoakedPlace(msgspec.Struct, kw_only=True):
    """What happened at one place."""

    name: str
    total: Interval
    effects: int
    lost: int
    doubled: int
    samples: list[Sample]

    @property
    def sound(self) -> bool:
        """Whether each event had one effect and every delivery the right answer."""
        return not (self.lost or self.doubled or self.total.wrong)

    def growth(self, figure: Callable[[Sample], float]) -> float:
        """Return how much more it was in the last third than in the middle one, as a share."""
        third = len(self.samples) // 3
        if not third:
            return 0.0
        middle, last = self.samples[third : 2 * third], self.samples[-third:]
        before, after = (sum(map(figure, part)) / len(part) for part in (middle, last))
        return after / before - 1 if before else 0.0


class Soak(msgspec.Struct, kw_only=True):
    """One soak, as it is kept in `results/soak.json`."""

    minutes: float
    rate: float
    """New events a second at each place; each is delivered at least twice."""
    every_s: float
    cores: int
    loads: tuple[float, float]
    versions: dict[str, str]
    on: str
    """The day."""
    places: list[SoakedPlace] = []


def plot(soak: Soak) -> str:
    """Return the picture: a row for each place, a panel for each kind of figure."""
    panels: list[tuple[str, Callable[[Sample], Sequence[float]]]] = [
        ("latency p50, p99 (ms)", lambda each: (each.p50_us / 1e3, each.p99_us / 1e3)),
        ("memory: worker, server (MB)", lambda each: (each.worker_kb / 1e3, each.server_kb / 1e3)),
        ("descriptors: worker, server", lambda each: (each.worker_descriptors, each.server_descriptors)),
    ]
    parts: list[str] = []
    for column, (title, _) in enumerate(panels):
        parts.append(f'<text x="{LEFT + column * (PANEL + GAP)}" y="{TOP - 8}">{title}</text>')
    for row, place in enumerate(soak.places):
        top = TOP + 8 + row * (HEIGHT + SPACE)
        parts.append(f'<text x="8" y="{top + HEIGHT // 2}">{place.name}</text>')
        for column, (_, figures) in enumerate(panels):
            left = LEFT + column * (PANEL + GAP)
            parts += _panel(left, top, [(each.at_s, figures(each)) for each in place.samples])
    title = f"{soak.rate:g} new events a second on each store, for {soak.minutes:g} minutes"
    return svg(TOP + 8 + len(soak.places) * (HEIGHT + SPACE), title, parts)


def _panel(left: int, top: int, points: list[tuple[float, Sequence[float]]]) -> list[str]:
    bottom, width = top + HEIGHT, PANEL - 34
    most = max((max(values) for _, values in points), default=0) or 1
    until_s = max((at for at, _ in points), default=0) or 1
    parts = [
        f'<rect x="{left}" y="{top}" width="{width}" height="{HEIGHT}" fill="#f8fafc" stroke="#e2e8f0"/>'
    ]
    parts.append(
        f'<text x="{left + width + 3}" y="{top + 8}" fill="#475569" font-size="9">{_short(most)}</text>'
    )
    minutes = f"{until_s / 60:.0f} min" if until_s >= 60 else f"{until_s:.0f} s"
    parts.append(
        f'<text x="{left + width}" y="{bottom + 12}" text-anchor="end" fill="#475569" font-size="9">{minutes}</text>'
    )
    for number, colour in enumerate(CURVES[:2]):
        line = [
            (left + width * at / until_s, bottom - HEIGHT * values[number] / most) for at, values in points
        ]
        if any(values[number] for _, values in points):
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in _thinned(line))
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.2"/>')
    return parts


def _thinned(line: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Leave out what cannot be seen: points of a level line."""
    if len(line) < 3:
        return line
    kept = [line[0]]
    kept += [
        here
        for (_, y), (here, (_, after)) in zip(line, pairwise(line[1:]), strict=False)
        if not y == here[1] == after
    ]
    return [*kept, line[-1]]


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.1f}"


assert LEFT + 3 * (PANEL + GAP) <= WIDTH
