"""Durations and windows mean what is written, and nothing else is taken for one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.errors import PolicyInvalid
from semel.windows import OFF, PRESETS, duration_us, resolve, window_us

HOUR_US = 3600 * 10**6


@pytest.mark.parametrize(
    ("text", "us"),
    [
        ("24h", 24 * HOUR_US),
        ("15m", 15 * 60 * 10**6),
        ("1h30m", 90 * 60 * 10**6),
        ("30s", 30 * 10**6),
        ("250ms", 250_000),
        ("1us", 1),
        ("1.5s", 1_500_000),
        ("7d", 7 * 24 * HOUR_US),
        ("1d12h30m15s500ms", ((36 * 60 + 30) * 60 + 15) * 10**6 + 500_000),
        (30, 30 * 10**6),
        (0.02, 20_000),
        (0, 0),
    ],
)
def test_durations_are_read_as_written(text: str | float, us: int) -> None:
    assert duration_us(text) == us


@pytest.mark.parametrize(
    "wrong",
    ["", "24", "h", "24 h", "-1h", "1h-30m", "1y", "24hours", "1e3s", "inf", "nan", " 1h", "1h ", "1.h", ".5s",
     "9" * 400 + "s", "9" * 30 + "d", -1, -0.001, float("inf"), float("nan"), 2.0**60],
)  # fmt: skip
def test_what_is_no_duration_is_refused(wrong: str | float) -> None:
    with pytest.raises(PolicyInvalid):
        duration_us(wrong)


@given(st.integers(0, 10**9), st.sampled_from([("us", 1), ("ms", 1000), ("s", 10**6), ("m", 60 * 10**6)]))
def test_whole_numbers_lose_nothing(number: int, unit: tuple[str, int]) -> None:
    assert duration_us(f"{number}{unit[0]}") == number * unit[1]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_stands_for_its_duration(name: str) -> None:
    assert window_us(name) == duration_us(PRESETS[name])


def test_the_presets_are_those_that_are_promised() -> None:
    assert dict(PRESETS) == {
        "payments": "24h",
        "orders": "4h",
        "notifications": "15m",
        "analytics": "5m",
        "webhooks": "96h",
    }


def test_off_is_a_window_of_nothing() -> None:
    assert window_us("off") == OFF == 0


@pytest.mark.parametrize("wrong", [0, "0s", "19ms", "3651d", 0.01, "for ever"])
def test_a_window_out_of_bounds_is_refused(wrong: str | float) -> None:
    with pytest.raises(PolicyInvalid):
        window_us(wrong)


@pytest.mark.parametrize("bound", ["20ms", "90d", "3650d"])
def test_the_bounds_of_a_window_belong_to_it(bound: str) -> None:
    assert window_us(bound) == duration_us(bound)


def test_the_nearest_window_wins() -> None:
    stored = {
        ("", "billing", "order"): 1,
        ("", "billing", ""): 2,
        ("acme", "billing", ""): 3,
        ("", "mail", "x"): OFF,
    }
    assert resolve(stored, "", "billing", "order", 9) == 1
    assert resolve(stored, "", "billing", "refund", 9) == 2
    assert resolve(stored, "", "billing", "", 9) == 2
    assert resolve(stored, "acme", "billing", "order", 9) == 3
    assert resolve(stored, "", "other", "order", 9) == 9
    assert resolve(stored, "", "mail", "x", 9) == OFF
