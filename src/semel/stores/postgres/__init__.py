"""Records in PostgreSQL: durable, shared by many machines, readable by operators."""

from typing import Any, get_type_hints
from urllib.parse import quote, urlencode

from semel.errors import PolicyInvalid, StoreUnknown
from semel.runtime.extras import install_command
from semel.runtime.urls import parse_url, read_options

try:
    from psycopg import pq

    from semel.stores.postgres.schema import schema_sql
    from semel.stores.postgres.settings import PostgresOptions
    from semel.stores.postgres.store import PostgresStore
    from semel.stores.postgres.store_async import AsyncPostgresStore
except ModuleNotFoundError as _missing:
    if _missing.name != "psycopg":
        raise
    raise StoreUnknown(
        f"postgresql: needs its driver; install the extra: {install_command('postgres')}"
    ) from _missing

__all__ = ["AsyncPostgresStore", "PostgresStore", "from_url", "schema_sql", "split_url"]

SCHEMES = ("postgresql", "postgres")
OPTIONS = get_type_hints(PostgresOptions)


def from_url(url: str) -> PostgresStore:
    """Return the store for the URL, not yet connected. Raises `PolicyInvalid` for unknown options.

    Options that are not semel's own go to the driver: `sslmode`, `connect_timeout`, `application_name` ...
    """
    driver_url, options = split_url(url)
    return PostgresStore(driver_url, **options)


def split_url(url: str) -> tuple[str, dict[str, Any]]:
    """Split a URL into the driver's URL and semel's own options. Raises `PolicyInvalid`."""
    parts = parse_url(url)
    if parts.scheme not in SCHEMES or parts.fragment:
        raise PolicyInvalid("this is not a PostgreSQL URL; write postgresql://user@host:5432/database")
    theirs = {each.keyword.decode() for each in pq.Conninfo.get_defaults()}
    options = read_options(url, OPTIONS, others=theirs)
    rest = {name: options.pop(name) for name in list(options) if name not in OPTIONS}
    bare = f"postgresql://{parts.netloc}{parts.path}"  # urlunsplit would drop the slashes of an empty host
    return f"{bare}?{urlencode(rest, quote_via=quote)}" if rest else bare, options
