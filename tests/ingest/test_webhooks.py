"""What a sender of webhooks is answered, and what is left in the store."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

import semel
from semel import Policy
from semel.errors import UsageError
from semel.ingest import webhooks
from semel.ingest.webhooks import Event, IntakeLimits, Receiver
from tests.ingest import signed
from tests.ingest.fleet import uvicorn
from tests.ingest.signed import BODY, NOW, SECRET
from tests.services import redis, server
from tests.waiting import await_true, until

pytestmark = pytest.mark.anyio

Client = httpx2.AsyncClient


class Seen:
    """A handler that counts, and waits or fails when told."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: Exception | None = None

    async def __call__(self, event: Event) -> str:
        self.events.append(event)
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return "value"


@asynccontextmanager
async def serving(
    store: str, seen: Seen, *, policy: Policy | None = None, **options: Any
) -> AsyncIterator[tuple[Client, semel.AsyncSemel]]:
    once = semel.aopen(store, consumer="hooks", lease="1s", policy=policy or Policy())
    receiver = Receiver(once, webhooks.standard(SECRET), seen, now_s=lambda: NOW, **options)
    transport = httpx2.ASGITransport(app=receiver)
    async with once, receiver, Client(transport=transport, base_url="http://here") as client:
        yield client, once


def stored(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'records.db'}"


async def post(client: Client, headers: dict[str, str] | None = None, body: bytes = BODY) -> httpx2.Response:
    return await client.post("/", content=body, headers=signed.standard(body) if headers is None else headers)


async def keys(once: semel.AsyncSemel) -> list[str]:
    return [record.key async for record in once.records.list()]


async def test_a_duplicate_is_answered_as_the_first_and_not_run(tmp_path: Path) -> None:
    seen = Seen()
    async with serving(stored(tmp_path), seen) as (client, _):
        answers = await asyncio.gather(*(post(client) for _ in range(20)))
        await until(lambda: seen.events)
        answers.append(await post(client))
    assert {(each.status_code, each.content) for each in answers} == {(202, b"")}
    assert seen.events == [Event(id="msg_1", type="order.paid", body=BODY)]
    assert seen.events[0].payload["cents"] == 500


async def test_the_answer_does_not_wait_for_the_handler(tmp_path: Path) -> None:
    seen = Seen()
    seen.gate.clear()
    async with serving(stored(tmp_path), seen) as (client, once):
        assert (await post(client)).status_code == 202
        assert (await post(client)).status_code == 202, "also while the first is running"
        record = await once.records.lookup("msg_1")
        assert record is not None
        assert record.journal is not None
        seen.gate.set()
    assert len(seen.events) == 1


BAD = {
    "no headers": ({}, BODY, 401),
    "another body": (signed.standard(), BODY + b" ", 401),
    "too old": (signed.standard(at=NOW - 301), BODY, 401),
    "from the future": (signed.standard(at=NOW + 301), BODY, 401),
    "not base64": (signed.standard() | {"webhook-signature": "v1,!!!"}, BODY, 401),
    "not ASCII": (signed.standard() | {"webhook-signature": "v1,\u00e9"}, BODY, 401),
    "no number": (signed.standard() | {"webhook-timestamp": "soon"}, BODY, 401),
    "huge number": (signed.standard() | {"webhook-timestamp": "9" * 400}, BODY, 401),
    "too large": ({}, b"x" * 300_000, 413),
    "compressed": (signed.standard() | {"content-encoding": "gzip"}, BODY, 415),
    "too many headers": ({f"x-{n}": "y" * 4000 for n in range(20)}, BODY, 431),
}


@pytest.mark.parametrize("answer", ["journaled", "synchronous"])
@pytest.mark.parametrize("case", BAD)
async def test_what_is_refused_leaves_no_record(tmp_path: Path, case: str, answer: str) -> None:
    headers, body, status = BAD[case]
    seen = Seen()
    async with serving(stored(tmp_path), seen, answer=answer) as (client, once):
        raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        refused = await client.post("/", content=body, headers=raw)
        assert refused.status_code == status
        assert refused.headers["content-type"] == "application/problem+json"
        assert await keys(once) == []
    assert seen.events == []


async def test_a_signed_body_without_an_id_is_a_bad_request_and_leaves_no_record(tmp_path: Path) -> None:
    seen = Seen()
    once = semel.aopen(stored(tmp_path), consumer="hooks")
    receiver = Receiver(once, webhooks.stripe("whsec_a-rather-plain-secret"), seen, now_s=lambda: NOW)
    transport = httpx2.ASGITransport(app=receiver)
    async with once, receiver, Client(transport=transport, base_url="http://here") as client:
        for body in (b"", b"no json", b"[]", b'{"id": null}', b'{"id": "a\\u0000b"}', b'{"id": "\\ud800"}'):
            assert (await client.post("/", content=body, headers=signed.stripe(body))).status_code == 400
        assert await keys(once) == []
    assert seen.events == []


async def test_only_post_is_served(tmp_path: Path) -> None:
    async with serving(stored(tmp_path), Seen()) as (client, _):
        answer = await client.get("/")
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


async def test_a_length_that_lies_does_not_help(tmp_path: Path) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(400):
            yield b"x" * 1024

    async with serving(stored(tmp_path), Seen()) as (client, once):
        assert (await client.post("/", content=pieces())).status_code == 413
        assert await keys(once) == []


