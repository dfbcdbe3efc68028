"""`semel import`: what another system has processed is known afterwards, once and for the rest of its window."""

import json
import re
import signal
import sqlite3
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import redis as driver

import semel as library
from semel.cli.imports.run import Importer
from semel.cli.imports.sources import PAGE, source_for, time_us_of
from semel.core.commands import Answer, Item, Settle
from semel.core.ids import OWN
from semel.stores.memory.store import MemoryStore
from semel.stores.sqlite import SqliteStore
from semel.testing import ManualClock
from semel.types import Done, Record
from tests.cli.shell import semel, terminal
from tests.services import postgres, redis

ROWS = 2 * PAGE + 500
HOUR_S = 3600.0


def ago(hours: float) -> str:
    return (datetime.now(UTC) - timedelta(hours=hours)).strftime("%Y-%m-%d %H:%M:%S")


@pytest.fixture
def app(tmp_path: Path) -> Path:
    """An application's database: every second row is older than a day, and two have no usable key."""
    with closing(sqlite3.connect(tmp_path / "app.db")) as connection, connection:
        connection.execute("CREATE TABLE processed_events (event_id TEXT, processed_at TEXT)")
        rows = [(f"evt_{number}", ago(1 if number % 2 else 30)) for number in range(ROWS)]
        connection.executemany(
            "INSERT INTO processed_events VALUES (?, ?)", [*rows, (None, ago(1)), ("", ago(1)), rows[1]]
        )
    return tmp_path


def run(folder: Path, *more: str) -> Any:
    ended = semel(
        "import", "sqlite:///app.db", "--time", "processed_at", "--store", "sqlite:///semel.db",
        "--consumer", "billing", "--window", "24h", "--json", *more, cwd=folder,
    )  # fmt: skip
    assert ended.code == 0, ended.err
    return ended.json()


def record(folder: Path, key: str) -> Record | None:
    with library.open(f"sqlite:///{folder / 'semel.db'}", consumer="billing") as once:
        return once.records.lookup(key)


def test_a_table_is_imported_with_its_times(app: Path) -> None:
    half = ROWS // 2
    counts = {"read": ROWS + 1, "written": half, "known": 0, "expired": half, "refused": 1}
    dry = run(app, "--dry-run")
    assert dry == {**counts, "verified": 0, "kind": "records", "resumed": False, "dry_run": True}
    assert record(app, "evt_1") is None
    assert run(app) == {**counts, "verified": half, "kind": "records", "resumed": False, "dry_run": False}
    found = record(app, "evt_1")
    assert found is not None
    rest_s = found.expires_at_us / 1e6 - time.time()
    assert 22 * HOUR_S < rest_s < 23 * HOUR_S + 5  # counted from the time of processing
    assert record(app, "evt_2") is None
    with library.open(f"sqlite:///{app / 'semel.db'}", consumer="billing") as once:
        known: library.Outcome[str | None] = once.run("evt_1", lambda: "ran")
        assert known == Done(None, replayed=True, kept=False)
        assert once.run("evt_2", lambda: "ran") == Done("ran")
    again = run(app)
    assert (again["written"], again["known"], again["verified"]) == (0, half, half)
    assert record(app, "evt_1") == found  # a second import changes nothing


