"""Connections cut before, during and after the reply: nothing is lost, nothing happens twice; and what a call costs."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from semel.core.commands import Claim, Forget, Granted, Known, Lookup, Mark, Marked, Renew, Settle
from semel.core.protocols import Store
from semel.errors import StoreUnavailable
from semel.stores.postgres import from_url
from semel.testing.proxy import Proxy, ProxyMode
from semel.types import Busy, Completed, Lost, Record, Renewed, Unavailable
from tests.stores.postgres import places
from tests.stores.shells import InLoop

MINUTE_US = 60 * 1_000_000
DAY_US = 86_400 * 1_000_000
COLOURS = ["sync", "async"]
CUTS: list[ProxyMode] = ["cut_request", "half_reply", "cut_reply"]


@pytest.fixture
def proxy(place: str) -> Iterator[Proxy]:
    port = urlsplit(place).port
    assert port is not None
    with Proxy(port) as between:
        yield between


@pytest.fixture(params=COLOURS)
def store(request: pytest.FixtureRequest, place: str, proxy: Proxy) -> Iterator[Store]:
    """A store behind the proxy that has been used before, with one connection."""
    at = place.replace(f":{urlsplit(place).port}/", f":{proxy.port}/").replace("pool_max=16", "pool_max=1")
    inner = from_url(at)
    made: Any = InLoop(inner.twin()) if request.param == "async" else inner
    made.open()
    warm = claims(4, "warm")  # the first call of a statement prepares it, which is a round trip of its own
    granted = [*made.send(warm[:3]), *made.send(warm[3:])]  # many, and one alone
    made.send(settles(warm[:2], granted[:2]))
    made.send(settles(warm[3:], granted[3:]))
    made.send([Mark("", "warm", ["k"], DAY_US)])
    made.send([Renew(warm[2].id, warm[2].owner, granted[2].fence, MINUTE_US), Lookup(warm[0].id)])
    yield made
    made.close()


def claims(count: int, consumer: str = "c") -> list[Claim]:
    return [Claim(("", consumer, f"key {n}"), os.urandom(16), MINUTE_US, DAY_US) for n in range(count)]


def settles(sent: list[Claim], answers: list[Any], value: bytes = b"j1") -> list[Settle]:
    return [
        Settle(claim.id, claim.owner, answer.fence, "done", value, DAY_US, MINUTE_US)
        for claim, answer in zip(sent, answers, strict=True)
    ]


def persist(store: Store, items: list[Any]) -> list[Any]:
    """Say the same items until they are answered, as clients do."""
    for _ in range(20):
        with suppress(StoreUnavailable):
            answers = store.send(items)
            if not any(isinstance(answer, Unavailable) for answer in answers):
                return answers
    raise AssertionError("never answered")


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("cut", CUTS)
def test_a_claim_that_was_cut_gets_its_own_back(
    store: Store, proxy: Proxy, cut: ProxyMode, times: int
) -> None:
    sent = claims(40)
    proxy.cut_next(cut, times)
    answers = persist(store, sent)
    assert proxy.cuts == times
    assert all(isinstance(answer, Granted) and answer.attempt == 1 for answer in answers)
    records = store.send([Lookup(claim.id) for claim in sent])
    assert [(each.owner, each.fence) for each in records] == [
        (claim.owner, answer.fence) for claim, answer in zip(sent, answers, strict=True)
    ]
    assert all(isinstance(answer, Busy) for answer in store.send(claims(40)))


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("cut", CUTS)
def test_a_completion_that_was_cut_is_stored_once(
    store: Store, proxy: Proxy, cut: ProxyMode, times: int
) -> None:
    sent = claims(40)
    ends = settles(sent, store.send(sent))
    proxy.cut_next(cut, times)
    answers = persist(store, ends)
    assert proxy.cuts == times
    assert all(isinstance(answer, Completed) and not answer.recreated for answer in answers)
    assert {answer.already for answer in answers} == {cut != "cut_request"}
    again = store.send(claims(40))
    assert all(isinstance(answer, Known) and answer.value == b"j1" for answer in again)


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("cut", CUTS)
def test_one_claim_and_its_end_that_were_cut(store: Store, proxy: Proxy, cut: ProxyMode, times: int) -> None:
    (mine,) = claims(1, "warm2")
    store.send(claims(2, "warm2")[1:])  # the consumer has a number from now on
    proxy.cut_next(cut, times)
    (granted,) = persist(store, [mine])
    assert proxy.cuts == times
    assert isinstance(granted, Granted)
    assert granted.attempt == 1
    assert isinstance(store.send(claims(1, "warm2"))[0], Busy)
    end = settles([mine], [granted])
    (other,) = claims(3, "warm2")[2:]
    store.send(settles([other], store.send([other])))  # the new connection prepares its statements
    proxy.cut_next(cut, times)
    (done,) = persist(store, end)
    assert proxy.cuts == 2 * times
    assert isinstance(done, Completed)
    assert not done.recreated
    assert done.already is (cut != "cut_request")
    (known,) = store.send(claims(1, "warm2"))
    assert isinstance(known, Known)
    assert known.value == b"j1"


@pytest.mark.parametrize("cut", CUTS)
def test_a_renewal_that_was_cut_is_said_again(store: Store, proxy: Proxy, cut: ProxyMode) -> None:
    (mine,) = claims(1)
    (granted,) = store.send([mine])
    proxy.cut_next(cut, 1)
    (renewed,) = persist(store, [Renew(mine.id, mine.owner, granted.fence, 2 * MINUTE_US)])
    assert proxy.cuts == 1
    assert isinstance(renewed, Renewed)
    assert renewed.lease_until_us > granted.lease_until_us


@pytest.mark.parametrize("cut", CUTS)
def test_a_release_that_was_cut_is_lost_when_said_again(store: Store, proxy: Proxy, cut: ProxyMode) -> None:
    """It clears the owner, so its repetition finds another's record: harmless, and free to be claimed."""
    (mine,) = claims(1)
    (granted,) = store.send([mine])
    proxy.cut_next(cut, 1)
    (released,) = persist(store, [Settle(mine.id, mine.owner, granted.fence, "released")])
    assert proxy.cuts == 1
    assert isinstance(released, Completed if cut == "cut_request" else Lost)
    (retaken,) = store.send(claims(1))
    assert isinstance(retaken, Granted)
    assert retaken.attempt == 2


