"""Take the pictures of the dashboard that the documents show: `make screenshots`."""

import contextlib
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser

from semel.server.settings import ServeSettings
from semel.stores.sqlite import SqliteStore
from tests.server.scenes import a_day, some_dedups, some_records, some_workers, troubles
from tests.server.tools import Running, serving
from tests.services import chromium

IMAGES = Path(__file__).resolve().parent.parent.parent / "docs" / "images"
BYTES_MAX = 160_000
DESK, PHONE = {"width": 1280, "height": 860}, {"width": 390, "height": 844}
SHOTS = (
    ("overview-light", "/ui/?range=6h", DESK, "light"),
    ("overview-dark", "/ui/?range=6h", DESK, "dark"),
    ("phone", "/ui/?range=1h", PHONE, "dark"),
    ("failures", "/ui/failures", DESK, "light"),
    ("failures-phone", "/ui/failures", PHONE, "light"),
    ("consumer", "/ui/consumer/billing?range=6h", DESK, "light"),
    ("consumer-dark", "/ui/consumer/billing?range=6h", DESK, "dark"),
    ("events", "/ui/events?q=ord_202611160", DESK, "light"),
    ("event", "/ui/event/billing/evt_77", DESK, "light"),
    ("errors", "/ui/event/billing/evt_78", DESK, "light"),
    ("in-flight", "/ui/flight", DESK, "light"),
    ("windows", "/ui/windows?consumer=notifications", DESK, "light"),
    ("store", "/ui/stores", DESK, "dark"),
    ("observe", "/ui/observe?range=24h", DESK, "light"),
    ("check", "/ui/check", DESK, "light"),
    ("streams", "/ui/streams", DESK, "light"),
)


def main(folder: Path = IMAGES, only: tuple[str, ...] = ()) -> None:
    """Write all of them."""
    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.resolve()
    with tempfile.TemporaryDirectory() as scratch, chromium.browser() as browser, contextlib.chdir(scratch):
        url = "sqlite:///semel.db"
        troubles("semel.db")
        store = SqliteStore("semel.db")
        store.open()
        a_day(store, 7 * 24 * 60)
        some_records(store)
        store.close()
        with serving(ServeSettings(auth="none", store=url, port=0)) as running:
            store.open()
            some_dedups(store)
            some_workers(store)  # as late as possible: a heartbeat is believed for a minute
            store.close()
            _failures(running)
            for _ in range(3):
                _traffic(running)
            for name, path, size, theme in SHOTS:
                if not only or name in only:
                    _shoot(browser, running.address + path, folder / f"{name}.png", size, theme)


def _traffic(running: Running) -> None:
    held = running.claim("evt_77", event_type="payment.captured", fingerprint="sha256:1f0c")
    if held["outcome"] == "claimed":
        running.end(
            "complete", held["claim"], value={"receipt": "rcpt_8841", "amount": "129.90", "currency": "EUR"}
        )
    for number in range(12):
        running.post("/v1/events", {"id": f"evt_{number}", "type": "order.placed", "amount": "12.50"})


def _failures(running: Running) -> None:
    """Two attempts at one event that failed on two workers."""
    for worker in ("web-1:4711:5f3a9c02", "web-2:312:8be40d71"):
        held = running.claim("evt_78", event_type="payment.captured")
        running.end(
            "release",
            held["claim"],
            kind="shop.bank.Refused",
            error="the bank did not answer within 5 s",
            traceback="  shop/billing/handlers.py:42 in charge\n  shop/bank.py:17 in send",
            worker=worker,
        )


def _shoot(browser: Browser, address: str, path: Path, size: dict[str, int], theme: str) -> None:
    context = browser.new_context(viewport=size, color_scheme=theme, device_scale_factor=1)  # type: ignore[arg-type]
    page = context.new_page()
    page.goto(address)
    page.locator("[aria-busy=true]").wait_for(state="detached")
    page.wait_for_timeout(1200)
    page.screenshot(path=path)
    context.close()
    taken = path.stat().st_size
    sys.stderr.write(f"{path.name}: {taken / 1000:.0f} kB\n")
    assert taken < BYTES_MAX, f"{path.name} has {taken} bytes"


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else IMAGES, only=tuple(sys.argv[2:]))
