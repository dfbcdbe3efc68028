"""Tiers: Redis over PostgreSQL against PostgreSQL alone, on the same servers, in turns."""

from collections.abc import Callable
from pathlib import Path

import semel
from semel.cli.bench.measure import Fresh, Job, Measurement, compare
from semel.cli.bench.workloads import nothing
from semel.stores.postgres import PostgresStore

BATCH = 500
COUNT = 20_000


def rows(folder: Path) -> list[Measurement]:
    """All comparisons; servers are started in `folder`."""
    from tests.services import postgres, redis

    with (
        postgres.own(_make_folder(folder / "postgres")) as truth,
        redis.own(_make_folder(folder / "redis")) as cache,
    ):
        alone = semel.open(truth.url, consumer="alone")
        store = semel.tiered(cache=cache.url, truth=PostgresStore(truth.url))
        tiers = semel.open(store, consumer="tiers")
        found = [
            fresh("new events, 500", tiers, alone),
            again("recent duplicates, 500", tiers, alone, BATCH, COUNT),
            again("recent duplicates, 1", tiers, alone, 1, 500),
        ]
        for client in (alone, tiers):
            client.close()
        store.close()
    return found


def _make_folder(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _runs(client: semel.Semel, keys: Fresh, size: int, count: int) -> Callable[[], None]:
    def run() -> None:
        for at in range(0, count, size):
            batch = keys.keys[at : at + size]
            client.run_many([semel.Delivery(key=key, body=None) for key in batch], nothing)

    return run


def fresh(name: str, tiers: semel.Semel, alone: semel.Semel) -> Measurement:
    """Run new events: measures the cost of the cache."""
    mine, theirs = Fresh(COUNT), Fresh(COUNT)
    return compare(
        "tiers",
        name,
        Job(_runs(tiers, mine, BATCH, COUNT), COUNT, mine),
        "PostgreSQL alone",
        Job(_runs(alone, theirs, BATCH, COUNT), COUNT, theirs),
    )


def again(name: str, tiers: semel.Semel, alone: semel.Semel, size: int, count: int) -> Measurement:
    """Run events that have just been done: measures the gain of the cache."""
    keys = Fresh(COUNT)
    keys()
    for client in (tiers, alone):
        _runs(client, keys, BATCH, count)()
    return compare(
        "tiers",
        name,
        Job(_runs(tiers, keys, size, count), count),
        "PostgreSQL alone",
        Job(_runs(alone, keys, size, count), count),
    )
