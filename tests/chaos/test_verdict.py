"""The verdict: what the table of guarantees allows after the faults that hit an event, and no more."""

import pytest

from semel.observe.guarantees import cells
from semel.testing.chaos.ledger import ChaosLedger, FaultNote, HandlerCall, Stage
from semel.testing.chaos.lines import judge_lines
from semel.testing.chaos.messages import Phase
from semel.testing.chaos.report import build_command
from semel.testing.chaos.settings import ChaosSettings
from semel.testing.chaos.verdict import EventResult, judge_events, judge_windows
from semel.types import Mode


def judge(
    mode: Mode,
    effects: int,
    faults: list[tuple[str, Phase | None, Stage]],
    *,
    unknown: bool = False,
    sink: str = "plain",
    errors: int = 0,
    dead: str = "",
) -> EventResult:
    ledger = ChaosLedger()
    ledger.faults = [FaultNote(kind, 0.0, 0, "e", phase, hit={"e": stage}) for kind, phase, stage in faults]
    ledger.calls["e"] = [HandlerCall("e", 0, 1, 0.0, ended_s=1.0, error="no") for _ in range(errors)]
    ledger.dead = {"e": dead} if dead else {}
    promised = cells(mode, sink)  # type: ignore[arg-type]
    [result] = judge_events(["e"], {"e": effects}, {"e"} if unknown else set(), ledger, promised)
    return result


RETURNED: tuple[str, Phase | None, Stage] = ("kill", "returned", "returned")
CLAIMED: tuple[str, Phase | None, Stage] = ("kill", "claimed", "claimed")
BYSTANDER: tuple[str, Phase | None, Stage] = ("kill", None, "running")
PAUSED: tuple[str, Phase | None, Stage] = ("pause", "claimed", "claimed")
CUT_OFF: tuple[str, Phase | None, Stage] = ("store cut off", None, "received")
UNACKED: tuple[str, Phase | None, Stage] = ("ack lost", "recorded", "recorded")


@pytest.mark.parametrize(
    ("mode", "effects", "faults", "kept"),
    [
        ("lease", 1, [], True),
        ("lease", 2, [], False),
        ("lease", 0, [], False),
        ("lease", 2, [RETURNED], True),
        ("lease", 3, [RETURNED], False),
        ("lease", 3, [RETURNED, RETURNED], True),
        ("lease", 2, [CLAIMED], False),
        ("lease", 0, [CLAIMED], False),
        ("lease", 2, [BYSTANDER], True),
        ("lease", 2, [PAUSED], True),
        ("lease", 2, [CUT_OFF], True),
        ("lease", 2, [UNACKED], False),
        ("inbox", 1, [RETURNED, BYSTANDER, PAUSED, CUT_OFF], True),
        ("inbox", 2, [RETURNED, BYSTANDER, PAUSED, CUT_OFF], False),
        ("inbox", 0, [RETURNED], False),
        ("mark", 0, [CLAIMED], True),
        ("mark", 0, [], False),
        ("mark", 2, [BYSTANDER], False),
        ("quarantine", 2, [RETURNED, BYSTANDER], False),
    ],
)
def test_an_event_may_have_what_its_faults_explain(
    mode: Mode, effects: int, faults: list[tuple[str, Phase | None, Stage]], kept: bool
) -> None:
    result = judge(mode, effects, faults)
    assert result.kept is kept
    assert bool(result.why) is not kept


def test_in_quarantine_a_missing_effect_has_to_be_flagged() -> None:
    flagged = judge("quarantine", 0, [CLAIMED], unknown=True)
    assert (flagged.kept, flagged.state) == (True, "undecided")
    silent = judge("quarantine", 0, [CLAIMED])
    assert (silent.kept, silent.state) == (False, "lost")


def test_a_sink_that_honours_the_key_has_no_doubles() -> None:
    assert not judge("lease", 2, [RETURNED], sink="keyed").kept


def test_a_handler_that_raised_may_run_again_and_a_dead_letter_is_not_lost() -> None:
    assert judge("lease", 2, [], errors=1).kept
    failed = judge("lease", 0, [], errors=1, dead="failed")
    assert (failed.kept, failed.state) == (True, "failed")


def test_windows_show_the_effects_of_events_that_were_hit_only_there() -> None:
    ledger = ChaosLedger()
    ledger.faults = [
        FaultNote("kill", 0.0, 0, "a", "returned", hit={"a": "returned", "b": "running"}),
        FaultNote("kill", 1.0, 0, "b", "returned", hit={"b": "returned"}),
    ]
    promised = cells("lease", "plain")
    results = judge_events(["a", "b", "c"], {"a": 2, "b": 3, "c": 1}, set(), ledger, promised)
    windows = {window.window: window for window in judge_windows(results, promised)}
    hit = windows["after_effect"]
    assert (hit.events, hit.alone, hit.effects, hit.kept) == (2, 1, {2: 1}, True)
    assert (windows[""].events, windows[""].effects) == (1, {1: 1})


