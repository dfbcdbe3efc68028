"""Events come in over HTTP and WebSocket; each has its effect once, and each is answered."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from semel.server.app import create_app
from semel.server.events import incoming
from semel.server.settings import ServeSettings
from semel.stores.memory.store import MemoryStore
from semel.stores.sqlite import SqliteStore
from tests.server.tools import Running, serving, token_for
from tests.services import postgres, redis
from tests.waiting import await_true

CLOUDEVENT = {
    "specversion": "1.0",
    "id": "c1",
    "source": "/shop",
    "type": "order.placed",
    "time": "2026-11-16T10:00:00Z",
    "data": {"n": 1},
}


def statuses(answer: Any) -> list[str]:
    return [each["status"] for each in answer.json()["events"]]


def test_an_event_is_accepted_once_and_persisted_beside_its_record(tmp_path: Path) -> None:
    event = {"id": "e1", "type": "order.placed", "amount": "12.50"}
    with serving(ServeSettings(auth="none", store=f"sqlite:///{tmp_path}/semel.db", port=0)) as running:
        assert statuses(running.post("/v1/events", event)) == ["accepted"]
        assert statuses(running.post("/v1/events", event)) == ["duplicate"]
        assert await_true(lambda: running.client.get("/v1/records/events/e1").json()["state"] == "done")
    with closing(sqlite3.connect(tmp_path / "semel.db")) as file:
        rows = file.execute("SELECT tenant, event_id, type, payload FROM events").fetchall()
    assert [(*row[:3], json.loads(row[3])) for row in rows] == [("", "e1", "order.placed", event)]


def test_where_the_store_is_no_table_an_event_is_kept_in_its_record() -> None:
    event = {"id": "e1", "type": "order.placed", "amount": "12.50"}
    with serving(ServeSettings(auth="none", store="memory:", port=0)) as running:
        assert statuses(running.post("/v1/events", [event, event])) == ["accepted", "duplicate"]
        assert statuses(running.post("/v1/events", event)) == ["duplicate"]
        record = running.client.get("/v1/records/events/e1").json()
    assert (record["state"], record["value"], record["event_type"]) == ("done", event, "order.placed")


@pytest.mark.anyio
async def test_the_database_of_the_settings_is_left_alone_where_another_store_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    app = create_app(ServeSettings(auth="none"), store=MemoryStore())
    async with app.router.lifespan_context(app):
        event = {"id": "e1"}
        (said,) = await app.state.events.take("", [incoming(event, b'{"id": "e1"}')])
    assert said.status == "accepted"
    assert not (tmp_path / "semel.db").exists()


THEIRS = """CREATE TABLE events (
    id INTEGER PRIMARY KEY, event_id TEXT UNIQUE NOT NULL, event_type TEXT NOT NULL, payload TEXT NOT NULL
)"""


@pytest.mark.anyio
async def test_a_table_of_theirs_is_written_into_under_its_own_names(tmp_path: Path) -> None:
    theirs = f"sqlite:///{tmp_path}/app.db"
    with closing(sqlite3.connect(tmp_path / "app.db")) as file:
        file.execute(THEIRS)
        file.commit()
    app = create_app(
        ServeSettings(
            auth="none",
            store=f"sqlite:///{tmp_path}/semel.db",
            persist=theirs,
            events_columns="type=event_type,tenant=",
        )
    )
    async with app.router.lifespan_context(app):
        take = app.state.events.take
        event = incoming({"id": "e1", "type": "paid"}, b'{"id": "e1", "type": "paid"}')
        assert [said.status for said in await take("", [event, event])] == ["accepted", "duplicate"]
        (refused,) = await take("acme", [event])
        assert refused.status == "invalid", "it could never be written, and its payload would be lost"
        assert "no column for tenants" in refused.detail
    with closing(sqlite3.connect(tmp_path / "app.db")) as file:
        assert file.execute("SELECT event_id, event_type FROM events").fetchall() == [("e1", "paid")]


@pytest.mark.parametrize("place", ["redis", "postgres"])
def test_events_are_persisted_once_on_other_stores_too(tmp_path: Path, place: str) -> None:
    if place == "redis":
        table = f"sqlite:///{tmp_path}/rows.db"
        settings = ServeSettings(auth="none", store=redis.place(tmp_path), persist=table, port=0)
    else:
        table = f"events_{uuid4().hex[:12]}"
        settings = ServeSettings(auth="none", store=postgres.place(tmp_path), events_table=table, port=0)
    events = [{"id": f"e{at % 50}", "type": "t", "nul": "\x00\u2028"} for at in range(100)]
    with serving(settings) as running:
        said = statuses(running.post("/v1/events", events))
        assert said.count("accepted") == 50
        assert set(said[50:]) == {"duplicate"}
        assert await_true(lambda: running.client.get("/v1/records/events/e49").json()["state"] == "done")
    if place == "redis":
        with closing(sqlite3.connect(tmp_path / "rows.db")) as file:
            rows = file.execute("SELECT event_id, count(*) FROM events GROUP BY 1").fetchall()
    else:
        rows = postgres.execute(postgres.url(), f"SELECT event_id, count(*) FROM {table} GROUP BY 1")
    assert dict(rows) == {f"e{at}": 1 for at in range(50)}


def test_many_at_once_are_answered_in_order(service: Running) -> None:
    found = service.post("/v1/events", [{"id": "m1"}, {"no": "id"}, {"id": "m2"}, {"id": "m1"}, {"id": 7}])
    assert statuses(found) == ["accepted", "invalid", "accepted", "duplicate", "accepted"]
    assert statuses(service.post("/v1/events", [{"id": "7"}])) == ["duplicate"]


def test_an_event_without_a_key_is_refused(service: Running) -> None:
    answer = service.post("/v1/events", {"amount": 1})
    assert (answer.status_code, answer.json()["type"]) == (422, "urn:semel:invalid")


def test_cloudevents_in_every_mode_are_one_event(service: Running) -> None:
    def send(kind: str, body: Any, **headers: str) -> list[str]:
        content = json.dumps(body)
        answer = service.client.post("/v1/events", content=content, headers={"content-type": kind, **headers})
        return statuses(answer)

    assert send("application/cloudevents+json", CLOUDEVENT) == ["accepted"]
    assert send("application/cloudevents-batch+json", [CLOUDEVENT, {**CLOUDEVENT, "id": "c2"}]) == [
        "duplicate",
        "accepted",
    ]
    binary = {f"ce-{name}": str(CLOUDEVENT[name]) for name in ("specversion", "id", "source", "type")}
    assert send("application/json", CLOUDEVENT["data"], **binary) == ["duplicate"]
    assert send("application/json", {"n": 1}, **{**binary, "ce-source": "/other"}) == ["accepted"]


def test_an_idempotency_key_names_a_single_event(service: Running) -> None:
    assert statuses(service.post("/v1/events", {"n": 1}, **{"idempotency-key": '"abc"'})) == ["accepted"]
    assert statuses(service.post("/v1/events", {"n": 1}, **{"idempotency-key": '"abc"'})) == ["duplicate"]


def test_a_socket_answers_each_event(service: Running) -> None:
    with connect(f"ws://127.0.0.1:{service.port}/v1/events") as socket:
        answers = []
        for sent in ('{"id": "w1"}', '{"id": "w1"}', "{", "[]", '{"a": 1}', b'[{"id": "w1"}, {"id": "w2"}]'):
            socket.send(sent)
            answers.append(json.loads(socket.recv(10)))
    assert [
        each["status"] if isinstance(each, dict) else [one["status"] for one in each] for each in answers
    ] == [
        "accepted",
        "duplicate",
        "invalid",
        "invalid",
        "invalid",
        ["duplicate", "accepted"],
    ]


def test_a_page_of_another_site_gets_no_socket(service: Running) -> None:
    with pytest.raises(InvalidStatus) as refused:
        connect(
            f"ws://127.0.0.1:{service.port}/v1/events", additional_headers={"origin": "https://evil.example"}
        )
    assert refused.value.response.status_code == 403


def test_a_socket_needs_a_token_with_the_role(tmp_path: Path) -> None:
    path = tmp_path / "semel.db"
    store = SqliteStore(path)
    store.open()
    reads, writes = token_for(store, "a", "read")[0], token_for(store, "a", "write")[0]
    store.close()
    with serving(ServeSettings(store=f"sqlite:///{path}", port=0)) as running:
        address = f"ws://127.0.0.1:{running.port}/v1/events"
        for headers in ({}, {"authorization": f"Bearer {reads}"}):
            with pytest.raises(InvalidStatus):
                connect(address, additional_headers=headers)
        with connect(address, additional_headers={"authorization": f"Bearer {writes}"}) as socket:
            socket.send('{"id": "w"}')
            assert json.loads(socket.recv(10))["status"] == "accepted"


def test_a_sink_is_told_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    settings = ServeSettings(auth="none", store=f"sqlite:///{tmp_path}/semel.db", port=0, sink="stdout:")
    with serving(settings) as running:
        for status in ("accepted", "duplicate"):
            answer = running.post("/v1/events", {"amount": 1, "type": "paid"}, **{"idempotency-key": "s1"})
            assert statuses(answer) == [status]
        assert await_true(lambda: running.client.get("/v1/records/events/s1").json()["state"] == "done")
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [(line["id"], line["type"]) for line in lines] == [("s1", "paid")]


HANDLER = """
import semel
seen = []
def handle(event):
    attempt = semel.current().attempt
    seen.append((event.tenant, event.id, event.type, event.payload, attempt))
    if event.type == "fails" and attempt == 1:
        raise RuntimeError("not now")
