"""Check handlers before anything is claimed, name guarded functions, and read annotations on every Python.

From Python 3.14 on, annotations are evaluated when they are read. One that names something undefined, such as a
class imported for type checkers only, raises then. Here it counts as not given.
"""

import re
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from types import AsyncGeneratorType, CoroutineType, FunctionType, GeneratorType, MethodType, SimpleNamespace
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, get_type_hints
from weakref import WeakKeyDictionary

from semel.errors import PolicyInvalid, UsageError
from semel.runtime.process import inspect

if TYPE_CHECKING:
    from inspect import Signature

__all__ = [
    "AWAITABLE",
    "BLOCKING",
    "CO_LATER",
    "NAME_BYTES_MAX",
    "UNFINISHED",
    "awaitable",
    "blocking",
    "check_takes_event",
    "code_of",
    "handler_name",
    "innermost",
    "label_of",
    "operation_name",
    "parameter_type",
    "refuse_unfinished",
    "return_type",
    "signature_of",
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
    inner = innermost(fn)
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)


def innermost(fn: Any) -> Any:
    """Return the callable inside partials; any other as it is."""
    while isinstance(fn, partial):
        fn = fn.func
    return fn


def code_of(fn: Any) -> Any:
    """Return the code object that a call of `fn` runs, or `None` if it is not written in Python."""
    fn = innermost(fn)
    if not isinstance(fn, FunctionType | MethodType):
        fn = type(fn).__call__
    return getattr(getattr(fn, "__func__", fn), "__code__", None)


def label_of(fn: Any) -> str:
    """Return the name of a handler for messages."""
    return getattr(innermost(fn), "__qualname__", None) or repr(fn)


_names: "WeakKeyDictionary[Any, str]" = WeakKeyDictionary()
"""The names of handlers, by function: a script's module takes long to find."""
_PLAIN = ("builtins", "semel")
"""Packages that a handler's name does not begin with."""


def handler_name(fn: Any) -> str:
    """Return the name of a handler for hooks: its module and qualified name, such as `app.charge`.

    It looks into partials and, by `__wrapped__`, into decorated functions and semel's own wrappers.
    """
    while (inner := getattr(fn, "__wrapped__", None) or getattr(fn, "func", None)) is not None:
        fn = inner
    fn = getattr(fn, "__func__", fn)  # of a method, which is a new object each time
    try:
        found = _names.get(fn)
    except TypeError:  # it can be neither hashed nor referred to
        return _name(fn)
    if found is None:
        found = _names[fn] = _name(fn)
    return found


def _name(fn: Any) -> str:
    named = fn if getattr(fn, "__qualname__", "") else type(fn)
    name = str(named.__qualname__).replace("<locals>.", "")
    module = _module_of(named)
    return name if not module or module.partition(".")[0] in _PLAIN else f"{module}.{name}"


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
    module: str = "__main__" if fn.__module__ is None else fn.__module__
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


# --- what do its annotations say? ---------------------------------------------------------------


def signature_of(fn: Callable[..., Any]) -> "Signature":
    """Return the signature of a function, even if its annotations cannot be evaluated."""
    if sys.version_info >= (3, 14):
        from annotationlib import Format

        return inspect.signature(fn, annotation_format=Format.FORWARDREF)
    return inspect.signature(fn)


def check_takes_event(handler: Callable[..., Any], name: str) -> None:
    """Check that a handler of events takes one argument. Raises `PolicyInvalid` with the fix."""
    try:
        signature_of(handler).bind("event")
    except TypeError as error:
        raise PolicyInvalid(
            f"{name} cannot be a handler: {error}; it is given the event alone: write handler(event)"
        ) from None
    except ValueError:  # some functions written in C do not tell
        return


def return_type(fn: Any) -> Any:
    """Return the type in a function's return annotation, or `None`."""
    try:
        returns = fn.__annotations__.get("return")
    except Exception:  # noqa: BLE001 - not a function, or Python 3.14 evaluates them now and one fails
        returns = _evaluate(fn, "return")
    if returns is not None and not isinstance(returns, type):  # text, or text inside: list["Order"]
        returns = _evaluate_once(fn, returns)
    return None if returns is Any else returns  # Any names nothing that an object could come back as


_evaluated: "WeakKeyDictionary[Any, tuple[Any, Any]]" = WeakKeyDictionary()
"""The return annotations that are text or have text inside, and the types that they name, by function."""


def _evaluate_once(fn: Any, written: Any) -> Any:
    """Return the type of a return annotation with text. It is cached: evaluating it takes as long as a claim."""
    function = getattr(fn, "__func__", fn)  # of a method, which is a new object each time
    try:
        known = _evaluated.get(function)
    except TypeError:  # neither hashed nor referred to: an object of a class of its own
        return _evaluate(fn, "return")
    if known is not None and known[0] == written:
        return known[1]
    found = _evaluate(fn, "return")
    if found is not None:  # what it names may be defined later
        _evaluated[function] = (written, found)
    return found


def parameter_type(fn: Callable[..., Any], name: str) -> Any:
    """Return the type in a parameter's annotation, without `Annotated`; `Any` if there is none."""
    found = _evaluate(fn, name, include_extras=False)
    return Any if found is None else found


def _evaluate(fn: Any, name: str, *, include_extras: bool = True) -> Any:
    """Return the type in one annotation, independent of the others; `None`: there is none, or it is undefined."""
    written = _annotations_of(fn)
    if name not in written:
        return None
    inner = inspect.unwrap(fn)
    only = SimpleNamespace(
        __annotations__={name: written[name]}, __globals__=getattr(inner, "__globals__", {})
    )
    try:
        return get_type_hints(only, include_extras=include_extras)[name]
    except Exception:  # noqa: BLE001 - an annotation that names nothing says nothing
        return None


def _annotations_of(fn: Any) -> dict[str, Any]:
    """Return the annotations; those that are text, or cannot be evaluated, as text."""
    if sys.version_info >= (3, 14):
        from annotationlib import Format, get_annotations

        return get_annotations(fn, format=Format.FORWARDREF)
    return getattr(fn, "__annotations__", None) or {}
