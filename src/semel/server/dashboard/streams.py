"""The deduplications of Kafka topics that write their progress into this store: a page."""

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from semel.observe.dedup_progress import SeenDedup
from semel.server.dashboard.state import Dashboard

__all__ = ["routes"]

COUNTED = (
    "received", "passed", "duplicates", "mismatches", "late", "dead_lettered", "rate", "lag", "partitions",
    "restoring", "restore_left", "restore_total", "index_bytes",
)  # fmt: skip


def routes(desk: Dashboard) -> list[Route]:
    """The page, and the part of it that is loaded again."""

    async def streams(request: Request) -> Response:
        return await _page(request, "streams.html")

    async def part(request: Request) -> Response:
        return await _page(request, "_streams.html")

    async def _page(request: Request, template: str) -> Response:
        viewer = await desk.overseer(request)
        seen = await desk.dedups.first()
        return await desk.page(request, viewer, template, {"groups": _groups(seen or (), desk.now_us)})

    return [Route("/streams", streams), Route("/parts/streams", part)]


def _groups(seen: Sequence[SeenDedup], now_us: int) -> list[dict[str, Any]]:
    """Return one entry for each deduplication, with the sums of its living instances."""
    names = dict.fromkeys(each.name for each in seen)
    groups = []
    for name in names:
        instances = [each for each in seen if each.name == name]
        alive = [each for each in instances if each.is_alive(now_us)]
        sums: dict[str, Any] = {
            field: sum(getattr(each.figures, field) for each in alive) for field in COUNTED
        }
        total = sums["restore_total"]
        groups.append(
            {
                "name": name,
                "window": instances[0].window,
                "alive": len(alive),
                "sums": sums,
                "repeated": sums["duplicates"] / sums["received"] if sums["received"] else None,
                "restored": 1 - sums["restore_left"] / total if total else None,
                "instances": [{"seen": each, "is_alive": each in alive} for each in instances],
            }
        )
    return groups
