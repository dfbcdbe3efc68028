"""Round trips, counted on the wire between the tiers and a real PostgreSQL, in both colours."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import semel
from semel.core.commands import Answer, Item
from semel.stores.postgres import from_url
from semel.stores.tiered import TieredStore, tiered
from semel.testing.proxy import Proxy
from semel.types import Done
from tests.services import postgres
from tests.stores.shells import InLoop
from tests.stores.tiered import places
from tests.stores.tiered.tools import claim, done, kinds


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    port = urlsplit(postgres.url()).port
    assert port is not None
    with Proxy(port) as proxy:
        yield proxy


def through(proxy: Proxy, folder: Path) -> TieredStore:
    parts = urlsplit(postgres.place(folder))
    url = parts._replace(netloc=f"{parts.username}@127.0.0.1:{proxy.port}").geturl()
    return tiered(cache=places.redis_cache(folder), truth=from_url(url))


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_what_reaches_the_truth(proxy: Proxy, tmp_path: Path, colour: str) -> None:
    made = through(proxy, tmp_path)
    store = made if colour == "sync" else InLoop(made.twin())  # type: ignore[attr-defined]
    store.open()
    try:
        _count_round_trips(store.send, proxy)
    finally:
        store.close()


def _count_round_trips(send: Callable[[list[Item]], list[Answer]], proxy: Proxy) -> None:
    def asked(items: list[Item]) -> tuple[list[Answer], int]:
        before = proxy.turns
        return send(items), proxy.turns - before

    for warm in ("one", "two"):  # the consumer's number, and statements that are prepared at their second use
        pair = [claim(f"{warm} {number}") for number in range(2)]  # one item alone takes another statement
        send([done(each, answer) for each, answer in zip(pair, send([*pair]), strict=True)])
    claims = [claim(f"evt {number}") for number in range(200)]
    answers, trips = asked([*claims])
    assert (set(kinds(answers)), trips) == ({"Granted"}, 1)
    _, trips = asked([done(each, answer) for each, answer in zip(claims, answers, strict=True)])
    assert trips == 1
    answers, trips = asked([claim(each.id[2]) for each in claims])
    assert (set(kinds(answers)), trips) == ({"Known"}, 0)
    answers, trips = asked([claim("evt 1"), claim("new 1"), claim("evt 2"), claim("new 2")])
    assert (kinds(answers), trips) == (["Known", "Granted", "Known", "Granted"], 1)


def test_clients_of_both_colours_share_the_cache(proxy: Proxy, tmp_path: Path) -> None:
    runs: list[str] = []
    store = through(proxy, tmp_path)
    once = semel.open(store, consumer="billing")
    assert once.run("evt", runs.append, "sync") == Done(None)

    async def effect(what: str) -> None:
        runs.append(what)

    async def again() -> None:
        async with semel.aopen(through(proxy, tmp_path), consumer="billing") as aonce:
            await aonce.run("other", effect, "async")
            before = proxy.turns
            assert await aonce.run("evt", effect, "twice") == Done(None, replayed=True)
            assert proxy.turns == before
            assert (await aonce.records.stats()).tiers["cache_hits"] >= 1

    asyncio.run(again())
    before = proxy.turns
    assert once.run("other", runs.append, "twice") == Done(None, replayed=True)
    assert proxy.turns == before
    once.close()
    store.close()
    assert runs == ["sync", "async"]
