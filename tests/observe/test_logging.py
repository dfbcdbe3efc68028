"""What is logged, at which level, and what never is."""

import json
import logging

import pytest

import semel
from semel.observe import events
from semel.observe.limited_log import TakeoverLog
from semel.observe.log_format import JsonFormatter, about
from semel.observe.logging import LogHook

SECRET = "order-4711"


def lines(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == level]


def test_duplicates_are_info_and_lost_claims_warnings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "semel")
    with semel.open("memory:", consumer="billing", hooks=[LogHook()]) as once:
        once.run(SECRET, int)
        once.run(SECRET, int)
        claim = once.claim("other")
        assert isinstance(claim, semel.Claimed)
        once.records.forget("other", force=True)
        once.complete(claim)
    (duplicate,) = (line for line in lines(caplog, logging.INFO) if not line.startswith("audit: "))
    assert duplicate.startswith("duplicate consumer=billing handler=int reason=redelivery state=done lag_s=")
    assert f"key={SECRET}" in duplicate
    assert any(line.startswith("lost consumer=billing") for line in lines(caplog, logging.WARNING))
    assert {record.name for record in caplog.records} == {"semel"}


@pytest.mark.parametrize("keys", ["hashed", "hidden"])
def test_keys_can_be_kept_out(caplog: pytest.LogCaptureFixture, keys: str) -> None:
    caplog.set_level(logging.DEBUG, "semel")
    with semel.open("memory:", consumer="billing", hooks=[LogHook(keys=keys)]) as once:  # type: ignore[arg-type]
        once.run(SECRET, int)
        once.run(SECRET, int)
    assert SECRET not in caplog.text
    assert SECRET not in repr([vars(record) for record in caplog.records])
    hashed = {
        part for line in lines(caplog, logging.DEBUG) for part in line.split() if part.startswith("key=")
    }
    assert len(hashed) == (1 if keys == "hashed" else 0)


def test_values_and_owners_are_never_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "semel")
    with semel.open("memory:", consumer="billing", hooks=[LogHook()]) as once:
        once.run("a", lambda: "a value nobody shall see")
        once.run("a", lambda: "a value nobody shall see")
    assert "nobody shall see" not in caplog.text
    assert "owner=" not in caplog.text


def test_a_key_cannot_forge_a_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "semel")
    LogHook()(events.Received("", "billing", "a\nERROR forged", b""))
    assert "\n" not in caplog.records[0].getMessage()


def test_every_event_has_a_level() -> None:
    from semel.observe.logging import _LEVELS

    kinds = {getattr(events, name) for name in events.__all__}
    told = {kind for kind in kinds if isinstance(kind, type) and issubclass(kind, events.HookEvent)}
    assert told - {events.HookEvent, events.DeliveryEvent} == set(_LEVELS)


def test_a_takeover_is_one_line_that_says_what_happens_next(caplog: pytest.LogCaptureFixture) -> None:
    hook = TakeoverLog()
    who = ("", "billing", "k", b"owner")
    hook(events.ClaimedEvent(*who, attempt=1))
    hook(events.Released(*who, error=ValueError()))
    hook(events.ClaimedEvent(*who, attempt=2))  # this process itself released it
    assert caplog.records == []
    hook(events.ClaimedEvent(*who, attempt=3))
    (record,) = caplog.records
    assert record.getMessage().startswith("billing: attempt 3 at key 'k' is taken over here")
    line = json.loads(JsonFormatter().format(record))
    assert (line["event"], line["key"], line["attempt"], line["next"]) == (
        "takeover",
        "k",
        3,
        "it runs here now",
    )


def test_a_json_line_is_one_line_with_its_error(caplog: pytest.LogCaptureFixture) -> None:
    error = ValueError("two\nlines")
    logging.getLogger("semel").error("it failed", exc_info=error, extra=about("failed", key="k", attempt=2))
    text = JsonFormatter().format(caplog.records[0])
    line = json.loads(text)
    assert "\n" not in text
    assert (line["level"], line["logger"], line["message"]) == ("error", "semel", "it failed")
    assert (line["event"], line["key"], line["attempt"], line["error"]) == (
        "failed",
        "k",
        2,
        "ValueError: two\nlines",
    )
    assert "ValueError" in line["traceback"]


def test_what_needs_attention_says_what_happens_next(caplog: pytest.LogCaptureFixture) -> None:
    hook, who = LogHook(), ("", "billing", "k", b"")
    caplog.set_level(logging.INFO, "semel")
    hook(events.Released(*who, error=ValueError("no"), retry_after_s=2.0, attempt=1))
    hook(events.DeadLettered(*who, reason="failed", attempts=3, error="ValueError: no"))
    hook(events.LostEvent(*who))
    hook(events.StoreFailed("claim", OSError("away")))
    hook(events.ClaimedEvent(*who, attempt=2))
    assert [record.semel["next"] for record in caplog.records] == [  # type: ignore[attr-defined]
        "it may run again in 2 s",
        "it stays with the dead letters until it is replayed or removed",
        "the other attempt's result counts; nothing was overwritten",
        "callers wait or are refused until the store answers",
        "attempt 2 runs here",
    ]


def test_json_lines_have_no_character_that_steers_a_terminal_or_breaks_a_line() -> None:
    said = "a\x7f\x85\x9b31m\u2028\u2029\u202e\u2066é"
    record = logging.LogRecord("semel", logging.WARNING, "", 0, "failed", (), None)
    record.__dict__ |= about("failed", error=said)
    line = JsonFormatter().format(record)
    assert json.loads(line)["error"] == said, "nothing is lost"
    assert "é" in line
    assert line.isprintable()
