"""A batch of items: its stages, their statements, and the answers so far."""

from collections.abc import Generator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from msgspec import Struct

from semel.core.commands import Answer, Claim, Forget, Item, Lookup, Mark, RecordItem, Renew, Resolve, Settle
from semel.core.ids import digest, digests_of, holds_time, time_in
from semel.errors import KeyInvalid, StoreUnavailable, UsageError
from semel.stores.postgres import encoding
from semel.stores.postgres.calendar import Retention
from semel.stores.postgres.encoding import Row
from semel.types import Absent, Id, Unavailable

__all__ = ["RACES_MAX", "number_consumers", "query_consumers", "read_consumers"]

T = TypeVar("T")

FAR_US = 2**52
"""Larger times are left to the machine in Python, which refuses times that no row can hold."""
BIGINT = range(-(2**62), 2**62)
MARKING = ("mark", "refresh")
"""The kinds of marks: those that leave the windows of known keys alone, and those that start them again."""
RECORD_ITEMS = (Claim, Renew, Settle, Lookup, Forget, Resolve)


class SendCalls(Struct, frozen=True):
    """A statement by name, and its parameters. `script`: the SQL text to execute instead.

    `expected_errors`: errors of the server (SQLSTATE) that count as a result: its only row is then the SQLSTATE.
    """

    name: str
    parameters: Mapping[str, Any] = {}
    script: str = ""
    expected_errors: frozenset[str] = frozenset()


Talk: TypeAlias = Generator[SendCalls, list[Row], T]
"""A generator that yields statements, receives their rows, and returns a result."""
Scope: TypeAlias = tuple[str, str]


class PostgresBatch:
    """The items of one call, their answers so far, and the other inputs of the statements."""

    def __init__(
        self,
        items: Sequence[Item],
        known: dict[Scope, int],
        kinds: dict[Scope, str] | None = None,
        *,
        now: int | None = None,
        readable_keys: bool = True,
        schema: str = "",
        retention: Retention | None = None,
    ) -> None:
        self.items: Sequence[Any] = items
        self.answers: list[Answer] = [None] * len(items)
        self.known = known
        """The numbers of consumers, cached by the store between calls; other threads may clear it."""
        self.kinds: dict[Scope, str] = {} if kinds is None else kinds
        """The kinds of ids of the consumers in `known` that declared one."""
        self.consumers: dict[Scope, int] = {}
        """The numbers of the consumers that this batch needs."""
        self.schema = schema
        self.retention: Retention = retention or Retention()
        """The store's options for partitions."""
        self.now = now
        """`None`: the server's own clock."""
        self.readable_keys = readable_keys
        self.digests: list[bytes] = [b""] * len(items)
        self.marked: dict[int, list[bytes]] = {}
        """The digests of the keys of marks, by position."""
        self.mark_times: dict[int, list[int | None]] = {}
        """The times inside those keys, by position, for marks that are in partitions; `None`: there is none."""
        self.changed: list[Id] = []
        """Records to notify waiters about after the commit."""
        self.id_times: dict[int, int] = {}
        """The times inside the ids, by position, for items whose records are in partitions."""
        self.leaving: dict[int, list[str]] = {}
        """Partitions to remove, by the position of the purge that found them."""

    def refuse(self, position: int, error: Exception) -> None:
        """Answer one item with its own error."""
        self.answers[position] = Unavailable(error)

    def start_over(self) -> None:
        """Clear the numbers of consumers after a lost connection: the next one may lead to another server."""
        self.known.clear()
        self.kinds.clear()
        self.consumers.clear()

    def unknown(self) -> dict[Scope, bool]:
        """Return the consumers whose numbers are not cached, and whether to create a number for each."""
        missing: dict[Scope, bool] = {}
        for item in self.items:
            if isinstance(item, RECORD_ITEMS):
                scope = item.id[:2]
            elif isinstance(item, Mark):
                scope = (item.tenant, item.consumer)
            else:
                continue
            if scope not in self.known and _is_text(scope):
                missing[scope] = missing.get(scope, False) or isinstance(item, Claim | Settle | Mark)
        return missing

    def times_of(self, positions: Sequence[int]) -> dict[str, Any]:
        """Return the additional parameter of a statement on partitions; empty for the other table."""
        if not positions or positions[0] not in self.id_times:
            return {}
        return {"id_times": encoding.bigints([self.id_times[position] for position in positions])}

    def ask(self, name: str, positions: Sequence[int], parameters: Mapping[str, Any]) -> SendCalls:
        """Return the statement for the table of these items' records; all must be in the same table."""
        times = self.times_of(positions)
        return SendCalls(f"{name}_timed" if times else name, {**parameters, **times})

    @staticmethod
    def must_stay(item: RecordItem) -> bool:
        """Whether the record must not expire before a decision, which a partition cannot promise."""
        if isinstance(item, Claim):
            return item.quarantine or item.journal is not None
        return isinstance(item, Settle) and item.to == "unknown"

    def key_of(self, item: RecordItem, *, needed: bool) -> str | None:
        """Return the readable key if it is to be stored, else `None`."""
        return encoding.storable(item.id[2]) if self.readable_keys or needed else None


