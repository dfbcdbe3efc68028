"""Tokens with tenant, role and expiry, stored as records under a tenant of their own.

Only the SHA-256 of a token's secret is stored. In `semel_<id>_<secret>` the id finds the record; the secret is
compared in constant time. Every instance on the store knows every token; a revoked one is refused within seconds.

A store that has ever had a token keeps a marker, so that it still needs tokens after the last one is revoked.

Sessions of the dashboard: a browser holds a random id, and the store maps it to a token. The records are under the
tenant of the tokens, by the digest of the id: every instance knows every session, and readers of the store cannot use
a session. A session ends with its token, at logout, and after a week.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any, Literal, TypeAlias, get_args

import msgspec

from semel.codec import decode, encode
from semel.core.commands import (
    Admit,
    Claim,
    Forget,
    Granted,
    Item,
    Lookup,
    Page,
    Scan,
    Settle,
    answer_or_raise,
)
from semel.core.ids import OWN
from semel.errors import KeyInvalid, RecordCorrupt, StoreError
from semel.keys.limits import check_consumer
from semel.runtime import audit
from semel.runtime.process import new_owner
from semel.types import Absent, Forgotten, Id, Record
from semel.windows import FOREVER_US

__all__ = [
    "CONSUMER",
    "ROLES",
    "SESSION_SHAPE",
    "TENANT",
    "Role",
    "Token",
    "create",
    "end_session",
    "find_session",
    "is_closed",
    "keep",
    "last_uses",
    "lookup",
    "note_use",
    "revoke",
    "rotate",
    "start_session",
    "tokens",
    "were_made",
]

Role: TypeAlias = Literal["read", "write", "admin"]
ROLES: tuple[Role, ...] = get_args(Role)
"""Each role includes the ones before it."""

TENANT = "semel.tokens"
CONSUMER = "tokens"
"""The tenant of the records: callers of the service cannot name it."""
RETIRED = "retired"
"""The consumer of the records with the end of a rotated token's grace period."""
USED = "used"
"""The consumer of the records with the last use of each token."""
MARKER: Id = (TENANT, "marker", "closed")
"""The key of the marker."""
GRACE_US = 24 * 3600 * 1_000_000
"""The default grace period: how long a rotated token stays valid beside the new one."""
USE_EVERY_US = 60 * 1_000_000
"""The least interval between writes of a token's last use."""
LEASE_US = 10_000_000
ID_BYTES = 8
SECRET_BYTES = 32
PAGE = 200
SHAPE = re.compile(r"semel_([0-9a-f]{16})_([A-Za-z0-9_-]{43})")

Asking: TypeAlias = Generator[Item, Any, Any]
"""A generator that yields items and receives their answers, for the command line and the server."""


class Token(msgspec.Struct, frozen=True):
    """The stored part of a token."""

    id: str
    name: str
    """The name of its user, for people."""
    tenant: str | None
    """The tenant whose records it may use; `None`: all."""
    role: Role
    digest: str
    """SHA-256 of the secret, in hex."""
    created_at: int
    """By the store's clock, in microseconds."""
    expires_at: int = 0
    """The same; 0: never."""

    def is_over(self, now_us: int) -> bool:
        """Whether it has expired, or its grace after a rotation has ended."""
        return bool(self.expires_at) and now_us >= self.expires_at

    def allows(self, role: Role) -> bool:
        """Whether its role includes that role."""
        return ROLES.index(self.role) >= ROLES.index(role)

    def matches(self, secret: str) -> bool:
        """Whether this is its secret, compared in constant time."""
        return hmac.compare_digest(self.digest, _digest(secret))


def split(text: str) -> tuple[str, str] | None:
    """Return the id and the secret of a token, or `None` for other text."""
    found = SHAPE.fullmatch(text)
    return (found[1], found[2]) if found else None


def create(
    name: str, tenant: str | None, role: Role, expires_us: int | None = None, actor: str | None = None
) -> Asking:
    """Create a token; returns it and its text, which is not stored. From then on the store needs tokens."""
    check_consumer(name)
    if tenant:
        check_consumer(tenant)
        if tenant.startswith(OWN):
            raise KeyInvalid(f"tenants that begin with {OWN!r} are semel's own; choose another name")
    token_id, secret = secrets.token_hex(ID_BYTES), secrets.token_urlsafe(SECRET_BYTES)
    yield from audit.note(
        tenant or "",
        "token create",
        actor or audit.whoami(),
        token=token_id,
        name=name,
        role=role,
        all_tenants=tenant is None,
    )
    yield from _close()

    def value(made_at: int) -> Token:
        expires_at = 0 if expires_us is None else made_at + expires_us
        return Token(token_id, name, tenant, role, _digest(secret), made_at, expires_at)

    token = yield from keep(_place(token_id), value, FOREVER_US if expires_us is None else expires_us)
    return token, f"semel_{token_id}_{secret}"


def rotate(
    token: Token, expires_us: int | None = None, grace_us: int = GRACE_US, actor: str | None = None
) -> Asking:
    """Create a token like this one, which stays valid for the grace period; returns the new one and its text.

    The new one has the same lifetime as the old one, unless `expires_us` is given.
    """
    if expires_us is None and token.expires_at:
        expires_us = token.expires_at - token.created_at
    made, text = yield from create(token.name, token.tenant, token.role, expires_us, actor)
    yield from audit.note(
        token.tenant or "", "token rotate", actor or audit.whoami(), token=token.id, replaced_by=made.id
    )
    place = (TENANT, RETIRED, token.id)
    yield Forget(place)  # from an earlier rotation
    yield from keep(place, lambda made_at: {"until": made_at + grace_us}, FOREVER_US)
    return made, text


