"""Carry out the items that are not about one record: scan, purge, count, windows and modes."""

import re
from collections.abc import Generator, Iterable
from typing import Any, get_args

from semel.core.backoff import backoff_s
from semel.core.commands import (
    Admit,
    Count,
    Item,
    Page,
    Purge,
    Purged,
    ReadSettings,
    Scan,
    SetWindow,
    StoreSettings,
    SwitchMode,
)
from semel.core.ids import DIGEST_BYTES
from semel.core.machine import UNFINISHED, counted_state, fits, standing
from semel.errors import KeyInvalid, RecordCorrupt
from semel.stores.admin_rules import StatsCounter, cursor_refused, item_unknown, window_in_force
from semel.stores.redis import encoding
from semel.stores.redis import records as layout
from semel.stores.redis.calls import CallPart, Nodes, RedisCall, RedisPause, RedisQuery, Refresh, Steps
from semel.stores.redis.errors import kind_of, other_node, to_store_error
from semel.stores.redis.exchange import PAUSE_FIRST_S, PAUSE_MAX_S, RedisExchange
from semel.types import Mode, Record, Unavailable

SCAN_COUNT = 1000
"""Keys that one SCAN command visits."""
OUTLINE_BYTES = 4096
"""How much of a record is read to see whether it matches: its name and its times, not its payloads."""
ORPHANS_MAX = 1000
"""The most journaled claims of one bucket in one sweep."""
SORTED_MAX = 50_000
"""Up to this many keys a listing has one order for all page sizes; with more, the order of the server's SCAN."""
SCANS_PER_PAGE = 200
"""The most SCAN commands for one page; a page may then hold fewer records than its limit and still have a next."""

MODES: tuple[Mode, ...] = get_args(Mode)

_SCAN_CURSOR = re.compile(r"s(\d{1,9})\.(\d{1,20})\.([0-9a-f-]*)", re.ASCII)


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


# --- calls --------------------------------------------------------------------------------------


def ask(x: RedisExchange, *calls: RedisCall) -> Steps:
    """Return the replies. Raises the first error among them that is left after retries."""
    replies = yield from collect_replies(x, *calls)
    for reply in replies:
        if isinstance(reply, Exception):
            raise to_store_error(reply, x.name) from reply
    return replies


def collect_replies(x: RedisExchange, *calls: RedisCall) -> Generator[Any, Any, list[Any]]:
    """Return a reply or an error for each call. Follows redirections, and retries while a server cannot answer.

    All calls of this module are safe to repeat.
    """
    replies: list[Any] = [None] * len(calls)
    left = list(enumerate(calls))
    waited_s, pauses, cuts = 0.0, 0, 0
    while left:
        for (at, _), reply in zip(left, (yield RedisQuery([call for _, call in left])), strict=True):
            replies[at] = reply
        again: list[tuple[int, RedisCall]] = []
        found: set[str] = set()
        for at, call in left:
            kind = kind_of(replies[at]) if isinstance(replies[at], Exception) else "other"
            if kind in ("moved", "ask", "split", "wait", "unsent", "cut"):
                found.add(kind)
                fixed = calls[at].node
                node = other_node(replies[at]) if kind in ("moved", "ask") else fixed
                again.append((at, RedisCall(call.command, call.bucket, node, kind == "ask")))
        if not again or waited_s >= x.retry_s or (found & {"unsent", "cut"} and cuts):
            break
        cuts += bool(found & {"unsent", "cut"})
        left = again
        if found - {"ask"}:
            yield Refresh()
        if found & {"split", "wait", "moved"}:
            pause_s = backoff_s(pauses, PAUSE_FIRST_S, PAUSE_MAX_S)
            yield RedisPause(pause_s)
            waited_s, pauses = waited_s + pause_s, pauses + 1
    return replies


def time_of(x: RedisExchange, now: bytes) -> Steps:
    """Return the store's time in microseconds."""
    if now:
        return int(now)
    (reply,) = yield from ask(x, RedisCall([b"TIME"]))
    return int(reply[0]) * 1_000_000 + int(reply[1])


# --- listing ------------------------------------------------------------------------------------


def step_through(x: RedisExchange, node: Any, cursor: int) -> Generator[Any, Any, tuple[int, list[bytes]]]:
    """Run one SCAN; returns the next cursor (0: finished) and the store's keys it found."""
    command: list[bytes | int] = [b"SCAN", cursor, b"MATCH", x.layout.pattern, b"COUNT", SCAN_COUNT]
    ((following, keys),) = yield from ask(x, RedisCall(command, node=node))
    return int(following), keys


def all_keys(x: RedisExchange) -> Generator[Any, Any, list[bytes]]:
    """Return all keys of the store, each once."""
    found: set[bytes] = set()
    for node in (yield Nodes()):
        cursor = -1
        while cursor:
            cursor, keys = yield from step_through(x, node, max(cursor, 0))
            found.update(keys)
    return list(found)


