"""The answer to an event that arrived once."""

from typing import Any, Literal

from msgspec import Struct

from semel.types import Busy, Done, Errored, Failed, Late, Lost, Mismatch, Outcome, Unavailable, Unknown

__all__ = ["Receipt", "receipt_for"]


class Receipt(Struct, frozen=True):
    """The answer to an event."""

    status: Literal["accepted", "duplicate", "busy", "refused"]
    """`busy`: not accepted, send it again. `refused`: do not send it again."""
    retry_after_s: float = 0.0
    reason: str = ""


def receipt_for(outcome: Outcome[Any]) -> Receipt:
    """Return the receipt of an event whose handler was not called."""
    match outcome:
        case Done() | Failed() | Unknown() | Lost() | Busy(recoverable=True):
            return Receipt("duplicate")
        case Busy(retry_after_s):
            return Receipt("busy", retry_after_s, "another attempt holds it without a journal")
        case Unavailable():
            return Receipt("busy", 1.0, "the store does not answer")
        case Mismatch():
            return Receipt("refused", reason="this id was used before with another body")
        case Late(age_s):
            return Receipt("refused", reason=f"{age_s:g} s old, more than is remembered")
        case Errored(error):
            return Receipt("busy", 1.0, type(error).__name__)
