"""Single marks in an event loop: many callers, one item; each gets its own answer, whatever becomes of the others."""

import asyncio
from collections.abc import AsyncIterator

import pytest

import semel
from semel.core.commands import Item, Mark
from semel.runtime.channel import BATCH_MAX
from semel.stores.memory.store import MemoryStore
from tests.client.clients import Native, Spy
from tests.waiting import until

pytestmark = pytest.mark.anyio


class Place:
    """A client in mark mode on a store that can be held in the middle of a batch."""

    def __init__(self) -> None:
        self.spy = Spy(MemoryStore())
        native = Native(self.spy)
        native.pace = self._pace
        self.once = semel.aopen(native, consumer="metrics", mode="mark")
        self.waits = 0
        self.go = asyncio.Event()
        self.go.set()

    async def _pace(self) -> None:
        self.waits += 1
        await self.go.wait()
        self.waits -= 1

    async def while_busy(self, *keys: str) -> "list[asyncio.Task[bool]]":
        """Marks that wait together, while another one keeps the store busy until `go` is set."""
        self.spy.clear()
        self.go.clear()
        self.first = asyncio.create_task(self.once.mark("busy"))
        await until(lambda: bool(self.waits))
        tasks = [asyncio.create_task(self.once.mark(key)) for key in keys]
        await asyncio.sleep(0)
        return tasks

    def strike(self, error: Exception) -> None:
        """Have the store raise, but for what keeps it busy."""

        def before(items: list[Item]) -> None:
            if items != [Mark("", "metrics", ["busy"], 86_400_000_000)]:
                raise error

        self.spy.before = before

    @property
    def batches(self) -> list[list[list[str]]]:
        """The keys that were sent, by batch and by item, but for what kept the store busy."""
        found = [[item.keys for item in batch if isinstance(item, Mark)] for batch in self.spy.batches]
        return [batch for batch in found if batch and batch != [["busy"]]]


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    made = Place()
    assert await made.once.mark("warm")
    yield made
    made.go.set()
    await made.once.close()


async def test_those_who_wait_together_are_one_item(place: Place) -> None:
    keys = [f"k{at}" for at in range(200)]
    tasks = await place.while_busy(*keys)
    place.go.set()
    assert await asyncio.gather(*tasks) == [True] * 200
    assert place.batches == [[keys]]
    assert not await place.once.mark("k7")


async def test_of_equal_keys_one_is_the_first(place: Place) -> None:
    tasks = await place.while_busy("a", "b", "a", "a", "warm")
    many = asyncio.create_task(place.once.mark_many(["b", "c", "a"]))
    await asyncio.sleep(0)
    place.go.set()
    assert await asyncio.gather(*tasks) == [True, True, False, False, False]
    assert await many == [False, True, False]
    assert place.batches == [[["a", "b", "warm", "c"]]]


async def test_what_comes_while_a_batch_is_under_way_goes_into_the_next(place: Place) -> None:
    tasks = await place.while_busy("a")
    place.go.set()
    assert await asyncio.gather(*tasks) == [True]
    assert await place.once.mark("b")
    assert place.batches == [[["a"]], [["b"]]]


async def test_batches_of_single_marks_are_bounded(place: Place) -> None:
    tasks = await place.while_busy(*(f"k{at}" for at in range(2 * BATCH_MAX + 100)))
    place.go.set()
    assert all(await asyncio.gather(*tasks))
    assert [len(keys) for batch in place.batches for keys in batch] == [BATCH_MAX, BATCH_MAX, 100]


async def test_windows_are_not_mixed(place: Place) -> None:
    other = place.once.using(semel.Policy(window_s=60))
    assert await other.mark("warm too")
    tasks = await place.while_busy("a")
    tasks.append(asyncio.create_task(other.mark("b")))
    await asyncio.sleep(0)
    place.go.set()
    assert await asyncio.gather(*tasks) == [True, True]
    sent = [item for batch in place.spy.batches for item in batch if isinstance(item, Mark)]
    assert [(item.keys, item.window_us) for item in sent][1:] == [
        (["a"], 86_400_000_000),
        (["b"], 60_000_000),
    ]


async def test_who_leaves_costs_nobody_an_answer_and_the_mark_stays(place: Place) -> None:
    one, two, three = await place.while_busy("one", "two", "three")
    two.cancel()
    await asyncio.wait([two])
    place.go.set()
    assert (await one, await three) == (True, True)
    assert two.cancelled()
    assert not await place.once.mark("two")


async def test_without_an_answer_nobody_knows(place: Place) -> None:
    tasks = await place.while_busy("a", "b")
    place.strike(semel.errors.StoreUnavailable("gone"))
    place.go.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [semel.errors.StoreUncertain] * 2
    assert results[0] is not results[1]
    place.spy.before = lambda _items: None
    assert await place.once.mark("a")


async def test_any_other_error_of_the_store_reaches_each(place: Place) -> None:
    tasks = await place.while_busy("a", "b")
    place.strike(semel.errors.StoreRefused("damaged"))
    place.go.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [semel.errors.StoreRefused] * 2
    place.spy.before = lambda _items: None
    assert await place.once.mark("a")  # the flusher lives


async def test_a_key_that_is_none_is_refused_before_it_joins(place: Place) -> None:
    (good,) = await place.while_busy("good")
    for bad in ("", "a\n", "x" * 513):
        with pytest.raises(semel.errors.KeyInvalid):
            await place.once.mark(bad)
    place.go.set()
    assert await good
    assert place.batches == [[["good"]]]


async def test_closing_sends_what_is_queued_and_takes_nothing_more(place: Place) -> None:
    tasks = await place.while_busy("a", "b")
    closing = asyncio.create_task(place.once.close())
    await asyncio.sleep(0)
    with pytest.raises(semel.errors.StoreClosed):
        await place.once.mark("c")
    place.go.set()
    await closing
    assert await asyncio.gather(*tasks) == [True, True]


def test_one_loop_after_the_other() -> None:
    once = semel.aopen(Native(Spy(MemoryStore())), consumer="metrics", mode="mark")

    async def both() -> list[bool]:
        return list(await asyncio.gather(once.mark("a"), once.mark("b")))

    assert asyncio.run(both()) == [True, True]
    assert asyncio.run(both()) == [False, False]
