"""A move between two stores: who knows what, which order of deployment is refused, and what an outage leaves."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

import semel
from semel.core.commands import (
    Answer,
    Claim,
    Count,
    Granted,
    Item,
    Known,
    Lookup,
    Mark,
    Marked,
    Renew,
    Settle,
)
from semel.errors import PolicyInvalid, StoreMoved, StoreUnavailable
from semel.stores.memory.store import MemoryStore
from semel.stores.migrating import from_url, migrating
from semel.stores.migrating.moving import MARGIN_US, close, finish, moves
from semel.testing import ManualClock
from semel.types import Absent, Busy, Completed, Lost, Record, Renewed, Unavailable

HOUR_US = 3600 * 10**6
ID = ("", "c", "evt_1")


class FragileStore(MemoryStore):
    """A store that can be cut off, before it acts or after."""

    cut = ""

    def __init__(self, clock: ManualClock, name: str) -> None:
        super().__init__(clock=clock)
        self.name = name

    def send(self, items: Sequence[Item], /) -> list[Answer]:
        if self.cut == "before":
            raise StoreUnavailable("cut off")
        answers = super().send(items)
        if self.cut == "after":
            raise StoreUnavailable("cut off")
        return answers


class Scene:
    """An old and a new store with one clock, and both as one."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.old = FragileStore(self.clock, "memory:old")
        self.new = FragileStore(self.clock, "memory:new")
        self.both = migrating(old=self.old, new=self.new)
        for store in (self.old, self.new, self.both):
            store.open()

    def claim(self, store: Any, owner: bytes = b"me", key: tuple[str, str, str] = ID) -> Any:
        return store.send([Claim(key, owner, HOUR_US, 24 * HOUR_US)])[0]

    def finish(self, store: Any, owner: bytes = b"me", value: bytes = b"r") -> Any:
        granted = self.claim(store, owner)
        return store.send([Settle(ID, owner, granted.fence, "done", value, 24 * HOUR_US, HOUR_US)])[0]

    def states(self) -> tuple[Any, ...]:
        found = [store.send([Lookup(ID)])[0] for store in (self.old, self.new)]
        return tuple(record.state if isinstance(record, Record) else None for record in found)


@pytest.mark.parametrize("first", ["old", "new", "both"])
def test_what_one_side_has_done_is_known(first: str) -> None:
    scene = Scene()
    assert isinstance(scene.finish(getattr(scene, first)), Completed)
    assert isinstance(scene.claim(scene.both, b"other"), Known)
    if first == "both":
        assert scene.states() == ("done", "done")
        assert isinstance(scene.claim(scene.old, b"other"), Known)
        assert isinstance(scene.claim(scene.new, b"other"), Known)
    if first == "new":  # copied, so that a way back to the old store stays open for what was asked for
        assert scene.states() == ("done", "done")


@pytest.mark.parametrize("side", ["old", "new"])
def test_a_claim_on_one_side_keeps_the_pair_out(side: str) -> None:
    scene = Scene()
    assert isinstance(scene.claim(getattr(scene, side), b"alone"), Granted)
    assert isinstance(scene.claim(scene.both), Busy)
    other = scene.new if side == "old" else scene.old
    assert isinstance(scene.claim(other, b"third"), Granted), "the pair holds a claim that it was not granted"


@pytest.mark.parametrize("side", ["old", "new"])
def test_a_claim_of_the_pair_keeps_both_sides_out(side: str) -> None:
    scene = Scene()
    granted = scene.claim(scene.both)
    assert isinstance(scene.claim(getattr(scene, side), b"alone"), Busy)
    assert isinstance(scene.both.send([Renew(ID, b"me", granted.fence, HOUR_US)])[0], Renewed)
    scene.both.send([Settle(ID, b"me", granted.fence, "released")])
    assert isinstance(scene.claim(getattr(scene, side), b"alone"), Granted)


@pytest.mark.parametrize("side", ["old", "new"])
def test_a_takeover_on_one_side_is_a_lost_claim(side: str) -> None:
    scene = Scene()
    granted = scene.claim(scene.both)
    scene.clock.advance(7200)
    assert isinstance(scene.claim(getattr(scene, side), b"heir"), Granted)
    assert isinstance(scene.both.send([Renew(ID, b"me", granted.fence, HOUR_US)])[0], Lost)
    assert isinstance(scene.both.send([Settle(ID, b"me", granted.fence, "done", b"late")])[0], Lost)


@pytest.mark.parametrize("cut", ["before", "after"])
@pytest.mark.parametrize("side", ["old", "new"])
def test_an_outage_of_either_side_runs_nothing_and_loses_nothing(side: str, cut: str) -> None:
    scene = Scene()
    getattr(scene, side).cut = cut
    assert isinstance(scene.claim(scene.both), Unavailable)
    assert isinstance(scene.both.send([Mark("", "marks", ["a"], HOUR_US)])[0], Unavailable)
    getattr(scene, side).cut = ""
    granted = scene.claim(scene.both)
    assert isinstance(granted, Granted)
    assert granted.attempt == 1
    if cut == "before":
        assert scene.both.send([Mark("", "marks", ["a"], HOUR_US)])[0] == Marked([True])
    getattr(scene, side).cut = cut
    settle = Settle(ID, b"me", granted.fence, "done", b"r", 24 * HOUR_US, HOUR_US)
    assert isinstance(scene.both.send([settle])[0], Unavailable)
    getattr(scene, side).cut = ""
    assert isinstance(scene.both.send([settle])[0], Completed)
    assert scene.states() == ("done", "done")