def is_record(x: RedisExchange, key: bytes) -> bool:
    """Whether this is the key of a record."""
    head = key[:-DIGEST_BYTES]
    return len(key) > DIGEST_BYTES and head.endswith(b"}:") and head in x.layout.records


def outlines(
    x: RedisExchange, keys: list[bytes], now: int
) -> Generator[Any, Any, list[tuple[bytes, Record]]]:
    """Return the current records of these keys, without their payloads; corrupt ones are left out."""
    found: list[tuple[bytes, Record]] = []
    for some in _slices(keys):
        calls = [
            RedisCall([b"GETRANGE", key, 0, OUTLINE_BYTES - 1], bucket=key[-DIGEST_BYTES] & 63)
            for key in some
        ]
        replies = yield from read_values(x, *calls)
        for key, raw in zip(some, replies, strict=True):
            if not raw:
                continue
            try:
                outline = layout.outline(raw, key[-DIGEST_BYTES:])
            except RecordCorrupt:
                continue
            record = standing(outline, now)
            if record is not None and record.state != "forgotten":
                found.append((key, record))
    return found


def read_values(x: RedisExchange, *calls: RedisCall) -> Steps:
    """Return the replies; `None` for a key of another type. Raises if a server did not answer.

    Otherwise a listing would leave out existing records as if they were absent.
    """
    replies = yield from collect_replies(x, *calls)
    for at, reply in enumerate(replies):
        if isinstance(reply, Exception):
            if not str(reply).startswith("WRONGTYPE"):
                raise to_store_error(reply, x.name) from reply
            replies[at] = None
    return replies


def read_records(
    x: RedisExchange, some: Iterable[tuple[bytes, Record]], now: int
) -> Generator[Any, Any, list[Record]]:
    """Return these records with their payloads; records that are gone meanwhile are left out."""
    pairs = list(some)
    records: list[Record] = []
    for start in range(0, len(pairs), 100):
        part = pairs[start : start + 100]
        replies = yield from ask(
            x, *(RedisCall([b"GET", key], bucket=key[-DIGEST_BYTES] & 63) for key, _ in part)
        )
        for (_, outline), raw in zip(part, replies, strict=True):
            if raw is not None:
                record = standing(layout.unpack(raw, outline.id), now)
                if record is not None and record.state != "forgotten":
                    records.append(record)
    return records


def _slices(keys: list[bytes]) -> Iterable[list[bytes]]:
    return (keys[start : start + SCAN_COUNT] for start in range(0, len(keys), SCAN_COUNT))


def scan(x: RedisExchange, item: Scan, now: bytes) -> Steps:
    """Return a page of records: sorted by digest up to `SORTED_MAX` keys, else in the order of the server's SCAN."""
    at = yield from time_of(x, now)
    if item.cursor is None:
        nodes = yield Nodes()
        sizes = yield from ask(x, *(RedisCall([b"DBSIZE"], node=node) for node in nodes))
        ordered = sum(sizes) <= SORTED_MAX
    else:
        ordered = item.cursor.startswith("d")
    if ordered:
        return (yield from _ordered_page(x, item, at))
    return (yield from _scanned_page(x, item, at))


def _ordered_page(x: RedisExchange, item: Scan, at: int) -> Steps:
    after = _unhex(item.cursor[1:]) if item.cursor else b""
    keys = yield from all_keys(x)
    keys = sorted(
        (key for key in keys if is_record(x, key) and key[-DIGEST_BYTES:] > after),
        key=lambda key: key[-DIGEST_BYTES:],
    )
    found = []
    for some in _slices(keys):
        outlined = yield from outlines(x, some, at)
        found += [pair for pair in outlined if fits(pair[1], item, at)]
        if len(found) > item.limit:
            break
    page, more = found[: item.limit], len(found) > item.limit
    records = yield from read_records(x, page, at)
    return Page(records, "d" + page[-1][0][-DIGEST_BYTES:].hex() if more else None)


def _scanned_page(x: RedisExchange, item: Scan, at: int) -> Steps:
    """Return a page in SCAN order. Its cursor: the node, the SCAN's cursor, and the keys found beyond the page."""
    nodes = yield Nodes()
    which, cursor, held = 0, 0, ""
    if item.cursor is not None:
        found_place = _SCAN_CURSOR.fullmatch(item.cursor)
        if found_place is None:
            raise cursor_refused(item.cursor)
        which, cursor, held = int(found_place[1]), int(found_place[2]), found_place[3]
    keys = [_unhex(each) for each in held.split("-") if each]
    records = list[Record]()
    for _ in range(SCANS_PER_PAGE):
        if not keys and which < len(nodes):
            cursor, keys = yield from step_through(x, nodes[which], cursor)
            which += not cursor
        keys = [key for key in keys if is_record(x, key)]
        found = [pair for pair in (yield from outlines(x, keys, at)) if fits(pair[1], item, at)]
        room = item.limit - len(records)
        records += yield from read_records(x, found[:room], at)
        keys = [key for key, _ in found[room:]]
        if len(records) >= item.limit or which >= len(nodes):
            break
    if which >= len(nodes) and not keys:
        return Page(records)
    return Page(records, f"s{which}.{cursor}." + "-".join(key.hex() for key in keys))


