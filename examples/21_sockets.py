"""Two instances receive the same events from a WebSocket, which sends each once: one row for each event."""

import asyncio
import json
import sqlite3
from contextlib import closing

from websockets.asyncio.server import ServerConnection, serve

import semel
from semel.ingest.sockets import Event, EventTable, Intake, Listener

EVENTS = 10
done: set[str] = set()
all_done = asyncio.Event()


async def handle(event: Event) -> None:
    done.add(event.id)  # or call another system, with semel.current().idempotency_key
    if len(done) == EVENTS:
        all_done.set()


async def feed(socket: ServerConnection) -> None:
    for number in range(EVENTS):  # the same events to every client that connects, and never again
        await socket.send(json.dumps({"id": f"evt-{number}", "type": "measured", "value": number}))
    await socket.wait_closed()


async def instance(url: str) -> int:
    once, table = semel.aopen("sqlite:///claims.db", consumer="sensors"), EventTable("sqlite:///events.db")
    async with once, table, Intake(once, table.after(handle)) as intake:
        listener = Listener(url, intake)
        running = asyncio.create_task(listener.run())
        await all_done.wait()
        listener.stop()
        await running
    return listener.counts.accepted


async def main() -> None:
    async with serve(feed, "127.0.0.1", 0) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        accepted = await asyncio.gather(*(instance(f"ws://127.0.0.1:{port}") for _ in range(2)))
    print("accepted by one or the other:", sum(accepted))
    with closing(sqlite3.connect("events.db")) as rows:
        print("rows:", rows.execute("SELECT count(*), count(DISTINCT event_id) FROM events").fetchone())


asyncio.run(main())

# prints:
# accepted by one or the other: 10
# rows: (10, 10)