def _is_text(scope: Scope) -> bool:
    try:
        encoding.check_name(scope[0])
        encoding.check_name(scope[1])
    except KeyInvalid:
        return False  # the item itself is refused later
    return True


class Stage(Struct, frozen=True):
    """Items of one kind, on one table, that are sent together."""

    kind: str
    positions: list[int]


# --- stages -------------------------------------------------------------------------------------


def stages(batch: PostgresBatch) -> list[Stage]:
    """Group the items by kind, keeping the order of any two that touch the same record.

    An item joins the latest stage of its kind unless its record was touched in that stage or later. Items that
    are not about single records keep their place.
    """
    kinds = [kind_of(item) for item in batch.items]
    keys = [_keys_of(batch, position, kind) for position, kind in enumerate(kinds)]
    if None not in keys and len(batch.id_times) in (0, len(kinds)) and _is_plain(kinds, keys):
        return [Stage(kinds[0], list(range(len(kinds))))]
    made: list[Stage] = []
    latest: dict[tuple[str, bool], int] = {}
    touched: dict[bytes, int] = {}
    barrier = -1
    for position, (kind, mine) in enumerate(zip(kinds, keys, strict=True)):
        if mine is None:
            continue
        if kind == "apart":
            made.append(Stage(kind, [position]))
            barrier = len(made) - 1
            continue
        table = (kind, position in batch.id_times or position in batch.mark_times)
        at = latest.get(table, -1)
        if at <= barrier or any(touched.get(key, -1) >= at for key in mine):
            made.append(Stage(kind, []))
            at = latest[table] = len(made) - 1
        made[at].positions.append(position)
        touched.update(dict.fromkeys(mine, at))
    return made


def _is_plain(kinds: list[str], keys: list[Any]) -> bool:
    """Whether the whole batch is one stage, as most batches are."""
    if len(kinds) == 1:
        return True
    return (
        bool(kinds)
        and kinds[0] not in ("apart", *MARKING)
        and kinds.count(kinds[0]) == len(kinds)
        and len({each[0] for each in keys}) == len(keys)
    )


def kind_of(item: Item) -> str:
    """Return how an item is executed: by one statement for many items, or decided in Python under locks."""
    match item:
        case Claim():
            bare = item.journal is None and item.meta is None and not item.apart_us and item.error is None
            plain = bare and item.lease_us + item.window_us < FAR_US
            return "claim" if plain else "reserved"
        case Settle():
            plain = item.window_us + item.delay_us < FAR_US and item.fence in BIGINT
            return "settle" if plain else "reserved"
        case Renew():
            plain = item.step is None and item.fence in BIGINT and item.lease_us < FAR_US
            return "renew" if plain else "locked"
        case Lookup():
            return "lookup"
        case Forget() | Resolve():
            return "locked"
        case Mark():
            return "refresh" if item.refresh else "mark"
        case _:
            return "apart"


def _keys_of(batch: PostgresBatch, position: int, kind: str) -> Sequence[bytes] | None:
    """Return the digests that an item touches; `None`: the item was refused and has its answer."""
    item = batch.items[position]
    if kind == "apart":
        return ()
    try:
        if kind in MARKING:
            return _marks_of(batch, position)
        if kind == "claim" and item.event_type:
            encoding.check_name(item.event_type)
        key = batch.digests[position] = digest(item.id)
        ids = batch.kinds.get(item.id[:2]) if batch.kinds else None
        if ids is not None and not _route(batch, position, ids):
            return None
        return (key,)
    except (KeyInvalid, UnicodeEncodeError) as error:
        name = (item.tenant, item.consumer) if kind in MARKING else item.id
        batch.refuse(position, KeyInvalid(f"{name!r} is not valid text: {error}"))
        return None


