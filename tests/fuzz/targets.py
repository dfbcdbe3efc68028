"""Every parser of bytes from outside, as a function of bytes: it returns, or raises an error that says so.

Hypothesis calls them in `make test`; `python -m tests.fuzz.guided NAME` lets atheris choose the bytes by coverage.
"""

import tempfile
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from semel.brokers.source import decode_body, expand_headers, source_for
from semel.cli.output import CommandExit
from semel.cli.settings import TABLES, CliSettings, load
from semel.codec import decode, decode_error, reason_in
from semel.core import machine
from semel.core.ids import KINDS, check_kind, time_in
from semel.errors import KeyInvalid, KeyMissing, RecordCorrupt, SemelError, ValueNotKept
from semel.http.rules import read as read_key
from semel.ingest import webhooks
from semel.keys import extract, identity, limits
from semel.keys.message import Envelope
from semel.observe import advise, history
from semel.outbox.sinks import sink_for
from semel.stores.http import encoding as wire
from semel.stores.postgres import encoding as postgres
from semel.stores.redis import records as redis
from semel.stores.redis.server_checks import parse_info
from semel.stores.registry import store_for
from semel.stores.sqlite import encoding as sqlite
from semel.windows import duration_us, window_us

Target = Callable[[bytes], None]
ID = ("tenant", "consumer", "key")
NOW_US = 1_800_000_000_000_000


def text_of(data: bytes) -> str:
    """Any text, lone surrogates too."""
    return data.decode("utf-8", "surrogateescape")


def headers_of(data: bytes) -> tuple[dict[str, str], bytes]:
    """Headers from the first lines, `name: value`, and the rest as the body."""
    head, _, body = data.partition(b"\n\n")
    lines = [line.partition(":") for line in text_of(head).split("\n")]
    return {name: value.strip() for name, _, value in lines}, body


