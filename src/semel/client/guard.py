"""`guard`: a function that runs once per key; every call returns the value of the first."""

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial, update_wrapper
from types import MethodType
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    Self,
    TypeAlias,
    TypeVar,
    assert_never,
    cast,
    overload,
)

from msgspec import Struct
from msgspec.structs import asdict

from semel.client.near_misses import check_arguments_for
from semel.errors import (
    ClaimLost,
    KeyMissing,
    LateEvent,
    NotRecorded,
    OutcomeUnknown,
    PayloadMismatch,
    StillRunning,
    StoreUnavailable,
    UsageError,
    ValueNotKept,
)
from semel.keys.limits import check
from semel.keys.sliding import Sliding
from semel.policy import Policy
from semel.runtime.handlers import awaitable, blocking, code_of, operation_name, signature_of
from semel.runtime.process import inspect
from semel.types import Busy, Done, Errored, Failed, Late, Lost, Mismatch, Outcome, Unavailable, Unknown

__all__ = [
    "SCOPE",
    "AsyncGuard",
    "AsyncGuarded",
    "Guard",
    "GuardOptions",
    "Guarded",
    "GuardedRuns",
    "KeySource",
    "MetaSource",
    "unwrap",
]

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
S = TypeVar("S")

SCOPE = "::"
"""The separator in a record's key, between the name of the guarded function and the key of the call."""

KeySource: TypeAlias = str | Callable[..., str]
"""An attribute path that starts with a parameter's name, or a callable given the function's arguments."""
MetaSource: TypeAlias = Mapping[str, str] | Callable[..., Mapping[str, str]]
"""The metadata for each record, or a callable that gets the function's arguments and returns it."""
Binds: TypeAlias = Literal["instance", "class", "nothing"]
"""What a guarded function gets as its first argument when it is read as an attribute of an object."""


def unwrap(outcome: Outcome[R], key: str) -> R:
    """Return the value of a delivery, or raise the error that says why there is none."""
    match outcome:
        case Done(value, replayed, kept, recorded, reason, guarded):
            if guarded and not recorded:
                raise NotRecorded(
                    f"{key!r} ran, but the store could not record it: a repeat may run again", value
                )
            if replayed and not kept:
                why = f": {reason}" if reason else ""
                raise ValueNotKept(f"{key!r} ran on an earlier delivery; its value was not kept{why}")
            return value
        case Failed(error) | Errored(error):
            raise error
        case Busy(retry_after_s):
            message = f"another attempt at {key!r} is still running; try again in {retry_after_s:.1f} s"
            raise StillRunning(message, retry_after_s)
        case Mismatch():
            raise PayloadMismatch(
                f"{key!r} was used before with another payload; a new event needs a new key"
            )
        case Lost():
            raise ClaimLost(f"another attempt at {key!r} took over; its result counts")
        case Late(age_s):
            if age_s < 0:
                raise LateEvent(
                    f"{key!r} is {-age_s:.0f} s ahead of the store's clock; set its producer's", age_s
                )
            raise LateEvent(
                f"{key!r} is {age_s:.0f} s old, older than what is remembered; whether it ran is not known",
                age_s,
            )
        case Unknown(_, error):
            raise error or OutcomeUnknown(f"an attempt at {key!r} ended without a result; resolve it")
        case Unavailable(error):
            raise error if isinstance(error, StoreUnavailable) else StoreUnavailable(str(error)) from error
        case _:
            assert_never(outcome)


class GuardOptions(Struct, frozen=True, kw_only=True):
    """The options of a guard."""

    key: KeySource
    name: str | None = None
    event_type: str = ""
    meta: MetaSource | None = None


class GuardedRuns(Struct, frozen=True, eq=False):
    """The part of a client that guarded functions use."""

    run: Callable[..., Any]
    """Runs one call: key, call, function, fingerprint, event type, metadata, sliding window, event time."""
    policy: Policy
    places: dict[str, tuple[str, int]]
    """Where the functions guarded by this client are defined, by the names of their records."""


