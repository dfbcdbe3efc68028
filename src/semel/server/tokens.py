"""Tokens: who may come in, for which tenant, in which role. Records of the store, under a tenant of their own.

Of a token only the SHA-256 of its secret half is kept. `semel_<id>_<secret>`: the id finds the record, the secret is
compared in constant time. Every instance on the store knows every token; a revoked one is refused within seconds.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Generator
from typing import Any, Literal, TypeAlias, get_args

import msgspec

from semel.codec import decode, encode
from semel.core.commands import Admit, Claim, Forget, Granted, Item, Lookup, Page, Scan, Settle
from semel.errors import KeyInvalid, RecordCorrupt, StoreError
from semel.forks import new_owner
from semel.keys.limits import check_consumer
from semel.plans import reachable
from semel.types import Absent, Forgotten, Record

__all__ = ["CONSUMER", "ROLES", "TENANT", "Role", "Token", "create", "lookup", "revoke", "tokens"]

Role: TypeAlias = Literal["read", "write", "admin"]
ROLES: tuple[Role, ...] = get_args(Role)
"""Each may do what those before it may."""

TENANT = "semel.tokens"
CONSUMER = "tokens"
"""Where the records are: no caller of the service can name that tenant."""
OWN = "semel."
"""How the names of tenants begin that hold what semel itself keeps: nobody gets a token for one."""
FOREVER_US = 100 * 365 * 86400 * 1_000_000
"""A token is valid until it is revoked; the window of its record is a hundred years."""
LEASE_US = 10_000_000
ID_BYTES = 8
SECRET_BYTES = 32
PAGE = 200
SHAPE = re.compile(r"semel_([0-9a-f]{16})_([A-Za-z0-9_-]{43})")

Asking: TypeAlias = Generator[Item, Any, Any]
"""Yields items, is sent their answers: the same for the command line and the server."""


class Token(msgspec.Struct, frozen=True):
    """What is kept of a token."""

    id: str
    name: str
    """For people: who has it."""
    tenant: str | None
    """Whose records it reaches; `None`: everybody's."""
    role: Role
    digest: str
    """SHA-256 of the secret, in hex."""
    created_at: int
    """By the store's clock, in microseconds."""

    def allows(self, role: Role) -> bool:
        """Whether it may do what that role may."""
        return ROLES.index(self.role) >= ROLES.index(role)

    def matches(self, secret: str) -> bool:
        """Whether this is its secret; takes as long for a wrong one."""
        return hmac.compare_digest(self.digest, _digest(secret))


def split(text: str) -> tuple[str, str] | None:
    """The id and the secret of a token as it is sent, or nothing for what was never a token."""
    found = SHAPE.fullmatch(text)
    return (found[1], found[2]) if found else None


def create(name: str, tenant: str | None, role: Role) -> Asking:
    """Make a token; returns it and its text, which nobody can read again."""
    check_consumer(name)
    if tenant:
        check_consumer(tenant)
        if tenant.startswith(OWN):
            raise KeyInvalid(f"tenants that begin with {OWN!r} are semel's own; choose another name")
    token_id, secret = secrets.token_hex(ID_BYTES), secrets.token_urlsafe(SECRET_BYTES)
    owner, place = new_owner(), _place(token_id)
    reachable((yield Admit(TENANT, CONSUMER, "lease")))
    granted = reachable((yield Claim(place, owner, LEASE_US, FOREVER_US)))
    if not isinstance(granted, Granted):
        raise StoreError("the token could not be stored; try again")
    token = Token(token_id, name, tenant, role, _digest(secret), granted.first_seen)
    value = encode(msgspec.to_builtins(token))
    reachable((yield Settle(place, owner, granted.fence, "done", value, FOREVER_US, LEASE_US)))
    return token, f"semel_{token_id}_{secret}"


def lookup(token_id: str) -> Asking:
    """The token of that id, or `None`."""
    record = reachable((yield Lookup(_place(token_id))))
    return None if isinstance(record, Absent) else _token(record)


def tokens() -> Asking:
    """All tokens, oldest first."""
    found: list[Token] = []
    cursor: str | None = None
    while True:
        page: Page = reachable((yield Scan(TENANT, CONSUMER, "done", cursor=cursor, limit=PAGE)))
        found += [token for record in page.records if (token := _token(record)) is not None]
        cursor = page.cursor
        if cursor is None:
            return sorted(found, key=lambda token: token.created_at)


def revoke(token_id: str) -> Asking:
    """Make a token worthless; returns whether there was one."""
    return isinstance(reachable((yield Forget(_place(token_id)))), Forgotten)


def _token(record: Record) -> Token | None:
    if record.state != "done" or record.value is None:
        return None
    try:
        return msgspec.convert(decode(record.value), Token)
    except (msgspec.ValidationError, RecordCorrupt) as error:
        raise RecordCorrupt(f"a stored token does not read: {error}") from error


def _place(token_id: str) -> tuple[str, str, str]:
    return (TENANT, CONSUMER, token_id)


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
