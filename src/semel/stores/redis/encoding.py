"""Encode items as arguments of the scripts, and decode their replies into answers. No I/O, no clock."""

from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256
from struct import Struct
from typing import Any, TypeAlias

from semel.core.commands import Claim, Forget, Granted, Lookup, RecordItem, Renew, Resolve, Settle
from semel.core.ids import DIGEST_BYTES, digest, scope
from semel.core.machine import mark_record, standing
from semel.errors import KeyInvalid, RecordCorrupt, StoreFull
from semel.stores.redis.records import (
    ANCHOR,
    CODES,
    ERRORS,
    JOURNAL,
    META,
    NAME,
    NULL,
    PRINT,
    QUARANTINE,
    SLIDING,
    TIME_BYTES,
    TYPE,
    pack_error,
    unpack,
    unpack_known,
)
from semel.types import (
    FOREVER,
    Absent,
    Busy,
    Completed,
    Forgotten,
    Id,
    Late,
    Lost,
    Mismatch,
    Renewed,
    Unavailable,
    Unknown,
)

BUCKETS = 64
"""The number of hash tags: a batch needs at most this many calls on a cluster, spread over its masters."""
RELEASED = 5
ENDS: dict[str, int] = {"done": 1, "failed": 2, "unknown": 3, "released": RELEASED}

WITH_VALUE, SLIDES, COUNTED, NAMED, ANCHORED, VOID, ERRING = 1, 2, 4, 8, 16, 32, 64
BY_EVENT_TIME, BY_ANCHOR = 1, 2
"""How the claim script decides that an event is late."""
REFRESHING = 4
"""Added to that: the windows of settled records start again."""
ANY_STATE = 255
TEXT_BYTES_MAX = 65_535
"""The most bytes of a name, an event type or a fingerprint in a record."""
OWNER_BYTES_MAX = 255

_CLAIM = Struct(">BBBddd")
_SETTLE = Struct(">BBBdddd")
_RENEW = Struct(">BBdd")
_FORGET = Struct(">BBdB")
_TIME = Struct(">d")
_U2, _U4 = Struct(">H"), Struct(">I")
_SCOPE = Struct(">HH")

TAG_BYTES = 4


# --- names --------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def tag_of(tenant: str, consumer: str) -> bytes:
    """Return the consumer's tag in the keys of its marks; marks are counted by it."""
    return sha256(scope(tenant, consumer)).digest()[:TAG_BYTES]


@lru_cache(maxsize=1024)
def scope_name(tenant: str, consumer: str) -> bytes:
    """Return the tenant and the consumer as a record stores them."""
    whose, who = tenant.encode(), consumer.encode()
    return _SCOPE.pack(len(whose), len(who)) + whose + who


def name_of(record_id: Id, *, readable: bool) -> bytes:
    """Return the name of a record; without its key if keys must stay unreadable.

    Raises `OverflowError` for a name that is too long, and `UnicodeEncodeError` for one that is not valid text.
    """
    name = scope_name(record_id[0], record_id[1])
    if readable:
        name += record_id[2].encode()
    return len(name).to_bytes(2) + name


# --- items --------------------------------------------------------------------------------------


Encoded: TypeAlias = tuple[bytes, list[int], list[bytes], list[bytes]]
"""Items that share fields: the shared fields, the items' positions, their digests, and each item's own fields."""


def claims(items: Sequence[Claim], *, readable: bool) -> list[Encoded]:
    """Encode claims for the claim script, one group for each kind of claim; usually there is one."""
    groups: dict[Any, Encoded] = {}
    shape_before: Any = None
    which, digests, args = list[int](), list[bytes](), list[bytes]()
    tenant_before = consumer_before = "\0"
    prefix = name = b""
    named: dict[int, bytes] = {}
    for at, item in enumerate(items):
        tenant, consumer, text = item.id
        if tenant != tenant_before or consumer != consumer_before:
            tenant_before, consumer_before = tenant, consumer
            prefix, name, named = scope(tenant, consumer), scope_name(tenant, consumer), {}
        key, owner = text.encode(), item.owner
        shape: Any
        if item.quarantine or not readable or _has_more(item):
            kept = readable or item.quarantine or item.journal is not None
            whose = name + key if kept else name
            tail = b"%c%b%b%b%b" % (len(owner), owner, _anchor(item), _U2.pack(len(whose)), whose)
            shape, own = _whole_claim(item, tail)
        else:
            shape = (item.lease_us, item.window_us, item.sliding, item.refresh)
            sized_name = named.get(len(key))  # keys of one consumer are often equally long
            if sized_name is None:
                sized_name = named[len(key)] = (len(name) + len(key)).to_bytes(2) + name
            own = _BYTE[len(owner)] + owner + sized_name + key
        if shape != shape_before:
            shape_before = shape
            found = groups.get(shape)
            if found is None:
                common = shape if isinstance(shape, bytes) else _head(item, 0, NAME)
                found = groups[shape] = (common, [], [], [])
            _, which, digests, args = found
        which.append(at)
        digests.append(sha256(prefix + key).digest()[:DIGEST_BYTES])
        args.append(own)
    return list(groups.values())


