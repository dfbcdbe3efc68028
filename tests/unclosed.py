"""Fail a run in which a test leaves a connection to a SQLite file open, on every Python, and name that test.

Python 3.13 and newer warn of such a connection when it is collected, during some later test. Here the warning says
where it was opened.
"""

import os
import sqlite3
import warnings
from contextlib import suppress
from typing import Any

import pytest

_connect = sqlite3.connect


class NamedConnection(sqlite3.Connection):
    """A connection that knows which test opened it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._is_open = True
        self._process = os.getpid()
        self._test = os.environ.get("PYTEST_CURRENT_TEST", "no test")

    def close(self) -> None:
        self._is_open = False
        super().close()

    def __del__(self) -> None:
        if getattr(self, "_is_open", False) and self._process == os.getpid():
            with suppress(sqlite3.ProgrammingError):  # it belongs to another thread
                self.close()
            warnings.warn(f"left open: a SQLite connection of {self._test}", ResourceWarning, stacklevel=1)


def _connect_named(*args: Any, **options: Any) -> Any:
    options.setdefault("factory", NamedConnection)
    return _connect(*args, **options)


@pytest.hookimpl
def pytest_configure() -> None:
    _use(_connect_named)


@pytest.hookimpl
def pytest_unconfigure() -> None:
    _use(_connect)


def _use(connect: Any) -> None:
    sqlite3.connect = sqlite3.dbapi2.connect = connect
