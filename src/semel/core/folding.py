"""Fold equal keys before the store sees them, and unfold the answers.

A store is promised that no two items of a kind in one batch are about the same record. What a folded copy
is answered follows from what its leader got: a copy of a granted claim is `Busy`, a copy of a won mark is
not the first, and of several settles only the greatest fence can still be right.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Generic, TypeAlias, TypeVar

from semel.core.commands import Answer, Claim, ClaimAnswer, Granted, Item, Mark, Marked, Renew, Settle
from semel.types import Busy, Id, Lost, Mismatch, Renewed

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

View: TypeAlias = Callable[[Answer], Answer]
"""Turns the answer to a shared item into the answer for one caller."""


def leaders(keys: Sequence[K]) -> tuple[Sequence[int], Sequence[int]]:
    """Positions of each key's first appearance, and for every input its place among those."""
    if len(set(keys)) == len(keys):
        return range(len(keys)), range(len(keys))  # the usual case: all are distinct
    first_at: list[int] = []
    places: dict[K, int] = {}
    place_of: list[int] = []
    for at, key in enumerate(keys):
        place = places.setdefault(key, len(first_at))
        if place == len(first_at):
            first_at.append(at)
        place_of.append(place)
    return first_at, place_of


def leaders_in_time(claims: Sequence[Claim]) -> tuple[Sequence[int], Sequence[int]]:
    """The same for claims that run: those further apart in time than `apart_us` are different events.

    In the order of their own times, because a record that has seen the later event calls the earlier one late.
    """
    if not any(claim.apart_us for claim in claims):
        return leaders([claim.id for claim in claims])
    first_at: list[int] = []
    place_of = [0] * len(claims)
    open_: dict[Id, int] = {}
    for at in sorted(range(len(claims)), key=lambda at: claims[at].event_time_us or 0):
        claim = claims[at]
        place = open_.get(claim.id)
        if place is None or not _folds(claims[first_at[place]], claim):
            place = open_[claim.id] = len(first_at)
            first_at.append(at)
        place_of[at] = place
    return first_at, place_of


def _folds(leader: Claim, claim: Claim) -> bool:
    if not claim.apart_us or leader.event_time_us is None or claim.event_time_us is None:
        return True
    return claim.event_time_us - leader.event_time_us < claim.apart_us


def copy_of_claim(leader: Claim, copy: Claim, answer: ClaimAnswer) -> ClaimAnswer:
    """Return the answer to a claim whose key was already in the batch."""
    if copy.fingerprint and leader.fingerprint and copy.fingerprint != leader.fingerprint:
        return Mismatch()
    apart = bool(copy.apart_us) and copy.event_time_us != leader.event_time_us
    if isinstance(answer, Granted) and copy.owner != leader.owner:
        return Busy(leader.lease_us / 1e6, answer.journal is not None and not apart)
    if apart:
        return Busy(0.0)  # its event time differs, so it needs a claim of its own
    return answer


class Slot(Generic[T]):
    """One item for the store, and all callers that wait for its answer."""

    __slots__ = ("item", "takers")

    def __init__(self, item: Item, taker: T, view: View | None = None) -> None:
        self.item: Item = item
        self.takers: list[tuple[T, View | None]] = [(taker, view)]


