"""A policy is checked on birth, with a message that says what to do."""

from typing import Any

import pytest

from semel.errors import PolicyInvalid, UsageError
from semel.policy import LEASE_MAX_S, LEASE_MIN_S, VALUE_BYTES_LIMIT, Policy


def test_the_defaults_are_those_that_are_promised() -> None:
    policy = Policy()
    assert (policy.wait_s, policy.run_max_s, policy.max_attempts) == (10.0, 900.0, 10)
    assert (policy.value_bytes_max, policy.late, policy.keep_value) == (256 * 1024, "run", True)
    assert (policy.lease_s, policy.window_s) == (None, None)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("lease_s", LEASE_MIN_S / 2),
        ("lease_s", LEASE_MAX_S + 1),
        ("lease_s", float("nan")),
        ("window_s", -1),
        ("window_s", 3651 * 86400),
        ("wait_s", -1),
        ("wait_s", float("inf")),
        ("run_max_s", 0),
        ("max_attempts", 0),
        ("retry_delay_s", -0.1),
        ("value_bytes_max", -1),
        ("value_bytes_max", VALUE_BYTES_LIMIT + 1),
        ("late", "drop"),
    ],
)
def test_a_setting_out_of_its_bounds_is_refused_by_name(name: str, wrong: Any) -> None:
    with pytest.raises(PolicyInvalid, match=rf"Policy\.{name}"):
        Policy(**{name: wrong})


@pytest.mark.parametrize(
    ("name", "bound"),
    [
        ("lease_s", LEASE_MIN_S),
        ("wait_s", 0),
        ("max_attempts", 1),
        ("value_bytes_max", 0),
        ("value_bytes_max", VALUE_BYTES_LIMIT),
    ],
)
def test_the_bounds_belong_to_a_setting(name: str, bound: Any) -> None:
    assert getattr(Policy(**{name: bound}), name) == bound


def test_a_run_shorter_than_its_lease_is_refused() -> None:
    with pytest.raises(PolicyInvalid, match="run_max_s"):
        Policy(lease_s=60, run_max_s=30)


def test_a_wrong_policy_is_a_usage_error_and_a_value_error() -> None:
    assert issubclass(PolicyInvalid, UsageError)
    assert issubclass(PolicyInvalid, ValueError)


def test_a_policy_does_not_change() -> None:
    with pytest.raises(AttributeError):
        Policy().wait_s = 1  # type: ignore[misc]
