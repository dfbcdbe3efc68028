"""`Policy.refresh_on_sight`: a burst counts once, until it pauses for a window."""

from pathlib import Path
from typing import Any

import pytest

import semel
from semel import Policy, keys
from semel.errors import PolicyInvalid, UsageError
from semel.stores.migrating import migrating
from tests.client.clients import Place

pytestmark = pytest.mark.anyio

HOUR = 3600
REFRESH = Policy(refresh_on_sight=True)


@pytest.mark.parametrize(("refresh", "runs"), [(True, [0, 5]), (False, [0, 2, 4])])
async def test_a_burst_runs_once_until_it_pauses(place: Place, refresh: bool, runs: list[int]) -> None:
    client = place.open(window="1h", policy=Policy(refresh_on_sight=refresh))
    ran: list[int] = []
    for number in range(5):
        await client.run("alarm", ran.append, number)
        place.clock.skip(0.6 * HOUR)
    place.clock.skip(HOUR)
    await client.run("alarm", ran.append, 5)
    assert ran == (runs if refresh else [*runs, 5])


@pytest.mark.parametrize("many", [False, True])
async def test_marks_start_again(place: Place, many: bool) -> None:
    client = place.open(mode="mark", window="1h", policy=REFRESH)
    firsts: list[bool] = []
    for _ in range(4):
        firsts += await client.mark_many(["alarm"]) if many else [await client.mark("alarm")]
        place.clock.skip(0.6 * HOUR)
    place.clock.skip(HOUR)
    assert [*firsts, await client.mark("alarm")] == [True, False, False, False, True]


async def test_run_many_refreshes_each_key_once(place: Place) -> None:
    client = place.open(window="1h", policy=REFRESH)
    ran: list[str] = []
    for _ in range(3):
        await client.run_many([("a", "a"), ("b", "b"), ("a", "a")], ran.append)
        place.clock.skip(0.6 * HOUR)
    assert sorted(ran) == ["a", "b"]


async def test_only_clients_that_want_it_refresh(place: Place) -> None:
    client = place.open(window="1h")
    await client.run("k", lambda: 1)
    before = place.record("k")
    place.clock.skip(0.5 * HOUR)
    await client.run("k", lambda: 1)
    assert place.record("k") == before
    await client.using(refresh_on_sight=True).run("k", lambda: 1)
    after = place.record("k")
    assert before is not None
    assert after is not None
    assert after.expires_at_us - before.expires_at_us >= 0.5 * HOUR * 1e6


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"mode": "inbox"}, "does not go with mode 'inbox'"),
        ({"ids": "uuid7"}, "does not go with Policy.refresh_on_sight"),
    ],
)
def test_where_it_cannot_hold_it_is_refused(tmp_path: Path, options: dict[str, Any], why: str) -> None:
    with pytest.raises(PolicyInvalid, match=why):
        semel.open(f"sqlite:///{tmp_path}/a.db", consumer="alarms", policy=REFRESH, **options)


def test_a_move_refuses_it(tmp_path: Path) -> None:
    pair = migrating(old=f"sqlite:///{tmp_path}/old.db", new=f"sqlite:///{tmp_path}/new.db")
    with pytest.raises(PolicyInvalid, match="cannot start a window again"):
        semel.open(pair, consumer="alarms", policy=REFRESH)


def test_event_times_and_sightings_do_not_mix() -> None:
    by_time = keys.sliding("5m", "host", event_time="at")
    with (
        semel.open("memory:", consumer="alarms", policy=REFRESH) as once,
        pytest.raises(UsageError, match="no sighting moves the window"),
    ):
        once.guard(key=by_time, name="alarm")(print)({"host": "a", "at": "2026-11-17T12:00:00Z"})
