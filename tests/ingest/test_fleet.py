"""Five real servers, the same events to all, kills and a restart in the middle: one row per event, none lost."""

import asyncio
import json
import signal
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

import semel
from tests.ingest import signed
from tests.ingest.fleet import Fleet, fleet
from tests.services import postgres, redis
from tests.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

INSTANCES = 5


def event(number: int, kind: str = "plain") -> dict[str, Any]:
    return {"id": f"evt-{number}", "type": kind, "amount": number}


async def send_to(port: int, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Send all to one instance, over and over until each has an answer that is not `busy`."""
    waiting = {each["id"]: each for each in events}
    answers = []
    async with connect(f"ws://127.0.0.1:{port}/events") as socket:
        for each in events:
            await socket.send(json.dumps(each))
        while waiting:
            answer = json.loads(await asyncio.wait_for(socket.recv(), 60))
            answers.append(answer)
            if answer["status"] == "busy":
                await socket.send(json.dumps(waiting[answer["id"]]))
            else:
                waiting.pop(answer["id"])
    return answers


async def send_to_all(
    running: Fleet, events: list[dict[str, Any]], clients: int = 1
) -> list[list[dict[str, Any]]]:
    return await asyncio.gather(*(send_to(port, events) for port in running.pids for _ in range(clients)))


async def test_the_same_events_to_five_instances_are_processed_and_persisted_once(tmp_path: Path) -> None:
    events = [event(number) for number in range(100)]
    names = {each["id"] for each in events}
    with fleet(tmp_path, redis.place("fleet"), postgres.url()) as running:
        running.start(INSTANCES)
        answers = await send_to_all(running, events, clients=3)
        statuses = Counter((each["id"], each["status"]) for many in answers for each in many)
        rows = await asyncio.to_thread(running.await_rows, names)
    assert rows == Counter(names)
    assert Counter(name for name, _, _ in running.runs()) == Counter(names), "a handler ran twice"
    assert {name: statuses[name, "accepted"] for name in names} == dict.fromkeys(names, 1)
    assert {name: statuses[name, "duplicate"] for name in names} == dict.fromkeys(names, 14)


async def test_another_instance_takes_over_when_the_owner_is_killed(tmp_path: Path) -> None:
    with fleet(tmp_path, redis.place("takeover"), postgres.url()) as running:
        running.start(INSTANCES)
        await send_to_all(running, [event(1, "hangs")])
        owner = await asyncio.to_thread(running.owner, "evt-1")
        assert running.rows() == Counter(), "it is in the middle of it"
        running.kill(owner)
        rows = await asyncio.to_thread(running.await_rows, {"evt-1"})  # nobody sends it again
    assert rows == Counter({"evt-1": 1})
    (first, second) = running.runs()
    assert first == ("evt-1", owner, 1)
    assert second[1] != owner
    assert second[2] == 2


async def test_a_failed_attempt_is_repeated_though_nobody_sends_it_again(tmp_path: Path) -> None:
    with fleet(tmp_path, redis.place("failed"), f"sqlite:///{tmp_path / 'rows.db'}") as running:
        running.start(2)
        await send_to_all(running, [event(1, "fails")])
        rows = await asyncio.to_thread(running.await_rows, {"evt-1"})
    assert rows == Counter({"evt-1": 1})
    assert [attempt for _, _, attempt in running.runs()] == [1, 2]


async def test_kills_and_a_restart_of_redis_lose_nothing(tmp_path: Path) -> None:
    events = [event(number) for number in range(150)]
    hanging = [event(1000 + number, "hangs") for number in range(3)]
    names = {each["id"] for each in events + hanging}
    with redis.own(tmp_path) as keeper, fleet(tmp_path, keeper.url, postgres.url(), takes_s=0.2) as running:
        running.start(INSTANCES)
        await send_to_all(running, hanging)
        owners = {await asyncio.to_thread(running.owner, each["id"]) for each in hanging}
        sending = [asyncio.create_task(stubborn(running, port, events)) for port in list(running.pids)]
        await until(lambda: len(running.rows()) > 10, 30)
        for owner in owners:
            running.kill(owner)
        await until(lambda: len(running.rows()) > 40, 30)
        assert len(running.rows()) < len(names), "the restart comes in the middle"
        await asyncio.to_thread(keeper.restart)
        delivered = await asyncio.gather(*sending)
        rows = await asyncio.to_thread(running.await_rows, names)
    assert rows == Counter(names)
    assert sum(delivered) >= 1, "somebody was told of every event"
    begun = Counter(name for name, _, _ in running.runs())
    # A kill repeats what ran there, ten handlers at most; a restart what ended while nobody could be told.
    assert sum(begun.values()) - len(begun) <= (len(owners) + INSTANCES) * 10


async def stubborn(running: Fleet, port: int, events: list[dict[str, Any]]) -> bool:
    """Send all to one instance; `False`: it was killed before it had answered for each."""
    try:
        await send_to(port, events)
    except (ConnectionClosed, OSError):
        assert port not in running.pids, "an instance closed a socket, and was not killed"
        return False
    return True


async def test_a_webhook_is_taken_over_from_a_killed_instance(tmp_path: Path) -> None:
    now = int(time.time())
    body = json.dumps({"id": "ignored", "type": "hangs"}).encode()
    headers = signed.standard(body, message_id="msg-1", at=now)
    with fleet(tmp_path, redis.place("hooks"), postgres.url()) as running:
        running.start(3)
        async with httpx2.AsyncClient(trust_env=False, timeout=30) as client:
            urls = [f"http://127.0.0.1:{port}/hooks" for port in running.pids]
            posts = [client.post(url, content=body, headers=headers) for url in urls for _ in range(5)]
            answers = await asyncio.gather(*posts)
            assert {(answer.status_code, answer.content) for answer in answers} == {(202, b"")}
            forged = headers | {"webhook-id": "msg-2"}
            assert (await client.post(urls[0], content=body, headers=forged)).status_code == 401
        owner = await asyncio.to_thread(running.owner, "msg-1")
        running.kill(owner)
        rows = await asyncio.to_thread(running.await_rows, {"msg-1"})
    assert rows == Counter({"msg-1": 1})
    assert [attempt for _, _, attempt in running.runs()] == [1, 2]


async def test_an_instance_that_stops_finishes_what_it_has_accepted(tmp_path: Path) -> None:
    events = [event(number) for number in range(40)]
    names = {each["id"] for each in events}
    rows = f"sqlite:///{tmp_path / 'rows.db'}"
    with fleet(tmp_path, redis.place("stops"), rows, takes_s=0.05) as running:
        running.start(1)
        (port, pid) = next(iter(running.pids.items()))
        await send_to(port, events)
        await asyncio.to_thread(running.kill, pid, signal.SIGTERM)
        assert running.rows() == Counter(names)
    assert Counter(name for name, _, _ in running.runs()) == Counter(names)


async def test_what_is_no_event_is_answered_so_and_leaves_no_record(tmp_path: Path) -> None:
    large = json.dumps({"id": "large", "more": "y" * 300_000})
    wrong = ["", "no json", "[]", "{}", '{"id": true}', '{"id": ""}', '{"id": "a", "type": 7}',
             "[" * 10_000, json.dumps({"id": "x" * 600}), large]  # fmt: skip
    store = f"sqlite:///{tmp_path / 'records.db'}"
    with fleet(tmp_path, store, f"sqlite:///{tmp_path / 'rows.db'}") as running:
        running.start(1)
        (port,) = running.pids
        async with AsyncExitStack() as stack:
            socket = await stack.enter_async_context(connect(f"ws://127.0.0.1:{port}/events"))
            for message in wrong:
                await socket.send(message)
                answer = json.loads(await socket.recv())
                assert answer["status"] == "invalid", message[:40]
                assert answer["reason"]
        assert await send_to(port, [event(1)]) == [{"id": "evt-1", "status": "accepted"}]
        await asyncio.to_thread(running.await_rows, {"evt-1"})
        running.stop()
    with semel.open(store, consumer="fleet") as once:
        assert [record.key for record in once.records.list()] == ["evt-1"]
