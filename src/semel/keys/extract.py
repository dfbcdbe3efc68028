"""Read the key of an event: extractors for `guard(key=...)`, `consume` and the identity chain.

Each is called with the event (an object, a mapping, or a message with headers and body) and returns its key, or
raises `KeyMissing` or `KeyInvalid`. None of them invents an id.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol, TypeAlias

import msgspec

from semel.errors import KeyInvalid, KeyMissing
from semel.keys.limits import check_all, check_namespace
from semel.keys.message import as_key, headers_of, json_body, payload_of
from semel.keys.schemes import check_version, derive, part_name

__all__ = [
    "SEGMENTS_MAX",
    "Body",
    "CallableKey",
    "Content",
    "Extractor",
    "Header",
    "KeyExtractor",
    "KeySpec",
    "Path",
    "body",
    "content",
    "extractor",
    "header",
    "parse",
    "path",
    "walk",
]

SEGMENTS_MAX = 32
"""The most segments of a path; a longer path is a mistake."""

_DOT = re.compile(r"(?<!\\)\.")
_ABSENT: Final = object()


def parse(path: str) -> tuple[str, ...]:
    r"""Split a path at its dots; `\.` is a dot inside a name. Raises `KeyInvalid` for an empty path or name."""
    segments = tuple(part.replace("\\.", ".") for part in _DOT.split(path))
    if not all(segments) or len(segments) > SEGMENTS_MAX:
        raise KeyInvalid(
            f"{path!r} is not a path; write names and list indexes with dots between them, like order.lines.0.id, "
            f"at most {SEGMENTS_MAX}"
        )
    return segments


def walk(root: Any, segments: tuple[str, ...]) -> Any:
    """Return the value at the path; `None` is a value. Raises `KeyMissing` if there is none.

    In a mapping a segment is a key and never an attribute (`items` is a field, not a method); in a list or tuple a
    number is an index; everywhere else a segment is an attribute. A mapping with default values does not
    create any here.
    """
    value = root
    for depth, segment in enumerate(segments):
        if isinstance(value, Mapping):
            value = value.get(segment, _ABSENT)
        elif isinstance(value, list | tuple) and segment.isdecimal():
            index = int(segment)
            value = value[index] if index < len(value) else _ABSENT
        else:
            value = getattr(value, segment, _ABSENT)
        if value is _ABSENT:
            found = ".".join(segments[:depth]) or "the event"
            raise KeyMissing(
                f"no {segment!r} in {found} (path {'.'.join(segments)}); correct the path, or have the producer send it"
            )
    return value


class Extractor(Protocol):
    """Anything that reads the key of an event."""

    def __call__(self, event: Any, /) -> str:
        """Return the key; raises `KeyMissing` where there is none."""
        ...


KeySpec: TypeAlias = str | Callable[[Any], object]
"""How a key is named in an option: an attribute path, or a callable (every `semel.keys` extractor is one)."""


class KeyExtractor(ABC):
    """The base of semel's own extractors: their result is already checked."""

    __slots__ = ()

    @abstractmethod
    def __call__(self, event: Any, /) -> str:
        """Return the key of the event."""


class Path(KeyExtractor):
    """The key is the value at a path of attributes, mapping keys and list indexes."""

    __slots__ = ("_segments", "path")

    def __init__(self, path: str) -> None:
        self.path: str = path
        self._segments = parse(path)

    def __call__(self, event: Any, /) -> str:
        """Walk the path from the event itself. About a microsecond."""
        return as_key(walk(event, self._segments), self.path)

    def __repr__(self) -> str:
        return f"Path({self.path!r})"


class CallableKey(KeyExtractor):
    """The key is the checked result of the user's function."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[[Any], object]) -> None:
        self.function: Callable[[Any], object] = function

    def __call__(self, event: Any, /) -> str:
        """Call the function with the event; its own exceptions pass."""
        return as_key(self.function(event), f"what {self.function!r} returned")

    def __repr__(self) -> str:
        return f"Call({self.function!r})"


class Header(KeyExtractor):
    """The key is a header, whatever the case of its name."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name: str = name

    def __call__(self, event: Any, /) -> str:
        """Read the header of a message. Linear in the number of headers."""
        value = headers_of(event).get(self.name)
        if value is None:
            raise KeyMissing(
                f"the message has no header {self.name}, and semel invents no key; have the producer send it"
            )
        return as_key(value, f"header {self.name}")

    def __repr__(self) -> str:
        return f"Header({self.name!r})"


