"""The plan of a chaos run comes from its seed, and has every kind of fault."""

from semel.testing.chaos.messages import PHASES
from semel.testing.chaos.plan import ChaosRound, draw_round


def draw(seed: int, number: int = 0, *, cuts: bool = True, replies: bool = True) -> ChaosRound:
    return draw_round(seed, number, 40, pause_leases=1.75, cuts=cuts, replies=replies)


def test_a_seed_repeats_every_round_whatever_was_drawn_before() -> None:
    assert draw(7, 3) == draw(7, 3)
    assert draw(7, 3) != draw(8, 3)
    assert draw(7, 3).faults.values() != draw(7, 4).faults.values()


def test_every_event_is_sent_and_some_are_repeated_and_out_of_order() -> None:
    plan = draw(1, 2)
    assert set(plan.sent) == set(plan.events) == set(range(80, 120))
    assert len(plan.sent) > len(plan.events)
    assert plan.sent != sorted(plan.sent)


def test_a_round_has_every_kind_of_fault_and_a_kill_at_every_phase() -> None:
    faults = [fault for of_event in draw(1).faults.values() for fault in of_event]
    assert {fault.kind for fault in faults} == {"kill", "pause", "store cut off", "reply lost", "ack lost"}
    assert {fault.phase for fault in faults if fault.kind == "kill"} == set(PHASES)
    assert all(fault.leases > 1 for fault in faults if fault.kind == "pause")


def test_what_a_store_does_not_allow_is_left_out_and_the_rest_stays() -> None:
    plain = draw(1, cuts=False, replies=False)
    kinds = [fault.kind for of_event in plain.faults.values() for fault in of_event]
    assert set(kinds) == {"kill", "pause", "ack lost"}
    assert plain.sent == draw(1).sent
