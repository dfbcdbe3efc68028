"""A real browser for tests of pages: Debian's Chromium, driven by playwright."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

import pytest

from tests.services.packages import found_or_installed

if TYPE_CHECKING:
    from playwright.sync_api import Browser

FLAGS = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--force-color-profile=srgb"]


@cache
def executable() -> str | None:
    """Where it is; nothing where it cannot be had."""
    return found_or_installed(lambda: shutil.which("chromium"), "chromium")


@contextmanager
def browser() -> "Iterator[Browser]":
    """A browser without a window. Skips the test where there is none."""
    path = executable()
    if path is None:
        pytest.skip("chromium is not installed")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=path, args=FLAGS)
        try:
            yield opened
        finally:
            opened.close()
