"""What is logged, at which level, and what never is."""

import logging

import pytest

import semel
from semel.observe import events
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
