"""What an operator does on the pages is done and written down first, and refused where something has changed."""

import re
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx2
import pytest

import semel
from semel.outbox.message import Message
from semel.server.settings import ServeSettings
from tests.server.tools import Running, process, serving
from tests.services import postgres, redis
from tests.waiting import await_true

OURS = {"sec-fetch-site": "same-origin", "content-type": "application/x-www-form-urlencoded"}


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    settings = ServeSettings(auth="none", store=f"sqlite:///{tmp_path}/semel.db?synchronous=normal", port=0)
    with serving(settings) as made:
        yield made


def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/semel.db"


def post(running: Running, path: str, form: str) -> tuple[int, str]:
    answer = running.client.post(f"/ui/{path}", content=form, headers=OURS)
    return answer.status_code, answer.headers.get("location", "")


def audit(running: Running) -> str:
    return re.sub(r"\s+", " ", re.sub("<[^>]*>", " ", running.client.get("/ui/audit").text))


def test_dead_letters_are_retried_and_dropped(running: Running, tmp_path: Path) -> None:
    with semel.open(url(tmp_path), consumer="shop", mode="inbox") as shop:
        connection = sqlite3.connect(tmp_path / "semel.db", isolation_level=None)
        connection.execute("BEGIN")
        for name in ("first", "second"):
            shop.outbox(connection).publish(Message("order.placed", {"n": 1}), name=name)
        connection.execute("COMMIT")
        connection.execute("UPDATE semel_outbox SET state = 2, error = 'refused by <the> broker'")
        ids = [row[0] for row in connection.execute("SELECT id FROM semel_outbox ORDER BY seq")]
        states = "SELECT state FROM semel_outbox ORDER BY seq"
        shown = running.client.get("/ui/outbox").text
        assert all(each in shown for each in ids)
        assert "refused by &lt;the&gt; broker" in shown
        assert post(running, "outbox", "verb=drop")[0] == 422
        assert post(running, "outbox", "verb=retry&id=nonsense")[0] == 422
        assert post(running, "outbox", f"verb=retry&id={ids[0]}") == (303, "/ui/outbox?done=1")
        assert post(running, "outbox", f"verb=drop&id={ids[1]}") == (303, "/ui/outbox?done=1")
        assert connection.execute(states).fetchall() == [(0,), (3,)]
        connection.execute("UPDATE semel_outbox SET state = 2 WHERE state = 0")
        assert post(running, "outbox", "verb=retry") == (303, "/ui/outbox?done=1")
        connection.close()
    told = audit(running)
    assert f"outbox drop ids {ids[1]}" in told
    assert "outbox retry ids all that are dead" in told


def test_unknown_events_are_decided_by_what_was_seen(running: Running, tmp_path: Path) -> None:
    with semel.open(url(tmp_path), consumer="mails", mode="quarantine") as mails:
        for key in ("sent", "unsent"):
            with pytest.raises(RuntimeError), mails.claim(key):  # type: ignore[union-attr]
                raise RuntimeError("no answer")
        fences = {record.key: record.fence for record in mails.records.list(state="unknown")}
        assert set(fences) == {"sent", "unsent"}
        assert 'href="/ui/event/mails/sent"' in running.client.get("/ui/parts/doctor", timeout=30).text
        assert "It happened" in running.client.get("/ui/event/mails/sent").text
        assert post(running, "decide/mails/sent", f"to=done&fence={fences['sent'] + 1}")[0] == 409
        assert post(running, "decide/mails/sent", "to=maybe&fence=1")[0] == 422
        assert post(running, "decide/mails/sent", f"to=done&fence={fences['sent']}")[0] == 303
        assert post(running, "decide/mails/unsent", f"to=absent&fence={fences['unsent']}")[0] == 303
        assert isinstance(mails.run("sent", int), semel.Done)
        record = mails.records.lookup("sent")
        assert record is not None
        assert record.state == "done"
        assert mails.records.lookup("unsent") is None
    assert "resolve to absent" in audit(running)


def test_what_is_over_is_removed(running: Running, tmp_path: Path) -> None:
    with semel.open(url(tmp_path), consumer="short", window="20ms") as short:
        for number in range(5):
            short.run(str(number), int)
    while short_left(tmp_path):
        assert post(running, "purge", "")[0] == 303
    assert "purge limit 5000" in audit(running)