def test_a_consumer_in_mode_mark_gets_marks(app: Path) -> None:
    with library.open(f"sqlite:///{app / 'semel.db'}", consumer="billing", mode="mark") as once:
        assert once.mark("evt_3")
    made = run(app)
    assert (made["kind"], made["written"], made["known"]) == ("marks", ROWS // 2 - 1, 1)
    with library.open(f"sqlite:///{app / 'semel.db'}", consumer="billing", mode="mark") as once:
        assert not once.mark("evt_1")
        assert once.mark("evt_2")
    wrong = semel(
        "import",
        "sqlite:///app.db",
        "--as",
        "records",
        "--store",
        "sqlite:///semel.db",
        "-c",
        "billing",
        cwd=app,
    )
    assert wrong.code == 78
    assert "works in mode 'mark'" in wrong.err


def test_a_killed_import_goes_on(app: Path) -> None:
    script = (
        "import os, signal, sys\n"
        "from tests.cli.test_import import importing\n"
        "from pathlib import Path\n"
        "with importing(Path(sys.argv[1])) as importer:\n"
        "    importer.run(lambda made: made.read >= 1000 and os.kill(os.getpid(), signal.SIGKILL))\n"
    )
    ended = subprocess.run([sys.executable, "-c", script, app], check=False)
    assert ended.returncode == -signal.SIGKILL
    seen: list[int] = []
    with importing(app) as importer:
        made = importer.run(lambda made: seen.append(made.read))
    assert made.resumed
    assert made.read == ROWS + 1 - PAGE
    assert (made.written, made.known) == (made.verified, 0)
    with importing(app) as importer:
        whole = importer.run(lambda _made: None)
    assert not whole.resumed
    assert (whole.written, whole.known, whole.verified) == (0, ROWS // 2, ROWS // 2)


class LeisurelyStore(MemoryStore):
    """An hour passes between a write of records and whatever is asked next."""

    def __init__(self) -> None:
        self.time = ManualClock()
        super().__init__(clock=self.time)

    def send(self, items: Sequence[Item]) -> list[Answer]:
        answers = super().send(items)
        if any(isinstance(item, Settle) and not item.id[1].startswith(OWN) for item in items):
            self.time.advance(HOUR_S)
        return answers


def test_a_key_whose_window_ends_during_the_import_is_not_missing(tmp_path: Path) -> None:
    (tmp_path / "seen.jsonl").write_text(
        "".join(json.dumps({"id": key}) + "\n" for key in ("evt_1", "evt_2"))
    )
    source = source_for(str(tmp_path / "seen.jsonl"), table="", key="id", time=None, pattern=None)
    with closing(source):
        made = Importer(
            LeisurelyStore(), source, tenant="", consumer="billing", window_us=1800 * 10**6, kind="records"
        ).run(lambda _made: None)
    assert (made.written, made.verified) == (2, 2)


@contextmanager
def importing(folder: Path) -> Iterator[Importer]:
    """The same import as the command's."""
    store = SqliteStore(folder / "semel.db")
    store.open()
    source = source_for(
        f"sqlite:///{folder / 'app.db'}",
        table="processed_events",
        key="event_id",
        time="processed_at",
        pattern=None,
    )
    try:
        yield Importer(
            store, source, tenant="", consumer="billing", window_us=24 * 3600 * 10**6, kind="records"
        )
    finally:
        source.close()
        store.close()


@pytest.mark.parametrize("kind", ["uuid", "bigint"])
def test_a_table_of_postgresql_is_imported(tmp_path: Path, kind: str) -> None:
    url, table = postgres.url(), f"processed_{uuid.uuid4().hex[:8]}"
    make = "md5(n::text)::uuid" if kind == "uuid" else "n"
    postgres.execute(
        url,
        f"CREATE TABLE {table} AS SELECT {make} AS id, now() - interval '1 hour' AS at"
        f" FROM generate_series(1, {PAGE + 200}) AS n",
    )
    ended = semel(
        "import", url, "--table", table, "--key", "id", "--time", "at", "--store", "sqlite:///semel.db",
        "--consumer", "billing", "--json", cwd=tmp_path,
    )  # fmt: skip
    assert ended.code == 0, ended.err
    assert ended.json()["verified"] == PAGE + 200
    assert record(tmp_path, "c4ca4238-a0b9-2382-0dcc-509a6f75849b" if kind == "uuid" else "1") is not None
    assert "evil" in semel("import", url, "--table", 'x"; evil', "-c", "c", cwd=tmp_path).err
    missing = semel("import", url, "--table", "absent", "-c", "c", "-s", "sqlite:///semel.db", cwd=tmp_path)
    assert (missing.code, "absent" in missing.err) == (2, True)


def test_keys_of_redis_keep_the_rest_of_their_time(tmp_path: Path) -> None:
    url = redis.place(tmp_path).partition("?")[0]
    mark = uuid.uuid4().hex
    with driver.Redis.from_url(url) as client:
        for number in range(20):
            client.set(f"{mark}:{number}", "1", ex=3600 if number else None)
    ended = semel(
        "import", url, "--pattern", f"{mark}:*", "--store", "sqlite:///semel.db", "--consumer", "billing",
        "--window", "24h", "--json", cwd=tmp_path,
    )  # fmt: skip
    assert ended.code == 0, ended.err
    assert (ended.json()["written"], ended.json()["verified"]) == (20, 20)
    for key, hours in (("1", 1), ("0", 24)):
        found = record(tmp_path, key)
        assert found is not None
        assert abs(found.expires_at_us / 1e6 - time.time() - hours * HOUR_S) < 60


def test_a_file_of_json_lines_is_imported(tmp_path: Path) -> None:
    lines = [json.dumps({"key": f"k{n}", "time": time.time() - 60}) for n in range(3)]
    (tmp_path / "keys.jsonl").write_text("\n".join(lines))
    arguments = (
        "import",
        "keys.jsonl",
        "--key",
        "key",
        "--time",
        "time",
        "-s",
        "sqlite:///semel.db",
        "-c",
        "billing",
    )
    assert semel(*arguments, cwd=tmp_path).out.splitlines()[:2] == ["read\t3", "written\t3"]
    assert semel("import", "absent.jsonl", "-c", "billing", cwd=tmp_path).code == 5


def test_times_are_read_as_they_are_stored() -> None:
    wanted = 1_700_000_000_000_000
    for given in (1_700_000_000, 1_700_000_000.0, 1_700_000_000_000, wanted, wanted * 1000, "1700000000",
                  "2023-11-14 22:13:20", "2023-11-14T22:13:20Z", "2023-11-14T23:13:20+01:00"):  # fmt: skip
        assert time_us_of(given) == wanted, given
    assert time_us_of(None) is None
    with pytest.raises(ValueError, match="yesterday"):
        time_us_of("yesterday")


@pytest.mark.parametrize("kind", ["marks", "records"])
def test_copies_of_a_key_in_a_file_are_known_and_verified(kind: str, tmp_path: Path) -> None:
    keys = [f"evt_{number % 10}" for number in range(15)]
    (tmp_path / "seen.jsonl").write_text("".join(json.dumps({"id": key}) + "\n" for key in keys))
    ended = semel(
        "import", "seen.jsonl", "--key", "id", "--store", "sqlite:///semel.db", "--consumer", "billing",
        "--as", kind, "--json", cwd=tmp_path,
    )  # fmt: skip
    assert ended.code == 0, ended.err
    made = ended.json()
    assert (made["written"], made["known"], made["verified"]) == (10, 5, 15)


def test_a_terminal_shows_a_bar_and_the_counts_and_a_pipe_no_bar(app: Path) -> None:
    given = (
        "import", "sqlite:///app.db", "--time", "processed_at", "--store", "sqlite:///semel.db",
        "--consumer", "billing", "--window", "24h",
    )  # fmt: skip
    with terminal(*given, cwd=app) as shown:
        assert shown.end() == 0
    assert re.search(rf"importing .*{ROWS + 1}", shown.text)
    assert re.search(rf"written +{ROWS // 2:,}", shown.text)
    assert re.search(rf"verified +{ROWS // 2:,}", shown.text)
    again = semel(*given, cwd=app)
    assert (again.code, again.err) == (0, "")
    assert f"known\t{ROWS // 2:,}" in again.out
