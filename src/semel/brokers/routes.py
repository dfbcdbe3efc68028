"""Routes: select the handler of a message, decode the message for it, and call it."""

from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from contextvars import copy_context
from functools import partial, wraps
from types import NoneType
from typing import Any, ClassVar, TypeAlias, get_args

import msgspec
from msgspec.structs import replace

from semel.brokers.dead_letters import RUN_LATE
from semel.brokers.source import Arrival
from semel.client import deliver
from semel.client.client_async import AsyncSemel
from semel.errors import GiveUp, KeyMissing, MessageInvalid, UsageError
from semel.keys.identity import Identity, attribute_of, instant
from semel.policy import Policy
from semel.runtime.handlers import parameter_type, signature_of
from semel.runtime.process import asyncio, inspect
from semel.types import Delivery, Mode

__all__ = ["Call", "Middleware", "Route", "event_facts", "in_loop", "in_thread", "route_for"]

Call: TypeAlias = Callable[[Arrival], Awaitable[Any]]
Middleware: TypeAlias = Callable[[Arrival, Call], Awaitable[Any]]
"""A layer around a handler: it gets the message and the next call, which it awaits once or not at all."""

NO_BODY = (
    "The message has no body, such as a Kafka tombstone: take its key from a header, or skip such messages with"
    " tombstones=skip in the source's URL"
)
RETRY_DELAY_S = 1.0
"""The delay between attempts if the policy has none: a failing handler must not spin."""


class _Attributes(msgspec.Struct):
    """The attributes that are read from a CloudEvent in structured mode."""

    specversion: str
    type: str = ""
    time: str = ""


_attributes = msgspec.json.Decoder(_Attributes).decode


class Route:
    """One handler of a runner: `Route(charge, once=payments, types=["order.paid"])`.

    `once`: its own client, so that payments may go by inbox to one store and metrics by mark to another. `types`:
    the event types it takes; none means every type that no other route names. `key`: where the key is; by default
    the identity chain finds it. `batch`: the handler gets a list of new messages and must process all or none of
    them; when it fails, each is tried by itself. With a client of mode inbox the handler gets the open transaction
    first: `handler(connection, message)`.
    """

    refuses: ClassVar[frozenset[Mode]] = frozenset({"transaction"})
    instead: ClassVar[str] = "its handlers run in a Kafka transaction, which has a runner of its own"

    def __init__(
        self,
        handler: Callable[..., Any],
        *,
        once: AsyncSemel,
        types: Sequence[str] = (),
        key: Any = None,
        middleware: Sequence[Middleware] = (),
        keep_position: bool = False,
        batch: bool = False,
    ) -> None:
        if once.mode in self.refuses:
            raise UsageError(f"mode {once.mode!r} is not for {type(self).__name__}: {self.instead}")
        if batch and once.mode in ("mark", "quarantine"):
            raise UsageError(
                f"a batch that fails is tried again one by one, which mode {once.mode!r} rules out"
            )
        self.name: str = getattr(handler, "__qualname__", repr(handler))
        self.types: frozenset[str] = frozenset(types)
        self.once: AsyncSemel = once.using(_runner_policy(once.policy))
        self._identity = key if isinstance(key, Identity) else Identity(key=key)
        self._keep_position = keep_position
        self.batch: bool = batch
        _check_arguments(handler, once.mode)
        self.reads: Callable[[Arrival], Any] = reader(handler, 1 if once.mode == "inbox" else 0, batch=batch)
        self.handler: Callable[..., Any] = handler
        self.blocks: bool = not inspect.iscoroutinefunction(handler)
        self.middleware: tuple[Middleware, ...] = tuple(middleware)

    def delivery(self, arrival: Arrival, event_type: str, event_time_us: int | None) -> Delivery[Arrival]:
        """Build the delivery of a message, with its key. Raises `KeyMissing` and `KeyInvalid`."""
        if arrival.by_name.get(RUN_LATE) is not None:
            event_time_us = None
        key = self._find_key(arrival)
        deliver.items_of(self.once).check_times((key,))
        return Delivery(
            key=key,
            body=arrival,
            event_type=event_type,
            event_time_us=event_time_us,
            meta={"position": arrival.position} if self._keep_position and arrival.position else None,
            source=_source(arrival),
            redelivered=arrival.deliveries > 1 if arrival.deliveries else None,
        )

    def _find_key(self, arrival: Arrival) -> str:
        try:
            return self._identity(arrival)
        except KeyMissing as error:
            if arrival.body is not None:
                raise
            raise KeyMissing(f"{error}. {NO_BODY}") from error

    def around(self, call: Call) -> Call:
        """Return the call inside the route's middleware; the first one is the outermost."""
        for middleware in reversed(self.middleware):
            call = _around(middleware, call)
        call.__wrapped__ = self.handler  # type: ignore[attr-defined]  # the name that hooks get
        return call

    def facts(self, arrival: Arrival, key: str = "") -> Delivery[Arrival]:
        """Return the source and the event type of a message, whether it has a key or not."""
        kind = event_facts(arrival)[0] or self.once.policy.event_type
        return Delivery(key=key or "-", body=arrival, event_type=kind, source=_source(arrival))


def _source(arrival: Arrival) -> str:
    """Return the topic, queue or stream: the part of the position before its first slash."""
    place, slash, _ = (arrival.position or "").partition("/")
    return place if slash else arrival.transport


def _around(middleware: Middleware, call: Call) -> Call:
    async def layer(arrival: Arrival) -> Any:
        return await middleware(arrival, call)

    return layer


