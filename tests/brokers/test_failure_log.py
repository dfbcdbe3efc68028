"""What a runner logs of failures: everything that matters, at a rate that cannot flood."""

import logging

import pytest

from semel.brokers.retry_queue import FailureLog
from semel.observe.limited_log import BURST, OutageLog, RateLimit


class Steady:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_burst_is_let_through_then_ten_a_minute() -> None:
    steady = Steady()
    limit = RateLimit(steady)
    assert [limit.take() for _ in range(BURST + 5)] == [0] * BURST + [None] * 5
    steady.now_s = 6.0
    assert limit.take() == 5, "how many were left out"
    assert limit.take() is None
    steady.now_s = 3600.0
    assert [limit.take() for _ in range(BURST + 1)] == [1, *[0] * (BURST - 1), None]


def test_a_failure_is_logged_with_key_attempt_and_traceback(caplog: pytest.LogCaptureFixture) -> None:
    log = FailureLog("redis://localhost/orders")
    for number in range(100):
        log.log_failure(f"k{number}", 3, 4.0, RuntimeError("closed\x1b[2J"))
    assert len(caplog.records) == BURST
    assert (
        "redis://localhost/orders: the handler failed for key 'k0', attempt 3; again in 4.0 s" in caplog.text
    )
    assert "RuntimeError: closed\\x1b[2J" in caplog.text


def test_an_outage_is_reported_at_once_then_once_a_minute_then_its_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    steady = Steady()
    outage = OutageLog(logging.getLogger("semel.test"), "nats://away", steady)
    outage.end()
    for second in range(150):
        steady.now_s = float(second)
        outage.report("refused")
    outage.end()
    outage.end()
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "nats://away cannot be reached: refused; retrying until it answers",
        "nats://away has been unreachable for 60 s: refused",
        "nats://away has been unreachable for 120 s: refused",
        "nats://away answers again after 149.0 s",
    ]
