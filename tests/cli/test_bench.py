"""`semel bench` measures beside the user's records, and leaves them and everything else as it was."""

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit
from xml.etree import ElementTree as ET

import pytest
import redis as driver

import semel as library
from semel.cli.bench.measure import REPEATS, Fresh, Job, Measurement, bars, compare, rate, svg
from semel.core.commands import Count
from semel.stores.postgres import from_url
from tests.cli.shell import PATIENCE_S, Ended, cold, environment, terminal
from tests.services import postgres
from tests.services import redis as redis_service
from tests.waiting import await_true

WHAT = [
    "run, one by one", "run, 50 at once", "mark, one by one", "mark_many of 500", "claim + complete of 1",
    "claim + complete of 10", "claim + complete of 100", "claim + complete of 500", "claim + complete of 1000",
    "replay of 500",
]  # fmt: skip
ENDINGS = [(signal.SIGINT, 130), (signal.SIGTERM, 143)]


def bench(url: str, cwd: Path, *more: str) -> Ended:
    return cold("bench", "--store", url, "--seconds", "1", *more, cwd=cwd)


def end_amid(url: str, cwd: Path, number: signal.Signals, under_way: Callable[[], bool]) -> int:
    """Start a long run, end it by a signal once it is at work; its exit code."""
    process = subprocess.Popen(
        [sys.executable, "-m", "semel", "bench", "--store", url, "--seconds", "600"],
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert await_true(under_way, PATIENCE_S)
        process.send_signal(number)
        out, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        process.wait(PATIENCE_S)
    assert "Traceback" not in err
    assert (out, err) == ("", "")
    return process.returncode


@pytest.mark.slow
def test_the_document_has_every_comparison(tmp_path: Path) -> None:
    answer = bench("memory:", tmp_path, "--json")
    assert (answer.code, answer.err) == (0, "")
    told = answer.json()
    assert set(told) == {"store", "seconds", "semel", "python", "machine", "rows"}
    assert (told["store"], told["seconds"]) == ("memory:", 1.0)
    assert [row["what"] for row in told["rows"]] == WHAT
    for row in told["rows"]:
        assert row["per_second"] > 0
        assert row["ratio"] == pytest.approx(row["per_second"] / row["limit_per_second"], rel=0.01)


@pytest.mark.slow
def test_in_a_pipe_there_are_lines_and_the_plot_goes_to_its_file(tmp_path: Path) -> None:
    answer = bench("memory:", tmp_path, "--plot", "bars.svg")
    lines = [line.split("\t") for line in answer.out.splitlines()]
    assert [line[0] for line in lines] == WHAT
    assert {len(line) for line in lines} == {5}
    drawn = ET.fromstring((tmp_path / "bars.svg").read_text(encoding="utf-8"))
    texts = [each.text or "" for each in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert all(any(what in text for text in texts) for what in WHAT)


@pytest.mark.slow
def test_on_a_terminal_there_are_a_table_and_bars(tmp_path: Path) -> None:
    with terminal("bench", "--store", "memory:", "--seconds", "1", cwd=tmp_path) as screen:
        assert screen.end() == 0
        shown = screen.text
    assert "RAW LIMIT" in shown
    assert "\u2588" in shown
    assert "1.00 = the raw limit" in shown


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--store", "pigeon:"], 78, "pigeon"),
        (["--store", "memory:", "--seconds", "0"], 2, "seconds"),
        (["--store", "memory:", "--plot", "no/such/x.svg"], 2, "no/such"),
        (["--store", "sqlite:///no/such/events.db"], 78, "no/such"),
        (["--store", "sqlite:///."], 78, "is a folder; name a file in it, such as "),
        (["--store", "postgresql://127.0.0.1:1/x?wait_s=1"], 69, "gave no answer"),
        (["--store", "redis://127.0.0.1:1/0"], 69, "gave no answer"),
    ],
    ids=lambda part: " ".join(part) if isinstance(part, list) else str(part),
)
def test_what_cannot_be_measured_says_so(tmp_path: Path, options: list[str], code: int, said: str) -> None:
    answer = cold("bench", *options, cwd=tmp_path)
    assert (answer.code, answer.out) == (code, "")
    assert said in answer.err
    assert "Traceback" not in answer.err
    assert list(tmp_path.iterdir()) == []