class KeyReader:
    """Reads the key of a call from its arguments."""

    def __init__(self, fn: Callable[..., Any], source: KeySource) -> None:
        self._fn = fn
        self._signature = signature_of(fn)
        self._source = source
        self.sliding: Sliding | None = source if isinstance(source, Sliding) else None
        if isinstance(source, str):
            from semel.keys.extract import extractor

            name = source.partition(".")[0]
            if name not in self._signature.parameters:
                given = ", ".join(self._signature.parameters) or "none"
                raise UsageError(
                    f"key={source!r} starts with {name!r}, which is no parameter of {fn.__qualname__} (it has: {given})"
                )
            self._extract = extractor(source)

    def __call__(self, args: Any, kwargs: Any) -> str:
        if not isinstance(self._source, str):
            if kwargs:
                check_arguments_for(self._fn, kwargs, "guard")
            key = self._source(*args, **kwargs)
            if not key:
                raise KeyMissing(f"{self._source!r} found no key in this call, and none is invented")
            return key if type(key) is str else check(key)
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return self._extract(bound.arguments)


class _Guarded(Generic[P, R]):
    """The base of both kinds of guarded function."""

    __name__: str
    __wrapped__: Callable[P, Any]
    """The plain function, to be called without a guard."""

    def __init__(
        self, runs: GuardedRuns, fn: Callable[P, Any], options: GuardOptions, binds: Binds = "instance"
    ) -> None:
        update_wrapper(cast(Any, self), fn)  # first: attributes of `fn` must not replace those set below
        self._runs = runs
        self._fn = fn
        self._read = KeyReader(fn, options.key)
        self._options = options
        self._scope = _register(runs.places, fn, options.name) + SCOPE
        self._binds = binds
        self._bound: tuple[Any, ...] = ()

    def _bind(self, instance: Any, owner: type | None) -> Any:
        """Bind it as a method: the object, or the class, is the first argument."""
        target = owner if self._binds == "class" else instance
        if target is None or self._bound or self._binds == "nothing":
            return self
        bound = object.__new__(type(self))
        vars(bound).update(vars(self), _bound=(target,), __wrapped__=MethodType(self._fn, target))
        return bound

    def key(self, *args: P.args, **kwargs: P.kwargs) -> str:
        """Return the key of the record of a call with these arguments, for `once.records` and `semel show`."""
        return self._scope + self._read((*self._bound, *args), kwargs)

    def _start(self, args: Any, kwargs: Any) -> tuple[str, Any]:
        args = (*self._bound, *args)
        key = self._scope + self._read(args, kwargs)
        take = self._runs.policy.fingerprint
        fingerprint = None if take is None else take(*args, **kwargs)
        sliding, meta = self._read.sliding, self._options.meta
        event_time_us = None if sliding is None else sliding.event_time_us(*args, **kwargs)
        if callable(meta):
            meta = meta(*args, **kwargs)
        call, event_type = partial(self._fn, *args, **kwargs), self._options.event_type
        return key, self._runs.run(key, call, self._fn, fingerprint, event_type, meta, sliding, event_time_us)


class Guarded(_Guarded[P, R]):
    """A function that runs once per key."""

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...

    @overload
    def __get__(
        self: "Guarded[Concatenate[S, Q], R]", instance: S, owner: type | None = None
    ) -> "Guarded[Q, R]": ...

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Bind it as a method: `self` is the first argument, as always."""
        return self._bind(instance, owner)

    if TYPE_CHECKING:

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
            """Return the value, new or stored. Raises the function's own error, or `OutcomeError`."""
            ...

    else:  # Celery checks arguments against this signature, and counts a `self` as one of them

        def __call__(*args: Any, **kwargs: Any) -> Any:
            """Return the value, new or stored. Raises the function's own error, or `OutcomeError`."""
            self = args[0]
            key, outcome = self._start(args[1:], kwargs)
            return unwrap(outcome, key)

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Outcome[R]:
        """Return the outcome instead of the value."""
        return self._start(args, kwargs)[1]  # type: ignore[no-any-return]


