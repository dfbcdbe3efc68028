"""Records in one SQLite file: the embedded default, durable and shared by the processes of one computer."""

from urllib.parse import unquote

from semel.errors import PolicyInvalid
from semel.runtime.urls import parse_url, read_options
from semel.stores.sqlite.schema import schema_sql
from semel.stores.sqlite.store import SqliteStore

__all__ = ["SqliteStore", "from_url", "schema_sql"]

OPTIONS: dict[str, type] = {"synchronous": str, "readable_keys": bool, "adopt": bool, "busy_wait_s": float}


def from_url(url: str) -> SqliteStore:
    """Return the store for the URL, without opening the file. Raises `PolicyInvalid` for unknown options."""
    parts = parse_url(url)
    if parts.scheme != "sqlite" or parts.netloc or not parts.path.startswith("/") or parts.fragment:
        raise PolicyInvalid(
            f"{url!r} is not an SQLite URL; write sqlite:///relative.db, or sqlite:////absolute/path.db"
            " with four slashes"
        )
    path = unquote(parts.path[1:])
    if path == ":memory:" or not path:
        raise PolicyInvalid(f"{url!r} names no file; for a store in memory use memory:")
    options = read_options(url, OPTIONS)
    if "synchronous" in options:
        options["synchronous"] = options["synchronous"].upper()
    return SqliteStore(path, **options)
