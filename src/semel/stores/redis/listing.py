"""List records: calls that are safe to repeat, the keys of the store, and pages of records."""

import re
from collections.abc import Generator, Iterable
from typing import Any, TypeAlias, TypeVar

from semel.core.backoff import backoff_s
from semel.core.commands import Page, Scan
from semel.core.ids import DIGEST_BYTES
from semel.core.machine import fits, standing
from semel.errors import RecordCorrupt
from semel.stores.admin_rules import cursor_refused
from semel.stores.redis import records as layout
from semel.stores.redis.calls import (
    Nodes,
    RedisCall,
    RedisPause,
    RedisQuery,
    Refresh,
    Script,
    Steps,
    load_script,
)
from semel.stores.redis.encoding import scope_name
from semel.stores.redis.errors import kind_of, other_node, to_store_error
from semel.stores.redis.exchange import PAUSE_FIRST_S, PAUSE_MAX_S, RedisExchange
from semel.types import Record

SCAN_COUNT = 1000
"""Keys that one SCAN command visits."""
OUTLINE_BYTES = 4096
"""How much of a record is read to see whether it matches: its name and its times, not its payloads."""
SCRIPT_KEYS = 250
"""Keys that one script looks at: the server serves no other client meanwhile."""
ORPHANS_MAX = 100
"""Journaled claims that are read of each bucket at once."""
SORTED_MAX = 50_000
"""Up to this many keys a listing has one order for all page sizes; with more, the order of the server's SCAN."""
VISITS_PER_PAGE = 200_000
"""The most keys visited for one page; a page may then hold fewer records than its limit and still have a next."""

OUTLINE = load_script(b"", "outline")

Place: TypeAlias = tuple[int, bytes]
"""The place in the lists of journaled claims: the end of the lease, then the digest."""

_ORPHANS_CURSOR = re.compile(r"o(\d{1,17})\.([0-9a-f]{32})", re.ASCII)
_SCAN_CURSOR = re.compile(r"s(\d{1,9})\.(\d{1,20})\.([0-9a-f]*)", re.ASCII)

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


def step_through(
    x: RedisExchange, node: Any, cursor: int, visits: int = SCAN_COUNT
) -> Generator[Any, Any, tuple[int, list[bytes]]]:
    """Run one SCAN; returns the next cursor (0: finished) and the store's keys it found."""
    command: list[bytes | int] = [b"SCAN", cursor, b"MATCH", x.layout.pattern, b"COUNT", visits]
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
    for some in slices(keys):
        calls = [
            RedisCall([b"GETRANGE", key, 0, OUTLINE_BYTES - 1], bucket=key[-DIGEST_BYTES] & 63)
            for key in some
        ]
        replies = yield from read_values(x, *calls)
        for key, raw in zip(some, replies, strict=True):
            record = _outline(key, raw, now) if raw else None
            if record is not None:
                found.append((key, record))
    return found


def _outline(key: bytes, raw: bytes, now: int) -> Record | None:
    """Return the record that these first bytes are now; `None` if it is over, forgotten or corrupt."""
    try:
        record = standing(layout.outline(raw, key[-DIGEST_BYTES:]), now)
    except RecordCorrupt:
        return None
    return None if record is None or record.state == "forgotten" else record


def outlines_not_done(
    x: RedisExchange, keys: list[bytes], now: int, done_of: bytes = b""
) -> Generator[Any, Any, tuple[list[tuple[bytes, Record]], dict[bytes, int]]]:
    """Return the records that are not done, and how many are done by their packed tenant and consumer.

    The first list also has the finished records of `done_of`, a packed tenant and consumer. The server looks at
    them, so that the many others that are done are not sent here.
    """
    found: list[tuple[bytes, Record]] = []
    done: dict[bytes, int] = {}
    parts = same_slot(x, keys)
    replies = yield from collect_replies(
        x, *(eval_call(OUTLINE, part, now, OUTLINE_BYTES, done_of) for part in parts)
    )
    for part, reply in zip(parts, replies, strict=True):
        if isinstance(
            reply, Exception
        ):  # keys that move between nodes, or may not be read: each is asked for alone
            for key, record in (yield from outlines(x, part, now)):
                scope = scope_name(*record.id[:2])
                if record.state == "done" and scope != done_of:
                    done[scope] = done.get(scope, 0) + 1
                else:
                    found.append((key, record))
            continue
        counts, others = reply
        for scope, number in pairs(counts):
            done[scope] = done.get(scope, 0) + number
        for position, raw in pairs(others):
            key = part[position - 1]
            outline = _outline(key, raw, now)
            if outline is not None:
                found.append((key, outline))
    return found, done


