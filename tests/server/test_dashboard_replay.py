"""An event is replayed from its page: run once more, by an admin alone, written down first, and never lost."""

import asyncio
import json
import re
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx2
import pytest
from msgspec.structs import replace

from semel.core.commands import Lookup
from semel.ingest.intake import Intake
from semel.server.app import create_app
from semel.server.dashboard.auth import COOKIE
from semel.server.events import incoming
from semel.server.settings import ServeSettings
from semel.stores.sqlite import SqliteStore
from semel.types import Record
from tests.server.tools import Running, serving, session_of, token_for
from tests.services import postgres, redis
from tests.waiting import await_true

OURS = {"sec-fetch-site": "same-origin", "content-type": "application/x-www-form-urlencoded"}
HANDLER = """
import semel
seen = []
def handle(event):
    seen.append((event.tenant, event.id, event.type, event.payload, semel.current().attempt))
"""
EVENT = {"id": "e1", "type": "order.placed", "amount": "12.50"}
RUN = ("", "e1", "order.placed", EVENT, 1)


class Place:
    """Where a service works, with a handler that remembers what it was called with."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.module = folder, f"handlers_{uuid4().hex[:12]}"
        (folder / f"{self.module}.py").write_text(HANDLER)

    @property
    def seen(self) -> list[Any]:
        found: list[Any] = __import__(self.module).seen
        return found

    def settings(self, store: str = "", persist: str = "rows", **more: Any) -> ServeSettings:
        return ServeSettings(
            auth="none",
            store=store or f"sqlite:///{self.folder}/semel.db?synchronous=normal",
            persist=f"sqlite:///{self.folder}/{persist}.db" if persist else "",
            handler=f"{self.module}:handle",
            port=0,
            **more,
        )


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.syspath_prepend(tmp_path)
    return Place(tmp_path)


def record(running: Running, **headers: str) -> Any:
    return running.client.get("/v1/records/events/e1", headers=headers).json()


def is_done(running: Running, **headers: str) -> bool:
    return await_true(lambda: record(running, **headers).get("state") == "done")


def fence(running: Running, **headers: str) -> str:
    """As the page's form has it."""
    shown = running.client.get("/ui/event/events/e1", headers=headers).text
    found = re.search(
        r'action="/ui/replay/events/e1[^>]*>\s*<input type="hidden" name="fence" value="(\d+)"', shown
    )
    assert found is not None, shown
    return found[1]


def replay(running: Running, seen: str, **headers: str) -> httpx2.Response:
    return running.client.post("/ui/replay/events/e1", content=f"fence={seen}", headers=OURS | headers)


@pytest.mark.parametrize("kind", ["sqlite", "postgres", "redis"])
def test_it_runs_once_more_and_it_is_in_the_audit(place: Place, tmp_path: Path, kind: str) -> None:
    store = {"postgres": postgres.place, "redis": redis.place}.get(kind, lambda _: "")(tmp_path)
    with serving(place.settings(store)) as running:
        running.post("/v1/events", EVENT)
        assert is_done(running)
        assert place.seen == [RUN]
        first = fence(running)
        answer = replay(running, first)
        assert (answer.status_code, answer.headers["location"]) == (303, "/ui/events?q=e1&done=replayed")
        assert await_true(lambda: place.seen == [RUN, RUN])
        assert is_done(running)
        assert replay(running, first).status_code == 409  # it has changed since that page was shown
        assert running.post("/v1/events", EVENT).json()["events"][0]["status"] == "duplicate"
        told = re.sub(r"\s+", " ", re.sub("<[^>]*>", " ", running.client.get("/ui/audit").text))
        assert "replay consumer events key e1" in told
        assert "Handed on again" in running.client.get("/ui/events?q=e1&done=replayed").text
    assert place.seen == [RUN, RUN]
    with closing(sqlite3.connect(tmp_path / "rows.db")) as file:
        assert file.execute("SELECT event_id FROM events").fetchall() == [("e1",)]


def test_the_table_may_be_in_postgres(place: Place) -> None:
    table = f"events_{uuid4().hex[:12]}"
    settings = ServeSettings(
        auth="none",
        store=f"sqlite:///{place.folder}/semel.db",
        persist=postgres.url(),
        events_table=table,
        handler=f"{place.module}:handle",
        port=0,
    )
    with serving(settings) as running:
        running.post("/v1/events", EVENT)
        assert is_done(running)
        assert replay(running, fence(running)).status_code == 303
        assert await_true(lambda: place.seen == [RUN, RUN])
    postgres.execute(postgres.url(), f"DROP TABLE {table}")


def test_two_who_press_at_once_replay_it_once(place: Place) -> None:
    with serving(place.settings()) as running, ThreadPoolExecutor(4) as threads:
        running.post("/v1/events", EVENT)
        assert is_done(running)
        seen = fence(running)
        answers = list(threads.map(lambda _: replay(running, seen).status_code, range(4)))
        assert sorted(answers) == [303, 409, 409, 409]
        assert await_true(lambda: len(place.seen) == 2)
        assert is_done(running)
    assert place.seen == [RUN, RUN]


