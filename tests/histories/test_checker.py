"""The checker of histories: what it accepts, what it finds out, and what it prints."""

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from semel.core.commands import Answer, Claim, Granted, Item, Known, Lookup, RecordItem, Renew, Settle
from semel.core.machine import decide
from semel.testing import histories
from semel.testing.histories import HistoryCall, RecordingStore, check_history, read_history
from semel.types import Absent, Busy, Completed, Id, Lost, Record
from tests.contract.dict_store import DictStore
from tests.contract.mutants import GetThenSet

ID: Id = ("", "billing", "evt_1")
ALICE, BOB = b"alice" * 3, b"bob" * 5
LEASE_US = 50_000
WINDOW_US = 3_600_000_000
START_US = 1_800_000_000_000_000
MS = 1_000


class Told:
    """A history written by hand: times in milliseconds; the machine answers at the time that is given."""

    def __init__(self) -> None:
        self.calls: list[HistoryCall] = []
        self.record: Record | None = None

    def call(
        self,
        item: RecordItem,
        begun_ms: float,
        ended_ms: float,
        *,
        at_ms: float | None = None,
        answer: Any = None,
        heard: bool = True,
        effect: bool = True,
    ) -> Any:
        """Add a call that takes effect at a time, with the machine's answer or another."""
        if effect:
            at_us = START_US + round(((begun_ms + ended_ms) / 2 if at_ms is None else at_ms) * MS)
            found, written = decide(self.record, item, at_us)
            self.record = written or self.record
            answer = found if answer is None else answer
        call = HistoryCall(
            worker="alice" if getattr(item, "owner", ALICE) == ALICE else "bob",
            item=item,
            begun_ns=round(begun_ms * 1e6),
            clock_us=(START_US + round(begun_ms * MS), 0),
        )
        if heard:
            ended = {"ended_ns": round(ended_ms * 1e6), "answer": answer}
            call = replace(call, **ended, clock_us=(call.clock_us[0], START_US + round(ended_ms * MS)))
        self.calls.append(call)
        return answer

    def check(self) -> histories.CheckedHistory:
        return check_history({ID: self.calls}, skew_us=0, repeats_max=0)


def claim(owner: bytes, **more: Any) -> Claim:
    return Claim(ID, owner, LEASE_US, WINDOW_US, **more)


def settle(owner: bytes, fence: int, to: Any = "done", value: bytes | None = b"r1") -> Settle:
    return Settle(ID, owner, fence, to, value, WINDOW_US, LEASE_US)


def test_calls_one_after_the_other_are_explained() -> None:
    told = Told()
    granted = told.call(claim(ALICE), 0, 2)
    told.call(claim(BOB), 3, 4)
    told.call(Renew(ID, ALICE, granted.fence, LEASE_US), 5, 6)
    told.call(settle(ALICE, granted.fence), 7, 8)
    told.call(claim(BOB), 9, 10)
    told.call(Lookup(ID), 11, 12)
    assert told.check().explained


def test_calls_at_once_may_come_in_either_order() -> None:
    told = Told()
    told.call(claim(BOB), 0, 10, at_ms=6)
    told.call(claim(ALICE), 1, 9, at_ms=7)
    assert told.check().explained
    told.calls.reverse()
    assert told.check().explained
    assert told.check().overlapping == 1


def test_two_grants_at_once_are_not_explained() -> None:
    told = Told()
    told.call(claim(ALICE), 0, 5)
    told.record = None
    told.call(claim(BOB), 1, 6)
    (found,) = told.check().unexplained
    assert [type(call.answer) for call in found.calls] == [Granted, Granted]


def test_an_answer_must_fit_the_time_between_begin_and_end() -> None:
    told = Told()
    told.call(claim(ALICE), 0, 2, at_ms=30)
    assert not told.check().explained
    assert check_history({ID: told.calls}, skew_us=30 * MS).explained


