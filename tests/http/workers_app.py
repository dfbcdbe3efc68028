"""Applications for gunicorn and uvicorn: each answers with its worker's process id, and writes a line per effect."""

import asyncio
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import semel
from semel.asgi import IdempotencyMiddleware as AsgiMiddleware
from semel.wsgi import IdempotencyMiddleware as WsgiMiddleware

LEDGER = Path(os.environ["LEDGER"])
HEADERS = [("Content-Type", "text/plain")]
once = semel.open(os.environ["STORE"], consumer="shop")


def charge() -> bytes:
    with LEDGER.open("a") as ledger:
        ledger.write("charged\n")
    return str(os.getpid()).encode()


def plain_wsgi(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    start_response("201 Created", HEADERS)
    return [charge()]


async def plain_asgi(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] != "http":
        await asyncio.sleep(0)
        return
    headers = [(name.lower().encode(), value.encode()) for name, value in HEADERS]
    body = charge()
    headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": 201, "headers": headers})
    await send({"type": "http.response.body", "body": body})


wsgi = WsgiMiddleware(plain_wsgi, once, caller=None)
asgi = AsgiMiddleware(plain_asgi, once, caller=None)
