"""A pytest plugin: the fixture `chaos` runs a handler through duplicates, kills, pauses and outages.

Name it in your `conftest.py`: `pytest_plugins = ["semel.testing.pytest_plugin"]`.
"""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from semel.testing.chaos import ChaosReport, ChaosSettings, run_chaos

__all__ = ["Chaos", "chaos"]

SEED = 0


class Chaos:
    """Runs handlers through chaos. Call it with a handler and any field of `ChaosSettings`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._calls = 0

    def __call__(self, handler: Callable[..., Any] | str, **settings: Any) -> ChaosReport:
        """Run one round, unless `rounds` or `minutes` is given. Returns the report; `report.check()` asserts it.

        `handler`: `"module:name"`, or a function that worker processes can import: not a lambda, nor one defined
        inside a test. `effects` and `sample` may be such functions too. `store`: by default a new SQLite file.
        """
        self._calls += 1
        given: dict[str, Any] = {"seed": SEED, "rounds": 0 if "minutes" in settings else 1}
        given["store"] = f"sqlite:///{self._folder}/chaos-{self._calls}.db"
        given["store_is_new"] = "store" not in settings
        given |= settings
        for name in ("effects", "sample"):
            if callable(given.get(name)):
                given[name] = import_name(given[name])
        return run_chaos(ChaosSettings(handler=import_name(handler), **given))


def import_name(function: Callable[..., Any] | str) -> str:
    """Return `module:name` of a function. Raises `ValueError` if other processes cannot import it by that."""
    if isinstance(function, str):
        return function
    module, name = inspect.getmodule(function), getattr(function, "__qualname__", "")
    if module is None or not name or "<" in name:
        raise ValueError(
            f"worker processes cannot import {function!r}: define it at the top of a module, or name it"
            ' as "module:function"'
        )
    return f"{module.__name__}:{name}"


@pytest.fixture
def chaos(tmp_path: Path) -> Chaos:
    """Return a callable that runs a handler through chaos and returns the report."""
    return Chaos(tmp_path)
