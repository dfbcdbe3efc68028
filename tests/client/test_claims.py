"""Claims in the caller's own hands: the plain verbs, their `_many`, and `with claim:`."""

from threading import Event
from typing import Any

import pytest

import semel
from semel import Busy, Claimed, Completed, Done, Failed, Lost, Mismatch, Renewed, Unavailable
from semel.core.commands import Claim, Renew, Settle
from tests.client.clients import GUARD_S, Either, Place, down
from tests.waiting import until

pytestmark = pytest.mark.anyio


async def claimed(client: Either, key: str = "k", **options: Any) -> Claimed:
    claim = await client.claim(key, **options)
    assert isinstance(claim, Claimed)
    return claim


async def test_claim_then_complete(client: Either) -> None:
    claim = await claimed(client)
    assert (claim.key, claim.attempt, claim.lost) == ("k", 1, False)
    busy = await client.claim("k")
    assert isinstance(busy, Busy)
    assert isinstance(await client.complete(claim, {"a": (1,)}), Completed)
    assert await client.claim("k") == Done({"a": (1,)}, replayed=True)
    assert (await client.complete(claim, 2)).already
    assert await client.claim("k") == Done({"a": (1,)}, replayed=True)


async def test_claim_then_fail(client: Either) -> None:
    claim = await claimed(client)
    assert isinstance(await client.fail(claim, "no such card"), Completed)
    failed = await client.claim("k")
    assert isinstance(failed, Failed)
    assert "no such card" in str(failed.error)


async def test_release_frees_after_its_delay(client: Either) -> None:
    claim = await claimed(client)
    await client.release(claim, delay_s=60)
    busy = await client.claim("k")
    assert isinstance(busy, Busy)
    assert 55 < busy.retry_after_s <= 60
    assert await client.release(claim) == Lost()


@pytest.mark.parametrize(("count_attempt", "attempt"), [(True, 2), (False, 1)])
async def test_release_may_give_the_attempt_back(client: Either, count_attempt: bool, attempt: int) -> None:
    await client.release(await claimed(client), count_attempt=count_attempt)
    assert (await claimed(client)).attempt == attempt


async def test_renew_moves_the_lease(client: Either) -> None:
    claim = await claimed(client)
    renewed = await client.renew(claim)
    assert isinstance(renewed, Renewed)
    assert renewed.lease_until_us > claim.granted.lease_until_us
    await client.complete(claim)
    assert await client.renew(claim) == Lost()


async def test_a_claim_that_was_taken_over_changes_nothing(place: Place) -> None:
    client = place.open(lease="30ms")
    old = await claimed(client)
    await until(lambda: place.record("k").lease_until_us <= place.spy._store.send([_count()])[0].now_us)  # type: ignore[union-attr]
    new = await claimed(client)
    assert new.fence > old.fence
    assert new.attempt == 2
    assert await client.complete(old, "old") == Lost()
    assert await client.fail(old, "old") == Lost()
    assert await client.release(old) == Lost()
    assert isinstance(await client.complete(new, "new"), Completed)
    assert await client.claim("k") == Done("new", replayed=True)


def _count() -> Any:
    from semel.core.commands import Count

    return Count()


async def test_many_in_input_order_with_copies_busy(client: Either) -> None:
    outcomes = await client.claim_many(["a", "b", "a"])
    assert [type(each) for each in outcomes] == [Claimed, Claimed, Busy]
    assert [each.key for each in outcomes[:2]] == ["a", "b"]
    done = await client.complete_many(outcomes[:2], [1, 2])
    assert [type(each) for each in done] == [Completed, Completed]
    assert await client.claim_many(["b", "a"]) == [Done(2, replayed=True), Done(1, replayed=True)]


async def test_many_of_nothing_is_nothing(client: Either) -> None:
    assert await client.claim_many([]) == []
    assert await client.complete_many([]) == []
    assert await client.fail_many([], []) == []
    assert await client.release_many([]) == []
    assert await client.renew_many([]) == []
    assert await client.run_many([], lambda body: body) == []


async def test_many_copies_with_another_fingerprint_are_a_mismatch(client: Either) -> None:
    deliveries = [semel.Delivery(key="a", body=0, fingerprint=print_) for print_ in (b"1", b"1", b"2", None)]
    outcomes = await client.claim_many(deliveries)
    assert [type(each) for each in outcomes] == [Claimed, Busy, Mismatch, Busy]


