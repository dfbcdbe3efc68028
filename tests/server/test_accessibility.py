"""Every page is read by a screen reader, seen with weak eyes, used by the keyboard and on a phone; axe-core looks."""

from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from semel.server.settings import ServeSettings
from semel.stores.sqlite import SqliteStore
from tests.server.scenes import a_day, some_dedups, some_records, some_workers, troubles
from tests.server.tools import Running, serving
from tests.services import chromium

pytestmark = pytest.mark.slow
AXE = files("axe_playwright_python") / "axe.min.js"
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
PAGES = (
    "/ui/", "/ui/failures", "/ui/consumer/billing", "/ui/events?q=ord_20261178", "/ui/event/billing/ord_2026117750",
    "/ui/event/wallet/ord_2026117700", "/ui/flight", "/ui/windows?consumer=billing", "/ui/outbox", "/ui/streams",
    "/ui/stores", "/ui/observe", "/ui/check", "/ui/audit", "/ui/event/nothing/here",
)  # fmt: skip
PHONE = {"width": 360, "height": 740}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium.browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A service on a store with failures."""
    path = tmp_path_factory.mktemp("accessible") / "semel.db"
    troubles(path)
    store = SqliteStore(path, synchronous="NORMAL")
    store.open()
    a_day(store, 90)
    some_records(store, 12)
    some_workers(store)
    some_dedups(store)
    store.close()
    with serving(ServeSettings(auth="none", store=f"sqlite:///{path}", port=0)) as running:
        yield running


def complaints(page: Page) -> list[str]:
    """What axe-core finds wrong with the page as it is shown."""
    run = "rules => axe.run(document, {runOnly: rules, resultTypes: ['violations']})"
    found: list[Any] = page.evaluate(run, RULES)["violations"]
    return [f"{each['id']}: {node['html'][:200]}" for each in found for node in each["nodes"]]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_on_any_page(browser: Browser, service: Running, scheme: Any) -> None:
    context = browser.new_context(viewport={"width": 1200, "height": 800}, color_scheme=scheme)
    context.add_init_script(path=str(AXE))
    page = context.new_page()
    wrong: list[str] = []
    for path in PAGES:
        page.goto(service.address + path)
        expect(page.locator("[aria-busy=true]")).to_have_count(0)
        page.evaluate("() => document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        wrong += [f"{path}: {each}" for each in complaints(page)]
    page.goto(service.address + "/ui/failures")
    page.get_by_role("button", name="It happened …").first.click()
    expect(page.get_by_role("dialog")).to_be_visible()
    wrong += [f"a dialog: {each}" for each in complaints(page)]
    context.close()
    assert not wrong, "\n".join(wrong)


def test_the_check_can_fail(browser: Browser, service: Running) -> None:
    context = browser.new_context()
    context.add_init_script(path=str(AXE))
    page = context.new_page()
    page.goto(service.address + "/ui/outbox")
    page.evaluate("() => { document.querySelector('h1').style.color = '#ccc'; }")
    assert any(each.startswith("color-contrast") for each in complaints(page))
    context.close()


def test_failures_are_acted_on_by_the_keyboard_alone(browser: Browser, service: Running) -> None:
    context = browser.new_context(viewport={"width": 1200, "height": 800})
    page = context.new_page()
    page.goto(service.address + "/ui/failures?consumer=warehouse&status=failed")
    expect(page.locator(".issue")).to_have_count(1)
    page.get_by_role("button", name="Forget …").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_contain_text("1 event of warehouse: KeyError")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.keyboard.press("Enter")  # the focus is where it was
    expect(page.get_by_role("button", name="Keep them")).to_be_focused()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.get_by_role("status")).to_contain_text("1 event forgotten")
    page.goto(service.address + "/ui/audit")
    expect(page.locator("tbody tr").first).to_contain_text("ord_2026117900")
    context.close()


def test_on_a_phone_keys_are_readable_and_warnings_come_first(browser: Browser, service: Running) -> None:
    context = browser.new_context(viewport=PHONE, has_touch=True)  # type: ignore[arg-type]
    page = context.new_page()
    for path in ("/ui/flight", "/ui/failures", "/ui/events?q=ord_20261178", "/ui/consumer/billing"):
        page.goto(service.address + path)
        expect(page.locator("h1")).to_be_visible()
        page.evaluate("() => document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        assert page.evaluate("() => document.documentElement.scrollWidth") <= PHONE["width"], path
        widths = "() => [...document.querySelectorAll('td.key, th.key')].map((each) => each.clientWidth)"
        assert all(width >= 150 for width in page.evaluate(widths)), path
    page.goto(service.address + "/ui/flight")  # a row is a list there: nothing is beside the screen
    cells = page.locator("table.stack tbody tr:first-child > *")
    expect(cells.filter(has_text="with its next delivery").first).to_be_visible()
    cells_of = "() => [...document.querySelectorAll('table.stack tr > *')]"
    assert (
        max(page.evaluate(f"{cells_of}.map((each) => each.getBoundingClientRect().right)")) <= PHONE["width"]
    )
    assert page.evaluate(
        "() => [...document.querySelectorAll('table.stack td')].every((each) => each.dataset.label)"
    )
    page.goto(service.address + "/ui/check")
    levels = page.locator("table .state")
    expect(levels.first).to_be_visible()
    shown = [each for each in levels.all_inner_texts() if each in ("error", "warning", "ok")]
    assert shown == sorted(shown, key=("error", "warning", "ok").index)
    context.close()


def test_a_part_that_is_used_is_not_replaced(browser: Browser, service: Running) -> None:
    context = browser.new_context(viewport={"width": 1200, "height": 800})
    page = context.new_page()
    page.clock.install()
    page.goto(service.address + "/ui/failures")
    page.get_by_role("button", name="Forget …").first.click()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.clock.run_for(11_000)  # two refreshes
    assert not [url for url in asked if "parts/failures" in url]
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    page.evaluate("() => document.activeElement.blur()")
    with page.expect_response(lambda answer: "parts/failures" in answer.url):
        page.clock.run_for(6_000)
    context.close()
