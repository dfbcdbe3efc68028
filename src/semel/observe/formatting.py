"""Records as people and programs read them: rows, pages and JSON documents."""

import re
import time
from datetime import datetime
from typing import Any

import msgspec

from semel.codec import decode, decode_error, reason_in
from semel.errors import RecordCorrupt
from semel.observe.packed_limits import check_packed
from semel.runtime.audit import is_damaged
from semel.types import FOREVER, AttemptError, Record
from semel.windows import exact_text, is_endless

__all__ = [
    "SCREEN_HEADERS",
    "document",
    "duration_text",
    "error_of",
    "exact_text",
    "last_error",
    "lines",
    "local_time",
    "now_us",
    "plural",
    "readable",
    "redact",
    "row",
    "screen_row",
    "summary",
]

SCREEN_HEADERS = ("KEY", "CONSUMER", "STATE", "TRY", "FIRST SEEN", "AGE", "EXPIRES", "TENANT", "LAST ERROR")
_PASSWORD = re.compile(r"(://[^\s/@:?#'\"]*:)(?:(?!://)[^\s'\"?#])*@")
"""Matches up to the last `@` before a query, because passwords may contain unescaped `@` and `/`."""
_SECRET_OPTION = re.compile(
    r"((?:[?&]|%26|%3F)[\w.-]*(?:password|passwd|pwd|secret|token|(?:api|access|account|shared)_?key|signature|sig|credential)=)[^\s&#'\"]+",
    re.IGNORECASE,
)
"""`%26` is the separator in a nested URL."""
_UNITS = (("d", 86400 * 10**6), ("h", 3600 * 10**6), ("m", 60 * 10**6), ("s", 10**6), ("ms", 1000), ("us", 1))
TEXT_CHARS_MAX = 2000
"""A longer value is cut on the screen; `--json` has all of it."""
SHORT_CHARS_MAX = 80
"""The length of an error in a list."""


def redact(text: str) -> str:
    """Replace the passwords in the text's URLs by `***`."""
    return _SECRET_OPTION.sub(r"\1***", _PASSWORD.sub(r"\1***@", text))


def plural(number: int, one: str, many: str = "") -> str:
    """So many things: `1 line`, `2 lines`; `many` where an `s` at the end is not enough: `1 key was`, `2 keys were`."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def local_time(at_us: int, timespec: str = "milliseconds") -> str:
    """Format an instant of the store's clock as local ISO time."""
    try:
        return datetime.fromtimestamp(at_us / 1e6).astimezone().isoformat(timespec=timespec)
    except (OverflowError, OSError, ValueError):
        return f"{at_us}us"


def duration_text(us: int) -> str:
    """Format a duration in its two largest units: `24h`, `1d2h`, `1m30s`, `250ms`."""
    parts: list[str] = []
    sign, left = "-" if us < 0 else "", abs(us)
    for unit, size in _UNITS:
        if left >= size and (not parts or unit not in ("ms", "us")):
            parts.append(f"{left // size}{unit}")
            left %= size
        if len(parts) == 2:  # noqa: PLR2004 - two units say enough
            break
    return sign + "".join(parts) if parts else "0s"


def now_us() -> int:
    """This computer's clock, for ages only; decisions use the store's clock."""
    return time.time_ns() // 1000


def readable(encoded: bytes | None) -> tuple[Any, str]:
    """Return a stored value and its form: `json`, `repr`, `not_kept` or `undecodable`.

    The value is untrusted: it is decoded only if that is quick, and shown as text if JSON cannot express it.
    """
    if encoded is None or encoded[:1] == b"x":
        return None, "not_kept"
    try:
        if encoded[:1] in (b"m", b"p"):
            check_packed(encoded[1:])
        value = decode(encoded)
        if encoded[:1] in (b"j", b"o"):
            return value, "json"
        if encoded[:1] == b"p":
            plain = msgspec.to_builtins(value, str_keys=True)
            msgspec.json.encode(plain)
            return plain, "json"
        return repr(value), "repr"
    except (
        RecordCorrupt,
        msgspec.MsgspecError,
        ValueError,
        TypeError,
        OverflowError,
        RecursionError,
    ) as error:
        return str(error), "undecodable"


