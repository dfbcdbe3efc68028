"""Stores that are broken on purpose, each by one habit, each with the scenarios that find it out."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from semel.core import machine
from semel.core.commands import Answer, Claim, Forget, Granted, Item, RecordItem, Renew, Resolve, Settle
from semel.testing import ManualClock, store_contract
from semel.testing.store_contract import Harness, Scenario
from semel.types import FOREVER, Busy, Completed, Id, Late, Lost, Record
from tests.contract.dict_store import DictStore


class Mutant(NamedTuple):
    store: type[DictStore]
    caught_by: tuple[str, ...]


MUTANTS: dict[str, Mutant] = {}

Make = Callable[[type[DictStore]], type[DictStore]]


def caught_by(*names: str) -> Make:
    """Enter a broken store, with the scenarios that must fail on it."""

    def enter(store: type[DictStore]) -> type[DictStore]:
        MUTANTS[store.__name__] = Mutant(store, names)
        return store

    return enter


def breaks(scenario: Scenario, store_type: type[DictStore]) -> bool:
    """Whether a store fails a scenario, in whatever way."""
    clock = ManualClock()
    store = store_type(clock)
    try:
        store_contract.run(scenario, Harness(lambda: store, clock=clock, hear_s=0.02))
    except Exception:  # noqa: BLE001 - however a broken store breaks, it is found out
        return True
    return False


class Bent(DictStore):
    """Bends the item before the rules see it, or the record that they want to write."""

    def decide(self, stored: Record | None, item: RecordItem, now: int) -> machine.Decision:
        answer, record = super().decide(stored, self.bend(item, stored, now), now)
        if record is None or stored is None:
            return answer, record if record is None else self.bend_new(record, item)
        return answer, self.bend_new(self.bend_write(stored, record, item, now), item)

    def bend(self, item: RecordItem, stored: Record | None, now: int) -> RecordItem:
        return item

    def bend_write(self, stored: Record, record: Record, item: RecordItem, now: int) -> Record:
        return record

    def bend_new(self, record: Record, item: RecordItem) -> Record:
        return record


def taken_over(stored: Record | None, item: RecordItem, now: int) -> bool:
    return (
        isinstance(item, Claim)
        and stored is not None
        and stored.state == "claimed"
        and stored.lease_until_us <= now < stored.expires_at_us
    )


# --- what failed ---------------------------------------------------------------------------------


@caught_by(
    "the_error_of_each_attempt_is_kept", "a_success_keeps_the_errors_before_it", "the_last_errors_are_kept",
    "a_lease_that_ended_is_an_error", "a_claim_may_bring_an_error", "any_text_of_an_error_is_kept",
)  # fmt: skip
class KeepsNoErrors(Bent):
    def bend_new(self, record: Record, item: RecordItem) -> Record:
        return replace(record, errors=())


@caught_by("a_success_keeps_the_errors_before_it")
class ForgetsErrorsOfASuccess(Bent):
    def bend_new(self, record: Record, item: RecordItem) -> Record:
        return replace(record, errors=()) if record.state == "done" else record


@caught_by("the_last_errors_are_kept")
class KeepsTheFirstErrors(Bent):
    def bend_write(self, stored: Record, record: Record, item: RecordItem, now: int) -> Record:
        return replace(record, errors=stored.errors) if len(stored.errors) == 5 else record


# --- who may run --------------------------------------------------------------------------------


@caught_by(
    "claims_at_once_have_one_winner", "marks_at_once_have_one_first", "take_overs_at_once_have_one_winner"
)
class GetThenSet(DictStore):
    """Reads, thinks, writes: every racing caller reads before the first one writes."""

    callers = 8

    def __init__(self, clock: Any = None) -> None:
        super().__init__(clock)
        self.home = threading.current_thread()
        self.gap = threading.Barrier(self.callers, timeout=10)

    def send(self, items: Sequence[Item], /) -> list[Answer]:
        if threading.current_thread() is self.home:
            return super().send(items)
        return [self.racing(item) for item in items]

    def racing(self, item: Item) -> Answer:
        records, marks = dict(self.records), dict(self.marks)
        self.gap.wait()
        mine = DictStore(self.clock)
        mine.records, mine.marks, mine.last_us = records, marks, self.last_us
        (answer,) = mine.send([item])
        self.records |= mine.records
        self.marks |= mine.marks
        self.gap.wait()
        return answer


@caught_by("a_repeated_claim_gets_its_own_back")
class RepeatedClaimIsBusy(DictStore):
    def decide(self, stored: Record | None, item: RecordItem, now: int) -> machine.Decision:
        answer, record = super().decide(stored, item, now)
        if isinstance(answer, Granted) and stored is not None and answer.fence == stored.fence:
            return Busy((answer.lease_until_us - now) / 1e6), None
        return answer, record


@caught_by("two_tasks_of_a_process_do_not_both_win", "another_owner_is_busy")
class OneOwnerPerProcess(Bent):
    def bend(self, item: RecordItem, stored: Record | None, now: int) -> RecordItem:
        return replace(item, owner=b"this process") if isinstance(item, Claim | Renew | Settle) else item


@caught_by("one_clock_serves_every_caller")
class ClientClock(DictStore):
    """Every caller brings a clock of its own, up to an hour wrong."""

    def decide(self, stored: Record | None, item: RecordItem, now: int) -> machine.Decision:
        wrong_us = (item.owner[0] - 128) * 28_000_000 if isinstance(item, Claim) else 0
        return super().decide(stored, item, now + wrong_us)


@caught_by("the_time_of_an_event_decides_no_lease")
class EventTimeAsNow(DictStore):
    def decide(self, stored: Record | None, item: RecordItem, now: int) -> machine.Decision:
        event_us = item.event_time_us if isinstance(item, Claim) else None
        return super().decide(stored, item, event_us or now)


@caught_by("the_stores_time_never_goes_back", "a_clock_set_back_does_not_hold_a_lease")
class ClockGoesBack(DictStore):
    def now(self) -> int:
        return self.clock.now_us()


@caught_by("another_owner_is_busy")
class BusyForAWholeLease(DictStore):
    def decide(self, stored: Record | None, item: RecordItem, now: int) -> machine.Decision:
        answer, record = super().decide(stored, item, now)
        if isinstance(answer, Busy) and isinstance(item, Claim):
            return Busy(item.lease_us / 1e6, answer.recoverable), record
        return answer, record


@caught_by("every_attempt_is_counted", "a_lease_that_is_over_is_taken_over")
class AttemptsLostOnTakeOver(DictStore):
    def decide(self, stored: Record | None, item: RecordItem, now: int) -> machine.Decision:
        answer, record = super().decide(stored, item, now)
        if isinstance(answer, Granted) and record is not None:
            return replace(answer, attempt=1), replace(record, attempt=1)
        return answer, record


@caught_by("fences_grow_across_expiry_and_purge", "a_new_key_is_granted")
class FenceRestartsWithTheRecord(DictStore):
    def decide(self, stored: Record | None, item: RecordItem, now: int) -> machine.Decision:
        answer, record = super().decide(stored, item, now)
        if isinstance(item, Claim) and record is not None and isinstance(answer, Granted):
            fence = 1 if machine.standing(stored, now) is None else (stored.fence if stored else 0) + 1
            return replace(answer, fence=fence), replace(record, fence=fence)
        return answer, record


@caught_by("a_forced_forget_stops_the_running_claim", "a_claim_that_nobody_runs_is_forgotten")
class ForgetDeletes(DictStore):
    def on_record(self, item: RecordItem, now: int, changed: list[Id]) -> Answer:
        answer = super().on_record(item, now, changed)
        if isinstance(item, Forget):
            self.records.pop(self.place(item.id), None)
        return answer


@caught_by("a_tombstone_lasts_as_long_as_a_lease_may", "a_purge_changes_no_answer")
class PurgeTakesTombstonesAndOrphans(DictStore):
    def is_over(self, record: Record, now: int) -> bool:
        return record.state == "forgotten" or (record.state == "claimed" and record.lease_until_us <= now)


@caught_by("a_busy_answer_prolongs_nothing")
class BusyProlongs(DictStore):
    def decide(self, stored: Record | None, item: RecordItem, now: int) -> machine.Decision:
        answer, record = super().decide(stored, item, now)
        if isinstance(item, Claim) and isinstance(answer, Busy) and stored is not None:
            return answer, replace(stored, lease_until_us=now + item.lease_us)
        return answer, record


# --- how a claim ends ---------------------------------------------------------------------------


@caught_by("a_wrong_fence_or_owner_is_lost")
class NoFenceOnComplete(Bent):
    def bend(self, item: RecordItem, stored: Record | None, now: int) -> RecordItem:
        if isinstance(item, Settle) and item.to == "done" and stored is not None:
            return replace(item, fence=stored.fence)
        return item


@caught_by("a_wrong_fence_or_owner_is_lost")
class NoOwnerOnComplete(Bent):
    def bend(self, item: RecordItem, stored: Record | None, now: int) -> RecordItem:
        if isinstance(item, Settle) and item.to in ("done", "failed") and stored is not None:
            return replace(item, owner=stored.owner)
        return item


@caught_by("a_wrong_fence_or_owner_is_lost")
class NoOwnerOnRelease(Bent):
    def bend(self, item: RecordItem, stored: Record | None, now: int) -> RecordItem:
        if isinstance(item, Settle) and item.to == "released" and stored is not None:
            return replace(item, owner=stored.owner)
        return item


@caught_by("a_wrong_fence_or_owner_is_lost")
class NoOwnerOnRenew(Bent):
    def bend(self, item: RecordItem, stored: Record | None, now: int) -> RecordItem:
        return replace(item, owner=stored.owner) if isinstance(item, Renew) and stored is not None else item


@caught_by("a_zombie_changes_nothing", "a_forced_forget_stops_the_running_claim")
class TheLastWriterWins(DictStore):
    def decide(self, stored: Record | None, item: RecordItem, now: int) -> machine.Decision:
        answer, record = super().decide(stored, item, now)
        if isinstance(answer, Lost) and isinstance(item, Settle) and item.to == "done" and stored is not None:
            return Completed(at_us=now), replace(
                stored, state="done", owner=item.owner, value=item.value, expires_at_us=now + item.window_us
            )
        return answer, record


@caught_by("a_lease_over_but_not_taken_over_may_still_end")
class LateCompletionIsLost(DictStore):
    def decide(self, stored: Record | None, item: RecordItem, now: int) -> machine.Decision:
        late = stored is not None and stored.state == "claimed" and stored.lease_until_us <= now
        return (Lost(), None) if late and isinstance(item, Settle) else super().decide(stored, item, now)


@caught_by("a_repeated_completion_is_already_there")
class AlreadyOverwrites(DictStore):
    def decide(self, stored: Record | None, item: RecordItem, now: int) -> machine.Decision:
        answer, record = super().decide(stored, item, now)
        if (
            isinstance(answer, Completed)
            and answer.already
            and isinstance(item, Settle)
            and stored is not None
        ):
            return answer, replace(stored, value=item.value)
        return answer, record


@caught_by("a_release_gives_up_ownership", "a_delayed_release_holds_everybody_off")
class ReleaseKeepsTheOwner(Bent):
    def bend_write(self, stored: Record, record: Record, item: RecordItem, now: int) -> Record:
        released = isinstance(item, Settle) and item.to == "released"
        return replace(record, owner=stored.owner) if released else record


@caught_by("a_release_may_give_the_attempt_back", "a_released_key_is_free_at_once")
class ReleaseResetsAttempts(Bent):
    def bend_write(self, stored: Record, record: Record, item: RecordItem, now: int) -> Record:
        released = isinstance(item, Settle) and item.to == "released"
        return replace(record, attempt=0) if released else record


@caught_by("a_release_may_give_the_attempt_back")
class ReleaseAlwaysCounts(Bent):
    def bend(self, item: RecordItem, stored: Record | None, now: int) -> RecordItem:
        return replace(item, count_attempt=True) if isinstance(item, Settle) else item


@caught_by("a_delayed_release_holds_everybody_off")
class ReleaseForgetsItsDelay(Bent):
    def bend(self, item: RecordItem, stored: Record | None, now: int) -> RecordItem:
        return replace(item, delay_us=0) if isinstance(item, Settle) else item


@caught_by("a_lost_record_is_recreated")
class RecreatedIsNeverWritten(DictStore):
    def decide(self, stored: Record | None, item: RecordItem, now: int) -> machine.Decision:
        answer, record = super().decide(stored, item, now)
        return answer, None if isinstance(answer, Completed) and answer.recreated else record


@caught_by("a_lost_record_is_recreated", "what_would_have_expired_is_not_recreated")
class RecreatedCountsFromNow(Bent):
    def bend(self, item: RecordItem, stored: Record | None, now: int) -> RecordItem:
        if isinstance(item, Settle) and machine.standing(stored, now) is None:
            return replace(item, window_us=item.window_us + now - item.fence)
        return item


@caught_by("a_renewal_moves_lease_and_expiry_alike")
class RenewalMovesOnlyTheLease(Bent):
    def bend_write(self, stored: Record, record: Record, item: RecordItem, now: int) -> Record:
        return replace(record, expires_at_us=stored.expires_at_us) if isinstance(item, Renew) else record


# --- how long it is remembered ------------------------------------------------------------------


@caught_by("a_window_that_is_over_means_absent")
class ExpiredCountsAsPresent(DictStore):
    def decide(self, stored: Record | None, item: RecordItem, now: int) -> machine.Decision:
        if isinstance(item, Claim) and stored is not None and stored.state in ("done", "failed"):
            stored = replace(stored, expires_at_us=FOREVER)
        return super().decide(stored, item, now)


@caught_by("lease_and_window_are_two_numbers", "a_window_counts_from_completion")
class LeaseAndWindowAreOneNumber(Bent):
    def bend(self, item: RecordItem, stored: Record | None, now: int) -> RecordItem:
        return replace(item, window_us=item.lease_us) if isinstance(item, Claim | Settle) else item


@caught_by("a_window_counts_from_completion", "the_window_of_the_completion_counts")
class CompletionMovesNoExpiry(Bent):
    def bend_write(self, stored: Record, record: Record, item: RecordItem, now: int) -> Record:
        done = isinstance(item, Settle) and item.to in ("done", "failed")
        return replace(record, expires_at_us=stored.expires_at_us) if done else record


@caught_by("a_purge_changes_no_answer")
class PurgeTakesRunningLeases(DictStore):
    def is_over(self, record: Record, now: int) -> bool:
        return record.expires_at_us <= now


@caught_by("a_purge_removes_what_is_over")
class PurgeTakesNothing(DictStore):
    def is_over(self, record: Record, now: int) -> bool:
        return False


@caught_by("what_must_be_decided_does_not_expire")
class JournaledClaimsExpire(Bent):
    def bend_new(self, record: Record, item: RecordItem) -> Record:
        if isinstance(item, Claim) and record.journal is not None:
            return replace(record, expires_at_us=record.lease_until_us + item.window_us)
        return record


@caught_by("a_sliding_window_counts_from_the_claim")
class SlidingFromCompletion(Bent):
    def bend_write(self, stored: Record, record: Record, item: RecordItem, now: int) -> Record:
        if isinstance(item, Settle) and item.to == "done":
            return replace(record, expires_at_us=now + item.window_us)
        return record


@caught_by("an_event_older_than_its_window_is_late")
class LateIsIgnored(Bent):
    def bend(self, item: RecordItem, stored: Record | None, now: int) -> RecordItem:
        return replace(item, refuse_late=False) if isinstance(item, Claim) else item


@caught_by("an_event_is_late_only_where_nothing_is_known")
class LateBeforeLooking(DictStore):
    def decide(self, stored: Record | None, item: RecordItem, now: int) -> machine.Decision:
        if isinstance(item, Claim) and item.refuse_late and item.event_time_us is not None:
            age_us = now - item.event_time_us
            if age_us > item.window_us:
                return Late(age_us / 1e6), None
        return super().decide(stored, item, now)


# --- fingerprints, forgetting, quarantine -------------------------------------------------------


@caught_by("another_payload_is_a_mismatch")
class FingerprintNotComparedOnReclaim(Bent):
    def bend(self, item: RecordItem, stored: Record | None, now: int) -> RecordItem:
        return replace(item, fingerprint=None) if taken_over(stored, item, now) else item


@caught_by("a_take_over_keeps_the_fingerprint")
class FingerprintLostOnReclaim(Bent):
    def bend_write(self, stored: Record, record: Record, item: RecordItem, now: int) -> Record:
        return replace(record, fingerprint=item.fingerprint) if isinstance(item, Claim) else record


@caught_by("fingerprints_are_compared_where_both_exist")
class FingerprintVersionsCompared(Bent):
    def bend(self, item: RecordItem, stored: Record | None, now: int) -> RecordItem:
        if isinstance(item, Claim) and item.fingerprint:
            return replace(item, fingerprint=b"\1" + item.fingerprint[1:])
        return item


@caught_by("a_running_claim_is_not_forgotten_unasked")
class ForgetIsAlwaysForced(Bent):
    def bend(self, item: RecordItem, stored: Record | None, now: int) -> RecordItem:
        return replace(item, force=True) if isinstance(item, Forget) else item


@caught_by("forget_takes_only_the_record_it_means")
class ForgetComparesNothing(Bent):
    def bend(self, item: RecordItem, stored: Record | None, now: int) -> RecordItem:
        return replace(item, fence=None, state=None) if isinstance(item, Forget) else item


@caught_by("a_quarantined_orphan_is_not_run_again")
class QuarantinedOrphanRunsAgain(Bent):
    def bend(self, item: RecordItem, stored: Record | None, now: int) -> RecordItem:
        return replace(item, quarantine=False) if isinstance(item, Claim) else item


@caught_by("a_released_quarantine_claim_runs_again")
class ReleasedIsQuarantinedToo(DictStore):
    def decide(self, stored: Record | None, item: RecordItem, now: int) -> machine.Decision:
        if stored is not None and stored.quarantine and not stored.owner and stored.lease_until_us <= now:
            stored = replace(stored, state="unknown")
        return super().decide(stored, item, now)


@caught_by("an_unknown_record_is_not_revived")
class UnknownIsRenewed(DictStore):
    def decide(self, stored: Record | None, item: RecordItem, now: int) -> machine.Decision:
        if isinstance(item, Renew) and stored is not None and stored.quarantine:
            stored = replace(stored, state="claimed", lease_until_us=max(stored.lease_until_us, now + 1))
        return super().decide(stored, item, now)


@caught_by("resolve_compares_the_fence_it_saw")
class ResolveComparesNothing(Bent):
    def bend(self, item: RecordItem, stored: Record | None, now: int) -> RecordItem:
        return replace(item, fence=stored.fence) if isinstance(item, Resolve) and stored is not None else item


@caught_by(
    "resolve_to_done_answers_from_then_on",
    "a_late_value_is_not_called_kept",
    "a_repeated_completion_is_already_there",
)
class CallsALateValueKept(DictStore):
    """Tells a late owner that its value is stored, although somebody has resolved the record."""

    def decide(self, stored: Record | None, item: RecordItem, now: int) -> machine.Decision:
        answer, record = super().decide(stored, item, now)
        return (replace(answer, kept=True) if isinstance(answer, Completed) else answer), record


@caught_by("resolve_to_done_answers_from_then_on", "a_late_value_is_not_called_kept")
class TakesALateValue(Bent):
    """Replaces the value that an operator gave, and duplicates have seen, with that of the late owner."""

    def decide(self, stored: Record | None, item: RecordItem, now: int) -> machine.Decision:
        answer, record = super().decide(stored, item, now)
        if (
            isinstance(item, Settle)
            and isinstance(answer, Completed)
            and answer.already
            and stored is not None
        ):
            return replace(answer, kept=True), replace(stored, value=item.value)
        return answer, record


@caught_by("resolve_to_absent_keeps_a_journal_for_the_sweep")
class ResolveDropsTheJournal(DictStore):
    def decide(self, stored: Record | None, item: RecordItem, now: int) -> machine.Decision:
        if isinstance(item, Resolve) and item.to == "absent" and stored is not None:
            stored = replace(stored, journal=None)
        return super().decide(stored, item, now)


@caught_by(
    "resolve_to_claimed_goes_on_with_the_next_attempt",
    "an_orphan_resolved_to_claimed_is_unknown_again_when_that_owner_dies",
)
class ResolveToClaimedIsToNobody(Bent):
    def bend(self, item: RecordItem, stored: Record | None, now: int) -> RecordItem:
        if isinstance(item, Resolve) and item.to == "claimed":
            return replace(item, owner=b"", lease_us=0)
        return item


@caught_by("resolve_to_claimed_goes_on_with_the_next_attempt")
class ResolveToClaimedForgetsTheAttempts(DictStore):
    def decide(self, stored: Record | None, item: RecordItem, now: int) -> machine.Decision:
        if isinstance(item, Resolve) and item.to == "claimed" and stored is not None:
            stored = replace(stored, attempt=0, steps=())
        return super().decide(stored, item, now)


# --- equal keys told apart by the events' own times ---------------------------------------------


@caught_by("a_reclaim_keeps_the_anchor")
class ReclaimMovesTheAnchor(Bent):
    def bend_write(self, stored: Record, record: Record, item: RecordItem, now: int) -> Record:
        if taken_over(stored, item, now) and isinstance(item, Claim) and item.apart_us:
            return replace(record, anchor_us=item.event_time_us)
        return record


@caught_by(
    "an_event_before_the_accepted_one_is_late",
    "an_event_behind_or_ahead_of_the_clock_is_late",
    "what_is_forgotten_makes_its_copies_late",
)
class LateEventsAreNew(DictStore):
    def decide(self, stored: Record | None, item: RecordItem, now: int) -> machine.Decision:
        answer, record = super().decide(stored, item, now)
        if isinstance(answer, Late) and isinstance(item, Claim) and item.apart_us:
            return super().decide(None, replace(item, apart_us=0), now)
        return answer, record


@caught_by("equal_events_near_in_time_are_one")
class OnlyLooksBack(DictStore):
    """Forgets that events come out of order: one before the accepted one is another."""

    def decide(self, stored: Record | None, item: RecordItem, now: int) -> machine.Decision:
        earlier = (
            isinstance(item, Claim)
            and item.event_time_us is not None
            and stored is not None
            and stored.anchor_us is not None
            and item.event_time_us < stored.anchor_us
        )
        return super().decide(None if earlier else stored, item, now)


@caught_by("equal_events_apart_in_time_are_two")
class TimesAreIgnored(Bent):
    def bend(self, item: RecordItem, stored: Record | None, now: int) -> RecordItem:
        return replace(item, apart_us=0) if isinstance(item, Claim) else item


@caught_by("equal_events_apart_in_time_are_two")
class EveryCopyMovesTheAnchor(DictStore):
    """A steady stream then yields one event for ever, instead of one in each window."""

    def decide(self, stored: Record | None, item: RecordItem, now: int) -> machine.Decision:
        answer, record = super().decide(stored, item, now)
        if isinstance(answer, Busy) and isinstance(item, Claim) and stored is not None and item.apart_us:
            later = max(stored.anchor_us or 0, item.event_time_us or 0)
            return answer, replace(stored, anchor_us=later)
        return answer, record


@caught_by("a_repeat_waits_for_the_former", "a_repeat_does_not_end_what_must_be_decided")
class RepeatOverwritesTheFormer(DictStore):
    def decide(self, stored: Record | None, item: RecordItem, now: int) -> machine.Decision:
        answer, record = super().decide(stored, item, now)
        if (
            isinstance(answer, Busy)
            and isinstance(item, Claim)
            and stored is not None
            and stored.anchor_us is not None
            and item.event_time_us is not None
            and item.event_time_us - stored.anchor_us >= item.apart_us > 0
        ):
            return super().decide(None, item, now)
        return answer, record


@caught_by("a_repeat_waits_for_the_former", "a_repeat_does_not_end_what_must_be_decided")
class RepeatIsCalledRecoverable(DictStore):
    """Whoever may drop what is recoverable then drops an event that nobody has."""

    def decide(self, stored: Record | None, item: RecordItem, now: int) -> machine.Decision:
        answer, record = super().decide(stored, item, now)
        if isinstance(answer, Busy) and isinstance(item, Claim) and item.apart_us:
            return replace(answer, recoverable=True), record
        return answer, record


@caught_by("an_event_time_window_counts_from_the_event", "what_is_forgotten_makes_its_copies_late")
class ForgetsTooEarly(Bent):
    def bend_new(self, record: Record, item: RecordItem) -> Record:
        if record.anchor_us is not None:
            return replace(record, expires_at_us=min(record.expires_at_us, record.anchor_us + 1_000_000))
        return record


# --- what a record carries ----------------------------------------------------------------------


@caught_by("a_repeated_step_is_kept_once")
class StepOverwrites(Bent):
    def bend_write(self, stored: Record, record: Record, item: RecordItem, now: int) -> Record:
        if isinstance(item, Renew) and item.step is not None:
            return replace(record, steps=tuple((dict(record.steps) | dict([item.step])).items()))
        return record


@caught_by("steps_are_given_to_the_next_attempt", "a_released_key_is_free_at_once")
class StepsLostOnRelease(Bent):
    def bend_write(self, stored: Record, record: Record, item: RecordItem, now: int) -> Record:
        return replace(record, steps=()) if isinstance(item, Settle) and item.to == "released" else record


@caught_by("a_journal_is_written_only_if_new")
class JournalOverwritten(Bent):
    def bend_write(self, stored: Record, record: Record, item: RecordItem, now: int) -> Record:
        if isinstance(item, Claim) and item.journal is not None:
            return replace(record, journal=item.journal)
        return record


@caught_by("values_come_back_byte_for_byte")
class MissingIsEmpty(Bent):
    def bend_new(self, record: Record, item: RecordItem) -> Record:
        return replace(record, value=record.value or b"")


@caught_by("values_come_back_byte_for_byte")
class EmptyIsMissing(Bent):
    def bend_new(self, record: Record, item: RecordItem) -> Record:
        return replace(record, value=record.value or None)
