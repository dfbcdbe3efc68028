"""Digests of keys for stores, idempotency keys for other systems, times in ids, and the declared kind of ids.

The parts are length-prefixed, so that no two different (tenant, consumer, key) read the same.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from hashlib import sha256
from typing import TypeAlias

from semel.errors import KeyInvalid, PolicyInvalid, UsageError
from semel.policy import Policy
from semel.types import Id, Mode

__all__ = [
    "DIGEST_BYTES",
    "KINDS",
    "OPAQUE",
    "OWN",
    "TWITTER_EPOCH_MS",
    "WORKER_ID_BYTES",
    "TimeOf",
    "check_ids",
    "check_kind",
    "digest",
    "digests_of",
    "fingerprint",
    "holds_time",
    "idempotency_key",
    "is_own",
    "scope",
    "time_in",
    "time_reader",
    "worker_id",
]

DIGEST_BYTES = 16
FINGERPRINT_VERSION = b"\x01"
WORKER_ID_BYTES = 4
"""The owners of one process begin with the same bytes: they identify the worker after its death."""
OWN = "semel."
"""The prefix of tenants and consumers for semel's own records."""


def is_own(tenant: str, consumer: str) -> bool:
    """Whether the records there are semel's own: tokens, figures, audit, progress. Lists leave them out by default."""
    return tenant.startswith(OWN) or consumer.startswith(OWN)


def worker_id(owner: bytes) -> str:
    """Return the id of the worker that made the owner; the names of workers end with it."""
    return owner[:WORKER_ID_BYTES].hex()


@lru_cache(maxsize=1024)
def scope(tenant: str, consumer: str) -> bytes:
    """Return the common part of the digest input of a consumer's keys."""
    whose, who = tenant.encode(), consumer.encode()
    return b"%d:%b%d:%b" % (len(whose), whose, len(who), who)


def digest(record_id: Id) -> bytes:
    """Return the 16-byte digest of (tenant, consumer, key)."""
    return sha256(scope(record_id[0], record_id[1]) + record_id[2].encode()).digest()[:DIGEST_BYTES]


def digests_of(tenant: str, consumer: str, keys: Iterable[str]) -> list[bytes]:
    """The digests of many keys of one consumer."""
    prefix = scope(tenant, consumer)
    return [sha256(prefix + key.encode()).digest()[:DIGEST_BYTES] for key in keys]


def idempotency_key(record_id: Id, step: str = "") -> str:
    """A key for the systems a handler calls: the same on every attempt, another for each step."""
    base = scope(record_id[0], record_id[1])
    name, key = step.encode(), record_id[2].encode()
    return sha256(b"key%b%d:%b%b" % (base, len(name), name, key)).hexdigest()[:32]


def fingerprint(payload: bytes) -> bytes:
    """Return the fingerprint of a payload's bytes. The first byte is the version."""
    if not isinstance(payload, bytes | bytearray | memoryview):
        raise UsageError(
            f"a fingerprint is made of bytes, not of a {type(payload).__name__}; encode it first"
        )
    return FINGERPRINT_VERSION + sha256(payload).digest()[:DIGEST_BYTES]


TimeOf: TypeAlias = Callable[[str], int]
"""Microseconds since 1970 inside an id, without its namespace. Raises `ValueError` where it is none of the kind."""

TWITTER_EPOCH_MS = 1_288_834_974_657
"""The epoch of Snowflakes, unless another is declared: `snowflake:1420070400000`."""
KSUID_EPOCH_S = 1_400_000_000
SNOWFLAKE_MAX = 2**63
EPOCH_MS_MAX = 2**42

_UUID7 = re.compile(r"([0-9a-f]{8})-([0-9a-f]{4})-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", re.IGNORECASE)
_ULID = re.compile(r"([0-7][0-9A-HJKMNP-TV-Z]{9})[0-9A-HJKMNP-TV-Z]{16}", re.IGNORECASE)
_KSUID = re.compile(r"[0-9A-Za-z]{27}")
_SNOWFLAKE = re.compile(r"[1-9][0-9]{0,18}")

