"""The site is built without a warning, found by its search, and readable at night."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.services import chromium

ROOT = Path(__file__).resolve().parent.parent
PATIENCE_MS = 60_000


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


@contextmanager
def served(folder: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.slow
@pytest.mark.service
def test_the_site_is_built_searched_and_dark(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "site.py"), str(tmp_path / "site")]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (built.returncode, built.stderr) == (0, "")
    with served(tmp_path / "site") as address, chromium.browser() as browser:
        page = browser.new_page(color_scheme="dark", permissions=["clipboard-read", "clipboard-write"])
        page.set_default_timeout(PATIENCE_MS)
        elsewhere: list[str] = []
        page.on("request", lambda asked: elsewhere.append(asked.url) if address not in asked.url else None)
        page.goto(f"{address}/docs/howto/run-a-job-once.html")
        console = page.locator(".highlight").first
        console.hover()
        console.locator("button").click()
        copied = [line for line in page.evaluate("navigator.clipboard.readText()").splitlines() if line]
        shown = "semel once --key nightly-2026-11-15 -- sh -c 'echo 41 rows exported'"
        assert copied == [shown, shown], "without prompts, and without what they print"
        assert "Sources of events" in page.inner_text("nav.md-nav--primary")
        page.goto(f"{address}/docs/explain/faq.html")
        page.wait_for_selector('body[data-md-color-scheme="slate"]')
        page.fill("input[name=query]", "zombie")
        found = page.wait_for_selector(".md-search-result__item a")
        assert found is not None
        assert "glossary" in (found.get_attribute("href") or "")
        page.goto(f"{address}/docs/reference/python.html")
        assert page.inner_text("h4#semelrun").startswith("Semel.run")
        assert "lease_s" in page.inner_text("article table")
        page.set_viewport_size({"width": 1280, "height": 900})
        page.goto(f"{address}/index.html")
        assert page.evaluate("document.querySelector('article').clientWidth") > 800, "room for the tables"
        page.set_viewport_size({"width": 390, "height": 844})
        for name in ("index", "deploy/index", "docs/howto/other-languages"):
            page.goto(f"{address}/{name}.html")
            assert page.evaluate("document.documentElement.scrollWidth") == 390, (
                "a table scrolls, not the page"
            )
        assert elsewhere == []