def _runner_policy(policy: Policy) -> Policy:
    """Return the policy for a runner: the runner does the waiting, for busy messages and before retries."""
    return replace(
        policy,
        wait_s=0.0,
        retry_delay_s=policy.retry_delay_s or RETRY_DELAY_S,
        permanent=(*policy.permanent, GiveUp),
    )


def route_for(routes: Sequence[Route], event_type: str) -> Route | None:
    """Return the route that names the type, else the one for all other types; `None` if there is neither."""
    rest = None
    for route in routes:
        if event_type in route.types:
            return route
        if not route.types:
            rest = route
    return rest


def event_facts(arrival: Arrival) -> tuple[str, int | None]:
    """Return the event's type (empty: not given) and its time (`None`: not given, or it cannot be parsed).

    Raises `KeyInvalid` for a header that contradicts itself.
    """
    headers = arrival.by_name
    kind, time = attribute_of(headers, "type"), attribute_of(headers, "time")
    kind = kind or headers.get("event_type") or headers.get("event-type")
    if kind is None and isinstance(arrival.body, bytes) and b'"specversion"' in arrival.body:
        try:
            event = _attributes(arrival.body)
        except (ValueError, RecursionError):
            return "", None
        kind, time = event.type, time or event.time
    return kind or "", _instant_us(time)


def _instant_us(time: str | None) -> int | None:
    if not time:
        return None
    try:
        return round(instant(time).timestamp() * 1e6)
    except (ValueError, OverflowError, OSError):  # the last two: numbers beyond any calendar
        return None


def _check_arguments(handler: Callable[..., Any], mode: Mode) -> None:
    """Check that the handler takes the arguments of its mode. Raises `UsageError` with the fix."""
    given = ("connection", "message") if mode == "inbox" else ("message",)
    try:
        signature_of(handler).bind(*given)
    except TypeError as error:
        name = getattr(handler, "__qualname__", repr(handler))
        fix = (
            "mode inbox gives it the open transaction and the message: write handler(connection, message), or choose"
            " another mode"
            if mode == "inbox"
            else f"mode {mode} gives it the message alone: write handler(message), or choose mode inbox (--mode inbox,"
            ' mode="inbox") for handler(connection, message)'
        )
        raise UsageError(f"{name}{signature_of(handler)} cannot be a handler: {error}; {fix}") from None


def reader(handler: Callable[..., Any], at: int = 0, *, batch: bool = False) -> Callable[[Arrival], Any]:
    """Return the decoder for the annotation of the handler's parameter; for a batch, of its list's items."""
    parameters = list(signature_of(handler).parameters)
    # less only for *arguments
    wanted = parameter_type(handler, parameters[at]) if at < len(parameters) else Any
    if batch:
        (wanted,) = get_args(wanted) or (Any,)
    if wanted in (Arrival, Any):
        return _itself
    if len(rest := [each for each in get_args(wanted) if each is not NoneType]) == 1:
        (wanted,) = rest if NoneType in get_args(wanted) else (wanted,)  # `Paid | None`: for tombstones
    return _or_tombstone(_decoder(wanted))


def _decoder(wanted: Any) -> Callable[[Arrival], Any]:
    if wanted is bytes:
        return _body
    if _is_cloudevent(wanted):
        from semel.brokers.cloudevents import reads

        return partial(_read, wanted, reads(wanted))
    if hasattr(wanted, "model_validate_json"):  # pydantic
        return partial(_read, wanted, _of_body(wanted.model_validate_json))
    return partial(_read, wanted, _of_body(msgspec.json.Decoder(wanted).decode))


def _is_cloudevent(wanted: Any) -> bool:
    """Whether it is a type of the `cloudevents` package, or a subclass of one. Does not load the package."""
    bases = getattr(wanted, "__mro__", ())
    return any(base.__module__.partition(".")[0] == "cloudevents" for base in bases)


def _or_tombstone(decode: Callable[[Arrival], Any]) -> Callable[[Arrival], Any]:
    """Return a decoder that gives `None` for a message without a body, such as a Kafka tombstone."""
    return lambda arrival: None if arrival.body is None else decode(arrival)


def _itself(arrival: Arrival) -> Arrival:
    return arrival


def _body(arrival: Arrival) -> bytes:
    return bytes(arrival.body)


def _of_body(decode: Callable[[bytes], Any]) -> Callable[[Arrival], Any]:
    return lambda arrival: decode(arrival.body)


def _read(wanted: Any, reads: Callable[[Arrival], Any], arrival: Arrival) -> Any:
    try:
        return reads(arrival)
    except (ValueError, RecursionError) as error:  # msgspec's, pydantic's and UTF-8's errors are ValueErrors
        name = getattr(wanted, "__name__", str(wanted))
        raise MessageInvalid(f"the message cannot be decoded as {name}: {error}") from error


async def in_thread(threads: Executor | None, fn: Callable[..., Any], *given: Any) -> Any:
    """Run a blocking call in a thread. A thread cannot be stopped: a cancelled caller still waits for its end."""
    running = asyncio.get_running_loop().run_in_executor(threads, copy_context().run, fn, *given)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            try:
                await asyncio.wait([running])
            except asyncio.CancelledError:  # its claim is released when it has ended, not before
                continue
        if running.exception() is None:
            return running.result()  # the effect has happened: it is completed even after a cancellation
        raise


def in_loop(handler: Callable[..., Any], threads: Executor | None = None) -> Callable[..., Awaitable[Any]]:
    """Return an awaitable form of the handler; a blocking handler runs in a thread."""
    if inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(type(handler).__call__):
        return handler

    @wraps(handler)
    async def handle(*given: Any) -> Any:
        return await in_thread(threads, handler, *given)

    return handle
