"""Explain options that are nearly right: in the wrong place, or under a name that other libraries use."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial, wraps
from types import CodeType, FunctionType
from typing import Any, ParamSpec, TypeVar

from semel.errors import UsageError
from semel.policy import Policy
from semel.runtime.handlers import code_of, innermost, label_of
from semel.runtime.process import inspect

__all__ = ["check_arguments_for", "check_own_arguments", "explains_near_misses"]

P = ParamSpec("P")
R = TypeVar("R")

CO_VARKEYWORDS = 0x08
"""The flag of functions that take any keyword, as in `inspect`, which is slow to load."""
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
OF_RUN = frozenset(("event_type", "meta"))
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


def check_arguments_for(fn: Any, given: Mapping[str, Any], verb: str = "run") -> None:
    """Raise `UsageError` if a keyword of `run`, or of a guarded function, is one that the function does not take.

    The call could only fail: after the claim, and at the price of an attempt. A decorator may take more keywords than
    the function that it wraps; there only an option of semel, or nearly one, is refused.
    """
    code = fn.__code__ if type(fn) is FunctionType else code_of(fn)
    if code is None:  # a class, or written in C: only its signature tells, and it is slow to read
        if KNOWN.isdisjoint(given):
            return
        unknown = [name for name in given if name in KNOWN and not _takes(fn, name, otherwise=True)]
        certain = False
    else:
        certain = not code.co_flags & CO_VARKEYWORDS
        if not certain:
            code = code_of(inspect.unwrap(innermost(fn)))
            if code is None or code.co_flags & CO_VARKEYWORDS:
                return
        taken = _keywords_of(code)
        unknown = [name for name in given if name not in taken]
    for name in unknown:
        meant = _option_like(name)
        if meant is not None or certain:
            raise UsageError(_advice_for_argument(fn, verb, name, meant, given[name]))


def _keywords_of(code: CodeType) -> tuple[str, ...]:
    """Return the names of the parameters that may be given by keyword, without `**kwargs`."""
    return code.co_varnames[code.co_posonlyargcount : code.co_argcount + code.co_kwonlyargcount]


def _option_like(name: str) -> str | None:
    """Return the option of semel that a name is, or nearly is."""
    if name in KNOWN:
        return name
    from difflib import get_close_matches  # needed only for a mistyped option

    return next(iter(get_close_matches(name, OF_RUN | OF_OPEN | OF_POLICY, n=1, cutoff=0.8)), None)


def _advice_for_argument(fn: Any, verb: str, name: str, meant: str | None, given: Any) -> str:
    """Return what to write instead of a keyword that the function does not take."""
    label = label_of(fn)
    if meant == name:
        return f"{_advice(verb, name, given, ())} ({label} takes no {name})"
    if meant is None:
        from difflib import get_close_matches

        takes = [each for each in _keywords_of(code_of(fn)) if each not in ("self", "cls")]
        near = get_close_matches(name, takes, n=1)
        hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(takes) or 'no keywords'}"
        return f"{label} takes no {name}: {hint}"
    where = f"{meant}= of {verb}?" if meant in OF_RUN else f"{meant}? {_advice(verb, meant, given, ())}"
    return f"{label} takes no {name}: did you mean {where}"


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
