"""Carry out the items that are not about one record: scan, purge, count, windows and modes."""

from typing import Any, get_args

from semel.core.commands import (
    Admit,
    Count,
    Item,
    Purge,
    Purged,
    ReadSettings,
    Scan,
    SetWindow,
    StoreSettings,
    SwitchMode,
)
from semel.core.ids import DIGEST_BYTES
from semel.core.machine import UNFINISHED, counted_state
from semel.errors import KeyInvalid, RecordCorrupt
from semel.stores.admin_rules import item_unknown, window_in_force
from semel.stores.redis import encoding
from semel.stores.redis import records as layout
from semel.stores.redis.calls import CallPart, RedisCall, Steps
from semel.stores.redis.counting import count
from semel.stores.redis.exchange import RedisExchange
from semel.stores.redis.listing import (
    all_keys,
    ask,
    is_record,
    orphans,
    outlines,
    outlines_not_done,
    pairs,
    scan,
    slices,
    time_of,
)
from semel.types import Mode, Unavailable

MODES: tuple[Mode, ...] = get_args(Mode)


def carry_out(x: RedisExchange, item: Item, now: bytes) -> Steps:
    """Answer one of these items."""
    try:
        match item:
            case Scan(orphaned=True):
                return (yield from orphans(x, item, now))
            case Scan():
                return (yield from scan(x, item, now))
            case Count():
                return (yield from count(x, item, now))
            case Purge():
                return (yield from purge(x, item, now))
            case ReadSettings():
                return (yield from read_settings(x))
            case SetWindow():
                return (yield from set_window(x, item, now))
            case Admit():
                return (yield from admit(x, item))
            case SwitchMode():
                return (yield from switch_mode(x, item, now))
            case _:
                raise item_unknown(item)
    except UnicodeEncodeError as error:
        return Unavailable(KeyInvalid(f"a name is not valid text: {error}"))


def purge(x: RedisExchange, item: Purge, now: bytes) -> Steps:
    """Clean the lists of journaled claims; the server itself removes expired records."""
    at = yield from time_of(x, now)
    if item.dry_run:
        return Purged(0)
    limit = max(1, item.limit // encoding.BUCKETS)
    replies = yield from ask(
        x,
        *(
            RedisCall([b"ZRANGEBYSCORE", key, b"-inf", at, b"LIMIT", 0, limit], bucket=bucket)
            for bucket, key in enumerate(x.layout.journals)
        ),
    )
    parts = []
    for bucket, digests in enumerate(replies):
        if digests:
            keys = [x.layout.records[bucket] + each for each in digests]
            parts.append(
                CallPart("end", list(range(len(keys))), [item] * len(keys), keys, [b"P"] * len(keys), bucket)
            )
    for part in parts:
        yield from x.ask_all([part], [None] * len(part.keys), now)
    return Purged(0)


# --- windows and modes --------------------------------------------------------------------------


def read_settings(x: RedisExchange) -> Steps:
    """Return all windows and modes."""
    windows, modes = yield from ask(
        x, RedisCall([b"HGETALL", x.layout.windows]), RedisCall([b"HGETALL", x.layout.modes])
    )
    recorded = {layout.id_of(name, b"")[:2]: _parse_mode(each) for name, each in pairs(modes)}
    return StoreSettings(
        {layout.id_of(name, b""): int(window_us) for name, window_us in pairs(windows)},
        {scope: mode for scope, (mode, _) in recorded.items()},
        {scope: ids for scope, (_, ids) in recorded.items() if ids},
    )


def _parse_mode(stored: bytes) -> tuple[Mode, str]:
    """Parse a consumer's stored mode and, after a space, the kind of its ids if it declared one."""
    mode, _, ids = stored.partition(b" ")
    return _mode(mode), ids.decode()


def _mode(stored: bytes) -> Mode:
    for mode in MODES:
        if stored == mode.encode():
            return mode
    raise RecordCorrupt(f"a consumer is recorded with the mode {stored!r}, which does not exist")


def set_window(x: RedisExchange, item: SetWindow, now: bytes) -> Steps:
    """Store or remove a window; with `existing`, also move the expiry of settled records that have not expired."""
    field = encoding.scope_name(item.tenant, item.consumer) + item.event_type.encode()
    if item.window_us is None:
        yield from ask(x, RedisCall([b"HDEL", x.layout.windows, field]))
        return None
    yield from ask(x, RedisCall([b"HSET", x.layout.windows, field, item.window_us]))
    if item.existing:
        yield from _move_existing(x, item, item.window_us, now)
    return None


def _move_existing(x: RedisExchange, item: SetWindow, window_us: int, now: bytes) -> Steps:
    at = yield from time_of(x, now)
    windows = (yield from read_settings(x)).windows
    name = (item.tenant, item.consumer, item.event_type)
    keys = [key for key in (yield from all_keys(x)) if is_record(x, key)]
    for some in slices(keys):
        moved: dict[int, CallPart] = {}
        for key, record in (yield from outlines(x, some, at)):
            in_force = window_in_force(windows, *record.id[:2], record.event_type)
            if name == in_force and record.state in ("done", "failed"):
                bucket = key[-DIGEST_BYTES] & 63
                part = moved.setdefault(bucket, CallPart("end", [], [], [], [], bucket))
                part.places.append(len(part.places))
                part.items.append(item)  # type: ignore[attr-defined]  # created as a list above
                part.keys.append(key)
                part.args.append(encoding.rewindow(window_us))
        for part in moved.values():
            answers: list[Any] = [None] * len(part.keys)
            yield from x.ask_all([part], answers, now)
            for answer in answers:
                if isinstance(answer, Unavailable):
                    raise answer.error


def admit(x: RedisExchange, item: Admit) -> Steps:
    """Return the consumer's mode; records it now if there is none."""
    field = encoding.scope_name(item.tenant, item.consumer)
    mine = f"{item.mode} {item.ids}".rstrip().encode()
    replies = yield from ask(
        x, RedisCall([b"HSETNX", x.layout.modes, field, mine]), RedisCall([b"HGET", x.layout.modes, field])
    )
    return _parse_mode(replies[1])[0]


def switch_mode(x: RedisExchange, item: SwitchMode, now: bytes) -> Steps:
    """Change the mode, unless there are unfinished records; returns their number. A full scan."""
    at = yield from time_of(x, now)
    scope = (item.tenant, item.consumer)
    keys = [key for key in (yield from all_keys(x)) if is_record(x, key)]
    unfinished = 0
    for _, record in (yield from outlines_not_done(x, keys, at))[0]:
        unfinished += record.id[:2] == scope and counted_state(record) in UNFINISHED
    if not unfinished:
        field = encoding.scope_name(*scope)
        (stored,) = yield from ask(x, RedisCall([b"HGET", x.layout.modes, field]))
        ids = "" if stored is None else _parse_mode(stored)[1]
        switched = f"{item.mode} {ids}".rstrip().encode()
        yield from ask(x, RedisCall([b"HSET", x.layout.modes, field, switched]))
    return unfinished
