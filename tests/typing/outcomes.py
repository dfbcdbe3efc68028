"""What a type checker knows about outcomes: `run` keeps the handler's type, and a `match` can be complete.

Nothing here runs. Leave one case out and `assert_never` is reported.
"""

from typing import Any, assert_never, assert_type

from semel import (
    AsyncSemel,
    Busy,
    Claimed,
    Completed,
    Delivery,
    Done,
    Errored,
    Failed,
    Late,
    Lost,
    Mismatch,
    Outcome,
    Semel,
    Unavailable,
    Unknown,
)


def total(cents: int, *, tax: float) -> int:
    return cents


async def atotal(cents: int, *, tax: float) -> int:
    return cents


def shout(text: str) -> bytes:
    return text.encode()


async def ashout(text: str) -> bytes:
    return text.encode()


def run_keeps_the_type(once: Semel, deliveries: list[Delivery[str]]) -> None:
    assert_type(once.run("evt_1", total, 100, tax=0.2), Outcome[int])
    assert_type(once.run_many(deliveries, shout), list[Outcome[bytes]])
    once.run("evt_1", total, "100", tax=0.2)  # type: ignore[arg-type]
    once.run("evt_1", total, 100)  # type: ignore[call-overload]
    once.run_many(deliveries, total)  # type: ignore[arg-type]


async def async_run_keeps_the_type(aonce: AsyncSemel, deliveries: list[Delivery[str]]) -> None:
    assert_type(await aonce.run("evt_1", atotal, 100, tax=0.2), Outcome[int])
    assert_type(await aonce.run_many(deliveries, ashout), list[Outcome[bytes]])
    await aonce.run("evt_1", total, 100, tax=0.2)  # type: ignore[arg-type]
    await aonce.run("evt_1", atotal, 100)  # type: ignore[call-overload]


def every_outcome_has_a_case(outcome: Outcome[int]) -> str:
    match outcome:
        case Done(value, replayed):
            assert_type(value, int)
            assert_type(replayed, bool)
            return f"{value} {replayed}"
        case Failed(error, replayed):
            return f"{error} {replayed}"
        case Errored(error, attempt, retry_after_s):
            assert_type(attempt, int)
            return f"{error} {retry_after_s}"
        case Busy(retry_after_s, recoverable):
            return f"{retry_after_s} {recoverable}"
        case Mismatch():
            return "mismatch"
        case Lost(lost):
            assert_type(lost, int | None)
            return f"{lost}"
        case Late(age_s):
            assert_type(age_s, float)
            return f"{age_s}"
        case Unknown(since):
            assert_type(since, int)
            return f"{since}"
        case Unavailable(error):
            return f"{error}"
        case _:
            assert_never(outcome)


def a_missing_case_is_reported(outcome: Outcome[int]) -> str:
    match outcome:
        case Done(value):
            return f"{value}"
        case Failed() | Errored() | Busy() | Mismatch() | Lost() | Late() | Unknown():
            return "no value"
        case _:
            assert_never(outcome)  # type: ignore[arg-type]


def claims_are_matched_too(once: Semel) -> None:
    answer = once.claim("evt_1")
    match answer:
        case Claimed():
            assert_type(once.complete(answer, 7), Completed | Lost[Any])
            assert_type(once.release(answer, delay_s=1.5), Completed | Lost[Any])
        case Done() | Failed() | Busy() | Mismatch() | Late() | Unknown():
            pass
        case _:
            assert_never(answer)


def marks_are_plain(once: Semel) -> None:
    assert_type(once.mark("evt_1"), bool)
    assert_type(once.mark_many(["evt_1", "evt_2"]), list[bool])
