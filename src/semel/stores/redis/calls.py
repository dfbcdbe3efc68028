"""What is sent to a server: calls, the parts of a batch that go in one, and the names of the keys."""

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

__all__ = ["ALLOW_OOM", "Script", "Scripts", "scripts_for"]

ITEMS_MAX = 1000
"""Items of one call: the server serves nobody else meanwhile."""
AHEAD_ITEMS = 64
"""Items that are sent while the next are made ready, so that the server and its client work at the same time."""
AHEAD_GROWTH = 2.5
"""How many times faster a client makes items ready than its server carries them out, roughly."""
CALL_BYTES_MAX = 4 * 1024 * 1024
"""Bytes that one call takes."""
REPLY_BYTES_MAX = 4 * 1024 * 1024
"""Bytes of stored records that one call answers with; what is over is asked for again."""

Address: TypeAlias = tuple[str, int]


class RedisCall(Struct):
    """One command for one node."""

    command: Sequence[bytes | int]
    bucket: int = 0
    node: Address | None = None
    """That node, whoever has the bucket."""
    asking: bool = False
    packed: bytes = b""
    """Several commands as they go over the wire, whose answers are read as so many lines."""
    lines: int = 0


class RedisQuery(Struct):
    """Send these, in order where they go to one node; answered with a reply or an exception for each."""

    calls: list[RedisCall]


class Ahead(Struct):
    """Send these to the one server now; their replies come with those of the next `RedisQuery`, before them."""

    calls: list[RedisCall]


class RedisPause(Struct):
    """Wait a little."""

    seconds: float


class Refresh(Struct):
    """Find out anew where the masters are."""


class Nodes(Struct):
    """Answered with the addresses of all masters; `None` for the only one."""


Step: TypeAlias = RedisQuery | Ahead | RedisPause | Refresh | Nodes
Steps: TypeAlias = Generator[Step, Any, Any]
PartKind: TypeAlias = Literal["claim", "end", "mark", "compact"]


class CallPart(Struct):
    """Some items of one kind that go in one call."""

    kind: PartKind
    places: list[int]
    """Where their answers go: positions among the items, or among the keys of a mark."""
    items: Sequence[Any]
    keys: list[bytes]
    args: list[bytes]
    bucket: int = 0
    mark: int = -1
    """The position of the mark that the keys belong to."""
    as_text: bool = False
    bare: bool = False
    node: Address | None = None
    """Where it was sent on to, by a node that has it no more."""
    asking: bool = False
    hops: int = 0
    cuts: int = 0
    common: bytes = b""
    """What all its items have in common, sent once."""


class KeyLayout:
    """How the keys of one store are called."""

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
    """Neighbours that one call can carry out: where they begin, their kind, and they themselves."""
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
    """How a batch for one server is cut: the first piece small, so that the server soon has work; then fewer calls."""
    start, size = 0, AHEAD_ITEMS
    while start < total:
        end = start + size
        if total - end < size // 2:
            end = total
        yield slice(start, end)
        start, size = end, min(int(size * AHEAD_GROWTH), ITEMS_MAX // 2)


def split_call(part: CallPart) -> Iterable[CallPart]:
    """Split a call into parts that are not too large for one call."""
    if len(part.keys) <= ITEMS_MAX and sum(map(len, part.args)) <= CALL_BYTES_MAX:
        yield part
        return
    start = size = 0
    for at, arg in enumerate(part.args):
        if at > start and (at - start >= ITEMS_MAX or size + len(arg) > CALL_BYTES_MAX):
            yield some(part, range(start, at))
            start, size = at, 0
        size += len(arg)
    yield some(part, range(start, len(part.args)))


def some(part: CallPart, which: Sequence[int]) -> CallPart:
    """The part with only these of its items."""
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


def one_by_one(part: CallPart) -> list[CallPart]:
    """A call for each key alone: while its bucket is being moved, each is on the one node or on the other."""
    singles = [some(part, (at,)) for at in range(len(part.keys))]
    for single in singles:
        single.bare = True
    return singles


def leave(
    part: CallPart, left: list[int], letters: bytes, again: list[CallPart], later: list[CallPart]
) -> None:
    """Sort what was not carried out: at once again, or after a while."""
    if left:
        moving = [at for at in left if letters[at] == 84]  # noqa: PLR2004 - T
        others = [at for at in left if letters[at] != 84]  # noqa: PLR2004
        if others:
            again.append(some(part, others))
        if moving:
            later.append(some(part, moving))


def take_marks(part: CallPart, letters: bytes, answers: list[Answer]) -> None:
    """Write down which keys of a mark were the first."""
    marked = answers[part.mark]
    if not isinstance(marked, Marked):
        return  # another part of it got no answer
    if b"O" in letters:
        answers[part.mark] = Unavailable(encoding.full())
        return
    if b"X" in letters:
        answers[part.mark] = Unavailable(
            RecordCorrupt(f"a mark of {part.items[0].consumer!r} holds something that semel does not write")
        )
        return
    firsts = marked.firsts
    if len(firsts) == len(letters):
        firsts[:] = [letter == 49 for letter in letters]  # noqa: PLR2004 - 1
        return
    for place, letter in zip(part.places, letters, strict=True):
        firsts[place] = letter == 49  # noqa: PLR2004


def repeatable(part: CallPart) -> bool:
    """Whether the same call once more does no harm: each item carries its owner, or only looks."""
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
"""A completion only makes the record of an effect that exists: refusing it for want of memory would lose the effect."""


class Script(Struct, frozen=True):
    """One script: what EVAL takes, and what EVALSHA takes instead."""

    name: str
    text: bytes
    sha: bytes


class Scripts(Struct, frozen=True):
    """All of them, for one kind of server."""

    claim: Script
    settle: Script
    mark: Script
    compact: Script


@lru_cache(maxsize=2)
def scripts_for(*, shebang: bool) -> Scripts:
    """The scripts for servers that know flags, or for older ones."""
    return Scripts(
        claim=_load("claim", b""),
        settle=_load("settle", ALLOW_OOM if shebang else b""),
        mark=_load("mark", b""),
        compact=_load("compact", b""),
    )


def _load(name: str, first_line: bytes) -> Script:
    folder = files("semel.stores.redis") / "scripts"
    text = first_line + b"\n".join((folder / f"{part}.lua").read_bytes() for part in ("prelude", name))
    return Script(name, text, sha1(text, usedforsecurity=False).hexdigest().encode())