def test_a_stale_look_is_not_explained() -> None:
    told = Told()
    granted = told.call(claim(ALICE), 0, 2)
    told.call(settle(ALICE, granted.fence), 3, 4)
    told.call(Lookup(ID), 5, 6, answer=Absent(), effect=False)
    (found,) = told.check().unexplained
    assert [type(call.answer) for call in found.calls] == [Absent]
    assert found.begin.record is not None  # the calls before lead to it, in any order
    assert found.begin.record.state == "done"
    story = str(found)
    assert "look up -> absent" in story
    assert "the store: absent" in story


def test_a_lost_reply_may_have_had_its_effect_or_not() -> None:
    for effect in (True, False):
        told = Told()
        told.call(claim(ALICE), 0, 2, heard=False, effect=effect)
        told.call(claim(BOB), 10, 12)
        told.call(Lookup(ID), 13, 14)
        assert told.check().explained
        assert told.check().unanswered == 1


def test_a_lost_reply_may_take_effect_late() -> None:
    told = Told()
    told.call(claim(BOB), 10, 12)
    late = Told()
    late.call(claim(ALICE), 0, 2, heard=False, effect=False)
    late.calls += told.calls
    late.record = told.record
    fence = told.calls[0].answer.fence
    late.call(settle(BOB, fence, "released", None), 20, 22)
    late.call(claim(ALICE), 30, 32, at_ms=31, heard=False)  # that of the beginning, as it may arrive
    late.calls.pop()
    late.call(claim(BOB), 40, 42)
    assert late.check().explained
    assert isinstance(late.calls[-1].answer, Busy)


def test_a_lost_reply_explains_no_lease_that_it_cannot_have_had() -> None:
    told = Told()
    told.call(claim(ALICE), 0, 2, heard=False)
    told.call(claim(BOB), 10, 12, answer=Busy(0.2), effect=False)  # longer than the lease of 50 ms
    assert not told.check().explained


def test_a_lease_that_ends_in_the_middle_of_a_call_leaves_both_answers_open() -> None:
    for at_ms, kinds in ((49, (Busy, Completed)), (53, (Granted, Lost))):
        told = Told()
        granted = told.call(claim(ALICE), 0, 2)
        told.call(claim(BOB), 48, 54, at_ms=at_ms)
        told.call(settle(ALICE, granted.fence), 56, 58)
        assert told.check().explained
        assert tuple(type(call.answer) for call in told.calls[1:]) == kinds


def test_a_request_that_the_store_sent_again_is_explained_only_if_it_may_have_been() -> None:
    told = Told()
    told.call(claim(ALICE), 0, 9, at_ms=3)
    told.calls.clear()
    granted = told.call(claim(ALICE), 0, 9, at_ms=6)
    assert granted.lease_until_us - LEASE_US > granted.fence
    assert not told.check().explained
    assert check_history({ID: told.calls}, skew_us=0, repeats_max=1).explained


@pytest.mark.parametrize(
    ("at", "wrong"),
    [
        (1, Busy(0.001)),
        (2, Completed(at_us=START_US + 7 * MS + 500, already=True)),
        (3, Known("done", b"other", START_US + MS, START_US + 7 * MS + 500, START_US + MS)),
        (3, Lost()),
    ],
)
def test_one_wrong_answer_is_found_out(at: int, wrong: Any) -> None:
    told = Told()
    granted = told.call(claim(ALICE), 0, 2)
    told.call(claim(BOB), 3, 4)
    told.call(settle(ALICE, granted.fence), 7, 8)
    told.call(claim(BOB), 9, 10)
    assert told.check().explained
    told.calls[at] = replace(told.calls[at], answer=wrong)
    assert not told.check().explained


def test_a_search_that_is_too_long_decides_nothing() -> None:
    told = Told()
    told.call(claim(ALICE), 0, 2)
    told.call(claim(BOB), 3, 4)
    result = check_history({ID: told.calls}, steps_max=1)
    assert result.undecided == [ID]
    assert not result.explained
    assert "not decided" in str(result)


# --- stores that are racy on purpose ---


