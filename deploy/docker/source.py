"""A stand-in for your feed: sends each event to every listener that is connected, and never again."""

import asyncio
import json
import os

from websockets.asyncio.server import ServerConnection, broadcast, serve

LISTENERS = int(os.environ.get("LISTENERS", "5"))
EVENTS = int(os.environ.get("EVENTS", "1000"))
PAUSE_S = float(os.environ.get("PAUSE_S", "0.1"))
ADDRESS = os.environ.get("ADDRESS", "0.0.0.0:8765")


async def main() -> None:
    """Wait for the listeners, send the events, and stay."""
    all_here = asyncio.Event()

    async def stay(socket: ServerConnection) -> None:
        if len(server.connections) >= LISTENERS:
            all_here.set()
        await socket.wait_closed()

    host, _, port = ADDRESS.rpartition(":")
    async with serve(stay, host, int(port)) as server:
        await all_here.wait()
        for number in range(EVENTS):
            event = {"id": f"evt-{number}", "type": "measured", "value": number}
            broadcast(server.connections, json.dumps(event))
            await asyncio.sleep(PAUSE_S)
        await server.serve_forever()


asyncio.run(main())