def numbers_of(data: bytes) -> list[Any]:
    """Values that a column may hold, whatever its type should be: from MessagePack."""
    try:
        found = msgspec.msgpack.decode(data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return []
    return found if isinstance(found, list) else []


# --- keys ---


def key(data: bytes) -> None:
    for check in (limits.check, limits.check_consumer, limits.check_namespace):
        with suppress(KeyInvalid):
            assert check(text_of(data)) == text_of(data)


def key_path(data: bytes) -> None:
    path, _, body = data.partition(b"\n")
    with suppress(KeyInvalid, KeyMissing):
        extract.body(text_of(path))(Envelope(body=body))


def key_field(data: bytes) -> None:
    for strict in (False, True):
        with suppress(ValueError):  # KeyInvalid is one
            assert isinstance(read_key(data.split(b"\n"), strict=strict), str)


def key_time(data: bytes) -> None:
    for kind in (*KINDS, "snowflake:1288834974657"):
        with suppress(KeyInvalid):
            assert isinstance(time_in(kind, text_of(data)), int)
    with suppress(SemelError):
        check_kind(text_of(data))


def durations(data: bytes) -> None:
    for read in (duration_us, window_us):
        with suppress(SemelError):
            assert read(text_of(data)) >= 0


# --- events ---


def cloud_event(data: bytes) -> None:
    headers, body = headers_of(data)
    message = Envelope(headers=headers, body=body)
    for find in (identity.cloudevent(), identity.find):
        with suppress(KeyInvalid, KeyMissing):
            find(message)
    with suppress(ValueError):
        identity.instant(text_of(data))


def webhook(data: bytes) -> None:
    headers, body = headers_of(data)
    now_s = 1_800_000_000.0
    secret = "a-rather-plain-secret"
    given = {**headers, **{name.title(): value for name, value in headers.items()}}
    for scheme in (webhooks.stripe, webhooks.github, webhooks.shopify, webhooks.slack):
        assert isinstance(scheme(secret).verify(given, body, now_s), webhooks.WebhookRefused)


def message(data: bytes) -> None:
    headers, body = headers_of(data)
    expand_headers(headers)
    for encoding in (None, "base64", text_of(body[:8])):
        with suppress(ValueError):
            assert isinstance(decode_body(text_of(body), encoding), bytes)


# --- stored and sent records ---


def value(data: bytes) -> None:
    for read in (lambda: decode(data, None), lambda: decode_error(data)):
        with suppress(RecordCorrupt, ValueNotKept):
            read()
    reason_in(data)


def redis_record(data: bytes) -> None:
    with suppress(RecordCorrupt):
        machine.check(redis.unpack(data, ID))
    with suppress(RecordCorrupt):
        redis.unpack_known(data, ID, NOW_US)
    with suppress(RecordCorrupt):
        redis.outline(data, bytes(16))


def redis_info(data: bytes) -> None:
    assert isinstance(parse_info(data), dict)


def sqlite_row(data: bytes) -> None:
    columns = (numbers_of(data) + [None] * 20)[:20]
    with suppress(RecordCorrupt):
        machine.check(sqlite.from_row(tuple(columns[:15]), ID, *columns[15:]))


def postgres_row(data: bytes) -> None:
    columns = (numbers_of(data) + [None] * 18)[:18]
    with suppress(RecordCorrupt):
        machine.check(postgres.from_row(tuple(columns), ID))


def http_items(data: bytes) -> None:
    for packed in (False, True):
        for read in (wire.items_from, wire.answers_from):
            with suppress(msgspec.MsgspecError, UnicodeError, SemelError):
                read(data, packed=packed)


# --- files and addresses ---


def history_lines(data: bytes) -> None:
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        file.write(data)
        file.flush()
        assert all(line.at_us >= 0 for line in history.read(file.name, since_us=1))


def metrics(data: bytes) -> None:
    with suppress(SemelError):
        advise.from_metrics(text_of(data))


def settings(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "semel.toml"
        path.write_bytes(data)
        models: tuple[Any, ...] = (CliSettings, *TABLES)
        for model in models:
            with suppress(CommandExit):
                load(model, {}, path)


def store_url(data: bytes) -> None:
    with suppress(SemelError, ImportError):
        store_for(text_of(data))


def source_url(data: bytes) -> None:
    with suppress(SemelError, ImportError):
        source_for(text_of(data))


def sink_url(data: bytes) -> None:
    with suppress(SemelError, ImportError):
        sink_for(text_of(data))


def _line(**more: Any) -> bytes:
    return msgspec.json.encode({"at": datetime(2026, 1, 1, tzinfo=UTC).isoformat(), **more})


TARGETS: dict[str, tuple[Target, list[bytes]]] = {
    "key": (key, [b"evt_1", b"\x00", b"\xed\xa0\x80", b"x" * 600]),
    "key path": (key_path, [b"a.b\n" + b'{"a": {"b": 1}}', b"a..b\n{}", b"a\n[", b"a\n" + b"[" * 5000]),
    "key field": (key_field, [b'"k1"', b"k1", b'"a\\"b";p=1', b'"a"\n"b"', b'"\xc3\xbc"']),
    "key time": (
        key_time,
        [b"01989c2e-2f4b-7c31-9a52-0f6a7d1c2b3e", b"01ARZ3NDEKTSV4RRFFQ69G5FAV", b"1541815603606036480"],
    ),
    "duration": (durations, [b"24h", b"1.5s", b"-1s", b"1e400s", b"9" * 5000, "\u0661s".encode()]),
    "CloudEvent": (
        cloud_event,
        [
            b"ce-id: 1\nce-source: /a\nce-specversion: 1.0\n\n{}",
            b'content-type: application/cloudevents+json\n\n{"id": "1", "source": "/a", "specversion": "1.0"}',
            b"ce-id: %ff\nce-source: %\n\n",
            b"2026-01-01T00:00:00Z",
            b"202002000002020000020",
            b"9" * 400,
        ],
    ),
    "webhook": (
        webhook,
        [
            b"stripe-signature: t=1800000000,v1=00\n\n{}",
            b"x-hub-signature-256: sha256=zz\nx-github-delivery: 1\n\n{}",
            b"x-slack-signature: v0=00\nx-slack-request-timestamp: 1800000000\n\n{}",
        ],
    ),
    "message": (message, [b"a: {}\n\nbase64", b'h: {"a": 1}\n\nYQ==', b"a: 1\n\n\xff"]),
    "value": (value, [b"jnull", b"m\x81\x01\x02", b"p\x91\xc0", b"xno", b"o[[[", b"r{}"]),
    "Redis record": (redis_record, [b"\1\0\1" + b"\xff" * 40, b"\1" + bytes(60), bytes(30)]),
    "Redis INFO": (redis_info, [b"# Server\r\nredis_version:7.0\r\n", b":\xff:\r\n"]),
    "SQLite row": (sqlite_row, [msgspec.msgpack.encode([None, None, 0, b"o" * 16, 1, 0, 1, 5, None, 9])]),
    "PostgreSQL row": (postgres_row, [msgspec.msgpack.encode([b"", 0, b"o" * 16, 1, 1, 1, 5, None, 9])]),
    "items of HTTP": (
        http_items,
        [b'[{"type": "lookup", "id": ["", "c", "k"]}]', b"[]", b"\x90", b"[" * 5000],
    ),
    "history": (history_lines, [_line(), _line() + b"\n{", b"\xff\n\n"]),
    "metrics": (metrics, [b'semel_runs_total{consumer="a"} 1\n', b'a{b="\\', b"# HELP"]),
    "TOML": (
        settings,
        [b'store = "memory://"', b"window = true", b"serve = 1", b"[serve]\nport = 'x'", b"\xff"],
    ),
    "store URL": (
        store_url,
        [
            b"redis://h:1/0?x=1",
            b"postgresql://[::1",
            b"postgresql:/\xff\xff::1",
            b"http://h",
            b"sqlite:///%ff",
            b"memory://?a",
            b"tiered:",
        ],
    ),
    "source URL": (
        source_url,
        [b"kafka://h:9/t?group=g", b"nats://h/s", b"sqs://q", b"amqp://h/%ff", b"redis://"],
    ),
    "sink URL": (sink_url, [b"kafka://h:9/t", b"https://h/x", b"redis://h/0/s", b"amqp://["]),
}
"""By name: the parser, and inputs to begin with."""