async def test_finished_webhooks_are_remembered_for_four_days(tmp_path: Path) -> None:
    seen = Seen()
    async with serving(stored(tmp_path), seen) as (client, once):
        await post(client)
        await until(lambda: seen.events)
    async with semel.aopen(stored(tmp_path), consumer="hooks") as once:
        record = await once.records.lookup("msg_1")
    assert record is not None
    assert record.state == "done"
    assert record.expires_at_us - record.settled_at_us == 96 * 3600 * 1_000_000


async def test_another_body_under_the_same_id_is_refused_where_asked_for(tmp_path: Path) -> None:
    for answer in ("journaled", "synchronous"):
        seen = Seen()
        store = f"sqlite:///{tmp_path / answer}.db"
        async with serving(store, seen, answer=answer, fingerprint=True) as (client, _):
            assert (await post(client)).is_success
            assert (await post(client, body=b'{"type":"other"}')).status_code == 422
            assert (await post(client)).is_success
            await until(lambda seen=seen: seen.events)  # type: ignore[misc]
        assert len(seen.events) == 1


async def test_a_store_that_is_away_is_503_and_the_repeat_is_taken(tmp_path: Path) -> None:
    seen = Seen()
    with redis.own(tmp_path) as keeper:
        async with serving(keeper.url, seen) as (client, _):
            keeper.stop()
            refused = await post(client)
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            assert seen.events == []
            await asyncio.to_thread(keeper.start)
            assert (await post(client)).status_code == 202
            await until(lambda: seen.events)
    assert len(seen.events) == 1


async def test_too_many_waiting_is_503(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("semel.ingest.webhooks.HOLD_S", 0.05)
    seen = Seen()
    seen.gate.clear()
    pace = IntakeLimits(concurrency=1, pending_max=2)
    async with serving(stored(tmp_path), seen, pace=pace) as (client, _):
        for number, expected in enumerate((202, 202, 503)):
            answer = await post(client, signed.standard(message_id=f"msg_{number}"))
            assert answer.status_code == expected
        seen.gate.set()
        await until(lambda: len(seen.events) == 2)


async def test_a_journal_needs_a_store_that_lasts() -> None:
    once = semel.aopen("memory:", consumer="hooks")
    with pytest.raises(UsageError, match="journal"):
        async with Receiver(once, webhooks.standard(SECRET), Seen()):
            pytest.fail("it must not start")


# --- synchronous --------------------------------------------------------------------------------


async def test_synchronous_answers_with_the_end_and_409_until_then(tmp_path: Path) -> None:
    seen = Seen()
    seen.gate.clear()
    async with serving(stored(tmp_path), seen, answer="synchronous") as (client, _):
        first = asyncio.create_task(post(client))
        await until(lambda: seen.events)
        early = await post(client)
        assert early.status_code == 409
        assert int(early.headers["retry-after"]) >= 1
        seen.gate.set()
        assert (await first).status_code == 200
        assert (await post(client)).status_code == 200
    assert len(seen.events) == 1


async def test_synchronous_asks_for_a_repeat_when_the_handler_fails(tmp_path: Path) -> None:
    seen = Seen()
    seen.error = ConnectionError("not now")
    async with serving(stored(tmp_path), seen, answer="synchronous") as (client, _):
        assert (await post(client)).status_code == 503
        seen.error = None
        assert (await post(client)).status_code == 200
    assert len(seen.events) == 2


async def test_synchronous_does_not_ask_for_what_no_repeat_cures(tmp_path: Path) -> None:
    seen = Seen()
    seen.error = ValueError("never")
    policy = Policy(permanent=(ValueError,))
    async with serving(stored(tmp_path), seen, answer="synchronous", policy=policy) as (client, _):
        assert [(await post(client)).status_code for _ in range(3)] == [200, 200, 200]
    assert len(seen.events) == 1


async def test_synchronous_without_its_store_is_503(tmp_path: Path) -> None:
    with redis.own(tmp_path) as keeper:
        async with serving(keeper.url, Seen(), answer="synchronous") as (client, _):
            keeper.stop()
            assert (await post(client)).status_code == 503


def test_it_can_be_the_application_itself(tmp_path: Path) -> None:
    """By a real server: `uvicorn module:receiver`, with the life of the process for its own."""
    port, log = server.free_port(), tmp_path / "log"
    (tmp_path / "hooks.py").write_text(
        "import semel\nfrom semel.ingest import webhooks\n"
        "async def handle(event): print('ran', event.id, flush=True)\n"
        "once = semel.aopen('sqlite:///records.db', consumer='hooks')\n"
        f"receiver = webhooks.Receiver(once, webhooks.standard({SECRET!r}), handle, now_s=lambda: {NOW})\n"
    )
    pid = uvicorn("hooks:receiver", port, log, path=tmp_path)
    try:
        answers: list[int] = []

        def is_answered() -> bool:
            try:
                answer = httpx2.post(
                    f"http://127.0.0.1:{port}/", content=BODY, headers=signed.standard(), trust_env=False
                )
            except httpx2.HTTPError:
                return False
            answers.append(answer.status_code)
            return True

        assert await_true(is_answered, 30)
        assert is_answered()
        assert answers == [202, 202]
        assert await_true(lambda: "ran msg_1" in log.read_text(), 30)
    finally:
        server.end(pid, signal.SIGTERM)
    assert log.read_text().count("ran msg_1") == 1
