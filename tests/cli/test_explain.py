"""`semel explain` says what the tested table says, and answers with its exit code."""

from pathlib import Path

import pytest

import semel as library
from semel import keys
from semel.observe.guarantees import GUARANTEES, WINDOWS
from tests.cli.shell import semel
from tests.faults import table


def test_the_guarantees_are_those_that_are_tested() -> None:
    stated = {
        mode: {window: None if cell is None else (cell.effects, cell.flagged) for window, cell in row.items()}
        for mode, row in GUARANTEES.items()
    }
    tested = {
        mode: {window: None if cell is None else (cell.effects, cell.flagged) for window, cell in row.items()}
        for mode, row in table.GUARANTEES.items()
    }
    assert stated == tested
    assert table.WINDOWS == WINDOWS


def test_explain_prints_the_row_of_the_table(tmp_path: Path) -> None:
    answer = semel("explain", "--mode", "quarantine", "--json", cwd=tmp_path)
    assert answer.code == 0
    told = answer.json()
    assert set(told) == {
        "mode", "store", "sources", "consumer", "sink", "window", "window_s", "window_from", "lease_s", "probe",
        "on_unavailable", "how", "crashes", "weakened_by", "table_holds", "horizon_known", "required", "satisfied",
    }  # fmt: skip
    assert {each["window"]: (each["effects"], each["flagged"]) for each in told["crashes"]} == {
        window: (None, False) if cell is None else (cell.effects, cell.flagged)
        for window, cell in table.GUARANTEES["quarantine"].items()
    }
    assert not (tmp_path / "semel.db").exists()
    assert "does not exist yet" in answer.err


@pytest.mark.parametrize("mode", ["lease", "quarantine"])
def test_explain_shows_the_probe(tmp_path: Path, mode: str) -> None:
    told = semel("explain", "--mode", mode, "--probe", "--json", cwd=tmp_path).json()
    assert told["probe"] is True
    assert "the probe asks" in told["how"]
    assert {each["window"]: each["effects"] for each in told["crashes"]} == {
        window: None if cell is None else cell.effects
        for window, cell in table.GUARANTEES[f"{mode}, probe"].items()
    }
    assert (
        "probe\tasked about unknown outcomes" in semel("explain", "--mode", mode, "--probe", cwd=tmp_path).out
    )


def test_explain_shows_that_handlers_run_without_the_store(tmp_path: Path) -> None:
    told = semel("explain", "--on-unavailable", "run", "--json", cwd=tmp_path).json()
    assert (told["on_unavailable"], told["table_holds"]) == ("run", False)
    assert [each["fix"] for each in told["weakened_by"] if each["breaks"]] == [
        "Policy(on_unavailable='refuse')"
    ]
    shown = semel("explain", "--on-unavailable", "run", cwd=tmp_path).out
    assert "store out of reach\thandlers run without a claim" in shown
    assert "store out of reach\trefused: nothing runs" in semel("explain", cwd=tmp_path).out


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--mode", "inbox", "--require", "inbox"], 0),
        (["--mode", "inbox", "--require", "quarantine"], 0),
        (["--mode", "inbox", "--require", "mark"], 0),
        (["--mode", "lease", "--require", "lease"], 0),
        (["--mode", "lease", "--require", "inbox"], 1),
        (["--mode", "lease", "--sink", "keyed", "--require", "inbox"], 0),
        (["--mode", "lease", "--sink", "fenced", "--require", "inbox"], 1),
        (["--mode", "lease", "--probe", "--require", "quarantine"], 0),
        (["--mode", "quarantine", "--probe", "--require", "quarantine"], 0),
        (["--mode", "quarantine", "--require", "lease"], 1),
        (["--mode", "quarantine", "--probe", "--require", "lease"], 0),
        (["--mode", "mark", "--probe"], 78),
        (["--mode", "lease", "--on-unavailable", "run"], 0),
        (["--mode", "lease", "--on-unavailable", "run", "--require", "lease"], 1),
        (["--mode", "inbox", "--on-unavailable", "run"], 78),
        (["--mode", "mark", "--require", "lease"], 1),
        (["--mode", "observe", "--require", "lease"], 1),
        (["--mode", "mark", "--require", "observe"], 0),
        (["--mode", "lease", "--require", "lease", "--window", "off"], 1),
        (["--mode", "lease", "--store", "memory:"], 0),
        (["--mode", "lease", "--store", "memory:", "--require", "lease"], 1),
        (["--mode", "inbox", "--store", "memory:"], 78),
        (["--mode", "transaction"], 0),
        (["--mode", "transaction", "--require", "lease"], 0),
        (["--mode", "transaction", "--require", "inbox"], 1),
        (["--store", "sqlite:///text.db"], 78),
        (["--store", "pigeon:"], 78),
        (["--require", "leese"], 2),
    ],
    ids=lambda part: " ".join(part) if isinstance(part, list) else str(part),
)
def test_the_exit_code_says_whether_it_holds(tmp_path: Path, options: list[str], code: int) -> None:
    (tmp_path / "text.db").write_text("no database\n" * 20, encoding="utf-8")
    assert semel("explain", *options, cwd=tmp_path).code == code


