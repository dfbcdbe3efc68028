"""Records in one SQLite file: the embedded default, durable and shared by the processes of one computer."""

from semel.stores.sqlite.schema import schema_sql
from semel.stores.sqlite.store import SqliteStore
from semel.stores.sqlite.urls import from_url

__all__ = ["SqliteStore", "from_url", "schema_sql"]
