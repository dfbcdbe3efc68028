"""Dead letters: look at them, and put them back where they came from."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from semel.aclient import AsyncSemel
from semel.brokers.letters import PREFIX, letter_of
from semel.brokers.source import DeadLetterInfo
from semel.errors import UsageError
from semel.types import Busy, Lost

__all__ = ["RUN_LATE", "DeadLetter", "DeadLetterQueue", "replay"]

RUN_LATE = "semel-run-late"
"""The header of a late message that somebody decided to run all the same."""


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """A message at the dead-letter destination."""

    id: str
    """By which the broker knows it."""
    headers: Mapping[str, str]
    body: bytes
    letter: DeadLetterInfo

    @classmethod
    def found(cls, id_: str, headers: Mapping[str, str], body: bytes) -> "DeadLetter":
        """What a broker returned; one that semel did not bury has an empty letter."""
        return cls(
            id=id_, headers=headers, body=body, letter=letter_of(headers) or DeadLetterInfo(reason="", consumer="")
        )

    def original(self) -> dict[str, str]:
        """The headers as the producer sent them."""
        return {name: value for name, value in self.headers.items() if not name.lower().startswith(PREFIX)}


class DeadLetterQueue(Protocol):
    """Where a source buries its dead."""

    async def look(self, limit: int) -> Sequence[DeadLetter]:
        """The oldest dead letters; they stay where they are."""
        ...

    async def republish(self, headers: Mapping[str, str], body: bytes) -> None:
        """Send a message to the source's own queue, topic or stream; returns when it is confirmed."""
        ...

    async def remove(self, dead: DeadLetter) -> None:
        """Take a dead letter away."""
        ...

    async def close(self) -> None:
        """Let go of the connection."""
        ...


async def replay(graveyard: DeadLetterQueue, dead: DeadLetter, once: AsyncSemel, *, new_key: str | None = None) -> None:
    """Let a dead message run again: forget its failure, publish it anew, and only then remove the letter.

    Killed in between it may be published twice, which the consumer's record absorbs; it is never lost. Raises
    `UsageError` where that would be wrong, with what to do instead.
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
                f"nobody knows whether {letter.key!r} happened; decide first: semel resolve {letter.key}"
            )
    elif letter.reason == "mismatch":
        raise UsageError(f"{letter.key!r} was used before with another payload; replay it with a new key")
    elif letter.reason == "no-key":
        raise UsageError("the message has no key; replay it with a new key")
    await graveyard.republish(headers, dead.body)
    await graveyard.remove(dead)


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
            f"{letter.key!r} was dealt with since it was buried: its record is {found} with another fence;"
            " remove the letter, or replay it with a new key"
        )