class Body(KeyExtractor):
    """The key is a field of the message's body, JSON bytes or decoded already."""

    __slots__ = ("_decoder", "_segments", "path")

    def __init__(self, path: str) -> None:
        self.path: str = path
        self._segments = parse(path)
        self._decoder = _leaf_decoder(self._segments)

    def __call__(self, event: Any, /) -> str:
        """Read the field. From bytes only the named field is decoded: a third of a microsecond for a small body."""
        payload = payload_of(event)
        if self._decoder is not None and isinstance(payload, bytes):
            try:
                leaf: Any = self._decoder.decode(payload)
                for _ in self._segments:
                    leaf = leaf.member
                return as_key(leaf, self.path)
            except (msgspec.DecodeError, AttributeError, RecursionError):
                pass  # absent or of another type: the full decoder below reports where
        return as_key(walk(json_body(payload), self._segments), f"{self.path} in the body")

    def read_all(self, payloads: Sequence[bytes]) -> list[str]:
        """Read the field of many bodies, at less than half the price. Raises for any of them as a call does."""
        if self._decoder is None:
            return [self(payload) for payload in payloads]
        try:
            leaves: list[Any] = list(map(self._decoder.decode, payloads))
            for _ in self._segments:
                leaves = [leaf.member for leaf in leaves]
            keys = [leaf if type(leaf) is str else str(leaf) for leaf in leaves]
            check_all(keys)
        except (msgspec.DecodeError, AttributeError, RecursionError, KeyInvalid):
            return [self(payload) for payload in payloads]  # it says which one, and why
        return keys

    def __repr__(self) -> str:
        return f"Body({self.path!r})"


class Content(KeyExtractor):
    """The key is a fingerprint of the content: two events with equal content are one, even if they were two.

    Two customers who buy the same thing, or one who buys it twice, become one purchase. So it is never used unless
    asked for: prefer the producer's id, name the fields that tell events apart, and keep the window short.
    """

    __slots__ = ("_paths", "allow_floats", "namespace", "paths", "version")

    def __init__(
        self, *paths: str, namespace: str = "content", version: int = 1, allow_floats: bool = False
    ) -> None:
        self.namespace: str = check_namespace(namespace)
        self.version: int = check_version(version)
        self.allow_floats: bool = allow_floats
        self.paths: tuple[str, ...] = paths
        self._paths = sorted((part_name(path), parse(path)) for path in paths)
        if len({name for name, _ in self._paths}) < len(paths):
            raise KeyInvalid(f"a path is named twice in {', '.join(paths)}; name each field once")

    def __call__(self, event: Any, /) -> str:
        """Hash the named fields, in any order, or the whole body. A field that is absent raises `KeyMissing`.

        A body of bytes is read as JSON, so that spacing, order of members and `50` or `50.00` do not matter; without
        paths, bytes that are not JSON are hashed as they are.
        """
        payload = payload_of(event)
        parts: list[tuple[str, object]]
        if self._paths:
            decoded = json_body(payload)
            parts = [(name, walk(decoded, segments)) for name, segments in self._paths]
        else:
            try:
                parts = [("", json_body(payload))]
            except KeyMissing:
                if not payload:
                    raise
                parts = [("raw", payload)]
        return derive(parts, namespace=self.namespace, version=self.version, allow_floats=self.allow_floats)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.paths))})"


def path(path: str) -> Path:
    """Read the key where the path leads: `order.id`, `lines.0.sku`. Raises `KeyInvalid` for a malformed path."""
    return Path(path)


def header(name: str) -> Header:
    """Read the key from a header; values may be str or bytes."""
    return Header(name)


def body(path: str) -> Body:
    """Read the key from a field of the body."""
    return Body(path)


def content(*paths: str, namespace: str = "content", version: int = 1, allow_floats: bool = False) -> Content:
    """Make the key from the content: of the fields named, or of the whole body. See `Content` for what it merges."""
    return Content(*paths, namespace=namespace, version=version, allow_floats=allow_floats)


def extractor(spec: KeySpec) -> Extractor:
    """Turn an option into an extractor: a str is a path, a callable's result is checked.

    Raises `TypeError` for anything else, `KeyInvalid` for a malformed path.
    """
    if isinstance(spec, str):
        return Path(spec)
    if isinstance(spec, KeyExtractor):
        return spec
    if callable(spec):
        return CallableKey(spec)
    raise TypeError(
        f"a key is a path like 'order.id', a callable, or one of semel.keys.*, not {type(spec).__name__}"
    )


def _leaf_decoder(segments: tuple[str, ...]) -> msgspec.json.Decoder[Any] | None:
    """Return a decoder that reads one nested field and skips the rest; None if the path has an index or an odd name."""
    if any(segment.isdecimal() for segment in segments):
        return None
    kind: Any = str | int
    try:
        for segment in reversed(segments):
            kind = msgspec.defstruct("Nested", [("member", kind)], rename={"member": segment})
    except ValueError:  # a quote, a backslash or a control character in a name
        return None
    return msgspec.json.Decoder(kind)
