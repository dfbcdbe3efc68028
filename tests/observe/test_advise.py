"""The advisor finds the window that a known distribution of lags asks for."""

import math
import random
import re
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from xml.etree import ElementTree as ET

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

import semel as library
from semel.errors import UsageError
from semel.observe import events
from semel.observe.advise import CANDIDATES_S, Lags, advise, from_history, from_metrics
from semel.observe.history import HistoryHook, HistoryLine, read
from semel.observe.prometheus import PrometheusHook
from semel.stores.memory.store import MemoryStore
from semel.testing import ManualClock
from tests.cli.shell import semel, terminal

DAY = 86400.0


def exponential(mean_s: float, count: int, seed: int = 7) -> Lags:
    drawn = random.Random(seed)
    return Lags(tuple(sorted(drawn.expovariate(1 / mean_s) for _ in range(count))), 10 * count, DAY)


@pytest.mark.parametrize("mean_s", [2.0, 300.0, 3600.0])
@pytest.mark.parametrize("catch", [0.99, 0.999])
def test_an_exponential_lag_is_caught_as_theory_says(mean_s: float, catch: float) -> None:
    advice = advise(exponential(mean_s, 20_000), catch=catch)
    exact_s = -mean_s * math.log(1 - catch)
    assert advice.at_quantile_s == pytest.approx(exact_s, rel=0.15)
    assert advice.suggested_s == min(each for each in CANDIDATES_S if each >= 2 * advice.at_quantile_s)
    for share in advice.shares:
        assert share.caught == pytest.approx(1 - math.exp(-share.window_s / mean_s), abs=0.01)


def test_shares_grow_with_the_window_and_the_space_with_it() -> None:
    advice = advise(exponential(3600.0, 5000), current_s=3600.0)
    caught = [share.caught for share in advice.shares]
    assert caught == sorted(caught)
    assert advice.current_caught == pytest.approx(1 - math.exp(-1), abs=0.03)
    day = next(share for share in advice.shares if share.window_s == DAY)
    assert day.records == 50_000
    assert day.bytes["postgresql"] == 50_000 * 285
    week = next(share for share in advice.shares if share.window_s == 7 * DAY)
    assert week.records == 7 * day.records


def test_what_the_window_hid_is_not_taken_for_nothing() -> None:
    """Lags are uniform up to ten minutes, but the window was five: only half of them could be seen."""
    drawn = random.Random(3)
    seen = tuple(sorted(each for _ in range(2000) if (each := drawn.uniform(0, 600.0)) < 300.0))
    advice = advise(Lags(seen), current_s=300.0, safety=1.0)
    assert advice.suggested_s == 900.0
    assert "later ones were not seen" in advice.reason
    assert advise(Lags(seen, censored=False), current_s=300.0, safety=1.0).suggested_s == 300.0


def test_too_few_lags_are_refused() -> None:
    with pytest.raises(UsageError, match="only 19 duplicates"):
        advise(Lags((1.0,) * 19))
    few = advise(Lags((1.0,) * 20))
    assert any("few" in warning for warning in few.warnings)


def test_nothing_is_long_enough_for_some() -> None:
    advice = advise(Lags((40 * DAY,) * 100))
    assert advice.suggested_s == CANDIDATES_S[-1]
    assert any("long enough" in warning for warning in advice.warnings)


# --- a real client, a clock and a history -------------------------------------------------------


def traffic(hooks: list[object], window: str, lags_s: list[float]) -> None:
    """Events, each followed by one duplicate after its lag, through a client; in the order of their times."""
    clock = ManualClock()
    with library.open(MemoryStore(clock=clock), consumer="billing", window=window, hooks=hooks) as once:  # type: ignore[arg-type]
        plan = sorted((at, f"k{n}") for n, lag_s in enumerate(lags_s) for at in (float(n), n + lag_s))
        now_s = 0.0
        for at, key in plan:
            clock.advance(at - now_s)
            now_s = at
            once.run("clock", int)  # a claim now and then tells the store's time
            once.records.forget("clock")
            once.run(key, int)