def call(key: str, lines: list[int], *, halted: int = 0, returned: bool = True) -> HandlerCall:
    ended = {"ended_s": 1.0} if returned else {"cut_s": 1.0}
    return HandlerCall(key, 0, 1, 0.0, lines, halted_line=halted, **ended)  # type: ignore[arg-type]


def test_the_line_of_the_effect_is_the_one_that_ran_as_often() -> None:
    ledger = ChaosLedger()
    ledger.calls = {
        "a": [call("a", [1, 2, 3], halted=3, returned=False), call("a", [1, 2, 3, 4])],
        "b": [call("b", [1, 2], halted=2, returned=False), call("b", [1, 2, 3, 4])],
        "c": [call("c", [1, 2, 3, 4])],
    }
    lines = {line.line: line for line in judge_lines(ledger, {"a": 2, "b": 1, "c": 1})}
    assert {number for number, line in lines.items() if line.is_effect} == {2}
    assert {number: line.events_repeated for number, line in lines.items()} == {1: 2, 2: 1, 3: 0, 4: 0}
    assert not any(line.is_effect for line in judge_lines(ledger, None))


def test_the_last_line_of_a_run_that_was_cut_elsewhere_may_have_run_or_not() -> None:
    ledger = ChaosLedger(line_first=1, line_last=2)
    ledger.calls = {
        "a": [call("a", [1, 2], returned=False), call("a", [1, 2])],
        "b": [call("b", [1, 2]), call("b", [1, 2])],
    }
    fitting = [line.line for line in judge_lines(ledger, {"a": 1, "b": 2}) if line.is_effect]
    assert fitting == [2]


def test_a_line_whose_call_was_cut_may_have_had_its_effect_or_not() -> None:
    ledger = ChaosLedger(line_first=1, line_last=4)
    ledger.calls = {
        "a": [call("a", [1, 2, 90], returned=False), call("a", [1, 2, 90, 91, 3])],
        "b": [call("b", [1, 2, 90, 91, 3], returned=False), call("b", [1, 2, 90, 91, 3])],
    }
    fitting = [line.line for line in judge_lines(ledger, {"a": 1, "b": 2}) if line.is_effect]
    assert fitting == [2, 3, 90, 91]


def test_an_effect_that_one_run_repeats_is_found_by_how_often_its_line_ran() -> None:
    """Line 2 opens a file, and Python reports it when the file is closed too; line 3 is a loop around the effect."""
    ledger = ChaosLedger(line_first=1, line_last=5)
    ledger.calls = {
        "a": [call("a", [1, 2, 3, 4, 3, 4, 3, 2, 5])],
        "b": [call("b", [1, 2, 3, 4, 3, 2, 5])],
        "c": [call("c", [1, 2, 3, 4], returned=False), call("c", [1, 2, 3, 4, 3, 2, 5])],
    }
    for effects_of_c in (1, 2):  # the line was under way when the first run was cut
        lines = {line.line: line for line in judge_lines(ledger, {"a": 2, "b": 1, "c": effects_of_c})}
        assert {number for number, line in lines.items() if line.is_effect} == {4}
        assert (lines[4].runs, lines[4].events_repeated) == (5, 2)
        assert (lines[3].runs, lines[3].events_repeated) == (4, 1)


def test_lines_that_fit_by_runs_are_not_counted_otherwise() -> None:
    ledger = ChaosLedger(line_first=1, line_last=3)
    ledger.calls = {
        "a": [call("a", [1, 2, 3, 2]), call("a", [1, 2], halted=2, returned=False)],
        "b": [call("b", [1, 2, 3, 2]), call("b", [1, 2, 3, 2])],
    }
    lines = {line.line: line for line in judge_lines(ledger, {"a": 1, "b": 2})}
    assert {number for number, line in lines.items() if line.is_effect} == {2, 3}
    assert (lines[2].runs, lines[2].events_repeated) == (3, 1)


def test_the_command_repeats_everything_but_passwords() -> None:
    settings = ChaosSettings(
        handler="app:charge", store="redis://me:secret@localhost/3", source="redis://h/0?stream=s&group=g",
        effects="sql:SELECT 1", sample='{"id": "{key}"}', seed=7, lease_s=1.0, faults=("ack lost",),
        force=True,
    )  # fmt: skip
    assert build_command(settings, 2) == (
        "semel chaos app:charge --seed 7 --rounds 2 --mode lease --store 'redis://me:***@localhost/3'"
        " --from 'redis://h/0?stream=s&group=g' --effects 'sql:SELECT 1' --sample '{\"id\": \"{key}\"}'"
        " --fault 'ack lost' --lease 1s --force"
    )
    new = ChaosSettings(handler="app:charge", store="sqlite:///somewhere.db", store_is_new=True)
    assert build_command(new, 1) == "semel chaos app:charge --seed 0 --rounds 1 --mode lease"