def short_left(tmp_path: Path) -> int:
    with closing(sqlite3.connect(tmp_path / "semel.db")) as connection, connection:
        joined = "semel_records JOIN semel_consumers AS c ON c.id = consumer_id WHERE consumer = 'short'"
        left: int = connection.execute(f"SELECT count(*) FROM {joined}").fetchone()[0]
    return left


def test_nothing_is_done_that_cannot_be_written_down(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    from semel.errors import StoreUnavailable
    from semel.runtime import audit as trail

    def broken(*_: object, **__: object) -> object:
        raise StoreUnavailable("the audit cannot be written")

    running.post("/v1/events", {"id": "stays"})
    monkeypatch.setattr(trail, "note", broken)
    assert post(running, "forget/events/stays", "")[0] == 503
    assert post(running, "windows", "consumer=events&window=1h")[0] == 503
    monkeypatch.undo()
    assert running.post("/v1/events", {"id": "stays"}).json()["events"][0]["status"] == "duplicate"
    assert running.client.get("/v1/windows").json()["windows"] == []


@pytest.mark.parametrize("kind", ["memory", "redis", "postgres"])
def test_every_page_is_there_on_every_store(kind: str, tmp_path: Path) -> None:
    place = {"redis": redis.place, "postgres": postgres.place}.get(kind, lambda _: "memory:")(tmp_path)
    with serving(ServeSettings(auth="none", store=place, port=0)) as made:
        for _ in range(3):
            made.post("/v1/events", {"id": "evt_1", "type": "order.placed"})
        held = made.claim("running")
        assert held["outcome"] == "claimed"
        for number in (1, 2):
            made.end(
                "release",
                made.claim("failing")["claim"],
                kind="shop.Refused",
                error=f"no {number}",
                worker="web-1",
            )
        pages = (
            "",
            "failures",
            "consumer/billing",
            "events",
            "flight",
            "windows",
            "outbox",
            "stores",
            "observe",
            "check",
            "parts/doctor",
            "audit",
        )
        for path in (*pages, "event/events/evt_1", "events?state=done"):
            answer = made.client.get(f"/ui/{path}", timeout=30)
            assert answer.status_code == 200, f"{path}: {answer.text}"
        assert "duplicate" in made.client.get("/ui/event/events/evt_1").text
        assert "running" in made.client.get("/ui/flight").text
        assert "evt_1" in made.client.get("/ui/events?q=evt_1").text
        failing = made.client.get("/ui/event/billing/failing").text
        assert failing.index("no 2") < failing.index("no 1"), "attempt by attempt, the latest first"
        assert "web-1" in failing
        assert await_true(lambda: "shop.Refused" in made.client.get("/ui/failures").text, 30)
        for asked, is_there in (
            ("tail_prefix=evt", True),
            ("tail_prefix=x", False),
            ("tail_consumer=billing", False),
        ):
            assert ("evt_1" in made.client.get(f"/ui/parts/tail?{asked}").text) == is_there
        totals = made.client.get("/ui/data").json()["totals"]
        assert (totals["received"], totals["processed"], totals["duplicates"]) == (6, 1, 2)
        assert post(made, "windows", "consumer=events&window=36h")[0] == 303
        assert "36h" in made.client.get("/ui/windows").text
        assert post(made, "forget/events/evt_1", "")[0] == 303
        assert made.client.get("/ui/event/events/evt_1").status_code == 404
        assert "evt_1" in audit(made)
        assert '<a href="/ui/event/events/evt_1">' in made.client.get("/ui/audit").text
    if kind != "memory":
        with serving(ServeSettings(auth="none", store=place, port=0)) as later:
            assert later.client.get("/ui/data").json()["totals"]["received"] == 6


def test_a_page_that_listens_does_not_keep_the_service_from_ending(tmp_path: Path) -> None:
    with process(tmp_path, "--store", "sqlite:///semel.db") as (running, address):
        with (
            httpx2.Client(trust_env=False) as client,
            client.stream("GET", f"{address}/ui/live", timeout=20) as live,
        ):
            lines = live.iter_lines()
            assert next(lines) == "event: tick"
            assert '"received":0' in next(lines)
            running.send_signal(signal.SIGTERM)
            assert list(lines) == [""]
        assert running.wait(15) == 0
