"""What an operator does on the pages is done and written down first, and refused where something has changed."""

import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

import semel
from semel.outbox.message import Message
from semel.server.settings import ServeSettings
from tests.server.tools import Running, serving

OURS = {"sec-fetch-site": "same-origin", "content-type": "application/x-www-form-urlencoded"}


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    settings = ServeSettings(store=f"sqlite:///{tmp_path}/semel.db?synchronous=normal", port=0)
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
    with sqlite3.connect(tmp_path / "semel.db") as connection:
        joined = "semel_records JOIN semel_consumers AS c ON c.id = consumer_id WHERE consumer = 'short'"
        left: int = connection.execute(f"SELECT count(*) FROM {joined}").fetchone()[0]
    connection.close()
    return left


def test_nothing_is_done_that_cannot_be_written_down(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    from semel import audit as trail
    from semel.errors import StoreUnavailable

    def broken(*_: object, **__: object) -> object:
        raise StoreUnavailable("the audit cannot be written")

    running.post("/v1/events", {"id": "stays"})
    monkeypatch.setattr(trail, "note", broken)
    assert post(running, "forget/events/stays", "")[0] == 503
    assert post(running, "windows", "consumer=events&window=1h")[0] == 503
    monkeypatch.undo()
    assert running.post("/v1/events", {"id": "stays"}).json()["events"][0]["status"] == "duplicate"
    assert running.client.get("/v1/windows").json()["windows"] == []
