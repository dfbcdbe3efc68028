"""Idempotency-Keys for single routes of FastAPI, shown in their OpenAPI.

`Idempotent` is the dependency with the rules; `IdempotentRoute` is the class of route that applies them.
"""

from collections.abc import Callable, Iterator
from inspect import Parameter, Signature
from typing import Annotated, Any

from fastapi import Header, Request
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from semel.client.client import Semel
from semel.client.client_async import AsyncSemel
from semel.errors import UsageError
from semel.http import responses
from semel.http.asgi import GUARDED, App, AsgiIdempotency, Caller, Receive, Scope, Send
from semel.http.rules import KEY_CHARS_MAX, Rules, prepare_client, window_s_of

__all__ = ["Idempotent", "IdempotentRoute"]

SHOWN = (
    responses.MISSING,
    responses.CALLER_UNKNOWN,
    responses.RUNNING,
    responses.TOO_LARGE,
    responses.MISMATCH,
    responses.UNAVAILABLE,
)
"""One per status, for a route's OpenAPI responses."""


class Idempotent:
    """A dependency: this route runs once for each Idempotency-Key, and its parameter is the key.

    Works on routes of the class `IdempotentRoute`; on any other it raises `UsageError` at the first keyed request,
    instead of running unguarded.
    """

    def __init__(
        self, client: AsyncSemel | Semel, *, caller: Caller | None, rules: Rules | None = None
    ) -> None:
        self._client = client
        self._caller = caller
        self.rules: Rules = rules or Rules()
        self.__signature__: Signature = self._signature()

    def __call__(self, request: Request, idempotency_key: str | None = None) -> str | None:
        """Return the key of this request, as the client sent it."""
        key: str | None = request.scope.get(GUARDED)
        guarded = request.method in self.rules.methods and (
            idempotency_key is not None or self.rules.required
        )
        if guarded and key is None:
            raise UsageError(
                f"{request.method} {request.url.path} depends on an Idempotency-Key, but its route class is another;"
                " use APIRouter(route_class=IdempotentRoute), and name the dependency on the route or its router"
            )
        return key

    def middleware(self, app: App) -> AsgiIdempotency:
        """Build the middleware of the route."""
        return AsgiIdempotency(app, self._client, caller=self._caller, route=template_of, rules=self.rules)

    def _signature(self) -> Signature:
        client = self._client.twin if isinstance(self._client, Semel) else self._client
        window_s = window_s_of(prepare_client(client, self.rules, None))
        header = Header(
            max_length=KEY_CHARS_MAX + 2,  # its quotes
            description=(
                "The same value on every retry of one request; a retry is answered with the first one's response."
                f" Remembered for {window_s:g} seconds after that."
            ),
        )
        kind = Parameter.KEYWORD_ONLY
        if self.rules.required:
            key = Parameter("idempotency_key", kind, annotation=Annotated[str, header])
        else:
            key = Parameter("idempotency_key", kind, default=None, annotation=Annotated[str | None, header])
        return Signature([Parameter("request", kind, annotation=Request), key])


class IdempotentRoute(APIRoute):
    """A route that applies the rules of its `Idempotent` dependency; without one it is a plain route."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        found = [each for each in _calls(self.dependant) if isinstance(each, Idempotent)]
        self._guard: AsgiIdempotency | None = None
        if found and set(found[0].rules.methods).intersection(self.methods or ()):
            self._guard = found[0].middleware(super().handle)
            shown: dict[int | str, dict[str, Any]] = {
                each.status: {
                    "description": each.title,
                    "content": {_content_type(found[0].rules, each): {"schema": {"type": "object"}}},
                }
                for each in SHOWN
            }
            self.responses: dict[int | str, dict[str, Any]] = {**shown, **self.responses}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the route, once for each key."""
        await (super().handle if self._guard is None else self._guard)(scope, receive, send)


def _content_type(rules: Rules, kind: responses.ProblemType) -> str:
    return next(value for name, value in rules.refuse(kind, "").headers if name == b"content-type").decode()


def template_of(scope: Scope) -> str:
    """Return the declared path of the route, with the prefixes of its routers."""
    route, path = scope["route"], str(scope["path"])
    try:
        concrete = route.path_format.format(**scope.get("path_params", {}))
    except (AttributeError, IndexError, KeyError, ValueError):
        return path
    return path.removesuffix(concrete) + route.path_format if path.endswith(concrete) else path


def _calls(dependant: Dependant) -> Iterator[Any]:
    """Yield all dependencies of a route."""
    for each in dependant.dependencies:
        yield each.call
        yield from _calls(each)
