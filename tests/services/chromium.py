"""A real browser for tests of pages: Debian's Chromium, driven by playwright."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tests.services.programs import program

if TYPE_CHECKING:
    from playwright.sync_api import Browser

FLAGS = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--force-color-profile=srgb"]


@contextmanager
def browser() -> "Iterator[Browser]":
    """A browser without a window. Skips the test where there is none."""
    path = program("chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=path, args=FLAGS)
        try:
            yield opened
        finally:
            opened.close()
