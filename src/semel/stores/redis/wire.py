"""Turn items into what the scripts take, and what they answer into answers. No I/O, no clock."""

from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256
from struct import Struct, error
from typing import Any

from semel.core.commands import Claim, Forget, Granted, Known, Lookup, RecordItem, Renew, Resolve, Settle
from semel.core.machine import check, standing
from semel.digests import DIGEST_BYTES, scope
from semel.errors import KeyInvalid, RecordCorrupt, StoreFull
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
    Record,
    Renewed,
    State,
    Unavailable,
    Unknown,
)

BUCKETS = 64
"""So many hash tags: a batch needs at most as many calls on a cluster, and they spread over its masters."""
VERSION = 1
HEADER_BYTES = 26
STATES: tuple[State, ...] = ("claimed", "done", "failed", "unknown", "forgotten")
CODES: dict[State | str, int] = {state: code for code, state in enumerate(STATES)}
RELEASED = 5
ENDS: dict[str, int] = {"done": 1, "failed": 2, "unknown": 3, "released": RELEASED}

STATE_MASK = 7
QUARANTINE, SLIDING, SEEN, VALUE, JOURNAL = 8, 16, 32, 64, 128
NAME, TYPE, PRINT, META, STEPS = 1, 2, 4, 8, 16
WITH_VALUE, SLIDES, COUNTED, NAMED = 1, 2, 4, 8
ANY_STATE = 255
TEXT_BYTES_MAX = 65_535
"""The longest name or event type, or fingerprint, that a record holds."""
OWNER_BYTES_MAX = 255

_CLAIM = Struct(">BBBddd")
_SETTLE = Struct(">BBBdddd")
_RENEW = Struct(">BBdd")
_FORGET = Struct(">BBdB")
_U2, _U4, _U7 = Struct(">H"), Struct(">I"), 7
_SCOPE = Struct(">HH")

TAG_BYTES = 4


# --- names --------------------------------------------------------------------------------------


def digests_of(tenant: str, consumer: str, keys: Sequence[str]) -> list[bytes]:
    """The digests of many keys of one consumer."""
    head = scope(tenant, consumer)
    return [sha256(head + key.encode()).digest()[:DIGEST_BYTES] for key in keys]


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


def id_of(name: bytes | None, digest: bytes) -> Id:
    """Whose record it is; a key that was not kept is shown by its digest."""
    if name is None:
        return ("", "", digest.hex())
    whose, who = _SCOPE.unpack_from(name)
    at = _SCOPE.size + whose
    key = name[at + who :]
    return (name[_SCOPE.size : at].decode(), name[at : at + who].decode(), key.decode() or digest.hex())


# --- items --------------------------------------------------------------------------------------


def claims(items: Sequence[Claim], *, readable: bool) -> tuple[list[bytes], list[bytes]]:
    """The digest of each item's record, and what the claim script takes for it."""
    shapes: dict[tuple[int, int, bool], bytes] = {}
    digests: list[bytes] = []
    args: list[bytes] = []
    whose = prefix = name = b""
    scoped: tuple[str, str] | None = None
    for item in items:
        tenant, consumer, text = item.id
        if (tenant, consumer) != scoped:
            scoped = (tenant, consumer)
            prefix, name = scope(tenant, consumer), scope_name(tenant, consumer)
        key = text.encode()
        digests.append(sha256(prefix + key).digest()[:DIGEST_BYTES])
        owner = item.owner
        if item.quarantine or not readable or _has_more(item):
            named = readable or item.quarantine or item.journal is not None
            whose = name + key if named else name
            args.append(_whole_claim(item, b"%c%b%b%b" % (len(owner), owner, _U2.pack(len(whose)), whose)))
            continue
        shape = (item.lease_us, item.window_us, item.sliding)
        head = shapes.get(shape)
        if head is None:
            head = shapes[shape] = _head(item, 0, NAME)
        args.append(
            b"%b%c%b%b%b%b" % (head, len(owner), owner, (len(name) + len(key)).to_bytes(2), name, key)
        )
    return digests, args


def _has_more(item: Claim) -> bool:
    return not (
        item.fingerprint is None
        and item.journal is None
        and item.event_time_us is None
        and item.meta is None
        and not item.event_type
    )


def _whole_claim(item: Claim, tail: bytes) -> bytes:
    flags, more = 0, NAME
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
    return _head(item, flags, more) + tail


def _head(item: Claim, flags: int, more: int) -> bytes:
    if item.quarantine:
        flags |= QUARANTINE
    if item.sliding:
        flags |= SLIDING
    late = item.refuse_late and item.event_time_us is not None
    return _CLAIM.pack(flags, more, late, item.lease_us, item.window_us, item.event_time_us or 0)