_BYTE = [bytes((number,)) for number in range(256)]


def _has_more(item: Claim) -> bool:
    return not (
        item.fingerprint is None
        and item.journal is None
        and item.event_time_us is None
        and item.meta is None
        and item.error is None
        and not item.event_type
    )


def _anchor(item: Claim) -> bytes:
    """Return the event's own time and its horizon. A time outside a record's range is clamped to the nearest end."""
    if not item.apart_us or item.event_time_us is None:
        return b""
    happened = min(max(item.event_time_us, 0), FOREVER)
    return happened.to_bytes(TIME_BYTES) + min(happened + item.window_us, FOREVER).to_bytes(TIME_BYTES)


def plain_claim(item: Claim, *, readable: bool) -> tuple[int, bytes]:
    """Return the second flags of a plain claim's record, and its bytes after the header.

    Raises `KeyInvalid`, `OverflowError` and `UnicodeEncodeError` for texts that a record cannot hold.
    """
    more, owner = NAME, item.owner
    tail = _BYTE[len(owner)] + owner + name_of(item.id, readable=readable)
    if item.event_type or item.fingerprint is not None:
        return _with_texts(item, more, tail)
    return more, tail


def _with_texts(item: Claim, more: int, tail: bytes) -> tuple[int, bytes]:
    """Add the event type and the fingerprint."""
    if item.event_type:
        more |= TYPE
        tail += _short(item.event_type.encode(), "an event type")
    if item.fingerprint is not None:
        more |= PRINT
        tail += _short(item.fingerprint, "a fingerprint")
    return more, tail


def _whole_claim(item: Claim, tail: bytes) -> tuple[Any, bytes]:
    flags, more = 0, NAME | (ANCHOR if item.apart_us and item.event_time_us is not None else 0)
    more, tail = _with_texts(item, more, tail)
    if item.meta is not None:
        more |= META
        tail += _U4.pack(len(item.meta)) + item.meta
    if item.error is not None:
        more |= ERRORS
        packed = pack_error(item.error)
        tail += _U4.pack(len(packed)) + packed
    if item.journal is not None:
        flags |= JOURNAL
        tail += _U4.pack(len(item.journal)) + item.journal
    return _head(item, flags, more), tail


def _head(item: Claim, flags: int, more: int) -> bytes:
    if item.quarantine:
        flags |= QUARANTINE
    if item.sliding:
        flags |= SLIDING
    late, time = 0, 0
    if item.event_time_us is not None:
        if item.apart_us:
            late, time = BY_ANCHOR, item.apart_us
        elif item.refuse_late:
            late, time = BY_EVENT_TIME, item.event_time_us
    if item.refresh:
        late |= REFRESHING
    return _CLAIM.pack(flags, more, late, item.lease_us, item.window_us, time)


def _short(text: bytes, what: str) -> bytes:
    if len(text) > TEXT_BYTES_MAX:
        raise KeyInvalid(f"{what} has {len(text)} bytes; a record holds at most {TEXT_BYTES_MAX}")
    return _U2.pack(len(text)) + text


def ends(items: Sequence[RecordItem]) -> list[Encoded]:
    """Encode items for the settle script: settles grouped by shared fields; a mixed batch is one group."""
    if any(type(item) is not Settle or item.event_time_us is not None for item in items):
        args = [settle(item) if isinstance(item, Settle) else _ENDS[type(item)](item) for item in items]
        return [(b"", list(range(len(items))), [digest(item.id) for item in items], args)]
    alike: dict[Any, Encoded] = {}
    shape_before: Any = None
    which, digests, args = list[int](), list[bytes](), list[bytes]()
    tenant_before = consumer_before = "\0"
    prefix = b""
    for at, item in enumerate(items):
        assert type(item) is Settle
        if item.error is not None:
            _, which, digests, args = alike.setdefault(_LONG, (b"", [], [], []))
            shape_before = _LONG
            which.append(at)
            digests.append(digest(item.id))
            args.append(settle(item))
            continue
        tenant, consumer, key = item.id
        if tenant != tenant_before or consumer != consumer_before:
            tenant_before, consumer_before, prefix = tenant, consumer, scope(tenant, consumer)
        owner, value, to = item.owner, item.value, item.to
        void = value == NULL
        shape = (to, item.window_us, item.lease_us, item.sliding, item.delay_us, item.count_attempt, void)
        if shape != shape_before:
            shape_before = shape
            found = alike.get(shape)
            if found is None:
                found = alike[shape] = (_settle_head(item, 0, VOID if void else 0), [], [], [])
            _, which, digests, args = found
        own = item.fence.to_bytes(TIME_BYTES) + _BYTE[len(owner)] + owner
        if value is not None and not void and to in _KEEPING:
            own += len(value).to_bytes(4) + value
        which.append(at)
        digests.append(sha256(prefix + key.encode()).digest()[:DIGEST_BYTES])
        args.append(own)
    return list(alike.values())


_LONG = "long"
"""The group of the settles in their long form."""
_KEEPING = frozenset(("done", "failed"))