def value_text(encoded: bytes | None) -> str:
    """A stored value for the screen."""
    value, form = readable(encoded)
    if form == "not_kept":
        return f"(not kept: {reason})" if (reason := reason_in(encoded)) else "(not kept)"
    if form == "undecodable":
        return f"(cannot be shown: {value})"
    text = msgspec.json.encode(value).decode() if form == "json" else str(value)
    return text if len(text) <= TEXT_CHARS_MAX else f"{text[:TEXT_CHARS_MAX]}... ({len(text)} characters)"


def claim_of(record: Record, now: int) -> str | None:
    """Return the state of a claim: `running`, `released`, or `over` (its lease ended)."""
    if record.state != "claimed":
        return None
    if not record.owner:
        return "released"
    return "running" if record.lease_until_us > now else "over"


def summary(record: Record, now: int) -> dict[str, Any]:
    """The fields that `list --json` and `show --json` share."""
    return {
        "key": record.key,
        "consumer": record.consumer,
        "tenant": record.tenant,
        "state": record.state,
        "claim": claim_of(record, now),
        **({"damaged": True} if is_damaged(record) else {}),
        "attempt": record.attempt,
        "fence": record.fence,
        "event_type": record.event_type or None,
        "first_seen": _instant(record.first_seen_us),
        "age_s": round((now - record.first_seen_us) / 1e6, 3) if record.first_seen_us else None,
        "settled_at": _instant(record.settled_at_us),
        "lease_until": _instant(record.lease_until_us) if record.state == "claimed" else None,
        "expires_at": _expiry(record, now),
        "last_error": last_error(record) or None,
    }


def last_error(record: Record) -> str:
    """Return the last kept error on one short line; empty if there is none."""
    if not record.errors:
        return ""
    error = record.errors[-1]
    text = " ".join(f"{error.kind.removeprefix('builtins.')}: {error.message}".split())
    return text if len(text) <= SHORT_CHARS_MAX else text[: SHORT_CHARS_MAX - 1] + "…"


def _error_document(error: AttemptError) -> dict[str, Any]:
    return {
        "attempt": error.attempt,
        "kind": error.kind,
        "message": error.message,
        "traceback": error.traceback,
        "worker": error.worker,
        "at": _instant(error.at_us),
    }


def _error_text(error: AttemptError, now: int) -> str:
    """Return a kept error for the screen: what it was, when and where, and the places in the code."""
    where = f", worker {error.worker}" if error.worker else ""
    told = [f"{error.kind}: {error.message}", _moment(error.at_us, now) + where, error.traceback]
    return "\n".join(text for text in told if text)


def document(record: Record, now: int) -> dict[str, Any]:
    """Return all fields of a record, for `show --json`."""
    shown = summary(record, now)
    value, form = (None, "none") if record.state in ("claimed", "unknown") else readable(record.value)
    if record.state == "failed":
        value, form, shown["error"] = None, "none", error_of(record.value)
    journal, journal_form = (None, "none") if record.journal is None else readable(record.journal)
    return {
        **shown,
        "value": value,
        "value_form": form,
        "error": shown.get("error"),
        "errors": [_error_document(each) for each in record.errors],
        "owner": record.owner.hex() or None,
        "fingerprint": record.fingerprint.hex() if record.fingerprint else None,
        "quarantine": record.quarantine,
        "sliding": record.sliding,
        "event_time": None if record.anchor_us is None else _instant(record.anchor_us),
        "steps": [
            {"name": name, "value": shown_step, "value_form": step_form}
            for name, kept in record.steps
            for shown_step, step_form in (readable(kept),)
        ],
        "journal": journal,
        "journal_form": journal_form,
        "meta": _meta(record.meta),
    }


def row(record: Record, now: int) -> tuple[str, ...]:
    """One line of `list`."""
    return (
        record.key,
        record.consumer,
        _state(record, now),
        str(record.attempt),
        local_time(record.first_seen_us, "seconds") if record.first_seen_us else "-",
        duration_text(now - record.first_seen_us) if record.first_seen_us else "-",
        _rest_text(record, now),
        record.tenant,
        last_error(record),
    )


