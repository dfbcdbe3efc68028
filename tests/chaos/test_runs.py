"""Chaos on real processes: it finds doubles and names their line, catches a racy store, and an inbox holds."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

import semel
from semel.core.commands import Count, answer_or_raise
from semel.errors import PolicyInvalid
from semel.stores.sqlite import SqliteStore
from semel.testing.chaos import ChaosFailed, ChaosReport
from semel.testing.pytest_plugin import Chaos
from semel.types import Stats
from tests.chaos import handlers

pytestmark = pytest.mark.slow

LEASE_S = 1.0


def live_records(path: Path) -> dict[str, int]:
    store = SqliteStore(path)
    store.open()
    try:
        counted = answer_or_raise(store.send([Count()])[0])
        assert isinstance(counted, Stats)
        return counted.consumers
    finally:
        store.close()


def kinds(report: ChaosReport) -> set[str]:
    return set(report.faults_by_kind)


def test_a_plain_effect_in_mode_lease_doubles_as_promised_and_its_line_is_named(
    chaos: Chaos, tmp_path: Path
) -> None:
    report = chaos(handlers.charge, effects=handlers.count, lease_s=LEASE_S, sample=handlers.sample)
    report.check()
    assert report.doubled
    assert not report.lost
    assert {"kill", "pause", "store cut off", "ack lost"} <= kinds(report)
    with pytest.raises(AssertionError, match="doubled"):
        report.check(strict=True)
    [line] = [line for line in report.lines if line.text.strip().endswith("# the effect")]
    assert line.is_effect
    assert line.events_repeated == len(report.doubled)
    assert report.file == handlers.__file__
    assert sum(event.effects for event in report.events) == len(
        (tmp_path / "effects.txt").read_text().split()
    )
    assert not any(live_records(tmp_path / "chaos-1.db").values())


def test_an_inbox_has_every_effect_once_though_workers_are_killed(chaos: Chaos, tmp_path: Path) -> None:
    path = tmp_path / "wallet.db"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE credits (event TEXT)")
    report = chaos(
        handlers.credit,
        mode="inbox",
        store=f"sqlite:///{path}?adopt=true",
        effects="sql:SELECT event, count(*) FROM credits GROUP BY event",
        lease_s=LEASE_S,
    )
    report.check(strict=True)
    assert report.faults_by_kind["kill"] >= 5
    assert len(report.keys("once")) == len(report.events) == 40
    assert any(event.runs_cut for event in report.events)


def test_a_racy_store_is_caught(chaos: Chaos) -> None:
    report = chaos(handlers.slow_charge, store="tests.chaos.handlers:racy_store", lease_s=LEASE_S)
    assert not report.held
    assert report.broken  # where depends on which deliveries meet: among events with faults, without, or both


@pytest.mark.parametrize("mode", ["quarantine", "mark"])
def test_modes_that_never_repeat_lose_or_flag_instead(chaos: Chaos, mode: str) -> None:
    report = chaos(handlers.acharge, mode=mode, effects=handlers.count, lease_s=LEASE_S)
    report.check()
    assert not report.doubled
    assert bool(report.undecided) is (mode == "quarantine")
    assert bool(report.lost) is (mode == "mark")


def test_the_ledger_counts_runs_and_a_check_that_finds_nothing_is_believed(chaos: Chaos) -> None:
    report = chaos(handlers.charge, events=4, workers=2, effects=handlers.lost_count, lease_s=LEASE_S)
    assert not report.held
    assert len(report.lost) == 4
    assert "no effect" in report.broken[0]


def test_a_used_store_is_refused_and_nothing_runs(chaos: Chaos, tmp_path: Path, effects: Path) -> None:
    url = f"sqlite:///{tmp_path}/used.db"
    with semel.open(url, consumer="billing") as once:
        once.run("evt_1", lambda: 1)
    with pytest.raises(PolicyInvalid, match=r"1 of consumer 'billing'.*--force"):
        chaos(handlers.charge, store=url)
    assert effects.read_text() == ""


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "observe"}, "chaos knows the modes"),
        ({"sink": "keyed"}, "name --effects"),
        ({"store": "memory:"}, "one process only"),
        ({"mode": "inbox", "store": "tests.chaos.handlers:racy_store"}, "takes no SQL"),
        ({"effects": "tests.chaos.handlers:not_callable"}, "is no function"),
        ({"handler": "tests.chaos.handlers:not_callable"}, "no plain handler"),
        ({"lease_s": 0.0}, "lease_s is 0"),
        ({"sample": '{"id": {key'}, "no JSON"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(
    chaos: Chaos, settings: dict[str, object], message: str
) -> None:
    with pytest.raises((PolicyInvalid, semel.errors.UsageError), match=message):
        chaos(settings.pop("handler", handlers.charge), **settings)  # type: ignore[arg-type]


def test_a_handler_that_ends_its_process_fails_the_run_and_leaves_nothing(chaos: Chaos) -> None:
    with pytest.raises(ChaosFailed, match="end by themselves"):
        chaos(handlers.leave, events=2, workers=1, lease_s=0.2)


def test_a_handler_that_raises_in_every_run_fails_the_run_with_its_error(chaos: Chaos) -> None:
    with pytest.raises(ChaosFailed, match=r"raised in each of 50 runs.*not subscriptable.*\n.*order: dict"):
        chaos(handlers.take_whole_message, lease_s=LEASE_S)


def test_functions_that_workers_cannot_import_are_refused(chaos: Chaos) -> None:
    with pytest.raises(ValueError, match="define it at the top of a module"):
        chaos(lambda order: order)
