"""A tenant whose journals cannot be read keeps nobody else's events from being recovered."""

import asyncio
import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from semel.codec import encode
from semel.core.commands import Admit, Claim, Lookup, Scan
from semel.ingest.intake import Event
from semel.observe.limited_log import BURST, LimitedLog, LimitFilter
from semel.runtime.process import new_owner
from semel.server import events
from semel.server.events import ORPHANS_MAX
from semel.server.settings import ServeSettings
from semel.stores.registry import store_for
from semel.stores.sqlite import SqliteStore
from semel.types import Absent
from tests.cli.processes import semel
from tests.server.stores import KINDS, store_url
from tests.server.tools import Running, process, serving
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
    """The handler of the tests below."""
    if event.tenant == "loud":
        await asyncio.Event().wait()


def serve_the_quiet(store: Any, url: str, quiet: list[str], *, events_lease: str) -> None:
    """Leave an event of each of these tenants behind, and serve until all are done."""
    store.send([abandoned(tenant, "k", encode(b"{}")) for tenant in quiet])

    def are_done() -> bool:
        found = store.send([Lookup((tenant, "events", "k")) for tenant in quiet])
        return all(record.state == "done" for record in found)

    handler = f"{__name__}:{run_all_but_loud.__name__}"
    settings = ServeSettings(
        auth="none",
        store=url,
        port=0,
        events_lease=events_lease,
        handler=handler,
        drain_s=0.1,
        dashboard=False,
    )
    with serving(settings):
        assert await_true(are_done)


@pytest.mark.parametrize("kind", KINDS)
def test_the_many_orphans_of_one_tenant_do_not_hide_those_of_others(tmp_path: Path, kind: str) -> None:
    url = store_url(kind, tmp_path)
    store: Any = store_for(url)
    store.open()
    quiet = [f"quiet {at}" for at in range(4)]
    store.send([abandoned("loud", f"l{at}", encode(b"{}")) for at in range(8 * ORPHANS_MAX)])
    serve_the_quiet(store, url, quiet, events_lease="3s")
    store.close()


@pytest.mark.parametrize("kind", KINDS)
def test_each_tenant_is_asked_for_alone_when_there_are_many_orphans(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many one tenant has: all pages of this test are full of them, and each sweep reads only one."""
    monkeypatch.setattr(events, "ORPHANS_MAX", 5)
    monkeypatch.setattr(events, "PAGES_MAX", 1)
    url = store_url(kind, tmp_path)
    store: Any = store_for(url)
    store.open()
    quiet = [f"quiet {at}" for at in range(4)]
    store.send([Admit(tenant, "events", "lease") for tenant in ("loud", *quiet)])
    store.send([abandoned("loud", f"l{at}", encode(b"{}")) for at in range(1000)])
    serve_the_quiet(store, url, quiet, events_lease="1s")
    store.close()


class StuckSearch(SqliteStore):
    """The search for orphans takes as long as the test wants."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, synchronous="NORMAL")
        self.searching, self.let_go = threading.Event(), threading.Event()

    def send(self, items: Any, /) -> Any:
        if any(isinstance(item, Scan) and item.orphaned for item in items):
            self.searching.set()
            assert self.let_go.wait(60)
        return super().send(items)


@pytest.mark.parametrize("who", ["service", "caller"])
def test_claims_go_on_while_orphans_are_searched_for(tmp_path: Path, who: str) -> None:
    store = StuckSearch(tmp_path / "semel.db")
    persist = f"sqlite:///{tmp_path}/rows.db" if who == "service" else ""
    settings = ServeSettings(auth="none", store="memory:", port=0, persist=persist, dashboard=False)
    with serving(settings, store=store) as running, ThreadPoolExecutor(1) as threads:
        try:
            asked = [
                threads.submit(running.post, "/v1/items", [{"type": "scan", "orphaned": True}])
                for _ in range(who == "caller")
            ]
            assert store.searching.wait(30)
            assert running.claim("quick")["outcome"] == "claimed"
        finally:
            store.let_go.set()
        assert all(each.result(30).status_code == 200 for each in asked)


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


def test_lines_of_another_library_are_counted_too(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    log, limit = logging.getLogger("another library"), LimitFilter(lambda: now)
    log.addFilter(limit)
    for _ in range(100):
        log.warning("Invalid HTTP request received.")
    log.warning("something else")
    now = 6.0
    log.warning("Invalid HTTP request received.")
    log.removeFilter(limit)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 12
    assert lines[-1] == "Invalid HTTP request received. (90 more like it were not logged)"


def test_malformed_requests_do_not_fill_the_log(tmp_path: Path) -> None:
    with process(tmp_path) as (running, address):
        for _ in range(30):
            assert b"400" in Running(address).raw(b"nonsense\r\n\r\n", hangs_up=True)
        running.terminate()
        assert running.stderr is not None
        assert running.stderr.read().count(b"Invalid HTTP request") == BURST