async def handle_later(event):
    handle(event)
"""


@pytest.mark.parametrize("function", ["handle", "handle_later"])
def test_a_handler_has_its_effect_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    name = f"handlers_{function}"
    (tmp_path / f"{name}.py").write_text(HANDLER)
    monkeypatch.syspath_prepend(tmp_path)
    settings = ServeSettings(
        auth="none",
        store=f"sqlite:///{tmp_path}/semel.db",
        port=0,
        handler=f"{name}:{function}",
        events_lease="1s",
    )
    good, bad = {"id": "h1", "n": 1}, {"id": "h2", "type": "fails"}
    with serving(settings) as running:
        assert statuses(running.post("/v1/events", good)) == ["accepted"]
        assert statuses(running.post("/v1/events", good)) == ["duplicate"]
        assert statuses(running.post("/v1/events", bad)) == ["accepted"]
        assert statuses(running.post("/v1/events", bad)) == ["duplicate"]  # nobody has to send it again
        assert await_true(lambda: running.client.get("/v1/records/events/h2").json()["state"] == "done")
    assert __import__(name).seen == [
        ("", "h1", "", good, 1),
        ("", "h2", "fails", bad, 1),
        ("", "h2", "fails", bad, 2),
    ]


def test_an_event_is_not_taken_while_the_store_gives_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("semel.server.events.HOLD_S", 0.1)
    with redis.own(tmp_path) as keeper:
        settings = ServeSettings(
            auth="none", store=keeper.url, persist=f"sqlite:///{tmp_path}/rows.db", port=0
        )
        with serving(settings) as running:
            assert statuses(running.post("/v1/events", {"id": "e1"})) == ["accepted"]
            keeper.stop()
            answer = running.post("/v1/events", {"id": "e2"})
            assert (answer.status_code, answer.json()["type"]) == (503, "urn:semel:busy")
            assert int(answer.headers["retry-after"]) >= 1
            keeper.start()
            assert await_true(lambda: running.post("/v1/events", {"id": "e2"}).status_code == 200)
