"""Limits of keys, consumers and namespaces."""

import re
from collections.abc import Sequence
from typing import Annotated

import msgspec

from semel.errors import KeyInvalid

__all__ = [
    "CONSUMER_BYTES_MAX",
    "KEY_BYTES_MAX",
    "NAMESPACE_BYTES_MAX",
    "check",
    "check_all",
    "check_consumer",
    "check_namespace",
]

KEY_BYTES_MAX = 512
"""Longer ids than this are payloads; every store keeps the readable key of this size beside its digest."""
SHORT_CHARS = KEY_BYTES_MAX // 4
"""This many characters always fit, so shorter printable text needs no further check."""
CONSUMER_BYTES_MAX = 128
NAMESPACE_BYTES_MAX = 64
"""Leaves room in a key for a digest or a UUID and a version."""

_KEYS = list[Annotated[str, msgspec.Meta(min_length=1, max_length=KEY_BYTES_MAX)]]
_json = msgspec.json.Encoder()

# C0 and DEL: they split log lines and header values, and no producer means them.
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
# Names are logged and listed: C1 controls and Unicode's line ends are as bad there as C0.
_LINE_BREAKING = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
# No colon: the first one ends the namespace, so that two namespaces can never meet in one key.
_NAMESPACE = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{NAMESPACE_BYTES_MAX - 1}}}")


def check(key: str) -> str:
    """Return the key as it came if it keeps the limits: 1 to 512 bytes of UTF-8, no control characters.

    Raises `KeyInvalid` otherwise. Nothing is trimmed, folded or normalised: two spellings are two keys.
    About a tenth of a microsecond, because every call passes here.
    """
    if type(key) is str and 0 < len(key) <= SHORT_CHARS and key.isprintable():
        return key
    return _check(key, "key", KEY_BYTES_MAX, "use the producer's id, or hash a long one with semel.keys.of()")


def check_all(keys: Sequence[str]) -> None:
    """Check many keys at once, at a fraction of the price. Raises `KeyInvalid` for the first bad one."""
    if len(keys) == 1:
        check(keys[0])
        return
    try:
        msgspec.convert(keys, _KEYS)
        text = "".join(keys)
        # JSON escapes what is not ASCII or not printable, except DEL: the fastest look at every character there is.
        fine = len(_json.encode(text)) == len(text) + 2 and "\x7f" not in text
    except (msgspec.ValidationError, UnicodeEncodeError):
        fine = False
    if not fine:
        for key in keys:
            check(key)


def check_consumer(consumer: str) -> str:
    """Return the consumer's name if it keeps the limits: 1 to 128 bytes of UTF-8, no control characters or line ends.

    Raises `KeyInvalid` otherwise.
    """
    advice = "name it after what processes, like 'billing'"
    return _check(consumer, "consumer", CONSUMER_BYTES_MAX, advice, _LINE_BREAKING)


def check_namespace(namespace: str) -> str:
    """Return the namespace if it is 1 to 64 ASCII letters, digits, `.`, `_`, `-`, the first no sign.

    Raises `KeyInvalid` otherwise.
    """
    text: object = namespace  # callers without a type checker pass anything
    if isinstance(text, str) and _NAMESPACE.fullmatch(text):
        return text
    raise KeyInvalid(
        f"namespace {_shorten(namespace)} is not usable; name the producing service with 1 to "
        f"{NAMESPACE_BYTES_MAX} letters, digits, '.', '_' or '-' (no colon: it ends the namespace)"
    )


def _check(text: object, what: str, bytes_max: int, advice: str, refused: re.Pattern[str] = _CONTROL) -> str:
    if not isinstance(text, str):
        raise KeyInvalid(f"a {what} is a str, not {type(text).__name__} {_shorten(text)}; {advice}")
    # A str subclass may say something else when it is formatted (an Enum does): only the text itself is kept.
    plain = str.__str__(text)
    try:
        size_bytes = len(plain.encode())
    except UnicodeEncodeError as error:
        raise KeyInvalid(
            f"{what} {_shorten(plain)} holds half of a surrogate pair, which no store can write; "
            "decode it correctly at its source"
        ) from error
    if not 0 < size_bytes <= bytes_max:
        raise KeyInvalid(
            f"{what} {_shorten(plain)} has {size_bytes} bytes, allowed are 1 to {bytes_max}; {advice}"
        )
    if refused.search(plain):
        raise KeyInvalid(
            f"{what} {_shorten(plain)} holds a control character; strip line ends and NULs; {advice}"
        )
    return plain


def _shorten(text: object, characters_max: int = 60) -> str:
    shown = ascii(text)
    return shown if len(shown) <= characters_max else shown[: characters_max - 3] + "..."
