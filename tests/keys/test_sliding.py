"""Content keys in a window that slides from acceptance."""

from datetime import UTC, datetime
from typing import Any

import pytest

from semel import keys
from semel.errors import KeyInvalid, KeyMissing, PolicyInvalid
from semel.keys import Envelope


def test_client_recognises_the_window() -> None:
    by_content = keys.sliding("5m", "user", "amount")
    assert (by_content.window_us, by_content.sliding, by_content.by_event_time) == (300_000_000, True, False)
    assert keys.sliding(1.5).window_us == 1_500_000
    assert keys.sliding("analytics").window_us == 300_000_000


def test_key_holds_no_time_bucket() -> None:
    by_content = keys.sliding("5m", "user")
    events = [{"user": "u", "at": at} for at in ("2026-11-15T10:04:59.9Z", "2026-11-15T10:05:00.1Z")]
    assert by_content(events[0]) == by_content(events[1])
    assert by_content(events[0]).startswith("sliding:v1.")
    assert by_content(events[0]) != by_content({"user": "v"})


@pytest.mark.parametrize("window", ["off", "0s", "-5m", "five", "1000d", float("nan")])
def test_window_out_of_bounds_is_refused(window: Any) -> None:
    with pytest.raises(PolicyInvalid):
        keys.sliding(window)


@pytest.mark.parametrize("lateness", ["91d", "-1s", "soon"])
def test_lateness_out_of_bounds_is_refused(lateness: str) -> None:
    with pytest.raises(PolicyInvalid):
        keys.sliding("5m", event_time="at", lateness=lateness)


def test_lateness_is_a_day_unless_said_otherwise() -> None:
    assert keys.sliding("5m", event_time="at").lateness_us == 24 * 3600 * 10**6
    assert keys.sliding("5m", event_time="at", lateness="0s").lateness_us == 0
    assert keys.sliding("5m").lateness_us is None


def test_lateness_without_event_time_is_a_mistake() -> None:
    with pytest.raises(PolicyInvalid, match="event_time="):
        keys.sliding("5m", lateness="10m")


def test_event_time_is_one_instant_however_written() -> None:
    by_time = keys.sliding("5m", "user", event_time="at")
    noon_us = int(datetime(2026, 11, 15, 12, tzinfo=UTC).timestamp()) * 10**6
    same = [
        {"at": "2026-11-15T12:00:00Z"},
        {"at": "2026-11-15T13:00:00.000000+01:00"},
        {"at": datetime(2026, 11, 15, 12, tzinfo=UTC)},
        Envelope(body=b'{"at":"2026-11-15T12:00:00+00:00"}'),
    ]
    assert {by_time.event_time_us(event) for event in same} == {noon_us}
    assert by_time.event_time_us({"at": "1969-12-31T23:59:59.999999Z"}) == -1
    own = keys.sliding("5m", event_time=lambda event: datetime.fromtimestamp(event["ms"] / 1000, UTC))
    assert own.event_time_us({"ms": 1_500}) == 1_500_000
    assert keys.sliding("5m").event_time_us({"at": "nonsense"}) is None


NAIVE = datetime(2026, 11, 15)  # noqa: DTZ001


@pytest.mark.parametrize("at", ["2026-11-15T12:00:00", "yesterday", 1_763_208_000, 1.5, None, NAIVE])
def test_event_time_that_is_no_instant_is_refused(at: object) -> None:
    with pytest.raises(KeyInvalid, match="event time"):
        keys.sliding("5m", event_time="at").event_time_us({"at": at})


def test_event_without_its_time_is_missing() -> None:
    with pytest.raises(KeyMissing):
        keys.sliding("5m", event_time="at").event_time_us({})


def test_a_delivery_carries_all_that_the_store_needs() -> None:
    by_time = keys.sliding("5m", "user", event_time="at", lateness="1h")
    event = {"user": "u", "at": "1970-01-01T00:00:01Z"}
    delivery = by_time.delivery(event)
    assert (delivery.key, delivery.body) == (by_time(event), event)
    assert (delivery.event_time_us, delivery.sliding_us, delivery.lateness_us) == (
        10**6,
        300 * 10**6,
        3600 * 10**6,
    )
    by_arrival = keys.sliding("5m", "user").delivery(event)
    assert (by_arrival.event_time_us, by_arrival.sliding_us, by_arrival.lateness_us) == (
        None,
        300 * 10**6,
        None,
    )
