"""Exit codes, and which error ends with which."""

from semel.errors import (
    KeyInvalid,
    KeyMissing,
    ModeMismatch,
    PolicyInvalid,
    SemelError,
    SinkUnavailable,
    SinkUnknown,
    SourceUnavailable,
    StillRunning,
    StoreError,
    StoreRefused,
    StoreUnknown,
    UsageError,
    ValueInvalid,
)

__all__ = [
    "BAD_CONFIGURATION",
    "DUPLICATE",
    "FAILED",
    "INTERRUPTED",
    "NOT_FOUND",
    "OK",
    "TRY_LATER",
    "UNAVAILABLE",
    "USAGE",
    "CommandExit",
    "code_of",
]

OK = 0
FAILED = 1
USAGE = 2
DUPLICATE = 3
NOT_FOUND = 5
UNAVAILABLE = 69
TRY_LATER = 75
BAD_CONFIGURATION = 78
INTERRUPTED = 130


class CommandExit(Exception):
    """End the command with a message on stderr and an exit code."""

    def __init__(self, message: str, code: int = FAILED) -> None:
        super().__init__(message)
        self.code = code


_CODES: tuple[tuple[type[SemelError], int], ...] = (
    (KeyInvalid, USAGE),
    (KeyMissing, USAGE),
    (ValueInvalid, USAGE),
    (StoreUnknown, BAD_CONFIGURATION),
    (SinkUnknown, BAD_CONFIGURATION),
    (PolicyInvalid, BAD_CONFIGURATION),
    (ModeMismatch, BAD_CONFIGURATION),
    (StillRunning, TRY_LATER),
    (StoreRefused, BAD_CONFIGURATION),
    (StoreError, UNAVAILABLE),
    (SinkUnavailable, UNAVAILABLE),
    (SourceUnavailable, UNAVAILABLE),
    (UsageError, BAD_CONFIGURATION),
)


def code_of(error: SemelError) -> int:
    """The exit code that an error ends the program with."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), FAILED)
