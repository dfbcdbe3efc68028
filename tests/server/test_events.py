"""Events come in over HTTP and WebSocket; each has its effect once, and each is answered."""

import json
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from semel.server.events import handler_of
from semel.server.settings import ServeSettings
from semel.stores.sqlite import SqliteStore
from tests.server.tools import Running, serving, token_for

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


def test_an_event_is_accepted_once_and_kept(service: Running) -> None:
    event = {"id": "e1", "type": "order.placed", "amount": "12.50"}
    assert statuses(service.post("/v1/events", event)) == ["accepted"]
    assert statuses(service.post("/v1/events", event)) == ["duplicate"]
    record = service.client.get("/v1/records/events/e1").json()
    assert (record["state"], record["value"], record["event_type"]) == ("done", event, "order.placed")


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
    settings = ServeSettings(store=f"sqlite:///{tmp_path}/semel.db", port=0, sink="stdout:")
    with serving(settings) as running:
        for status in ("accepted", "duplicate"):
            answer = running.post("/v1/events", {"amount": 1, "type": "paid"}, **{"idempotency-key": "s1"})
            assert statuses(answer) == [status]
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [(line["id"], line["type"]) for line in lines] == [("s1", "paid")]


HANDLER = """
seen = []
def handle(event):
    seen.append(event)
    if event.get("fails"):
        raise RuntimeError("not now")
    return {"n": len(seen)}
async def handle_later(event):
    return handle(event)
"""


@pytest.mark.parametrize("function", ["handle", "handle_later"])
def test_a_handler_has_its_effect_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    name = f"handlers_{function}"
    (tmp_path / f"{name}.py").write_text(HANDLER)
    monkeypatch.syspath_prepend(tmp_path)
    settings = ServeSettings(store=f"sqlite:///{tmp_path}/semel.db", port=0, handler=f"{name}:{function}")
    with serving(settings) as running:
        assert statuses(running.post("/v1/events", {"id": "h1"})) == ["accepted"]
        assert statuses(running.post("/v1/events", {"id": "h1"})) == ["duplicate"]
        assert running.client.get("/v1/records/events/h1").json()["value"] == {"n": 1}
        failing = running.post("/v1/events", {"id": "h2", "fails": True})
        assert (failing.status_code, failing.headers["retry-after"]) == (503, "1")
        assert statuses(running.post("/v1/events", {"id": "h2"})) == ["accepted"]
    seen = __import__(name).seen
    assert [event["id"] for event in seen] == ["h1", "h2", "h2"]


@pytest.mark.parametrize("name", ["nothing", "no_such_module:f", "json:no_such", "json:__doc__"])
def test_a_handler_that_is_not_there_is_told_at_once(name: str) -> None:
    with pytest.raises(ValueError, match="handler"):
        handler_of(name)
