"""`manage.py check`: settings that cannot work are reported before the first request."""

from typing import Any

from semel.errors import SemelError
from semel.http.rules import Rules
from semel.integrations.django.client import database_url, settings_of
from semel.outbox.sinks import sink_for

__all__ = ["check_settings", "register"]

MIDDLEWARE = "semel.integrations.django.middleware.IdempotencyMiddleware"
AUTHENTICATION = "django.contrib.auth.middleware.AuthenticationMiddleware"


def register() -> None:
    """Register the checks."""
    from django.core.checks import register as register_check  # type: ignore[import-untyped]

    register_check(check_settings, "semel")


def check_settings(**_: Any) -> list[Any]:
    """Return what is wrong: E001 the settings, E002 the store, W001 the order of the middleware."""
    from django.conf import settings  # type: ignore[import-untyped]
    from django.core import checks  # type: ignore[import-untyped]

    try:
        chosen = settings_of()
        Rules(preset=chosen["PRESET"])
        store = chosen.get("STORE") or database_url(chosen["DATABASE"])
        if chosen.get("SINK"):
            sink_for(chosen["SINK"])
    except (SemelError, LookupError) as error:
        return [checks.Error(str(error), id="semel.E001")]
    found: list[Any] = []
    if store.startswith("memory:") or store == "sqlite:///:memory:":
        found.append(
            checks.Error(
                "a store in memory is not shared by workers", id="semel.E002", hint="set SEMEL['STORE']"
            )
        )
    order = list(settings.MIDDLEWARE)
    if (
        MIDDLEWARE in order
        and AUTHENTICATION in order
        and order.index(MIDDLEWARE) < order.index(AUTHENTICATION)
    ):
        found.append(
            checks.Warning("put semel's middleware after the one that authenticates", id="semel.W001")
        )
    return found
