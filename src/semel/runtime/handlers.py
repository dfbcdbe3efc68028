"""Check handlers before anything is claimed, and name guarded functions."""

import re
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from types import AsyncGeneratorType, CoroutineType, FunctionType, GeneratorType, MethodType
from typing import Any, ParamSpec, TypeVar

from semel.errors import UsageError
from semel.runtime.process import inspect

__all__ = [
    "AWAITABLE",
    "BLOCKING",
    "CO_LATER",
    "NAME_BYTES_MAX",
    "UNFINISHED",
    "awaitable",
    "blocking",
    "code_of",
    "label_of",
    "operation_name",
    "refuse_unfinished",
]

P = ParamSpec("P")
R = TypeVar("R")

NAME_BYTES_MAX = 200
"""Leaves at least 300 bytes of a record's key to the caller's own key."""

CO_GENERATOR = 0x20
CO_COROUTINE = 0x80
CO_ITERABLE_COROUTINE = 0x100
CO_ASYNC_GENERATOR = 0x200
CO_LATER = CO_GENERATOR | CO_COROUTINE | CO_ITERABLE_COROUTINE | CO_ASYNC_GENERATOR
"""Flags of functions whose call runs nothing yet, as in `inspect`, which is slow to load and to call."""
BLOCKING = 0
"""Of these, the flags of a plain function; `Semel` checks any other callable more closely before it calls it."""
AWAITABLE = CO_COROUTINE
"""Of these, the flags of an `async def`; `AsyncSemel` checks any other callable more closely before it awaits it."""

UNFINISHED: frozenset[type] = frozenset((CoroutineType, GeneratorType, AsyncGeneratorType))
"""Types of values that a handler must not return: their work has not run."""
_NAME = re.compile(r"[^\x00-\x20\x7f:]+")
_SCRIPTS = ("__main__", "__mp_main__")
"""Python's names for the module of a script: when it is run, and in a child of `multiprocessing`."""


# --- may it be called? --------------------------------------------------------------------------


def blocking(fn: Callable[P, R]) -> Callable[P, R]:
    """Return the handler if a call runs it to its end. Raises `TypeError` for `async def` and generator functions."""
    if type(fn) is FunctionType and fn.__code__.co_flags & CO_LATER == BLOCKING:
        return fn
    if not callable(fn):
        raise TypeError(f"{fn!r} is not callable; give the function itself, and its arguments after it")
    if _is_coroutine_function(fn):
        raise TypeError(
            f"{label_of(fn)} is async def; a client that blocks cannot await it: use semel.aopen(), or once.twin"
        )
    _refuse_generators(fn)
    return fn


def awaitable(fn: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
    """Return the handler if it can be awaited. Raises `TypeError`: one that blocks would stop the loop."""
    if type(fn) is FunctionType and fn.__code__.co_flags & CO_LATER == AWAITABLE:
        return fn
    if not callable(fn):
        raise TypeError(f"{fn!r} is not callable; give the function itself, and its arguments after it")
    _refuse_generators(fn)
    if _is_coroutine_function(fn):
        return fn
    raise TypeError(
        f"{label_of(fn)} is not async def; an async client needs one, or use semel.open() and a sync client"
    )


def refuse_unfinished(value: Any) -> TypeError:
    """Return the error for a handler that returned a coroutine or a generator instead of running; closes it."""
    if not isinstance(value, AsyncGeneratorType):  # one that never started needs no closing
        value.close()
    kind = type(value).__name__.replace("_", " ")
    return TypeError(
        f"the handler returned a {kind}, so its work has not run; return the finished result"
        " (an async def needs semel.aopen() or once.twin)"
    )


def _refuse_generators(fn: Callable[..., Any]) -> None:
    code = code_of(fn)
    if code is not None and code.co_flags & (CO_GENERATOR | CO_ASYNC_GENERATOR):
        raise TypeError(
            f"{label_of(fn)} is a generator function: calling it runs nothing; return the finished result instead"
        )


def _is_coroutine_function(fn: Callable[..., Any]) -> bool:
    inner = _innermost(fn)
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)


def _innermost(fn: Any) -> Any:
    while isinstance(fn, partial):
        fn = fn.func
    return fn


def code_of(fn: Any) -> Any:
    """Return the code object that a call of `fn` runs, or `None` if it is not written in Python."""
    fn = _innermost(fn)
    if not isinstance(fn, FunctionType | MethodType):
        fn = type(fn).__call__
    return getattr(getattr(fn, "__func__", fn), "__code__", None)


def label_of(fn: Any) -> str:
    """Return the name of a handler for messages."""
    return getattr(_innermost(fn), "__qualname__", None) or repr(fn)


# --- what is a guarded function called? ---------------------------------------------------------


def operation_name(fn: Any, name: str | None) -> str:
    """Return the name that scopes the keys of a guarded function: `name`, else module and qualified name.

    Raises `UsageError` if it has no usable name: a lambda, a partial, a callable object.
    """
    if name is None:
        qualname = getattr(fn, "__qualname__", None)
        if qualname is None or isinstance(fn, partial):
            raise UsageError(f"{fn!r} has no name of its own to keep its records under; add name= to guard")
        if "<lambda>" in qualname:
            raise UsageError(
                f"the lambda {qualname} has no name that tells it from others; add name= to guard, or use def"
            )
        name = f"{_module_of(fn)}.{qualname}"
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"the name {name!r} of a guard must be text without spaces, colons and control characters"
        )
    if len(name.encode(errors="replace")) > NAME_BYTES_MAX:
        raise UsageError(
            f"the name {name!r} of a guard is longer than {NAME_BYTES_MAX} bytes; add a shorter name="
        )
    return name


def _module_of(fn: Any) -> str:
    """Return the module's import name, also if it runs as a script; `__main__` if no better name is known."""
    module: str = fn.__module__ or "__main__"
    if module not in _SCRIPTS:
        return module
    found: dict[str, Any] = getattr(inspect.unwrap(fn), "__globals__", {})
    if found.get("__name__") not in _SCRIPTS:
        found = vars(sys.modules["__main__"])
    if found.get("__spec__") is not None:  # python -m shop.billing
        return str(found["__spec__"].name)
    if not found.get("__file__"):
        return module
    from pathlib import PurePath  # slow to import, and rarely needed

    return PurePath(found["__file__"]).stem  # python billing.py
