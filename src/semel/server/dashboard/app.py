"""The application of the pages: routes, login and error pages."""

from typing import Any
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from semel.errors import SemelError
from semel.server.dashboard import (
    checks,
    consumer,
    failures,
    flight,
    outbox,
    overview,
    records,
    stores,
    streams,
    windows,
)
from semel.server.dashboard.auth import LoginNeeded, form_of, log_in, log_out
from semel.server.dashboard.rendering import SecurityHeaders, asset, page
from semel.server.dashboard.state import Dashboard
from semel.server.problems import HttpProblem, problem_of

__all__ = ["create_pages"]

PAGES = (overview, failures, records, flight, consumer, windows, outbox, streams, stores, checks)


def create_pages(desk: Dashboard) -> Starlette:
    """Build the application of the pages, to be mounted at `/ui`."""

    async def static(request: Request) -> Response:
        return asset(request.path_params["name"])

    async def login(request: Request) -> Response:
        wrong = False
        if request.method == "POST":
            form = await form_of(request)
            response = await log_in(request, desk.service, form.get("token", ""))
            if response is not None:
                return response
            wrong = True
        if not desk.service.needs_token:
            return RedirectResponse("/ui/", 303)
        return page("login.html", {"wrong": wrong, "path": "/ui/login"}, 401 if wrong else 200)

    async def logout(request: Request) -> Response:
        await form_of(request)
        return await log_out(request, desk.service)

    app = Starlette(
        routes=[
            Route("/static/{digest}/{name}", static),
            Route("/login", login, methods=["GET", "POST"]),
            Route("/logout", logout, methods=["POST"]),
            *(route for each in PAGES for route in each.routes(desk)),
        ],
        middleware=[Middleware(SecurityHeaders)],
        exception_handlers={
            LoginNeeded: _to_login,
            HttpProblem: _problem,
            SemelError: _semel_error,
            HTTPException: _http_error,
        },
    )
    app.router.redirect_slashes = False
    app.state.desk = desk
    return app


async def _to_login(request: Request, _error: Any) -> Response:
    if request.headers.get("hx-request") or request.url.path.endswith(("/live", "/data")):
        return Response("log in again\n", 401, media_type="text/plain")
    return RedirectResponse("/ui/login", 303)


async def _problem(request: Request, error: Any) -> Response:
    return _problem_page(request, error)


async def _semel_error(request: Request, error: Any) -> Response:
    return _problem_page(request, problem_of(error))


async def _http_error(request: Request, error: Any) -> Response:
    return _problem_page(request, HttpProblem(error.status_code, "http", str(error.detail)))


def _problem_page(request: Request, problem: HttpProblem) -> Response:
    document = problem.document()
    values = {"title": document.title, "detail": problem.detail, "status": problem.status}
    response = page("error.html", values | {"path": quote(request.url.path)}, problem.status)
    response.headers.update(problem.headers)
    return response
