"""`semel audit`: planted duplicates are found exactly, in every format."""

import json
import random
import sqlite3
import time
import uuid
from contextlib import closing
from pathlib import Path
from typing import Any

import duckdb
import pytest

from tests.cli.shell import semel
from tests.services import postgres

START_S = time.time() // 1 - 4 * 86400
"""Recent, so that no window is over."""
KEYS = 3000
PLANTED = [(0.5, 40), (30, 30), (200, 20), (3000, 10), (80_000, 5), (90_000, 3)]
"""How late duplicates come, in seconds, and how many of them: 108 keys come twice."""


def events() -> list[dict[str, Any]]:
    """Events of two sources, with duplicates planted; twelve of them with another body."""
    chance = random.Random(7)
    rows: list[dict[str, Any]] = [
        {
            "id": f"evt_{n}",
            "ts": START_S + n * 40.0,
            "customer": f"c{n}",
            "amount": 100,
            "origin": "ab"[n % 2],
        }
        for n in range(KEYS)
    ]
    chosen = iter(chance.sample(rows, sum(count for _, count in PLANTED)))
    copies = [{**next(chosen), "lag": lag_s} for lag_s, count in PLANTED for _ in range(count)]
    for place, copy in enumerate(copies):
        copy["ts"] += copy.pop("lag")
        copy["origin"] = "retry"
        if place < 12:
            copy["amount"] = 999
    # One key that comes four times, an hour and a half apart: a window of an hour catches none of its copies.
    copies += [{**rows[5], "id": "again", "ts": START_S + n * 5400.0, "origin": "a"} for n in range(4)]
    # Equal content under new keys: two within five minutes of the first, one an hour later. A third one is "again".
    copies += [
        {"id": f"new_{n}", "ts": rows[9]["ts"] + late_s, "customer": "c9", "amount": 100, "origin": "b"}
        for n, late_s in enumerate((10, 290, 3600))
    ]
    mixed = rows + copies
    chance.shuffle(mixed)
    return mixed


WANTED = {
    "rows": KEYS + 108 + 4 + 3,
    "keys": KEYS + 1 + 3,
    "surplus_rows": 108 + 3,
    "repeated_keys": 108 + 1,
    "rows_without_key": 0,
    "surplus_rows_without_time": 0,
    "changed_keys": 12,
    "changed_rows": 12,
    "longest_lag_s": 90_000.0,
}
CAUGHT = {300: 90, 3600: 100, 14400: 100 + 2, 43200: 103, 86400: 108, 172800: 111}
"""By window in seconds. With four hours the key that comes four times runs again once."""


def write(folder: Path, kind: str) -> tuple[str, ...]:
    """Write the events in a format. Returns the arguments that name them."""
    lines = folder / "events.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in events()))
    if kind == "jsonl":
        return ("events.jsonl",)
    if kind in ("parquet", "csv"):
        for part in (0, 1):
            duckdb.sql(
                f"COPY (SELECT id, to_timestamp(ts) AS ts, customer, amount, origin FROM read_json('{lines}')"
                f" WHERE hash(id) % 2 = {part}) TO '{folder}/part{part}.{kind}'"
            )
        return (f"*.{kind}",)
    names = ("id", "ts", "customer", "amount", "origin")
    if kind == "sqlite":
        with closing(sqlite3.connect(folder / "app.db")) as connection, connection:
            connection.execute("CREATE TABLE arrivals (id, ts, customer, amount, origin)")
            rows = [tuple(row[name] for name in names) for row in events()]
            connection.executemany("INSERT INTO arrivals VALUES (?, ?, ?, ?, ?)", rows)
        return ("sqlite:///app.db", "--table", "arrivals")
    table = f"arrivals_{uuid.uuid4().hex[:8]}"
    url = postgres.url()
    postgres.execute(
        url,
        f"CREATE TABLE {table} AS SELECT id, to_timestamp(ts) AS ts, customer, amount, origin"
        " FROM json_to_recordset(%s::json) AS e(id text, ts float8, customer text, amount int, origin text)",
        json.dumps(events()),
    )
    return (url, "--table", table)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv", "sqlite", "postgres"])
def test_planted_duplicates_are_found_exactly(tmp_path: Path, kind: str) -> None:
    place = write(tmp_path, kind)
    ended = semel(
        "audit", *place, "--key", "id", "--time", "ts", "--content", "customer,amount", "--source", "origin", "--json",
        cwd=tmp_path,
    )  # fmt: skip
    assert ended.code == 3, ended.err
    found = ended.json()
    assert {name: found[name] for name in WANTED} == WANTED
    assert {each["window_s"]: each["caught"] for each in found["windows"]}.items() >= CAUGHT.items()
    lags = {each["up_to_s"]: each["rows"] for each in found["lags"] if each["rows"]}
    assert lags == {1: 40, 60: 30, 300: 20, 3600: 10, 14400: 2, 43200: 1, 86400: 5, 172800: 3}
    sources = {each["source"]: (each["rows"], each["surplus_rows"]) for each in found["sources"]}
    assert sources == {"a": (KEYS // 2 + 4, 3), "b": (KEYS // 2 + 3, 0), "retry": (108, 108)}
    assert (found["content"]["duplicates"], found["content"]["groups"]) == (3, 2)


def test_without_duplicates_the_exit_code_is_zero(tmp_path: Path) -> None:
    (tmp_path / "one.csv").write_text("id,ts\na,2026-01-01 00:00:00\nb,2026-01-01 00:00:01\n")
    ended = semel("audit", "one.csv", "--key", "id", "--time", "ts", cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert "surplus rows\t0\n" in ended.out


def test_it_feeds_advise_and_import_and_draws(tmp_path: Path) -> None:
    write(tmp_path, "jsonl")
    ended = semel(
        "audit", "events.jsonl", "--key", "id", "--time", "ts", "--plot", "lags.svg", "--history", "lags.jsonl",
        "--keys", "keys.jsonl", cwd=tmp_path,
    )  # fmt: skip
    assert ended.code == 3, ended.err
    assert "a window of 1h would have caught\t100\n" in ended.out
    assert (tmp_path / "lags.svg").read_text().startswith("<svg")
    advised = semel("advise", "lags.jsonl", "--json", cwd=tmp_path)
    assert advised.code == 0, advised.err
    assert advised.json()["lags"] == 111
    imported = semel(
        "import", "keys.jsonl", "--key", "key", "--time", "time", "-c", "billing", "-s", "sqlite:///s.db", "--json",
        "--window", "30d", cwd=tmp_path,
    )  # fmt: skip
    assert imported.code == 0, imported.err
    assert imported.json()["verified"] == KEYS + 4


def test_what_cannot_be_audited_is_said(tmp_path: Path) -> None:
    (tmp_path / "one.csv").write_text("id,ts\na,2026-01-01\n")
    (tmp_path / "one.txt").write_text("a")
    for arguments, code, said in (
        (("one.csv", "--key", "uid"), 2, "no column 'uid'; there are id, ts"),
        (("none.csv", "--key", "id"), 5, "names no file"),
        (("one.txt", "--key", "id"), 2, "is not known"),
        (("one.csv", "--key", "id", "--memory", "1MiB"), 2, "64MiB"),
    ):
        ended = semel("audit", *arguments, "--time", "ts", cwd=tmp_path)
        assert (ended.code, said in ended.err) == (code, True), ended.err
