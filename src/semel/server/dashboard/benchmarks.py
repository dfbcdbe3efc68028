"""What `semel bench --keep` has measured of this store: the newest result, and those before it."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from semel.observe.formatting import now_us
from semel.server.benchmarks import LOOKUPS, Result, results
from semel.server.dashboard.state import Dashboard

__all__ = ["routes"]


def routes(desk: Dashboard) -> list[Route]:
    """The page."""

    async def benchmarks(request: Request) -> Response:
        viewer = await desk.overseer(request)
        found = results(await desk.looks.quick(LOOKUPS))
        values = {
            "newest": found[0] if found else None,
            "age_s": max(0, now_us() - found[0].measured_us) / 1e6 if found else None,
            "found": found,
            "top": max([1.0, *(row.ratio for result in found[:1] for row in result.rows)]),
            "history": history(found),
        }
        return await desk.page(request, viewer, "benchmarks.html", values)

    return [Route("/benchmarks", benchmarks)]


def history(found: list[Result]) -> list[tuple[str, list[float | None]]]:
    """Each row of the newest result with its ratios in all of them, the newest first."""
    ratios = [{row.what: row.ratio for row in result.rows} for result in found]
    return [(what, [each.get(what) for each in ratios]) for what in ratios[0]] if ratios else []