def _unhex(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError as error:
        raise cursor_refused(text) from error


def orphans(x: RedisExchange, item: Scan, now: bytes) -> Steps:
    """Return a page of journaled claims whose lease is over, from the list that each bucket keeps of them."""
    at = yield from time_of(x, now)
    calls = [
        RedisCall([b"ZRANGEBYSCORE", key, b"-inf", at, b"LIMIT", 0, ORPHANS_MAX], bucket=bucket)
        for bucket, key in enumerate(x.layout.journals)
    ]
    replies = yield from ask(x, *calls)
    after = _unhex(item.cursor[1:]) if item.cursor else b""
    digests = sorted(each for reply in replies for each in reply if each > after)
    keys = [x.layout.records[each[0] & 63] + each for each in digests]
    found = [
        pair
        for pair in (yield from outlines(x, keys, at))
        if fits(pair[1], item, at) and pair[1].journal is not None
    ]
    page, more = found[: item.limit], len(found) > item.limit
    records: list[Record] = []
    for pair in page:
        try:
            records += yield from read_records(x, [pair], at)
        except RecordCorrupt:
            continue  # a corrupt record must not keep the others from being taken over
    return Page(records, "d" + page[-1][0][-DIGEST_BYTES:].hex() if more else None)


def count(x: RedisExchange, item: Count, now: bytes) -> Steps:
    """Count records and marks with a full scan. The server itself removes expired ones."""
    at = yield from time_of(x, now)
    keys = yield from all_keys(x)
    counter = StatsCounter(item, at)
    records = [key for key in keys if is_record(x, key)]
    for _, record in (yield from outlines(x, records, at)):
        counter.add_records(record.tenant, record.consumer, counted_state(record))
    for (tenant, consumer), live in (yield from count_marks(x, keys, at)).items():
        counter.add_marks(tenant, consumer, live)
    return counter.stats()


def count_marks(x: RedisExchange, keys: list[bytes], at: int) -> Steps:
    """Return the number of live marks by tenant and consumer."""
    head = -DIGEST_BYTES
    sets = [key for key in keys if key.startswith(x.layout.compact)] if x.bins_wanted else []
    marks = [key for key in keys if len(key) > DIGEST_BYTES and key[:head] in x.layout.marks]
    found: dict[tuple[str, str], int] = {}
    if not marks and not sets:
        return found
    (reply,) = yield from ask(x, RedisCall([b"HGETALL", x.layout.scopes]))
    names = {tag: layout.id_of(name, b"")[:2] for tag, name in _pairs(reply)}
    for some in _slices(marks):
        replies = yield from read_values(
            x, *(RedisCall([b"GET", key], bucket=_bucket_of(key)) for key in some)
        )
        for key, expires_at in zip(some, replies, strict=True):
            if expires_at == b"" or (
                expires_at is not None and expires_at.isdigit() and int(expires_at) > at
            ):
                scope = names.get(key[head : head + encoding.TAG_BYTES], ("", ""))
                found[scope] = found.get(scope, 0) + 1
    for some in _slices(sets):
        replies = yield from read_values(x, *(RedisCall([b"SCARD", key]) for key in some))
        for key, number in zip(some, replies, strict=True):
            start = len(x.layout.compact)
            length, _, generation = key.rpartition(b":")[2].partition(b".")
            if isinstance(number, int) and (int(generation) + 2) * int(length) > at:
                scope = names.get(key[start : start + encoding.TAG_BYTES], ("", ""))
                found[scope] = found.get(scope, 0) + number
    return found


def _bucket_of(key: bytes) -> int:
    return int(key[key.index(b"{") + 1 : key.index(b"}")])


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
    recorded = {layout.id_of(name, b"")[:2]: _parse_mode(each) for name, each in _pairs(modes)}
    return StoreSettings(
        {layout.id_of(name, b""): int(window_us) for name, window_us in _pairs(windows)},
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


def _pairs(reply: list[bytes]) -> Iterable[tuple[bytes, bytes]]:
    each = iter(reply)
    return zip(each, each, strict=True)


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
    for some in _slices(keys):
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
    for _, record in (yield from outlines(x, keys, at)):
        unfinished += record.id[:2] == scope and counted_state(record) in UNFINISHED
    if not unfinished:
        field = encoding.scope_name(*scope)
        (stored,) = yield from ask(x, RedisCall([b"HGET", x.layout.modes, field]))
        ids = "" if stored is None else _parse_mode(stored)[1]
        switched = f"{item.mode} {ids}".rstrip().encode()
        yield from ask(x, RedisCall([b"HSET", x.layout.modes, field, switched]))
    return unfinished
