"""The presets: which bodies are the same, and the one for agentic commerce in every framework."""

import threading
from typing import Any

import flask
import httpx2
import pytest
from fastapi import APIRouter, Depends, FastAPI

import semel
from semel.http import PRESETS, Rules
from semel.http.asgi import AsgiIdempotency
from semel.http.fastapi import Idempotent, IdempotentRoute
from semel.http.presets import same_json
from semel.integrations.flask import Idempotency
from semel.stores import MemoryStore
from tests.http import agentic
from tests.http.conftest import House
from tests.http.test_frameworks import Serve

ACP = Rules(preset="acp")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (b'{"a": 1, "b": [1, 2]}', b'{"b":[1,2],"a":1.0}', True),
        (b'{"a": 1e2}', b'{"a": 100}', True),
        (b"-0.0", b"0", True),
        (b"1200", b"12e2", True),
        (b"0.1", b"0.10000000000000000000000000000000001", False),
        (b"1e999999999", b"1e999999998", False),
        (b'{"a": null}', b"{}", False),
        (b"[1, 2]", b"[2, 1]", False),
        (b'"1"', b"1", False),
        (b"true", b'"true"', False),
        (b"NaN", b"nan", False),
        (b"not JSON", b"not  JSON", False),
        (b"[" * 100_000, b"[" * 100_001, False),
    ],
)
def test_which_bodies_are_the_same(one: bytes, other: bytes, same: bool) -> None:
    assert (same_json(one) == same_json(other)) is same


def test_what_the_preset_says() -> None:
    assert ACP.required
    assert not Rules().required
    kept = [
        status
        for status in (200, 201, 400, 401, 403, 404, 409, 429, 500, 503)
        if PRESETS["acp"].keeps(status)
    ]
    assert kept == [200, 201, 400, 404, 409]
    assert PRESETS["acp"].window_s_min == 86_400


def caller(url: str) -> agentic.Post:
    def post(path: str, body: Any, key: str | None) -> tuple[int, dict[str, str], Any]:
        headers = {"Content-Type": "application/json", **({} if key is None else {"Idempotency-Key": key})}
        answer = httpx2.post(url + path, content=body, headers=headers, trust_env=False)
        return answer.status_code, dict(answer.headers), answer.json()

    return post


def test_asgi(serve: Serve) -> None:
    app, ran = FastAPI(), list[str]()

    @app.post("/checkouts/{number}", status_code=201)
    def checkout(number: str) -> dict[str, int]:
        ran.append(number)
        return {"ran": len(ran)}

    app.add_middleware(AsgiIdempotency, semel.aopen(MemoryStore(), consumer="shop"), caller=None, rules=ACP)
    agentic.check(caller(serve(app).url), ran)


def test_a_route_of_fastapi(serve: Serve) -> None:
    ran = list[str]()
    guarded = Idempotent(semel.aopen(MemoryStore(), consumer="shop"), caller=None, rules=ACP)
    router = APIRouter(route_class=IdempotentRoute)

    @router.post("/checkouts/{number}", status_code=201, dependencies=[Depends(guarded)])
    def checkout(number: str) -> dict[str, int]:
        ran.append(number)
        return {"ran": len(ran)}

    app = FastAPI()
    app.include_router(router)
    agentic.check(caller(serve(app).url), ran)
    shown = app.openapi()["paths"]["/checkouts/{number}"]["post"]["responses"]["409"]
    assert list(shown["content"]) == ["application/json"]


def test_flask() -> None:
    app, ran = flask.Flask("shop"), list[str]()

    @app.post("/checkouts/<number>")
    def checkout(number: str) -> tuple[dict[str, int], int]:
        ran.append(number)
        return {"ran": len(ran)}, 201

    def post(path: str, body: Any, key: str | None) -> tuple[int, dict[str, str], Any]:
        headers = {} if key is None else {"Idempotency-Key": key}
        answer = app.test_client().post(path, data=body, headers=headers, content_type="application/json")
        return answer.status_code, {name.lower(): value for name, value in answer.headers}, answer.json

    with semel.open("memory:", consumer="shop") as once:
        Idempotency(once, caller=None, rules=ACP, app=app)
        agentic.check(post, ran)


def test_a_request_in_flight_and_a_server_error(house: Any) -> None:
    shop: House = house(ACP)
    first = threading.Thread(target=lambda: shop.post("/slow"))
    first.start()
    assert shop.shop.entered.wait(60)
    busy = shop.post("/slow")
    shop.shop.gate.set()
    first.join()
    assert (busy.status_code, busy.json()["code"]) == (409, "idempotency_in_flight")
    assert int(busy.headers["retry-after"]) >= 1
    shop.shop.status = 500
    assert [shop.post("/charges", {}, key="k2").json() for _ in range(2)] == [{"number": 2}, {"number": 3}]