# --- the user's own ---


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A store in use: somebody has it open, and nothing of it may change."""
    path = tmp_path / "events.db"
    with library.open(f"sqlite:///{path}", consumer="leases") as mine:
        mine.run("mine", str)
    return path


def look(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.mark.slow
def test_a_file_and_its_folder_stay_as_they_are(file: Path) -> None:
    before = look(file.parent)
    answer = bench("sqlite:///events.db?synchronous=normal", file.parent, "--json")
    assert answer.code == 0
    assert answer.json()["store"] == "sqlite:///events.db"
    assert look(file.parent) == before


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), ENDINGS)
def test_an_interrupted_run_leaves_no_file(file: Path, number: signal.Signals, code: int) -> None:
    before = look(file.parent)
    folder = file.parent

    def under_way() -> bool:
        return any(path.stat().st_size > 0 for path in folder.glob(".semel-bench-*/semel.db-wal"))

    assert end_amid(f"sqlite:///{file}", folder, number, under_way) == code
    assert look(folder) == before


@pytest.fixture
def database() -> Iterator[str]:
    """A database on the run's server with a record of somebody's."""
    name = f"bench_{os.urandom(4).hex()}"
    postgres.execute(postgres.url(), f"CREATE DATABASE {name}")
    place = urlunsplit(urlsplit(postgres.url())._replace(path=f"/{name}"))
    with library.open(place, consumer="leases") as mine:
        mine.run("mine", str)
    yield place
    postgres.execute(postgres.url(), f"DROP DATABASE {name} WITH (FORCE)")


def schemas(place: str) -> list[Any]:
    return postgres.execute(place, "SELECT nspname FROM pg_namespace WHERE nspname LIKE 'semel_bench_%'")


def records(place: str) -> Any:
    store = from_url(place)
    store.open()
    (counted,) = store.send([Count()])
    store.close()
    return counted.states, counted.consumers, counted.marks


@pytest.mark.slow
def test_a_database_is_left_as_it_was(database: str, tmp_path: Path) -> None:
    before = records(database)
    answer = bench(database, tmp_path, "--json")
    assert answer.code == 0, answer.err
    assert [row["what"] for row in answer.json()["rows"]] == WHAT
    assert records(database) == before == ({"done": 1}, {"leases": 1}, 0)
    assert schemas(database) == []


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), ENDINGS)
def test_an_interrupted_run_leaves_no_schema(
    database: str, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    def under_way() -> bool:
        return any(
            postgres.execute(database, f"SELECT to_regclass('{name}.records') IS NOT NULL") == [(True,)]
            for (name,) in schemas(database)
        )

    assert end_amid(database, tmp_path, number, under_way) == code
    assert schemas(database) == []


def test_a_role_that_may_not_create_a_schema_is_told(database: str, tmp_path: Path) -> None:
    role = f"role_{os.urandom(4).hex()}"
    postgres.execute(database, f"CREATE ROLE {role} LOGIN")
    try:
        answer = bench(database.replace("//semel@", f"//{role}@"), tmp_path)
    finally:
        postgres.execute(database, f"DROP ROLE {role}")
    assert answer.code == 78
    assert "may not create one" in answer.err


@pytest.fixture
def keys(tmp_path: Path) -> Iterator["driver.Redis"]:
    with redis_service.own(tmp_path) as own, driver.Redis(port=own.port) as client:
        client.set("theirs", "untouched")
        yield client


def at(client: "driver.Redis") -> str:
    return f"redis://127.0.0.1:{client.connection_pool.connection_kwargs['port']}/0"


@pytest.mark.slow
def test_a_redis_is_left_as_it_was(keys: "driver.Redis", tmp_path: Path) -> None:
    answer = bench(at(keys), tmp_path, "--json")
    assert answer.code == 0, answer.err
    assert [row["what"] for row in answer.json()["rows"]] == WHAT
    assert keys.keys("*") == [b"theirs"]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), ENDINGS)
def test_an_interrupted_run_leaves_no_key(
    keys: "driver.Redis", tmp_path: Path, number: signal.Signals, code: int
) -> None:
    assert end_amid(at(keys), tmp_path, number, lambda: int(keys.dbsize()) > 100) == code
    assert keys.keys("*") == [b"theirs"]


# --- the parts ---


def row(what: str, ratio: float, aim: float | None = None) -> Measurement:
    return Measurement(store="s", what=what, rate=ratio * 100, limit="limit", limit_rate=100, aim=aim)


@pytest.mark.parametrize("columns", [40, 80, 100])
def test_bars_are_as_long_as_their_ratios_and_fit(columns: int) -> None:
    half, whole, twice, *_, axis = bars([row("half", 0.5), row("whole", 1.0), row("twice", 2.0)], columns)
    lengths = [line.count("\u2588") for line in (half, whole, twice)]
    assert lengths[2] == pytest.approx(2 * lengths[1], abs=1)
    assert lengths[1] == pytest.approx(2 * lengths[0], abs=1)
    assert max(map(len, (half, whole, twice))) <= columns
    assert whole.rindex("\u2588") == pytest.approx(axis.index("\u2502"), abs=1)


def test_the_drawing_shows_what_is_below_its_aim() -> None:
    drawn = svg([row("good <&>", 1.0, 0.9), row("bad", 0.5, 0.9)], "a & b")
    assert [rect.get("fill") for rect in ET.fromstring(drawn).iter("{http://www.w3.org/2000/svg}rect")] == [
        "#ffffff", "#009e73", "#d55e00",
    ]  # fmt: skip


def test_a_rate_counts_what_was_done_and_only_the_timed_part() -> None:
    calls: list[str] = []
    made = Job(lambda: calls.append("run"), 10, lambda: calls.append("fresh"))
    assert rate(made) > 0
    assert calls == ["fresh", "run"]
    compared = compare("s", "w", made, "l", made, 0.5)
    assert compared.ratio == pytest.approx(compared.rate / compared.limit_rate)
    assert calls.count("run") == 1 + 2 * REPEATS


def test_fresh_keys_are_never_used_twice() -> None:
    first, second = Fresh(100), Fresh(100)
    first()
    second()
    assert len({*first.keys, *second.keys}) == 200
    assert {len(key) for key in first.keys} == {36}
    assert [len(batch) for batch in first.batches(30)] == [30, 30, 30, 10]
