"""Store records in Redis or Valkey: fast, shared by many machines, as durable as the server's configuration."""

from semel.errors import StoreUnknown
from semel.runtime.extras import install_command

try:
    from semel.stores.redis.store import RedisStore
    from semel.stores.redis.store_async import AsyncRedisStore
except ModuleNotFoundError as _missing:
    if _missing.name not in ("redis", "hiredis"):
        raise
    raise StoreUnknown(
        f"redis: needs its driver; install the extra: {install_command('redis')}"
    ) from _missing

__all__ = ["AsyncRedisStore", "RedisStore", "from_url"]


def from_url(url: str) -> RedisStore:
    """Return the store for the URL; opens no connection. Raises `PolicyInvalid` for unknown options."""
    return RedisStore(url)
