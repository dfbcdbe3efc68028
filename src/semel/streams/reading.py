"""Read the key and the time of Kafka records."""

from collections.abc import Callable, Sequence
from datetime import datetime
from time import time_ns
from typing import Any, TypeAlias

from semel.errors import KeyInvalid, KeyMissing, MessageInvalid, UsageError
from semel.keys import Envelope, Identity, body
from semel.keys.extract import parse, walk
from semel.keys.message import HeaderIndex, as_key, json_body

__all__ = [
    "AHEAD_MAX_S",
    "BodyKey",
    "KeyOf",
    "TimeOfRecord",
    "key_reader",
    "now_us",
    "parse_time_us",
    "read_keys",
    "time_reader_for",
]

KeyOf: TypeAlias = Callable[[Any], str]
"""Takes a record of the Kafka client and returns its key; raises `KeyMissing` or `KeyInvalid`."""
TimeOfRecord: TypeAlias = Callable[[Any], int]
"""Takes a record and returns its time in microseconds since 1970; raises `MessageInvalid`."""

AHEAD_MAX_S = 3600.0
"""A time further ahead of the clock is wrong: it would make every later event late."""
HEADER = "header:"
RECORD_KEY = "record:key"
RECORD_TIME = "record:timestamp"
_UNITS = ((10**11, 10**6), (10**14, 10**3), (10**17, 1))
"""Below each bound a number since 1970 counts seconds, milliseconds, microseconds; above all of them nanoseconds."""


def now_us() -> int:
    """Return this computer's time."""
    return time_ns() // 1000


def key_reader(key: str | Callable[[Any], object] | None) -> KeyOf:
    """Return the function that reads keys.

    `key`: a path in the JSON body, `header:NAME`, `record:key`, or a function of the record. `None`: the id that
    producers put into headers, as `semel.keys.find` finds it.
    """
    if key is None:
        identity = Identity()
        return lambda record: identity(
            Envelope(headers=record.headers() or (), body=record.value() or b"", transport="kafka")
        )
    if not isinstance(key, str):
        return lambda record: as_key(key(record), f"the result of {key!r}")
    if key == RECORD_KEY:
        return lambda record: as_key(record.key(), "the record's own key")
    if key.startswith(HEADER):
        name = _header_name(key)
        return lambda record: as_key(HeaderIndex(record.headers() or ()).get(name), f"the header {name}")
    return BodyKey(key)


class BodyKey:
    """Reads the key from a field of the JSON body."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._field = body(path)

    def __call__(self, record: Any) -> str:
        """Return the key of a record."""
        value = record.value()
        if value is None:
            raise KeyMissing(
                f"the record has no value, so it has no {self._path!r}; read the key from {RECORD_KEY}"
            )
        return self._field(value)

    def of_values(self, values: Sequence[bytes]) -> list[str]:
        """Return the keys of the records with these values, at a fraction of the price."""
        return self._field.read_all(values)


def read_keys(key_of: KeyOf, records: Sequence[Any], values: Sequence[bytes]) -> list[str]:
    """Return the keys of many records, whose values are given too. Raises `KeyMissing` or `KeyInvalid` for any."""
    if isinstance(key_of, BodyKey):
        return key_of.of_values(values)
    return [key_of(record) for record in records]


def time_reader_for(time: str | None) -> TimeOfRecord | None:
    """Return the function that reads the event's own time; `None` if events are timed by their arrival.

    `time`: a path in the JSON body, `header:NAME`, or `record:timestamp`.
    """
    if time is None:
        return None
    if time == RECORD_TIME:
        return _check_times(lambda record: record.timestamp()[1], RECORD_TIME)
    if time.startswith(HEADER):
        name = _header_name(time)
        return _check_times(
            lambda record: HeaderIndex(record.headers() or ()).get(name), f"the header {name}"
        )
    segments = parse(time)
    return _check_times(lambda record: walk(json_body(record.value()), segments), f"{time!r} in the body")


def _check_times(read: Callable[[Any], object], where: str) -> TimeOfRecord:
    def read_checked(record: Any) -> int:
        try:
            at_us = parse_time_us(read(record))
        except (KeyMissing, KeyInvalid, ValueError, OverflowError) as error:
            raise MessageInvalid(f"{where} is no time: {error}") from error
        if at_us > now_us() + AHEAD_MAX_S * 10**6:
            raise MessageInvalid(
                f"{where} is more than {AHEAD_MAX_S / 3600:g} h ahead of this computer's clock"
            )
        return at_us

    return read_checked


def parse_time_us(value: object) -> int:
    """Microseconds since 1970 of ISO 8601 with a time zone, or a number of s, ms, us or ns since 1970.

    Raises `ValueError`.
    """
    if isinstance(value, bool) or value is None:
        raise ValueError(f"{value!r} is neither ISO 8601 nor a number since 1970")
    if isinstance(value, str) and not value.strip().lstrip("-").replace(".", "", 1).isdecimal():
        moment = datetime.fromisoformat(value)
        if moment.tzinfo is None:
            raise ValueError(f"the time {value} has no time zone")
        return round(moment.timestamp() * 10**6)
    number = float(value) if isinstance(value, str) else value
    if not isinstance(number, int | float) and not hasattr(number, "as_tuple"):
        raise ValueError(f"{value!r} is neither ISO 8601 nor a number since 1970")
    number = float(number)  # type: ignore[arg-type]
    if not 0 < number < 10**20:
        raise ValueError(f"{value!r} is no time since 1970")
    for bound, factor in _UNITS:
        if number < bound:
            return round(number * factor)
    return round(number / 1000)


def _header_name(spec: str) -> str:
    name = spec.removeprefix(HEADER)
    if not name:
        raise UsageError(f"{spec!r} names no header; write it like header:message_id")
    return name