async def test_a_thousand_and_one_claims(client: Either, place: Place) -> None:
    await client.claim("warm")
    place.spy.clear()
    outcomes = await client.claim_many([f"k{number}" for number in range(1001)])
    assert all(isinstance(each, Claimed) for each in outcomes)
    assert len(place.spy.batches) <= 3
    released = await client.release_many(outcomes)
    assert all(isinstance(each, Completed) for each in released)


async def test_a_part_out_of_reach_is_no_exception_for_all(client: Either, place: Place) -> None:
    await client.claim("warm")
    place.spy.before = down()
    assert [type(each) for each in await client.claim_many(["a", "b"])] == [Unavailable, Unavailable]
    with pytest.raises(semel.errors.StoreUnavailable):
        await client.claim("a")


async def test_a_record_that_does_not_read_costs_the_others_nothing(client: Either, place: Place) -> None:
    await client.run("warm", lambda: None)
    claim = Claim(("", "billing", "damaged"), b"o" * 16, 30 * 10**6, 3600 * 10**6)
    store = place.spy._store
    (granted,) = store.send([claim])
    store.send([Settle(claim.id, claim.owner, granted.fence, "done", b"?", claim.window_us, claim.lease_us)])
    bad, good = await client.claim_many(["damaged", "good"])
    assert isinstance(bad, Unavailable)
    assert isinstance(bad.error, semel.errors.RecordCorrupt)
    assert isinstance(good, Claimed)


async def test_a_with_block_completes(client: Either) -> None:
    await client.within(await claimed(client), lambda: None)
    assert await client.claim("k") == Done(None, replayed=True)
    assert client.kept == {}


async def test_a_with_block_that_raises_releases(client: Either) -> None:
    def block() -> None:
        raise LookupError

    with pytest.raises(LookupError):
        await client.within(await claimed(client), block)
    assert (await claimed(client)).attempt == 2
    assert client.kept == {}


async def test_a_with_block_that_fails_for_good_is_failed(place: Place) -> None:
    client = place.open(policy=semel.Policy(permanent=(LookupError,)))

    def block() -> None:
        raise LookupError

    with pytest.raises(LookupError):
        await client.within(await claimed(client), block)
    assert isinstance(await client.claim("k"), Failed)


async def test_a_claim_settled_inside_its_block_is_left_alone(place: Place) -> None:
    client = place.open()
    claim = await claimed(client)
    if client.sync:
        with claim:
            client.inner.complete(claim, "inside")
            assert client.kept == {}
    else:
        async with claim:
            await client.inner.complete(claim, "inside")
            assert client.kept == {}
    assert await client.claim("k") == Done("inside", replayed=True)
    assert len(place.spy.sent(Settle)) == 1


@pytest.mark.usefixtures("brisk")
async def test_a_with_block_is_kept_alive(place: Place) -> None:
    client = place.open(lease="30s")
    renewed = Event()

    def after(items: list[Any]) -> None:
        if any(isinstance(item, Renew) for item in items):
            renewed.set()

    place.spy.after = after
    claim = await claimed(client)
    if client.sync:
        with claim:
            assert renewed.wait(GUARD_S)
    else:
        async with claim:
            await until(renewed.is_set)
    assert await client.claim("k") == Done(None, replayed=True)


async def test_a_bare_claim_is_not_renewed(place: Place) -> None:
    client = place.open(lease="30ms")
    await claimed(client)
    assert client.kept == {}
    outcome = await client.using(lease_s=30).run("k", lambda: semel.current().attempt)
    assert outcome == Done(2)
    assert place.spy.sent(Renew) == []


async def test_a_good_end_that_is_lost_is_an_error(client: Either, place: Place) -> None:
    def block() -> None:
        from semel.core.commands import Forget

        place.spy._store.send([Forget(("", "billing", "k"), force=True)])

    with pytest.raises(semel.errors.ClaimLost):
        await client.within(await claimed(client), block)


async def test_a_good_end_that_cannot_be_recorded_is_an_error(place: Place) -> None:
    client = place.open(lease="200ms")  # so long is it tried
    claim = await claimed(client)
    place.spy.before = down(Settle)
    with pytest.raises(semel.errors.NotRecorded):
        await client.within(claim, lambda: None)
    assert len(place.spy.sent(Settle)) > 1
    assert client.kept == {}


async def test_a_blocks_own_error_is_never_hidden(place: Place) -> None:
    client = place.open(lease="60ms")
    claim = await claimed(client)
    place.spy.before = down(Settle)

    def block() -> None:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        await client.within(claim, block)
