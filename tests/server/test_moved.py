"""A service on one store of a move: it takes no new claims of a consumer that the store is closed to."""

from pathlib import Path

import pytest

import semel
from semel.errors import StoreMoved
from semel.runtime import engine
from semel.server.settings import ServeSettings
from semel.stores.migrating import migrating, moving
from semel.stores.sqlite import SqliteStore
from tests.server.tools import Running, serving, token_for


def claim(running: Running, consumer: str, key: str) -> tuple[int, str]:
    answer = running.post("/v1/claims", {"consumer": consumer, "claims": [{"key": key}]})
    return answer.status_code, answer.json().get("type", "")


def close_old(old: str, new: str) -> None:
    store = migrating(old=old, new=new)
    store.open()
    for each in moving.moves(store.old, store.new):
        moving.close(store.old, store.new, each)
    store.close()


def test_a_service_on_the_old_store_notices_that_it_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "SETTINGS_LIVE_S", 0.0)  # else it takes seconds
    old, new = f"sqlite:///{tmp_path / 'old.db'}", f"sqlite:///{tmp_path / 'new.db'}"
    both = migrating(old=old, new=new)
    with semel.open(both, consumer="billing", tenant="shop") as once:
        once.run("evt_1", str)
    with semel.open(both, consumer="events", tenant="shop") as once:
        once.run("evt_1", str)
    both.close()
    store = SqliteStore(str(tmp_path / "old.db"))
    token, _ = token_for(store, "shop")
    store.close()
    with serving(ServeSettings(store=old, port=0)) as running:
        running.client.headers["authorization"] = f"Bearer {token}"
        assert running.post("/v1/events", {"id": "evt_2"}).json()["events"][0]["status"] == "accepted"
        begun = running.claim("evt_2")["claim"]
        with semel.open(f"{running.address}?token={token}", consumer="billing") as client:
            assert client.run("evt_3", lambda: "ran") == semel.Done("ran")
            close_old(old, new)
            assert claim(running, "billing", "evt_4") == (409, "urn:semel:store-moved")
            assert claim(running, "billing", "evt_1") == (409, "urn:semel:store-moved")  # a duplicate, too
            assert claim(running, "mails", "evt_4")[0] == 200  # another consumer does not move
            refused = running.post("/v1/events", {"id": "evt_5"})
            assert (refused.status_code, refused.json()["type"]) == (503, "urn:semel:store-moved")
            assert "Retry-After" in refused.headers
            assert running.end("complete", begun)["outcome"] == "completed"  # what had begun ends here
            outcome = client.run("evt_6", lambda: "ran")
            assert isinstance(outcome, semel.Unavailable)
            assert isinstance(outcome.error, StoreMoved), outcome
        late = semel.open(f"{running.address}?token={token}", consumer="billing")
        with pytest.raises(StoreMoved, match="has moved to"):
            late.run("evt_7", lambda: "ran")
        late.close()
