"""Marks: whether a key is seen for the first time."""

from collections.abc import Sequence

from semel.core.commands import Count, Flow, Forget, Lookup, Mark, Marked
from semel.testing.contract.harness import LONG, SHORT, AtOnce, ScenarioContext, equal, expect, scenario
from semel.testing.contract.payloads import KEYS
from semel.types import Absent, Forgotten, Record, Stats

MANY = 1000
CALLERS = 8


def _mark(
    b: ScenarioContext, keys: Sequence[str], window: float = LONG, consumer: str = "marks", tenant: str = ""
) -> Mark:
    return Mark(b.tenant + tenant, consumer, list(keys), b.us(window))


def _check_mark(
    b: ScenarioContext, keys: Sequence[str], wanted: Sequence[bool], what: str, window: float = LONG
) -> Flow[None]:
    answer = expect((yield from _mark(b, keys, window)), Marked)
    equal(answer.firsts, list(wanted), what)


@scenario()
def a_mark_is_the_first_once(b: ScenarioContext) -> Flow[None]:
    """True the first time, False from then on."""
    yield from _check_mark(b, ["a"], [True], "the first mark")
    for _ in range(3):
        yield from _check_mark(b, ["a"], [False], "a repeated mark")


@scenario()
def each_key_of_a_mark_is_its_own(b: ScenarioContext) -> Flow[None]:
    """Answers for mixed known and new keys come by position, and the new ones are marked."""
    yield from _check_mark(b, ["b", "d"], [True, True], "new keys")
    yield from _check_mark(b, ["a", "b", "c", "d", "e"], [True, False, True, False, True], "mixed keys")
    yield from _check_mark(b, ["e", "c", "a"], [False, False, False], "keys marked among known ones")
    yield from _check_mark(b, [], [], "no keys")


@scenario()
def many_keys_are_marked_at_once(b: ScenarioContext) -> Flow[None]:
    """A thousand keys in one item; every second key is known."""
    keys = [f"key {number}" for number in range(MANY)]
    yield from _check_mark(b, keys[::2], [True] * (MANY // 2), "every other key")
    yield from _check_mark(b, keys, [False, True] * (MANY // 2), "all keys")


@scenario()
def odd_keys_are_marked_apart(b: ScenarioContext) -> Flow[None]:
    """Keys that differ only slightly are different marks."""
    yield from _check_mark(b, KEYS, [True] * len(KEYS), "all odd keys")
    yield from _check_mark(b, KEYS, [False] * len(KEYS), "all odd keys again")


@scenario()
def marks_of_others_are_apart(b: ScenarioContext) -> Flow[None]:
    """The same key of another consumer or tenant is not marked."""
    for consumer in ("marks", "other"):
        for tenant in ("", "-other"):
            answer = expect((yield from _mark(b, ["a"], consumer=consumer, tenant=tenant)), Marked)
            equal(answer.firsts, [True], f"the first mark of {consumer}{tenant}")


@scenario()
def a_mark_expires(b: ScenarioContext) -> Flow[None]:
    """After its window a key is new. A repeated mark does not prolong the window; a purge changes no answer."""
    yield from _check_mark(b, ["short", "again"], [True, True], "new keys", window=SHORT)
    yield from _check_mark(b, ["long"], [True], "a new key", window=LONG)
    yield from _check_mark(b, ["again"], [False], "a repeated key", window=LONG)
    yield from b.much_later()
    yield from b.purge()
    expect((yield from Lookup(b.id("short", consumer="marks"))), Absent)
    yield from _check_mark(b, ["short", "long", "again"], [True, False, True], "after the window")
    yield from _check_mark(b, ["short", "long", "again"], [False, False, False], "marked again")


@scenario()
def a_mark_may_be_looked_up_and_forgotten(b: ScenarioContext) -> Flow[None]:
    """A lookup shows a done record without a value. After forget the key is new; other keys are not."""
    yield from _check_mark(b, ["a", "b"], [True, True], "new keys")
    place = b.id("a", consumer="marks")
    expect((yield from Lookup(place)), Record, id=place, state="done", value=None)
    expect((yield from Lookup(b.id("c", consumer="marks"))), Absent)
    expect((yield from Forget(place)), Forgotten)
    expect((yield from Lookup(place)), Absent)
    expect((yield from Forget(place)), Absent)
    yield from _check_mark(b, ["a", "b"], [True, False], "after forget")


@scenario()
def marks_are_counted(b: ScenarioContext) -> Flow[None]:
    """The statistics count the live marks by consumer."""
    yield from _check_mark(b, ["a", "b", "c"], [True] * 3, "new keys")
    yield from _check_mark(b, ["gone"], [True], "a new key", window=SHORT)
    yield from b.later()
    stats = expect((yield from Count(b.tenant)), Stats)
    equal((stats.marks, stats.consumers), (3, {"marks": 3}), "marks and consumers")


@scenario()
def marks_at_once_have_one_first(b: ScenarioContext) -> Flow[None]:
    """Of concurrent marks of the same keys, each key is the first for exactly one."""
    keys = [f"race-{number}" for number in range(10)]
    answers = yield from AtOnce([[_mark(b, keys)] for _ in range(CALLERS)])
    firsts = [expect(answer, Marked).firsts for (answer,) in answers]
    equal([sum(column) for column in zip(*firsts, strict=True)], [1] * len(keys), "firsts by key")
