"""Format log records as one JSON object per line."""

import logging
from datetime import UTC, datetime
from typing import Any

import msgspec

__all__ = ["JsonFormatter", "about"]

_encode = msgspec.json.Encoder(enc_hook=repr).encode
_UNSAFE = {
    code: f"\\u{code:04x}"
    for code in (*range(0x7F, 0xA0), 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
}
"""Characters that JSON allows in strings, but that steer a terminal, break a line or reverse text: as JSON escapes."""


def about(event: str, **fields: Any) -> dict[str, Any]:
    """Return the argument `extra` of a log call: the event's name and its fields, for `JsonFormatter`."""
    return {"event": event, "semel": fields}


class JsonFormatter(logging.Formatter):
    """One JSON object per record: time, level, logger, message, the event and its fields, and a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        event = getattr(record, "event", None)
        if event is not None:
            line["event"] = event
            line.update(getattr(record, "semel", {}))
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            line.setdefault("error", f"{type(error).__name__}: {error}")
            line["traceback"] = self.formatException(record.exc_info)
        return _encode(line).decode().translate(_UNSAFE)
