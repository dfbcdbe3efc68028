"""The frameworks that people use, each as it is used."""

import sys
from collections.abc import Callable
from typing import Annotated, Any

import httpx2
import pytest
from fastapi import APIRouter, Depends, FastAPI, Response

import semel
from semel import AsyncSemel
from semel.http import Rules
from semel.http.asgi import AsgiIdempotency, by_authorization
from semel.http.fastapi import Idempotent, IdempotentRoute
from semel.stores import MemoryStore
from tests.http.conftest import Served

Serve = Callable[..., Served]


def opened() -> AsyncSemel:
    return semel.aopen(MemoryStore(), consumer="shop", window="2h")


def post(url: str, path: str, key: str | None = "k1", **options: Any) -> httpx2.Response:
    headers = {**({} if key is None else {"Idempotency-Key": key}), **options.pop("headers", {})}
    return httpx2.post(url + path, headers=headers, trust_env=False, **options)


def runs_once(url: str, path: str = "/charges") -> None:
    first, retry, other = (post(url, path, key, json={"cents": 5}) for key in ("k1", "k1", "k2"))
    assert first.status_code == retry.status_code == 201
    assert first.content == retry.content != other.content
    assert retry.headers["idempotent-replayed"] == "true"
    assert retry.headers["content-type"] == first.headers["content-type"]


def test_fastapi(serve: Serve) -> None:
    app, numbers = FastAPI(), iter(range(100))
    app.add_middleware(AsgiIdempotency, opened(), caller=None)

    @app.post("/charges", status_code=201)
    def charge(body: dict[str, int]) -> int:
        return next(numbers)

    runs_once(serve(app).url)


def test_litestar(serve: Serve) -> None:
    from litestar import Litestar
    from litestar import post as route
    from litestar.middleware import DefineMiddleware

    numbers = iter(range(100))

    @route("/charges")
    async def charge() -> dict[str, int]:
        return {"number": next(numbers)}

    middleware = [DefineMiddleware(AsgiIdempotency, client=opened(), caller=None)]
    runs_once(serve(Litestar([charge], middleware=middleware)).url)


def test_quart(serve: Serve) -> None:
    from quart import Quart

    app, numbers = Quart(__name__), iter(range(100))

    @app.post("/charges")
    async def charge() -> tuple[dict[str, int], int]:
        return {"number": next(numbers)}, 201

    app.asgi_app = AsgiIdempotency(app.asgi_app, opened(), caller=None)  # type: ignore[method-assign]
    runs_once(serve(app).url)


# --- the dependency of FastAPI ---


class Api:
    """Routes of several kinds, some guarded."""

    def __init__(self, client: AsyncSemel) -> None:
        self.ran: list[str] = []
        charging = Idempotent(client, caller=by_authorization, rules=Rules(required=True))
        noting = Idempotent(client, caller=None)
        router = APIRouter(prefix="/v1", route_class=IdempotentRoute)

        @router.post("/orders/{number}/pay", status_code=201, dependencies=[Depends(charging)])
        async def pay(number: int, response: Response) -> dict[str, int]:
            self.ran.append(f"pay {number}")
            return {"ran": len(self.ran)}

        @router.post("/notes")
        def note(key: Annotated[str | None, Depends(noting)]) -> str | None:
            self.ran.append("note")
            return key

        @router.post("/plain")
        def plain() -> None:
            self.ran.append("plain")

        self.app = FastAPI()
        self.app.include_router(router, prefix="/api")


AUTH = {"Authorization": "Bearer ann"}


def test_a_route_keeps_the_rules_of_its_dependency(serve: Serve) -> None:
    api = Api(opened())
    url = serve(api.app).url + "/api/v1"
    assert post(url, "/orders/1/pay", None, headers=AUTH).json()["type"] == "urn:semel:key-missing"
    assert post(url, "/orders/1/pay").status_code == 401
    first, retry = (post(url, "/orders/1/pay", headers=AUTH) for _ in range(2))
    assert (first.status_code, retry.status_code, retry.json()) == (201, 201, {"ran": 1})
    assert retry.headers["idempotent-replayed"] == "true"
    assert post(url, "/orders/2/pay", headers=AUTH).status_code == 422, (
        "one route: another path, the same key"
    )
    assert api.ran == ["pay 1"]


def test_a_route_may_take_the_key_as_its_parameter(serve: Serve) -> None:
    api = Api(opened())
    url = serve(api.app).url + "/api/v1"
    assert [post(url, "/notes", '"n1"').json() for _ in range(2)] == ["n1", "n1"]
    assert [post(url, "/notes", None).json() for _ in range(2)] == [None, None]
    assert api.ran == ["note", "note", "note"]


def test_a_route_without_the_dependency_is_like_any_other(serve: Serve) -> None:
    api = Api(opened())
    url = serve(api.app).url + "/api/v1"
    for _ in range(2):
        assert post(url, "/plain").status_code == 200
    assert api.ran == ["plain", "plain"]


def test_openapi_shows_the_header_its_window_and_the_refusals() -> None:
    paths = Api(opened()).app.openapi()["paths"]
    pay = paths["/api/v1/orders/{number}/pay"]["post"]
    header = next(each for each in pay["parameters"] if each["in"] == "header")
    assert (header["name"], header["required"]) == ("idempotency-key", True)
    assert "7200 seconds" in header["description"]
    assert {"400", "401", "409", "413", "422", "503"} <= set(pay["responses"])
    assert "application/problem+json" in pay["responses"]["409"]["content"]
    noted = paths["/api/v1/notes"]["post"]["parameters"]
    assert [(each["name"], each["required"]) for each in noted] == [("idempotency-key", False)]
    assert "409" not in paths["/api/v1/plain"]["post"]["responses"]


@pytest.mark.parametrize("where", ["route class", "include"])
def test_a_dependency_that_nothing_keeps_fails_aloud(serve: Serve, where: str) -> None:
    ran: list[int] = []
    guarded = Idempotent(opened(), caller=None)
    router = APIRouter(route_class=IdempotentRoute) if where == "include" else APIRouter()

    @router.post("/charges", dependencies=[] if where == "include" else [Depends(guarded)])
    def charge() -> None:
        ran.append(1)

    app = FastAPI()
    app.include_router(router, dependencies=[Depends(guarded)] if where == "include" else None)
    assert post(serve(app).url, "/charges").status_code == 500
    assert ran == []
    assert post(serve(app).url, "/charges", None).status_code == 200


def test_neither_middleware_needs_a_framework() -> None:
    import subprocess

    look = "import sys, semel.asgi, semel.wsgi; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", look], capture_output=True, text=True, check=True
    ).stdout.split()
    assert {"fastapi", "starlette", "flask", "django", "http_sf", "asyncio"}.intersection(loaded) == set()