@pytest.mark.anyio
async def test_what_has_changed_since_it_was_looked_at_is_not_run(place: Place) -> None:
    app = create_app(place.settings())
    async with app.router.lifespan_context(app):
        taker, service = app.state.events, app.state.service

        async def done(runs: int) -> Record:
            while True:
                (found,) = await service.send((Lookup(("", "events", "e1")),))
                if isinstance(found, Record) and found.state == "done" and len(place.seen) == runs:
                    return found
                await asyncio.sleep(0.01)

        await taker.take("", [incoming(EVENT, json.dumps(EVENT).encode())])
        seen = await asyncio.wait_for(done(1), 30)
        event = await taker.find_event(seen)
        assert await taker.again(seen, event)
        now = await asyncio.wait_for(done(2), 30)
        assert not await taker.again(seen, event)
        assert await done(2) == now
    assert place.seen == [RUN, RUN]


def test_an_instance_that_dies_before_it_runs_leaves_it_to_the_next(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nobody(_intake: Intake, _records: object) -> int:
        return 0

    with serving(place.settings(events_lease="1s")) as running:
        running.post("/v1/events", EVENT)
        assert is_done(running)
        monkeypatch.setattr(Intake, "adopt", nobody)
        assert replay(running, fence(running)).status_code == 303
        assert (record(running)["state"], len(place.seen)) == ("claimed", 1)
    monkeypatch.undo()
    monkeypatch.syspath_prepend(place.folder)
    with serving(place.settings(events_lease="1s")) as running:
        assert await_true(lambda: place.seen == [RUN, RUN])
        assert is_done(running)


def test_where_the_payload_is_not_kept_the_page_says_what_to_do(place: Place) -> None:
    with serving(place.settings(persist="")) as running:
        running.post("/v1/events", EVENT)
        assert is_done(running)
        held = running.claim("other")
        running.end("complete", held["claim"], value=1)
        for path in ("events/e1", "billing/other"):
            shown = running.client.get(f"/ui/event/{path}").text
            assert "/ui/replay/" not in shown
            assert "semel dlq replay" in shown
        assert replay(running, str(record(running)["fence"])).status_code == 409
        assert "Nothing was done by hand yet" in running.client.get("/ui/audit").text
    assert place.seen == [RUN]


def test_what_is_only_written_down_is_handed_to_nobody(tmp_path: Path) -> None:
    with serving(ServeSettings(auth="none", store=f"sqlite:///{tmp_path}/semel.db", port=0)) as running:
        running.post("/v1/events", EVENT)
        assert is_done(running)
        assert "/ui/replay/" not in running.client.get("/ui/event/events/e1").text


def test_only_an_admin_of_the_tenant_replays(place: Place) -> None:
    store = SqliteStore(place.folder / "semel.db", synchronous="NORMAL")
    store.open()
    texts = {role: token_for(store, "acme", role)[0] for role in ("read", "write", "admin")} | {
        "rival": token_for(store, "rival", "admin")[0]
    }
    store.close()
    with serving(replace(place.settings(), auth="tokens")) as running:
        cookies = {who: {"cookie": f"{COOKIE}={session_of(running, text)}"} for who, text in texts.items()}
        bearer = {"authorization": f"Bearer {texts['write']}"}
        running.post("/v1/events", EVENT, **bearer)
        assert is_done(running, **bearer)
        seen = fence(running, **cookies["admin"])
        assert "/ui/replay/" not in running.client.get("/ui/event/events/e1", headers=cookies["read"]).text
        assert replay(running, seen).headers["location"] == "/ui/login"
        for who, status in (("read", 403), ("write", 403), ("rival", 404)):
            assert replay(running, seen, **cookies[who]).status_code == status, who
        from_elsewhere = cookies["admin"] | {"sec-fetch-site": "cross-site"}
        assert replay(running, seen, **from_elsewhere).status_code == 403
        assert len(place.seen) == 1
        assert replay(running, seen, **cookies["admin"]).status_code == 303
        assert await_true(lambda: place.seen == [("acme", *RUN[1:])] * 2)
        assert ">replay<" in running.client.get("/ui/audit", headers=cookies["admin"]).text
        assert ">replay<" not in running.client.get("/ui/audit", headers=cookies["rival"]).text


def test_nothing_is_replayed_that_cannot_be_written_down(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    from semel.errors import StoreUnavailable
    from semel.runtime import audit

    def broken(*_: object, **__: object) -> object:
        raise StoreUnavailable("the audit cannot be written")

    with serving(place.settings()) as running:
        running.post("/v1/events", EVENT)
        assert is_done(running)
        seen = fence(running)
        monkeypatch.setattr(audit, "note", broken)
        assert replay(running, seen).status_code == 503
        assert fence(running) == seen
    assert place.seen == [RUN]
