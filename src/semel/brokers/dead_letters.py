"""Write dead letters, and report failures to write one: its message blocks the source until then."""

import logging
import traceback
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from time import monotonic
from typing import TYPE_CHECKING, Protocol
from urllib.parse import quote, unquote

import msgspec
from msgspec.structs import replace

from semel.brokers.outages import SourceLink
from semel.brokers.retry_queue import FailureLog, RunnerCounters
from semel.brokers.source import Arrival, DeadLetterInfo, Source
from semel.client import deliver
from semel.client.client_async import AsyncSemel
from semel.core.commands import Granted
from semel.core.error_info import handlers_error, kept_part
from semel.errors import AttemptsExhausted, MessageTooLarge, StoreError, UsageError
from semel.policy import Policy
from semel.runtime.process import asyncio, worker_name
from semel.types import Busy, Delivery, Lost

if TYPE_CHECKING:
    from semel.brokers.routes import Route

__all__ = [
    "PREFIX",
    "RUN_LATE",
    "DeadLetter",
    "DeadLetterQueue",
    "DeadLetters",
    "headers_of",
    "letter_for",
    "letter_of",
    "replay",
]

_log = logging.getLogger("semel.runner")

ERROR_CHARACTERS = 200
"""The length of the shortened error, before something is done to the body."""
REMIND_S = 60.0
"""The least interval between log lines about stuck dead letters."""


def letter_for(
    reason: str,
    consumer: str,
    key: str,
    error: BaseException | None,
    policy: Policy | None = None,
    *,
    fence: int = 0,
    attempts: int = 0,
) -> DeadLetterInfo:
    """Build the dead-letter information: why a message was given up. The policy redacts the error."""
    text, stack = "", ""
    if error is not None and policy is not None and (policy.redact_error or not policy.keep_errors):
        info = kept_part(handlers_error(error), policy, worker_name())
        text, stack = f"{info.kind}: {info.message}", info.traceback
    elif error is not None:
        text, stack = f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))
    return DeadLetterInfo(
        reason=reason,
        consumer=consumer,
        key=key,
        fence=fence,
        attempts=attempts,
        error=text,
        stack=stack,
        worker=worker_name(),
        at=datetime.now(UTC).isoformat(timespec="milliseconds"),
    )