@pytest.mark.parametrize("cut", CUTS)
def test_a_mark_without_an_answer_is_not_said_again(store: Store, proxy: Proxy, cut: ProxyMode) -> None:
    mark = Mark("", "warm", ["a", "b"], DAY_US)
    proxy.cut_next(cut, 1)
    before = proxy.connections
    with pytest.raises(StoreUnavailable):
        store.send([mark])
    assert (proxy.cuts, proxy.connections) == (1, before)
    assert store.send([mark]) == [Marked([cut == "cut_request"] * 2)]


@pytest.mark.parametrize("cut", CUTS)
def test_a_forgetting_that_was_cut_is_whole_or_not_at_all(store: Store, proxy: Proxy, cut: ProxyMode) -> None:
    """It takes several round trips in one transaction: a cut in any of them undoes it."""
    sent = claims(3)
    store.send(settles(sent, store.send(sent)))
    proxy.cut_next(cut, 1)
    persist(store, [Forget(claim.id) for claim in sent])
    assert proxy.cuts == 1
    fresh = store.send(claims(3))
    assert all(isinstance(answer, Granted) and answer.attempt == 1 for answer in fresh)


def test_a_reply_cut_after_it_arrived_costs_nothing(store: Store, proxy: Proxy) -> None:
    sent = claims(5)
    answers = store.send(sent)
    proxy.cut()
    assert all(
        isinstance(answer, Completed) and not answer.already
        for answer in persist(store, settles(sent, answers))
    )


@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("warm", ["c", "another"], ids=["single", "full"])
def test_a_network_that_swallows_is_unavailable_and_then_goes_on(
    place: str, proxy: Proxy, colour: str, warm: str
) -> None:
    at = place.replace(f":{urlsplit(place).port}/", f":{proxy.port}/")
    inner = from_url(at + "&wait_s=0.3")
    store: Any = InLoop(inner.twin()) if colour == "async" else inner
    for _ in range(20):  # on a busy computer 0.3 s may pass without a fault
        with suppress(StoreUnavailable):
            store.open()
            break
    (mine,) = claims(1)
    persist(store, claims(3, warm)[1:])
    persist(store, claims(4, warm)[3:])  # a consumer that is known, and a statement that is prepared
    proxy.mode = "swallow"
    before = proxy.connections
    with pytest.raises(StoreUnavailable, match="no answer"):
        store.send([mine])
    assert proxy.connections == before + 1  # once again, and no more
    proxy.mode = "pass"
    (granted,) = persist(store, [mine])
    assert isinstance(granted, Granted)
    assert granted.attempt == 1
    store.close()


# --- round trips, counted between client and server ---------------------------------------------


def test_one_round_trip_where_one_is_promised(store: Store, proxy: Proxy) -> None:
    def turns(items: list[Any]) -> tuple[int, list[Any]]:
        before = proxy.turns
        answers = store.send(items)
        return proxy.turns - before, answers

    store.send(claims(1, "c"))  # the consumer has a number from now on
    store.send([Mark("", "m", ["first"], DAY_US)])
    sent = claims(500)[1:]
    (alone,) = claims(1, "warm2")
    store.send(claims(2, "warm2")[1:])
    count, (first,) = turns([alone])
    assert (count, type(first)) == (1, Granted)
    assert turns(list(settles([alone], [first])))[0] == 1
    count, (replay,) = turns(list(claims(1, "warm2")))
    assert (count, type(replay)) == (1, Known)
    count, granted = turns(list(sent))
    assert count == 1
    assert all(isinstance(answer, Granted) for answer in granted)
    renewals = [Renew(c.id, c.owner, a.fence, MINUTE_US) for c, a in zip(sent, granted, strict=True)]
    count, renewed = turns(list(renewals))
    assert count == 1
    assert all(isinstance(answer, Renewed) for answer in renewed)
    count, done = turns(list(settles(sent, granted, b'j"' + b"v" * 500 + b'"')))
    assert count == 1
    assert all(isinstance(answer, Completed) for answer in done)
    count, known = turns(list(claims(500)[1:]))  # duplicates, with their values
    assert count == 1
    assert all(isinstance(answer, Known) and len(answer.value or b"") == 503 for answer in known)
    count, found = turns([Lookup(claim.id) for claim in sent])
    assert count == 1
    assert all(isinstance(record, Record) for record in found)
    for _ in range(2):  # new, and known
        count, _ = turns([Mark("", "m", [f"key {n}" for n in range(500)], DAY_US)])
        assert count == 1
    mixed = [*settles(sent, granted), *claims(1), Lookup(sent[0].id)]
    assert turns(mixed)[0] == 3  # one for each kind of item


def test_opening_takes_a_connection_and_few_questions(place: str, proxy: Proxy, tmp_path: Path) -> None:
    made = places.make(tmp_path)
    made.open()
    made.close()
    at = place.replace(f":{urlsplit(place).port}/", f":{proxy.port}/")
    store = from_url(at)
    store.open()
    store.close()
    assert proxy.connections == 1
    assert proxy.turns <= 12  # to log in; then the server, the schema, its version, each prepared first
