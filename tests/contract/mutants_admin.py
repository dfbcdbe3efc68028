"""More stores that are broken on purpose: names, batches, marks, settings, notifications, durability."""

from collections.abc import Hashable, Sequence
from fnmatch import fnmatchcase
from typing import Any
from unicodedata import normalize

from msgspec.structs import replace

from semel.core import machine
from semel.core.commands import (
    Admit,
    Answer,
    Claim,
    Count,
    Item,
    Known,
    Mark,
    Marked,
    RecordItem,
    Scan,
    Settle,
    SetWindow,
    SwitchMode,
)
from semel.core.protocols import Capabilities
from semel.types import Id, Mode, Record, Stats
from tests.contract.dict_store import DictStore
from tests.contract.mutants import MUTANTS, caught_by

__all__ = ["MUTANTS"]


class CountAll(Count, frozen=True, gc=False):
    """Counts whatever there is."""

    def covers(self, tenant: str, consumer: str) -> bool:
        return self.tenant in (None, tenant)


# --- names --------------------------------------------------------------------------------------


@caught_by("tenants_and_consumers_are_apart")
class TenantIgnored(DictStore):
    def place(self, record_id: Id) -> Hashable:
        return record_id[1:]


@caught_by("tenants_and_consumers_are_apart", "marks_of_others_are_apart")
class ConsumerIgnored(DictStore):
    def place(self, record_id: Id) -> Hashable:
        return (record_id[0], record_id[2])


@caught_by("names_that_read_alike_are_apart")
class NamesAreJoined(DictStore):
    def place(self, record_id: Id) -> Hashable:
        return "".join(record_id)


@caught_by("names_that_read_alike_are_apart")
class NamesAreJoinedByAColon(DictStore):
    def place(self, record_id: Id) -> Hashable:
        return ":".join(record_id)


@caught_by("keys_are_taken_as_they_are", "odd_keys_are_marked_apart")
class KeysAreFolded(DictStore):
    def place(self, record_id: Id) -> Hashable:
        return (*record_id[:2], normalize("NFC", record_id[2]).strip())


@caught_by("keys_are_taken_as_they_are", "odd_keys_are_marked_apart")
class KeysAreCut(DictStore):
    def place(self, record_id: Id) -> Hashable:
        return (*record_id[:2], record_id[2][:255])


# --- batches ------------------------------------------------------------------------------------


@caught_by("answers_come_by_position")
class AnswersInTheOrderOfWork(DictStore):
    def send(self, items: Sequence[Item], /) -> list[Answer]:
        return super().send(sorted(items, key=lambda item: not isinstance(item, Settle)))


@caught_by("every_item_has_its_own_owner_and_times")
class OneLeasePerBatch(DictStore):
    def send(self, items: Sequence[Item], /) -> list[Answer]:
        first = next((item for item in items if isinstance(item, Claim)), None)
        if first is None:
            return super().send(items)
        return super().send(
            [
                replace(item, lease_us=first.lease_us, window_us=first.window_us)
                if isinstance(item, Claim)
                else item
                for item in items
            ]
        )


@caught_by("every_item_has_its_own_owner_and_times")
class OneOwnerPerBatch(DictStore):
    def send(self, items: Sequence[Item], /) -> list[Answer]:
        owner = next((item.owner for item in items if isinstance(item, Claim)), b"")
        return super().send(
            [replace(item, owner=owner) if isinstance(item, Claim) else item for item in items]
        )


# --- marks --------------------------------------------------------------------------------------


@caught_by("each_key_of_a_mark_is_its_own")
class MarkIsAllOrNothing(DictStore):
    def mark(self, item: Mark, now: int) -> Marked:
        places = [self.place((item.tenant, item.consumer, key)) for key in item.keys]
        if any(place in self.marks and self.marks[place][1] > now for place in places):
            return Marked([False] * len(places))
        return super().mark(item, now)


@caught_by("a_mark_expires")
class MarkIsProlonged(DictStore):
    def mark_key(self, record_id: Id, item: Mark, now: int) -> bool:
        first = super().mark_key(record_id, item, now)
        self.marks[self.place(record_id)] = (record_id, now + item.window_us)
        return first


@caught_by("a_mark_may_start_its_window_again", "a_purge_leaves_what_was_seen_again_alone")
class MarkIsNotRefreshed(DictStore):
    def mark_key(self, record_id: Id, item: Mark, now: int) -> bool:
        return super().mark_key(record_id, replace(item, refresh=False), now)