class AsyncGuarded(_Guarded[P, R]):
    """An `async def` that runs once per key."""

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...

    @overload
    def __get__(
        self: "AsyncGuarded[Concatenate[S, Q], R]", instance: S, owner: type | None = None
    ) -> "AsyncGuarded[Q, R]": ...

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Bind it as a method: `self` is the first argument, as always."""
        return self._bind(instance, owner)

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Return the value, new or stored. Raises the function's own error if it fails here, else `OutcomeError`."""
        key, outcome = self._start(args, kwargs)
        return unwrap(await outcome, key)  # type: ignore[no-any-return]

    async def call(self, *args: P.args, **kwargs: P.kwargs) -> Outcome[R]:
        """Return the outcome instead of the value."""
        return await self._start(args, kwargs)[1]  # type: ignore[no-any-return]


class Guard:
    """The decorator that `Semel.guard` returns."""

    def __init__(self, runs: GuardedRuns, options: GuardOptions, client: Any) -> None:
        self._runs = runs
        self._options = options
        self._client = client

    @overload  # a Coroutine is an R too: the first that fits is taken
    def __call__(self, fn: Callable[P, Coroutine[Any, Any, R]]) -> AsyncGuarded[P, R]: ...  # type: ignore[overload-overlap]

    @overload
    def __call__(self, fn: Callable[P, R]) -> Guarded[P, R]: ...

    def __call__(self, fn: Callable[..., Any]) -> Any:
        """Guard a function; an `async def` by the client's async twin. Raises `TypeError` for a generator function."""
        plain, binds = _plain_function(fn)
        if inspect.iscoroutinefunction(plain) or inspect.iscoroutinefunction(type(plain).__call__):
            return self._client.twin.guard(**asdict(self._options))(fn)
        return Guarded(self._runs, blocking(plain), self._options, binds)


class AsyncGuard:
    """The decorator that `AsyncSemel.guard` returns."""

    def __init__(self, runs: GuardedRuns, options: GuardOptions) -> None:
        self._runs = runs
        self._options = options

    def __call__(self, fn: Callable[P, Awaitable[R]]) -> AsyncGuarded[P, R]:
        """Guard an `async def`. Raises `TypeError` for a function that blocks."""
        plain, binds = _plain_function(fn)
        return AsyncGuarded(self._runs, awaitable(plain), self._options, binds)


def _plain_function(fn: Any) -> tuple[Any, Binds]:
    """Return the function inside a `classmethod` or `staticmethod`, and what it binds; any other function as it is."""
    if isinstance(fn, classmethod):
        return fn.__func__, "class"
    if isinstance(fn, staticmethod):
        return fn.__func__, "nothing"
    return fn, "instance"


def _register(known: dict[str, tuple[str, int]], fn: Any, name: str | None) -> str:
    """Return the name of the function's records. Raises `UsageError` if another function has the name already.

    Several functions may share a name that was given explicitly, and so their records. A function that is defined
    again on the same line is the same function; in an interactive session, which has no file, it may be redefined.
    """
    found = operation_name(fn, name)
    if name is not None:
        return found
    plain = inspect.unwrap(fn)
    code = code_of(plain)
    match fn:
        case _Guarded(_runs=GuardedRuns(places=places)) if places is known:
            raise UsageError(f"{found} is guarded by this client already; remove one of the two decorators")
        case _:
            pass
    if code is None or "__file__" not in getattr(plain, "__globals__", {}):
        return found
    place = (code.co_filename, code.co_firstlineno)
    if known.setdefault(found, place) != place:
        raise UsageError(
            f"two functions are called {found}, in line {known[found][1]} and in line {place[1]}: guarded by one"
            " client they would share their records; add name= to guard"
        )
    return found
