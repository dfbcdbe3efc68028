"""The fast path for one plain claim or settle: the arguments of its script, and reading the reply. No I/O here.

`claim_one.lua` and `settle_one.lua` do only what the plain case needs. `None` means that the case is not plain: then
nothing has been written, and the scripts for many items decide.
"""

from collections.abc import Sequence
from struct import Struct
from typing import Any, TypeAlias

import msgspec

from semel.core.commands import Answer, Claim, Granted, Item, Known, Settle
from semel.core.ids import digest
from semel.core.machine import decide
from semel.errors import KeyInvalid, RecordCorrupt
from semel.stores.redis import encoding
from semel.stores.redis.calls import Script
from semel.stores.redis.exchange import RedisExchange
from semel.stores.redis.records import (
    CODES,
    HEADER_BYTES,
    NOTHING,
    NULL,
    PRINT,
    STATE_MASK,
    TIME_BYTES,
    VALUE,
    VERSION,
    unpack,
    unpack_known,
)
from semel.types import Busy, Completed, Mismatch

__all__ = ["RedisSingleCall", "RedisSingleClaim", "RedisSingleItems", "RedisSingleSettle"]

CLAIMS_MAX = 1024
"""How many claims are remembered for their settles; when there are more, all are dropped."""
FAR_US = 1 << 52
"""Longer times are not plain: a record that never expires is stored in another way."""
SPARE_MS = 1000
"""How much longer than its expiry the server keeps a record; the same as in `prelude.lua`."""

_FIRST = Struct(">BBBH")
"""The first bytes of a record: version, state and flags, more flags, attempt."""
_FIRST_ATTEMPT = 1
_SETTLED = (CODES["done"], CODES["failed"])
_READ_ONLY = (Known, Busy, Mismatch)
"""Answers to a claim for which no record changes."""

Arguments: TypeAlias = tuple[bytes | int, ...]


