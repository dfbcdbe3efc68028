"""`guard`: a function that runs once per key, and whose every call returns the first one's value."""

from collections.abc import Awaitable, Callable, Coroutine
from functools import partial, update_wrapper
from types import FunctionType
from typing import Any, Generic, ParamSpec, TypeAlias, TypeVar, assert_never, cast, overload

from semel.annotations import signature_of
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
from semel.keys.sliding import Sliding
from semel.lazily import inspect
from semel.types import Busy, Done, Errored, Failed, Late, Lost, Mismatch, Outcome, Unavailable, Unknown

__all__ = ["AsyncGuard", "AsyncGuarded", "Guard", "Guarded", "KeySource", "awaitable", "unwrap"]

P = ParamSpec("P")
R = TypeVar("R")

CO_COROUTINE = 0x80
"""The flag of an `async def`, as `inspect` has it, which is slow to load and to ask."""

KeySource: TypeAlias = str | Callable[..., str]
"""An attribute path that starts with a parameter's name, or a callable given the function's arguments."""


def unwrap(outcome: Outcome[R], key: str) -> R:
    """The value of a delivery, or the error that says why there is none."""
    match outcome:
        case Done(value, replayed, kept, recorded):
            if not recorded:
                raise NotRecorded(
                    f"{key!r} ran, but the store could not be told: a repeat may run again", value
                )
            if replayed and not kept:
                raise ValueNotKept(f"{key!r} ran on an earlier delivery; its value was not kept")
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
                raise LateEvent(f"{key!r} is {-age_s:.0f} s ahead of the store's clock; set its producer's")
            raise LateEvent(
                f"{key!r} is {age_s:.0f} s old, older than what is remembered; whether it ran is not known"
            )
        case Unknown(_, error):
            raise error or OutcomeUnknown(f"an attempt at {key!r} ended without a result; resolve it")
        case Unavailable(error):
            raise error if isinstance(error, StoreUnavailable) else StoreUnavailable(str(error)) from error
        case _:
            assert_never(outcome)


class KeyReader:
    """Read the key of a call from its arguments."""

    def __init__(self, fn: Callable[..., Any], source: KeySource) -> None:
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
            key = self._source(*args, **kwargs)
            if not key:
                raise KeyMissing(f"{self._source!r} found no key in this call, and none is invented")
            return key
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return self._extract(bound.arguments)


class _Guarded(Generic[P, R]):
    """What both kinds of guarded function hold."""

    def __init__(self, client: Any, fn: Callable[P, Any], source: KeySource) -> None:
        self._client = client
        self._fn = fn
        self._read = KeyReader(fn, source)
        self._source = source
        update_wrapper(cast(Any, self), fn)

    def __get__(self, instance: Any, _owner: type | None = None) -> Any:
        """As a method: `self` is the first argument, as always."""
        return self if instance is None else _Bound(self, instance)

    def key(self, *args: P.args, **kwargs: P.kwargs) -> str:
        """The key that a call with these arguments has."""
        return self._read(args, kwargs)

    def _start(self, args: Any, kwargs: Any) -> tuple[str, Any]:
        key = self._read(args, kwargs)
        client, call = self._client, partial(self._fn, *args, **kwargs)
        fingerprint = client._fingerprint(args, kwargs)  # noqa: SLF001 - guard is a verb of the client
        sliding = self._read.sliding
        event_time_us = None if sliding is None else sliding.event_time_us(*args, **kwargs)
        return key, client._run(key, call, self._fn, fingerprint, sliding, event_time_us)  # noqa: SLF001


class _Bound:
    """A guarded method of one object."""

    def __init__(self, guarded: Any, instance: Any) -> None:
        self._guarded = guarded
        self._instance = instance

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._guarded(self._instance, *args, **kwargs)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """The outcome instead of the value."""
        return self._guarded.call(self._instance, *args, **kwargs)


class Guarded(_Guarded[P, R]):
    """A function that runs once per key."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """The value, fresh or replayed. Raises the function's own error on a first failure, else an `OutcomeError`."""
        key, outcome = self._start(args, kwargs)
        return unwrap(outcome, key)  # type: ignore[no-any-return]

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Outcome[R]:
        """The outcome, when the caller wants to know."""
        return self._start(args, kwargs)[1]  # type: ignore[no-any-return]


class AsyncGuarded(_Guarded[P, R]):
    """An `async def` that runs once per key."""

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """The value, fresh or replayed. Raises the function's own error on a first failure, else an `OutcomeError`."""
        key, outcome = self._start(args, kwargs)
        return unwrap(await outcome, key)  # type: ignore[no-any-return]

    async def call(self, *args: P.args, **kwargs: P.kwargs) -> Outcome[R]:
        """The outcome, when the caller wants to know."""
        return await self._start(args, kwargs)[1]  # type: ignore[no-any-return]


class Guard:
    """The decorator that `Semel.guard` returns."""

    def __init__(self, client: Any, source: KeySource) -> None:
        self._client = client
        self._source = source

    @overload  # a Coroutine is an R too: the first that fits is taken
    def __call__(self, fn: Callable[P, Coroutine[Any, Any, R]]) -> AsyncGuarded[P, R]: ...  # type: ignore[overload-overlap]

    @overload
    def __call__(self, fn: Callable[P, R]) -> Guarded[P, R]: ...

    def __call__(self, fn: Callable[..., Any]) -> Any:
        """Guard a function; an `async def` by the client's async twin."""
        if inspect.iscoroutinefunction(fn):
            return AsyncGuarded(self._client.twin, fn, self._source)
        return Guarded(self._client, fn, self._source)


class AsyncGuard:
    """The decorator that `AsyncSemel.guard` returns."""

    def __init__(self, client: Any, source: KeySource) -> None:
        self._client = client
        self._source = source

    def __call__(self, fn: Callable[P, Awaitable[R]]) -> AsyncGuarded[P, R]:
        """Guard an `async def`. Raises `TypeError` for a function that blocks."""
        return AsyncGuarded(self._client, awaitable(fn), self._source)


def awaitable(fn: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
    """The handler, if it can be awaited. Raises `TypeError`: one that blocks would stop the loop."""
    if type(fn) is FunctionType and fn.__code__.co_flags & CO_COROUTINE:
        return fn  # the usual case, asked with every run
    handler = fn
    while isinstance(handler, partial):
        handler = handler.func
    if inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(type(handler).__call__):
        return fn
    name = getattr(fn, "__qualname__", repr(fn))
    raise TypeError(
        f"{name} is not async def; an async client needs one, or use semel.open() and a sync client"
    )