class DeadLetters:
    """The dead letters of one source."""

    def __init__(
        self, source: Source, link: SourceLink, counts: RunnerCounters, failure_log: FailureLog
    ) -> None:
        self._source = source
        self._link = link
        self._counts = counts
        self._failure_log = failure_log
        self._stuck: dict[str, DeadLetterInfo] = {}
        """Letters that could not be written yet, by key, or by position without a key."""
        self._said_at = -REMIND_S

    async def write(self, arrival: Arrival, letter: DeadLetterInfo, route: "Route | None") -> None:
        """Put a copy of the message at the dead-letter destination; returns when the broker has confirmed it.

        If the message is too large with its information, the error is shortened. If that is not enough and the broker
        keeps the message, the body is left out and the information says where it is; otherwise the body is compressed.
        Raises `MessageTooLarge` if nothing helps: the message must then not be acknowledged. Errors of the broker are
        reported and raised.
        """
        first = self._stuck.get(letter.key or arrival.position or "")
        if (
            first is not None
        ):  # the same message, whose later attempts did not run: the first letter has the reason
            letter = replace(letter, error=first.error, stack=first.stack, attempts=first.attempts)
        try:
            letter = await self._write(arrival, letter)
        except Exception as error:
            self.report(arrival, letter, error, None if route is None else route.once)
            raise
        self.note_written(arrival, letter, route)

    async def write_failed(
        self,
        delivery: Delivery[Arrival],
        error: BaseException,
        granted: Granted,
        route: "Route | None",
    ) -> None:
        """Write the dead letter of a delivery before it is recorded as failed."""
        once = None if route is None else route.once
        letter = letter_for(
            "failed",
            "" if once is None else once.consumer,
            delivery.key,
            error,
            None if once is None else once.policy,
            fence=granted.fence,
            attempts=granted.attempt,
        )
        if once is not None and isinstance(handlers_error(error), AttemptsExhausted):
            letter = await _with_recorded_error(letter, once)
        await self.write(delivery.body, letter, route)

    def is_stuck(self, key: str) -> bool:
        """Whether the dead letter of this key could not be written yet."""
        return key in self._stuck

    def note_written(self, arrival: Arrival, letter: DeadLetterInfo, route: "Route | None") -> None:
        """Count, report and log a written dead letter."""
        if route is not None and (reporter := deliver.reporter_of(route.once)).listens:
            reporter.report_dead_letter(
                (route.once.tenant, route.once.consumer, letter.key),
                route.handler,
                route.facts(arrival, letter.key),
                reason=letter.reason,
                attempts=letter.attempts,
                error=letter.error,
            )
        self._stuck.pop(letter.key or arrival.position or "", None)
        self._counts.stuck = len(self._stuck)
        self._counts.dead_lettered += 1
        self._failure_log.log_dead_letter(letter)

    async def _write(self, arrival: Arrival, letter: DeadLetterInfo) -> DeadLetterInfo:
        """Write the letter as complete as the broker takes it, and return it so."""
        short = replace(letter, stack="", error=letter.error[:ERROR_CHARACTERS])
        for each in (letter, short):
            if await self._fits(arrival, each):
                return each
        if not getattr(self._source, "keeps_acked", False):  # a pointer would lead nowhere after the ack
            packed = replace(short, body_encoding=ZLIB)
            body = await asyncio.to_thread(zlib.compress, arrival.body or b"")
            await self._link.answer(lambda: self._source.dead_letter(replace(arrival, body=body), packed))
            return packed
        bare = replace(letter, body_at=arrival.position or "unknown")
        _log.warning(
            "%s: the dead letter of %s is too large; its body is left out, it was at %s",
            self._source.name, letter.key or "a message", arrival.position,
        )  # fmt: skip
        await self._link.answer(lambda: self._source.dead_letter(replace(arrival, body=b""), bare))
        return bare

    async def _fits(self, arrival: Arrival, letter: DeadLetterInfo) -> bool:
        """Write the letter; `False`: it is too large."""
        try:
            await self._link.answer(lambda: self._source.dead_letter(arrival, letter))
        except MessageTooLarge:
            return False
        return True

    def report(
        self, arrival: Arrival, letter: DeadLetterInfo, error: BaseException, once: AsyncSemel | None
    ) -> None:
        """Report a dead letter that could not be written."""
        self._stuck.setdefault(letter.key or arrival.position or "", letter)
        self._counts.stuck = len(self._stuck)
        if once is not None:
            record_id = (once.tenant, once.consumer, letter.key)
            deliver.reporter_of(once).report_stuck_dead_letter(record_id, arrival.transport, error)
        now = monotonic()
        if now - self._said_at >= REMIND_S:
            self._said_at = now
            _log.error(
                "%s: a dead letter cannot be written, and its message stays where it is until it can:"
                " %s at %s, given up for %s: %r; %d such messages",
                self._source.name, letter.key or "no key", arrival.position, letter.error or letter.reason, error,
                len(self._stuck),
            )  # fmt: skip


async def _with_recorded_error(letter: DeadLetterInfo, once: AsyncSemel) -> DeadLetterInfo:
    """Return the letter with the error that the record has: the handler did not run in this attempt."""
    with suppress(StoreError):
        record = await once.records.lookup(letter.key)
        if record is not None and record.errors:
            last = record.errors[-1]
            raised = f"{last.kind.removeprefix('builtins.')}: {last.message}"
            text = f"{letter.error}; attempt {last.attempt} raised {raised}"
            return replace(letter, error=text, stack=last.traceback or letter.stack)
    return letter


PREFIX = "semel-dead-"
ZLIB = "zlib"
BODY_BYTES_MAX = 64 * 1024 * 1024
"""The largest decompressed body of a dead letter: brokers whose messages semel compresses take no larger ones."""
STACK_CHARACTERS_MAX = 6000
_PRINTABLE = " !\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~"


def headers_of(letter: DeadLetterInfo) -> dict[str, str]:
    """Encode the information as headers: printable ASCII on one line each, everything else percent-encoded."""
    fields = {
        "reason": letter.reason,
        "consumer": letter.consumer,
        "key": letter.key,
        "fence": str(letter.fence),
        "attempts": str(letter.attempts),
        "error": letter.error[:STACK_CHARACTERS_MAX],
        "stack": letter.stack[-STACK_CHARACTERS_MAX:],  # the end has the location
        "worker": letter.worker,
        "at": letter.at,
        "body-at": letter.body_at,
        "body-encoding": letter.body_encoding,
    }
    return {PREFIX + name: quote(text, safe=_PRINTABLE) for name, text in fields.items() if text}


