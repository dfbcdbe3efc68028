"""A batch of items: what is asked for them, in which stages, and what has been answered so far."""

from collections.abc import Generator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from msgspec import Struct

from semel.core.commands import Answer, Claim, Forget, Item, Lookup, Mark, RecordItem, Renew, Resolve, Settle
from semel.digests import digest, digests_of
from semel.errors import KeyInvalid
from semel.stores.postgres import wire
from semel.stores.postgres.wire import Row
from semel.types import Id, Unavailable

T = TypeVar("T")

FAR_US = 2**52
"""Times beyond are left to the machine in Python, which refuses what no row can hold."""
BIGINT = range(-(2**62), 2**62)


class Ask(Struct, frozen=True):
    """A statement by name, and its parameters. `script`: statements in their own words instead."""

    name: str
    parameters: Mapping[str, Any] = {}
    script: str = ""


Talk: TypeAlias = Generator[Ask, list[Row], T]
Scope: TypeAlias = tuple[str, str]


class Batch:
    """The items of one call, their answers so far, and what the statements need to know beside them."""

    def __init__(
        self,
        items: Sequence[Item],
        known: dict[Scope, int],
        *,
        now: int | None = None,
        readable_keys: bool = True,
    ) -> None:
        self.items: Sequence[Any] = items
        self.answers: list[Answer] = [None] * len(items)
        self.known = known
        """The numbers of consumers, kept by the store between calls; other threads may clear it."""
        self.consumers: dict[Scope, int] = {}
        """Those that this batch needs."""
        self.now = now
        """`None`: the server's own clock."""
        self.readable_keys = readable_keys
        self.digests: list[bytes] = [b""] * len(items)
        self.marked: dict[int, list[bytes]] = {}
        """The digests of the keys of marks, by position."""
        self.changed: list[Id] = []
        """What whoever waits is to be told of, once it is committed."""

    def refuse(self, position: int, error: Exception) -> None:
        """Answer one item with its own error."""
        self.answers[position] = Unavailable(error)

    def start_over(self) -> None:
        """The connection was cut: perhaps the next one leads to another server, with other numbers."""
        self.known.clear()
        self.consumers.clear()

    def key_of(self, item: RecordItem, *, needed: bool) -> str | None:
        """The readable key, where it is kept."""
        return wire.storable(item.id[2]) if self.readable_keys or needed else None


class Stage(Struct, frozen=True):
    """Items of one kind that are said together."""

    kind: str
    positions: list[int]


# --- stages -------------------------------------------------------------------------------------


def stages(batch: Batch) -> list[Stage]:
    """Gather the items by kind, keeping the order of any two that touch the same record.

    An item joins the latest stage of its kind unless its record was touched in that one or since; what is
    not about single records stays where it is.
    """
    kinds = [kind_of(item) for item in batch.items]
    keys = [_keys_of(batch, position, kind) for position, kind in enumerate(kinds)]
    if None not in keys and _is_plain(kinds, keys):
        return [Stage(kinds[0], list(range(len(kinds))))]
    made: list[Stage] = []
    latest: dict[str, int] = {}
    touched: dict[bytes, int] = {}
    barrier = -1
    for position, (kind, mine) in enumerate(zip(kinds, keys, strict=True)):
        if mine is None:
            continue
        if kind == "apart":
            made.append(Stage(kind, [position]))
            barrier = len(made) - 1
            continue
        at = latest.get(kind, -1)
        if at <= barrier or any(touched.get(key, -1) >= at for key in mine):
            made.append(Stage(kind, []))
            at = latest[kind] = len(made) - 1
        made[at].positions.append(position)
        touched.update(dict.fromkeys(mine, at))
    return made


def _is_plain(kinds: list[str], keys: list[Any]) -> bool:
    """Whether the whole batch is one stage: what most batches are."""
    if len(kinds) == 1:
        return True
    return (
        bool(kinds)
        and kinds[0] not in ("apart", "mark")
        and kinds.count(kinds[0]) == len(kinds)
        and len({each[0] for each in keys}) == len(keys)
    )


def kind_of(item: Item) -> str:
    """How an item is said: by one statement for many, or under locks, decided here."""
    match item:
        case Claim():
            bare = item.journal is None and item.meta is None and not item.apart_us
            plain = bare and item.lease_us + item.window_us < FAR_US
            return "claim" if plain else "making"
        case Settle():
            plain = item.window_us + item.delay_us < FAR_US and item.fence in BIGINT
            return "settle" if plain else "making"
        case Renew():
            plain = item.step is None and item.fence in BIGINT and item.lease_us < FAR_US
            return "renew" if plain else "locked"
        case Lookup():
            return "lookup"
        case Forget() | Resolve():
            return "locked"
        case Mark():
            return "mark"
        case _:
            return "apart"


def _keys_of(batch: Batch, position: int, kind: str) -> Sequence[bytes] | None:
    """The digests that an item touches; `None`: it is refused, and has its answer."""
    item = batch.items[position]
    if kind == "apart":
        return ()
    try:
        if kind == "mark":
            marked = batch.marked[position] = digests_of(item.tenant, item.consumer, item.keys)
            return marked
        if kind == "claim" and item.event_type:
            wire.check_name(item.event_type)
        key = batch.digests[position] = digest(item.id)
        return (key,)
    except (KeyInvalid, UnicodeEncodeError) as error:
        name = (item.tenant, item.consumer) if kind == "mark" else item.id
        batch.refuse(position, KeyInvalid(f"{name!r} is not valid text: {error}"))
        return None
