"""Find the event in what a socket brings: JSON with an id that the producer chose."""

from typing import Any

import msgspec
from msgspec import Struct

from semel.errors import KeyInvalid, PolicyInvalid
from semel.intake import TYPE_BYTES_MAX, Event
from semel.keys.limits import check as check_key

__all__ = ["Fields", "Invalid"]

PARTS_MAX = 16
OTHER_ID = "event_id"
"""Read where an event has no `id` and no other path was chosen."""


class Invalid(Struct, frozen=True):
    """No event: nothing is claimed for it."""

    reason: str
    id: str | None = None


class Fields(Struct, frozen=True, kw_only=True):
    """Where the id and the type of an event are: paths such as `id` or `meta.id`.

    With the default, an event without `id` may say `event_id` instead.
    """

    id: str = "id"
    type: str = "type"

    def __post_init__(self) -> None:
        for path in (self.id, self.type):
            if not path or "" in path.split(".") or path.count(".") >= PARTS_MAX:
                raise PolicyInvalid(f"{path!r} is no path to a field; write id, or meta.id")

    def read(self, message: str | bytes, bytes_max: int) -> Event | Invalid:
        """The event in a message. Never raises for what is in it."""
        try:
            body = message.encode() if isinstance(message, str) else bytes(message)
            if len(body) > bytes_max:
                return Invalid(f"larger than {bytes_max} bytes")
            fields = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return Invalid("not JSON")
        if not isinstance(fields, dict):
            return Invalid("no JSON object")
        found = _at(fields, self.id)
        if found is None and self.id == "id":
            found = fields.get(OTHER_ID)
        if isinstance(found, int) and not isinstance(found, bool):
            found = str(found)
        if not isinstance(found, str):
            return Invalid(f"no id at {self.id!r}, and none is invented")
        try:
            key = check_key(found)
        except KeyInvalid as error:
            return Invalid(str(error))
        kind = _at(fields, self.type)
        kind = "" if kind is None else kind
        if not isinstance(kind, str) or not _is_short(kind):
            return Invalid(f"{self.type!r} is no short text", key)
        return Event(id=key, type=kind, body=body)


def _at(fields: Any, path: str) -> Any:
    for part in path.split("."):
        fields = fields.get(part) if isinstance(fields, dict) else None
    return fields


def _is_short(text: str) -> bool:
    return (not text or text.isprintable()) and len(text.encode(errors="replace")) <= TYPE_BYTES_MAX
