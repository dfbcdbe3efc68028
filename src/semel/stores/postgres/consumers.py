"""What a store has to know of consumers before it can speak of their records: a number, and the kind of their ids."""

from collections.abc import Mapping, Sequence

from semel.errors import StoreUnavailable
from semel.stores.postgres import wire
from semel.stores.postgres.batch import SendCalls, PostgresBatch, Scope, Talk

__all__ = ["RACES_MAX", "ask_for", "know", "meet"]

RACES_MAX = 8
"""How often something is looked at again that others change under our hands."""


def know(batch: PostgresBatch, scopes: set[Scope], *, timed: bool | None = None) -> Talk[None]:
    """Have a number for each consumer; they are remembered, so this is said once.

    `timed`: whether their items were taken for ids with a time, so that one that turns out otherwise is refused.
    """
    for _ in range(RACES_MAX):
        for scope in scopes - batch.consumers.keys():
            number = batch.known.get(scope)
            if number is not None:
                batch.consumers[scope] = number
        unknown = dict.fromkeys(sorted(scopes - batch.consumers.keys()), True)
        if not unknown:
            return
        for scope, ids in (yield from ask_for(batch, unknown)).items():
            if timed is not None and bool(ids) is not timed:
                raise StoreUnavailable(f"consumer {scope[1]!r} was entered or removed meanwhile; try again")
            batch.consumers[scope] = batch.known[scope]
    raise StoreUnavailable("consumers are entered and removed at the same time; try again")


def meet(batch: PostgresBatch, _positions: Sequence[int]) -> Talk[None]:
    """Learn what the routes of the items depend on; consumers of items that make records are entered."""
    unknown = batch.unknown()
    for _ in range(RACES_MAX):
        if not unknown:
            return
        found = yield from ask_for(batch, dict(sorted(unknown.items())))
        # One that another transaction has entered after our snapshot is in neither half of the answer: ask again.
        unknown = {scope: make for scope, make in unknown.items() if make and scope not in found}


def ask_for(batch: PostgresBatch, unknown: Mapping[Scope, bool]) -> Talk[dict[Scope, str]]:
    """Have numbers for those that are to have one; answers with the kinds of ids of all that have one."""
    rows = yield SendCalls(
        "consumers",
        {
            "tenants": wire.texts([wire.storable(tenant) for tenant, _ in unknown]),
            "names": wire.texts([wire.storable(consumer) for _, consumer in unknown]),
            "makes": wire.smallints([int(make) for make in unknown.values()]),
        },
    )
    found: dict[Scope, str] = {}
    for tenant, consumer, number, ids in rows:
        scope = (wire.original(tenant), wire.original(consumer))
        found[scope] = ids
        if ids:
            batch.kinds[scope] = ids  # before its number: who finds that one asks no more
        batch.known[scope] = number
    return found
