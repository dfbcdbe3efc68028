"""Log hook events to the logger `semel`: duplicates as INFO, lost claims as WARNING."""

import logging
from typing import Literal, TypeAlias

from semel.core.ids import digest
from semel.observe import events

__all__ = ["KeysShown", "LogHook"]

KeysShown: TypeAlias = Literal["plain", "hashed", "hidden"]
"""How a key is logged: plain, as the first digits of its digest (the same for the same key), or not at all."""
HASH_DIGITS = 12

_LEVELS: dict[type[events.HookEvent], int] = {
    events.Received: logging.DEBUG,
    events.ClaimedEvent: logging.DEBUG,
    events.Began: logging.DEBUG,
    events.EndedEvent: logging.DEBUG,
    events.CompletedEvent: logging.DEBUG,
    events.MarkedEvent: logging.DEBUG,
    events.StoreSent: logging.DEBUG,
    events.Counted: logging.DEBUG,
    events.Duplicate: logging.INFO,
    events.BusyEvent: logging.INFO,
    events.Released: logging.INFO,
    events.PurgedEvent: logging.INFO,
    events.LateArrivalEvent: logging.WARNING,
    events.Dropped: logging.WARNING,
    events.Expired: logging.WARNING,
    events.Probed: logging.WARNING,
    events.Unguarded: logging.ERROR,
    events.LostEvent: logging.WARNING,
    events.Unreachable: logging.WARNING,
    events.StoreFailed: logging.WARNING,
    events.FailedEvent: logging.ERROR,
    events.DeadLettered: logging.ERROR,
    events.DeadLetterStuck: logging.ERROR,
    events.Quarantined: logging.ERROR,
    events.Unrecorded: logging.ERROR,
    events.StoreLost: logging.ERROR,
}
_SKIPPED = {"owner", "key", "origin", "stats", "meta"}
_NEXT: dict[type[events.HookEvent], str] = {
    events.FailedEvent: "it does not run again; duplicates get this failure",
    events.DeadLettered: "it stays with the dead letters until it is replayed or removed",
    events.DeadLetterStuck: "its message stays at the broker, and the write is tried again",
    events.Quarantined: "it waits for a decision: semel resolve, semel forget",
    events.LostEvent: "the other attempt's result counts; nothing was overwritten",
    events.Unrecorded: "a duplicate may run again",
    events.Unreachable: "nothing ran; let it be delivered again",
    events.StoreFailed: "callers wait or are refused until the store answers",
    events.Expired: "another worker may take over",
}
"""What happens after an event, for its line."""


class LogHook:
    """A hook that logs each event as one line, `name field=value ...`, with the fields in `extra` too.

    `keys`: how keys are shown. Values and payloads are never logged; of errors only their type and message are.
    """

    def __init__(self, logger: logging.Logger | None = None, *, keys: KeysShown = "plain") -> None:
        self._logger = logger or logging.getLogger("semel")
        self._keys = keys

    def __call__(self, happening: events.HookEvent) -> None:
        """Log the event if its level is enabled."""
        level = _LEVELS.get(type(happening), logging.DEBUG)
        if isinstance(happening, events.ClaimedEvent) and happening.attempt > 1:
            level = logging.INFO
        if not self._logger.isEnabledFor(level):
            return
        name = happening.name
        fields = self._fields(happening)
        if (after := _next(happening)) is not None:
            fields["next"] = after
        text = "".join(f" {field}={value}" for field, value in fields.items())
        self._logger.log(level, "%s%s", name, text, extra={"event": name, "semel": fields})

    def _fields(self, happening: events.HookEvent) -> dict[str, str]:
        fields: dict[str, str] = {}
        for field in happening.__struct_fields__:
            value = getattr(happening, field)
            if field in _SKIPPED or value in ("", None):
                continue
            if isinstance(value, BaseException):
                value = f"{type(value).__name__}({str(value)!r})"
            elif isinstance(value, float):
                value = f"{value:.6g}"
            elif isinstance(value, str) and not value.isprintable():
                value = ascii(value)
            fields[field] = str(value)
        if isinstance(happening, events.DeliveryEvent) and self._keys != "hidden":
            fields["key"] = self._shorten(happening)
        return fields

    def _shorten(self, event: events.DeliveryEvent) -> str:
        if self._keys == "hashed":
            return digest((event.tenant, event.consumer, event.key)).hex()[:HASH_DIGITS]
        return event.key if event.key.isprintable() else ascii(event.key)


def _next(happening: events.HookEvent) -> str | None:
    """Return what happens after an event; `None` if nothing has to be said."""
    if isinstance(happening, events.ClaimedEvent):
        return None if happening.attempt == 1 else f"attempt {happening.attempt} runs here"
    if isinstance(happening, events.Released):
        return f"it may run again in {happening.retry_after_s:g} s"
    return _NEXT.get(type(happening))