def test_a_claim_made_on_the_old_store_may_end_on_the_pair() -> None:
    scene = Scene()
    granted = scene.claim(scene.old)
    assert isinstance(scene.both.send([Renew(ID, b"me", granted.fence, HOUR_US)])[0], Renewed)
    settle = Settle(ID, b"me", granted.fence, "done", b"r", 24 * HOUR_US, HOUR_US)
    assert isinstance(scene.both.send([settle])[0], Completed)
    assert scene.states() == ("done", "done")


def test_a_mark_is_first_if_neither_side_has_it() -> None:
    scene = Scene()
    scene.old.send([Mark("", "m", ["a"], HOUR_US)])
    scene.new.send([Mark("", "m", ["b"], HOUR_US)])
    assert scene.both.send([Mark("", "m", ["a", "b", "c"], HOUR_US)])[0] == Marked([False, False, True])
    for store in (scene.old, scene.new):
        assert store.send([Mark("", "m", ["c"], HOUR_US)])[0] == Marked([False])


# --- orders of deployment ---


def admit(store: Any) -> None:
    with semel.open(store, consumer="c", window="1h") as once:
        once.run("evt_1", str)


def test_the_safe_order_is_let_through_and_the_others_are_refused() -> None:
    scene = Scene()
    admit(scene.old)
    admit(scene.both)
    admit(scene.old)  # beside the pair
    with pytest.raises(StoreMoved, match="moving in from memory:old"):
        admit(scene.new)
    (move,) = moves(scene.old, scene.new)
    assert "not closed" in finish(scene.old, scene.new, move, HOUR_US)
    move = close(scene.old, scene.new, move)
    with pytest.raises(StoreMoved, match="has moved to memory:new"):
        admit(scene.old)
    admit(scene.both)
    with pytest.raises(StoreMoved, match="moving in"):
        admit(scene.new)
    scene.clock.advance((HOUR_US + MARGIN_US) / 1e6 - 1)
    assert "is over in 1 s" in finish(scene.old, scene.new, move, HOUR_US)
    scene.clock.advance(1)
    assert finish(scene.old, scene.new, move, HOUR_US) == ""
    admit(scene.new)
    admit(scene.both)  # beside the new store
    admit(scene.new)
    assert moves(scene.old, scene.new)[0].finished


def test_a_move_is_not_finished_while_only_the_old_store_knows_an_event() -> None:
    scene = Scene()
    admit(scene.both)
    assert isinstance(scene.claim(scene.old, b"alone", ("", "c", "only in old")), Granted)
    move = close(scene.old, scene.new, moves(scene.old, scene.new)[0])
    scene.clock.advance(7200)
    assert "'only in old' is claimed in the old store" in finish(scene.old, scene.new, move, HOUR_US)


def test_a_running_client_of_the_old_store_is_refused_after_it_was_closed() -> None:
    scene = Scene()
    with semel.open(scene.old, consumer="c") as once:
        assert isinstance(once.run("evt_2", str), semel.Done)
        admit(scene.both)
        close(scene.old, scene.new, moves(scene.old, scene.new)[0])
        once._runtime.fresh_until = 0.0  # as after five seconds
        for _ in range(2):
            with pytest.raises(StoreMoved):
                once.run("evt_3", str)
        assert isinstance(scene.old.send([Lookup(("", "c", "evt_3"))])[0], Absent)


def test_a_second_move_and_the_way_round_are_refused() -> None:
    scene = Scene()
    admit(scene.both)
    third = FragileStore(scene.clock, "memory:third")
    for old, new in ((scene.new, scene.old), (third, scene.new), (scene.new, third)):
        with pytest.raises(StoreMoved, match="moving already"):
            admit(migrating(old=old, new=new))


def test_bad_pairs_are_refused() -> None:
    with pytest.raises(PolicyInvalid, match="needs two stores"):
        migrating(old="sqlite:///a.db", new="sqlite:///a.db")
    with pytest.raises(PolicyInvalid, match="semel serve --store"):
        migrating(old="http://localhost:1/", new="sqlite:///a.db")
    with pytest.raises(PolicyInvalid, match="is a move itself"):
        migrating(old=Scene().both, new="sqlite:///a.db")
    with pytest.raises(PolicyInvalid, match="write a migrating store as"):
        from_url("migrating:?old=sqlite:///a.db")
    assert from_url("migrating:?old=sqlite:///a.db&new=sqlite:///b.db").name.startswith(
        "migrating:?old=sqlite:"
    )


def test_counts_and_scans_show_a_key_once() -> None:
    scene = Scene()
    scene.finish(scene.both)
    assert scene.both.send([Count()])[0].states == {"done": 1}


def test_an_event_loop_uses_it_too() -> None:
    scene = Scene()

    async def effect() -> str:
        return "done"

    async def run() -> semel.Outcome[str]:
        async with semel.aopen(scene.both, consumer="c") as once:
            await once.run("evt_1", effect)
            return await once.run("evt_1", effect)

    outcome = asyncio.run(run())
    assert isinstance(outcome, semel.Done)
    assert outcome.replayed
