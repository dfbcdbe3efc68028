"""Every schedule within the bounds: no promise is broken, every broken protocol is, and the page has the figures."""

import os
import re
import subprocess
import sys

import pytest

from semel.testing.explore import MUTANTS, SCENES, Bounds, explore, main, scene_of, tell
from tests.simulation.render_exploration import PAGE, page, row
from tests.simulation.render_proof import protocol_row

SOAK = bool(os.environ.get("SEMEL_SOAK"))
STATES_MAX_WIDE = 2_000_000
"""Of the wide run of a scene: what is left out beyond it is said, not hidden."""


@pytest.mark.parametrize("scene", SCENES)
def test_no_schedule_breaks_a_promise(scene: str) -> None:
    result = explore(scene)
    print(result)  # noqa: T201  # shown with -s and on failure
    assert result.violation is None, "\n".join(tell(scene, None, result.path))
    assert result.complete
    assert row(SCENES[scene], result) in PAGE.read_text(encoding="utf-8").splitlines(), "run `make render`"


def test_the_page_has_a_row_for_each_scene_and_no_other() -> None:
    text = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z-]+)` \| [^0-9].* \| [0-9,]+ \|", text, re.MULTILINE)
    assert rows == list(SCENES)
    assert page(text, None) == text


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_broken_protocol_has_a_short_story(mutant: str) -> None:
    result = explore(scene_of(mutant), mutant=mutant)
    assert result.violation is not None
    assert len(result.path) <= 8
    assert protocol_row(mutant, result) in PAGE.read_text(encoding="utf-8").splitlines(), "run `make render`"
    story = tell(scene_of(mutant), None, result.path, mutant=mutant)
    assert story[-1].startswith(f"VIOLATION {result.violation.kind}: ")


if SOAK:

    @pytest.mark.timeout(0)
    @pytest.mark.parametrize("scene", SCENES)
    def test_no_wide_schedule_breaks_a_promise(scene: str) -> None:
        result = explore(scene, SCENES[scene].wide, states_max=STATES_MAX_WIDE)
        print(result)  # noqa: T201  # shown with -s and on failure
        assert result.violation is None, "\n".join(tell(scene, SCENES[scene].wide, result.path))


def test_bounds_are_arguments() -> None:
    none = Bounds(kills=0, lost=0, late=0, ticks=0, stalls=0)
    calm = explore("lease-plain", none)
    assert calm.violation is None
    assert calm.states < explore("lease-plain", Bounds(deliveries=1)).states
    short = explore("lease-plain", states_max=100)
    assert not short.complete
    assert "as far as was explored" in str(short)


def test_workers_have_no_names() -> None:
    """Two workers that swap their places are one state: with one more of them there are not twice as many."""
    bounds = Bounds(kills=0, lost=0, late=0, ticks=0, stalls=0)
    two, three = (
        explore("lease-plain", Bounds(**{**_fields(bounds), "deliveries": each})).states for each in (2, 3)
    )
    assert two < three < 3 * two


def _fields(bounds: Bounds) -> dict[str, int]:
    return {name: getattr(bounds, name) for name in bounds.__struct_fields__}


def test_a_story_is_printed_with_the_command_that_plays_it_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--mutant", "complete without fence"]) == 1
    printed = capsys.readouterr().out
    assert "a promise is broken" in printed
    command = printed.split("play it again with: ")[1].strip()
    again = subprocess.run(
        [sys.executable, *_words(command)[1:]], capture_output=True, text=True, check=False
    )
    assert again.returncode == 1, again.stderr
    told = [line.strip() for line in printed.splitlines() if line.startswith("  ")]
    assert [line.strip() for line in again.stdout.splitlines()] == told
    assert told[-1].startswith("VIOLATION stranger")


def _words(command: str) -> list[str]:
    return [quoted or plain for quoted, plain in re.findall(r"'([^']*)'|(\S+)", command)]


def test_a_sound_scene_is_a_success(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--scene", "inbox"]) == 0
    assert "every promise holds" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["--scene", "wishful"],
        ["--mutant", "none such"],
        ["--replay", "0.1"],
        ["--scene", "inbox", "--replay", "999"],
        ["--scene", "inbox", "--replay", "x"],
    ],
)
def test_a_wrong_argument_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(arguments)
    assert refused.value.code == 2
    assert "explore: error: " in capsys.readouterr().err
