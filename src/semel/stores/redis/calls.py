"""Calls to a server, the parts of a batch that share a call, the names of the keys, and the scripts."""

from collections.abc import Generator, Iterable, Sequence
from functools import lru_cache
from hashlib import sha1
from importlib.resources import files
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from semel.core.commands import Answer, Claim, Forget, Item, Lookup, Mark, Marked, Renew, Resolve, Settle
from semel.errors import RecordCorrupt
from semel.stores.redis import encoding
from semel.types import Unavailable

__all__ = ["ALLOW_OOM", "Script", "Scripts", "load_script", "scripts_for"]

ITEMS_MAX = 1000
"""The most items of one call: the server serves no other client meanwhile."""
AHEAD_ITEMS = 64
"""Items sent while the next ones are encoded, so that server and client work at the same time."""
AHEAD_GROWTH = 2.5
"""About how many times faster a client encodes items than the server carries them out."""
CALL_BYTES_MAX = 4 * 1024 * 1024
"""The most bytes of arguments in one call."""
REPLY_BYTES_MAX = 4 * 1024 * 1024
"""The most bytes of stored records in one reply; items beyond that are sent again."""

Address: TypeAlias = tuple[str, int]


class RedisCall(Struct):
    """One command for one node."""

    command: Sequence[bytes | int]
    bucket: int = 0
    node: Address | None = None
    """Send to this node, whichever node has the bucket."""
    asking: bool = False
    packed: bytes = b""
    """Several commands as bytes for the wire; their replies are read as `lines` lines."""
    lines: int = 0


class RedisQuery(Struct):
    """Send these calls, in order within one node. The result is a reply or an exception for each."""

    calls: list[RedisCall]


class Ahead(Struct):
    """Send these calls to the only server now. The next `RedisQuery` returns their replies before its own."""

    calls: list[RedisCall]


class RedisPause(Struct):
    """Wait a little."""

    seconds: float


class Refresh(Struct):
    """Find the masters again."""


class Nodes(Struct):
    """Ask for the addresses of all masters."""


Step: TypeAlias = RedisQuery | Ahead | RedisPause | Refresh | Nodes
Steps: TypeAlias = Generator[Step, Any, Any]
PartKind: TypeAlias = Literal["claim", "end", "mark", "compact"]


class CallPart(Struct):
    """Items of one kind that share one call."""

    kind: PartKind
    places: list[int]
    """Positions of the answers: among the items, or among the keys of a mark."""
    items: Sequence[Any]
    keys: list[bytes]
    args: list[bytes]
    bucket: int = 0
    mark: int = -1
    """The position of the mark item that the keys belong to."""
    as_text: bool = False
    bare: bool = False
    node: Address | None = None
    """The node named by a redirection, because the first node no longer has the bucket."""
    asking: bool = False
    hops: int = 0
    cuts: int = 0
    common: bytes = b""
    """The encoded fields that all items share, sent once."""


class KeyLayout:
    """The names of the keys of one store."""

    def __init__(self, prefix: str, channel: str) -> None:
        self.prefix: bytes = prefix.encode()
        self.heads: list[bytes] = [b"%b:{%d}" % (self.prefix, bucket) for bucket in range(encoding.BUCKETS)]
        self.records: list[bytes] = [head + b":" for head in self.heads]
        self.marks: list[bytes] = [head + b"m" for head in self.heads]
        self.epochs: list[bytes] = [head + b"epoch" for head in self.heads]
        self.journals: list[bytes] = [head + b"journal" for head in self.heads]
        self.windows: bytes = self.heads[0] + b"windows"
        self.modes: bytes = self.heads[0] + b"modes"
        self.scopes: bytes = self.heads[0] + b"scopes"
        self.shapes: bytes = self.heads[0] + b"shapes"
        self.compact: bytes = self.heads[0] + b"c"
        self.pattern: bytes = self.prefix + b":{*"
        self.channel: bytes = channel.encode()


# --- parts --------------------------------------------------------------------------------------

_ENDERS = frozenset((Settle, Renew, Lookup, Forget, Resolve))


def runs(items: Sequence[Item]) -> Iterable[tuple[int, Any, Sequence[Any]]]:
    """Yield runs of neighbouring items that one call can carry out: start position, kind, items."""
    start = 0
    total = len(items)
    while start < total:
        kind = type(items[start])
        end = start + 1
        if kind is Claim:
            while end < total and type(items[end]) is Claim:
                end += 1
            yield start, "claim", items[start:end]
        elif kind in _ENDERS:
            while end < total and type(items[end]) in _ENDERS:
                end += 1
            yield start, "end", items[start:end]
        else:
            yield start, "mark" if kind is Mark else "admin", items[start:end]
        start = end