def _short(text: bytes, what: str) -> bytes:
    if len(text) > TEXT_BYTES_MAX:
        raise KeyInvalid(f"{what} has {len(text)} bytes; a record holds {TEXT_BYTES_MAX}")
    return _U2.pack(len(text)) + text


def ends(items: Sequence[RecordItem]) -> tuple[list[bytes], list[bytes]]:
    """The digest of each item's record, and what the settle script takes for it."""
    digests = [
        sha256(scope(tenant, consumer) + key.encode()).digest()[:DIGEST_BYTES]
        for tenant, consumer, key in [item.id for item in items]
    ]
    return digests, [settle(item) if type(item) is Settle else _ENDS[type(item)](item) for item in items]


def settle(item: Settle, name: bytes = b"") -> bytes:
    """What the settle script takes for the end of a claim."""
    options, value, to = COUNTED if item.count_attempt else 0, b"", item.to
    if item.value is not None and to in ("done", "failed"):
        options |= WITH_VALUE
        value = len(item.value).to_bytes(4) + item.value
    if item.sliding:
        options |= SLIDES
    if name:
        options |= NAMED
    head = _SETTLE.pack(83, ENDS[to], options, item.fence, item.window_us, item.lease_us, item.delay_us)
    return b"%b%c%b%b%b" % (head, len(item.owner), item.owner, name, value)


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
    options, value = 2 if item.to == "absent" else 0, b""
    if item.to == "done" and item.value is not None:
        options, value = 1, _U4.pack(len(item.value)) + item.value
    return _RENEW.pack(86, options, item.fence, item.window_us) + value


def rewindow(window_us: int) -> bytes:
    """What the settle script takes to move the expiry of a settled record."""
    return b"W" + Struct(">d").pack(window_us)


_ENDS: dict[type, Any] = {Renew: _renew, Lookup: _lookup, Forget: _forget, Resolve: _resolve}


# --- records ------------------------------------------------------------------------------------


class Reader:
    """Reads the parts of a record one after the other."""

    __slots__ = ("at", "raw")

    def __init__(self, raw: bytes, at: int) -> None:
        self.raw: bytes = raw
        self.at: int = at

    def number(self, width: int) -> int:
        """A number of so many bytes."""
        at, self.at = self.at, self.at + width
        return int.from_bytes(self.raw[at : self.at], "big")

    def part(self, width: int) -> bytes:
        """A part after its length."""
        length = self.number(width)
        at, self.at = self.at, self.at + length
        if self.at > len(self.raw):
            raise ValueError("cut short")
        return self.raw[at : self.at]

    def end(self) -> None:
        """Nothing may follow."""
        if self.at != len(self.raw):
            raise ValueError("it is too long")


class Head:
    """The header of a record and its name: all that is read of one while looking for others."""

    __slots__ = (
        "at",
        "attempt",
        "expires_at",
        "fence",
        "first_seen",
        "flags",
        "more",
        "name",
        "owner",
        "rest",
        "type",
    )

    def __init__(self, raw: bytes) -> None:
        if len(raw) <= HEADER_BYTES or raw[0] != VERSION or raw[1] & STATE_MASK > CODES["forgotten"]:
            raise ValueError("it is none that semel writes")
        self.flags: int = raw[1]
        self.more: int = raw[2]
        reader = Reader(raw, 3)
        self.attempt: int = reader.number(2)
        self.fence: int = reader.number(_U7)
        self.expires_at: int = reader.number(_U7)
        self.at: int = reader.number(_U7)
        self.owner: bytes = reader.part(1)
        self.first_seen: int = reader.number(_U7) if self.flags & SEEN else self.fence
        self.name: bytes | None = reader.part(2) if self.more & NAME else None
        self.type: str = reader.part(2).decode() if self.more & TYPE else ""
        self.rest: Reader = reader


def unpack(raw: bytes, record_id: Id) -> Record:
    """The record of these bytes. Raises `RecordCorrupt` where they are none that semel writes."""
    try:
        head = Head(raw)
        rest = head.rest
        fingerprint = rest.part(2) if head.more & PRINT else None
        meta = rest.part(4) if head.more & META else None
        steps = _steps(rest.part(4)) if head.more & STEPS else ()
        journal = rest.part(4) if head.flags & JOURNAL else None
        value = rest.part(4) if head.flags & VALUE else None
        rest.end()
    except (ValueError, IndexError, error) as trouble:
        raise RecordCorrupt(f"record {record_id!r} does not read: {trouble}") from trouble
    return check(_record(head, record_id, fingerprint, meta, steps, journal, value))