def _kept_ms(time_us: int) -> int:
    return -(-time_us // 1000) + SPARE_MS


class GrantedClaim(msgspec.Struct, frozen=True, gc=False):
    """A claim that the fast path wrote: its record's bytes, and the numbers in them that its settle needs."""

    fence: int
    expires_at_us: int
    more: int
    """The second flags of the record."""
    raw: bytes


class RedisSingleClaim:
    """A claim with only a key, an owner, a lease, a window, a type and a fingerprint."""

    __slots__ = ("_claims", "_first", "_more", "_tail", "arguments", "item", "script")

    def __init__(self, item: Claim, exchange: RedisExchange, claims: dict[bytes, GrantedClaim]) -> None:
        """Raises `KeyInvalid`, `OverflowError` and `UnicodeEncodeError` for texts that a record cannot hold."""
        self.item: Claim = item
        self._claims = claims
        self._more, self._tail = encoding.plain_claim(item, readable=exchange.readable_keys)
        self._first = _FIRST.pack(VERSION, 0, self._more, _FIRST_ATTEMPT)
        self.script: Script = exchange.scripts.claim_one
        until_us = item.lease_us + item.window_us
        self.arguments: Arguments = (self._first, until_us, item.lease_us, self._tail, _kept_ms(until_us))

    @staticmethod
    def is_plain(item: Claim) -> bool:
        """Whether the script may be used: if there is no record, the claim is granted and needs no other key."""
        return (
            item.journal is None
            and item.meta is None
            and item.error is None
            and not item.quarantine
            and not item.sliding
            and not item.apart_us
            and not (item.refuse_late and item.event_time_us is not None)
            and 0 < len(item.owner) <= encoding.OWNER_BYTES_MAX
            and item.lease_us >= 0
            and item.window_us >= 0
            and item.lease_us + item.window_us < FAR_US
        )

    def read_answer(self, reply: Any) -> Answer:
        """Return the answer; `None`: not decided."""
        if type(reply) is int:
            self._remember(reply)
            return Granted(reply, 1, reply + self.item.lease_us, reply)
        return None if reply is None else _decide(self.item, *reply)

    def _remember(self, now: int) -> None:
        item, claims = self.item, self._claims
        if len(claims) >= CLAIMS_MAX:
            claims.clear()
        lease_until, fence = (now + item.lease_us).to_bytes(TIME_BYTES), now.to_bytes(TIME_BYTES)
        expires_at = now + item.lease_us + item.window_us
        raw = self._first + expires_at.to_bytes(TIME_BYTES) + lease_until + fence + self._tail
        claims[item.owner] = GrantedClaim(now, expires_at, self._more, raw)


def _decide(item: Claim, now: int, raw: bytes) -> Answer:
    """Answer a claim from the stored record, if that changes nothing; `None`: not decided."""
    try:
        settled = len(raw) > HEADER_BYTES and raw[1] & STATE_MASK in _SETTLED
        if settled and (item.fingerprint is None or not raw[2] & PRINT):
            if item.refresh:
                return None  # it is written, which the script for many items does
            known = unpack_known(raw, item.id, now)
            return known if known.rest_us > 0 else None
        answer, changed = decide(unpack(raw, item.id), item, now)
    except RecordCorrupt:
        return None
    return answer if changed is None and isinstance(answer, _READ_ONLY) else None


class RedisSingleSettle:
    """A completion or a failure of a claim that the fast path wrote, and that has not changed since."""

    __slots__ = ("arguments", "item", "script")

    def __init__(self, item: Settle, exchange: RedisExchange, claim: GrantedClaim) -> None:
        self.item: Settle = item
        state, more, value = CODES[item.to], claim.more, b""
        if item.value == NULL:
            more |= NOTHING
        elif item.value is not None:
            state |= VALUE
            value = len(item.value).to_bytes(4) + item.value
        self.script: Script = exchange.scripts.settle_one
        self.arguments: Arguments = (
            claim.raw,
            claim.expires_at_us,
            _FIRST.pack(VERSION, state, more, _FIRST_ATTEMPT),
            item.window_us,
            value,
            _kept_ms(item.window_us),
            exchange.layout.channel,
        )

    @staticmethod
    def is_plain(item: Settle) -> bool:
        """Whether the script may be used, if the fast path wrote the claim."""
        return item.to in ("done", "failed") and item.error is None and 0 <= item.window_us < FAR_US

    @staticmethod
    def read_answer(reply: Any) -> Answer:
        """Return the answer; `None`: not decided."""
        return None if reply is None else Completed(at_us=reply)


RedisSingleCall: TypeAlias = RedisSingleClaim | RedisSingleSettle


class RedisSingleItems:
    """The fast path of one store object. It remembers the claims that it wrote, for their settles."""

    def __init__(self, exchange: RedisExchange) -> None:
        self._exchange = exchange
        self._claims: dict[bytes, GrantedClaim] = {}
        """By owner."""
        self._serves: bool = not exchange.cluster
        self._settles: bool = exchange.waits is None
        """Whether a settle is over with its reply: it does not wait for replicas or disks."""

    def call_for(self, items: Sequence[Item]) -> RedisSingleCall | None:
        """Return the call for a single plain item; `None`: it has to go the full way, as the very first item does."""
        if len(items) != 1 or not self._serves or 0 not in self._exchange.epochs:
            return None
        item = items[0]
        try:
            if type(item) is Claim:
                return (
                    RedisSingleClaim(item, self._exchange, self._claims)
                    if RedisSingleClaim.is_plain(item)
                    else None
                )
            if type(item) is Settle:
                claim = self._claims.pop(item.owner, None)
                if (
                    claim is not None
                    and claim.fence == item.fence
                    and self._settles
                    and RedisSingleSettle.is_plain(item)
                ):
                    return RedisSingleSettle(item, self._exchange, claim)
        except (KeyInvalid, UnicodeEncodeError, OverflowError):
            pass  # the full way refuses it with a message
        return None

    def command_of(self, call: RedisSingleCall, now: bytes, *, as_text: bool) -> Sequence[bytes | int]:
        """Return the command for the call."""
        exchange, key = self._exchange, digest(call.item.id)
        script = call.script
        return (
            b"EVAL" if as_text else b"EVALSHA",
            script.text if as_text else script.sha,
            2,
            exchange.layout.epochs[0],
            exchange.layout.records[key[0] & (encoding.BUCKETS - 1)] + key,
            now,
            exchange.epochs[0],
            *call.arguments,
        )
