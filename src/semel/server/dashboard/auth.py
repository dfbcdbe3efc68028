"""Who looks at the pages, and whether a form really came from one of them."""

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
"""The cookie is for the pages alone: no request to `/v1` ever carries it."""
FORM_BYTES_MAX = 64 * 1024
FORM_WAIT_S = 10.0
DIGEST_SHOWN = 12


class LoginNeeded(Exception):
    """Nobody is logged in."""


class Viewer(Struct, frozen=True):
    """Whoever looks."""

    caller: Caller
    has_token: bool

    @property
    def label(self) -> str:
        """How the audit calls them."""
        return self.caller.label

    @property
    def tenant(self) -> str | None:
        """Whose records they see; `None`: everybody's."""
        return self.caller.tenant

    @property
    def is_admin(self) -> bool:
        """Whether they may change something, and see keys that they do not know."""
        return self.caller.role == "admin"

    @property
    def sees_all(self) -> bool:
        """Whether what is about the whole store is for them."""
        return self.caller.tenant is None

    def require(self, role: Role) -> None:
        """Raises `HttpProblem` unless they have that role."""
        self.caller.require(role)

    def key(self, record_id: Id) -> str:
        """A key as they may see it in a list: who is no admin sees what stands for it."""
        return record_id[2] if self.is_admin else f"#{digest(record_id).hex()[:DIGEST_SHOWN]}"


async def viewer_of(request: Request, service: Service) -> Viewer:
    """Whoever is logged in. Raises `LoginNeeded`, or `HttpProblem` where the store cannot be asked."""
    if not service.needs_token:
        service.start_paying(ANYBODY)
        return Viewer(ANYBODY, has_token=False)
    token = await service.session(request.cookies.get(COOKIE, ""))
    if token is None:
        raise LoginNeeded
    caller = caller_for(token)
    service.pace(caller.name)
    service.start_paying(caller)
    return Viewer(caller, has_token=True)


async def form_of(request: Request) -> dict[str, str]:
    """The fields of a form that one of our pages sent. Raises `HttpProblem` for one that came from elsewhere.

    The cookie is not sent along from other sites; this holds where there is no cookie, too.
    """
    if not _is_ours(request):
        raise HttpProblem(403, "forbidden", "this form did not come from a page of this server")
    body = await read_body(request, FORM_BYTES_MAX, FORM_WAIT_S)
    return dict(parse_qsl(body.decode(errors="replace"), keep_blank_values=True))


def _is_ours(request: Request) -> bool:
    site = request.headers.get("sec-fetch-site")
    if site is not None:  # no script can set it
        return site == "same-origin"
    origin: str = request.headers.get("origin", "")
    return bool(origin) and origin.partition("://")[2] == request.headers.get("host", "")


async def log_in(request: Request, service: Service, text: str) -> Response | None:
    """Begin a session, whose id goes into a cookie that no script can read; nothing if the token is not valid."""
    peer: Any = request.client
    service.pace(f"peer {peer.host if peer else ''}")
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


def _is_secure(request: Request) -> bool:
    """Whether the browser speaks TLS: with us or with a named proxy, or as it says itself, for its own cookie."""
    origin: str = request.headers.get("origin", "")
    return request.url.scheme == "https" or origin.startswith("https://")


async def log_out(request: Request, service: Service) -> Response:
    """End the session, everywhere within seconds."""
    await service.log_out(request.cookies.get(COOKIE, ""))
    response = RedirectResponse(f"{PATH}/login", 303)
    response.delete_cookie(COOKIE, path=PATH, secure=_is_secure(request), httponly=True, samesite="strict")
    return response
