"""Encode and decode items and answers between the http store and the server.

A request is an array of items, each an object with its `type`. A reply is an array of answers in the same order,
each an object with one member, named after the kind of answer: `{"granted": {...}}`. MessagePack and JSON have the
same structure; in JSON bytes are base64. The content type contains the version: a new version has a new content type.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from semel import errors
from semel.core.commands import Answer, Granted, Item, Known, Marked, Page, Purged, StoreSettings
from semel.errors import StoreError, StoreMoved, StoreRefused, StoreUnavailable
from semel.types import (
    Absent,
    Busy,
    Completed,
    Forgotten,
    Late,
    Lost,
    Mismatch,
    Mode,
    Record,
    Renewed,
    Stats,
    Unavailable,
    Unknown,
)

__all__ = [
    "ANSWER_FULL",
    "ITEMS_JSON",
    "ITEMS_MSGPACK",
    "STORE_MOVED",
    "AnswerFull",
    "ItemRefusal",
    "answers_from",
    "answers_to",
    "batch_of",
    "encode_item",
    "items_from",
]

ITEMS_MSGPACK = "application/vnd.semel.items.v1+msgpack"
ITEMS_JSON = "application/vnd.semel.items.v1+json"
ANSWER_FULL = "answer-full"
"""The title of a refusal that means: the answers before this one fill the response; send the item again."""
STORE_MOVED = "store-moved"
"""The title of a refusal that means: the consumer moves to another store, or from one."""


class ItemRefusal(msgspec.Struct, frozen=True, omit_defaults=True):
    """The server did not carry out this item. Other items are not affected."""

    status: int
    title: str
    detail: str
    retry_after_s: int = 0
    """When the same item may be sent again; 0: never, it would be refused again."""


class AnswerFull(StoreRefused):
    """The item was not carried out, because the answers before it fill the response."""


class WireUnavailable(msgspec.Struct, frozen=True):
    """The store behind the server did not answer the item."""

    error: str
    detail: str


class WireSettings(msgspec.Struct, frozen=True):
    """`StoreSettings` for the wire: JSON has no tuples as keys."""

    windows: list[tuple[str, str, str, int]]
    modes: list[tuple[str, str, Mode]]
    ids: list[tuple[str, str, str]]
    live_us: int


class WireUnknown(msgspec.Struct, frozen=True):
    """`Unknown` for the wire, without the caller's own error: a store never has one."""

    since: int


class WireEmpty(msgspec.Struct, frozen=True):
    """An answer without fields."""


def _settings_out(answer: StoreSettings) -> WireSettings:
    return WireSettings(
        [(*place, us) for place, us in answer.windows.items()],
        [(*place, mode) for place, mode in answer.modes.items()],
        [(*place, kind) for place, kind in answer.ids.items()],
        answer.live_us,
    )


def _settings_in(found: WireSettings) -> StoreSettings:
    return StoreSettings(
        {(tenant, consumer, kind): us for tenant, consumer, kind, us in found.windows},
        {(tenant, consumer): mode for tenant, consumer, mode in found.modes},
        {(tenant, consumer): kind for tenant, consumer, kind in found.ids},
        found.live_us,
    )


def _trouble_out(answer: Unavailable) -> WireUnavailable:
    return WireUnavailable(type(answer.error).__name__, str(answer.error))


def _trouble_in(found: WireUnavailable) -> Unavailable:
    """Return the same kind of error if it is a `StoreError`: a full store is not a broken connection."""
    kind = getattr(errors, found.error, None)
    if not (isinstance(kind, type) and issubclass(kind, StoreError)):
        kind = StoreUnavailable
    return Unavailable(kind(found.detail))


_REFUSALS: dict[str, type[StoreRefused]] = {ANSWER_FULL: AnswerFull, STORE_MOVED: StoreMoved}


def _refusal_in(found: ItemRefusal) -> Unavailable:
    return Unavailable(_REFUSALS.get(found.title, StoreRefused)(found.detail))


def _same(answer: Any) -> Any:
    return answer


def _nothing(_answer: Any) -> WireEmpty:
    return WireEmpty()


