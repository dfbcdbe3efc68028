"""Write dead letters, and report what keeps one from being written: its message holds up the source until then."""

import logging
import traceback
from time import monotonic

from msgspec.structs import replace

from semel.aclient import AsyncSemel
from semel.brokers.failure_log import FailureLog
from semel.brokers.pace import RunnerCounters
from semel.brokers.source import Arrival, DeadLetterInfo, Source
from semel.errors import MessageTooLarge

__all__ = ["DeadLetters", "letter_for"]

_log = logging.getLogger("semel.runner")

ERROR_CHARACTERS = 200
"""What is left of the error before the body is left out."""
REMIND_S = 60.0
"""How often at most the log says that dead letters are stuck."""


def letter_for(
    reason: str,
    consumer: str,
    key: str,
    error: BaseException | None,
    *,
    fence: int = 0,
    attempts: int = 0,
) -> DeadLetterInfo:
    """The letter that says why a message was given up."""
    return DeadLetterInfo(
        reason=reason,
        consumer=consumer,
        key=key,
        fence=fence,
        attempts=attempts,
        error="" if error is None else f"{type(error).__name__}: {error}",
        stack="" if error is None else "".join(traceback.format_exception(error)),
    )


class DeadLetters:
    """The dead letters of one source."""

    def __init__(self, source: Source, counts: RunnerCounters, failure_log: FailureLog) -> None:
        self._source = source
        self._counts = counts
        self._failure_log = failure_log
        self._stuck: dict[str, DeadLetterInfo] = {}
        """Letters that could not be written so far, by key; those without one by position."""
        self._said_at = -REMIND_S

    async def write(self, arrival: Arrival, letter: DeadLetterInfo, once: AsyncSemel | None) -> None:
        """Put a copy of the message at the dead-letter destination; returns when the broker has confirmed it.

        A message that is too large with its letter goes with less of the error, then without its body, to which the
        letter then points. What else the broker raises is reported, and raised.
        """
        first = self._stuck.get(letter.key or arrival.position or "")
        if first is not None:  # the same message, whose later attempts did not run: the first letter says why
            letter = replace(letter, error=first.error, stack=first.stack, attempts=first.attempts)
        try:
            await self._write(arrival, letter)
        except Exception as error:
            self.report(arrival, letter, error, once)
            raise
        self.note_written(arrival, letter)

    def note_written(self, arrival: Arrival, letter: DeadLetterInfo) -> None:
        """Count and log a dead letter that is written."""
        self._stuck.pop(letter.key or arrival.position or "", None)
        self._counts.stuck = len(self._stuck)
        self._counts.buried += 1
        self._failure_log.buried(letter)

    async def _write(self, arrival: Arrival, letter: DeadLetterInfo) -> None:
        short = replace(letter, stack="", error=letter.error[:ERROR_CHARACTERS])
        bare = replace(letter, body_at=arrival.position or "unknown")
        if await self._fits(arrival, letter) or await self._fits(arrival, short):
            return
        _log.warning(
            "%s: the dead letter of %s is too large; its body is left out, it was at %s",
            self._source.name, letter.key or "a message", arrival.position,
        )  # fmt: skip
        await self._source.bury(replace(arrival, body=b""), bare)

    async def _fits(self, arrival: Arrival, letter: DeadLetterInfo) -> bool:
        """Write the letter; `False`: it is too large."""
        try:
            await self._source.bury(arrival, letter)
        except MessageTooLarge:
            return False
        return True

    def report(self, arrival: Arrival, letter: DeadLetterInfo, error: BaseException, once: AsyncSemel | None) -> None:
        """Report that a dead letter could not be written, and why."""
        self._stuck.setdefault(letter.key or arrival.position or "", letter)
        self._counts.stuck = len(self._stuck)
        hooks = None if once is None else once._runtime.hooks  # noqa: SLF001 - the runner and its client are one mechanism
        if once is not None and hooks is not None:
            from semel.observe.events import DeadLetterStuck  # not loaded unless somebody listens

            hooks(
                DeadLetterStuck(
                    once.tenant, once.consumer, letter.key, b"", source=arrival.transport, error=error
                )
            )
        now = monotonic()
        if now - self._said_at >= REMIND_S:
            self._said_at = now
            _log.error(
                "%s: a dead letter cannot be written, and its message stays where it is until it can:"
                " %s at %s, given up for %s: %r; %d such messages",
                self._source.name, letter.key or "no key", arrival.position, letter.error or letter.reason, error,
                len(self._stuck),
            )  # fmt: skip
