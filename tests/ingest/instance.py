"""One instance of a fleet: a FastAPI application with sockets at `/events` and webhooks at `/hooks`."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI
from starlette.routing import Route, WebSocketRoute

import semel
from semel.ingest import webhooks
from semel.ingest.sockets import Acceptor, Event, EventTable, Intake, IntakeLimits

SETUP = json.loads(os.environ["FLEET"])
RUNS = Path(SETUP["runs"])

once = semel.aopen(SETUP["store"], consumer="fleet", lease=SETUP["lease"])
hooks = semel.aopen(SETUP["store"], consumer="hooks", lease=SETUP["lease"])
table = EventTable(SETUP["rows"], table=SETUP["table"])


async def handle(event: Event) -> None:
    """Write down who runs what; the first attempt at an event that hangs never ends."""
    attempt = semel.current().attempt
    with RUNS.open("a") as file:  # noqa: ASYNC230 - a line, written before anything can happen
        file.write(f"{event.id} {os.getpid()} {attempt}\n")
    if event.type == "hangs" and attempt == 1:
        await asyncio.Event().wait()
    if event.type == "fails" and attempt == 1:
        raise ConnectionError("the first attempt fails")
    await asyncio.sleep(SETUP.get("takes_s", 0))


process = table.after(handle)
intake = Intake(once, process, pace=IntakeLimits(sweep_s=0.1))
receiver = webhooks.Receiver(
    hooks,
    webhooks.standard(SETUP["secret"]),
    process,
    pace=IntakeLimits(sweep_s=0.1),
)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with once, hooks, intake, receiver:
        yield
    await table.close()


app = FastAPI(
    lifespan=lifespan,
    routes=[WebSocketRoute("/events", Acceptor(intake)), Route("/hooks", receiver, methods=["POST"])],
)


@app.get("/")
async def alive() -> dict[str, int]:
    return {"pid": os.getpid()}
