"""The metrics have the names, types and labels that the documents say, few enough series, and alerts that fire."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import semel
from semel.observe import events
from semel.observe.prometheus import METRICS, TYPES_MAX, PrometheusHook
from semel.types import Stats
from tests.observe.listening import Heard, Plainly
from tests.services.programs import program

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy" / "prometheus"
EXPECTED = {
    "events_received_total": ("counter", {"consumer", "handler", "event_type", "source"}),
    "events_duplicate_total": ("counter", {"consumer", "handler", "event_type", "source", "reason"}),
    "events_processed_total": ("counter", {"consumer", "handler", "event_type", "source"}),
    "events_failed_total": ("counter", {"consumer", "handler", "event_type", "source", "error"}),
    "dead_letters_total": ("counter", {"consumer", "handler", "event_type", "source", "reason"}),
    "fingerprint_mismatch_total": ("counter", {"consumer", "handler", "event_type", "source"}),
    "claims_lost_total": ("counter", {"consumer", "handler", "event_type", "source"}),
    "claims_expired_total": ("counter", {"consumer"}),
    "store_errors_total": ("counter", {"op"}),
    "claims_in_flight": ("gauge", {"consumer"}),
    "claims_oldest_age_seconds": ("gauge", {"consumer"}),
    "handler_duration_seconds": ("histogram", {"consumer", "handler"}),
    "store_operation_duration_seconds": ("histogram", {"op"}),
    "batch_size": ("histogram", {"op"}),
    "redelivery_lag_seconds": ("histogram", {"consumer", "source"}),
    "window_seconds": ("gauge", {"consumer"}),
    "records": ("gauge", {"state"}),
    "bloom_fill_ratio": ("gauge", set()),
    "bloom_false_positive_ratio": ("gauge", set()),
    "outbox_pending": ("gauge", set()),
    "outbox_oldest_age_seconds": ("gauge", set()),
    "outbox_published_total": ("counter", set()),
    "purge_deleted_total": ("counter", set()),
    "purge_lag_seconds": ("gauge", set()),
    "store_bytes": ("gauge", set()),
    "store_lost_total": ("counter", set()),
    "build_info": ("gauge", {"version"}),
}


def exported(registry: CollectorRegistry) -> dict[str, tuple[str, list[Any]]]:
    """What a scrape sees: samples by the name and type of their family."""
    text = generate_latest(registry).decode()
    found: dict[str, tuple[str, list[Any]]] = {}
    for family in text_string_to_metric_families(text):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        found[name] = (family.type, family.samples)
    return found


def value(registry: CollectorRegistry, name: str, **labels: str) -> float:
    got = registry.get_sample_value(f"semel_{name}", labels)
    assert got is not None, (name, labels)
    return got


def who(**more: str) -> dict[str, str]:
    return {"consumer": "billing", "handler": f"{__name__}.one", "event_type": "", "source": "", **more}


def one() -> int:
    return 1


def touch_all(hook: PrometheusHook) -> None:
    """One of everything, so that every metric has a sample."""
    about = ("", "billing", "key", b"owner", "one", "queue")
    for event in (
        events.Received(*about),
        events.ClaimedEvent(*about, window_s=86400.0),
        events.EndedEvent(*about, 0.1),
        events.Duplicate(*about, "reuse", "done", 12.0, False),
        events.CompletedEvent(*about),
        events.FailedEvent(*about, ValueError()),
        events.DeadLettered(*about, "failed"),
        events.LateArrivalEvent(*about, 1.0),
        events.LostEvent(*about),
        events.Expired(*about),
        events.Quarantined(*about),
        events.Unrecorded(*about),
        events.StoreSent("claim", 3, 0.001),
        events.StoreFailed("claim", OSError()),
        events.StoreLost(),
        events.PurgedEvent(5, 2.0),
        events.Counted(Stats(now_us=0, states={"done": 1}, bytes_used=100)),
    ):
        hook(event)
    hook.note_bloom(0.5, 0.01)
    hook.note_outbox(3, 4.0)


def test_names_types_and_labels() -> None:
    registry = CollectorRegistry()
    touch_all(PrometheusHook(registry))
    seen = exported(registry)
    for name, (kind, labels) in EXPECTED.items():
        found_kind, samples = seen[f"semel_{name}"]
        assert found_kind == kind, name
        assert samples, name
        assert {frozenset(set(sample.labels) - {"le"}) for sample in samples} == {frozenset(labels)}, name
    assert set(EXPECTED) <= set(METRICS)
    assert {name.removeprefix("semel_") for name in seen if not name.endswith("_created")} == set(METRICS)


def test_the_documents_name_every_metric() -> None:
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    told = dict(re.findall(r"^\| `(\w+)` \| (counter|gauge|histogram) \|", page, re.MULTILINE))
    kinds = {
        name: {"Counter": "counter", "Gauge": "gauge", "Histogram": "histogram", "Info": "gauge"}[
            metric.kind.__name__
        ]
        for name, metric in METRICS.items()
    }
    assert {name: kind for name, kind in told.items() if not name.startswith("http_")} == kinds
    for name, metric in METRICS.items():
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
        for label in metric.labels:
            assert f"`{label}`" in row, (name, label)


def test_a_second_hook_for_one_registry_says_to_share_the_first() -> None:
    registry = CollectorRegistry()
    PrometheusHook(registry)
    with pytest.raises(semel.errors.UsageError, match="share it"):
        PrometheusHook(registry)


def test_an_empty_prefix_gives_the_bare_names() -> None:
    registry = CollectorRegistry()
    touch_all(PrometheusHook(registry, prefix=""))
    assert set(EXPECTED) <= set(exported(registry))


def test_what_a_client_does_is_counted() -> None:
    registry = CollectorRegistry()
    hook = PrometheusHook(registry)
    during: list[float] = []

    def fails() -> None:
        during.append(value(registry, "claims_in_flight", consumer="billing"))
        during.append(value(registry, "claims_oldest_age_seconds", consumer="billing"))
        raise ValueError

    with semel.open("memory:", consumer="billing", window="2h", hooks=[hook]) as once:
        for _ in range(3):
            once.run("a", one)
        once.run("b", fails)
        once.records.stats()
    assert value(registry, "events_received_total", **who()) == 3
    assert value(registry, "events_processed_total", **who()) == 1
    assert value(registry, "events_duplicate_total", **who(reason="redelivery")) == 2
    failing = f"{__name__}.test_what_a_client_does_is_counted.fails"
    assert value(registry, "events_failed_total", **who(handler=failing, error="ValueError")) == 1
    assert (
        value(registry, "handler_duration_seconds_count", consumer="billing", handler=who()["handler"]) == 1
    )
    assert value(registry, "redelivery_lag_seconds_count", consumer="billing", source="") == 2
    assert value(registry, "window_seconds", consumer="billing") == 7200
    assert value(registry, "records", state="done") == 1
    assert during[0] == 1
    assert during[1] >= 0
    assert value(registry, "claims_in_flight", consumer="billing") == 0


@pytest.mark.parametrize("awaits", [False, True])
def test_probes_are_counted_by_their_answer(*, awaits: bool) -> None:
    heard, registry = Heard(), CollectorRegistry()
    answers: list[Any] = [semel.CannotTell("closed"), semel.DidNotHappen(), semel.Happened("found")]
    policy = semel.Policy(probe=lambda _inquiry: answers.pop(0), wait_s=0)
    options: Any = {"consumer": "billing", "policy": policy, "hooks": [heard, PrometheusHook(registry)]}
    once: Any = Plainly("memory:", **options) if awaits else semel.open("memory:", **options)

    def breaks() -> None:
        raise TimeoutError

    for _ in range(4):
        once.run("k", breaks)
    if isinstance(once, Plainly):
        once.end()
    else:
        once.close()
    told = heard.of(events.Probed)
    assert [(each.answer, each.text) for each in told] == [
        ("cannot_tell", "closed"),
        ("did_not_happen", ""),
        ("happened", ""),
    ]
    assert all(each.duration_s > 0 for each in told)
    assert heard.names()[-3:] == ["claimed", "probed", "completed"]
    handler = told[0].handler
    for answer in ("cannot_tell", "did_not_happen", "happened"):
        labels = who(handler=handler, answer=answer)
        assert registry.get_sample_value("semel_probes_total", labels) == 1


def test_observe_mode_has_a_counter_of_its_own() -> None:
    registry = CollectorRegistry()
    with semel.open("memory:", consumer="billing", mode="observe", hooks=[PrometheusHook(registry)]) as once:
        for _ in range(4):
            once.run("a", one)
    assert value(registry, "events_observed_duplicate_total", **who()) == 3
    assert value(registry, "events_processed_total", **who()) == 4


def test_a_label_has_at_most_two_hundred_values() -> None:
    registry = CollectorRegistry()
    hook = PrometheusHook(registry)
    for number in range(1000):
        hook(
            events.Received("", f"c{number}", "key", b"", f"h{number}", f"s{number}", event_type=f"t{number}")
        )
        hook(events.ClaimedEvent("", f"c{number}", "key", b"%d" % number))
    for consumer in ("c0", "c999"):
        hook(events.Received("", consumer, "key", b"", "h0", "s0", event_type="t0"))
    _, samples = exported(registry)["semel_events_received_total"]
    counted = [sample for sample in samples if sample.name.endswith("_total")]
    for label in ("consumer", "handler", "event_type", "source"):
        assert len({sample.labels[label] for sample in counted}) == 201
    others = {"consumer": "other", "handler": "other", "event_type": "other", "source": "other"}
    assert value(registry, "events_received_total", **others) == 800
    assert (
        value(registry, "events_received_total", consumer="c0", handler="h0", event_type="t0", source="s0")
        == 2
    )
    assert value(registry, "claims_in_flight", consumer="other") == 800
    assert len(hook._series) < 2000


def test_pairs_of_consumers_and_event_types_are_bounded() -> None:
    registry = CollectorRegistry()
    hook = PrometheusHook(registry)
    for consumer in range(50):
        for kind in range(100):
            hook(events.Received("", f"c{consumer}", "key", b"", event_type=f"t{kind}"))
    _, samples = exported(registry)["semel_events_received_total"]
    counted = [sample for sample in samples if sample.name.endswith("_total")]
    assert (
        len(counted) == TYPES_MAX + 40
    )  # ten consumers with all their types, and `other` for each of the rest
    assert sum(sample.value for sample in counted) == 5000


def test_the_key_is_no_label_anywhere() -> None:
    registry = CollectorRegistry()
    with semel.open("memory:", consumer="billing", hooks=[PrometheusHook(registry)]) as once:
        once.run("very-secret-key", one)
    assert b"very-secret-key" not in generate_latest(registry)


def metrics_in(text: str) -> set[str]:
    named = set(re.findall(r"\bsemel_\w+", text))
    return {re.sub(r"_(bucket|count|sum)$", "", name) for name in named}


def test_the_dashboard_names_only_metrics_that_exist() -> None:
    dashboard = json.loads((ROOT / "deploy" / "grafana" / "semel.json").read_text())
    shown: set[str] = set()
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            found = metrics_in(target["expr"])
            assert found or target["expr"].startswith("vector("), target
            shown |= found
    shown |= metrics_in(json.dumps(dashboard["templating"]))
    assert shown - {f"semel_{name}" for name in METRICS} == set()
    assert {f"semel_{name}" for name in METRICS} - shown == set()  # and each of them is to be seen somewhere


def test_the_rules_name_only_metrics_that_exist() -> None:
    rules = (RULES / "semel.rules.yml").read_text().replace("`semel ", "")
    expressions = "\n".join(line for line in rules.splitlines() if not line.lstrip().startswith("#"))
    assert metrics_in(expressions) - {f"semel_{name}" for name in METRICS} == set()
    alerts = set(re.findall(r"alert: (\w+)", rules))
    assert alerts == {
        "SemelDuplicateRateHigh", "SemelDuplicateRateSpike", "SemelClaimStuck", "SemelStoreErrors",
        "SemelWindowTooShort", "SemelOutboxStalled", "SemelPurgeBehind", "SemelDuplicateRateHighOfType",
        "SemelConsumerFailing", "SemelEventsUndecided", "SemelDeadLettersGrowing", "SemelDeadLettersStuck",
        "SemelOutboxLagging",
    }  # fmt: skip


@pytest.mark.parametrize(
    "command", [["check", "rules", "semel.rules.yml"], ["test", "rules", "semel.rules.test.yml"]]
)
def test_promtool_accepts_the_rules(command: list[str]) -> None:
    answer = subprocess.run(
        [program("promtool"), *command],
        cwd=RULES,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_every_alert_is_tested_both_ways() -> None:
    tests = (RULES / "semel.rules.test.yml").read_text()
    for alert in re.findall(r"alert: (\w+)", (RULES / "semel.rules.yml").read_text()):
        fires = re.findall(rf"alertname: {alert}\n\s+exp_alerts:\n\s+- exp_labels", tests)
        assert fires, f"{alert} is never shown to fire"
