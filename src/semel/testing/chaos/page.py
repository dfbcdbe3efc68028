"""Render the report of a chaos run as one HTML page, with its timeline as SVG, without any other file."""

from collections.abc import Callable, Iterable, Sequence
from html import escape
from importlib.resources import files
from pathlib import PurePath
from string import Template

from semel.observe.formatting import plural
from semel.observe.guarantees import WINDOWS
from semel.testing.chaos.messages import PHASES
from semel.testing.chaos.report import ChaosReport, describe_fault, promise_text
from semel.testing.chaos.verdict import EventResult

__all__ = ["render_page"]

EVENTS_SHOWN_MAX = 2000
FAULTS_SHOWN_MAX = 2000


def render_page(report: ChaosReport) -> str:
    """Return the page. It follows the reader's choice of dark or light."""
    folder = files("semel.testing.chaos")
    verdict_class, sign, verdict = _verdict(report)
    return Template((folder / "page.html").read_text(encoding="utf-8")).substitute(
        css=(folder / "page.css").read_text(encoding="utf-8").strip(),
        title=escape(f"{report.handler}, {'held' if report.held else 'broken'}"),
        handler=escape(report.handler),
        facts=escape(_facts(report)),
        verdict_class=verdict_class,
        verdict_sign=sign,
        verdict=escape(verdict),
        verdict_lines="".join(f"<p class=soft>{escape(each)}</p>" for each in report.broken),
        tiles=_tiles(report),
        timeline=draw_timeline(report),
        how=escape(report.how),
        windows=_windows(report),
        counted_by=escape(report.counted_by),
        lines=_lines(report),
        events=_events(report.events),
        faults_title=escape(plural(len(report.faults), "fault")),
        faults=_faults(report),
        notes=_notes(report),
        command=escape(report.command),
    )


def _facts(report: ChaosReport) -> str:
    mode = f"{report.mode} ({report.sink} sink)" if report.mode == "lease" else report.mode
    return (
        f"mode {mode} · store {report.store} · deliveries from {report.source} · lease {report.lease_s:g} s ·"
        f" seed {report.seed} · {plural(report.rounds, 'round')} in {report.seconds:.1f} s"
    )


def _verdict(report: ChaosReport) -> tuple[str, str, str]:
    if not report.held:
        return "broken", "&#10007;", f"Broken: mode {report.mode} promises more than what happened."
    if report.doubled or report.lost:
        happened = f"{len(report.doubled)} doubled and {len(report.lost)} lost"
        told = f"Held, and no more: {happened}, as the table of guarantees allows after such faults."
        return "allowed", "&#8776;", told
    return "", "&#10003;", f"Held: every promise of mode {report.mode}."


def _tiles(report: ChaosReport) -> str:
    broken = not report.held
    tiles: list[tuple[int, str, str]] = [
        (len(report.events), "events", ""),
        (sum(event.deliveries for event in report.events), "deliveries", ""),
        (len(report.spans), "runs of the handler", ""),
        (len(report.faults), "faults", ""),
        (len(report.keys("once")), "once", "good"),
        (len(report.doubled), "doubled", "bad" if broken else "warn"),
        (len(report.lost), "lost", "bad" if broken else "warn"),
        (len(report.undecided) + len(report.keys("failed")), "undecided or failed", "warn"),
    ]
    return "".join(
        f'<div class="tile {kind if number else ""}"><b>{number:,}</b><span>{name}</span></div>'
        for number, name, kind in tiles
    )


def _windows(report: ChaosReport) -> str:
    rows = []
    for window in report.windows:
        happened = ", ".join(
            f"{times} for {plural(number, 'event')}" for times, number in window.effects.items()
        )
        verdict = "" if not window.events else _badge("held" if window.kept else "broken")
        rows.append(
            _row(
                escape(window.text),
                escape(promise_text(window.promised)),
                (f"{window.events}" if window.events else "-",),
                (f"{window.alone}" if window.events else "-",),
                escape(happened or "-"),
                verdict,
            )
        )
    return "".join(rows)