def _settle_head(item: Settle, fence: int, options: int) -> bytes:
    options |= (COUNTED if item.count_attempt else 0) | (SLIDES if item.sliding else 0)
    return _SETTLE.pack(83, ENDS[item.to], options, fence, item.window_us, item.lease_us, item.delay_us)


def settle(item: Settle, name: bytes = b"") -> bytes:
    """Encode a settle in its long form; with `name`, the script can create its record again."""
    options, value = NAMED if name else 0, b""
    if item.value == NULL:
        options |= VOID
    elif item.value is not None and item.to in _KEEPING:
        options |= WITH_VALUE
        value = len(item.value).to_bytes(4) + item.value
    anchor = b""
    if item.event_time_us is not None:
        options |= ANCHORED
        anchor = _TIME.pack(item.event_time_us)
    error = b""
    if item.error is not None:
        options |= ERRING
        error = pack_error(item.error)
        error = _U4.pack(len(error)) + error
    head = _settle_head(item, item.fence, options)
    return b"%b%b%c%b%b%b%b" % (head, anchor, len(item.owner), item.owner, name, error, value)


def _renew(item: Renew) -> bytes:
    note = b""
    if item.step is not None:
        name, value = item.step
        note = _short(name.encode(), "the name of a step")
        note += _U4.pack(0) if value is None else _U4.pack(len(value) + 1) + value
    head = _RENEW.pack(82, bool(note), item.fence, item.lease_us)
    return b"%b%c%b%b" % (head, len(item.owner), item.owner, note)


def _forget(item: Forget) -> bytes:
    state = ANY_STATE if item.state is None else CODES[item.state]
    head = _FORGET.pack(70, item.force, -1 if item.fence is None else item.fence, state)
    return head + tag_of(item.id[0], item.id[1])


def _lookup(item: Lookup) -> bytes:
    return b"L" + tag_of(item.id[0], item.id[1])


def _resolve(item: Resolve) -> bytes:
    if item.to == "claimed":
        head = _RENEW.pack(86, 4, item.fence, item.lease_us)
        return b"%b%c%b" % (head, len(item.owner), item.owner)
    options, value = 2 if item.to == "absent" else 0, b""
    if item.to == "done" and item.value is not None:
        options, value = 1, _U4.pack(len(item.value)) + item.value
    return _RENEW.pack(86, options, item.fence, item.window_us) + value


def rewindow(window_us: int) -> bytes:
    """Encode a change of a settled record's window for the settle script."""
    return b"W" + Struct(">d").pack(window_us)


_ENDS: dict[type, Any] = {Renew: _renew, Lookup: _lookup, Forget: _forget, Resolve: _resolve}


# --- answers ------------------------------------------------------------------------------------

AGAIN = frozenset(b"+Tn")
"""Letters for items that were not carried out."""
CLAIM_DETAILED = frozenset(b"GKBJLU")
END_DETAILED = frozenset(b"ADBJrmf")
"""Letters with a detail in the reply."""

ABSENT, LOST, MISMATCH = Absent(), Lost[Any](), Mismatch()


def full_error() -> StoreFull:
    """Error for an item that the server has no memory for."""
    return StoreFull(
        "the server has reached its maxmemory; give it more, or shorten the window. Stored records still answer"
    )


def corrupt_answer(item: RecordItem) -> Unavailable:
    """Answer for an item whose key does not hold a record."""
    return Unavailable(RecordCorrupt(f"the key of {item.id!r} holds a value that semel does not write"))


def claim_answer(letter: str, detail: bytes, item: Claim, now: int) -> Any:
    """Decode the answer to a claim."""
    match letter:
        case "F":
            return Granted(now, 1, now + item.lease_us, now, (), item.journal)
        case "G":
            r = unpack(detail, item.id)
            return Granted(r.fence, r.attempt, r.lease_until_us, r.first_seen_us, r.steps, r.journal)
        case "K":
            return unpack_known(detail, item.id, now)
        case "B" | "J":
            return Busy(int(detail) / 1e6, letter == "J")
        case "M":
            return MISMATCH
        case "L":
            return Late(int(detail) / 1e6)
        case "U":
            return Unknown(int(detail))
        case "O":
            return Unavailable(full_error())
        case _:
            return corrupt_answer(item)


def end_answer(letter: str, detail: bytes, item: RecordItem, now: int) -> Any:
    """Decode the answer to any other item on a record."""
    match letter:
        case "C":
            return Completed(at_us=now)
        case "A" | "D":
            return Completed(already=True, at_us=int(detail), kept=letter == "A")
        case "R":
            return Completed(recreated=True, at_us=now)
        case "L":
            return LOST
        case "N":
            assert isinstance(item, Renew)
            return Renewed(now + item.lease_us)
        case "a":
            return ABSENT
        case "r":
            record = standing(unpack(detail, item.id), now)
            return ABSENT if record is None or record.state == "forgotten" else record
        case "m":
            return mark_record(item.id, int(detail))
        case "f":
            return Forgotten(int(detail))
        case "B" | "J":
            return Busy(int(detail) / 1e6, letter == "J")
        case "O":
            return Unavailable(full_error())
        case _:
            return corrupt_answer(item)
