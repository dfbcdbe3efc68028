"""What an outcome is answered with."""

from typing import Any, assert_never

from semel.errors import LateEvent
from semel.http import problems
from semel.http.problems import RETRY_SOON_S, problem
from semel.http.replies import Reply, unpack
from semel.http.rules import ResponseFailed
from semel.types import Busy, Done, Errored, Failed, Late, Lost, Mismatch, Outcome, Unavailable, Unknown

__all__ = ["answer"]

REPLAYED = (b"idempotent-replayed", b"true")


def answer(docs: str, outcome: Outcome[Any], own: Reply | None) -> Reply:
    """The response to an outcome; `own`: what this request's handler answered. Raises the handler's own error."""
    match outcome:
        case Done():
            return _done(docs, outcome, own)
        case Errored(error):
            if own is None or not isinstance(error, ResponseFailed):
                raise error
            return own
        case Unknown(_, error) if error is not None:
            if own is None or not isinstance(error, ResponseFailed):
                raise error
            return own
        case _:
            return _refused(docs, outcome)


def _done(docs: str, done: Done[Any], own: Reply | None) -> Reply:
    if done.replayed and done.kept:
        stored = unpack(done.value)
        return Reply(stored.status, [*stored.headers, REPLAYED], stored.body)
    if done.replayed:
        detail = "The request was executed. Its response was long, or a stream, and was not kept."
        return problem(problems.RESPONSE_NOT_KEPT, detail, docs)
    if done.recorded and own is not None:
        return own
    detail = "Send it again with the same key: it may run again."
    return problem(problems.NOT_RECORDED, detail, docs, RETRY_SOON_S)


def _refused(
    docs: str, outcome: Busy | Mismatch | Lost[Any] | Unknown | Unavailable | Failed | Late
) -> Reply:
    match outcome:
        case Busy(retry_after_s):
            detail = "Send the same request again later; it will then be answered, or run."
            return problem(problems.RUNNING, detail, docs, retry_after_s)
        case Mismatch():
            detail = (
                "Path, query or body differ from the first use of this key. A new request needs a new key."
            )
            return problem(problems.MISMATCH, detail, docs)
        case Lost():
            detail = "Send it again with the same key: it is answered with the result that counts."
            return problem(problems.LOST, detail, docs, RETRY_SOON_S)
        case Unknown():
            detail = "The request may or may not have been executed. It is not run again; ask the operator."
            return problem(problems.UNKNOWN, detail, docs)
        case Unavailable():
            return problem(problems.UNAVAILABLE, "Send it again later.", docs, RETRY_SOON_S)
        case Failed():
            return problem(problems.GIVEN_UP, "It is not tried again. A new request needs a new key.", docs)
        case Late(age_s):
            raise LateEvent(f"the key passes for an event {age_s:g} s old; give HTTP a consumer of its own")
        case _:
            assert_never(outcome)