def eval_call(script: Script, keys: list[bytes], *args: bytes | int) -> RedisCall:
    """Return the call of a script that reads keys of one node."""
    return RedisCall([b"EVAL", script.text, len(keys), *keys, *args], bucket=bucket_of(keys[0]))


def same_slot(x: RedisExchange, keys: Iterable[bytes]) -> list[list[bytes]]:
    """Return the keys in lists for one call each: on a cluster, the keys of a list are in one bucket."""
    found: dict[int, list[bytes]] = {}
    for key in keys:
        found.setdefault(bucket_of(key) if x.cluster else 0, []).append(key)
    return [each[at : at + SCRIPT_KEYS] for each in found.values() for at in range(0, len(each), SCRIPT_KEYS)]


def bucket_of(key: bytes) -> int:
    """Return the bucket that a key names."""
    return int(key[key.index(b"{") + 1 : key.index(b"}")])


def pairs(reply: list[Any]) -> Iterable[tuple[Any, Any]]:
    """Return a flat reply in pairs."""
    each = iter(reply)
    return zip(each, each, strict=True)


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


T = TypeVar("T")


def slices(keys: list[T]) -> Iterable[list[T]]:
    """Return the keys in parts that are not too many for one call."""
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


def _matches(
    x: RedisExchange, keys: list[bytes], item: Scan, at: int
) -> Generator[Any, Any, list[tuple[bytes, Record]]]:
    """Return the records that match a scan, without their payloads."""
    if item.state not in (None, "done"):
        outlined, _ = yield from outlines_not_done(x, keys, at)
    elif item.tenant is not None and item.consumer is not None:
        outlined, _ = yield from outlines_not_done(x, keys, at, scope_name(item.tenant, item.consumer))
    else:
        outlined = yield from outlines(x, keys, at)
    return [pair for pair in outlined if fits(pair[1], item, at)]


def _ordered_page(x: RedisExchange, item: Scan, at: int) -> Steps:
    after = _unhex(item.cursor[1:]) if item.cursor else b""
    keys = yield from all_keys(x)
    keys = sorted(
        (key for key in keys if is_record(x, key) and key[-DIGEST_BYTES:] > after),
        key=lambda key: key[-DIGEST_BYTES:],
    )
    found: list[tuple[bytes, Record]] = []
    for some in slices(keys):
        matches = yield from _matches(x, some, item, at)
        found += sorted(matches, key=lambda pair: pair[0][-DIGEST_BYTES:])
        if len(found) > item.limit:
            break
    page, more = found[: item.limit], len(found) > item.limit
    records = yield from read_records(x, page, at)
    return Page(records, "d" + page[-1][0][-DIGEST_BYTES:].hex() if more else None)


