"""The OpenAPI document: the schemas that requests are decoded with, and an example for each."""

from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from semel.server.problems import PROBLEM_JSON, ProblemDocument

__all__ = ["Document", "shape"]

REF = "#/components/schemas/{name}"
JSON = "application/json"
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
EVERYWHERE = (400, 401, 403, 408, 413, 415, 422, 429, 503)
ABOUT = """\
Events arrive many times; semel makes their effect happen once. Any store, for every language.

Every endpoint needs `Authorization: Bearer semel_...`, unless the server listens on loopback and no token was made.
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
        return document


def shape(kind: Any) -> dict[str, Any]:
    """Return the reference to a type's schema."""
    schema: dict[str, Any]
    (schema,), _ = msgspec.json.schema_components([kind], ref_template=REF)
    return schema
