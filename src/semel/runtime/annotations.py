"""Read the annotations of functions, on every Python.

From Python 3.14 on, annotations are evaluated when they are read. One that names something undefined, such as a
class imported for type checkers only, raises then. Here it counts as not given.
"""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, get_type_hints
from weakref import WeakKeyDictionary

from semel.runtime.process import inspect

if TYPE_CHECKING:
    from inspect import Signature

__all__ = ["parameter_type", "return_type", "signature_of"]


def signature_of(fn: Callable[..., Any]) -> "Signature":
    """Return the signature of a function, even if its annotations cannot be evaluated."""
    if sys.version_info >= (3, 14):
        from annotationlib import Format

        return inspect.signature(fn, annotation_format=Format.FORWARDREF)
    return inspect.signature(fn)


def return_type(fn: Any) -> Any:
    """Return the type in a function's return annotation, or `None`."""
    try:
        returns = fn.__annotations__.get("return")
    except Exception:  # noqa: BLE001 - not a function, or Python 3.14 evaluates them now and one fails
        returns = _evaluate(fn, "return")
    if isinstance(returns, str):
        returns = _evaluate_once(fn, returns)
    return None if returns is Any else returns  # Any names nothing that an object could come back as


_evaluated: "WeakKeyDictionary[Any, tuple[str, Any]]" = WeakKeyDictionary()
"""The return annotations that are text, and the types that they name, by function."""


def _evaluate_once(fn: Any, text: str) -> Any:
    """Return the type of a return annotation that is text. It is cached: evaluating it takes as long as a claim."""
    function = getattr(fn, "__func__", fn)  # of a method, which is a new object each time
    try:
        known = _evaluated.get(function)
    except TypeError:  # neither hashed nor referred to: an object of a class of its own
        return _evaluate(fn, "return")
    if known is not None and known[0] == text:
        return known[1]
    found = _evaluate(fn, "return")
    if found is not None:  # what it names may be defined later
        _evaluated[function] = (text, found)
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
