"""A claim that is repeated after a lost reply gets its own lease back: the one that began with the first try."""

import time
from collections.abc import Sequence
from typing import Any

import pytest

import semel
from semel.core.commands import Answer, Claim, Item
from semel.stores.memory.store import MemoryStore
from semel.types import Mode, Record

MARGIN_S = 0.002
"""For the time between reading two clocks; the pause before the second try is at least five times as long."""


class Deaf(MemoryStore):
    """Carries out the first claims, and their replies are lost."""

    def __init__(self, losses: int) -> None:
        super().__init__()
        self.losses = losses

    def send(self, items: Sequence[Item], /) -> list[Answer]:
        answers = super().send(items)
        if self.losses and any(isinstance(item, Claim) for item in items):
            self.losses -= 1
            raise semel.errors.StoreUnavailable("no answer")
        return answers


def test_a_handler_is_not_promised_more_time_than_its_lease_has_left() -> None:
    store = Deaf(losses=2)
    seen: dict[str, float] = {}

    with semel.open(store, consumer="deaf", lease="30s") as once:

        def handler() -> None:
            seen["promised"] = semel.current().deadline_s
            record: Any = once.records.lookup("evt_1")
            assert isinstance(record, Record)
            seen["left"] = record.lease_until_us / 1e6 - time.time_ns() / 1e9

        assert once.run("evt_1", handler) == semel.Done(None)
    assert seen["promised"] <= seen["left"] + MARGIN_S


def test_a_lost_reply_costs_no_attempt_and_no_second_run() -> None:
    store = Deaf(losses=3)
    attempts: list[int] = []
    with semel.open(store, consumer="deaf") as once:
        assert once.run("evt_1", lambda: attempts.append(semel.current().attempt)) == semel.Done(None)
    assert attempts == [1]


class Away(MemoryStore):
    """Out of reach for the first claims: nothing is carried out."""

    def __init__(self, refusals: int) -> None:
        super().__init__()
        self.refusals = refusals

    def send(self, items: Sequence[Item], /) -> list[Answer]:
        if self.refusals and any(isinstance(item, Claim) for item in items):
            self.refusals -= 1
            raise semel.errors.StoreUnavailable("no answer")
        return super().send(items)


@pytest.mark.parametrize("mode", ["lease", "quarantine"])
def test_an_outage_longer_than_the_lease_does_not_waste_the_claim_that_follows_it(mode: Mode) -> None:
    ran: list[str] = []
    with semel.open(Away(refusals=4), consumer="away", lease="100ms", mode=mode) as once:
        outcome = once.run("evt_1", lambda: ran.append("effect"))
    assert ran == ["effect"]
    assert outcome == semel.Done(None)


def test_a_quarantined_event_is_not_flagged_when_its_handler_never_started() -> None:
    ran: list[str] = []
    with semel.open(Away(refusals=4), consumer="away", lease="100ms", mode="quarantine") as once:
        once.run("evt_1", lambda: ran.append("effect"))
        record: Any = once.records.lookup("evt_1")
    assert ran or record.state != "unknown"
