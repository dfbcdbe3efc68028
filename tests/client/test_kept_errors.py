"""The error of every attempt is kept in its record, without a write more."""

import os
from typing import Any

import pytest

from semel import Delivery, Policy
from semel.core.commands import Settle
from semel.core.settlement import NotStarted
from semel.runtime.process import worker_name
from semel.types import ErrorInfo, Failed
from tests.client.clients import Either, Place

pytestmark = pytest.mark.anyio


def fails(error: BaseException) -> Any:
    def handler(*_body: Any) -> Any:
        raise error

    return handler


def errors(place: Place, key: str = "k") -> list[tuple[int, str, str]]:
    record = place.record(key)
    assert record is not None
    return [(each.attempt, each.kind.removeprefix("builtins."), each.message) for each in record.errors]


async def test_each_attempt_and_the_last_keep_their_error(place: Place) -> None:
    once = place.open(policy=Policy(max_attempts=3))
    for number in range(3):
        await once.run("k", fails(ValueError(f"no {number}")))
    assert errors(place) == [(1, "ValueError", "no 0"), (2, "ValueError", "no 1"), (3, "ValueError", "no 2")]
    record = place.record("k")
    assert record is not None
    assert record.state == "failed"
    assert [each.at_us for each in record.errors] == sorted({each.at_us for each in record.errors})
    assert {each.worker for each in record.errors} == {worker_name()}
    assert "tests/client/test_kept_errors.py" in record.errors[0].traceback
    assert "semel/runtime" not in record.errors[0].traceback
    assert len(place.spy.sent(Settle)) == 3, "no write more than one for each attempt"
    assert (await once.records("lookup", "k")).errors == record.errors


async def test_a_success_carries_no_error_and_keeps_the_history(place: Place, client: Either) -> None:
    await client.run("k", fails(ValueError("first")))
    await client.run("k", lambda: 1)
    assert place.settles("done")[0].error is None
    assert errors(place) == [(1, "ValueError", "first")]


async def test_many_keep_theirs_each(place: Place, client: Either) -> None:
    def handler(body: str) -> None:
        raise LookupError(body)

    await client.run_many([Delivery(key=key, body=key) for key in ("a", "b")], handler)
    assert errors(place, "a") == [(1, "LookupError", "a")]
    assert errors(place, "b") == [(1, "LookupError", "b")]


@pytest.mark.parametrize("mode", ["quarantine", "observe"])
async def test_other_modes_keep_them_too(place: Place, mode: Any) -> None:
    once = place.open(mode=mode)
    await once.run("k", fails(ValueError("half way")))
    assert errors(place) == [(1, "ValueError", "half way")]


async def test_a_claim_that_the_caller_ends_keeps_its_error(place: Place, client: Either) -> None:
    def block() -> None:
        raise ValueError("in the block")

    with pytest.raises(ValueError, match="in the block"):
        await client.within(await client.claim("k"), block)
    await client.release(await client.claim("k"), error="not yet")
    await client.release(await client.claim("k"), error=NotStarted())
    await client.fail(await client.claim("k"), LookupError("for good"))
    assert errors(place) == [
        (1, "ValueError", "in the block"),
        (2, "RuntimeError", "not yet"),
        (4, "LookupError", "for good"),
    ]


async def test_a_policy_keeps_none(place: Place) -> None:
    once = place.open(policy=Policy(keep_errors=False))
    await once.run("k", fails(ValueError("secret")))
    assert errors(place) == []
    assert all(item.error is None for item in place.spy.sent(Settle))


@pytest.mark.parametrize("policy", [Policy(keep_errors=False, permanent=(ValueError,)),
                                    Policy(keep_errors=False, max_attempts=1)])  # fmt: skip
async def test_a_policy_keeps_only_the_kind_of_a_failure(place: Place, policy: Policy) -> None:
    """Duplicates are answered with the failure, so that something must stay."""
    once = place.open(policy=policy)
    await once.run("k", fails(ValueError("card 4242")))
    replayed = await once.run("k", fails(ValueError("never called")))
    assert isinstance(replayed, Failed)
    assert replayed.replayed
    assert "ValueError" in str(replayed.error)
    assert b"4242" not in repr(place.spy.sent(Settle)).encode()
    assert errors(place) == []


async def test_a_redaction_decides_what_leaves_the_process(place: Place) -> None:
    policy = Policy(redact_error=lambda info: ErrorInfo(info.kind, "hidden"), permanent=(LookupError,))
    once = place.open(policy=policy)
    await once.run("k", fails(ValueError("card 4242")))
    await once.run("k", fails(LookupError("card 4242")))
    record = place.record("k")
    assert record is not None
    assert [(each.message, each.traceback, each.worker) for each in record.errors] == [("hidden", "", "")] * 2
    assert b"4242" not in repr(place.spy.sent(Settle)).encode()


async def test_a_worker_that_died_is_named_by_the_end_of_its_name(place: Place, client: Either) -> None:
    await client.claim("k")
    place.clock.skip(3600)
    await place.open().claim("k")
    record = place.record("k")
    assert record is not None
    (error,) = record.errors
    assert (error.attempt, error.kind) == (1, "lease ended")
    assert worker_name().endswith(f":{os.getpid()}:{error.worker}")


def test_a_forked_child_is_another_worker() -> None:
    mine, (reading, writing) = worker_name(), os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, worker_name().encode())
        os._exit(0)
    os.waitpid(child, 0)
    theirs = os.read(reading, 1000).decode()
    os.close(reading)
    os.close(writing)
    assert theirs.split(":")[-2] == str(child)
    assert theirs.split(":")[-1] != mine.split(":")[-1]
