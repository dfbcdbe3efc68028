"""An API that is safe to retry: the second request with a key gets the first one's response."""

import asyncio

import httpx2
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import semel
from semel.asgi import IdempotencyMiddleware

charges: list[int] = []


async def charge(request: Request) -> JSONResponse:
    charges.append((await request.json())["cents"])
    return JSONResponse({"charge": len(charges)}, status_code=201)


async def main() -> None:
    once = semel.aopen("sqlite:///keys.db", consumer="api")
    app = Starlette(routes=[Route("/charges", charge, methods=["POST"])])
    app.add_middleware(IdempotencyMiddleware, once, caller=None)
    async with (
        once,
        httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://shop.example") as http,
    ):
        for key, cents in (("k1", 500), ("k1", 500), ("k1", 900), ("k2", 900)):
            answer = await http.post("/charges", json={"cents": cents}, headers={"Idempotency-Key": key})
            replayed = answer.headers.get("idempotent-replayed", "false")
            print(key, cents, answer.status_code, answer.json().get("charge"), f"replayed={replayed}")
    print("charged:", charges)


asyncio.run(main())

# prints:
# k1 500 201 1 replayed=false
# k1 500 201 1 replayed=true
# k1 900 422 None replayed=false
# k2 900 201 2 replayed=false
# charged: [500, 900]
