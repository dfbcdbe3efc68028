"""Sessions of the dashboard: a browser holds a random id, and the store maps it to a token.

The records are under the tenant of the tokens, by the digest of the id: every instance knows every session, and
readers of the store cannot use a session. A session ends with its token, at logout, and after a week.
"""

import hashlib
import re
import secrets

from semel.codec import decode
from semel.core.commands import Forget, Lookup, answer_or_raise
from semel.errors import RecordCorrupt
from semel.server.tokens import TENANT, Asking, keep
from semel.types import Id, Record

__all__ = ["SHAPE", "end", "find", "start"]

CONSUMER = "sessions"
LASTS_US = 7 * 86400 * 1_000_000
ID_BYTES = 32
SHAPE = re.compile(r"[A-Za-z0-9_-]{43}")


def start(token_id: str) -> Asking:
    """Begin a session for a token; returns the id for the browser."""
    text = secrets.token_urlsafe(ID_BYTES)
    yield from keep(_place(text), lambda _: token_id, LASTS_US)
    return text


def find(text: str) -> Asking:
    """Return the id of the session's token, or `None`."""
    record = answer_or_raise((yield Lookup(_place(text))))
    if not isinstance(record, Record) or record.state != "done" or record.value is None:
        return None
    try:
        token_id = decode(record.value)
    except (RecordCorrupt, ValueError):
        return None
    return token_id if isinstance(token_id, str) else None


def end(text: str) -> Asking:
    """Log out."""
    answer_or_raise((yield Forget(_place(text))))


def _place(text: str) -> Id:
    return (TENANT, CONSUMER, hashlib.sha256(text.encode()).hexdigest())
