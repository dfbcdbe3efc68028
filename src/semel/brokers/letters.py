"""Dead letters on the wire: why a message was given up, as headers that every broker can carry."""

from collections.abc import Mapping
from urllib.parse import quote, unquote

from semel.brokers.source import DeadLetterInfo

__all__ = ["PREFIX", "headers_of", "letter_of"]

PREFIX = "semel-dead-"
STACK_CHARACTERS_MAX = 6000
_PRINTABLE = " !\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~"


def headers_of(letter: DeadLetterInfo) -> dict[str, str]:
    """The letter as headers: printable ASCII on one line each, everything else percent-encoded."""
    fields = {
        "reason": letter.reason,
        "consumer": letter.consumer,
        "key": letter.key,
        "fence": str(letter.fence),
        "attempts": str(letter.attempts),
        "error": letter.error[:STACK_CHARACTERS_MAX],
        "stack": letter.stack[-STACK_CHARACTERS_MAX:],  # the end says where it happened
        "body-at": letter.body_at,
    }
    return {PREFIX + name: quote(text, safe=_PRINTABLE) for name, text in fields.items() if text}


def letter_of(headers: Mapping[str, str]) -> DeadLetterInfo | None:
    """The letter that a dead message carries; `None` for a message that semel did not bury."""
    lower = {name.lower(): value for name, value in headers.items()}
    fields = {
        name: unquote(lower.get(PREFIX + name, ""))
        for name in ("reason", "consumer", "key", "error", "stack")
    }
    if not fields["reason"]:
        return None
    return DeadLetterInfo(
        **fields,
        body_at=unquote(lower.get(PREFIX + "body-at", "")),
        fence=int(lower.get(PREFIX + "fence", "0")),
        attempts=int(lower.get(PREFIX + "attempts", "0")),
    )
