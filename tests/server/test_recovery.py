"""A tenant whose journals cannot be read keeps nobody else's events from being recovered."""

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from semel.codec import encode
from semel.core.commands import Claim, Lookup, Scan
from semel.ingest.intake import Event
from semel.observe.limited_log import LimitedLog
from semel.runtime.process import new_owner
from semel.server.events import ORPHANS_MAX
from semel.server.settings import ServeSettings
from semel.stores.registry import store_for
from semel.types import Absent
from tests.cli.processes import semel
from tests.server.stores import KINDS, store_url
from tests.server.tools import Running, serving
from tests.waiting import await_true

DAY_US = 86400 * 10**6
BAD = b"o[[["


def abandoned(tenant: str, key: str, journal: bytes) -> Claim:
    """A journaled claim whose owner died."""
    return Claim((tenant, "events", key), new_owner(), 1, DAY_US, journal=journal)


@pytest.mark.parametrize("kind", KINDS)
def test_unreadable_journals_of_one_tenant_do_not_hold_up_another(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    url = store_url(kind, tmp_path)
    store: Any = store_for(url)
    store.open()
    store.send([abandoned("bad", f"b{at}", BAD) for at in range(600)])
    store.send([abandoned("good", "g", encode(b'{"id": "g"}'))])

    def states(tenant: str) -> set[str]:
        (page,) = store.send((Scan(tenant, "events", limit=1000),))
        return {record.state for record in page.records}

    settings = ServeSettings(
        auth="none", store=url, port=0, events_lease="1s", persist=f"sqlite:///{tmp_path}/rows.db"
    )
    with caplog.at_level(logging.WARNING), serving(settings):
        assert await_true(lambda: states("good") == {"done"})
        assert await_true(lambda: states("bad") == {"unknown"})
    store.close()
    assert len(caplog.records) < 100


@pytest.mark.parametrize("kind", KINDS)
def test_an_unreadable_journal_is_left_to_a_person(tmp_path: Path, kind: str) -> None:
    """Quarantined: on the dashboard and in `semel list`, with its journal, until somebody resolves or forgets it."""
    url = store_url(kind, tmp_path)
    store: Any = store_for(url)
    store.open()
    store.send([abandoned("", key, BAD) for key in ("first", "second")])

    def found(key: str) -> Any:
        return store.send((Lookup(("", "events", key)),))[0]

    settings = ServeSettings(
        auth="none", store=url, port=0, events_lease="1s", persist=f"sqlite:///{tmp_path}/rows.db"
    )
    form = {"sec-fetch-site": "same-origin", "content-type": "application/x-www-form-urlencoded"}
    with serving(settings) as running:
        assert await_true(lambda: {found("first").state, found("second").state} == {"unknown"})
        assert found("first").journal == BAD
        page = running.client.get("/ui/events?state=unknown").text
        assert "first" in page
        assert "second" in page
        listed = semel("list", "--store", url, "--state", "unknown", "--json", cwd=tmp_path).stdout
        assert {record["key"] for record in json.loads(listed)["records"]} == {"first", "second"}
        decided = f"to=done&fence={found('first').fence}"
        assert (
            running.client.post("/ui/decide/events/first", content=decided, headers=form).status_code == 303
        )
        assert running.client.delete("/v1/records/events/second").status_code == 200
        assert (found("first").state, type(found("second"))) == ("done", Absent)
    store.close()


async def run_all_but_loud(event: Event) -> None:
    """The handler of the test below."""
    if event.tenant == "loud":
        await asyncio.Event().wait()


@pytest.mark.parametrize("kind", KINDS)
def test_the_many_orphans_of_one_tenant_do_not_hide_those_of_others(tmp_path: Path, kind: str) -> None:
    url = store_url(kind, tmp_path)
    store: Any = store_for(url)
    store.open()
    quiet = [f"quiet {at}" for at in range(4)]
    store.send([abandoned("loud", f"l{at}", encode(b"{}")) for at in range(8 * ORPHANS_MAX)])
    store.send([abandoned(tenant, "k", encode(b"{}")) for tenant in quiet])

    def are_done() -> bool:
        found = store.send([Lookup((tenant, "events", "k")) for tenant in quiet])
        return all(record.state == "done" for record in found)

    handler = f"{__name__}:{run_all_but_loud.__name__}"
    settings = ServeSettings(
        auth="none", store=url, port=0, events_lease="3s", handler=handler, drain_s=0.1, dashboard=False
    )
    with serving(settings):
        assert await_true(are_done)
    store.close()


def test_a_journal_that_cannot_be_run_as_an_event_is_refused(service: Running) -> None:
    item = {"type": "claim", "id": ["", "events", "k"], "owner": "AAECAwQFBgcICQoLDA0ODw==", "lease_us": 10**6,
            "window_us": 10**6, "journal": "b1tbWw=="}  # fmt: skip
    answer = service.post("/v1/items", [item])
    assert (answer.status_code, answer.json()["type"]) == (422, "urn:semel:unreadable-journal")
    assert service.client.get("/v1/records/events/k").status_code == 404
    claims = {"consumer": "events", "claims": [{"key": "k", "journal": {"id": "k"}}]}
    answer = service.post("/v1/claims", claims)
    assert (answer.status_code, answer.json()["type"]) == (422, "urn:semel:unreadable-journal")


def test_a_line_that_comes_too_often_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    log = LimitedLog(logging.getLogger("semel"), lambda: now)
    for at in range(100):
        log.warning("event %r failed", at)
    log.warning("something else")
    now = 6.0
    log.warning("event %r failed", 100)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 12
    assert lines[-1] == "event 100 failed (90 more like it were not logged)"