def _lines(report: ChaosReport) -> str:
    if not any(line.runs for line in report.lines):
        return ""
    rows = []
    for line in report.lines:
        kind = (
            "effect" if line.is_effect and line.events_repeated else "twice" if line.events_repeated else ""
        )
        again = f"more than once for {plural(line.events_repeated, 'event')}" if line.events_repeated else ""
        if line.is_effect:
            again = f"{again}; ran as often as the effect was counted".lstrip("; ")
        runs = plural(line.runs, "time" if line.is_effect else "run") if line.runs else ""
        rows.append(
            f'<tr class="{kind}"><td class="number">{line.line}</td><td class=code>{escape(line.text)}</td>'
            f"<td class=note>{runs}</td><td class=note>{again}</td></tr>"
        )
    rolled = (
        " Runs that were rolled back with their transaction count here too." if report.mode == "inbox" else ""
    )
    return (
        f"<section class=card><h2>Lines of the handler that ran more than once</h2><p class=soft>"
        f"{escape(PurePath(report.file).name)}.{rolled}</p><div class=scroll><table class=source><tbody>{''.join(rows)}"
        "</tbody></table></div></section>"
    )


def _events(events: Sequence[EventResult]) -> str:
    notable = [event for event in events if event.state != "once" or not event.kept]
    notable.sort(key=lambda event: (event.kept, event.number))
    parts = [_event_table(notable)] if notable else ["<p>Every event had its effect once.</p>"]
    shown = events[:EVENTS_SHOWN_MAX]
    more = "" if len(shown) == len(events) else f" (the first {len(shown)})"
    parts.append(f"<details><summary>All {len(events)} events{more}</summary>{_event_table(shown)}</details>")
    return "".join(parts)


def _event_table(events: Iterable[EventResult]) -> str:
    rows = [
        _row(
            f"<code>{escape(event.key)}</code>",
            _badge(event.state) + (_badge("broken") if not event.kept else ""),
            (f"{event.effects}",),
            (f"{event.allowed[0]} to {event.allowed[1]}" if event.allowed[0] != event.allowed[1] else "1",),
            (f"{event.deliveries}",),
            (f"{event.runs}" + (f", {event.runs_cut} cut" if event.runs_cut else ""),),
            escape("; ".join(WINDOWS[window] for window in event.windows) or "no fault"),
        )
        for event in events
    ]
    heads = (
        "<th>event</th><th></th><th class=n>effects</th><th class=n>allowed</th><th class=n>deliveries</th>"
        "<th class=n>runs</th><th>may have been hit in</th>"
    )
    return f"<div class=scroll><table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"


def _faults(report: ChaosReport) -> str:
    rows = []
    for fault in report.faults[:FAULTS_SHOWN_MAX]:
        lasted = f" for {fault.lasted_s:.2f} s" if fault.lasted_s else ""
        where = "" if fault.phase is None else PHASES[fault.phase]
        if fault.phase == "line" and fault.line:
            where = f"before line {fault.line}"
        rows.append(
            _row(
                (f"{fault.at_s:.2f} s",),
                (f"{fault.worker}",),
                escape(f"{fault.kind}{lasted}"),
                escape(where),
                f"<code>{escape(fault.key)}</code>",
                (f"{len(fault.hit)}",),
            )
        )
    return "".join(rows)


def _notes(report: ChaosReport) -> str:
    said = [*report.weaknesses, *(f"Not done here: {each}." for each in report.not_injected)]
    if not said:
        return ""
    items = "".join(f"<li>{escape(each)}</li>" for each in said)
    return f"<section class=card><h2>What semel explain adds, and what was not tried</h2><ul>{items}</ul></section>"


def _badge(word: str) -> str:
    return f'<span class="badge {word}">{word}</span> '


def _row(*cells: str | tuple[str]) -> str:
    """Return a row of a table; a cell in a tuple is a number."""
    return "<tr>" + "".join(
        f"<td class=n>{cell[0]}</td>" if isinstance(cell, tuple) else f"<td>{cell}</td>" for cell in cells
    ) + "</tr>"  # fmt: skip


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
