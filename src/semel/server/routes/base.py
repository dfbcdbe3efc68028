"""Helpers of every route: the caller, the body, the response, and its entry in the OpenAPI document."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from starlette.responses import Response

from semel.server.auth import Caller
from semel.server.middleware import read_body
from semel.server.problems import PROBLEM_JSON, HttpProblem, ProblemDocument, problem_of_body
from semel.server.service import Service
from semel.server.tokens import Role

__all__ = [
    "JSON",
    "TENANT_HEADER",
    "Asked",
    "Document",
    "answer",
    "authorize",
    "beside_loop",
    "body_of",
    "content_type",
    "many",
    "operation_id",
    "read",
    "shape",
    "wrong_type",
]

T = TypeVar("T")

JSON = "application/json"
TENANT_HEADER = "semel-tenant"
QUICK_BYTES = 16 * 1024
"""Smaller values are decoded faster than a thread wakes up."""
_encode = msgspec.json.Encoder().encode


class Asked(msgspec.Struct, frozen=True):
    """A request with its service and caller."""

    service: Service
    caller: Caller
    tenant: str
    """The tenant of endpoints whose path names none."""


def authorize(request: Request, role: Role) -> Asked:
    """Return the service and the caller. Raises `HttpProblem` if the role is too low."""
    caller: Caller = request.state.caller
    caller.require(role)
    return Asked(request.app.state.service, caller, caller.acting_for(request.headers.get(TENANT_HEADER)))


def content_type(request: Request) -> str:
    """Return the media type of the body, without parameters."""
    return str(request.headers.get("content-type", "")).partition(";")[0].strip().lower()


async def body_of(request: Request) -> bytes:
    """Read the body within its limits. Raises `HttpProblem`."""
    limits = request.app.state.service.settings.limits
    return await read_body(request, limits.body_bytes_max, limits.body_wait_s)


async def read(request: Request, decoder: "msgspec.json.Decoder[T]") -> T:
    """Decode the JSON body. Raises `HttpProblem`."""
    if content_type(request) != JSON:
        raise wrong_type(request, JSON)
    body = await body_of(request)
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise problem_of_body(error) from error


async def beside_loop(show: Callable[[], Response], size_bytes: int, service: Service) -> Response:
    """Decode or encode large values in a thread, so that other requests do not wait."""
    return await service.beside_loop(show) if size_bytes > QUICK_BYTES else show()


def wrong_type(request: Request, *wanted: str) -> HttpProblem:
    """Return the problem for a wrong content type."""
    found = content_type(request)[:100] or "nothing"
    return HttpProblem(415, "wrong-type", f"the content type is {found!r}; send {' or '.join(wanted)}")


def many(count: int, service: Service, caller: Caller) -> None:
    """Charge for this many items. Raises `HttpProblem` if they are too many."""
    service.costs.charge(caller, items=count)
    most = service.settings.limits.batch_items_max
    if count > most:
        raise HttpProblem(
            413, "too-many", f"at most {most} are allowed in a request, not {count}; send them in parts"
        )


def answer(document: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON answer."""
    return Response(_encode(document), status, headers, media_type=JSON)


REF = "#/components/schemas/{name}"
PROBLEMS: dict[int, str] = {
    400: "The body is not what its content type says.",
    401: "A valid token is needed.",
    403: "The token may not do that.",
    404: "There is nothing.",
    408: "The body came too slowly.",
    409: "Not now, or not in this mode.",
    413: "Too long, or too many at once.",
    415: "Not a content type that is taken here.",
    422: "It reads, but it is out of bounds.",
    429: "Too many requests, or too many claims at a time.",
    503: "The store gave no answer: send the same again.",
}
OPERATION_IDS = {
    "claims": "claimKeys",
    "complete": "completeClaims",
    "events": "sendEvents",
    "fail": "failClaims",
    "forget": "forgetRecord",
    "items": "sendItems",
    "livez": "isAlive",
    "metrics": "readMetrics",
    "purge": "purgeRecords",
    "readyz": "isReady",
    "release": "releaseClaims",
    "renew": "renewClaims",
    "scan": "listRecords",
    "set_window": "setWindow",
    "show": "showRecord",
    "stats": "countRecords",
    "store": "describeStore",
    "windows": "listWindows",
}
"""By the name of the route's function: generators name the methods of a client after it."""
EVERYWHERE = (400, 401, 403, 408, 413, 415, 422, 429, 503)
ABOUT = """\
Events arrive many times; semel makes their effect happen once. Any store, for every language.

Every endpoint needs `Authorization: Bearer semel_...`, unless the server runs with `--auth none`, on loopback.
A token belongs to one tenant, or to all; then `Semel-Tenant` names the one to act for.
"""