_KINDS: list[tuple[str, type, Any, Callable[[Any], Any], Callable[[Any], Any]]] = [
    # name, type of the answer, type on the wire, conversion to the wire, conversion from the wire
    ("granted", Granted, Granted, _same, _same),
    ("known", Known, Known, _same, _same),
    ("busy", Busy, Busy, _same, _same),
    ("mismatch", Mismatch, WireEmpty, _nothing, lambda _: Mismatch()),
    ("late", Late, Late, _same, _same),
    (
        "unknown",
        Unknown,
        WireUnknown,
        lambda answer: WireUnknown(answer.since_us),
        lambda found: Unknown(found.since),
    ),
    ("completed", Completed, Completed, _same, _same),
    ("lost", Lost, WireEmpty, _nothing, lambda _: Lost()),
    ("renewed", Renewed, Renewed, _same, _same),
    ("marked", Marked, Marked, _same, _same),
    ("record", Record, Record, _same, _same),
    ("absent", Absent, WireEmpty, _nothing, lambda _: Absent()),
    ("forgotten", Forgotten, Forgotten, _same, _same),
    ("page", Page, Page, _same, _same),
    ("purged", Purged, Purged, _same, _same),
    ("stats", Stats, Stats, _same, _same),
    ("settings", StoreSettings, WireSettings, _settings_out, _settings_in),
    ("unavailable", Unavailable, WireUnavailable, _trouble_out, _trouble_in),
    ("refused", ItemRefusal, ItemRefusal, _same, _refusal_in),
    ("mode", str, Mode, _same, _same),
    ("count", int, int, _same, _same),
    ("none", type(None), None, _same, _same),
]
KINDS: dict[str, Any] = {name: wire for name, _, wire, _, _ in _KINDS}
"""The type of each answer on the wire, by its name."""

_OUT = {kind: (name, None if out is _same else out) for name, kind, _, out, _ in _KINDS}
_IN = {
    name: (msgspec.msgpack.Decoder(wire).decode, msgspec.json.Decoder(wire).decode, into)
    for name, _, wire, _, into in _KINDS
}
_pack = msgspec.msgpack.Encoder()
_json = msgspec.json.Encoder()
_unpack_items = msgspec.msgpack.Decoder(list[Item]).decode
_parse_items = msgspec.json.Decoder(list[Item]).decode
_unpack_answers = msgspec.msgpack.Decoder(list[dict[str, msgspec.Raw]]).decode
_parse_answers = msgspec.json.Decoder(list[dict[str, msgspec.Raw]]).decode


def encode_item(item: Item) -> bytes:
    """Encode one item in MessagePack, for a batch."""
    return _pack.encode(item)


def batch_of(pieces: Sequence[bytes]) -> bytes:
    """Return a MessagePack array of already encoded items."""
    return b"\xdd" + len(pieces).to_bytes(4) + b"".join(pieces)


def items_from(body: bytes, *, packed: bool) -> list[Item]:
    """Decode the items of a request. Raises `msgspec.MsgspecError`, `UnicodeDecodeError` or `RecursionError`."""
    return (_unpack_items if packed else _parse_items)(body)


def answers_to(answers: Sequence[Answer], *, packed: bool) -> bytes:
    """Encode the reply; an `ItemRefusal` may take the place of an answer."""
    out = []
    for answer in answers:
        name, shape = _OUT[type(answer)]
        out.append({name: answer if shape is None else shape(answer)})
    return (_pack if packed else _json).encode(out)


def answers_from(body: bytes, *, packed: bool = True) -> list[Answer]:
    """Decode the answers in a reply. Raises `StoreError` if no server of this version sends such a reply."""
    try:
        answers: list[Answer] = []
        for each in (_unpack_answers if packed else _parse_answers)(body):
            ((name, raw),) = each.items()
            unpack, parse, into = _IN[name]
            answers.append(into((unpack if packed else parse)(raw)))
        return answers
    except (msgspec.MsgspecError, ValueError, KeyError) as error:
        raise StoreError(f"the server's reply cannot be decoded: {error!r}") from error
