"""`records`: look, list, forget, resolve, purge, count."""

import pytest

import semel
from semel import Absent, Busy, Completed, Done, Forgotten, Lost
from semel.core.commands import Scan, Settle
from semel.runtime import audit
from tests.client.clients import Either, Place, down

pytestmark = pytest.mark.anyio


async def test_lookup_changes_nothing(client: Either) -> None:
    assert await client.records("lookup", "k") is None
    claim = await client.claim("k")
    record = await client.records("lookup", "k")
    assert (record.state, record.key, record.consumer, record.fence) == (
        "claimed",
        "k",
        "billing",
        claim.fence,
    )
    assert await client.records("lookup", "k") == record


async def test_list_by_state_and_prefix_in_pages(client: Either, monkeypatch: pytest.MonkeyPatch) -> None:
    from semel.client import records

    monkeypatch.setattr(records, "PAGE_MAX", 3)
    for number in range(8):
        await client.run(f"a{number}", lambda: 1)
    await client.claim("b1")
    assert len(await client.records("list")) == 9
    assert [record.key for record in await client.records("list", state="claimed")] == ["b1"]
    assert len(await client.records("list", prefix="a")) == 8
    assert len(await client.records("list", limit=5)) == 5
    assert await client.records("list", seen_before=1) == []


async def test_forget_makes_the_key_new_and_a_late_completion_lost(client: Either) -> None:
    assert await client.records("forget", "k") == Absent()
    claim = await client.claim("k")
    assert isinstance(await client.records("forget", "k"), Busy)
    assert isinstance(await client.records("forget", "k", force=True), Forgotten)
    assert await client.complete(claim, 1) == Lost()
    assert await client.run("k", lambda: semel.current().attempt) == Done(1)
    assert isinstance(await client.records("forget", "k"), Forgotten)
    assert await client.run("k", lambda: 2) == Done(2)


async def test_a_forced_forget_names_who_did_it(
    client: Either, place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    await client.run("settled", lambda: 1)
    assert isinstance(await client.records("forget", "settled", force=True), Forgotten)
    assert caplog.records == []
    claim = await client.claim("k")
    with caplog.at_level("WARNING", "semel"):
        assert isinstance(await client.records("forget", "k", force=True, actor="ann"), Forgotten)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "semel"]
    assert f"actor=ann tenant=- consumer={client.inner.consumer} key_digest=" in line
    assert f"fence={claim.fence}" in line
    (page,) = place.spy._store.send((Scan("semel.audit", "semel.audit"),))
    (entry,) = [audit.entry_of(record) for record in page.records]
    assert (entry.action, entry.actor, entry.damaged) == ("forget --force", "ann", False)
    assert (entry.details["key"], entry.details["fence"]) == ("k", claim.fence)


async def test_nothing_is_forced_without_its_trace(client: Either, place: Place) -> None:
    claim = await client.claim("k")
    place.spy.before = down(Settle)
    with pytest.raises(semel.errors.StoreUnavailable):
        await client.records("forget", "k", force=True)
    place.spy.before = lambda _items: None
    assert isinstance(await client.complete(claim, 1), Completed), "it was not taken away"


async def test_purge_removes_what_is_over_and_changes_no_answer(place: Place) -> None:
    client = place.open(window="20ms")
    await client.run("k", lambda: 1)
    await client.using(window_s=3600).run("kept", lambda: 1)
    purged = await client.records("purge", dry_run=True)
    while not purged.count:
        purged = await client.records("purge", dry_run=True)
    assert purged.count == 1
    assert await client.records("lookup", "k") is None
    assert await client.run("kept", lambda: 2) == Done(1, replayed=True)


async def test_stats_count_by_state_and_consumer(place: Place) -> None:
    client = place.open()
    await client.run("a", lambda: 1)
    await client.claim("b")
    await place.open(consumer="mail").run("a", lambda: 1)
    stats = await client.records("stats")
    assert stats.states == {"done": 2, "claimed": 1}
    assert stats.consumers == {"billing": 2, "mail": 1}


async def test_records_are_the_consumers_own(place: Place) -> None:
    await place.open().run("k", lambda: 1)
    other = place.open(consumer="mail")
    assert await other.records("lookup", "k") is None
    assert await other.records("list") == []
    assert await other.records("forget", "k") == Absent()


async def test_no_answer_is_an_error(client: Either, place: Place) -> None:
    await client.records("stats")
    place.spy.before = down()
    for call in (client.records("lookup", "k"), client.records("forget", "k"), client.records("purge")):
        with pytest.raises(semel.errors.StoreUnavailable):
            await call