class Document:
    """Collects the schemas of the routes, and builds the document on first use."""

    def __init__(self) -> None:
        self.shapes: list[Any] = [ProblemDocument]
        self._made: dict[str, Any] | None = None

    def operation(
        self,
        *,
        takes: Any = None,
        gives: Any = None,
        example: Any = None,
        answer: Any = None,
        also: Sequence[int] = (),
        takes_types: Sequence[str] = (JSON,),
        gives_types: Sequence[str] = (JSON,),
    ) -> dict[str, Any]:
        """Return the arguments of a route: the schemas of its body and answer, with examples."""
        self.shapes += [each for each in (takes, gives) if each is not None]
        extra: dict[str, Any] = {}
        if takes is not None:
            content = {"schema": shape(takes)} | ({} if example is None else {"example": example})
            extra["requestBody"] = {
                "required": True,
                "content": {
                    kind: content if kind.endswith("json") else {"schema": shape(takes)}
                    for kind in takes_types
                },
            }
        good: dict[str, Any] = {"description": "Done."}
        if gives is not None:
            said = {"schema": shape(gives)} | ({} if answer is None else {"example": answer})
            good["content"] = dict.fromkeys(gives_types, said)
        responses: dict[int | str, Any] = {200: good}
        for status in sorted({*EVERYWHERE, *also}):
            problem = {PROBLEM_JSON: {"schema": shape(ProblemDocument)}}
            responses[status] = {"description": PROBLEMS[status], "content": problem}
        return {"openapi_extra": extra, "responses": responses}

    def build_document(self, app: FastAPI) -> dict[str, Any]:
        """Return the whole document, built once."""
        if self._made is None:
            self._made = self._build(app)
        return self._made

    def _build(self, app: FastAPI) -> dict[str, Any]:
        document = get_openapi(
            title="semel", version=app.version, description=ABOUT, routes=app.routes, tags=app.openapi_tags
        )
        _, components = msgspec.json.schema_components(self.shapes, ref_template=REF)
        parts = document.setdefault("components", {})
        parts["schemas"] = {
            name: each for name, each in parts.get("schemas", {}).items() if "Validation" not in name
        } | components
        parts["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"token": []}, {}]
        simplify(parts["schemas"])
        for operations in document["paths"].values():
            for operation in operations.values():
                for parameter in operation.get("parameters", ()):
                    drop_null(parameter["schema"])
        return document


def operation_id(route: APIRoute) -> str:
    """Return the id of a route's operation; routes outside the document need none."""
    return OPERATION_IDS.get(route.name, route.name)


def drop_null(schema: dict[str, Any]) -> None:
    """Say what a parameter is that may be left out: it cannot be null, and some generators cannot read that."""
    kinds = [each for each in schema.get("anyOf", ()) if each != {"type": "null"}]
    if len(kinds) == 1:
        del schema["anyOf"]
        schema.update(kinds[0])


def simplify(schema: Any) -> None:
    """Say the same in words that generators of clients can read.

    A tuple says `maxItems` instead of `items: false`; a choice of texts says that it is a text.
    """
    if isinstance(schema, list):
        for each in schema:
            simplify(each)
    if not isinstance(schema, dict):
        return
    if schema.get("items") is False:
        kinds = [
            each for at, each in enumerate(schema["prefixItems"]) if each not in schema["prefixItems"][:at]
        ]
        schema["items"] = kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
        schema["minItems"] = schema["maxItems"] = len(schema["prefixItems"])
    choices = schema.get("enum")
    if isinstance(choices, list) and all(isinstance(each, str) for each in choices):
        schema["type"] = "string"
    for each in schema.values():
        simplify(each)


def shape(kind: Any) -> dict[str, Any]:
    """Return the reference to a type's schema."""
    schema: dict[str, Any]
    (schema,), _ = msgspec.json.schema_components([kind], ref_template=REF)
    return schema
