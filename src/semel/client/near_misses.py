"""Explain options that are nearly right: in the wrong place, or under a name that other libraries use."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

from semel.errors import UsageError
from semel.policy import Policy
from semel.runtime.handlers import label_of
from semel.runtime.process import inspect

__all__ = ["check_arguments_for", "check_own_arguments", "explains_near_misses"]

P = ParamSpec("P")
R = TypeVar("R")

WINDOW = "how long a finished key is remembered is window='24h' of open"
TIMEOUT = (
    "say which one: lease='30s' of open is how long a claim lasts without renewal, Policy(wait_s=10) is how long a"
    " duplicate waits, Policy(run_max_s=900) is how long a handler may run"
)
ATTEMPTS = "how often a handler is tried is Policy(max_attempts=10)"
OTHER_NAMES: dict[str, str] = {
    **dict.fromkeys(("ttl", "ttl_s", "expire", "expires", "expiry", "expire_s", "retention"), WINDOW),
    **dict.fromkeys(("timeout", "timeout_s"), TIMEOUT),
    **dict.fromkeys(("retries", "max_retries", "attempts"), ATTEMPTS),
    **dict.fromkeys(("wait", "wait_timeout"), "how long a duplicate waits is Policy(wait_s=10)"),
    **dict.fromkeys(("retry_delay", "backoff"), "how long a failed key rests is Policy(retry_delay_s=1)"),
    **dict.fromkeys(("group", "namespace", "queue"), "who processes is consumer='billing' of open"),
}
"""Names that users of other libraries try, and semel's name for each."""
OF_OPEN = frozenset(("consumer", "tenant", "window", "lease", "mode", "policy", "ids", "hooks"))
OF_POLICY = frozenset(Policy.__struct_fields__)
KNOWN = OF_OPEN | OF_POLICY | OTHER_NAMES.keys()


def explains_near_misses(verb: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function whose options are all keywords: an unknown option raises `UsageError` with the right one.

    So does an option without its name. Python's own error would be `TypeError`.
    """
    code = verb.__code__
    places = code.co_argcount
    options = frozenset(code.co_varnames[: places + code.co_kwonlyargcount])
    first = code.co_varnames[places]

    @wraps(verb)
    def explaining(*args: P.args, **kwargs: P.kwargs) -> R:
        if len(args) > places:
            written = f"{first}={_format_value(args[places])}"
            raise UsageError(f"options of {verb.__name__} are given by name: {verb.__name__}({written})")
        if not options.issuperset(kwargs):
            name = next(name for name in kwargs if name not in options)
            raise UsageError(_advice(verb.__name__, name, kwargs[name], options - {"self"}))
        return verb(*args, **kwargs)

    return explaining


def _advice(verb: str, name: str, given: Any, options: Iterable[str]) -> str:
    """Return what to write instead of an option that `verb` does not have."""
    if name in OTHER_NAMES:
        return f"{name} is no option of {verb}: {OTHER_NAMES[name]}"
    if name in OF_POLICY:
        policy = f"Policy({name}={_format_value(given)})"
        where = f"once.using({policy}).run(...)" if verb == "run" else f"{verb}(..., policy={policy})"
        return f"{name} belongs to Policy: {where}"
    if name in OF_OPEN:
        return f"{name} belongs to open: semel.open(..., {name}={_format_value(given)})"
    from difflib import get_close_matches  # needed only for a mistyped option

    near = get_close_matches(name, options, n=1)
    meant = f"did you mean {near[0]}? " if near else ""
    return f"{name} is no option of {verb}: {meant}It takes {', '.join(sorted(options))}"


def _format_value(given: Any) -> str:
    """Return a value as written in code; `...` for a long value or one without such a form."""
    return repr(given) if isinstance(given, str | int | float) and len(repr(given)) < 40 else "..."  # noqa: PLR2004


def check_arguments_for(fn: Any, given: Mapping[str, Any]) -> None:
    """Raise `UsageError` if an argument of `run` is an option of semel, and the function does not take it."""
    if KNOWN.isdisjoint(given):
        return
    for name in given:
        if name in KNOWN and not _takes(fn, name, otherwise=True):
            raise UsageError(f"{_advice('run', name, given[name], ())} ({label_of(fn)} takes no {name})")


def check_own_arguments(fn: Any, event_type: str, meta: Mapping[str, str] | None) -> None:
    """Raise `UsageError` if `event_type` or `meta` of `run` may be meant for the function."""
    bound = fn.keywords if isinstance(fn, partial) else {}
    for name, given in (("event_type", event_type), ("meta", meta)):
        if given and name not in bound and _takes(fn, name, otherwise=False):
            raise UsageError(
                f"{name}= is an argument of run, and {label_of(fn)} takes one of that name, too; if it is for the"
                f" function, bind it: functools.partial({label_of(fn)}, {name}=...)"
            )


def _takes(fn: Any, name: str, *, otherwise: bool) -> bool:
    """Whether the function takes a keyword of that name; `otherwise` if it is written in C, without a signature."""
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return otherwise
    return name in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())
