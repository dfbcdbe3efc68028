"""The route that accepts sockets, without a server: who may connect, and what a leaving client leaves."""

import asyncio
import json
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import pytest

import semel
from semel.ingest.sockets import Acceptor, Event, Intake
from tests.waiting import until

pytestmark = pytest.mark.anyio

Message = MutableMapping[str, Any]


class Socket:
    """The server's side of one connection."""

    def __init__(self, *texts: str, leaves: bool = True) -> None:
        self.sent: list[Message] = []
        self.arriving: list[Message] = [{"type": "websocket.connect"}]
        self.arriving += [{"type": "websocket.receive", "text": text} for text in texts]
        self.leaving = asyncio.Event()
        if leaves:
            self.leaving.set()

    async def receive(self) -> Message:
        if self.arriving:
            return self.arriving.pop(0)
        await self.leaving.wait()
        return {"type": "websocket.disconnect", "code": 1000}

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    @property
    def answers(self) -> list[Any]:
        return [json.loads(each["text"]) for each in self.sent if each["type"] == "websocket.send"]


async def test_who_is_not_allowed_is_closed_before_anything_is_read(tmp_path: Path) -> None:
    once = semel.aopen(f"sqlite:///{tmp_path / 'records.db'}", consumer="accept")
    done: list[str] = []

    async def handle(event: Event) -> None:
        done.append(event.id)

    async def later(scope: Message) -> bool:
        return bool(scope["path"] == "/open")

    async with once, Intake(once, handle) as intake:
        for authorize in (lambda scope: scope["path"] == "/open", later):
            acceptor = Acceptor(intake, authorize=authorize)
            stranger = Socket('{"id": "a"}')
            await acceptor({"type": "websocket", "path": "/"}, stranger.receive, stranger.send)
            assert stranger.sent == [{"type": "websocket.close", "code": 1008}]
            friend = Socket('{"id": "b"}', leaves=False)
            serving = asyncio.create_task(
                acceptor({"type": "websocket", "path": "/open"}, friend.receive, friend.send)
            )
            await until(lambda friend=friend: friend.answers)  # type: ignore[misc]
            friend.leaving.set()
            await serving
    assert done == ["b"]


async def test_a_client_that_leaves_at_once_has_handed_over_what_it_sent(tmp_path: Path) -> None:
    once = semel.aopen(f"sqlite:///{tmp_path / 'records.db'}", consumer="accept")
    done: set[str] = set()
    names = {f"evt-{number}" for number in range(50)}

    async def handle(event: Event) -> None:
        done.add(event.id)

    async with once, Intake(once, handle) as intake:
        hasty = Socket(*(json.dumps({"id": name}) for name in sorted(names)))
        await Acceptor(intake)({"type": "websocket", "path": "/"}, hasty.receive, hasty.send)
        await until(lambda: done == names)


async def test_a_broken_intake_is_told_as_busy(tmp_path: Path) -> None:
    once = semel.aopen(f"sqlite:///{tmp_path / 'records.db'}", consumer="accept")

    async def handle(event: Event) -> None: ...

    socket = Socket('{"id": "a"}', leaves=False)
    not_started = Intake(once, handle)
    serving = asyncio.create_task(
        Acceptor(not_started)({"type": "websocket", "path": "/"}, socket.receive, socket.send)
    )
    await until(lambda: socket.answers)
    socket.leaving.set()
    await serving
    (answer,) = socket.answers
    assert (answer["id"], answer["status"]) == ("a", "busy")