def _record(
    head: Head,
    record_id: Id,
    fingerprint: bytes | None = None,
    meta: bytes | None = None,
    steps: tuple[tuple[str, bytes | None], ...] = (),
    journal: bytes | None = None,
    value: bytes | None = None,
) -> Record:
    state = STATES[head.flags & STATE_MASK]
    claimed = state == "claimed"
    return Record(
        id=record_id,
        state=state,
        owner=head.owner,
        fence=head.fence,
        lease_until=head.at if claimed else 0,
        attempt=head.attempt,
        expires_at=head.expires_at,
        first_seen=head.first_seen,
        settled_at=0 if claimed else head.at,
        value=value,
        fingerprint=fingerprint,
        steps=steps,
        journal=journal,
        event_type=head.type,
        meta=meta,
        quarantine=bool(head.flags & QUARANTINE),
        sliding=bool(head.flags & SLIDING),
    )


_TIME_BITS = 56
_TIME_MASK = (1 << _TIME_BITS) - 1
_DONE, _FAILED = 1, 2


def known(raw: bytes, record_id: Id) -> Known:
    """What a duplicate is told, without reading what it does not need. Raises `RecordCorrupt`."""
    try:
        flags, more, state = raw[1], raw[2], raw[1] & STATE_MASK
        times = int.from_bytes(raw[5:HEADER_BYTES])
        fence = first_seen = times >> 2 * _TIME_BITS
        at = HEADER_BYTES + 1 + raw[HEADER_BYTES]
        if flags & SEEN:
            first_seen = int.from_bytes(raw[at : at + _U7])
            at += _U7
        for flag in _SHORT_PARTS:
            if more & flag:
                at += 2 + (raw[at] << 8) + raw[at + 1]
        for flag in _LONG_PARTS:
            if more & flag:
                at += 4 + int.from_bytes(raw[at : at + 4])
        value = None
        if flags & VALUE:
            value = raw[at + 4 :]
            at += 4 + int.from_bytes(raw[at : at + 4])
    except IndexError as trouble:
        raise RecordCorrupt(f"record {record_id!r} does not read: {trouble}") from trouble
    if at != len(raw) or raw[0] != VERSION or state not in (_DONE, _FAILED) or flags & JOURNAL or not fence:
        raise RecordCorrupt(f"record {record_id!r} is answered as settled, and does not read so")
    return Known("done" if state == _DONE else "failed", value, fence, times & _TIME_MASK, first_seen)


_SHORT_PARTS = (NAME, TYPE, PRINT)
_LONG_PARTS = (META, STEPS)


def outline(raw: bytes, digest: bytes) -> Record:
    """A record from the beginning of its bytes: without its payloads. Raises `RecordCorrupt`."""
    try:
        head = Head(raw)
        record_id = id_of(head.name, digest)
    except (ValueError, IndexError, error) as trouble:
        raise RecordCorrupt(f"the record of {digest.hex()} does not read: {trouble}") from trouble
    return _record(head, record_id, journal=b"" if head.flags & JOURNAL else None)


def _steps(raw: bytes) -> tuple[tuple[str, bytes | None], ...]:
    reader = Reader(raw, 0)
    found: list[tuple[str, bytes | None]] = []
    while reader.at < len(raw):
        name = reader.part(2).decode()
        length = reader.number(4)
        if not length:
            found.append((name, None))
            continue
        at, reader.at = reader.at, reader.at + length - 1
        found.append((name, raw[at : reader.at]))
    if reader.at != len(raw):
        raise ValueError("its steps are cut short")
    return tuple(found)


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
            return Granted(r.fence, r.attempt, r.lease_until, r.first_seen, r.steps, r.journal)
        case "K":
            return known(detail, item.id)
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
            return Completed(at=now)
        case "A":
            return Completed(already=True, at=int(detail))
        case "R":
            return Completed(recreated=True, at=now)
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
            return mark_of(item.id, int(detail))
        case "f":
            return Forgotten(int(detail))
        case "B" | "J":
            return Busy(int(detail) / 1e6, letter == "J")
        case "O":
            return Unavailable(full())
        case _:
            return corrupt(item)


def mark_of(record_id: Id, expires_at: int) -> Record:
    """A mark is a done record without owner or value."""
    return Record(
        id=record_id,
        state="done",
        owner=b"",
        fence=1,
        lease_until=0,
        attempt=1,
        expires_at=min(expires_at, FOREVER),
        first_seen=0,
    )
