"""Marks as plain commands, the fastest way for the server; encoded and parsed without the driver. And compact marks.

A mark is a key that the server expires, so making one needs no script: a series of `SET key "" PX window NX`, each
answered with one line. Scripts make marks on a cluster, with a test clock, and where a store that lost its records
must refuse them (`on_store_lost=fail`). Scripts also repeat the commands that the server refused here.
"""

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

from semel.core.commands import Answer, Forget, Item, Lookup, Mark, Marked
from semel.core.ids import digests_of
from semel.core.machine import mark_record
from semel.errors import KeyInvalid, PolicyInvalid, RecordCorrupt
from semel.stores.redis import encoding
from semel.stores.redis.calls import Ahead, CallPart, RedisCall, RedisQuery, take_marks
from semel.stores.redis.errors import NotSent, to_store_error
from semel.types import Absent, Forgotten, Unavailable

if TYPE_CHECKING:
    from semel.stores.redis.exchange import RedisExchange

_FIRST, _REFUSED = b"+OK", b"-"


def serves(items: Sequence[Item]) -> bool:
    """Whether all items are marks: replies read as lines cannot be mixed with others."""
    return all(type(item) is Mark and item.window_us > 0 and not item.refresh for item in items)


def carry_out(x: "RedisExchange", items: Sequence[Mark], answers: list[Answer]) -> Generator[Any, Any, None]:
    """Answer the marks in one round trip."""
    parts: list[CallPart] = []
    for at, item in enumerate(items):
        answers[at] = Marked([False] * len(item.keys))
        try:
            for part in x.plain_marks(at, item):
                yield Ahead([_call(x, part, first=not parts)])
                parts.append(part)
        except UnicodeEncodeError as error:
            answers[at] = Unavailable(KeyInvalid(f"a key is not valid text: {error}"))
    if not parts:
        return
    replies = yield RedisQuery([])
    refused = [part for part, reply in zip(parts, replies, strict=True) if isinstance(reply, NotSent)]
    for part, reply in zip(parts, replies, strict=True):
        if not isinstance(reply, Exception):
            refused += _take(part, reply[-len(part.keys) :], answers)
        elif not isinstance(
            reply, NotSent
        ):  # it is unknown which marks were made: repeating them would lose their events
            answers[part.mark] = Unavailable(to_store_error(reply, x.name))
    yield from x.ask_all(refused, answers, b"")
    if not isinstance(replies[0], Exception):
        yield from _compare_epoch(x, replies[0][: -len(parts[0].keys)])