def _marks_of(batch: PostgresBatch, position: int) -> Sequence[bytes] | None:
    """Return the digests of a mark's keys, and find the times inside them; `None`: it was refused."""
    item: Mark = batch.items[position]
    ids = batch.kinds.get((item.tenant, item.consumer)) if batch.kinds else None
    if ids is not None:
        if item.refresh:
            batch.refuse(
                position, UsageError("a mark in a partition keeps its window; leave out refresh_on_sight")
            )
            return None
        try:
            batch.mark_times[position] = [time_in(ids, key) if holds_time(ids) else None for key in item.keys]
        except KeyInvalid as error:
            batch.refuse(position, error)
            return None
    marked = batch.marked[position] = digests_of(item.tenant, item.consumer, item.keys)
    return marked


def _route(batch: PostgresBatch, position: int, ids: str) -> bool:
    """Find the time inside the id, which chooses the partition of its record. `False`: the item has its answer.

    The time must depend only on the id: otherwise two copies of an event could be in two partitions.
    """
    item = batch.items[position]
    if not holds_time(ids):
        return True
    try:
        batch.id_times[position] = time_in(ids, item.id[2])
    except KeyInvalid as error:
        if isinstance(item, Lookup):
            batch.answers[position] = Absent()
        else:
            batch.refuse(position, error)
        return False
    if batch.must_stay(item):
        del batch.id_times[position]
        batch.refuse(
            position, UsageError(f"{item.id!r} must not expire, and partitions do; use no ids for it")
        )
        return False
    return True


RACES_MAX = 8
"""How often a read is repeated that races with other transactions."""


def number_consumers(batch: PostgresBatch, scopes: set[Scope], *, timed: bool | None = None) -> Talk[None]:
    """Find or create a number for each consumer; the numbers are cached.

    `timed`: whether the items were treated as ids with a time. Raises `StoreUnavailable` if that is not so.
    """
    for _ in range(RACES_MAX):
        for scope in scopes - batch.consumers.keys():
            number = batch.known.get(scope)
            if number is not None:
                batch.consumers[scope] = number
        unknown = dict.fromkeys(sorted(scopes - batch.consumers.keys()), True)
        if not unknown:
            return
        for scope, ids in (yield from query_consumers(batch, unknown)).items():
            if timed is not None and holds_time(ids) is not timed:
                raise StoreUnavailable(f"consumer {scope[1]!r} was created or removed meanwhile; try again")
            batch.consumers[scope] = batch.known[scope]
    raise StoreUnavailable("consumers are created and removed at the same time; try again")


def read_consumers(batch: PostgresBatch, _positions: Sequence[int]) -> Talk[None]:
    """Read the consumers of the items before routing them; creates consumers for items that create records."""
    unknown = batch.unknown()
    for _ in range(RACES_MAX):
        if not unknown:
            return
        found = yield from query_consumers(batch, dict(sorted(unknown.items())))
        # A consumer that another transaction created after our snapshot is in neither half of the answer: query again.
        unknown = {scope: make for scope, make in unknown.items() if make and scope not in found}


def query_consumers(batch: PostgresBatch, unknown: Mapping[Scope, bool]) -> Talk[dict[Scope, str]]:
    """Create numbers for the consumers that need one; returns the kinds of ids of all consumers that have one."""
    rows = yield SendCalls(
        "consumers",
        {
            "tenants": encoding.texts([encoding.storable(tenant) for tenant, _ in unknown]),
            "names": encoding.texts([encoding.storable(consumer) for _, consumer in unknown]),
            "makes": encoding.smallints([int(make) for make in unknown.values()]),
        },
    )
    found: dict[Scope, str] = {}
    for tenant, consumer, number, ids in rows:
        scope = (encoding.original(tenant), encoding.original(consumer))
        found[scope] = ids
        if ids:
            batch.kinds[scope] = ids  # before its number: a thread that finds the number does not query
        batch.known[scope] = number
    return found
