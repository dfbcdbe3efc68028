"""Records in PostgreSQL: durable, shared by many machines, readable by operators."""

from semel.errors import StoreUnknown
from semel.extras import install_command

try:
    import psycopg as _driver  # noqa: F401 - to say what to do where it is missing
except ImportError as _missing:
    raise StoreUnknown(
        f"postgresql: needs a driver; install the extra: {install_command('postgres')}"
    ) from _missing

from semel.stores.postgres.schema import schema_sql
from semel.stores.postgres.store import AsyncPostgresStore, PostgresStore
from semel.stores.postgres.urls import from_url

__all__ = ["AsyncPostgresStore", "PostgresStore", "from_url", "schema_sql"]