def is_closed() -> Asking:
    """Whether this store has the marker, which is written before its first token."""
    return not isinstance(answer_or_raise((yield Lookup(MARKER))), Absent)


def were_made() -> Asking:
    """Whether this store has ever had a token."""
    if (yield from is_closed()):
        return True
    if (yield from tokens()):  # created before markers existed
        yield from _close()
        return True
    return False


def lookup(token_id: str) -> Asking:
    """Return the token of that id, or `None`."""
    record = answer_or_raise((yield Lookup(_place(token_id))))
    token = None if isinstance(record, Absent) else _token(record)
    if token is None:
        return None
    retired = answer_or_raise((yield Lookup((TENANT, RETIRED, token_id))))
    return token if isinstance(retired, Absent) else _with_grace(token, retired)


def tokens() -> Asking:
    """Return all tokens, oldest first."""
    found = [token for record in (yield from _records(CONSUMER)) if (token := _token(record)) is not None]
    retired = {record.key: record for record in (yield from _records(RETIRED))}
    found = [_with_grace(each, retired[each.id]) if each.id in retired else each for each in found]
    return sorted(found, key=lambda token: token.created_at)


def last_uses() -> Asking:
    """Return the last use of each used token by its id, to the minute."""
    return {record.key: record.settled_at_us for record in (yield from _records(USED))}


def note_use(token_id: str, now_us: int) -> Asking:
    """Record the use of a token, unless an instance did so within the last minute."""
    place = (TENANT, USED, token_id)
    record = answer_or_raise((yield Lookup(place)))
    if isinstance(record, Record):
        if now_us - record.settled_at_us < USE_EVERY_US:
            return
        answer_or_raise((yield Forget(place, fence=record.fence)))
    yield from keep(place, lambda _: None, FOREVER_US)


def revoke(token_id: str, actor: str | None = None) -> Asking:
    """Revoke a token; returns whether it existed."""
    token = yield from lookup(token_id)
    if token is None:
        return False
    yield from audit.note(
        token.tenant or "", "token revoke", actor or audit.whoami(), token=token_id, name=token.name
    )
    found = isinstance(answer_or_raise((yield Forget(_place(token_id)))), Forgotten)
    for consumer in (RETIRED, USED):
        answer_or_raise((yield Forget((TENANT, consumer, token_id))))
    return found


def keep(place: Id, value: Callable[[int], Any], window_us: int) -> Asking:
    """Store a value in a new record; it is built with the store's time, and returned."""
    owner = new_owner()
    answer_or_raise((yield Admit(place[0], place[1], "lease")))
    granted = answer_or_raise((yield Claim(place, owner, LEASE_US, window_us)))
    if not isinstance(granted, Granted):
        raise StoreError("it could not be stored; try again")
    made = value(granted.first_seen_us)
    encoded = encode(msgspec.to_builtins(made))
    answer_or_raise((yield Settle(place, owner, granted.fence, "done", encoded, window_us, LEASE_US)))
    return made


def _close() -> Asking:
    """Write the marker, before the first token is created."""
    if not (yield from is_closed()):
        with suppress(StoreError):  # another process writes it at the same time
            yield from keep(MARKER, lambda _: None, FOREVER_US)
        if not (yield from is_closed()):
            raise StoreError("the marker could not be written, so no token was created; try again")


def _records(consumer: str) -> Asking:
    found: list[Record] = []
    cursor: str | None = None
    while True:
        page: Page = answer_or_raise((yield Scan(TENANT, consumer, "done", cursor=cursor, limit=PAGE)))
        found += page.records
        cursor = page.cursor
        if cursor is None:
            return found


def _with_grace(token: Token, retired: Record) -> Token:
    """Return the token with the end of its grace period; a record that cannot be decoded ends it at once."""
    try:
        until = int(decode(retired.value or b"")["until"])
    except (RecordCorrupt, KeyError, TypeError, ValueError):
        until = 1
    ends_at = min(until, token.expires_at) if token.expires_at else until
    return msgspec.structs.replace(token, expires_at=ends_at)


def _token(record: Record) -> Token | None:
    if record.state != "done" or record.value is None:
        return None
    try:
        return msgspec.convert(decode(record.value), Token)
    except (msgspec.ValidationError, RecordCorrupt) as error:
        raise RecordCorrupt(f"a stored token cannot be decoded: {error}") from error


def _place(token_id: str) -> Id:
    return (TENANT, CONSUMER, token_id)


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


SESSIONS = "sessions"
SESSION_US = 7 * 86400 * 1_000_000
SESSION_ID_BYTES = 32
SESSION_SHAPE = re.compile(r"[A-Za-z0-9_-]{43}")


def start_session(token_id: str) -> Asking:
    """Begin a session for a token; returns the id for the browser."""
    text = secrets.token_urlsafe(SESSION_ID_BYTES)
    yield from keep(_session_place(text), lambda _: token_id, SESSION_US)
    return text


def find_session(text: str) -> Asking:
    """Return the id of the session's token, or `None`."""
    record = answer_or_raise((yield Lookup(_session_place(text))))
    if not isinstance(record, Record) or record.state != "done" or record.value is None:
        return None
    try:
        token_id = decode(record.value)
    except (RecordCorrupt, ValueError):
        return None
    return token_id if isinstance(token_id, str) else None


def end_session(text: str) -> Asking:
    """Log out."""
    answer_or_raise((yield Forget(_session_place(text))))


def _session_place(text: str) -> Id:
    return (TENANT, SESSIONS, hashlib.sha256(text.encode()).hexdigest())
