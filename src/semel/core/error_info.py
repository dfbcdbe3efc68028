"""Describe an error for its record: kind, message, a short traceback, worker. No I/O: the source is not read."""

from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType

from semel.codec import encode_error, kind_of, message_of
from semel.errors import AttemptsExhausted
from semel.policy import Policy
from semel.types import ErrorInfo

__all__ = ["DeadLetterUnwritten", "describe", "encode_failure", "handlers_error", "kept_part", "redact"]

FRAMES_MAX = 8
"""Of each error: the last places are where it was raised."""
CAUSES_MAX = 3
MEMBERS_MAX = 3
"""How many errors of an exception group are named."""
CAUSE_CHARS_MAX = 200
NOT_KEPT = "the message was not kept"
PATH_PARTS = 3
"""Of a file's path: enough to find it, and no more of the computer that it was on."""
_THREADS = "/concurrent/futures/thread.py"
_HERE = __file__.replace("\\", "/").rpartition("/core/")[0] + "/"


class DeadLetterUnwritten(Exception):
    """The dead letter of a given-up event was not written: it is retried, also if the policy calls errors permanent.

    Its cause is the handler's error.
    """


def describe(error: BaseException, policy: Policy, worker: Callable[[], str]) -> ErrorInfo | None:
    """Return what may be kept of the error of an attempt; `None` if the policy keeps none."""
    return redact(handlers_error(error), policy, worker()) if policy.keep_errors else None


def handlers_error(error: BaseException) -> BaseException:
    """Return the last attempt's own error, instead of the one that says that there are no attempts left."""
    while isinstance(error, AttemptsExhausted | DeadLetterUnwritten) and error.__cause__ is not None:
        error = error.__cause__
    return error


def error_label(error: BaseException | str) -> str:
    """Return the name of an error's class for counters: of the handler's own error, also after the last attempt."""
    return error if isinstance(error, str) else type(handlers_error(error)).__name__


def redact(error: BaseException, policy: Policy, worker: str = "") -> ErrorInfo:
    """Return the error as the policy's redaction leaves it; only its kind if that raises or returns no `ErrorInfo`."""
    kind = kind_of(error)
    found = ErrorInfo(kind, message_of(error), short_traceback(error), worker)
    if policy.redact_error is None:
        return found
    try:
        kept = policy.redact_error(found)
    except Exception:  # noqa: BLE001 - what it could not redact must not be kept
        kept = None
    return kept if isinstance(kept, ErrorInfo) else ErrorInfo(kind, worker=worker)


def kept_part(error: BaseException, policy: Policy, worker: str = "") -> ErrorInfo:
    """Return the part of an error for a failure or a dead letter: only its kind if the policy keeps no errors."""
    if not policy.keep_errors:
        return ErrorInfo(kind_of(error), NOT_KEPT, worker=worker)
    return redact(error, policy, worker)


def encode_failure(error: BaseException, policy: Policy) -> bytes:
    """Encode a permanent failure for the record, redacted as kept errors are."""
    if policy.redact_error is None and policy.keep_errors:
        return encode_error(error)
    own = handlers_error(error)
    info = kept_part(own, policy)
    said = info.message if own is error else f"the last attempt failed: {info.kind}: {info.message}"
    return encode_error(error, said)


def short_traceback(error: BaseException) -> str:
    """Return places in the code, the most recent one last, after the errors that led to this one."""
    lines: list[str] = []
    chain = list(_causes(error))
    for each in reversed(chain):
        if lines:
            lines.append("which led to")
        lines += _places(each.__traceback__)
        if isinstance(each, BaseExceptionGroup):
            lines += [f"  with {_summary(member)}" for member in each.exceptions[:MEMBERS_MAX]]
        if each is not error:
            lines.append(_summary(each))
    return "\n".join(lines)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and those that led to it, the nearest first."""
    found: BaseException | None = error
    for _ in range(CAUSES_MAX):
        if found is None:
            return
        yield found
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)


def _places(trace: TracebackType | None) -> list[str]:
    """Return the last places of a traceback, without those of semel that called the handler."""
    places: deque[str] = deque(maxlen=FRAMES_MAX)
    while trace is not None:
        code = trace.tb_frame.f_code
        path = code.co_filename.replace("\\", "/")
        if places or not (path.startswith(_HERE) or path.endswith(_THREADS)):
            short = "/".join(path.lstrip("/").split("/")[-PATH_PARTS:])
            places.append(f"  {short}:{trace.tb_lineno} in {code.co_qualname}")
        trace = trace.tb_next
    return list(places)


def _summary(error: BaseException) -> str:
    return f"{kind_of(error)}: {message_of(error)[:CAUSE_CHARS_MAX]}"
