"""The page of a consumer: its figures, window, guarantee and workers; advice says how much it was made from."""

import html
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import semel
from semel.observe.counters import LAGS_S, ConsumerCounters, CounterHook, MinuteCounts
from semel.observe.rollups import Writer
from semel.server.dashboard.figures import advice, is_alarming
from semel.server.settings import ServeSettings
from semel.stores.sqlite import SqliteStore
from tests.server.scenes import ask, some_workers
from tests.server.tools import Running, serving

DAY_US = 86400 * 10**6
HOURS = 2


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A service on a store with two hours of figures."""
    folder = tmp_path_factory.mktemp("consumer")
    with semel.open(f"sqlite:///{folder}/semel.db", consumer="billing", window="36h") as billing:
        billing.run("one", int)
    store = SqliteStore(folder / "semel.db", synchronous="NORMAL")
    store.open()
    some_workers(store)
    writer = Writer(CounterHook())
    now = int(time.time() // 60)
    for minute in range(now - 60 * HOURS, now):
        counts = ConsumerCounters(received=11, processed=10, redelivery=1, errored=1)
        counts.lags, counts.took, counts.errors = {6: 1}, {10: 9, 20: 1}, {"Refused": 1}
        writer._pending.append((f"{minute}.x", MinuteCounts(minute, [("", "billing", counts)], writer="x")))
    assert ask(store, writer.flush())
    store.close()
    with serving(ServeSettings(auth="none", store=f"sqlite:///{folder}/semel.db", port=0)) as made:
        yield made


def text_of(running: Running, path: str) -> str:
    answer = running.client.get(f"/ui/{path}")
    assert answer.status_code == 200, answer.text
    return re.sub(r"\s+", " ", html.unescape(re.sub("<[^>]*>", " ", answer.text)))


def test_it_has_figures_window_guarantee_and_workers(running: Running) -> None:
    told = text_of(running, "consumer/billing?range=6h")
    assert f"Processed {600 * HOURS:,}" in told
    assert f"Duplicate rate 9.1 % {60 * HOURS} of {660 * HOURS:,}" in told
    assert "Handler 4ms half; 95 % within 277ms" in told
    assert f"Errors by kind failed attempts in the range Refused {60 * HOURS}" in told
    assert f"redelivery the source sent it again {60 * HOURS}" in told
    assert "36h, as the client says" in told
    assert "Claim, effect, completion." in told
    assert "killed after the effect up to 2" in told
    for worker in ("web-1 4711", "web-2 312"):
        assert worker in told
    assert "mail-1" not in told
    assert re.search(r"web-2 312 \S+ \S+ 2 orders", told), told
    assert running.client.get("/ui/consumer/nobody").status_code == 404
    columns = running.client.get("/ui/data?range=6h&consumer=billing&tenant=").json()["columns"]
    assert {round(each) for each in columns["handler_p95"] if each} == {277}


def test_names_are_links(running: Running) -> None:
    for path in ("", "windows", "check"):
        assert 'href="/ui/consumer/billing"' in running.client.get(f"/ui/{path}").text, path


def test_records_kept_are_projected_from_the_time_observed(running: Running) -> None:
    told = text_of(running, "windows?consumer=billing")
    per_day = 600 * 24
    kept = re.search(r" 1d (?:advised )?100 % ([\d,]+) ", told)
    assert kept is not None, told
    assert 0.9 * per_day < int(kept[1].replace(",", "")) < 1.1 * per_day
    assert "This is little to go by" in told
    assert "This is little to go by" in text_of(running, "consumer/billing")


@pytest.mark.parametrize(("span_s", "little"), [(3600.0, True), (2 * 86400.0, False)])
def test_advice_from_little_data_says_so(span_s: float, little: bool) -> None:
    counts = ConsumerCounters(processed=1000, lags={LAGS_S.index(64.0): 2000})
    advised, _ = advice(counts, span_s, DAY_US)
    assert advised is not None
    assert any("little to go by" in each for each in advised.warnings) == little
    hour = next(each for each in advised.shares if each.window_s == 3600)
    assert hour.records == round(1000 * 3600 / span_s)


def test_few_deliveries_alarm_nobody() -> None:
    assert not is_alarming(1, 3)
    assert not is_alarming(100, 100)
    assert is_alarming(2, 101)
    assert not is_alarming(1, 1000)


def test_rates_of_consumers_are_compared_and_few_are_marked(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "semel.db", synchronous="NORMAL")
    store.open()
    writer = Writer(CounterHook())
    minute = int(time.time() // 60) - 1
    shares = {"calm": (1000, 1), "poor": (1000, 100), "worse": (1000, 400), "tiny": (3, 1)}
    consumers = [
        ("", name, ConsumerCounters(received=received, redelivery=copies))
        for name, (received, copies) in shares.items()
    ]
    writer._pending.append(("x", MinuteCounts(minute, consumers, writer="x")))
    assert ask(store, writer.flush())
    store.close()
    with serving(ServeSettings(auth="none", store=f"sqlite:///{tmp_path}/semel.db", port=0)) as running:
        shown = running.client.get("/ui/parts/consumers").text
    found = re.findall(
        r'name" href="/ui/consumer/(\w+)".*?class="bar (\w+)".*?class="part" width="([\d.]+)%"',
        shown,
        re.DOTALL,
    )
    assert {name: (tone, float(width)) for name, tone, width in found} == {
        "calm": ("good", 0.2), "poor": ("bad", 25.0), "worse": ("bad", 100.0), "tiny": ("few", 83.3),
    }  # fmt: skip
    assert "of 3" in shown
