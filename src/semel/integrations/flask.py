"""A Flask extension: `Idempotency-Key` for the whole application, and a guard for one view.

::

    idempotency = Idempotency(once, caller=by_authorization)
    idempotency.init_app(app)

The settings of the app may name the store: `SEMEL_STORE`, `SEMEL_CONSUMER`, `SEMEL_WINDOW`.
"""

from collections.abc import Callable
from typing import Any

import flask

import semel
from semel.client.client import Semel
from semel.errors import UsageError
from semel.http.rules import Rules
from semel.http.wsgi import Environ, WsgiIdempotency, by_authorization, path_of

__all__ = ["Idempotency", "by_authorization"]

NAME = "semel"
"""Where the extension is found: `app.extensions["semel"]`."""


class Idempotency:
    """Runs a request once for its Idempotency-Key. The route is Flask's rule, so `/orders/<id>` is one route.

    `caller` returns the caller of a WSGI environ; a request without one is refused (401). `once=None`: the client is
    made from the settings of the app. [What is stored and refused](docs/reference/http.md).
    """

    def __init__(
        self,
        once: Semel | None = None,
        *,
        caller: Callable[[Environ], str | None] | None,
        rules: Rules | None = None,
        app: flask.Flask | None = None,
    ) -> None:
        self._once = once
        self._caller = caller
        self._rules = rules
        if app is not None:
            self.init_app(app)

    def init_app(self, app: flask.Flask) -> None:
        """Guard the app. Raises `UsageError` if it is guarded already, or if there is no store."""
        if NAME in app.extensions:
            raise UsageError("this app has semel's middleware already; call init_app once")
        once = self._once or _client(app)
        app.extensions[NAME] = once
        app.wsgi_app = WsgiIdempotency(  # type: ignore[method-assign]
            app.wsgi_app,
            once,
            caller=self._caller,
            route=lambda environ: _rule(app, environ),
            rules=self._rules,
        )


def _client(app: flask.Flask) -> Semel:
    config = app.config
    if "SEMEL_STORE" not in config:
        raise UsageError("give a client, or set SEMEL_STORE in the config: 'postgresql://...', 'redis://...'")
    return semel.open(
        config["SEMEL_STORE"],
        consumer=config.get("SEMEL_CONSUMER", app.name),
        window=config.get("SEMEL_WINDOW", "24h"),
    )


def _rule(app: flask.Flask, environ: dict[str, Any]) -> str:
    """Return the rule of the request's path, such as `/orders/<id>`; the path itself if no rule fits."""
    from werkzeug.exceptions import HTTPException

    try:
        rule, _ = app.url_map.bind_to_environ(environ).match(return_rule=True)
    except HTTPException:
        return path_of(environ)
    return str(rule.rule)
