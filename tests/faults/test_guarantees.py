"""The page about guarantees says what the tested table says, and nothing stronger."""

import pytest

from tests.faults import render_guarantees
from tests.faults.table import GUARANTEES, NEVER, ONCE, POWER_FAILS, STEPS, TWICE, WINDOWS


def test_the_page_is_rendered_from_the_table() -> None:
    assert render_guarantees.PAGE.read_text(encoding="utf-8") == render_guarantees.page(), (
        "run python -m tests.faults.render_guarantees"
    )


def test_every_mode_has_its_sentence_and_every_window_its_row() -> None:
    assert list(render_guarantees.PROMISES) == list(GUARANTEES) == list(render_guarantees.USE_FOR)
    assert all(list(cells) == list(WINDOWS) for cells in GUARANTEES.values())
    page = render_guarantees.page()
    for title in [*GUARANTEES, *WINDOWS.values(), *STEPS, *POWER_FAILS]:
        assert f"| {title} |" in page or f"| {title} " in page


def test_the_strongest_promise_is_refused_where_the_table_does_not_show_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(GUARANTEES["inbox"], "after_effect", TWICE)
    with pytest.raises(AssertionError, match="inbox"):
        render_guarantees.page()


def test_a_cell_that_changes_changes_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    before = render_guarantees.page()
    monkeypatch.setitem(GUARANTEES["quarantine"], "after_effect", TWICE)
    assert render_guarantees.page() != before


def test_only_inbox_a_keyed_sink_and_marks_have_one_effect_everywhere() -> None:
    always = [mode for mode, cells in GUARANTEES.items() if set(cells.values()) <= {ONCE, NEVER}]
    assert always == ["inbox", "lease, keyed sink", "transaction, marks"]