def _call(x: "RedisExchange", part: CallPart, *, first: bool) -> RedisCall:
    """Return the commands of a part; the first part also reads the epoch."""
    item: Mark = part.items[0]
    tail = b"\r\n$0\r\n\r\n$2\r\nPX\r\n%b\r\n$2\r\nNX\r\n" % _bulk(b"%d" % -(-item.window_us // 1000))
    heads = {size: b"*6\r\n$3\r\nSET\r\n$%d\r\n" % size for size in set(map(len, part.keys))}
    packed = b"".join([heads[len(key)] + key + tail for key in part.keys])
    if not first:
        return RedisCall((), packed=packed, lines=len(part.keys))
    epoch = b"*2\r\n$3\r\nGET\r\n%b\r\n" % _bulk(x.layout.epochs[0])
    return RedisCall((), packed=epoch + packed, lines=len(part.keys) + 1)


def _bulk(text: bytes) -> bytes:
    return b"$%d\r\n%b" % (len(text), text)


def _take(part: CallPart, lines: list[bytes], answers: list[Answer]) -> list[CallPart]:
    """Set which keys are new; returns a part with the keys whose command the server refused."""
    marked = answers[part.mark]
    if isinstance(marked, Marked):
        firsts = [line == _FIRST for line in lines]
        marked.firsts[part.places[0] : part.places[0] + len(firsts)] = firsts
    left = [at for at, line in enumerate(lines) if line[:1] == _REFUSED]
    if not left:
        return []
    return [
        CallPart(
            "mark",
            [part.places[at] for at in left],
            part.items,
            [part.keys[at] for at in left],
            part.args,
            mark=part.mark,
        )
    ]


def _compare_epoch(x: "RedisExchange", lines: list[bytes]) -> Generator[Any, Any, None]:
    """Note the store's epoch, to detect lost records. The lines are its size and the epoch, or one for no epoch."""
    if len(lines) == 2:  # noqa: PLR2004
        x.note_epoch(0, lines[1])
        return
    key = x.layout.epochs[0]
    _, epoch = yield RedisQuery([RedisCall([b"SET", key, x.token, b"NX"]), RedisCall([b"GET", key])])
    if isinstance(epoch, bytes):
        x.note_epoch(0, epoch)


def missing_lines(data: bytes, calls: Sequence[RedisCall]) -> int:
    """Return how many reply lines are still missing. If the first is the size of an epoch, there is one line more."""
    epoch = data[:1] == b"$" and not data.startswith(b"$-1")
    return sum(call.lines for call in calls) + epoch - data.count(b"\r\n")


def split_lines(data: bytes, calls: Sequence[RedisCall]) -> list[list[bytes]]:
    """Return the reply lines of each call. Raises `ConnectionError` if they do not match the calls."""
    lines = data.split(b"\r\n")
    more = len(lines) - 1 - sum(call.lines for call in calls)
    if more and (more != 1 or lines[0] != b"$%d" % len(lines[1])):
        raise ConnectionError("the server's replies do not match the calls")
    found: list[list[bytes]] = []
    start = 0
    for call in calls:
        end = start + call.lines + more
        found.append(lines[start:end])
        start, more = end, 0
    return found


if TYPE_CHECKING:
    from semel.stores.redis.exchange import RedisExchange

PER_SET = 256
"""Marks per set: the server stores up to 512 in eight bytes each; the rest is room for an uneven spread."""
BINS_MAX = 1 << 24
COLLISIONS = (
    "compact marks: a new key is taken for a known one with a chance of about 1 in 10^16 (512 marks of 63 bits in two"
    " sets), and its event is lost; a mark is remembered for up to twice the window"
)


def bins_for(expected: int) -> int:
    """Return how many sets to use for the expected number of marks."""
    bins = 1
    while bins * PER_SET < expected and bins < BINS_MAX:
        bins *= 2
    return bins


def part_of(
    x: "RedisExchange", at: int, item: Mark | Lookup | Forget, places: list[int], keys: Sequence[str]
) -> CallPart:
    """Return the part that marks, looks up or forgets these keys of one consumer."""
    tenant, consumer = (item.tenant, item.consumer) if isinstance(item, Mark) else item.id[:2]
    tag = encoding.tag_of(tenant, consumer)
    bins = x.bins.get((tenant, consumer), x.bins_wanted)
    head = x.layout.compact + tag
    mask = bins - 1
    names: list[bytes] = [x.layout.shapes]
    ids: list[bytes] = []
    for digest in digests_of(tenant, consumer, keys):
        names.append(head + (int.from_bytes(digest[:3]) & mask).to_bytes(3))
        ids.append(b"%d" % (int.from_bytes(digest[8:16]) >> 1))
    op = (
        (b"R" if item.refresh else b"M")
        if isinstance(item, Mark)
        else b"L"
        if isinstance(item, Lookup)
        else b"F"
    )
    window = b"%d" % (item.window_us if isinstance(item, Mark) else 0)
    return CallPart("compact", places, [item], names, [tag, b"%d" % bins, window, op, *ids], mark=at)


def take(
    x: "RedisExchange", part: CallPart, now: int, letters: bytes, details: Any, answers: list[Answer]
) -> CallPart | None:
    """Set the answers; returns a part to send again if the consumer has another number of sets."""
    item = part.items[0]
    if letters == b"B":
        scope = (item.tenant, item.consumer) if isinstance(item, Mark) else item.id[:2]
        x.bins[scope] = int(next(details))
        keys = [item.keys[at] for at in part.places] if isinstance(item, Mark) else [item.id[2]]
        return part_of(x, part.mark, item, part.places, keys)
    if letters == b"W":
        answers[part.mark] = Unavailable(
            PolicyInvalid(
                "this consumer's compact marks were used with too many windows; wait until the oldest have passed"
            )
        )
    elif isinstance(item, Mark):
        take_marks(part, letters, answers)
    elif letters == b"1":
        answers[part.mark] = (
            mark_record(item.id, int(next(details))) if isinstance(item, Lookup) else Forgotten(now)
        )
    elif letters != b"0":
        answers[part.mark] = Unavailable(
            RecordCorrupt(f"a key for the marks of {item.id[1]!r} holds a value that semel does not write")
        )
    return None


def look_again(
    x: "RedisExchange", items: Sequence[Any], answers: list[Answer], now: bytes
) -> Generator[Any, Any, None]:
    """Look up or forget keys without a record again, among the compact marks."""
    parts = [
        part_of(x, at, item, [0], [item.id[2]])
        for at, (item, answer) in enumerate(zip(items, answers, strict=True))
        if type(answer) is Absent and type(item) in (Lookup, Forget)
    ]
    yield from x.ask_all(parts, answers, now)
