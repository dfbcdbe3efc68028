"""What a runner logs of failures: everything that matters, at a rate that cannot flood."""

import logging

import pytest

from semel.brokers.retry_queue import FailureLog
from semel.brokers.source import DeadLetterInfo
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


def test_a_dead_letter_without_its_body_is_not_said_to_be_replayable(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = FailureLog("kafka://localhost/orders")
    log.log_dead_letter(DeadLetterInfo(reason="attempts", consumer="billing", key="k1"))
    log.log_dead_letter(
        DeadLetterInfo(reason="attempts", consumer="billing", key="k2", body_at="orders/3/17")
    )
    first, second = (record.getMessage() for record in caplog.records)
    assert first.endswith("; semel dlq replay runs it again")
    assert second.endswith("its body is left out, so publish it again from where it was: orders/3/17")


def test_a_dead_letter_says_what_can_be_done_about_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    log = FailureLog("redis://localhost/orders")
    for reason, attempts in (("failed", 3), ("unknown", 0), ("no-key", 0)):
        log.log_dead_letter(DeadLetterInfo(reason=reason, consumer="mails", key="k", attempts=attempts))
    told = [vars(record)["semel"] for record in caplog.records]
    assert [each.get("attempt") for each in told] == [3, None, None]
    assert [each["next"] for each in told] == [
        "semel dlq replay runs it again",
        "semel resolve decides; if it did not happen, semel dlq replay runs it again",
        "semel dlq replay --new-key runs it under that key",
    ]


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
    events = [getattr(record, "event", "") for record in caplog.records]
    assert events == [*["source_outage"] * 3, "source_outage_end"]


def test_an_error_of_a_call_from_before_the_answer_is_no_new_outage(caplog: pytest.LogCaptureFixture) -> None:
    steady = Steady()
    outage = OutageLog(logging.getLogger("semel.test"), "the store", steady, grace_s=1.0)
    for second, report in [(0.0, True), (2.0, False), (2.9, True), (3.1, True)]:
        steady.now_s = second
        if report:
            outage.report("refused")
        else:
            outage.end()
    assert [line.getMessage().split(":")[0] for line in caplog.records] == [
        "the store cannot be reached",
        "the store answers again after 2.0 s",
        "the store cannot be reached",
    ]
