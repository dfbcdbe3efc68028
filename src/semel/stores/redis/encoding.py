"""Turn items into what the scripts take, and what they answer into answers. No I/O, no clock."""

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
    JOURNAL,
    META,
    NAME,
    NULL,
    PRINT,
    QUARANTINE,
    SLIDING,
    TYPE,
    read_known,
    unpack,
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
"""So many hash tags: a batch needs at most as many calls on a cluster, and they spread over its masters."""
RELEASED = 5
ENDS: dict[str, int] = {"done": 1, "failed": 2, "unknown": 3, "released": RELEASED}

WITH_VALUE, SLIDES, COUNTED, NAMED, ANCHORED, VOID = 1, 2, 4, 8, 16, 32
BY_EVENT_TIME, BY_ANCHOR = 1, 2
"""How a claim may be late."""
ANY_STATE = 255
TEXT_BYTES_MAX = 65_535
"""The longest name or event type, or fingerprint, that a record holds."""
OWNER_BYTES_MAX = 255

_CLAIM = Struct(">BBBddd")
_SETTLE = Struct(">BBBdddd")
_RENEW = Struct(">BBdd")
_FORGET = Struct(">BBdB")
_TIME = Struct(">d")
_U2, _U4, _U7 = Struct(">H"), Struct(">I"), 7
_SCOPE = Struct(">HH")

TAG_BYTES = 4


# --- names --------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def tag_of(tenant: str, consumer: str) -> bytes:
    """What a mark's key says of its consumer, so that marks can be counted."""
    return sha256(scope(tenant, consumer)).digest()[:TAG_BYTES]


@lru_cache(maxsize=1024)
def scope_name(tenant: str, consumer: str) -> bytes:
    """How a record says whose it is."""
    whose, who = tenant.encode(), consumer.encode()
    return _SCOPE.pack(len(whose), len(who)) + whose + who


def name_of(record_id: Id, *, readable: bool) -> bytes:
    """The name of a record; without its key where keys are to stay unreadable."""
    name = scope_name(record_id[0], record_id[1])
    if readable:
        name += record_id[2].encode()
    return _U2.pack(len(name)) + name


# --- items --------------------------------------------------------------------------------------


Encoded: TypeAlias = tuple[bytes, list[int], list[bytes], list[bytes]]
"""Items with something in common: that, which they are, the digests of their records, and what is their own."""


def claims(items: Sequence[Claim], *, readable: bool) -> list[Encoded]:
    """What the claim script takes, a call for each kind of claim; mostly there is one kind."""
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
            shape = (item.lease_us, item.window_us, item.sliding)
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
        and not item.event_type
    )


def _anchor(item: Claim) -> bytes:
    """The event's own time and its horizon. One that no record holds is as late as the nearest that one does."""
    if not item.apart_us or item.event_time_us is None:
        return b""
    happened = min(max(item.event_time_us, 0), FOREVER)
    return happened.to_bytes(_U7) + min(happened + item.window_us, FOREVER).to_bytes(_U7)


def _whole_claim(item: Claim, tail: bytes) -> tuple[Any, bytes]:
    flags, more = 0, NAME | (ANCHOR if item.apart_us and item.event_time_us is not None else 0)
    if item.event_type:
        more |= TYPE
        tail += _short(item.event_type.encode(), "an event type")
    if item.fingerprint is not None:
        more |= PRINT
        tail += _short(item.fingerprint, "a fingerprint")
    if item.meta is not None:
        more |= META
        tail += _U4.pack(len(item.meta)) + item.meta
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
    return _CLAIM.pack(flags, more, late, item.lease_us, item.window_us, time)


def _short(text: bytes, what: str) -> bytes:
    if len(text) > TEXT_BYTES_MAX:
        raise KeyInvalid(f"{what} has {len(text)} bytes; a record holds {TEXT_BYTES_MAX}")
    return _U2.pack(len(text)) + text


def ends(items: Sequence[RecordItem]) -> list[Encoded]:
    """What the settle script takes: settles that are alike in one call; where there is anything else, all in one."""
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
        own = item.fence.to_bytes(_U7) + _BYTE[len(owner)] + owner
        if value is not None and not void and to in _KEEPING:
            own += len(value).to_bytes(4) + value
        which.append(at)
        digests.append(sha256(prefix + key.encode()).digest()[:DIGEST_BYTES])
        args.append(own)
    return list(alike.values())


_KEEPING = frozenset(("done", "failed"))


def _settle_head(item: Settle, fence: int, options: int) -> bytes:
    options |= (COUNTED if item.count_attempt else 0) | (SLIDES if item.sliding else 0)
    return _SETTLE.pack(83, ENDS[item.to], options, fence, item.window_us, item.lease_us, item.delay_us)


def settle(item: Settle, name: bytes = b"") -> bytes:
    """What the settle script takes for a settle on its own; with a `name`, for one that brings its record's along."""
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
    head = _settle_head(item, item.fence, options)
    return b"%b%b%c%b%b%b" % (head, anchor, len(item.owner), item.owner, name, value)


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
    """What the settle script takes to move the expiry of a settled record."""
    return b"W" + Struct(">d").pack(window_us)


_ENDS: dict[type, Any] = {Renew: _renew, Lookup: _lookup, Forget: _forget, Resolve: _resolve}


# --- answers ------------------------------------------------------------------------------------

AGAIN = frozenset(b"+Tn")
"""Letters of items that were not carried out."""
CLAIM_DETAILED = frozenset(b"GKBJLU")
END_DETAILED = frozenset(b"ABJrmf")
"""Letters that something comes with."""

ABSENT, LOST, MISMATCH = Absent(), Lost[Any](), Mismatch()


def full() -> StoreFull:
    """What an item gets when there is no memory for it."""
    return StoreFull(
        "the server has reached its maxmemory; give it more, or shorten the window. What is stored still answers"
    )


def corrupt(item: RecordItem) -> Unavailable:
    """What an item gets whose key holds something else than a record."""
    return Unavailable(RecordCorrupt(f"the key of {item.id!r} holds something that semel does not write"))


def claim_answer(letter: str, detail: bytes, item: Claim, now: int) -> Any:
    """The answer to a claim."""
    match letter:
        case "F":
            return Granted(now, 1, now + item.lease_us, now, (), item.journal)
        case "G":
            r = unpack(detail, item.id)
            return Granted(r.fence, r.attempt, r.lease_until_us, r.first_seen_us, r.steps, r.journal)
        case "K":
            return read_known(detail, item.id, now)
        case "B" | "J":
            return Busy(int(detail) / 1e6, letter == "J")
        case "M":
            return MISMATCH
        case "L":
            return Late(int(detail) / 1e6)
        case "U":
            return Unknown(int(detail))
        case "O":
            return Unavailable(full())
        case _:
            return corrupt(item)


def end_answer(letter: str, detail: bytes, item: RecordItem, now: int) -> Any:
    """The answer to any other item on a record."""
    match letter:
        case "C":
            return Completed(at_us=now)
        case "A":
            return Completed(already=True, at_us=int(detail))
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
            return Unavailable(full())
        case _:
            return corrupt(item)
