"""The lines of a handler: note which run, and find those that ran more than once, and the line of the effect."""

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Protocol

from msgspec import Struct

from semel.testing.chaos.ledger import ChaosLedger, HandlerCall

__all__ = [
    "LINE_TIMES_MAX",
    "LineResult",
    "LineTracer",
    "TracedRun",
    "current_run",
    "find_code",
    "judge_lines",
    "lines_of",
]


class TracedRun(Protocol):
    """A run of the handler that wants to know its lines."""

    def reach(self, line: int, share: float | None) -> None:
        """Note a line that is about to run. `share`: of the handler's own lines, how many lie before it."""
        ...


current_run: ContextVar[TracedRun | None] = ContextVar("semel.chaos.run", default=None)


def find_code(handler: Callable[..., Any]) -> CodeType | None:
    """Return the code of a handler written in Python; `None` for another one."""
    inner: Any = inspect.unwrap(handler)
    inner = getattr(inner, "func", inner)  # functools.partial
    if not hasattr(inner, "__code__"):
        inner = getattr(inner, "__func__", vars(type(inner)).get("__call__"))
    code = getattr(inner, "__code__", None)
    return code if isinstance(code, CodeType) else None


def lines_of(code: CodeType) -> list[int]:
    """Return the lines of a function's body, in their order in the file."""
    lines = {line for _, _, line in code.co_lines() if line}
    return sorted(lines - {code.co_firstlineno}) or sorted(lines)


class LineTracer:
    """Calls `reach` of the current run for each line in the handler's file: the handler's and its helpers'."""

    def __init__(self, code: CodeType) -> None:
        self._code = code
        self._file = code.co_filename
        lines = lines_of(code)
        self._shares = {line: place / len(lines) for place, line in enumerate(lines)}

    def install(self) -> None:
        """Trace this thread from now on. A debugger that is there already stays."""
        if sys.gettrace() is None:
            sys.settrace(self._on_call)

    def _on_call(self, frame: FrameType, event: str, arg: Any) -> Any:  # noqa: ARG002 - the interpreter's signature
        if frame.f_code.co_filename != self._file or current_run.get() is None:
            return None
        return self._on_line

    def _on_line(self, frame: FrameType, event: str, arg: Any) -> Any:  # noqa: ARG002 - the interpreter's signature
        if event == "line" and (run := current_run.get()) is not None:
            own = frame.f_code is self._code
            run.reach(frame.f_lineno, self._shares.get(frame.f_lineno) if own else None)
        return self._on_line


LINE_TIMES_MAX = 8
"""How often a line is noted in one run of the handler: enough to see an effect in a loop."""


class LineResult(Struct, frozen=True, kw_only=True):
    """One line of the handler's file."""

    line: int
    text: str
    runs: int
    """In how many runs of the handler it ran; the line of an effect that one run repeats: how often."""
    events_repeated: int
    """For how many events it ran more than once."""
    is_effect: bool
    """Whether it ran as often as the effect was counted, for every event, and few other lines did."""


def judge_lines(ledger: ChaosLedger, effects: Mapping[str, int] | None) -> list[LineResult]:
    """Return the lines that ran, and those of the handler that never did. `effects`: if they were counted elsewhere."""
    found, times_max = _effect_lines(ledger, effects)
    runs: Counter[int] = Counter()
    repeated: Counter[int] = Counter()
    for calls in ledger.calls.values():
        of_event: Counter[int] = Counter()
        for call in calls:
            for line, times in Counter(call.lines_run).items():
                of_event[line] += min(times, times_max if line in found else 1)
        runs.update(of_event)
        repeated.update(line for line, times in of_event.items() if times > 1)
    source = _read(ledger.file)
    own = range(max(1, ledger.line_first), ledger.line_last + 1)
    wanted = sorted({line for line in own if line <= len(source)} | runs.keys())
    return [
        LineResult(
            line=line,
            text=source[line - 1] if line <= len(source) else "",
            runs=runs[line],
            events_repeated=repeated[line],
            is_effect=line in found,
        )
        for line in wanted
    ]


def _effect_lines(ledger: ChaosLedger, effects: Mapping[str, int] | None) -> tuple[set[int], int]:
    """Return the lines that ran as often as the effect happened, for every event, if that says anything.

    It says something if other lines did not, and if an effect was counted twice. The number says how they are counted:
    1, once for each run of the handler; or more, if only that explains the effects: a run repeats its effect. The
    first is tried first, because Python reports some lines twice, such as `with` when it is entered and left.
    """
    if effects is None or max(effects.values(), default=0) < 2:  # noqa: PLR2004 - twice
        return set(), 1
    lines = {line for calls in ledger.calls.values() for call in calls for line in call.lines_run}
    own = range(ledger.line_first, ledger.line_last + 1)
    for times_max in (1, LINE_TIMES_MAX):
        fitting = {
            line
            for line in lines
            if all(
                _fits(line, ledger.calls.get(key, []), times, own, times_max)
                for key, times in effects.items()
            )
        }
        if fitting and len(fitting) < len(lines):
            return fitting, times_max
    return set(), 1


def _fits(line: int, calls: Sequence[HandlerCall], effects: int, own: range, times_max: int) -> bool:
    """Whether a line ran as often as the effect happened. Lines that were under way at a cut may count or not."""
    ran = sure = 0
    for call in calls:
        ran += min(call.lines_run.count(line), times_max)
        sure += min(call.lines_run[: _count_ended(call, own)].count(line), times_max)
    return sure <= effects <= ran


def _count_ended(call: HandlerCall, own: range) -> int:
    """Return how many lines had surely ended when a run was cut: not the handler's last one, nor what that called."""
    lines = call.lines_run
    if call.cut_s is None or call.halted_line:
        return len(lines)
    return max((place for place, line in enumerate(lines) if line in own), default=0)


def _read(file: str) -> list[str]:
    try:
        return Path(file).read_text(encoding="utf-8", errors="replace").splitlines() if file else []
    except OSError:
        return []
