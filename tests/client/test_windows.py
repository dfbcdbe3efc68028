"""Windows are data: stored, changed while everything runs, and obeyed."""

from threading import Event, Thread
from typing import Any

import pytest

import semel
from semel import Done
from semel.core.commands import Claim, ReadSettings, SetWindow
from semel.runtime import engine, executor
from tests.client.clients import Either, Place, happens, in_thread, only_sync

pytestmark = pytest.mark.anyio

HOUR = 3600 * 10**6


def window_of(place: Place, key: str) -> float:
    """How long the finished record is remembered, in hours."""
    record = place.record(key)
    assert record is not None
    return (record.expires_at_us - record.settled_at_us) / HOUR


async def test_the_clients_own_window(place: Place) -> None:
    client = place.open(window="2h")
    await client.run("k", lambda: 1)
    assert window_of(place, "k") == 2
    assert await client.windows("get") == 2 * HOUR


async def test_a_stored_window_beats_the_clients(place: Place) -> None:
    client = place.open(window="2h")
    await client.windows("set", "5h")
    await client.run("k", lambda: 1)
    assert window_of(place, "k") == 5
    await client.windows("set", None)
    await client.run("l", lambda: 1)
    assert window_of(place, "l") == 2


async def test_an_event_types_window_beats_its_consumers(place: Place) -> None:
    client = place.open(window="2h")
    await client.windows("set", "5h")
    await client.windows("set", "7h", event_type="refund")
    assert await client.windows("list") == {"": 5 * HOUR, "refund": 7 * HOUR}
    assert await client.windows("get", "refund") == 7 * HOUR
    given = [semel.Delivery(key=kind, body=1, event_type=kind) for kind in ("refund", "sale")]
    await client.run_many(given, lambda body: body)
    assert [window_of(place, kind) for kind in ("refund", "sale")] == [7, 5]
    await client.using(event_type="refund").run("k", lambda: 1)
    assert window_of(place, "k") == 7


async def test_a_policys_window_is_the_clients(place: Place) -> None:
    client = place.open(window="2h")
    await client.using(window_s=3600).run("k", lambda: 1)
    assert window_of(place, "k") == 1


@pytest.mark.parametrize(
    ("preset", "hours"),
    [("payments", 24), ("orders", 4), ("notifications", 0.25), ("analytics", 5 / 60), ("webhooks", 96)],
)
async def test_presets(place: Place, preset: str, hours: float) -> None:
    client = place.open(window=preset)
    await client.run("k", lambda: 1)
    assert window_of(place, "k") == pytest.approx(hours)


async def test_off_means_no_dedup(place: Place) -> None:
    client = place.open()
    await client.windows("set", "off", event_type="ping")
    pings = client.using(event_type="ping")
    outcomes = [await pings.run("k", lambda number=number: number) for number in range(3)]
    assert [outcome.value for outcome in outcomes] == [0, 1, 2]
    assert place.record("k") is None
    assert await client.run("k", lambda: 1) == Done(1)


async def test_when_the_window_is_over_the_event_is_new(place: Place) -> None:
    client = place.open(window="40ms")
    assert await client.run("k", lambda: 1) == Done(1)
    outcomes: list[Any] = []
    while not outcomes or outcomes[-1].replayed:
        outcomes.append(await client.run("k", lambda: 2))
    assert outcomes[-1] == Done(2)


async def test_a_change_elsewhere_applies_within_the_refresh(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine.SETTINGS_LIVE_S < 10
    monkeypatch.setattr(engine, "SETTINGS_LIVE_S", 0.05)
    client, other = place.open(window="2h"), place.open(window="2h")
    await client.run("k", lambda: 1)
    await other.windows("set", "9h")
    numbers = iter(range(10_000))

    async def changed() -> bool:
        key = f"k{next(numbers)}"
        await client.run(key, lambda: 1)
        return window_of(place, key) == 9

    while not await changed():
        pass
    assert window_of(place, "k") == 2


async def test_existing_records_follow_when_asked(place: Place) -> None:
    client = place.open(window="2h")
    await client.run("k", lambda: 1)
    await client.windows("set", "9h")
    assert window_of(place, "k") == 2
    await client.windows("set", "9h", existing=True)
    assert window_of(place, "k") == 9


@only_sync
async def test_the_second_caller_waits_for_the_first_reading(place: Place) -> None:
    """Two start at once: the one who comes second must not run by windows that were not read yet."""
    await place.open(window="2h").windows("set", "off")
    client = place.open(window="2h")
    seconds: list[Thread] = []
    ended = Event()

    def second() -> None:
        client.inner.run("k", lambda: 1)
        ended.set()

    def before(items: list[Any]) -> None:
        if isinstance(items[0], ReadSettings) and not seconds:
            seconds.append(Thread(target=second))
            seconds[0].start()
            ended.wait(0.2)  # it may wait for us, or read for itself: what it must not do is to go ahead

    place.spy.before = before
    await in_thread(client.inner.run, "l", lambda: 1)
    await happens(ended)
    await in_thread(seconds[0].join)
    assert place.spy.sent(Claim) == []


async def test_wrong_windows_are_refused(client: Either) -> None:
    for wrong in ("soon", "5 parsecs", -1, "3651d"):
        with pytest.raises(semel.errors.PolicyInvalid):
            await client.windows("set", wrong)


async def test_a_window_changed_while_a_handler_runs_applies_to_its_completion(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "SETTINGS_LIVE_S", 0.0)
    monkeypatch.setattr(executor, "SETTINGS_LIVE_S", 0.0)
    client = place.open(window="2h")
    hours = iter((5, 6, 7))

    def change(_body: object = None) -> None:
        place.spy._store.send([SetWindow("", "billing", "", next(hours) * HOUR)])

    await client.run("run", change)
    await client.run_many([semel.Delivery(key="many", body=1)], change)
    claim = await client.claim("claim")
    change()
    await client.complete(claim)
    assert [window_of(place, key) for key in ("run", "many", "claim")] == [5, 6, 7]


async def test_a_record_is_resolved_with_the_window_of_its_type(place: Place) -> None:
    client = place.open(window="2h", mode="quarantine")
    await client.windows("set", "9h", event_type="letter")

    def post() -> None:
        raise TimeoutError

    await client.using(event_type="letter").run("k", post)
    record = place.record("k")
    assert record is not None
    await client.records("resolve", "k", fence=record.fence, to="done")
    assert window_of(place, "k") == 9
