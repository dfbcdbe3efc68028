"""Count records and marks on the server, a part of the keys at a time."""

from collections.abc import Generator
from typing import Any

from semel.core.commands import Count
from semel.core.ids import DIGEST_BYTES
from semel.core.machine import counted_state
from semel.stores.admin_rules import StatsCounter
from semel.stores.redis import encoding
from semel.stores.redis import records as layout
from semel.stores.redis.calls import Nodes, RedisCall, Steps, load_script
from semel.stores.redis.exchange import RedisExchange
from semel.stores.redis.listing import (
    SORTED_MAX,
    ask,
    eval_call,
    is_record,
    outlines_not_done,
    pairs,
    read_values,
    same_slot,
    step_through,
    time_of,
)

MARKS = load_script(b"", "count_marks")


def count(x: RedisExchange, item: Count, now: bytes) -> Steps:
    """Count records and marks. The server itself removes expired ones.

    It visits every key, and holds few of them: with more than `SORTED_MAX` keys, one that the server names twice
    because it resizes its table meanwhile counts twice.
    """
    at = yield from time_of(x, now)
    counter = StatsCounter(item, at)
    (reply,) = yield from ask(x, RedisCall([b"HGETALL", x.layout.scopes]))
    scopes = {tag: layout.id_of(name, b"")[:2] for tag, name in pairs(reply)}
    known: set[bytes] = set()
    for node in (yield Nodes()):
        cursor = -1
        while cursor:
            cursor, keys = yield from step_through(x, node, max(cursor, 0))
            if len(known) < SORTED_MAX:
                keys = [key for key in dict.fromkeys(keys) if key not in known]
                known.update(keys)
            found, done = yield from outlines_not_done(x, [key for key in keys if is_record(x, key)], at)
            for _, record in found:
                counter.add_records(record.tenant, record.consumer, counted_state(record))
            for scope, number in done.items():
                counter.add_records(*layout.id_of(scope, b"")[:2], "done", number)
            for tag, number in (yield from _marks(x, keys, at)).items():
                counter.add_marks(*scopes.get(tag, ("", "")), number)
    return counter.stats()


def _marks(x: RedisExchange, keys: list[bytes], at: int) -> Generator[Any, Any, dict[bytes, int]]:
    """Return the number of live marks among these keys by the tag of their tenant and consumer."""
    found: dict[bytes, int] = {}
    plain = [key for key in keys if len(key) > DIGEST_BYTES and key[:-DIGEST_BYTES] in x.layout.marks]
    parts = same_slot(x, plain)
    calls = [eval_call(MARKS, part, at, DIGEST_BYTES, encoding.TAG_BYTES) for part in parts]
    for reply in (yield from ask(x, *calls)) if calls else ():
        for tag, number in pairs(reply):
            found[tag] = found.get(tag, 0) + number
    sets = [key for key in keys if key.startswith(x.layout.compact)] if x.bins_wanted else []
    replies = (yield from read_values(x, *(RedisCall([b"SCARD", key]) for key in sets))) if sets else ()
    for key, number in zip(sets, replies, strict=True):
        start = len(x.layout.compact)
        length, _, generation = key.rpartition(b":")[2].partition(b".")
        if isinstance(number, int) and (int(generation) + 2) * int(length) > at:
            tag = key[start : start + encoding.TAG_BYTES]
            found[tag] = found.get(tag, 0) + number
    return found
