"""The doctor finds what is really wrong, says how to mend it, and leaves the patient as it was."""

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

import semel as library
from semel import Message
from semel.core.relay_flow import RowFailure
from semel.observe import doctor
from semel.observe.doctor import PAGE_ROWS, Finding, examine, of_source
from semel.observe.probes import SourceFacts, StoreFacts
from semel.outbox import tables
from semel.stores.registry import store_for
from tests.cli.shell import semel
from tests.outbox.tools import KINDS, Place
from tests.services import postgres, redis
from tests.waiting import await_true


def examined(url: str) -> list[Finding]:
    store: Any = store_for(url)
    return list(examine(store))


def found(url: str, check: str, level: str) -> list[Finding]:
    return [each for each in examined(url) if each.check == check and each.level == level]


@pytest.fixture(params=["sqlite", "redis", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/events.db"
    return redis.place(tmp_path) if request.param == "redis" else postgres.place(tmp_path)


def test_a_healthy_store_has_no_errors(url: str) -> None:
    with library.open(url, consumer="billing") as once:
        once.run("a", int)
        before = [*once.records.list()]
        findings = examined(url)
        assert [*once.records.list()] == before
    assert [each for each in findings if each.level == "error"] == []
    checks = {each.check for each in findings}
    assert {"semel", "connection", "version", "latency", "permissions", "durability", "consumers"} <= checks
    assert {"clean-up", "claims"} <= checks
    assert any("1 in mode lease" in each.what for each in findings)
    if not url.startswith("sqlite"):
        assert "clock" in checks
    with library.open(url, consumer="billing") as once:
        assert once.records.lookup("semel.doctor: no such key") is None


def test_every_warning_and_error_says_how_to_mend_it(tmp_path: Path) -> None:
    with redis.own(tmp_path, appendonly="no", save="", maxmemory="3mb") as own:
        broken = [each for each in examined(own.url) if each.level != "ok"]
    assert broken
    assert all(each.fix for each in broken)


def test_claims_of_the_rollups_are_not_taken_for_stuck_ones(tmp_path: Path) -> None:
    from semel.observe.rollups import TENANT

    url = f"sqlite:///{tmp_path}/events.db"
    for tenant, level in ((TENANT, "ok"), ("acme", "warning")):
        with library.open(url, consumer="billing", tenant=tenant, lease="20ms") as once:
            once.claim("left")
        with closing(sqlite3.connect(tmp_path / "events.db")) as connection, connection:
            connection.execute("UPDATE semel_records SET fence = fence - 3600000000")
        assert found(url, "claims", level), tenant


def test_orphans_and_unknown_events_are_found(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/events.db"
    with library.open(url, consumer="billing", lease="20ms") as once:
        once.claim("lost-worker")
    with library.open(url, consumer="mails", mode="quarantine") as mails:
        mails.run("vanished", lambda: 1 / 0)
    with closing(sqlite3.connect(tmp_path / "events.db")) as line, line:
        line.execute("UPDATE semel_records SET fence = fence - 120000000 WHERE key = 'lost-worker'")
    (orphan,) = found(url, "claims", "warning")
    assert "lost-worker" in orphan.what
    (unknown,) = found(url, "unknown", "warning")
    assert "vanished" in unknown.what
    assert "semel resolve" in unknown.fix


def test_a_claim_that_runs_too_long_is_found(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/events.db"
    with library.open(url, consumer="billing", lease="1h", policy=library.Policy(run_max_s=7200)) as once:
        once.claim("hangs")
    with closing(sqlite3.connect(tmp_path / "events.db")) as line, line:
        line.execute("UPDATE semel_records SET fence = fence - 1000000000")
    (stuck,) = found(url, "claims", "warning")
    assert "more than 15 minutes" in stuck.what
    assert "hangs" in stuck.what


def test_every_claim_is_looked_at_and_not_the_first_page_alone(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/events.db"
    with library.open(url, consumer="billing", lease="10m") as once:
        for number in range(PAGE_ROWS + 200):
            once.claim(f"k{number:05}")
        with sqlite3.connect(tmp_path / "events.db") as connection:
            last = "SELECT rowid FROM semel_records ORDER BY rowid DESC LIMIT 1"
            connection.execute(f"UPDATE semel_records SET fence = fence - 3600000000 WHERE rowid = ({last})")
        connection.close()
        [finding] = found(url, "claims", "warning")
    assert finding.what.startswith("1 claim "), "one of more than a page, the last"
    assert f"k{PAGE_ROWS + 199:05}" in finding.what


@pytest.mark.parametrize(
    ("facts", "level", "said"),
    [
        (SourceFacts(deliveries_max=5, buries="orders-dead"), "warning", "without semel's account of why"),
        (SourceFacts(deliveries_max=5), "error", "puts it nowhere"),
        (SourceFacts(deadline_s=5.0), "warning", "The lease of 30s is longer than the 5s"),
    ],
)
def test_what_explain_says_of_a_brokers_patience_the_doctor_says_too(
    facts: SourceFacts, level: str, said: str
) -> None:
    findings = [each for each in of_source(facts, 0.01, 30 * 10**6) if said in each.what]
    assert [each.level for each in findings] == [level]


def test_a_missing_index_is_found(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/events.db"
    with library.open(url, consumer="billing") as once:
        once.run("a", int)
    with closing(sqlite3.connect(tmp_path / "events.db")) as line, line:
        line.execute("DROP INDEX semel_records_purge")
    (missing,) = found(url, "indexes", "error")
    assert "semel_records_purge" in missing.what
    answer = semel("doctor", "--store", url, cwd=tmp_path)
    assert answer.code == 1


def test_records_that_nobody_removes_are_found(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/events.db"
    with library.open(url, consumer="billing", window="20ms") as once:
        once.run("a", int)
    with closing(sqlite3.connect(tmp_path / "events.db")) as line, line:
        line.execute("UPDATE semel_records SET fence = fence - 7200000000, purge_at = purge_at - 120")
    (behind,) = found(url, "clean-up", "warning")
    assert "semel purge" in behind.fix


def test_missing_rights_are_found() -> None:
    with postgres.own() as own:
        with library.open(own.url, consumer="billing") as once:
            once.run("a", int)
        postgres.execute(own.url, "CREATE ROLE reader LOGIN")
        postgres.execute(own.url, "GRANT USAGE ON SCHEMA semel TO reader")
        postgres.execute(own.url, "GRANT SELECT ON ALL TABLES IN SCHEMA semel TO reader")
        postgres.execute(own.url, "GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA semel TO reader")
        info = psycopg.conninfo.conninfo_to_dict(own.url)
        reader = f"postgresql://reader@{info['host']}:{info['port']}/{info['dbname']}"
        lacking = found(reader, "permissions", "error")
        assert "records" in {word for each in lacking for word in each.what.split()}
        postgres.execute(own.url, "GRANT INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA semel TO reader")
        assert found(reader, "permissions", "error") == []


def test_an_invalid_index_is_found() -> None:
    with postgres.own() as own:
        with library.open(own.url, consumer="billing") as once:
            once.run("a", int)
        postgres.execute(
            own.url,
            "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'semel.records_purge'::regclass",
        )
        (invalid,) = found(own.url, "indexes", "error")
    assert "REINDEX" in invalid.fix


def test_a_transaction_that_nobody_ends_is_a_warning_where_there_are_inboxes() -> None:
    with postgres.own() as own:
        with library.open(own.url, consumer="billing") as once:
            once.run("a", int)
        assert found(own.url, "inbox", "warning") == []
        with (
            library.open(own.url, consumer="wallet", mode="inbox") as wallet,
            psycopg.connect(own.url) as line,
        ):
            wallet.inbox(line).first("a")
        (never,) = found(own.url, "inbox", "warning")
        assert "idle_in_transaction_session_timeout" in never.fix
        postgres.execute(own.url, "ALTER ROLE semel SET idle_in_transaction_session_timeout = '60s'")
        assert found(own.url, "inbox", "warning") == []


def test_evicted_keys_are_found(tmp_path: Path) -> None:
    with redis.own(tmp_path, maxmemory_policy="allkeys-lru", maxmemory="3mb") as own:
        url = f"{own.url}?allow_eviction=true"
        assert found(url, "memory", "error") == []
        for number in range(300):
            own.ask("SET", f"filler{number}", "x" * 20_000)
        (evicted,) = found(url, "memory", "error")
        assert "noeviction" in evicted.fix
        assert any("allkeys-lru" in each.what for each in found(url, "durability", "error"))


def test_a_memory_that_is_nearly_full_is_found(tmp_path: Path) -> None:
    with redis.own(tmp_path, maxmemory="4mb") as own:
        while True:
            used = own.ask("INFO", "memory")
            if used["used_memory"] > 0.85 * used["maxmemory"]:
                break
            own.ask("SET", f"filler{used['used_memory']}", "x" * 100_000)
        (full,) = found(own.url, "memory", "warning")
    assert "maxmemory" in full.fix


def test_a_replica_is_found(tmp_path: Path) -> None:
    with redis.own(tmp_path) as master, redis.own(tmp_path, replicaof=f"127.0.0.1 {master.port}") as replica:
        assert await_true(lambda: bool(master.ask("INFO", "replication").get("slave0")), 30)
        (behind,) = found(master.url, "replica", "warning")
        (awaited,) = found(f"{master.url}?wait_replicas=1", "replica", "ok")
    assert str(replica.port) in behind.what
    assert "wait_replicas" in behind.fix
    assert "settles wait for it" in awaited.what


def test_a_consumer_with_tenants_and_without_is_found(url: str) -> None:
    with library.open(url, consumer="billing", tenant="acme") as once:
        once.run("a", int)
    assert found(url, "tenants", "warning") == []
    with library.open(url, consumer="billing") as once:
        once.run("a", int)
    (mixed,) = found(url, "tenants", "warning")
    assert "billing" in mixed.what


@pytest.mark.parametrize(
    ("ahead_us", "level", "words"),
    [
        (0, "ok", "0.000 s"),
        (-2_000_000, "warning", "2.000 s behind"),
        (90_000_000, "error", "90.000 s ahead of"),
    ],
)
def test_a_clock_that_is_off(ahead_us: int, level: str, words: str) -> None:
    (clock,) = doctor._clock(StoreFacts(ahead_us=ahead_us))
    assert clock.level == level
    assert words in clock.what
    assert bool(clock.fix) is (level != "ok")


def test_a_slow_store_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"sqlite:///{tmp_path}/events.db"
    with library.open(url, consumer="billing") as once:
        once.run("a", int)
    monkeypatch.setattr(doctor, "LATENCY_WARN_S", 0.0)
    (slow,) = found(url, "latency", "warning")
    assert "run_many" in slow.fix


# --- the outbox ---------------------------------------------------------------------------------


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    made = Place(request.param, tmp_path)
    yield made
    made.close()


def outbox(place: Place, level: str) -> list[Finding]:
    return [each for each in asyncio.run(tables.examine(place.url)) if each.level == level]


def test_an_outbox_that_nobody_empties(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [each.what for each in outbox(place, "ok")] == ["no message waits to be published"]
    place.write(Message("later", {}, not_before=datetime.now(UTC) + timedelta(days=1)))
    place.orders(2, 2)
    assert outbox(place, "warning") == []
    assert "5 messages wait" in outbox(place, "ok")[0].what
    monkeypatch.setattr(tables, "STALLED_S", 0.0)
    (stalled,) = outbox(place, "warning")
    assert "semel relay" in stalled.fix
    place.write(Message("later", {}, not_before=datetime.now(UTC) + timedelta(days=1)))
    answer = semel("doctor", "--store", place.url, "--json", cwd=place.path.parent)
    assert answer.code == 0
    assert "6 messages wait" in next(
        each["what"] for each in answer.json()["findings"] if each["check"] == "outbox"
    )


def test_messages_that_fail_and_messages_given_up(place: Place) -> None:
    ids = place.orders(1, 3)

    async def fail(*, dead: bool) -> None:
        rows = place.rows()
        await rows.open()
        await rows.share()
        await rows.settle([], [RowFailure(ids[0], 0, "the broker says no", dead=dead)], 0)
        await rows.close()

    asyncio.run(fail(dead=False))
    (failing,) = outbox(place, "warning")
    assert ids[0] in failing.what
    assert "the broker says no" in failing.what
    asyncio.run(fail(dead=True))
    (given_up,) = outbox(place, "error")
    assert "1 message was given up, and 1 aggregate waits behind:" in given_up.what
    assert "semel outbox retry" in given_up.fix
    assert semel("doctor", "--store", place.url, cwd=place.path.parent).code == 1


# --- sources ------------------------------------------------------------------------------------


def test_sources_are_examined_too(tmp_path: Path) -> None:
    with library.open(f"sqlite:///{tmp_path}/semel.db", consumer="billing") as once:
        once.run("a", int)
    with redis.own(tmp_path, appendonly="no") as own:
        own.ask("XADD", "orders", "*", "message_id", "1")
        own.ask("XGROUP", "CREATE", "orders", "billing", "0")
        at = f"{own.url}?stream=orders&group=billing"
        answer = semel("doctor", "--from", at, "--json", cwd=tmp_path)
    assert answer.code == 1
    told = [(each["level"], each["what"]) for each in answer.json()["findings"] if each["check"] == "source"]
    assert [level for level, _ in told] == ["ok", "error", "ok"]
    assert "no append-only file" in told[1][1]
    assert told[2][1] == "1 message waits, 0 are in hand"
    down = semel("doctor", "--from", at, cwd=tmp_path)
    assert down.code == 69
    assert "check that the broker is up" in down.out


def test_a_store_that_is_down(tmp_path: Path) -> None:
    with redis.own(tmp_path) as own:
        url = own.url
    answer = semel("doctor", "--store", f"{url}?connect_s=1&answer_s=1", "--json", cwd=tmp_path)
    assert answer.code == 69
    assert answer.json()["healthy"] is False
    assert answer.json()["findings"][-1]["check"] == "connection"


def test_no_store_is_made(tmp_path: Path) -> None:
    assert semel("doctor", cwd=tmp_path).code == 5
    assert list(tmp_path.iterdir()) == []


def test_the_command_line(tmp_path: Path) -> None:
    with library.open(f"sqlite:///{tmp_path}/semel.db", consumer="billing") as once:
        once.run("a", int)
    answer = semel("doctor", "--json", cwd=tmp_path)
    assert answer.code == 0
    assert answer.json()["healthy"] is True
    assert {frozenset(each) for each in answer.json()["findings"]} == {
        frozenset({"check", "level", "what", "fix"})
    }
    lines = semel("doctor", cwd=tmp_path).out.splitlines()
    assert any(line.startswith("ok\tlatency\ta round trip takes") for line in lines)
