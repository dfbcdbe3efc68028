"""Windows without end through the service: granted where its store can, within its own limit."""

from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

import semel
from semel.errors import PolicyInvalid
from semel.server.settings import Limits, ServeSettings
from semel.windows import FOREVER_US, window_us
from tests.server.stores import store_url
from tests.server.tools import JSON, Running, serving


def test_a_claim_a_window_and_their_record(service: Running) -> None:
    asked = {"consumer": "billing", "claims": [{"key": "k"}], "window": "forever"}
    (first,) = service.post("/v1/claims", asked).json()["outcomes"]
    service.end("complete", first["claim"], value=1)
    assert service.claim("k")["value"] == 1
    record = service.client.get("/v1/records", params={"consumer": "billing"}).json()["records"][0]
    assert (record["key"], record["expires_at"]) == ("k", "forever")
    stored = {"consumer": "billing", "event_type": "refund", "window": "forever"}
    assert service.client.put("/v1/windows", json=stored, headers=JSON).status_code == 200
    assert stored in service.client.get("/v1/windows").json()["windows"]
    about = service.client.get("/v1/store").json()
    assert (about["endless"], about["refreshes"], about["window_max_us"]) == (True, True, FOREVER_US)


def test_the_page_of_windows_shows_it(service: Running) -> None:
    asked = {"consumer": "shown", "event_type": "", "window": "forever"}
    assert service.client.put("/v1/windows", json=asked, headers=JSON).status_code == 200
    page = service.client.get("/ui/windows", params={"consumer": "shown"})
    assert page.status_code == 200
    assert "<td>forever</td>" in page.text
    assert "3153600000" not in page.text


def test_the_http_store_promises_what_the_server_does(service: Running) -> None:
    with semel.open(service.address, consumer="remote", window="forever") as once:
        assert once.run("k", lambda: 1) == semel.Done(1)
        (record,) = once.records.list()
    assert record.expires_at_us - record.settled_at_us == FOREVER_US


@pytest.mark.parametrize("limited", [False, True])
def test_where_it_is_refused_nothing_is_claimed(tmp_path: Path, limited: bool) -> None:
    """By a store that forgets, or by the limit of the service."""
    settings = ServeSettings(auth="none", store="memory:", port=0)
    if limited:
        limits = Limits(window_max_us=window_us("30d"))
        settings = replace(settings, store=store_url("sqlite", tmp_path), limits=limits)
    with serving(settings) as running:
        asked = {"consumer": "billing", "claims": [{"key": "k"}], "window": "forever"}
        answer = running.post("/v1/claims", asked)
        assert (answer.status_code, answer.json()["type"]) == (422, "urn:semel:out-of-bounds")
        assert running.client.get("/v1/records").json()["records"] == []
        asked = {"consumer": "billing", "event_type": "", "window": "forever"}
        assert running.client.put("/v1/windows", json=asked, headers=JSON).status_code == 422
        once = semel.open(running.address, consumer="billing", window="forever")
        with closing(once), pytest.raises(PolicyInvalid, match="cannot promise"):
            once.run("k", lambda: 1)