_CROCKFORD = {sign: value for value, sign in enumerate("0123456789ABCDEFGHJKMNPQRSTVWXYZ")}
_BASE62 = {
    sign: value for value, sign in enumerate("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
}


def _uuid7(text: str) -> int:
    match = _UUID7.fullmatch(text)
    if match is None:
        raise ValueError("a UUID of version 7, like 01989c2e-2f4b-7c31-9a52-0f6a7d1c2b3e")
    return int(match[1] + match[2], 16) * 1000


def _ulid(text: str) -> int:
    match = _ULID.fullmatch(text)
    if match is None:
        raise ValueError("a ULID: 26 letters and digits without I, L, O and U, the first at most 7")
    time_ms = 0
    for sign in match[1].upper():
        time_ms = time_ms * 32 + _CROCKFORD[sign]
    return time_ms * 1000


def _ksuid(text: str) -> int:
    number = 0
    if _KSUID.fullmatch(text):
        for sign in text:
            number = number * 62 + _BASE62[sign]
        if not number >> 160:
            return ((number >> 128) + KSUID_EPOCH_S) * 1_000_000
    raise ValueError("a KSUID: 27 letters and digits")


def _snowflake(text: str, epoch_ms: int = TWITTER_EPOCH_MS) -> int:
    if not _SNOWFLAKE.fullmatch(text) or int(text) >= SNOWFLAKE_MAX:
        raise ValueError("a Snowflake: a whole number below 2^63, without sign or leading zeros")
    return ((int(text) >> 22) + epoch_ms) * 1000


KINDS: Mapping[str, TimeOf] = {"uuid7": _uuid7, "ulid": _ulid, "ksuid": _ksuid, "snowflake": _snowflake}
"""What may be declared. A Snowflake may name its epoch in milliseconds since 1970: `snowflake:1420070400000`."""
OPAQUE = "opaque"
"""The kind of ids without a time: any key. It may be declared for marks, which partitions hold by their arrival."""


def holds_time(kind: str) -> bool:
    """Whether ids of this kind contain a time; empty: no kind was declared."""
    return bool(kind) and kind != OPAQUE


def check_kind(kind: str) -> str:
    """The kind as it is recorded, with a Snowflake's usual epoch left out. Raises `PolicyInvalid`."""
    if kind == OPAQUE:
        return kind
    name, _, epoch = kind.partition(":")
    if name not in KINDS or (epoch and name != "snowflake") or kind.endswith(":"):
        raise PolicyInvalid(
            f"ids is {kind!r}; declare one of {', '.join((*KINDS, OPAQUE))} (or snowflake:EPOCH_MS)"
        )
    if not epoch:
        return kind
    if not re.fullmatch(r"[0-9]{1,13}", epoch) or int(epoch) >= EPOCH_MS_MAX:
        raise PolicyInvalid(f"the epoch {epoch!r} of ids is not a number of milliseconds since 1970")
    return name if int(epoch) == TWITTER_EPOCH_MS else f"{name}:{int(epoch)}"


@lru_cache(maxsize=64)
def time_reader(kind: str) -> TimeOf:
    """Return the function that reads the time from ids of a declared kind."""
    name, _, epoch = kind.partition(":")
    if not epoch:
        return KINDS[name]
    epoch_ms = int(epoch)
    return lambda text: _snowflake(text, epoch_ms)


def time_in(kind: str, key: str) -> int:
    """Microseconds since 1970 inside a key of this kind: the same for every copy of the event.

    Raises `KeyInvalid` for a key that is not of the kind.
    """
    try:
        return time_reader(kind)(key.rpartition(":")[2])
    except ValueError as error:
        shown = ascii(key if len(key) <= 60 else key[:57] + "...")  # noqa: PLR2004 - as much as fits a line
        raise KeyInvalid(f"key {shown} is not {error}; the consumer declared ids={kind!r}") from None


IDS_MODES: tuple[Mode, ...] = ("lease", "observe", "mark", "inbox")
"""The modes whose consumers may declare the kind of their ids."""


def check_ids(ids: str, mode: Mode, policy: Policy) -> str:
    """Return the kind of ids as it is recorded. Raises `PolicyInvalid` if the mode or policy does not allow ids."""
    if mode not in IDS_MODES:
        raise PolicyInvalid(
            f"ids={ids!r} is for mode {', '.join(IDS_MODES)}, not {mode!r}: records of declared ids are removed with"
            " their partition, and records of this mode must not be"
        )
    if policy.refresh_on_sight:
        raise PolicyInvalid(
            f"ids={ids!r} does not go with Policy.refresh_on_sight: records of declared ids are removed with their"
            " partition, however late they were seen"
        )
    if ids == OPAQUE and mode != "mark":
        raise PolicyInvalid(
            f"ids={ids!r} is for mode 'mark', not {mode!r}: the partition of a record depends on the time in its id"
        )
    if policy.inbox_table is not None:
        raise PolicyInvalid(
            f"ids={ids!r} does not go with Policy.inbox_table: the rows of {policy.inbox_table.name} are yours to lay"
            " out and to remove"
        )
    if policy.late == "run" and mode != "mark":  # marks have no Late: they are looked up by their arrival
        raise PolicyInvalid(
            f"ids={ids!r} needs Policy(late='hold') or 'reject': an id older than the stored records, or from the"
            " future, is answered Late, because the store cannot know whether it ran"
        )
    return check_kind(ids)
