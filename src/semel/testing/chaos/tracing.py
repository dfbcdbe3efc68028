"""Note which lines of a handler run, and let a fault hit between two of them."""

import inspect
import sys
from collections.abc import Callable
from contextvars import ContextVar
from types import CodeType, FrameType
from typing import Any, Protocol

__all__ = ["LineTracer", "TracedRun", "current_run", "find_code", "lines_of"]


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
