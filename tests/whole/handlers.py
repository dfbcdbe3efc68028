"""The handlers that `semel serve`, `consume` and `listen` run in a storm."""

import asyncio
import random
from typing import Any

import semel
from semel.brokers import Arrival
from semel.ingest.intake import Event
from tests.whole.scene import Scene, UserDatabase, pause

__all__ = ["WORK_MAX_S", "note", "on_feed", "on_message", "on_served", "transfer", "transfer_chain"]

WORK_MAX_S = 0.02


def note(scene: Scene, flow: str, event: str, run: str = "") -> None:
    """The effect: a line that semel does not know of, with the key that another system would honour."""
    scene.ledger.write("effect", flow, event, run, semel.current().idempotency_key)


def on_served(event: Event) -> None:
    """An event of /v1/events."""
    note(Scene.current(), "serve", event.id)
    pause(random.uniform(0, WORK_MAX_S))


async def on_message(message: Arrival) -> None:
    """A message of the stream `orders`."""
    note(Scene.current(), "consume", semel.current().key)
    await asyncio.sleep(random.uniform(0, WORK_MAX_S))


async def on_feed(event: Event) -> None:
    """An event of the WebSocket source."""
    note(Scene.current(), "listen", event.id)
    await asyncio.sleep(random.uniform(0, WORK_MAX_S))


def transfer(connection: Any, message: Arrival) -> None:
    """A message of the stream `transfers`, in the runner's transaction."""
    UserDatabase(Scene.current()).insert(connection, "transfer", semel.current().key)


def transfer_chain(connection: Any, message: dict[str, str]) -> None:
    """A message that a relay has published."""
    UserDatabase(Scene.current()).insert(connection, message["flow"], message["event"])
