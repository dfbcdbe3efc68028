"""Sessions of the dashboard, and protection of forms against other sites."""

from typing import Any
from urllib.parse import parse_qsl

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from semel.core.ids import digest
from semel.server.auth import ANYBODY, Caller, caller_for
from semel.server.middleware import read_body
from semel.server.problems import HttpProblem
from semel.server.service import Service
from semel.server.tokens import Role
from semel.types import Id

__all__ = ["COOKIE", "LoginNeeded", "Viewer", "form_of", "log_in", "log_out", "viewer_of"]

COOKIE = "semel_session"
PATH = "/ui"
"""The path of the cookie: browsers never send it to `/v1`."""
FORM_BYTES_MAX = 64 * 1024
FORM_WAIT_S = 10.0
DIGEST_SHOWN = 12


class LoginNeeded(Exception):
    """The request has no valid session."""


class Viewer(Struct, frozen=True):
    """The user of a page."""

    caller: Caller
    has_token: bool

    @property
    def label(self) -> str:
        """The user's name in the audit."""
        return self.caller.label

    @property
    def tenant(self) -> str | None:
        """The tenant whose records the user sees; `None`: all."""
        return self.caller.tenant

    @property
    def is_admin(self) -> bool:
        """Whether the user may change things and see keys in lists."""
        return self.caller.role == "admin"

    @property
    def sees_all(self) -> bool:
        """Whether the user may see pages about the whole store."""
        return self.caller.tenant is None

    def require(self, role: Role) -> None:
        """Check the role. Raises `HttpProblem` if it is too low."""
        self.caller.require(role)

    def key(self, record_id: Id) -> str:
        """Return a key as shown in a list; users who are not admins see a digest."""
        return record_id[2] if self.is_admin else f"#{digest(record_id).hex()[:DIGEST_SHOWN]}"


async def viewer_of(request: Request, service: Service) -> Viewer:
    """Return the logged-in user. Raises `LoginNeeded`, or `HttpProblem` if the store does not answer."""
    if not await service.asks_for_tokens():
        service.start_paying(ANYBODY)
        return Viewer(ANYBODY, has_token=False)
    cookie = request.cookies.get(COOKIE, "")
    if not cookie:
        raise LoginNeeded
    if not service.knows_session(cookie):
        service.pace(_peer_of(request))
    token = await service.session(cookie)
    if token is None:
        raise LoginNeeded
    caller = caller_for(token)
    service.pace(caller.name)
    service.start_paying(caller)
    service.costs.check_scan(caller)  # nearly every page counts or lists
    return Viewer(caller, has_token=True)


async def form_of(request: Request) -> dict[str, str]:
    """Return the fields of a form from one of our pages. Raises `HttpProblem` for a form of another site.

    Browsers do not send the cookie from other sites; this check also works without a cookie.
    """
    if not _is_ours(request):
        raise HttpProblem(403, "forbidden", "this form did not come from a page of this server")
    body = await read_body(request, FORM_BYTES_MAX, FORM_WAIT_S)
    return dict(parse_qsl(body.decode(errors="replace"), keep_blank_values=True))


def _is_ours(request: Request) -> bool:
    site = request.headers.get("sec-fetch-site")
    if site is not None:  # scripts cannot set it
        return site == "same-origin"
    origin: str = request.headers.get("origin", "")
    return bool(origin) and origin.partition("://")[2] == request.headers.get("host", "")


async def log_in(request: Request, service: Service, text: str) -> Response | None:
    """Begin a session and set its cookie, which scripts cannot read. Returns `None` if the token is not valid."""
    service.pace(_peer_of(request))
    token = await service.token(text.strip())
    if token is None:
        return None
    response = RedirectResponse(f"{PATH}/", 303)
    response.set_cookie(
        COOKIE,
        await service.log_in(token),
        path=PATH,
        secure=_is_secure(request),
        httponly=True,
        samesite="strict",
    )
    return response


def _peer_of(request: Request) -> str:
    peer: Any = request.client
    return f"peer {peer.host if peer else ''}"


def _is_secure(request: Request) -> bool:
    """Whether the browser uses TLS: to us, to a trusted proxy, or as its own headers say (for its cookie only)."""
    origin: str = request.headers.get("origin", "")
    return request.url.scheme == "https" or origin.startswith("https://")


async def log_out(request: Request, service: Service) -> Response:
    """End the session; other instances notice within seconds."""
    await service.log_out(request.cookies.get(COOKIE, ""))
    response = RedirectResponse(f"{PATH}/login", 303)
    response.delete_cookie(COOKIE, path=PATH, secure=_is_secure(request), httponly=True, samesite="strict")
    return response
