"""Connections of Django without a project around them: its settings exist once in a process, whoever comes first."""

from typing import Any


def connection_to(alias: str, database: dict[str, Any]) -> Any:
    """A connection to this database, under a name of its own."""
    import django  # type: ignore[import-untyped]
    from django.conf import settings  # type: ignore[import-untyped]
    from django.db import connections  # type: ignore[import-untyped]

    if not settings.configured:
        settings.configure(DATABASES={"default": {"ENGINE": "django.db.backends.dummy"}})
        django.setup()
    connections.settings[alias] = connections.configure_settings({"default": {}, alias: database})[alias]
    return connections[alias]


def forget(connection: Any) -> None:
    """Close it, and let its name go."""
    from django.db import connections

    connection.close()
    del connections[connection.alias]
    del connections.settings[connection.alias]