def letter_of(headers: Mapping[str, str]) -> DeadLetterInfo | None:
    """Decode the information of a dead letter; `None` for a message that semel did not dead-letter."""
    lower = {name.lower(): value for name, value in headers.items()}
    fields = {
        name: unquote(lower.get(PREFIX + name, ""))
        for name in ("reason", "consumer", "key", "error", "stack", "worker", "at")
    }
    if not fields["reason"]:
        return None
    return DeadLetterInfo(
        **fields,
        body_at=unquote(lower.get(PREFIX + "body-at", "")),
        body_encoding=unquote(lower.get(PREFIX + "body-encoding", "")),
        fence=int(lower.get(PREFIX + "fence", "0")),
        attempts=int(lower.get(PREFIX + "attempts", "0")),
    )


RUN_LATE = "semel-run-late"
"""The header of a late message that an operator decided to run."""


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """A message at the dead-letter destination."""

    id: str
    """The broker's id of it."""
    headers: Mapping[str, str]
    body: bytes | None
    """As the producer sent it; `None`: it sent none, such as a Kafka tombstone."""
    letter: DeadLetterInfo

    @classmethod
    def from_message(cls, id_: str, headers: Mapping[str, str], body: bytes | None) -> "DeadLetter":
        """Build it from a message of the broker; one that semel did not dead-letter has empty information."""
        letter = letter_of(headers) or DeadLetterInfo(reason="", consumer="")
        if letter.body_encoding == ZLIB and body is not None:
            body = _decompress(body)
        return cls(id=id_, headers=headers, body=body, letter=letter)

    def original(self) -> dict[str, str]:
        """Return the headers as the producer sent them."""
        return {name: value for name, value in self.headers.items() if not name.lower().startswith(PREFIX)}


def _decompress(body: bytes) -> bytes:
    """Return the body, or the bytes as they are if semel cannot have written them."""
    unpacker = zlib.decompressobj()
    try:
        whole = unpacker.decompress(body, BODY_BYTES_MAX)
    except zlib.error:
        return body
    return whole if unpacker.eof else body


class DeadLetterQueue(Protocol):
    """The dead-letter queue of a source."""

    async def look(self, limit: int) -> Sequence[DeadLetter]:
        """Return the oldest dead letters, without removing them."""
        ...

    async def republish(self, headers: Mapping[str, str], body: bytes | None) -> None:
        """Send a message to the source's own queue, topic or stream; returns when it is confirmed.

        The body is `None` only if `look` returned such a dead letter.
        """
        ...

    async def remove(self, dead: DeadLetter) -> None:
        """Remove a dead letter."""
        ...

    async def close(self) -> None:
        """Close the connection."""
        ...


async def replay(
    queue: DeadLetterQueue, dead: DeadLetter, once: AsyncSemel, *, new_key: str | None = None
) -> None:
    """Replay a dead letter: forget its failure, publish the message again, and then remove the dead letter.

    After a crash in between it may be published twice, and the record stops the copy; it is never lost. Raises
    `UsageError` if a replay is wrong, with the alternative.
    """
    letter, headers = dead.letter, dead.original()
    if letter.body_at:
        raise UsageError(
            "the body was too large for the dead letters, so it was left out;"
            f" publish the message again from where it was: {letter.body_at}"
        )
    if new_key is not None:
        headers = {name: value for name, value in headers.items() if name.lower() not in _ID_HEADERS}
        headers["message_id"] = new_key
    elif letter.reason == "failed":
        await _forget_failure(letter, once)
    elif letter.reason == "late":
        headers[RUN_LATE] = "1"
    elif letter.reason == "unknown":
        record = await once.records.lookup(letter.key)
        if record is not None and record.state == "unknown":
            raise UsageError(
                f"the outcome of {letter.key!r} is unknown; decide first: semel resolve {letter.key}"
            )
    elif letter.reason == "mismatch":
        raise UsageError(f"{letter.key!r} was used before with another payload; replay it with a new key")
    elif letter.reason == "no-key":
        raise UsageError("the message has no key; replay it with a new key")
    await queue.republish(headers, dead.body)
    await queue.remove(dead)


_ID_HEADERS = {
    "idempotency-key",
    "nats-msg-id",
    "message_id",
    "message-id",
    "event_id",
    "event-id",
    "ce-id",
    "ce_id",
}


async def _forget_failure(letter: DeadLetterInfo, once: AsyncSemel) -> None:
    answer = await once.records.forget(letter.key, fence=letter.fence, state="failed")
    if isinstance(answer, Busy):
        raise UsageError(f"{letter.key!r} is running again; wait for its end")
    if isinstance(answer, Lost):
        record = await once.records.lookup(letter.key)
        found = "absent" if record is None else record.state
        raise UsageError(
            f"{letter.key!r} was settled after it was dead-lettered: its record is {found} with another fence;"
            " remove the letter, or replay it with a new key"
        )