@pytest.mark.parametrize(
    ("options", "said", "breaks"),
    [
        (["--store", "memory:"], "forgets all", True),
        (["--window", "off"], "every duplicate runs", True),
        (["--window", "10s"], "shorter than the lease", False),
        (["--window", "analytics"], "shorter than a day", False),
        (["--mode", "mark"], "loses the event", False),
        (["--store", "sqlite:///x.db?synchronous=normal"], "when the power fails", False),
    ],
)
def test_what_weakens_it_is_told(tmp_path: Path, options: list[str], said: str, breaks: bool) -> None:
    told = semel("explain", "--json", *options, cwd=tmp_path).json()
    assert [each["breaks"] for each in told["weakened_by"] if said in each["what"]] == [breaks]
    assert told["table_holds"] is not breaks


def test_a_consumer_is_explained_by_its_recorded_mode_and_window(place: Path) -> None:
    semel("window", "set", "mails", "15m", cwd=place)
    told = semel("explain", "--consumer", "mails", "--json", cwd=place).json()
    assert (told["mode"], told["window_s"]) == ("quarantine", 900.0)
    other = semel("explain", "--consumer", "mails", "--mode", "lease", cwd=place)
    assert other.code == 78
    assert "works in mode quarantine, but --mode says lease" in other.err


def test_in_words(place: Path) -> None:
    lines = semel("explain", "--consumer", "metrics", cwd=place).out.splitlines()
    assert lines[0] == "mode\tmark"
    assert "killed after the claim\t0: lost" in lines


def test_the_records_show_that_keys_are_hashes_of_the_content(tmp_path: Path) -> None:
    with library.open(f"sqlite:///{tmp_path}/semel.db", consumer="clicks") as once:
        once.run("evt_1", int)
        assert semel("explain", "--consumer", "clicks", "--require", "lease", cwd=tmp_path).code == 0
        once.run(keys.content()({"amount": 5}), int)
        answer = semel("explain", "--consumer", "clicks", "--require", "lease", cwd=tmp_path)
        assert answer.code == 1
        assert "hashes of the content" in answer.out
        told = semel("explain", "--consumer", "clicks", "--keys", "given", "--require", "lease", cwd=tmp_path)
        assert told.code == 0  # who says so knows better
    with library.open(f"sqlite:///{tmp_path}/semel.db", consumer="views") as once:
        once.run_many([keys.sliding("5m", namespace="ours").delivery({"page": 1})], str)
    assert semel("explain", "--consumer", "views", "--require", "lease", cwd=tmp_path).code == 1


def test_the_store_shows_that_a_tenant_is_missing(tmp_path: Path) -> None:
    for tenant in ("acme", "other"):
        with library.open(f"sqlite:///{tmp_path}/semel.db", consumer="billing", tenant=tenant) as once:
            once.run("evt_1", int)
    answer = semel("explain", "--consumer", "billing", "--require", "lease", cwd=tmp_path)
    assert answer.code == 1
    assert "Several tenants share the consumer and none is named" in answer.out
    named = semel("explain", "--consumer", "billing", "--tenant", "acme", "--require", "lease", cwd=tmp_path)
    assert named.code == 0


def test_the_clients_own_window_is_shown(tmp_path: Path) -> None:
    with library.open(f"sqlite:///{tmp_path}/semel.db", consumer="billing", window="3d") as once:
        once.run("a", int)
    told = semel("explain", "--consumer", "billing", "--json", cwd=tmp_path).json()
    assert (told["window_s"], told["window_from"]) == (3 * 86400, "seen")
    assert "72h, as the client says" in semel("explain", "--consumer", "billing", cwd=tmp_path).out
    semel("window", "set", "billing", "2h", cwd=tmp_path)
    told = semel("explain", "--consumer", "billing", "--json", cwd=tmp_path).json()
    assert (told["window_s"], told["window_from"]) == (7200, "stored")
    told = semel("explain", "--consumer", "nobody", "--json", cwd=tmp_path).json()
    assert (told["window_s"], told["window_from"]) == (86400, "assumed")


def test_a_horizon_that_nobody_knows_is_said_to_be_unknown(tmp_path: Path) -> None:
    assert "unknown: how long the source may send again" in semel("explain", cwd=tmp_path).out
    known = semel("explain", "--redelivers-for", "1h", cwd=tmp_path).out
    assert "unknown" not in known
