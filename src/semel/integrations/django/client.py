"""The clients of the settings `SEMEL`, and inbox and outbox in the current `transaction.atomic()`.

`SEMEL = {"STORE": "redis://...", "CONSUMER": "shop", "WINDOW": "24h", "DATABASE": "default"}`. Without `STORE` the
records are in `DATABASE`, which must be PostgreSQL or SQLite. Inbox and outbox always use `DATABASE`. With `SINK`, the
process publishes the outbox's messages itself.
"""

from threading import Lock
from typing import Any
from urllib.parse import quote

import semel
from semel.client.client import Semel
from semel.errors import UsageError
from semel.integrations.django.relay import start_relay, stop_relay
from semel.outbox import Message

__all__ = ["SETTINGS", "client", "close", "database_url", "first", "publish", "settings_of"]

SETTINGS = {"STORE", "CONSUMER", "WINDOW", "DATABASE", "SINK", "REQUIRED", "PRESET"}
_clients: dict[str, Semel] = {}
_lock = Lock()


def settings_of() -> dict[str, Any]:
    """Return the settings `SEMEL`, with defaults. Raises `UsageError` for an unknown name."""
    from django.conf import settings  # type: ignore[import-untyped]

    given: dict[str, Any] = getattr(settings, "SEMEL", {})
    if unknown := sorted(given.keys() - SETTINGS):
        raise UsageError(f"SEMEL has no setting {unknown[0]!r}; there are {', '.join(sorted(SETTINGS))}")
    defaults = {
        "CONSUMER": "django",
        "WINDOW": "24h",
        "DATABASE": "default",
        "REQUIRED": False,
        "PRESET": "ietf",
    }
    return {**defaults, **given}


def client() -> Semel:
    """Return the client for HTTP requests and guarded functions, one for each process."""
    chosen = settings_of()
    store = chosen.get("STORE") or database_url(chosen["DATABASE"])
    return _open("lease", lambda: semel.open(store, consumer=chosen["CONSUMER"], window=chosen["WINDOW"]))


def first(key: str) -> bool:
    """Mark an event in the current transaction: whether it is the first delivery. Mark and work commit together.

    Raises `NoTransaction` outside `transaction.atomic()`. Consumer: the setting's name and `.inbox`.
    """
    chosen, inbox = _inbox()
    return bool(inbox.inbox(_connection(chosen)).first(key))


def publish(message: Message) -> str:
    """Write a message in the current transaction; returns its id.

    Raises `NoTransaction` outside `transaction.atomic()`. With the setting `SINK`, the commit starts the relay of this
    process, which publishes the message at once. Without it, or if this process dies before, `semel relay` does so.
    """
    from django.db import transaction  # type: ignore[import-untyped]

    chosen, inbox = _inbox()
    identity = str(inbox.outbox(_connection(chosen)).publish(message))
    if sink := chosen.get("SINK"):
        source = database_url(chosen["DATABASE"])
        transaction.on_commit(lambda: start_relay(source, sink), using=chosen["DATABASE"], robust=True)
    return identity


def close() -> None:
    """Stop the relay and close the clients; for tests, and for processes that end."""
    stop_relay()
    with _lock:
        for each in _clients.values():
            each.close()
        _clients.clear()


def database_url(alias: str) -> str:
    """Return the URL of one of Django's databases. Raises `UsageError` for other databases than the two."""
    from django.db import connections

    chosen = connections[alias].settings_dict
    vendor = connections[alias].vendor
    if vendor == "sqlite":
        return f"sqlite:///{chosen['NAME']}"
    if vendor != "postgresql":
        raise UsageError(
            f"database {alias!r} is {vendor}; semel keeps records in PostgreSQL and SQLite: set SEMEL['STORE']"
        )
    user = quote(chosen["USER"] or "", safe="")
    if chosen["PASSWORD"]:
        user += ":" + quote(chosen["PASSWORD"], safe="")
    port = f":{chosen['PORT']}" if chosen["PORT"] else ""
    return f"postgresql://{user}{'@' if user else ''}{chosen['HOST'] or 'localhost'}{port}/{chosen['NAME']}"


def _inbox() -> tuple[dict[str, Any], Semel]:
    chosen = settings_of()
    url = database_url(chosen["DATABASE"])
    consumer = f"{chosen['CONSUMER']}.inbox"
    return chosen, _open(
        "inbox", lambda: semel.open(url, consumer=consumer, window=chosen["WINDOW"], mode="inbox")
    )


def _open(kind: str, make: Any) -> Semel:
    found = _clients.get(kind)
    if found is None:
        with _lock:
            found = _clients.get(kind)
            if found is None:
                found = _clients[kind] = make()
    return found


def _connection(chosen: dict[str, Any]) -> Any:
    from django.db import connections

    return connections[chosen["DATABASE"]]
