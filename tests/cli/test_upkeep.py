"""`semel purge`, `stats`, `migrate`, `window` and `consumer`."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from semel.stores.sqlite import schema_sql
from tests.cli.shell import semel


def test_purge_removes_what_is_over_and_nothing_else(place: Path) -> None:
    planned = semel("purge", "--dry-run", "--json", cwd=place).json()
    assert (planned["expired"], planned["removed"], planned["dry_run"]) == (25, 0, True)
    before = semel("list", cwd=place).out.count("\n")
    assert "Would remove 25 expired records" in semel("purge", "--dry-run", cwd=place).err
    done = semel("purge", "--json", cwd=place).json()
    assert set(done) == {"expired", "removed", "partitions", "lag_s", "cleaner", "dry_run"}
    assert semel("list", cwd=place).out.count("\n") == before
    again = semel("purge", cwd=place)
    assert (again.code, again.out) == (0, "")
    assert semel("purge", "--dry-run", cwd=place).err == "Would remove 0 expired records.\n"


def test_stats_counts_by_state_and_consumer(place: Path) -> None:
    counted = semel("stats", "--json", cwd=place).json()
    assert counted["states"] == {"claimed": 1, "released": 1, "done": 4, "failed": 1, "unknown": 1}
    assert counted["consumers"] == {"billing": 6, "mails": 2, "metrics": 1}
    assert (counted["marks"], counted["expired"], counted["store"]) == (1, 25, "sqlite:///events.db")
    assert set(counted) == {
        "store", "states", "consumers", "marks", "expired", "purge_lag_s", "bytes_used", "tiers", "ahead_s",
    }  # fmt: skip
    lines = dict(line.split("\t") for line in semel("stats", cwd=place).out.splitlines())
    assert (lines["done"], lines["consumer billing"]) == ("4", "6")


@pytest.mark.parametrize(
    "command",
    [
        ["stats", "--watch", "--json"],
        ["purge", "--watch", "--dry-run"],
        ["purge", "--watch", "--every", "1ms"],
    ],
    ids=" ".join,
)
def test_what_does_not_go_together_is_refused(place: Path, command: list[str]) -> None:
    assert semel(*command, cwd=place).code == 2


def test_migrate_creates_a_store_that_opens(tmp_path: Path) -> None:
    url = "sqlite:///new.db"
    assert semel("migrate", "--store", url, "--dry-run", cwd=tmp_path).code == 0
    assert not (tmp_path / "new.db").exists()
    made = semel("migrate", "--store", url, cwd=tmp_path)
    assert (made.code, made.err) == (0, "sqlite:///new.db was created.\n")
    again = semel("migrate", "--store", url, cwd=tmp_path)
    assert (again.code, again.err) == (0, "sqlite:///new.db is up to date.\n")
    assert semel("list", "--store", url, "--json", cwd=tmp_path).json() == {"records": [], "more": False}


def test_migrate_prints_the_schema(tmp_path: Path) -> None:
    printed = semel("migrate", "--sql", "--store", "sqlite:///new.db", cwd=tmp_path)
    assert printed.out == schema_sql()
    assert not (tmp_path / "new.db").exists()
    with closing(sqlite3.connect(":memory:")) as connection, connection:
        connection.executescript(printed.out)
    assert semel("migrate", "--sql", "--store", "memory:", cwd=tmp_path).code == 2


def test_windows_are_set_shown_and_removed(place: Path) -> None:
    assert semel("window", "get", "billing", "--json", cwd=place).json() == {
        "tenant": "", "consumer": "billing", "event_type": None, "window": "24h", "window_s": 86400.0,
        "origin": "client",
    }  # fmt: skip
    assert semel("window", "set", "billing", "orders", cwd=place).code == 0
    assert semel("window", "set", "billing", "off", "--type", "invoice", cwd=place).code == 0
    listed = semel("window", "list", "--json", cwd=place).json()["windows"]
    assert [(each["event_type"], each["window"]) for each in listed] == [(None, "4h"), ("invoice", "off")]
    assert semel("window", "list", cwd=place).out == "billing\t*\t4h\t\nbilling\tinvoice\toff\t\n"
    assert semel("window", "get", "billing", "--type", "refund", cwd=place).out == "4h\n"
    assert semel("window", "get", "billing", "--type", "invoice", cwd=place).out == "off\n"
    assert semel("window", "unset", "billing", "--type", "invoice", cwd=place).code == 0
    assert semel("window", "unset", "billing", "--type", "invoice", cwd=place).code == 5


def test_a_window_for_existing_records_needs_a_yes(place: Path) -> None:
    assert semel("window", "set", "billing", "off", "--existing", cwd=place).code == 2
    assert semel("show", "evt_decimal", cwd=place).code == 0
    assert semel("window", "set", "billing", "off", "--existing", "--yes", cwd=place).code == 0
    assert semel("show", "evt_decimal", cwd=place).code == 5


@pytest.mark.parametrize("window", ["soon", "-1h", "1y", "1ms", "4000d"])
def test_a_window_that_is_none_is_refused(place: Path, window: str) -> None:
    assert semel("window", "set", "billing", "--", window, cwd=place).code == 2


def test_consumers_are_listed_with_their_modes(place: Path) -> None:
    listed = semel("consumer", "list", "--json", cwd=place).json()["consumers"]
    assert [(each["consumer"], each["mode"], each["records"]) for each in listed] == [
        ("billing", "lease", 6), ("mails", "quarantine", 2), ("metrics", "mark", 1), ("short", "lease", 0),
    ]  # fmt: skip
    shown = semel("consumer", "show", "mails", "--json", cwd=place).json()
    assert shown == {
        "tenant": "", "consumer": "mails", "mode": "quarantine", "windows": {}, "records": 2, "claimed": 0,
        "released": 0, "unknown": 1,
    }  # fmt: skip


def test_a_mode_changes_only_when_nothing_is_unfinished(place: Path) -> None:
    refused = semel("consumer", "set-mode", "billing", "quarantine", cwd=place)
    assert refused.code == 75
    assert "1 of its records are claimed or unknown" in refused.err
    assert semel("consumer", "show", "billing", "--json", cwd=place).json()["mode"] == "lease"
    assert semel("consumer", "set-mode", "short", "quarantine", cwd=place).code == 0
    assert semel("consumer", "show", "short", "--json", cwd=place).json()["mode"] == "quarantine"


def test_an_unknown_consumer_is_not_made(place: Path) -> None:
    refused = semel("consumer", "set-mode", "biling", "inbox", cwd=place)
    assert refused.code == 5
    assert "did you mean 'billing'?" in refused.err
    assert semel("consumer", "set-mode", "billing", "leese", cwd=place).code == 2


def test_looking_records_no_mode(place: Path) -> None:
    for command in (["show", "evt_done"], ["list"], ["forget", "evt_done", "--dry-run"], ["explain"]):
        semel(*command, "--consumer", "stranger", cwd=place)
    names = [each["consumer"] for each in semel("consumer", "list", "--json", cwd=place).json()["consumers"]]
    assert "stranger" not in names


def test_a_window_without_end_is_shown_as_a_word(tmp_path: Path) -> None:
    store = ["--store", "sqlite:///events.db"]
    asked = ["--consumer", "billing", "--window", "forever", "--key", "evt_1"]
    ran = semel("once", *store, *asked, "--", "true", cwd=tmp_path)
    assert ran.code == 0, ran.err
    semel("window", "set", "billing", "forever", "--type", "refund", *store, cwd=tmp_path)
    assert semel("window", "get", "billing", "--type", "refund", *store, cwd=tmp_path).out == "forever\n"
    (listed,) = semel("list", *store, "--json", cwd=tmp_path).json()["records"]
    assert listed["expires_at"] == "forever"
    assert "\tforever\t" in semel("list", *store, cwd=tmp_path).out
    assert "forever: it stays until somebody forgets it" in semel("show", "evt_1", *store, cwd=tmp_path).out
    assert semel("purge", *store, "--json", cwd=tmp_path).json()["removed"] == 0
    told = semel("explain", *store, "--consumer", "billing", "--json", cwd=tmp_path).json()
    assert (told["window"], told["window_from"], told["horizon_known"]) == ("forever", "seen", True)
    assert any("every finished key stays" in each["what"] for each in told["weakened_by"])


def test_a_window_without_end_is_refused_where_it_cannot_hold(tmp_path: Path) -> None:
    refused = semel("explain", "--store", "memory:", "--window", "forever", cwd=tmp_path)
    assert refused.code == 78
    assert "cannot promise a window of forever" in refused.err
