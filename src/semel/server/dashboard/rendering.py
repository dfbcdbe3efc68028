"""Render templates: their filters, the addresses of pages, and security headers against foreign content."""

import hashlib
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.datastructures import MutableHeaders
from starlette.responses import HTMLResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from semel.observe.formatting import duration_text, exact_text, plural
from semel.types import Id

__all__ = ["SecurityHeaders", "address", "asset", "consumer_address", "failures_address", "page"]


def address(record_id: Id, verb: str = "event") -> str:
    """Return the path of the page of a record, or of an action on it."""
    tenant, consumer, key = record_id
    return f"/ui/{verb}/{quote(consumer, safe='')}/{quote(key, safe='')}{_of(tenant)}"


def consumer_address(tenant: str, consumer: str) -> str:
    """Return the path of the page of a consumer."""
    return f"/ui/consumer/{quote(consumer, safe='')}{_of(tenant)}"


def failures_address(**chosen: str) -> str:
    """Return the path of the failures, filtered."""
    return f"/ui/failures?{urlencode({name: value for name, value in chosen.items() if value})}"


def _of(tenant: str) -> str:
    return f"?tenant={quote(tenant, safe='')}" if tenant else ""


HERE = Path(__file__).parent
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self';"
    " form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
"""Nothing inline and nothing from other sites. Pico draws its arrows as data: images."""
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
DASH = "\N{EN DASH}"
"""Shown for a missing value."""
FOREVER = "public, max-age=31536000, immutable"
TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".txt": "text/plain"}


class SecurityHeaders:
    """ASGI middleware that adds these headers to every response."""

    def __init__(self, app: ASGIApp) -> None:
        self.app: ASGIApp = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass it on."""

        async def send_sealed(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        await self.app(scope, receive, send_sealed)


def number(value: float | None) -> str:
    """`12,345`, `1.25`; a dash for nothing."""
    if value is None:
        return DASH
    if isinstance(value, int) or value >= 100:  # noqa: PLR2004 - three digits are enough
        return f"{value:,.0f}"
    return f"{value:.3g}" if value else "0"


def percent(share: float | None) -> str:
    """`1.3 %`; a dash for nothing."""
    if share is None:
        return DASH
    if share < 0.1:  # noqa: PLR2004 - the same
        return f"{100 * share:.2g} %"
    if 0.99 < share < 1:  # noqa: PLR2004 - almost all is not all
        return f"{math.floor(share * 1e4) / 100:g} %"
    return f"{100 * share:.0f} %"


def size(count: int | None) -> str:
    """Format a size."""
    if count is None:
        return DASH
    left = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if left < 1000:  # noqa: PLR2004 - as storage is sold
            return f"{left:.3g} {unit}"
        left /= 1000
    return f"{left:.3g} TB"


def moment(at_us: int) -> str:
    """Format an instant in UTC; the page shows it in local time."""
    if not 0 < at_us < 253402300800_000_000:  # noqa: PLR2004 - the year 10000
        return DASH
    return datetime.fromtimestamp(at_us / 1e6, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def seconds(value: float | None) -> str:
    """Format a duration in a fitting unit."""
    return DASH if value is None else duration_text(round(value * 1e6))


def _make_environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "number": number,
        "plural": plural,
        "percent": percent,
        "size": size,
        "moment": moment,
        "seconds": seconds,
        "window": exact_text,
    }
    made.globals["version"] = version("semel")
    made.globals["static"] = STATIC
    made.globals |= {
        "address": address,
        "consumer_address": consumer_address,
        "failures_address": failures_address,
    }
    return made


def _addresses() -> dict[str, str]:
    """Build the paths of the static files, each with a hash of its content, so that browsers can cache it for ever."""
    return {
        path.name: f"/ui/static/{hashlib.sha256(path.read_bytes()).hexdigest()[:10]}/{path.name}"
        for path in sorted((HERE / "static").iterdir())
    }


STATIC: dict[str, str] = _addresses()
_environment = _make_environment()


def page(name: str, values: Mapping[str, Any], status: int = 200) -> HTMLResponse:
    """Render a template."""
    return HTMLResponse(_environment.get_template(name).render(values), status)


def asset(name: str) -> Response:
    """Serve a static file."""
    path = HERE / "static" / name
    if name not in STATIC or path.suffix not in TYPES:
        return Response("there is no such file\n", 404, media_type="text/plain")
    return Response(path.read_bytes(), media_type=TYPES[path.suffix], headers={"Cache-Control": FOREVER})