def test_lags_are_measured_through_a_client(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    history = HistoryHook(tmp_path / "history")
    lags_s = [1.5] * 30 + [100.0] * 15 + [4000.0] * 5
    traffic([PrometheusHook(registry), history], "24h", lags_s)
    by_metrics = from_metrics(generate_latest(registry).decode(), "billing")
    assert [by_metrics.seconds.count(bound) for bound in (2.0, 300.0, 14400.0)] == [30, 15, 5]
    by_history = from_history(read(tmp_path / "history", consumer="billing"))
    duplicates = [line for line in read(tmp_path / "history") if line.event == "duplicate"]
    assert len(duplicates) == 50
    assert sorted(line.lag_s or 0 for line in duplicates) == pytest.approx(sorted(lags_s), abs=1)
    assert len(by_history.seconds) >= 50
    assert advise(by_metrics, current_s=DAY).suggested_s == 12 * 3600.0


def lines(path: Path, *told: HistoryLine) -> Path:
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in told))
    return path


def line(at_s: float, event: str, key: str, **more: object) -> HistoryLine:
    return HistoryLine(at_us=round(at_s * 1e6), event=event, consumer="billing", key=key, **more)  # type: ignore[arg-type]


def test_a_history_shows_what_ran_again(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "h.jsonl",
        line(0, "completed", "a"),
        line(10, "duplicate", "a", lag_s=10.0),
        line(7200, "completed", "a"),  # after a window of an hour: the effect happened twice
        line(7300, "completed", "b"),
        line(7400, "duplicate", "b", lag_s=100.0, ran=True),  # mode observe: it ran, and is counted once
        line(7400, "completed", "b"),
    )
    lags = from_history(read(path))
    assert lags.seconds == (10.0, 100.0, 7200.0)
    assert (lags.missed, lags.events, lags.censored, lags.observed) == (1, 2, False, 1)


def test_observe_mode_says_how_many_it_would_have_stopped(tmp_path: Path) -> None:
    registry, history = CollectorRegistry(), HistoryHook(tmp_path / "history")
    listening = PrometheusHook(registry)
    with library.open("memory:", consumer="billing", mode="observe", hooks=[listening, history]) as once:
        runs = [once.run(f"k{number % 10}", int) for number in range(40)]
        assert once.observed.duplicates == 30
    assert len(runs) == 40
    for lags in (
        from_metrics(generate_latest(registry).decode()),
        from_history(read(tmp_path / "history")),
    ):
        assert (lags.observed, lags.events, lags.missed) == (30, 10, 0)
    answer = semel("advise", "history", "--json", cwd=tmp_path)
    assert answer.json()["observed"] == 30
    assert "30, which another mode would have stopped" in semel("advise", "history", cwd=tmp_path).out


# --- the history itself -------------------------------------------------------------------------


def test_a_history_keeps_how_deliveries_ended(tmp_path: Path) -> None:
    history = HistoryHook(tmp_path)
    with library.open("memory:", consumer="billing", hooks=[history]) as once:
        once.run("a", int)
        once.run("a", int)
        once.run("b", lambda: 1 / 0)
    history.close()
    told = list(read(tmp_path))
    assert [each.event for each in told] == ["completed", "duplicate", "released"]
    assert told[2].error == "ZeroDivisionError"
    assert told[1].reason == "redelivery"
    assert [each.key for each in read(tmp_path, key="b")] == ["b"]


def test_hashed_keys_are_found_by_their_text(tmp_path: Path) -> None:
    history = HistoryHook(tmp_path, hashed=True)
    history(events.CompletedEvent("", "billing", "secret", b""))
    history(events.CompletedEvent("", "billing", "other", b""))
    assert b"secret" not in next(tmp_path.iterdir()).read_bytes()
    (found,) = read(tmp_path, key="secret")
    assert found.event == "completed"


def test_a_history_has_a_retention_of_its_own(tmp_path: Path) -> None:
    for name in ("semel-2020-01-01.jsonl", "notes.txt"):
        (tmp_path / name).write_text("")
    HistoryHook(tmp_path, keep="30d")(events.CompletedEvent("", "billing", "a", b""))
    assert not (tmp_path / "semel-2020-01-01.jsonl").exists()
    assert (tmp_path / "notes.txt").exists()
    assert len(list(tmp_path.iterdir())) == 2


