"""The fast path for one plain claim or settle: the parameters of its statement in `single.sql`, and reading its row.

No I/O here. `None` means that the case is not plain: the statements for many items decide it.
"""

from struct import Struct
from typing import TypeAlias

from psycopg.pq.abc import PGresult

from semel.core.commands import Answer, Claim, Granted, Item, Known, Settle
from semel.core.ids import digest
from semel.stores.postgres import encoding
from semel.stores.postgres.batch import BIGINT, FAR_US
from semel.stores.rows import JOURNAL
from semel.types import Busy, Completed

__all__ = ["SingleCall", "SingleClaim", "SingleSettle"]

Parameters: TypeAlias = list[bytes | None]

_BIGINT = Struct(">q")
_INTEGER = Struct(">i")
_GOALS = {"done": b"\x00\x01", "failed": b"\x00\x02"}
_GRANTED, _DONE, _FAILED, _BUSY = (bytes((0, verdict)) for verdict in (0, 1, 2, 3))


def _bigint(value: bytes | None) -> int:
    return 0 if value is None else int.from_bytes(value, "big", signed=True)


class SingleClaim:
    """A claim that has only a key, an owner, a lease, a window, a fingerprint and a type."""

    name = "claim_one"
    __slots__ = ("item", "parameters")

    def __init__(self, item: Claim, consumer: int, now: int | None, *, readable_keys: bool) -> None:
        """Raises `UnicodeEncodeError` for names that are not valid text."""
        pack = _BIGINT.pack
        self.item: Claim = item
        self.parameters: Parameters = [
            None if now is None else pack(now),
            digest(item.id),
            item.owner,
            pack(item.lease_us),
            pack(item.window_us),
            _INTEGER.pack(consumer),
            item.fingerprint,
            encoding.storable(item.event_type).encode() if item.event_type else None,
            encoding.storable(item.id[2]).encode() if readable_keys else None,
        ]

    @staticmethod
    def is_plain(item: Claim) -> bool:
        """Whether the statement may be used: the claim needs only one row, and no decision."""
        return (
            item.journal is None
            and item.meta is None
            and item.error is None
            and not item.apart_us
            and not item.quarantine
            and not item.sliding
            and not (item.refuse_late and item.event_time_us is not None)
            and item.lease_us + item.window_us < FAR_US
        )

    def read_answer(self, result: PGresult) -> Answer:
        """Return the answer; `None`: not decided."""
        value = result.get_value
        for row in range(result.ntuples):
            if value(row, 0) == _GRANTED:
                fence = _bigint(value(row, 1))
                return Granted(fence, 1, fence + self.item.lease_us, fence)
        verdict = value(0, 0) if result.ntuples else None
        if verdict in (_DONE, _FAILED) and not self.item.refresh:
            return Known(
                "done" if verdict == _DONE else "failed",
                value(0, 5),
                _bigint(value(0, 1)),
                _bigint(value(0, 3)),
                _bigint(value(0, 4)),
                _bigint(value(0, 6)),
            )
        if verdict == _BUSY:
            return Busy(_bigint(value(0, 3)) / 1e6, bool(_bigint(value(0, 2)) & JOURNAL))
        return None


class SingleSettle:
    """A completion or a failure of a claim that has not changed since it was granted."""

    name = "settle_one"
    __slots__ = ("item", "parameters")

    def __init__(self, item: Settle, now: int | None) -> None:
        """Raises `UnicodeEncodeError` for names that are not valid text."""
        pack = _BIGINT.pack
        self.item: Settle = item
        self.parameters: Parameters = [
            None if now is None else pack(now),
            digest(item.id),
            item.owner,
            pack(item.fence),
            _GOALS[item.to],
            item.value,
            pack(item.window_us),
        ]

    @staticmethod
    def is_plain(item: Settle) -> bool:
        """Whether the statement may be used. An empty owner is not allowed: a released claim has one."""
        return (
            item.to in _GOALS
            and bool(item.owner)
            and item.window_us < FAR_US
            and item.fence in BIGINT
            and item.error is None
        )

    @staticmethod
    def read_answer(result: PGresult) -> Answer:
        """Return the answer; `None`: not decided."""
        return Completed(at_us=_bigint(result.get_value(0, 0))) if result.ntuples else None


SingleCall: TypeAlias = SingleClaim | SingleSettle


def single_call(item: Item, consumer: int, now: int | None, *, readable_keys: bool) -> SingleCall | None:
    """Return the single statement for the item; `None`: the item is not plain."""
    try:
        if isinstance(item, Claim):
            if SingleClaim.is_plain(item):
                return SingleClaim(item, consumer, now, readable_keys=readable_keys)
        elif isinstance(item, Settle) and SingleSettle.is_plain(item):
            return SingleSettle(item, now)
    except UnicodeEncodeError:
        pass  # the statements for many items refuse it with a message
    return None
