"""Make keys: ids that a producer mints once, and ids that follow from the event's own content."""

import sys
import uuid
from collections.abc import Iterable
from hashlib import sha256
from unicodedata import normalize

from semel.errors import KeyInvalid, KeyMissing
from semel.keys.canonical import dumps
from semel.keys.limits import check_namespace

__all__ = ["VERSION_MAX", "check_version", "derive", "of", "part_name", "uuid4", "uuid7"]

VERSION_MAX = 2**31 - 1

_LAYOUT = b"semel.key.1"
"""The name of this layout of the parts; another layout needs another name, so that keys never collide."""


def uuid4(namespace: str) -> str:
    """Mint a random id, like `billing:7b0c...`: once per event, by the producer, stored with the intent to send.

    An id that is minted on each attempt, or by the consumer, makes every delivery a new event. Raises `KeyInvalid`
    for a namespace that is not usable.
    """
    return f"{check_namespace(namespace)}:{uuid.uuid4()}"


def uuid7(namespace: str) -> str:
    """Mint an id that sorts by time, like `billing:0198...`; the same duties as for `uuid4`.

    The time is this computer's clock, in milliseconds; the order within one is not promised between processes.
    """
    return f"{check_namespace(namespace)}:{_new_uuid7()}"


def of(*parts: object, namespace: str, version: int = 1, allow_floats: bool = False, **named: object) -> str:
    """Return the id that follows from the parts, like `billing:v1.9f86d081...`: the same parts, the same key.

    Parts with a name may come in any order; parts without one count by position. Each part is written as
    canonical JSON and framed with its name and length, so that no two different lists of parts run together.
    Raise `version` when the choice of parts changes; old and new keys then differ. A part called `namespace`,
    `version` or `allow_floats` goes into a dict.

    Raises `KeyMissing` where every part is None: such a key would merge all events that lack them. Raises
    `TypeError` for types without a settled form (floats, because of money) and `KeyInvalid` for values without
    one. A few microseconds.
    """
    ordered = [("", part) for part in parts]
    if named:
        ordered += sorted((part_name(name), part) for name, part in named.items())
    return derive(ordered, namespace=namespace, version=version, allow_floats=allow_floats)


def derive(parts: Iterable[tuple[str, object]], *, namespace: str, version: int, allow_floats: bool) -> str:
    """Return the id of (name, value) pairs in the given order, for `of` and the content keys."""
    check_namespace(namespace)
    check_version(version)
    digest = sha256(_LAYOUT)
    nothing = True
    for field in (namespace.encode(), b"%d" % version):
        digest.update(b"%d:%b," % (len(field), field))
    for name, value in parts:
        title = name.encode()
        text = dumps(value, allow_floats=allow_floats)
        digest.update(b"%d:%b,%d:%b," % (len(title), title, len(text), text))
        nothing = nothing and value is None
    if nothing:
        raise KeyMissing(
            "every part of the key is None or there is none; give at least one part that tells events apart"
        )
    return f"{namespace}:v{version}.{digest.hexdigest()}"


def part_name(name: str) -> str:
    """Return the name of a part in the Unicode form NFC; raises `KeyInvalid` for one that is empty."""
    if not name:
        raise KeyInvalid("a part of a key has an empty name, which would make it a part without one; name it")
    return name if name.isascii() else normalize("NFC", name)


def check_version(version: int) -> int:
    """Return the version of a recipe if it is a whole number from 1; raises `KeyInvalid` otherwise."""
    if type(version) is int and 1 <= version <= VERSION_MAX:
        return version
    raise KeyInvalid(
        f"version {version!r} is not usable; count up from 1 each time the parts of the key change"
    )


def _new_uuid7() -> object:
    if sys.version_info >= (3, 14):
        return uuid.uuid7()
    import uuid_utils

    return uuid_utils.uuid7()