def pieces(total: int) -> Iterable[slice]:
    """Yield the slices of a batch for one server: a small one first, so that the server starts early; then larger."""
    start, size = 0, AHEAD_ITEMS
    while start < total:
        end = start + size
        if total - end < size // 2:
            end = total
        yield slice(start, end)
        start, size = end, min(int(size * AHEAD_GROWTH), ITEMS_MAX // 2)


def cut(part: CallPart) -> Iterable[CallPart]:
    """Yield the part in pieces that are not too large for one call."""
    if len(part.keys) <= ITEMS_MAX and sum(map(len, part.args)) <= CALL_BYTES_MAX:
        yield part
        return
    start = size = 0
    for at, arg in enumerate(part.args):
        if at > start and (at - start >= ITEMS_MAX or size + len(arg) > CALL_BYTES_MAX):
            yield select(part, range(start, at))
            start, size = at, 0
        size += len(arg)
    yield select(part, range(start, len(part.args)))


def select(part: CallPart, which: Sequence[int]) -> CallPart:
    """Return a part with only these of the items."""
    args = part.args if part.kind == "mark" else [part.args[at] for at in which]
    items = part.items if part.kind == "mark" else [part.items[at] for at in which]
    return CallPart(
        part.kind,
        [part.places[at] for at in which],
        items,
        [part.keys[at] for at in which],
        args,
        part.bucket,
        part.mark,
        part.as_text,
        cuts=part.cuts,
        common=part.common,
    )


def split_by_key(part: CallPart) -> list[CallPart]:
    """Return a part for each key: while its bucket is being moved, a key may be on either node."""
    singles = [select(part, (at,)) for at in range(len(part.keys))]
    for single in singles:
        single.bare = True
    return singles


def queue_unfinished(
    part: CallPart, left: list[int], letters: bytes, again: list[CallPart], later: list[CallPart]
) -> None:
    """Queue the items that were not carried out: to send again at once, or after a pause."""
    if left:
        moving = [at for at in left if letters[at] == 84]  # noqa: PLR2004 - T
        others = [at for at in left if letters[at] != 84]  # noqa: PLR2004
        if others:
            again.append(select(part, others))
        if moving:
            later.append(select(part, moving))


def take_marks(part: CallPart, letters: bytes, answers: list[Answer]) -> None:
    """Set which keys of a mark are new."""
    marked = answers[part.mark]
    if not isinstance(marked, Marked):
        return  # another part of this mark got no answer
    if b"O" in letters:
        answers[part.mark] = Unavailable(encoding.full_error())
        return
    if b"X" in letters:
        answers[part.mark] = Unavailable(
            RecordCorrupt(f"a mark of {part.items[0].consumer!r} holds a value that semel does not write")
        )
        return
    firsts = marked.firsts
    if len(firsts) == len(letters):
        firsts[:] = [letter == 49 for letter in letters]  # noqa: PLR2004 - 1
        return
    for place, letter in zip(part.places, letters, strict=True):
        firsts[place] = letter == 49  # noqa: PLR2004


def repeatable(part: CallPart) -> bool:
    """Whether the call may be sent twice: each of its items carries its owner, or only reads."""
    if part.kind in ("mark", "compact"):
        return False
    return part.kind == "claim" or all(type(item) in (Settle, Renew, Lookup) for item in part.items)


def refuse(part: CallPart, error: Exception, answers: list[Answer]) -> None:
    """Answer all items of a part with the error."""
    if part.kind in ("mark", "compact"):
        answers[part.mark] = Unavailable(error)
        return
    for place in part.places:
        answers[place] = Unavailable(error)


ALLOW_OOM = b"#!lua flags=allow-oom\n"
"""A completion only records an effect that already exists: refusing it for lack of memory would lose the effect."""


class Script(Struct, frozen=True):
    """One script: its text for EVAL, and its hash for EVALSHA."""

    name: str
    text: bytes
    sha: bytes


class Scripts(Struct, frozen=True):
    """All scripts for one kind of server."""

    claim: Script
    settle: Script
    mark: Script
    compact: Script
    claim_one: Script
    settle_one: Script


@lru_cache(maxsize=2)
def scripts_for(*, shebang: bool) -> Scripts:
    """Load the scripts for servers that support script flags, or for older ones."""
    settles = ALLOW_OOM if shebang else b""
    return Scripts(
        claim=load_script(b"", "prelude", "claim"),
        settle=load_script(settles, "prelude", "settle"),
        mark=load_script(b"", "prelude", "mark"),
        compact=load_script(b"", "prelude", "compact"),
        claim_one=load_script(b"", "claim_one"),
        settle_one=load_script(settles, "settle_one"),
    )


def load_script(first_line: bytes, *parts: str) -> Script:
    """Load the parts of a script."""
    folder = files("semel.stores.redis") / "scripts"
    text = first_line + b"\n".join((folder / f"{part}.lua").read_bytes() for part in parts)
    return Script(parts[-1], text, sha1(text, usedforsecurity=False).hexdigest().encode())
