"""From header to key: read the structured field, scope it by caller, method and route, take the fingerprint."""

import re
from collections.abc import Sequence
from hashlib import sha256
from urllib.parse import quote

from semel.keys.limits import KEY_BYTES_MAX

__all__ = ["HEADER", "KeyMalformed", "digest_of_credentials", "payload_of", "read", "scoped"]

HEADER = b"idempotency-key"
KEY_CHARS_MAX = 255
"""As the field's best known clients and servers have it."""
FIELD_BYTES_MAX = 1024
"""A string with every character escaped, and parameters: more than that is no key."""
NOBODY = "*"
"""Stands for the caller where none is told from another; a caller of that name is written %2A."""

_PLAIN_STRING = re.compile(rb'"([\x20\x21\x23-\x5b\x5d-\x7e]+)"')
_BARE = re.compile(rb"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?")


class KeyMalformed(ValueError):
    """The header holds no key; the text says why, and goes to the client."""


def read(fields: Sequence[bytes], *, strict: bool) -> str:
    """The key in the header's fields. Raises `KeyMalformed`.

    `"8e03"` is a structured string; bare printable ASCII is taken as it is unless `strict`. Both spell one key.
    """
    if len(fields) != 1:
        raise KeyMalformed("the header is given more than once")
    field = fields[0].strip(b" \t")
    if len(field) > FIELD_BYTES_MAX:
        raise KeyMalformed(f"the key is longer than {KEY_CHARS_MAX} characters")
    found = _PLAIN_STRING.fullmatch(field)
    if found is not None:
        key = found[1].decode("ascii")
    elif strict or field.startswith(b'"'):
        key = _structured(field)
    elif _BARE.fullmatch(field):
        key = field.decode("ascii")
    else:
        raise KeyMalformed("the key is not printable ASCII")
    if not 0 < len(key) <= KEY_CHARS_MAX:
        raise KeyMalformed(f"the key has {len(key)} characters; 1 to {KEY_CHARS_MAX} are allowed")
    return key


def _structured(field: bytes) -> str:
    """The value of an RFC 9651 item, which must be a string; its parameters mean nothing here."""
    from http_sf import StructuredFieldError, parse

    try:
        item = parse(field, tltype="item")
    except StructuredFieldError as error:
        raise KeyMalformed('the key is not a structured-field string such as "8e03978e-40d5"') from error
    value = item[0] if isinstance(item, tuple) else item
    if not isinstance(value, str):  # a token or a display string is none
        raise KeyMalformed('the key is not a structured-field string such as "8e03978e-40d5"')
    return value


def scoped(method: str, route: str, caller: str | None, key: str) -> str:
    """The record's key: what one caller asked of one route under one key, and nobody else elsewhere.

    The first three parts hold no space, so that no two scopes read the same. Past what a store takes, its digest.
    """
    whose = NOBODY if caller is None else quote(caller, safe="")
    text = f"{method} {quote(route, safe='/{}:')} {whose} {key}"
    if len(text) <= KEY_BYTES_MAX:  # ASCII: as many bytes as characters
        return text
    return "sha256:" + sha256(text.encode()).hexdigest()


def payload_of(path: bytes, query: bytes, body: bytes) -> bytes:
    """What two requests under one key must agree on."""
    return b"%d:%b%d:%b%b" % (len(path), path, len(query), query, body)


def digest_of_credentials(authorization: bytes) -> str | None:
    """A caller's name from what it authenticates with; `None` for nothing. The credentials themselves are not kept."""
    return sha256(authorization).hexdigest()[:32] if authorization.strip() else None
