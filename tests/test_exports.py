"""What `import semel` offers is what is promised: sorted, whole, resolvable, and drawn as it is."""

import importlib
import inspect
import re
from collections.abc import Iterator

import pytest

import semel
from semel import errors, policy, types
from tests import render_api, render_reference

PROMISED = {
    # the verbs and the clients
    "AsyncSemel", "Policy", "Semel", "aopen", "current", "keys", "open", "step",
    # what comes in and what comes out
    "Busy", "Claimed", "Completed", "Delivery", "Done", "Errored", "Failed", "Late", "Lost", "Mismatch",
    "Outcome", "Unavailable", "Unknown",
    # what a handler raises
    "GiveUp", "NotApplied", "SemelError",
}  # fmt: skip
"""The names that users write; one of them missing breaks somebody's program."""

PUBLIC_MODULES = [errors, policy, types]


def kind_then_name(name: str) -> tuple[bool, bool, str]:
    """Constants first, then classes, then functions: the order that the linter keeps too."""
    return (not name.isupper(), not name[0].isupper(), name)


def test_all_is_sorted_and_has_no_name_twice() -> None:
    assert list(semel.__all__) == sorted(set(semel.__all__), key=kind_then_name)


@pytest.mark.parametrize("name", semel.__all__)
def test_every_exported_name_resolves(name: str) -> None:
    assert getattr(semel, name) is not None


def test_what_is_promised_is_exported() -> None:
    assert PROMISED.difference(semel.__all__) == set()


def test_dir_shows_what_is_exported() -> None:
    assert set(semel.__all__).difference(dir(semel)) == set()


def test_an_unknown_name_is_an_attribute_error() -> None:
    name = "no_such_name"
    with pytest.raises(AttributeError, match=name):
        getattr(semel, name)


def test_the_version_is_the_installed_one() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", semel.__version__)


@pytest.mark.parametrize("module", PUBLIC_MODULES, ids=lambda module: module.__name__)
def test_public_modules_list_what_they_define(module: object) -> None:
    assert inspect.ismodule(module)
    defined = {
        name
        for name, thing in vars(module).items()
        if not name.startswith("_") and inspect.isclass(thing) and thing.__module__ == module.__name__
    }
    assert defined.difference(module.__all__) == set()
    assert {name for name in module.__all__ if not hasattr(module, name)} == set()


def test_errors_have_one_place() -> None:
    assert set(errors.__all__) & set(semel.__all__) == {"GiveUp", "NotApplied", "SemelError"}


def test_the_page_of_public_names_is_fresh() -> None:
    assert render_api.PAGE.read_text(encoding="utf-8") == render_api.page(), "run: make render"


def test_the_reference_is_made_from_the_docstrings() -> None:
    text = render_reference.page()
    assert render_reference.PAGE.read_text(encoding="utf-8") == text, "run: make render"
    verbs = ("run", "run_many", "guard", "claim", "inbox", "outbox")
    assert [verb for verb in verbs if f"#### Semel.{verb}\n" not in text] == []


def test_the_front_door_stays_small() -> None:
    assert len(semel.__all__) <= 50


def drawn_tree(text: str) -> Iterator[tuple[str, str | None]]:
    """Read `├── Name   words` lines; yield each name with the one it hangs on."""
    above: dict[int, str] = {}
    for line in text.splitlines():
        match = re.match(r"( {4}(?:[│ ] {3})*)(├── |└── )?([A-Z]\w+)(?: {2,}|$)", line)
        if match:
            depth = len(match[1]) // 4 - 1 + (1 if match[2] else 0)
            above[depth] = match[3]
            yield match[3], above[depth - 1] if depth else None


def test_the_tree_of_errors_is_drawn_as_it_is() -> None:
    drawn = dict(drawn_tree(inspect.getdoc(errors) or ""))
    real = {
        name: next((base.__name__ for base in thing.__bases__ if base.__module__ == errors.__name__), None)
        for name in errors.__all__
        for thing in [getattr(errors, name)]
    }
    assert drawn == real


def test_the_contract_for_other_stores_is_public() -> None:
    assert importlib.import_module("semel.testing.store_contract") is not None
