"""Check MessagePack before it is decoded: refuse values that would take too much time or memory.

Decoding builds dicts and sets. Their keys may be chosen so that all of them collide, and then a few kilobytes keep the
interpreter busy for minutes, whichever thread decodes them. Text is hashed with a secret; numbers are not.
"""

from semel.errors import RecordCorrupt

__all__ = ["check_packed"]

DEPTH_MAX = 64
PARTS_MAX = 100_000
"""The most parts (numbers, texts, lists and others) of one value: about 50 ms."""
HASHED_MAX = 1000
"""The most members of sets and keys that are not text: all of them may collide."""
SETS = (2, 3)
DICT = 11
"""Tags of the codec whose parts are hashed."""


def _shapes() -> dict[int, tuple[str, int, int]]:
    """Build the table by a value's first byte: its kind, its size or count, and the bytes of its length field."""
    shapes = dict.fromkeys((*range(0x80), *range(0xE0, 0x100), 0xC0, 0xC2, 0xC3), ("bytes", 0, 0))
    for kind, first, most in (("map", 0x80, 16), ("list", 0x90, 16), ("text", 0xA0, 32)):
        shapes |= {first + count: (kind, count, 0) for count in range(most)}
    numbers: tuple[tuple[int, tuple[int, ...]], ...] = (
        (0xCA, (4, 8)),
        (0xCC, (1, 2, 4, 8)),
        (0xD0, (1, 2, 4, 8)),
    )
    for first, sizes in numbers:
        shapes |= {first + at: ("bytes", size, 0) for at, size in enumerate(sizes)}
    for kind, first, widths in (
        ("bytes", 0xC4, (1, 2, 4)),
        ("ext", 0xC7, (1, 2, 4)),
        ("text", 0xD9, (1, 2, 4)),
        ("list", 0xDC, (2, 4)),
        ("map", 0xDE, (2, 4)),
    ):
        shapes |= {first + at: (kind, 0, width) for at, width in enumerate(widths)}
    return shapes | {0xD4 + at: ("ext", 1 << at, 0) for at in range(5)}


_SHAPES = _shapes()


def check_packed(data: bytes) -> None:
    """Check a value. Raises `RecordCorrupt` if it is too deep, too large, or hashes too much. Linear time."""
    try:
        _Look().value(memoryview(data), 0, 0)
    except IndexError:
        raise RecordCorrupt("a stored value ends too early") from None


class _Look:
    def __init__(self) -> None:
        self.parts = 0
        self.hashed = 0

    def value(self, data: memoryview, at: int, depth: int) -> int:
        """Check the value that begins there; returns where it ends."""
        self.parts += 1
        if self.parts > PARTS_MAX:
            raise RecordCorrupt(f"a stored value has more than {PARTS_MAX} parts, too many to show")
        if depth > 2 * DEPTH_MAX:  # a tag is a level of its own
            raise RecordCorrupt("a stored value is nested too deeply to show")
        kind, size, at = _shape(data, at)
        match kind:
            case "list":
                return self._many(data, at, size, depth)
            case "map":
                return self._map(data, at, size, depth)
            case "ext":
                return self._ext(data, at, size, depth)
            case _:
                return at + size

    def _many(self, data: memoryview, at: int, count: int, depth: int) -> int:
        for _ in range(count):
            at = self.value(data, at, depth + 1)
        return at

    def _map(self, data: memoryview, at: int, count: int, depth: int) -> int:
        for _ in range(count):
            if _shape(data, at)[0] != "text":  # the codec writes other keys with a tag
                raise RecordCorrupt("a stored value has a key that is not text")
            at = self.value(data, self.value(data, at, depth + 1), depth + 1)
        return at

    def _ext(self, data: memoryview, at: int, size: int, depth: int) -> int:
        tag, inner = data[at], data[at + 1 : at + 1 + size]
        if tag in (*SETS, DICT):
            self.hashed += _shape(inner, 0)[1]
            if self.hashed > HASHED_MAX:
                raise RecordCorrupt(
                    f"a stored value has more than {HASHED_MAX} keys or members, too many to show"
                )
        if size:
            self.value(inner, 0, depth + 1)
        return at + 1 + size


def _shape(data: memoryview, at: int) -> tuple[str, int, int]:
    """Return the kind of the value, its size or count, and where its content begins."""
    if data[at] not in _SHAPES:
        raise RecordCorrupt("a stored value is not MessagePack")
    kind, size, width = _SHAPES[data[at]]
    if width:
        if at + width >= len(data):
            raise IndexError
        size = int.from_bytes(data[at + 1 : at + 1 + width])
    return kind, size, at + 1 + width