def test_a_line_that_a_crash_cut_short_is_skipped(tmp_path: Path) -> None:
    path = lines(tmp_path / "h.jsonl", line(1, "completed", "a"))
    path.write_bytes(path.read_bytes() + b'{"at_us": 12, "ev')
    assert [each.key for each in read(path)] == ["a"]


def test_threads_write_whole_lines(tmp_path: Path) -> None:
    history = HistoryHook(tmp_path)

    def write(number: int) -> None:
        for at in range(200):
            history(events.CompletedEvent("", "billing", f"{number}-{at}", b""))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({each.key for each in read(tmp_path)}) == 800


# --- the command line ---------------------------------------------------------------------------


@pytest.fixture
def written(tmp_path: Path) -> Path:
    lags = exponential(600.0, 2000).seconds
    told = [line(at, "duplicate", f"k{at}", lag_s=lag) for at, lag in enumerate(lags)]
    return lines(tmp_path / "h.jsonl", line(0, "completed", "first"), *told)


def test_advise_prints_the_window_and_draws_it(written: Path) -> None:
    at = written.parent
    answer = semel("advise", "h.jsonl", "--plot", "out.svg", "--json", cwd=at)
    assert answer.code == 0
    told = answer.json()
    assert told["lags"] == 2000
    assert told["suggested_window_s"] == 4 * 3600
    assert told["window_s"] == DAY
    assert told["window_catches"] == 1.0
    drawn = (at / "out.svg").read_text()
    assert drawn.startswith("<svg")
    assert "suggested: 4h" in drawn
    assert "now: 24h" in drawn
    bars = [int(each) for each in re.findall(r"<title>(\d+) up to", drawn)]
    assert sum(bars) == 2000  # every lag is in one bar
    ET.fromstring(drawn)
    words = semel("advise", "h.jsonl", "--per-day", "1000", cwd=at)
    assert words.out.startswith("suggested window\t4h\n")
    assert "24h\t100%\t1,000\t" in words.out


def test_on_a_terminal_there_are_bars(written: Path) -> None:
    with terminal("advise", "h.jsonl", cwd=written.parent) as screen:
        shown = screen.until("SPACE IN")
        assert "<- suggested" in shown
        assert "<- now" in shown
        assert "█" in shown
        assert "30d" not in shown  # nothing new to say
        assert screen.end() == 0


def test_advise_reads_a_live_page(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    hook = PrometheusHook(registry)
    for _ in range(50):
        hook(events.Duplicate("", "billing", "k", b"", "h", "s", "redelivery", "done", 20.0))
        hook(events.Duplicate("", "other", "k", b"", "h", "s", "redelivery", "done", 5 * DAY))
    page = generate_latest(registry)

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/metrics"
        answer = semel("advise", "--metrics", url, "--consumer", "billing", "--json", cwd=tmp_path)
        server.shutdown()
        thread.join()
    assert answer.json()["suggested_window_s"] == 60.0
    (tmp_path / "page.txt").write_bytes(page)
    all_of_them = semel("advise", "--metrics", "page.txt", "--json", cwd=tmp_path).json()
    assert all_of_them["suggested_window_s"] == 14 * DAY
    assert semel("advise", "--metrics", url, cwd=tmp_path).code == 1


@pytest.mark.parametrize(("options", "code"), [([], 2), (["none.jsonl"], 5), (["--metrics", "none.txt"], 5)])
def test_advise_without_anything_to_look_at(tmp_path: Path, options: list[str], code: int) -> None:
    assert semel("advise", *options, cwd=tmp_path).code == code


def test_history_on_the_command_line(tmp_path: Path) -> None:
    history = HistoryHook(tmp_path / "history")
    with library.open("memory:", consumer="billing", hooks=[history]) as once:
        once.run("a", int)
        once.run("a", int)
        once.run("b", int)
    answer = semel("history", "history", "--key", "a", "--json", cwd=tmp_path)
    assert [each["event"] for each in answer.json()["lines"]] == ["completed", "duplicate"]
    assert len(semel("history", "history", "--since", "1h", cwd=tmp_path).out.splitlines()) == 3
    assert semel("history", "history", "--key", "c", cwd=tmp_path).code == 5
    assert semel("history", "nowhere", cwd=tmp_path).code == 5
