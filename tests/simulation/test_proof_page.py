"""The figures of the page about proofs are those of the kept runs, and what they say is still so."""

import msgspec
import pytest

from benchmarks.soak_page import Soak, plot
from semel.testing.explore import SCENES, tell
from tests.contract.machine_mutants import Change, changes
from tests.simulation import mutant_table
from tests.simulation.render_exploration import PAGE
from tests.simulation.render_proof import SOAK, render

CHANGES = {change.name: change for change in changes()}
FUNCTIONS = sorted({name.partition(": ")[0] for name in CHANGES})


def test_the_page_has_the_figures_of_the_kept_runs() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert render(text) == text, "run `make render`"


def test_the_picture_is_that_of_the_kept_soak() -> None:
    kept = msgspec.json.decode(SOAK.read_bytes(), type=Soak)
    assert SOAK.with_suffix(".svg").read_text(encoding="utf-8") == plot(kept)
    assert kept.minutes >= 30
    assert [place.name for place in kept.places] == ["sqlite", "redis", "postgres", "serve"]
    assert all(place.sound for place in kept.places)
    assert all(place.total.events >= 0.9 * kept.minutes * 60 * kept.rate for place in kept.places)


def test_make_soak_leaves_the_kept_soak_alone() -> None:
    """Or the tests that it runs afterwards would compare the page with a run of today."""
    recipe = (SOAK.parents[2] / "Makefile").read_text(encoding="utf-8")
    assert "benchmarks.soak --minutes $(MINUTES) --rate $(RATE) --out build/soak\n" in recipe


def test_every_change_of_the_machine_has_a_fate() -> None:
    assert set(mutant_table.read()) == set(CHANGES), "run `python -m tests.simulation.mutant_table`"


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_schedule_that_kills_a_change_still_does(function: str) -> None:
    for name, fate in mutant_table.read().items():
        if not name.startswith(f"{function}: ") or not fate.scene:
            continue
        assert _breaks(CHANGES[name], fate), name


def _breaks(change: Change, fate: mutant_table.Fate) -> bool:
    rules = change.module().decide
    if fate.kind.startswith("raises "):
        return True  # it raises somewhere in the scene: to find where takes a whole exploration
    assert fate.scene in SCENES
    return tell(fate.scene, mutant_table.NARROW[fate.scene], fate.path, rules=rules)[-1].startswith(
        f"VIOLATION {fate.kind}: "
    )