def screen_row(record: Record, now: int, *, wide: bool) -> tuple[str, ...]:
    """Return one line of `list` on a terminal: the state in one word.

    If it is narrow, it has the age instead of both times, and of the error only its class.
    """
    key, consumer, _, attempt, _, *rest, error = row(record, now)
    if error and not wide:
        error = record.errors[-1].kind.rpartition(".")[2]
    seen = ""
    if wide and record.first_seen_us:
        seen = local_time(record.first_seen_us, "seconds")[:19].replace("T", " ")
    state = "damaged" if is_damaged(record) else claim_of(record, now) or record.state
    return (key, consumer, state, attempt, seen, *rest, error)


def lines(record: Record, now: int) -> list[tuple[str, str]]:
    """Return all fields of a record for `show`, each with name and text; empty ones are left out."""
    shown = [
        ("key", record.key),
        ("tenant", record.tenant),
        ("consumer", record.consumer),
        ("state", _state(record, now)),
        ("type", record.event_type),
        ("attempt", str(record.attempt)),
        ("fence", str(record.fence)),
        ("first seen", _moment(record.first_seen_us, now)),
        ("event time", "" if record.anchor_us is None else _moment(record.anchor_us, now)),
        ("settled", _moment(record.settled_at_us, now)),
        ("lease until", _moment(record.lease_until_us, now) if record.state == "claimed" else ""),
        ("expires", _expiry_text(record, now)),
        ("fingerprint", record.fingerprint.hex() if record.fingerprint else ""),
    ]
    if record.state == "failed":
        error = error_of(record.value)
        shown.append(("error", f"{error['kind']}: {error['message']}"))
    elif record.state == "done":
        shown.append(("value", value_text(record.value)))
    shown += [(f"error of {each.attempt}", _error_text(each, now)) for each in record.errors]
    shown += [(f"step {name}", value_text(kept)) for name, kept in record.steps]
    if record.journal is not None:
        shown.append(("journal", value_text(record.journal)))
    shown += [(f"meta {name}", str(value)) for name, value in (_meta(record.meta) or {}).items()]
    return [(name, text) for name, text in shown if text]


def _expiry(record: Record, now: int) -> str | None:
    """When it expires: an instant, `forever`, or `None` if only a decision ends it."""
    if record.expires_at_us == FOREVER:
        return None
    return "forever" if is_endless(record.expires_at_us - now) else _instant(record.expires_at_us)


def _rest_text(record: Record, now: int) -> str:
    if record.expires_at_us == FOREVER:
        return "never"
    left_us = record.expires_at_us - now
    return "forever" if is_endless(left_us) else duration_text(left_us)


def _expiry_text(record: Record, now: int) -> str:
    if record.expires_at_us == FOREVER:
        return "never: it stays until it is resolved"
    if is_endless(record.expires_at_us - now):
        return "forever: it stays until somebody forgets it"
    return _moment(record.expires_at_us, now)


def _state(record: Record, now: int) -> str:
    if is_damaged(record):
        return f"{record.state} (damaged)"
    claim = claim_of(record, now)
    return record.state if claim is None else f"{record.state} ({claim})"


def _moment(at_us: int, now: int) -> str:
    if not at_us:
        return ""
    ago = now - at_us
    return (
        f"{local_time(at_us)} ({duration_text(ago)} ago)"
        if ago >= 0
        else f"{local_time(at_us)} (in {duration_text(-ago)})"
    )


def _instant(at_us: int) -> str | None:
    if not at_us:
        return None
    try:
        return datetime.fromtimestamp(at_us / 1e6).astimezone().isoformat(timespec="microseconds")
    except (OverflowError, OSError, ValueError):
        return None


def error_of(encoded: bytes | None) -> dict[str, str]:
    """Return the kind and the message of a stored failure."""
    try:
        failure = decode_error(encoded)
    except RecordCorrupt as error:
        return {"kind": "undecodable", "message": str(error)}
    return {"kind": failure.kind, "message": failure.message}


def _meta(encoded: bytes | None) -> dict[str, Any] | None:
    if encoded is None:
        return None
    try:
        decoded = msgspec.json.decode(encoded)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return {"undecodable": repr(encoded)}
    return decoded if isinstance(decoded, dict) else {"undecodable": repr(encoded)}
