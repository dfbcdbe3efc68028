"""`semel show`, `list`, `forget` and `resolve`: what they say, change and answer."""

import re
from pathlib import Path

import pytest

from tests.cli.shell import semel

SUMMARY = {
    "age_s", "attempt", "claim", "consumer", "event_type", "expires_at", "fence", "first_seen", "key",
    "last_error", "lease_until", "settled_at", "state", "tenant",
}  # fmt: skip
WHOLE = SUMMARY | {
    "error", "errors", "event_time", "fingerprint", "journal", "journal_form", "meta", "owner", "quarantine",
    "sliding", "steps", "value", "value_form",
}  # fmt: skip


def test_show_asks_every_consumer(place: Path) -> None:
    answer = semel("show", "evt_done", "--json", cwd=place)
    assert answer.code == 0
    records = answer.json()["records"]
    assert [(each["consumer"], each["state"], each["value"]) for each in records] == [
        ("billing", "done", {"paid": True}),
        ("mails", "done", None),
    ]
    assert all(set(each) == WHOLE for each in records)


@pytest.mark.parametrize(
    ("key", "field", "expected"),
    [
        ("evt_decimal", ("value", "value_form"), ("Decimal('1.50')", "repr")),
        (
            "evt_failed",
            ("value", "error"),
            (None, {"kind": "builtins.ValueError", "message": "no such order"}),
        ),
        ("evt_released", ("state", "claim"), ("claimed", "released")),
        ("evt_running", ("claim", "event_type"), ("running", "invoice")),
        ("evt_unknown", ("state", "quarantine", "expires_at"), ("unknown", True, None)),
        ("evt_marked", ("state", "value_form", "first_seen"), ("done", "not_kept", None)),
    ],
)
def test_show_tells_each_kind(
    place: Path, key: str, field: tuple[str, ...], expected: tuple[object, ...]
) -> None:
    (record,) = semel("show", key, "--json", cwd=place).json()["records"]
    assert tuple(record[name] for name in field) == expected


def test_show_tells_the_errors_of_attempts(place: Path) -> None:
    (record,) = semel("show", "evt_released", "--json", cwd=place).json()["records"]
    (error,) = record["errors"]
    assert list(error) == ["attempt", "kind", "message", "traceback", "worker", "at"]
    assert (error["attempt"], error["kind"], error["message"]) == (1, "builtins.RuntimeError", "timed out")
    assert "in vanish" in error["traceback"]
    fields = dict(line.split("\t", 1) for line in semel("show", "evt_released", cwd=place).out.splitlines())
    told = fields["error of 1"]
    assert told.startswith("builtins.RuntimeError: timed out ")
    assert f"worker {error['worker']}" in told
    assert "in vanish" in told


def test_list_tells_the_last_error_in_short(place: Path) -> None:
    lines = semel("list", "--consumer", "billing", cwd=place).out.splitlines()
    last = {fields[0]: fields[-1] for fields in (line.split("\t") for line in lines)}
    assert last["evt_released"] == "RuntimeError: timed out"
    assert last["evt_failed"] == "ValueError: no such order"
    assert last["evt_done"] == ""


def test_show_does_not_stumble_over_a_value_that_does_not_decode(place: Path) -> None:
    answer = semel("show", "evt_bad", cwd=place)
    assert answer.code == 0
    assert "value\t(cannot be shown: a stored value is not MessagePack" in answer.out
    (record,) = semel("show", "evt_bad", "--json", cwd=place).json()["records"]
    assert record["value_form"] == "undecodable"


def test_show_in_words_has_times_and_ages(place: Path) -> None:
    answer = semel("show", "evt_done", "--consumer", "billing", cwd=place)
    fields = dict(line.split("\t", 1) for line in answer.out.splitlines())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00 \(\w+ ago\)", fields["first seen"])
    assert fields["value"] == '{"paid":true}'


def test_show_of_what_is_not_there(place: Path) -> None:
    answer = semel("show", "evt_none", cwd=place)
    assert (answer.code, answer.out) == (5, "")
    assert answer.err.startswith("semel: no record of 'evt_none' for any consumer")
    answer = semel("show", "evt_done", "--consumer", "biling", cwd=place)
    assert answer.code == 5
    assert "did you mean 'billing'?" in answer.err


def test_list_is_lines_in_a_pipe(place: Path) -> None:
    answer = semel("list", cwd=place)
    rows = [line.split("\t") for line in answer.out.splitlines()]
    assert answer.code == 0
    assert [row[:3] for row in rows][:2] == [
        ["evt_done", "billing", "done"],
        ["evt_decimal", "billing", "done"],
    ]
    assert {len(row) for row in rows} == {9}
    assert len(rows) == 8


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        (["--consumer", "mails"], ["evt_unknown", "evt_done"]),
        (["--prefix", "evt_d"], ["evt_done", "evt_decimal", "evt_done"]),
        (["--state", "failed"], ["evt_failed"]),
        (["--state", "unknown", "--older-than", "1ms"], ["evt_unknown"]),
        (["--older-than", "1d"], []),
        (["--limit", "2"], ["evt_done", "evt_decimal"]),
        (["--tenant", "nobody"], []),
    ],
)
def test_list_chooses(place: Path, options: list[str], keys: list[str]) -> None:
    answer = semel("list", "--json", *options, cwd=place).json()
    assert [record["key"] for record in answer["records"]] == keys
    assert answer["more"] is ("--limit" in options)
    assert all(set(record) == SUMMARY for record in answer["records"])


