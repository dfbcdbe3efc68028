"""`POST /v1/items`: a mixed batch of every kind of item, as the http store sends it."""

from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response

from semel.core.commands import Answer, Item
from semel.server.auth import to_caller_answer, to_store_item
from semel.server.problems import HttpProblem, problem_of_body
from semel.server.routes.base import (
    JSON,
    Document,
    answer,
    authorize,
    body_of,
    content_type,
    many,
    wrong_type,
)
from semel.server.service import check_any_done, refusal
from semel.stores.http import encoding
from semel.stores.http.encoding import ItemRefusal
from semel.windows import FOREVER_US

__all__ = ["add"]

TAG = "items"
EXAMPLE: list[dict[str, Any]] = [
    {
        "type": "claim",
        "id": ["", "billing", "evt_1"],
        "owner": "AAECAwQFBgcICQoLDA0ODw==",
        "lease_us": 30_000_000,
        "window_us": 86_400_000_000,
    }
]
GRANTED: list[dict[str, Any]] = [
    {
        "granted": {
            "fence": 1731700000000000,
            "attempt": 1,
            "lease_until": 1731700030000000,
            "first_seen": 1731700000000000,
        }
    }
]
TYPES = (JSON, encoding.ITEMS_JSON, encoding.ITEMS_MSGPACK)


class StoreDocument(msgspec.Struct, frozen=True):
    """The store of the service, and its limits."""

    store: str
    durable: bool
    exact: bool
    fenced: bool
    shared: bool
    batch_items_max: int
    body_bytes_max: int
    value_bytes_max: int
    lease_min_us: int
    lease_max_us: int
    window_max_us: int
    endless: bool
    refreshes: bool


def add(app: FastAPI, document: Document) -> None:
    """Add the routes."""
    routes = APIRouter(prefix="/v1", tags=[TAG])

    @routes.post(
        "/items",
        summary="Execute a batch of items",
        **document.operation(
            takes=list[Item],
            gives=list[dict[str, Any]],
            example=EXAMPLE,
            answer=GRANTED,
            takes_types=TYPES,
            gives_types=TYPES,
            also=(409,),
        ),
    )
    async def items(request: Request) -> Response:
        """Answers are in the order of their items, each an object with one member, the kind of the answer.

        Each item is atomic; items on the same record are executed in order. An item that this token
        may not send, or that is out of bounds, gets `refused`; if all do, the status says so.
        """
        return await carry_out(request)

    @routes.get("/store", summary="The store of this service", **document.operation(gives=StoreDocument))
    async def store(request: Request) -> Response:
        """The store's capabilities and the service's limits; the http store reads them when it opens."""
        service = authorize(request, "read").service
        behind, limits = service.runtime.store, service.settings.limits
        powers = behind.capabilities
        return answer(
            StoreDocument(
                behind.name.partition(":")[0],
                powers.durable,
                powers.exact,
                powers.fenced,
                powers.shared,
                limits.batch_items_max,
                limits.body_bytes_max,
                limits.value_bytes_max,
                limits.lease_min_us,
                limits.lease_max_us,
                limits.window_max_us,
                powers.endless and limits.window_max_us >= FOREVER_US,
                powers.refreshes,
            )
        )

    app.include_router(routes)


async def carry_out(request: Request) -> Response:
    """Execute the items of a request, only for the caller's tenant."""
    kind = content_type(request)
    if kind not in TYPES:
        raise wrong_type(request, *TYPES)
    ask = authorize(request, "read")
    packed = kind == encoding.ITEMS_MSGPACK
    body = await body_of(request)
    try:
        items = encoding.items_from(body, packed=packed)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise problem_of_body(error) from error
    many(len(items), ask.service, ask.caller)
    mine: list[Item] = []
    answers: list[Answer] = []
    for item in items:
        try:
            mine.append(to_store_item(ask.caller, item))
            answers.append(None)
        except HttpProblem as problem:
            answers.append(refusal(problem))
    found = iter(await ask.service.carry_out(ask.caller, mine))
    answers = [
        each if isinstance(each, ItemRefusal) else to_caller_answer(ask.caller, next(found))
        for each in answers
    ]
    check_any_done(answers)
    return Response(encoding.answers_to(answers, packed=packed), media_type=kind)
