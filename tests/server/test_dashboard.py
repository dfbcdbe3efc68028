"""The dashboard in a real browser: pages, search, forgetting, live counters, phones, and nothing foreign."""

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from semel.server.settings import ServeSettings
from semel.stores.sqlite import SqliteStore
from tests.server.scenes import a_day, some_records
from tests.server.tools import Running, serving, token_for
from tests.services import chromium

pytestmark = pytest.mark.slow
PAGES = (
    "/ui/", "/ui/?range=7d", "/ui/events", "/ui/events?state=done", "/ui/event/billing/ord_2026111600", "/ui/flight",
    "/ui/windows", "/ui/windows?consumer=billing", "/ui/outbox", "/ui/streams", "/ui/stores",
    "/ui/observe", "/ui/check", "/ui/audit",
)  # fmt: skip
PHONE = {"width": 360, "height": 740}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium.browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A service on a store with some hours behind it."""
    path = tmp_path_factory.mktemp("dashboard") / "semel.db"
    store = SqliteStore(path, synchronous="NORMAL")
    store.open()
    a_day(store, 180)
    some_records(store, 60)
    store.close()
    with serving(ServeSettings(auth="none", store=f"sqlite:///{path}", port=0)) as running:
        yield running


class Watched:
    """A page, and whatever its console said."""

    def __init__(self, context: BrowserContext, address: str) -> None:
        self.page: Page = context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.address = address

    def go(self, path: str) -> Page:
        self.page.goto(self.address + path)
        return self.page


@pytest.fixture
def watched(browser: Browser, service: Running) -> Iterator[Watched]:
    context = browser.new_context(viewport={"width": 1200, "height": 800})
    made = Watched(context, service.address)
    yield made
    context.close()
    assert made.said == []  # a violation of the policy is told there too
    assert [url for url in made.asked if not url.startswith((service.address, "data:"))] == []


def test_every_page_is_drawn_without_a_word_from_the_console(watched: Watched) -> None:
    for path in PAGES:
        page = watched.go(path)
        expect(page.locator("h1")).to_be_visible()
        expect(page.locator("nav a[aria-current=page]")).to_have_count(1)
        expect(page.locator("[aria-busy=true]")).to_have_count(0)
        expect(page.locator("#pulse-text")).to_have_text("last hour, live")


def test_charts_are_drawn_and_have_their_tables(watched: Watched) -> None:
    page = watched.go("/ui/?range=1h")
    expect(page.locator(".uplot canvas")).to_have_count(3)
    page.locator("figure summary").first.click()
    rows = page.locator("[data-table=rates] tr")
    expect(rows).to_have_count(61)
    expect(rows.first).to_have_text(re.compile("received.*processed.*duplicates"))
    assert int(page.locator("[data-total=received]").inner_text().replace(",", "")) > 100_000
    expect(page.locator(".rows th", has_text="notifications")).to_be_visible()


def test_search_finds_an_event_by_its_key_and_by_its_beginning(watched: Watched) -> None:
    page = watched.go("/ui/")
    page.keyboard.press("/")
    expect(page.locator("#search")).to_be_focused()
    page.keyboard.type("ord_2026111604")
    page.keyboard.press("Enter")
    page.get_by_role("link", name="ord_2026111604").click()
    expect(page.locator("h1")).to_have_text("ord_2026111604")
    expect(page.locator(".strip li").first).to_contain_text("received")
    expect(page.locator(".strip")).to_contain_text("window ends")
    expect(page.locator("pre").first).to_contain_text("receipt")
    page = watched.go("/ui/events?q=ord_202611161")
    expect(page.locator("section .rows").first.locator("tbody tr")).to_have_count(10)
    page = watched.go("/ui/events?q=nothing-of-the-kind")
    expect(page.get_by_text("No event of that key.")).to_be_visible()


def test_forgetting_asks_first_and_then_the_event_can_run_again(watched: Watched, service: Running) -> None:
    held = service.claim("to-forget")
    service.end("complete", held["claim"], value={"n": 1})
    assert service.claim("to-forget")["outcome"] == "done"
    page = watched.go("/ui/event/billing/to-forget")
    expect(page.locator(".strip li.warn")).to_contain_text("redelivery")
    page.get_by_role("button", name="Forget …").click()
    expect(page.get_by_role("dialog")).to_be_visible()
    page.get_by_role("button", name="Keep it").click()
    assert service.claim("to-forget")["outcome"] == "done"
    page.get_by_role("button", name="Forget …").click()
    page.get_by_role("button", name="Forget it").click()
    expect(page.get_by_role("status")).to_contain_text("the next delivery of it runs")
    assert service.claim("to-forget")["outcome"] == "claimed"
    page = watched.go("/ui/audit")
    expect(page.locator("tbody tr").first).to_contain_text("forget")
    expect(page.locator("tbody tr").first).to_contain_text("to-forget")


def test_live_counters_and_the_tail_move_while_traffic_flows(watched: Watched, service: Running) -> None:
    page = watched.go("/ui/events")
    expect(page.locator("#pulse-text")).to_have_text("last hour, live")
    before = int(page.locator("[data-count=duplicates]").inner_text().replace(",", ""))
    over = threading.Event()

    def deliver() -> None:
        number = 0
        while not over.wait(0.02):
            service.post("/v1/events", {"id": f"live-{number % 5}", "type": "order.placed"})
            number += 1

    traffic = threading.Thread(target=deliver)
    traffic.start()
    try:
        expect(page.locator("#tail tbody tr", has_text="live-").first).to_be_visible()
        expect(page.locator("#tail .state.duplicate").first).to_be_visible()
        expect(page.locator("[data-count=duplicates]")).not_to_have_text(f"{before:,}")
        page.get_by_role("button", name="Pause").click()
        expect(page.get_by_role("button", name="Go on")).to_be_visible()
        shown = page.locator("#tail").inner_text()
        page.wait_for_timeout(1500)
        assert page.locator("#tail").inner_text() == shown
    finally:
        over.set()
        traffic.join()


def test_a_window_is_set_and_removed(watched: Watched, service: Running) -> None:
    page = watched.go("/ui/windows?consumer=warehouse")
    form = page.locator("#set-window")
    form.get_by_label("Window").fill("soon")
    form.get_by_role("button").click()
    expect(page.locator("h1")).to_contain_text("Unprocessable")
    watched.said.clear()  # the browser says that a page came with status 422
    page = watched.go("/ui/windows?consumer=warehouse")
    page.locator("#set-window").get_by_label("Window").fill("36h")
    page.locator("#set-window").get_by_role("button").click()
    expect(page.get_by_role("status")).to_contain_text("Stored")
    windows = service.client.get("/v1/windows").json()["windows"]
    assert windows == [{"consumer": "warehouse", "event_type": "", "window": "36h"}]
    page.get_by_role("button", name="Remove the window of warehouse").click()
    page.get_by_role("button", name="Remove it").click()
    expect(page.get_by_text("None: every client's own counts")).to_be_visible()
    assert service.client.get("/v1/windows").json()["windows"] == []


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_a_phone_never_scrolls_sideways(browser: Browser, service: Running, scheme: Any) -> None:
    context = browser.new_context(viewport=PHONE, color_scheme=scheme, has_touch=True)  # type: ignore[arg-type]
    watched = Watched(context, service.address)
    page = watched.page
    for path in PAGES:
        watched.go(path)
        expect(page.locator("h1")).to_be_visible()
        assert page.evaluate("() => document.documentElement.scrollWidth") <= PHONE["width"], path
    colour = page.evaluate("() => getComputedStyle(document.documentElement).backgroundColor")
    light = sum(int(each) for each in re.findall(r"\d+", colour)[:3]) > 384
    assert light == (scheme == "light")
    page.get_by_role("button", name="Light or dark").click()
    assert page.evaluate("() => getComputedStyle(document.documentElement).backgroundColor") != colour
    assert watched.said == []
    context.close()


def test_everything_is_reached_by_the_keyboard(watched: Watched) -> None:
    page = watched.go("/ui/")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement.closest('main') !== null")
    outline = page.evaluate("() => getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"


def test_who_has_a_token_logs_in_and_sees_what_their_role_may(browser: Browser, tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "semel.db", synchronous="NORMAL")
    store.open()
    reader, _ = token_for(store, "", "read")
    admin, _ = token_for(store, None, "admin")
    some_records(store, 8)
    store.close()
    settings = ServeSettings(store=f"sqlite:///{tmp_path}/semel.db", port=0)
    with serving(settings) as running:
        context = browser.new_context()
        page = context.new_page()
        page.goto(running.address)
        expect(page.get_by_label("Token")).to_be_focused()
        page.get_by_label("Token").fill("semel_0123456789abcdef_" + "x" * 43)
        page.get_by_role("button", name="Log in").click()
        expect(page.get_by_text("That is no token of this store")).to_be_visible()
        page.get_by_label("Token").fill(reader)
        page.get_by_role("button", name="Log in").click()
        expect(page.locator("h1")).to_have_text("Overview")
        (cookie,) = context.cookies()
        assert (cookie["httpOnly"], cookie["sameSite"], cookie["path"]) == (True, "Strict", "/ui")
        expect(page.get_by_role("link", name="Audit")).to_have_count(0)
        page.goto(f"{running.address}/ui/event/billing/ord_2026111600")
        expect(page.locator("h1")).to_have_text("ord_2026111600")
        expect(page.get_by_role("button", name="Forget …")).to_have_count(0)
        page.goto(f"{running.address}/ui/flight")
        expect(page.locator("tbody th").first).to_have_text(re.compile(r"^#[0-9a-f]{12}$"))
        page.get_by_role("button", name="Log out").click()
        page.goto(f"{running.address}/ui/")
        page.get_by_label("Token").fill(admin)
        page.get_by_role("button", name="Log in").click()
        page.goto(f"{running.address}/ui/audit")
        expect(page.locator("h1")).to_contain_text("Audit")
        context.close()


def test_the_page_of_an_event_tells_the_errors_of_its_attempts(watched: Watched, service: Running) -> None:
    ugly = "<b id=planted>refused</b>\x1b[2J"
    service.end(
        "release", service.claim("erring")["claim"], error=ugly, kind="app.Refused", worker="web-1:7:5f"
    )
    service.end("fail", service.claim("erring")["claim"], error="no such card", traceback="shop/charge.php:7")
    page = watched.go("/ui/event/billing/erring")
    entries = page.locator(".attempts li")
    expect(entries).to_have_count(2)
    expect(entries.first).to_contain_text("no such card")
    expect(entries.first.locator("pre")).to_be_hidden()
    entries.first.locator("summary").click()
    expect(entries.first.locator("pre")).to_have_text("shop/charge.php:7")
    expect(entries.last).to_contain_text("app.Refused: <b id=planted>refused</b>\\x1b[2J")
    expect(entries.last).to_contain_text("web-1:7:5f")
    expect(page.locator("#planted")).to_have_count(0)
    listed = watched.go("/ui/events?q=erring").locator("table.rows tr", has_text="erring").first
    expect(listed).to_contain_text("reported: no such card")