class Fold(Generic[T]):
    """The folding of one batch of (item, taker) pairs from many callers."""

    def __init__(self, entries: Sequence[tuple[Item, T]]) -> None:
        self.slots: list[Slot[T]] = []
        """What to send."""
        self.ready: list[tuple[T, Answer]] = []
        """What can be answered without the store."""
        self.later: list[tuple[Item, T]] = []
        """What must wait for the next batch."""
        self._claims: dict[Id, Slot[T]] = {}
        self._settles: dict[Id, Slot[T]] = {}
        self._renews: dict[Id, Slot[T]] = {}
        self._marks: dict[tuple[str, str, int, bool], tuple[Slot[T], dict[str, int]]] = {}
        claims, slots = self._claims, self.slots
        for item, taker in entries:
            kind = type(item)  # a failing isinstance() costs ten times as much
            if kind is Claim:
                if item.id in claims:  # type: ignore[union-attr]
                    self._copy(item, taker)  # type: ignore[arg-type]
                else:
                    slot = claims[item.id] = Slot(item, taker)  # type: ignore[union-attr]
                    slots.append(slot)
            elif kind is Settle:
                self._check_fence(self._settles, item, taker)  # type: ignore[arg-type]
            elif kind is Renew:
                self._check_fence(self._renews, item, taker)  # type: ignore[arg-type]
            elif kind is Mark:
                self._mark(item, taker)  # type: ignore[arg-type]
            else:
                self.slots.append(Slot(item, taker))
        for (tenant, consumer, window_us, refresh), (slot, places) in self._marks.items():
            slot.item = Mark(tenant, consumer, list(places), window_us, refresh)
        if self._settles and self._renews:
            self.slots = [slot for slot in self.slots if not self._is_superseded(slot)]

    def _copy(self, item: Claim, taker: T) -> None:
        slot = self._claims[item.id]
        leader = slot.item
        assert isinstance(leader, Claim)
        if _can_share(leader, item):
            slot.takers.append((taker, partial(copy_of_claim, leader, item)))
        else:
            self.later.append((item, taker))

    def _check_fence(self, seen: dict[Id, Slot[T]], item: Settle | Renew, taker: T) -> None:
        slot = seen.get(item.id)
        if slot is None:
            seen[item.id] = slot = Slot(item, taker)
            self.slots.append(slot)
            return
        rival = slot.item
        assert isinstance(rival, Settle | Renew)
        if rival == item:
            slot.takers.append((taker, None))
        elif item.fence == rival.fence and item.owner == rival.owner:
            self.later.append((item, taker))  # the same claim with different content: one after the other
        elif item.fence > rival.fence:
            self.ready.extend((loser, Lost()) for loser, _ in slot.takers)
            slot.item, slot.takers = item, [(taker, None)]
        else:
            self.ready.append((taker, Lost()))

    def _mark(self, item: Mark, taker: T) -> None:
        scope = (item.tenant, item.consumer, item.window_us, item.refresh)
        group = self._marks.get(scope)
        if group is None:
            group = self._marks[scope] = (Slot(item, taker), {})
            group[0].takers.clear()
            self.slots.append(group[0])
        slot, places = group
        share: Sequence[int | None]
        if not places and len(set(item.keys)) == len(item.keys):
            places.update(zip(item.keys, range(len(item.keys)), strict=True))
            share = range(len(item.keys))
        else:
            share = [None if key in places else places.setdefault(key, len(places)) for key in item.keys]
        slot.takers.append((taker, partial(_share_of_mark, share)))

    def _is_superseded(self, slot: Slot[T]) -> bool:
        """Whether this is a plain renewal whose claim is settled in the same batch."""
        item = slot.item
        if not isinstance(item, Renew) or item.step is not None or item.id not in self._settles:
            return False
        settle = self._settles[item.id].item
        assert isinstance(settle, Settle)
        if settle.fence != item.fence:
            return False
        self.ready.extend((taker, Renewed(0)) for taker, _ in slot.takers)
        return True


def _can_share(one: Claim, other: Claim) -> bool:
    """Whether two callers' claims may share one item: all fields that matter to the store are equal."""
    return (
        one.fingerprint == other.fingerprint
        and one.journal == other.journal
        and one.event_time_us == other.event_time_us
        and one.apart_us == other.apart_us
        and one.refuse_late == other.refuse_late
        and one.refresh == other.refresh
    )


def _share_of_mark(share: Sequence[int | None], answer: Answer) -> Answer:
    if not isinstance(answer, Marked):
        return answer
    return Marked([place is not None and answer.firsts[place] for place in share])
