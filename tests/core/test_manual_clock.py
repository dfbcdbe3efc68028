"""The clock of tests moves when told, and only then."""

from datetime import timedelta

import pytest

from semel.clock import Clock, SystemClock
from semel.testing import ManualClock


def test_time_stands_still_until_it_is_moved() -> None:
    clock: Clock = ManualClock(5)
    assert (clock.now_us(), clock.now_us(), clock.steady_s()) == (5, 5, 0.0)


def test_both_clocks_advance() -> None:
    clock = ManualClock(0)
    clock.advance(us=500_000)
    clock.advance(2)
    assert (clock.now_us(), clock.steady_s()) == (2_500_000, 2.5)


@pytest.mark.parametrize("hour", [3600, 3600.0, "1h", "60m", timedelta(hours=1)])
def test_a_duration_is_in_seconds_as_everywhere(hour: float | str | timedelta) -> None:
    clock = ManualClock(0)
    clock.advance(hour)
    assert (clock.now_us(), clock.steady_s()) == (3_600_000_000, 3600.0)
    clock.step_back(hour)
    assert clock.now_us() == 0


def test_only_the_wall_clock_steps_back() -> None:
    clock = ManualClock(10_000_000)
    clock.advance(1)
    clock.step_back(5)
    clock.step_back(us=1)
    assert (clock.now_us(), clock.steady_s()) == (5_999_999, 1.0)


def test_a_step_has_one_direction() -> None:
    with pytest.raises(ValueError, match="step_back"):
        ManualClock().advance(us=-1)
    with pytest.raises(ValueError, match="step_back"):
        ManualClock().advance(-0.5)
    with pytest.raises(ValueError, match="step_back"):
        ManualClock().advance(timedelta(seconds=-1))
    with pytest.raises(ValueError, match="positive"):
        ManualClock().step_back(us=-1)


def test_the_system_clock_goes_forward() -> None:
    clock = SystemClock()
    assert clock.steady_s() <= clock.steady_s()
    assert clock.now_us() > 1_600_000_000_000_000