class ReadsThenWrites(GetThenSet):
    """As a program that gets, thinks and sets: all callers at the barrier read before the first one writes."""

    capabilities = DictStore.capabilities


def race(store: DictStore, path: Path) -> None:
    """As many callers as the store has places at its barrier claim the same key."""
    recorded = RecordingStore(store, path, "racer")
    recorded.open()
    threads = [
        threading.Thread(target=recorded.send, args=([claim(bytes([number]) * 16)],), name=f"t{number}")
        for number in range(GetThenSet.callers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorded.close()


def test_a_racy_store_is_found_out_and_its_shortest_history_told(tmp_path: Path) -> None:
    race(ReadsThenWrites(), tmp_path / "racy")
    result = check_history(read_history([tmp_path / "racy"]))
    (found,) = result.unexplained
    assert len(found.calls) == 2  # of eight
    assert all(isinstance(call.answer, Granted) for call in found.calls)
    assert found.left_out == GetThenSet.callers - 2
    story = str(found).splitlines()
    assert story[0] == "No order of these calls explains the answers about key 'evt_1'"
    assert any("granted: attempt 1" in line for line in story)
    assert any(line.startswith("The order that explains most: ") for line in story)
    assert any("with busy for" in line and "the store: granted" in line for line in story)


class DropsAWrite(DictStore):
    """Answers a completion, and loses it: as a server that confirms before it has stored."""

    def decide(self, stored: Record | None, item: RecordItem, now: int) -> Any:
        answer, written = super().decide(stored, item, now)
        return answer, None if isinstance(item, Settle) else written


class AnswersFromACopy(DictStore):
    """Looks come from a copy that is one write behind: as a replica."""

    behind: Record | None = None

    def send(self, items: Sequence[Item], /) -> list[Answer]:
        if isinstance(items[0], Lookup):
            return [self.behind or Absent()]
        self.behind = self.records.get(ID)
        return super().send(items)


@pytest.mark.parametrize("broken", [DropsAWrite, AnswersFromACopy])
def test_a_store_that_loses_or_delays_writes_is_found_out(broken: type[DictStore], tmp_path: Path) -> None:
    kinds: list[type[DictStore]] = [DictStore, broken]
    for number, kind in enumerate(kinds):
        path = tmp_path / str(number)
        store = RecordingStore(kind(), path)
        store.open()
        (granted,) = store.send([claim(ALICE)])
        store.send([settle(ALICE, granted.fence)])
        store.send([Lookup(ID)])
        store.close()
        assert check_history(read_history([path])).explained == (kind is DictStore)


# --- files ---


def test_the_command_prints_the_story_and_fails(tmp_path: Path) -> None:
    race(ReadsThenWrites(), tmp_path / "racy")
    command = [sys.executable, "-m", "semel.testing.histories"]
    done = subprocess.run([*command, str(tmp_path / "racy")], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "No order of these calls explains" in done.stdout
    race(DictStore(), tmp_path / "sound")
    done = subprocess.run([*command, str(tmp_path / "sound")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the machine explains every answer" in done.stdout


def test_a_file_of_a_killed_process_ends_anywhere(tmp_path: Path) -> None:
    race(DictStore(), tmp_path / "whole")
    text = (tmp_path / "whole").read_bytes()
    for cut in (len(text) - 1, len(text) - 40):
        (tmp_path / "torn").write_bytes(text[:cut])
        result = check_history(read_history([tmp_path / "torn"]))
        assert result.unanswered == 1
        assert result.explained


@pytest.mark.parametrize("text", [b"{}\n", b"\xff\n", b'{"call": 1, "at_ns": 1, "clock_us": 1}\n'])
def test_a_file_of_something_else_is_refused(
    text: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "odd").write_bytes(text)
    with pytest.raises(SystemExit) as refused:
        histories.main([os.fspath(tmp_path / "odd")])
    assert refused.value.code == 2
    assert "line 1 is not of a recorded history" in capsys.readouterr().err
