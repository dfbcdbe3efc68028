"""Marks in sets of small integers: a few bytes each, remembered for one to two windows, on a single server."""

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

from semel.core.commands import Answer, Forget, Lookup, Mark
from semel.core.looks import mark_record
from semel.digests import digests_of
from semel.errors import PolicyInvalid, RecordCorrupt
from semel.stores.redis import wire
from semel.stores.redis.parts import CallPart, take_marks
from semel.types import Absent, Forgotten, Unavailable

if TYPE_CHECKING:
    from semel.stores.redis.exchange import RedisExchange

PER_SET = 256
"""Marks of one set: the server keeps up to 512 in eight bytes each, and an uneven spread needs room."""
BINS_MAX = 1 << 24
COLLISIONS = (
    "compact marks: a new key is taken for a known one with a chance of about 1 in 10^16 (512 marks of 63 bits in two"
    " sets), and its event is lost; a mark is remembered for up to twice the window"
)


def bins_for(expected: int) -> int:
    """How many sets hold so many marks."""
    bins = 1
    while bins * PER_SET < expected and bins < BINS_MAX:
        bins *= 2
    return bins


def part_of(
    x: "RedisExchange", at: int, item: Mark | Lookup | Forget, places: list[int], keys: Sequence[str]
) -> CallPart:
    """The call for some keys of one consumer."""
    tenant, consumer = (item.tenant, item.consumer) if isinstance(item, Mark) else item.id[:2]
    tag = wire.tag_of(tenant, consumer)
    bins = x.bins.get((tenant, consumer), x.bins_wanted)
    head = x.layout.compact + tag
    mask = bins - 1
    names: list[bytes] = [x.layout.shapes]
    ids: list[bytes] = []
    for digest in digests_of(tenant, consumer, keys):
        names.append(head + (int.from_bytes(digest[:3]) & mask).to_bytes(3))
        ids.append(b"%d" % (int.from_bytes(digest[8:16]) >> 1))
    op = b"M" if isinstance(item, Mark) else b"L" if isinstance(item, Lookup) else b"F"
    window = b"%d" % (item.window_us if isinstance(item, Mark) else 0)
    return CallPart("compact", places, [item], names, [tag, b"%d" % bins, window, op, *ids], mark=at)


def take(
    x: "RedisExchange", part: CallPart, now: int, letters: bytes, details: Any, answers: list[Answer]
) -> CallPart | None:
    """Write down the answers; a part to send again where the number of sets was another."""
    item = part.items[0]
    if letters == b"B":
        scope = (item.tenant, item.consumer) if isinstance(item, Mark) else item.id[:2]
        x.bins[scope] = int(next(details))
        keys = [item.keys[at] for at in part.places] if isinstance(item, Mark) else [item.id[2]]
        return part_of(x, part.mark, item, part.places, keys)
    if letters == b"W":
        answers[part.mark] = Unavailable(
            PolicyInvalid(
                "this consumer's compact marks were used with too many windows; wait until the oldest are over"
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
            RecordCorrupt(f"the marks of {item.id[1]!r} are held by something else")
        )
    return None


def look_again(
    x: "RedisExchange", items: Sequence[Any], answers: list[Answer], now: bytes
) -> Generator[Any, Any, None]:
    """Keys without a record may be marks: those that were looked up or forgotten in vain are looked for there."""
    parts = [
        part_of(x, at, item, [0], [item.id[2]])
        for at, (item, answer) in enumerate(zip(items, answers, strict=True))
        if type(answer) is Absent and type(item) in (Lookup, Forget)
    ]
    yield from x.ask_all(parts, answers, now)