def _scanned_page(x: RedisExchange, item: Scan, at: int) -> Steps:
    """Return a page in SCAN order. Its cursor: the node, the SCAN's cursor, and the digests found beyond the page.

    The first SCAN visits few keys: a cursor is part of an address, so few matches may be left over.
    """
    nodes = yield Nodes()
    which, cursor, held = 0, 0, ""
    if item.cursor is not None:
        found_place = _SCAN_CURSOR.fullmatch(item.cursor)
        if found_place is None:
            raise cursor_refused(item.cursor)
        which, cursor, held = int(found_place[1]), int(found_place[2]), found_place[3]
    digests = _unhex(held)
    keys = [
        x.layout.records[digests[start] & 63] + digests[start : start + DIGEST_BYTES]
        for start in range(0, len(digests), DIGEST_BYTES)
    ]
    records = list[Record]()
    visited, visits = 0, min(SCAN_COUNT, max(10, item.limit))
    while visited < VISITS_PER_PAGE:
        if not keys and which < len(nodes):
            cursor, keys = yield from step_through(x, nodes[which], cursor, visits)
            which += not cursor
            visited += visits
        keys = [key for key in keys if is_record(x, key)]
        found = yield from _matches(x, keys, item, at)
        room = item.limit - len(records)
        records += yield from read_records(x, found[:room], at)
        keys = [key for key, _ in found[room:]]
        if len(records) >= item.limit or which >= len(nodes):
            break
        if len(found) * 10 < visits:
            visits = min(SCAN_COUNT, 2 * visits)
    if which >= len(nodes) and not keys:
        return Page(records)
    return Page(records, f"s{which}.{cursor}." + "".join(key[-DIGEST_BYTES:].hex() for key in keys))


def _unhex(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError as error:
        raise cursor_refused(text) from error


def orphans(x: RedisExchange, item: Scan, now: bytes) -> Steps:
    """Return a page of journaled claims whose lease is over, from the list that each bucket keeps of them.

    The lists are for all consumers: it reads on until the page is full, however many claims of others come first.
    """
    at = yield from time_of(x, now)
    after: Place | None = _place_of(item.cursor)
    found: list[tuple[Place, tuple[bytes, Record]]] = []
    while after is not None and len(found) <= item.limit:
        places, after = yield from _next_journaled(x, after, at)
        for some in slices(places):
            by_key = {x.layout.records[digest[0] & 63] + digest: (score, digest) for score, digest in some}
            found += [
                (by_key[pair[0]], pair)
                for pair in (yield from outlines(x, list(by_key), at))
                if fits(pair[1], item, at) and pair[1].journal is not None
            ]
            if len(found) > item.limit:
                break
    page, more = found[: item.limit], len(found) > item.limit
    records: list[Record] = []
    for _, pair in page:
        try:
            records += yield from read_records(x, [pair], at)
        except RecordCorrupt:
            continue  # a corrupt record must not keep the others from being taken over
    return Page(records, f"o{page[-1][0][0]}.{page[-1][0][1].hex()}" if more else None)


def _next_journaled(
    x: RedisExchange, after: Place, at: int
) -> Generator[Any, Any, tuple[list[Place], Place | None]]:
    """Return the next journaled claims in order, and the place to go on after; `None`: there are no more."""
    found: list[Place] = []
    ends: list[Place] = []
    skipped = dict.fromkeys(range(len(x.layout.journals)), 0)
    while skipped:
        buckets = list(skipped)
        replies = yield from ask(
            x, *(_journaled_call(x, bucket, after[0], at, skipped[bucket]) for bucket in buckets)
        )
        for bucket, reply in zip(buckets, replies, strict=True):
            read = [(int(score), digest) for digest, score in pairs(reply)]
            left = [place for place in read if place > after]
            if len(read) == ORPHANS_MAX and not left:  # many leases end at the same time
                skipped[bucket] += ORPHANS_MAX
                continue
            del skipped[bucket]
            found += left
            if len(read) == ORPHANS_MAX:
                ends.append(read[-1])
    if not ends:
        return sorted(found), None
    end = min(ends)  # later entries are not complete: a list may have more before them
    return sorted(place for place in found if place <= end), end


def _journaled_call(x: RedisExchange, bucket: int, score: int, at: int, skipped: int) -> RedisCall:
    command: list[bytes | int] = [
        b"ZRANGEBYSCORE",
        x.layout.journals[bucket],
        score,
        at,
        b"WITHSCORES",
        b"LIMIT",
        skipped,
        ORPHANS_MAX,
    ]
    return RedisCall(command, bucket=bucket)


def _place_of(cursor: str | None) -> Place:
    if cursor is None:
        return (0, b"")
    found = _ORPHANS_CURSOR.fullmatch(cursor)
    if found is None:
        raise cursor_refused(cursor)
    return (int(found[1]), bytes.fromhex(found[2]))
