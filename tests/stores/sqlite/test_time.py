"""The store's time goes forward only: across calls, objects, restarts and other processes."""

from pathlib import Path
from threading import Barrier, Thread

from semel.core.commands import Count, Mark
from semel.stores.sqlite import SqliteStore
from semel.stores.sqlite.clock import StoreClock
from semel.testing import ManualClock
from tests.stores.sqlite.tools import HOUR, SECOND, hold, lookup


def now(store: SqliteStore) -> int:
    moment: int = store.send([Count()])[0].now_us
    return moment


def test_time_never_stands_still_nor_goes_back(tmp_path: Path) -> None:
    clock = ManualClock()
    store = SqliteStore(tmp_path / "a.db", clock=clock)
    first = hold(store, "a")[1].fence
    assert now(store) > first
    seen = now(store)
    clock.step_back(us=HOUR)
    second = hold(store, "b")[1].fence
    assert second > seen
    clock.advance(us=5 * SECOND)
    assert hold(store, "c")[1].fence - second == 5 * SECOND  # it goes on at its own pace
    store.close()


def test_a_step_back_while_closed_is_made_up_for(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "a.db", clock=ManualClock())
    fence = hold(store, "a")[1].fence
    store.close()
    clock = ManualClock()
    clock.step_back(us=HOUR)
    again = SqliteStore(tmp_path / "a.db", clock=clock)
    assert now(again) > fence
    written = hold(again, "b")[1].fence
    assert fence < written < fence + SECOND
    again.close()
    clock.advance(us=10 * SECOND)
    third = SqliteStore(tmp_path / "a.db", clock=clock)  # the offset was stored too
    assert hold(third, "c")[1].fence - written == 10 * SECOND
    assert lookup(third, "a").state == "claimed"
    third.close()


def test_two_objects_share_one_time(tmp_path: Path) -> None:
    clock = ManualClock()
    one, two = (SqliteStore(tmp_path / "a.db", clock=clock) for _ in range(2))
    fences: list[int] = []
    for number in range(5):
        fences += [hold(one, f"one{number}")[1].fence, hold(two, f"two{number}")[1].fence]
        clock.step_back(us=HOUR)
    assert fences == sorted(set(fences))
    assert fences[-1] - fences[0] < SECOND
    (first,), (second,) = one.send([Mark("", "m", ["a"], SECOND)]), two.send([Mark("", "m", ["a"], SECOND)])
    assert (first.firsts, second.firsts) == ([True], [False])
    one.close()
    two.close()


def test_every_tick_is_another_one_in_all_threads() -> None:
    clock = StoreClock(ManualClock())
    ticks: list[int] = []
    barrier = Barrier(4)

    def run() -> None:
        barrier.wait()
        ticks.extend([clock.tick(0, 0)[0] for _ in range(500)])

    threads = [Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(ticks)) == 2000
