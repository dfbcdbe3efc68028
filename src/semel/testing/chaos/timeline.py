"""Draw the timeline of a chaos run as SVG: workers, runs of the handler, faults."""

from collections.abc import Callable
from html import escape

from semel.testing.chaos.report import ChaosReport, describe_fault

__all__ = ["draw_timeline"]

WIDTH, LEFT, RIGHT, TOP = 1160, 70, 14, 22
LANE, BAR = 30, 14
MARK = 5
RUN_WIDTH_MIN = 1.6
SPANS_MAX = 5000
"""Runs drawn at most: a page of a long run has to open."""
TICKS = 10
STEPS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600)


def draw_timeline(report: ChaosReport) -> str:
    """Return the drawing. Worker processes that followed one another share a lane."""
    lanes = _lanes(report.workers)
    number = max(lanes.values(), default=0) + 1
    seconds = max([report.seconds, 0.001])
    scale = (WIDTH - LEFT - RIGHT) / seconds
    height = TOP + number * LANE + 8

    def at(moment_s: float) -> float:
        return LEFT + min(max(moment_s, 0.0), seconds) * scale

    parts = [
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="Workers, runs and faults over {seconds:.1f} s">'
    ]
    parts += _grid(seconds, at, height)
    for fault in report.faults:
        if fault.kind in ("store cut off", "reply lost", "store slow"):
            width = max(RUN_WIDTH_MIN, at(fault.at_s + fault.lasted_s) - at(fault.at_s))
            parts.append(_box("outage", at(fault.at_s), TOP - 4, width, height - TOP, describe_fault(fault)))
    for worker, began, ended in report.workers:
        top = TOP + lanes[worker] * LANE + (LANE - BAR) / 2
        parts.append(_box("life", at(began), top, max(1.0, at(ended) - at(began)), BAR, f"worker {worker}"))
    for lane in range(number):
        parts.append(f'<text x="4" y="{TOP + lane * LANE + LANE / 2 + 4:.0f}">worker {lane + 1}</text>')
    for span in report.spans[:SPANS_MAX]:
        top = TOP + lanes[span.worker] * LANE + (LANE - BAR) / 2 + 3
        width = max(RUN_WIDTH_MIN, at(span.ended_s) - at(span.began_s))
        said = f"{span.key}: {span.end} after {span.ended_s - span.began_s:.3f} s"
        parts.append(_box(span.end, at(span.began_s), top, width, BAR - 6, said))
    for fault in report.faults:
        middle = TOP + lanes.get(fault.worker, 0) * LANE + LANE / 2
        parts.append(
            _fault(fault.kind, at(fault.at_s), at(fault.at_s + fault.lasted_s), middle, describe_fault(fault))
        )
    return "".join([*parts, "</svg>"])


def _lanes(workers: list[tuple[int, float, float]]) -> dict[int, int]:
    """Return the lane of each worker process: the first one that is free when it begins."""
    free_at: list[float] = []
    lanes: dict[int, int] = {}
    for worker, began, ended in workers:
        lane = next((place for place, until in enumerate(free_at) if until <= began), len(free_at))
        free_at[lane : lane + 1] = [ended]
        lanes[worker] = lane
    return lanes


def _grid(seconds: float, at: Callable[[float], float], height: int) -> list[str]:
    step = next((each for each in STEPS if seconds / each <= TICKS), STEPS[-1])
    parts = []
    for number in range(int(seconds / step) + 1):
        x = at(number * step)
        parts.append(f'<line class="grid" x1="{x:.1f}" y1="{TOP - 6}" x2="{x:.1f}" y2="{height}"/>')
        parts.append(f'<text x="{x:.1f}" y="11" text-anchor="middle">{number * step:g} s</text>')
    return parts


def _box(kind: str, x: float, y: float, width: float, height: float, said: str) -> str:
    return (
        f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2">'
        f"<title>{escape(said)}</title></rect>"
    )


def _fault(kind: str, x: float, x_end: float, y: float, said: str) -> str:
    title = f"<title>{escape(said)}</title>"
    if kind in ("kill", "died by itself"):
        return (
            f'<g class="kill"><path d="M{x - MARK:.1f} {y - MARK:.1f}L{x + MARK:.1f} {y + MARK:.1f}'
            f'M{x + MARK:.1f} {y - MARK:.1f}L{x - MARK:.1f} {y + MARK:.1f}"/>{title}</g>'
        )
    if kind in ("pause", "stall"):
        return _box("pause", x, y - BAR / 2, max(RUN_WIDTH_MIN, x_end - x), BAR, said)
    if kind == "ack lost":
        return f'<circle class="ack" cx="{x:.1f}" cy="{y:.1f}" r="{MARK}">{title}</circle>'
    return ""