@caught_by("a_mark_is_never_shortened")
class MarkIsShortened(DictStore):
    def mark_key(self, record_id: Id, item: Mark, now: int) -> bool:
        first = super().mark_key(record_id, item, now)
        if item.refresh:
            self.marks[self.place(record_id)] = (record_id, now + item.window_us)
        return first


@caught_by(
    "a_sighting_starts_the_window_again", "a_longer_window_of_a_sighting_counts",
    "a_purge_leaves_what_was_seen_again_alone", "sightings_in_a_batch_are_each_their_own",
)  # fmt: skip
class SightingIsNotWritten(DictStore):
    def decide(self, stored: Record | None, item: RecordItem, now: int) -> machine.Decision:
        answer, record = super().decide(stored, item, now)
        return answer, None if isinstance(answer, Known) else record


@caught_by("other_sightings_move_nothing")
class EverySightingMovesTheWindow(DictStore):
    def decide(self, stored: Record | None, item: RecordItem, now: int) -> machine.Decision:
        return super().decide(stored, replace(item, refresh=True) if isinstance(item, Claim) else item, now)


@caught_by("a_window_without_end_keeps_the_key", "a_key_without_end_outlasts_decades")
class NinetyDaysAreForever(DictStore):
    """Takes every window for one of 90 days at most."""

    def decide(self, stored: Record | None, item: RecordItem, now: int) -> machine.Decision:
        if isinstance(item, Claim | Settle):
            item = replace(item, window_us=min(item.window_us, 90 * 86400 * 10**6))
        return super().decide(stored, item, now)


@caught_by("a_mark_expires")
class MarkNeverExpires(DictStore):
    def mark_key(self, record_id: Id, item: Mark, now: int) -> bool:
        return super().mark_key(record_id, item, 0)


# --- settings and scans -------------------------------------------------------------------------


@caught_by("a_mode_is_not_switched_under_running_claims")
class ModeIsAlwaysSwitched(DictStore):
    def switch_mode(self, item: SwitchMode, now: int) -> int:
        self.modes[item.tenant, item.consumer] = item.mode
        return 0


@caught_by("statistics_leave_out_records_of_semel_itself")
class RecordsOfSemelAreCounted(DictStore):
    def count(self, item: Count, now: int) -> Stats:
        return super().count(CountAll(item.tenant), now)


@caught_by("a_consumers_kind_of_ids_is_recorded_once")
class IdsOfTheLastOneCount(DictStore):
    def admit(self, item: Admit) -> Mode:
        self.ids[item.tenant, item.consumer] = item.ids
        return super().admit(item)


@caught_by("a_new_window_leaves_what_is_stored")
class NewWindowMovesWhatIsStored(DictStore):
    def set_window(self, item: SetWindow, now: int) -> None:
        super().set_window(replace(item, existing=True), now)


@caught_by("a_prefix_is_no_pattern")
class PrefixIsAPattern(DictStore):
    def fits(self, record: Record, item: Scan, now: int) -> bool:
        return super().fits(record, replace(item, prefix=""), now) and fnmatchcase(
            record.key, f"{item.prefix}*"
        )


@caught_by("orphans_with_a_journal_are_found")
class RunningClaimsAreSwept(DictStore):
    def fits(self, record: Record, item: Scan, now: int) -> bool:
        journaled = not item.orphaned or record.journal is not None
        return super().fits(record, replace(item, orphaned=False), now) and journaled


# --- who is told, and what lasts ----------------------------------------------------------------


@caught_by("watchers_are_notified_of_changes_that_end_a_wait")
class NobodyIsTold(DictStore):
    def watch(self, listener: Any, /) -> Any:
        return lambda: None


@caught_by("a_watch_that_ended_gets_no_notification")
class WatchersNeverLeave(DictStore):
    def watch(self, listener: Any, /) -> Any:
        super().watch(listener)
        return lambda: None


@caught_by("answers_survive_reopening", "marks_and_settings_survive_reopening")
class DurableInName(DictStore):
    """Says that it is durable, and is not: closing it loses everything."""

    capabilities = Capabilities(durable=True, notifies=True, instant=True, endless=True, refreshes=True)

    def close(self) -> None:
        for table in (self.records, self.marks, self.windows, self.modes):
            table.clear()
