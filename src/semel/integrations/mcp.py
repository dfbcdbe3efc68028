"""Tools of agents that have their effect once: for MCP servers, and for any function that a model calls.

::

    once = semel.aopen("postgresql://...", consumer="tools", mode="quarantine")
    server = MCPServer("shop", middleware=[carry_meta])  # or FastMCP("shop", middleware=[carry_meta])

    @server.tool()
    @once_tool(once)
    async def refund(order: str, cents: int) -> str: ...

A client sends `_meta: {"semel/key": ...}` or `{"semel/run": ...}`; the id of a tool call is never a key, because it is
new on every retry.
"""

import inspect
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from hashlib import sha256
from typing import Any, TypeVar, cast

from msgspec import Struct
from msgspec.structs import replace

from semel import keys
from semel.client.client import Semel
from semel.client.client_async import AsyncSemel
from semel.client.guard import unwrap
from semel.errors import KeyMissing, SemelError, UsageError

__all__ = ["KEY", "RUN", "ToolScope", "carry_meta", "once_tool", "tool_scope"]

KEY = "semel/key"
"""The member of `_meta` with the caller's own key of this call."""
RUN = "semel/run"
"""The member of `_meta` with the id of the agent's run: the same call with the same arguments happens once in it."""

F = TypeVar("F", bound=Callable[..., Any])


class ToolScope(Struct, frozen=True, kw_only=True):
    """What identifies a call besides its tool and its arguments."""

    key: str = ""
    run: str = ""
    caller: str = ""
    """Who calls: equal keys of two callers are two keys."""
    shown_as: type[Exception] | None = None
    """The exception whose text reaches the model; other errors of a tool are hidden from it."""


_scope: ContextVar[ToolScope | None] = ContextVar("semel_tool_scope", default=None)


@contextmanager
def tool_scope(*, run: str = "", key: str = "", caller: str = "") -> Iterator[None]:
    """Name the run of an agent for tools that are called without MCP, in a `with` statement around the calls."""
    with _within(ToolScope(key=key, run=run, caller=caller)):
        yield


@contextmanager
def _within(scope: ToolScope) -> Iterator[None]:
    token = _scope.set(scope)
    try:
        yield
    finally:
        _scope.reset(token)


@contextmanager
def _errors_shown() -> Iterator[None]:
    """Let the model read why a call was refused or has no result."""
    try:
        yield
    except SemelError as error:
        scope = _scope.get()
        if scope is None or scope.shown_as is None:
            raise
        raise scope.shown_as(str(error)) from error


async def carry_meta(ctx: Any, call_next: Callable[[Any], Awaitable[Any]]) -> Any:
    """Pass key, run and the authenticated client of a request on to its tool; middleware of `mcp` 2 and `fastmcp` 4."""
    if ctx.method != "tools/call":
        return await call_next(ctx)
    read = _read_fastmcp if hasattr(ctx, "fastmcp_context") else _read_mcp
    meta, token, shown_as = read(ctx)
    whose = "" if token is None else f"{token.client_id} {getattr(token, 'subject', None) or ''}"
    with _within(ToolScope(key=_text(meta, KEY), run=_text(meta, RUN), caller=whose, shown_as=shown_as)):
        return await call_next(ctx)


def _read_mcp(ctx: Any) -> tuple[Mapping[str, Any], Any, type[Exception]]:
    from mcp.server.auth.middleware.auth_context import get_access_token
    from mcp.server.mcpserver.exceptions import ToolError

    return ctx.meta or {}, get_access_token(), ToolError


def _read_fastmcp(ctx: Any) -> tuple[Mapping[str, Any], Any, type[Exception]]:
    from fastmcp.exceptions import ToolError
    from fastmcp.server.dependencies import get_access_token

    request = ctx.fastmcp_context.request_context  # None for a call by the server itself
    return (request.meta or {}) if request is not None else {}, get_access_token(), ToolError


def once_tool(
    once: Semel | AsyncSemel, *, name: str | None = None, repeats: bool = False
) -> Callable[[F], F]:
    """Make a tool have its effect once for its key. `name`: of its records; else the function's name.

    The key is the caller's, else the run, the tool and its arguments. A call without either is refused
    (`KeyMissing`), because two equal calls may be two wishes. The client must be in mode `quarantine`: an attempt that
    broke off stays undecided and visible, and is not repeated. `repeats=True` allows mode `lease`, for effects that
    may repeat. Raise `NotApplied` in the tool if nothing has happened: then it may be called again.
    """
    if once.mode != "quarantine" and not (repeats and once.mode == "lease"):
        raise UsageError(
            f"a tool that writes needs a client in mode 'quarantine', not {once.mode!r}; "
            "with mode 'lease' a crash can repeat its effect: say repeats=True if it may"
        )
    client = once.using(replace(once.policy, fingerprint=_digest))

    def decorate(fn: F) -> F:
        signature, tool = inspect.signature(fn), name or fn.__name__

        def read(args: Any, kwargs: Any) -> tuple[str, dict[str, Any]]:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            arguments = {
                each: value
                for each, value in bound.arguments.items()
                if not hasattr(value, "request_context")
            }
            return _key(tool, arguments), arguments

        if isinstance(client, AsyncSemel):
            if not inspect.iscoroutinefunction(fn):
                raise UsageError(f"{tool} is not a coroutine; guard it with a client of semel.open()")

            @wraps(fn)
            async def await_tool(*args: Any, **kwargs: Any) -> Any:
                async def call(_arguments: Any) -> Any:
                    return await fn(*args, **kwargs)

                call.__annotations__["return"] = signature.return_annotation
                with _errors_shown():
                    key, arguments = read(args, kwargs)
                    return unwrap(await client.run(key, call, arguments), key)

            return cast(F, await_tool)

        @wraps(fn)
        def call_tool(*args: Any, **kwargs: Any) -> Any:
            def call(_arguments: Any) -> Any:
                return fn(*args, **kwargs)

            call.__annotations__["return"] = signature.return_annotation
            with _errors_shown():
                key, arguments = read(args, kwargs)
                return unwrap(client.run(key, call, arguments), key)

        return cast(F, call_tool)

    return decorate


def _key(tool: str, arguments: dict[str, Any]) -> str:
    scope = _scope.get() or ToolScope()
    if scope.key:
        return keys.of(namespace="tool", caller=scope.caller, tool=tool, key=scope.key)
    if scope.run:
        digest = _digest(arguments).hex()
        return keys.of(namespace="tool", caller=scope.caller, tool=tool, run=scope.run, arguments=digest)
    raise KeyMissing(
        f"{tool} changes something, and this call has no key: send _meta with {KEY!r} (the same when you try again) "
        f"or {RUN!r} (the id of your run); without MCP, name the run: with tool_scope(run=...)"
    )


def _digest(arguments: dict[str, Any]) -> bytes:
    """Return a digest that depends on neither order nor layout of the arguments."""
    text = json.dumps(arguments, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=str)
    return sha256(text.encode("utf-8", "surrogatepass")).digest()


def _text(meta: Mapping[str, Any], name: str) -> str:
    value = meta.get(name, "")
    if not isinstance(value, str):
        raise KeyMissing(f"{name!r} in _meta is not text")
    return value