def test_list_tells_what_it_left_out(place: Path) -> None:
    assert "more than 2" in semel("list", "--limit", "2", cwd=place).err
    assert "mode mark" in semel("list", "--consumer", "metrics", cwd=place).err
    assert "did you mean 'billing'?" in semel("list", "--consumer", "biling", cwd=place).err


def test_forget_needs_a_yes(place: Path) -> None:
    refused = semel("forget", "evt_failed", cwd=place)
    assert refused.code == 2
    assert "--yes" in refused.err
    planned = semel("forget", "evt_failed", "--dry-run", cwd=place)
    assert (planned.code, "Would forget" in planned.err) == (0, True)
    assert semel("show", "evt_failed", cwd=place).code == 0
    assert semel("forget", "evt_failed", "--yes", cwd=place).code == 0
    assert semel("show", "evt_failed", cwd=place).code == 5
    assert semel("forget", "evt_failed", "--yes", cwd=place).code == 5


def test_forget_of_a_mark(place: Path) -> None:
    assert semel("forget", "evt_marked", "--yes", cwd=place).code == 0
    assert semel("show", "evt_marked", cwd=place).code == 5


def test_forget_does_not_choose_between_consumers(place: Path) -> None:
    answer = semel("forget", "evt_done", "--yes", cwd=place)
    assert answer.code == 2
    assert "'billing', 'mails'" in answer.err


def test_forget_leaves_a_running_attempt_alone(place: Path) -> None:
    refused = semel("forget", "evt_running", "--yes", cwd=place)
    assert refused.code == 75
    assert "--force" in refused.err
    assert semel("show", "forget", "--consumer", "semel.audit", cwd=place).code == 5
    (running,) = semel("show", "evt_running", "--json", cwd=place).json()["records"]
    forced = semel("forget", "evt_running", "--yes", "--force", cwd=place)
    assert forced.code == 0
    assert f"fence={running['fence']}" in forced.err
    (trace,) = semel("list", "--consumer", "semel.audit", "--json", cwd=place).json()["records"]
    (shown,) = semel("show", trace["key"], "--json", cwd=place).json()["records"]
    assert shown["value"]["fence"] == running["fence"]
    assert shown["value"]["owner"] == running["owner"]
    assert "@" in shown["value"]["actor"]
    assert shown["value"]["key"] == "evt_running"


def test_every_forget_leaves_an_entry_in_the_audit(place: Path) -> None:
    assert semel("forget", "evt_failed", "--yes", cwd=place).code == 0
    (entry,) = semel("list", "--consumer", "semel.audit", "--json", cwd=place).json()["records"]
    (shown,) = semel("show", entry["key"], "--json", cwd=place).json()["records"]
    assert shown["value"]["action"] == "forget"
    assert "owner" not in shown["value"]


def test_resolve_decides_on_the_fence_that_was_seen(place: Path) -> None:
    (record,) = semel("show", "evt_unknown", "--json", cwd=place).json()["records"]
    fence = str(record["fence"])
    other = semel("resolve", "evt_unknown", "--done", "--fence", "7", cwd=place)
    assert other.code == 1
    assert fence in other.err
    assert (
        semel("resolve", "evt_unknown", "--done", "--value", '{"sent": 1}', "--fence", fence, cwd=place).code
        == 0
    )
    (record,) = semel("show", "evt_unknown", "--json", cwd=place).json()["records"]
    assert (record["state"], record["value"]) == ("done", {"sent": 1})
    again = semel("resolve", "evt_unknown", "--absent", "--fence", fence, cwd=place)
    assert again.code == 1
    assert "nothing to decide" in again.err


def test_resolve_to_absent(place: Path) -> None:
    (record,) = semel("show", "evt_unknown", "--json", cwd=place).json()["records"]
    assert semel("resolve", "evt_unknown", "--absent", "--fence", str(record["fence"]), cwd=place).code == 0
    assert semel("show", "evt_unknown", cwd=place).code == 5


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--fence", "1"], "give one of --done, --absent"),
        (["--fence", "1", "--done", "--absent"], "give one of --done, --absent"),
        (["--fence", "1", "--absent", "--value", "1"], "--value goes with --done"),
        (["--fence", "1", "--done", "--value", "{"], "--value is not JSON"),
        (["--done"], "missing option '--fence'"),
        (["--fence", "0", "--done"], "'--fence'"),
    ],
)
def test_resolve_refuses(place: Path, options: list[str], said: str) -> None:
    answer = semel("resolve", "evt_unknown", *options, cwd=place)
    assert answer.code == 2
    assert said in answer.err
