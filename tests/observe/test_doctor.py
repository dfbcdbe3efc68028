"""The doctor finds what is really wrong, says how to mend it, and leaves the patient as it was."""

import sqlite3
from pathlib import Path
from typing import Any

import psycopg
import pytest

import semel as library
from semel.observe.doctor import Finding, examine
from semel.stores.registry import store_for
from tests.cli.shell import semel
from tests.services import postgres, redis


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
        with sqlite3.connect(tmp_path / "events.db") as connection:
            connection.execute("UPDATE semel_records SET fence = fence - 3600000000")
        connection.close()
        assert found(url, "claims", level), tenant


def test_orphans_and_unknown_events_are_found(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/events.db"
    with library.open(url, consumer="billing", lease="20ms") as once:
        once.claim("lost-worker")
    with library.open(url, consumer="mails", mode="quarantine") as mails:
        mails.run("vanished", lambda: 1 / 0)
    with sqlite3.connect(tmp_path / "events.db") as line:
        line.execute("UPDATE semel_records SET fence = fence - 120000000 WHERE key = 'lost-worker'")
    line.close()
    (orphan,) = found(url, "claims", "warning")
    assert "lost-worker" in orphan.what
    (unknown,) = found(url, "unknown", "warning")
    assert "vanished" in unknown.what
    assert "semel resolve" in unknown.fix


def test_a_claim_that_runs_too_long_is_found(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/events.db"
    with library.open(url, consumer="billing", lease="1h", policy=library.Policy(run_max_s=7200)) as once:
        once.claim("hangs")
    with sqlite3.connect(tmp_path / "events.db") as line:
        line.execute("UPDATE semel_records SET fence = fence - 1000000000")
    line.close()
    (stuck,) = found(url, "claims", "warning")
    assert "more than 15 minutes" in stuck.what
    assert "hangs" in stuck.what


def test_a_missing_index_is_found(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/events.db"
    with library.open(url, consumer="billing") as once:
        once.run("a", int)
    with sqlite3.connect(tmp_path / "events.db") as line:
        line.execute("DROP INDEX semel_records_purge")
    line.close()
    (missing,) = found(url, "indexes", "error")
    assert "semel_records_purge" in missing.what
    answer = semel("doctor", "--store", url, cwd=tmp_path)
    assert answer.code == 1


def test_records_that_nobody_removes_are_found(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/events.db"
    with library.open(url, consumer="billing", window="20ms") as once:
        once.run("a", int)
    with sqlite3.connect(tmp_path / "events.db") as line:
        line.execute("UPDATE semel_records SET fence = fence - 7200000000, purge_at = purge_at - 120")
    line.close()
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
