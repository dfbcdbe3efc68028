"""`python -m benchmarks.dashboard`: how long the server takes for each page, on a store of a million records.

It measures the first request to a new instance (nothing read, nothing counted) and the requests after it; and the
latency of claims with and without an open overview, in turns.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx2

from semel.core.commands import Admit, Claim, Settle
from semel.runtime.process import new_owner
from semel.server.app import create_app
from semel.server.settings import Limits, ServeSettings
from semel.stores.sqlite import SqliteStore
from tests.server.scenes import a_day

BATCH = 500
LOOKS = 15
DAY_US = 86400 * 10**6
PAGES = (
    "/ui/", "/ui/data?range=1h", "/ui/data?range=24h", "/ui/data?range=7d", "/ui/events?q=key-00000077", "/ui/windows",
    "/ui/stores", "/ui/flight",
)  # fmt: skip
CLAIM = {"consumer": "billing", "claims": [{"key": ""}]}


def fill(path: Path, records: int) -> None:
    store = SqliteStore(path, synchronous="NORMAL")
    store.open()
    store.send((Admit("", "billing", "lease"),))
    for at in range(0, records, BATCH):
        places = [("", "billing", f"key-{number:08}") for number in range(at, min(at + BATCH, records))]
        owners = [new_owner() for _ in places]
        claims = [
            Claim(place, owner, 30_000_000, DAY_US) for place, owner in zip(places, owners, strict=True)
        ]
        granted = store.send(claims)
        store.send(
            [
                Settle(place, owner, each.fence, "done", b'j{"n":1}', DAY_US, 30_000_000)
                for place, owner, each in zip(places, owners, granted, strict=True)
            ]
        )
    a_day(store, 7 * 24 * 60)
    store.close()


async def with_app(path: Path, work: Callable[[httpx2.AsyncClient], Awaitable[Any]]) -> Any:
    """Call `work` with a client of the application in this process: without a network the time is the server's own."""
    app = create_app(ServeSettings(auth="none", store=f"sqlite:///{path}", limits=Limits(rate_per_s=0)))
    async with app.router.lifespan_context(app):
        transport = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://127.0.0.1:8787") as client:
            return await work(client)


async def took_ms(client: httpx2.AsyncClient, page: str) -> float:
    began = time.perf_counter()
    answer = await client.get(page)
    assert answer.status_code == 200, answer.text
    return 1000 * (time.perf_counter() - began)


async def pages(path: Path) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for page in PAGES:
        first = [await with_app(path, partial(took_ms, page=page)) for _ in range(3)]

        async def again(client: httpx2.AsyncClient, page: str = page) -> list[float]:
            await took_ms(client, page)
            return [await took_ms(client, page) for _ in range(LOOKS)]

        later = await with_app(path, again)
        found[page] = {
            "first_ms": round(statistics.median(first), 1),
            "later_ms": round(statistics.median(later), 1),
            "later_max_ms": round(max(later), 1),
        }
        print(
            f"{page:32} first {found[page]['first_ms']:8.1f} ms   later {found[page]['later_ms']:8.1f} ms",
            flush=True,
        )
    return found


async def claim_latencies(path: Path) -> dict[str, float]:
    """Measure a claim's round trip through the service, with and without an open overview."""

    async def work(client: httpx2.AsyncClient) -> dict[str, float]:
        told: dict[bool, list[float]] = {False: [], True: []}
        number = 0
        for turn in range(12):
            looks = bool(turn % 2)
            until = time.perf_counter() + 1.5
            looker = asyncio.create_task(look(client, until)) if looks else None
            while time.perf_counter() < until:
                number += 1
                document = json.dumps({"consumer": "billing", "claims": [{"key": f"beside-{number}"}]})
                began = time.perf_counter()
                await client.post(
                    "/v1/claims", content=document, headers={"content-type": "application/json"}
                )
                told[looks].append(1000 * (time.perf_counter() - began))
                await asyncio.sleep(0.001)
            if looker is not None:
                await looker
        return {
            name: round(value, 2)
            for looks, word in ((False, "alone"), (True, "watched"))
            for name, value in (
                (f"claim_p50_{word}_ms", statistics.median(told[looks])),
                (f"claim_p99_{word}_ms", statistics.quantiles(told[looks], n=100)[98]),
            )
        }

    found: dict[str, float] = await with_app(path, work)
    return found


async def look(client: httpx2.AsyncClient, until: float) -> None:
    """Send the requests of one open overview: its parts every 5 s, the counters every second."""
    while time.perf_counter() < until:
        for page in ("/ui/data?range=1h", "/ui/parts/consumers", "/ui/parts/held"):
            await client.get(page)
        await asyncio.sleep(1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "semel.db"
        fill(path, options.records)
        found = {
            "records": options.records,
            "pages": asyncio.run(pages(path)),
            "claims": asyncio.run(claim_latencies(path)),
        }
    print(json.dumps(found, indent=2))
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
