"""A server to be killed: `python -m tests.http.victim PORT FOLDER MODE`.

Its handler charges a sink that knows the idempotency key it is given, then waits for the test's leave.
"""

import sys
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import semel
from semel.http import Rules
from semel.http.asgi import AsgiIdempotency
from tests.waiting import until


def main() -> None:
    port, folder, mode = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]

    async def charge(request: Request) -> Response:
        key = semel.current().idempotency_key
        with (folder / "runs").open("a") as runs:
            runs.write(f"{key}\n")
        (folder / "charges").mkdir(exist_ok=True)
        (folder / "charges" / key).touch()  # a sink that honours the key: the same twice is one
        await until((folder / "leave").exists)
        return JSONResponse({"charged": key}, 201)

    client = semel.aopen(f"sqlite:///{folder}/keys.db", consumer="shop", lease="500ms", mode=mode)  # type: ignore[arg-type]
    app = Starlette(routes=[Route("/charges", charge, methods=["POST"])])
    app.add_middleware(AsgiIdempotency, client, caller=None, rules=Rules(wait_s=20))
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="critical", timeout_graceful_shutdown=1)


if __name__ == "__main__":
    main()
