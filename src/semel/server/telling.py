"""Say what happens to the items of callers, to whoever listens: they do their work elsewhere, so no tap sees it."""

from semel.core.commands import Answer, Claim, Granted, Item, Mark, Marked, Settle
from semel.observe.events import ClaimedEvent, Hooks
from semel.observe.taps import claimed, marked, settled
from semel.types import Busy

__all__ = ["Telling"]

WAITING_MAX = 10_000
"""Callers that wait and are told apart at a time."""


class Telling:
    """Tells hooks of items and their answers."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks
        self._waiting: dict[bytes, None] = {}
        """Owners that were told `Busy`: one that waits asks again and again, and is one delivery all the same."""

    def __call__(self, item: Item, answer: Answer) -> None:
        """An item was answered."""
        kind = type(item)
        if kind is Claim:
            assert isinstance(item, Claim)
            self._claim(item, answer)
        elif kind is Settle:
            settled(self._hooks, (item,), (answer,))
        elif kind is Mark and isinstance(answer, Marked):
            assert isinstance(item, Mark)
            marked(self._hooks, item.tenant, item.consumer, item.keys, answer.firsts)

    def _claim(self, claim: Claim, answer: Answer) -> None:
        if claim.owner not in self._waiting:
            if isinstance(answer, Busy):
                self._waiting[claim.owner] = None
                if len(self._waiting) > WAITING_MAX:
                    del self._waiting[next(iter(self._waiting))]
            claimed(self._hooks, (claim,), (answer,))
        elif not isinstance(answer, Busy):
            del self._waiting[claim.owner]
            if isinstance(answer, Granted):  # it has taken over; that it was received is told already
                who = (*claim.id, claim.owner)
                self._hooks(ClaimedEvent(*who, attempt=answer.attempt, first_seen=answer.first_seen))
