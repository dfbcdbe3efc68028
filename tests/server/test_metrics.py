"""`/metrics` counts what every client counts, under the names that the documents have, and tells nothing of a key."""

import re
import sqlite3
from collections import defaultdict
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from prometheus_client.parser import text_string_to_metric_families

import semel
from semel import Message
from semel.observe.prometheus import METRICS
from semel.server.settings import ServeSettings
from semel.stores.sqlite import SqliteStore
from tests.cli.processes import ROOT, start
from tests.server.tools import Running, serving, token_for
from tests.services import postgres
from tests.waiting import await_true

OWN = {"http_requests_total", "http_request_duration_seconds", "http_requests_in_flight"}


def page(running: Running) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Samples by name and labels; of a name that has not been counted yet there are none."""
    found: defaultdict[str, Any] = defaultdict(dict)
    for family in text_string_to_metric_families(running.client.get("/metrics").text):
        for sample in family.samples:
            found[sample.name][tuple(sorted(sample.labels.items()))] = sample.value
    return found


def total(samples: dict[tuple[tuple[str, str], ...], float], **labels: str) -> float:
    return sum(value for at, value in samples.items() if set(labels.items()) <= set(at))


def test_names_are_those_of_the_documents(service: Running) -> None:
    text = (ROOT / "docs/reference/metrics.md").read_text()
    documented = {f"semel_{name}" for name in re.findall(r"^\| `([a-z_]+)` \|", text, re.MULTILINE)}
    families = text_string_to_metric_families(service.client.get("/metrics").text)
    served = {family.name + ("_total" if family.type == "counter" else "") for family in families}
    assert served == documented
    assert served == {f"semel_{name}" for name in METRICS.keys() | OWN}


def test_what_happens_is_counted_whoever_does_it(tmp_path: Path) -> None:
    with serving(ServeSettings(auth="none", store=f"sqlite:///{tmp_path}/semel.db", port=0)) as running:
        first = running.claim("evt_secret")
        running.claim("evt_secret")
        running.end("complete", first["claim"], value=1)
        running.claim("evt_secret")
        running.end("fail", running.claim("bad")["claim"], error="no such card")
        mark = {"type": "mark", "tenant": "", "consumer": "m", "keys": ["a", "b"], "window_us": 10**9}
        running.post("/v1/items", [mark])
        running.post("/v1/items", [mark])
        running.post("/v1/events", [{"id": "e1", "type": "t"}, {"id": "e1", "type": "t"}])
        assert await_true(lambda: running.client.get("/v1/records/events/e1").json()["state"] == "done")
        running.client.get("/v1/stats")
        found = page(running)
        text = running.client.get("/metrics").text
    assert total(found["semel_events_received_total"], consumer="billing") == 4
    assert total(found["semel_events_duplicate_total"], consumer="billing") == 2
    assert total(found["semel_events_duplicate_total"], consumer="billing", reason="race") == 1
    assert total(found["semel_events_processed_total"], consumer="billing") == 1
    assert total(found["semel_events_failed_total"], consumer="billing", error="reported") == 1
    for name in ("received", "duplicate", "processed", "failed"):
        each = found[f"semel_events_{name}_total"]
        assert total(each, consumer="billing") == total(each, consumer="billing", source="service"), name
    events = {"consumer": "events", "event_type": "t", "source": "events", "handler": "EventTable.persist"}
    assert total(found["semel_events_received_total"], **events) == 2
    assert total(found["semel_events_processed_total"], **events) == 1
    assert total(found["semel_events_processed_total"], consumer="m") == 2
    assert total(found["semel_events_duplicate_total"], consumer="m") == 2
    assert total(found["semel_events_processed_total"], consumer="events") == 1
    assert total(found["semel_events_duplicate_total"], consumer="events") == 1
    assert total(found["semel_handler_duration_seconds_count"], handler="EventTable.persist") == 1
    assert total(found["semel_window_seconds"], consumer="billing") == 86400
    assert total(found["semel_records"], state="done") >= 2
    sent = found["semel_store_operation_duration_seconds_count"]
    assert total(sent, op="claim") + total(sent, op="mixed") >= 5  # one may share its round trip with others
    assert total(found["semel_http_requests_total"], route="/v1/claims", status="200") == 4
    assert not any(("consumer", "billing") in at for at in found.get("semel_claims_in_flight", {}))
    assert "evt_secret" not in text


def test_a_tenants_count_is_not_taken_for_the_stores(tmp_path: Path) -> None:
    path = tmp_path / "semel.db"
    store = SqliteStore(path)
    store.open()
    mine, all_tenants = token_for(store, "acme", "read")[0], token_for(store, None, "admin")[0]
    store.close()
    with semel.open(f"sqlite:///{path}", consumer="billing") as once:
        once.run("old", int)
    with serving(ServeSettings(store=f"sqlite:///{path}", port=0), all_tenants) as running:
        running.claim("k")
        assert await_true(
            lambda: total(page(running)["semel_records"], state="done") == 1
        )  # without the tokens
        before = page(running)["semel_records"]
        tenant = Running(running.address, mine)
        assert tenant.client.get("/v1/stats").json()["states"] == {}
        tenant.client.close()
        assert page(running)["semel_records"] == before
        # A count that took long is used again for a while.
        assert await_true(lambda: running.client.get("/v1/stats").json()["consumers"] == {"billing": 2})
        assert running.client.get("/v1/stats").json()["states"] == {"done": 1, "claimed": 1}
        assert total(page(running)["semel_records"], state="claimed") == 1


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_the_outbox_is_looked_at(tmp_path: Path, kind: str) -> None:
    url = f"sqlite:///{tmp_path}/semel.db" if kind == "sqlite" else postgres.place(tmp_path)
    write(url, tmp_path)
    with serving(ServeSettings(auth="none", store=url, port=0)) as running:
        assert await_true(lambda: total(page(running)["semel_outbox_pending"]) == 1)
        assert total(page(running)["semel_outbox_oldest_age_seconds"]) > 0
    relay = start("relay", "--from", url, "--metrics", "0", cwd=tmp_path)
    assert relay.stderr is not None
    try:
        port = relay.stderr.readline().decode().strip().removesuffix(".").rpartition(" ")[2]
        watched = Running(f"http://127.0.0.1:{port}")
        assert await_true(lambda: total(page(watched)["semel_outbox_published_total"]) == 1)
        assert "semel_outbox_pending" in page(watched)
        watched.client.close()
    finally:
        relay.terminate()
        relay.communicate(timeout=60)


def write(url: str, folder: Path) -> None:
    """One message into the outbox of this store."""
    with semel.open(url, consumer="shop", mode="inbox") as once:
        once.records.stats()  # makes the tables
        if url.startswith("sqlite"):
            with closing(sqlite3.connect(folder / "semel.db", isolation_level=None)) as file:
                file.execute("BEGIN")
                once.outbox(file).publish(Message("order.placed", {"n": 1}))
                file.execute("COMMIT")
        else:
            with psycopg.connect(postgres.url()) as connection, connection.transaction():
                once.outbox(connection).publish(Message("order.placed", {"n": 1}))
