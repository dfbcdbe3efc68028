"""Find the store for a URL. A driver is imported only when its URL is used.

Third parties add a scheme by an entry point in the group `semel.stores`: a function from URL to store.
"""

from collections.abc import Callable
from importlib import import_module
from threading import Lock

from semel.core.protocols import AnyStore
from semel.errors import StoreUnknown
from semel.stores.memory.store import MemoryStore

__all__ = ["store_for"]


_BUILT_IN: dict[str, str] = {
    "memory": "semel.stores.registry:memory",
    "sqlite": "semel.stores.sqlite:from_url",
    "redis": "semel.stores.redis:from_url",
    "rediss": "semel.stores.redis:from_url",
    "redis+cluster": "semel.stores.redis:from_url",
    "rediss+cluster": "semel.stores.redis:from_url",
    "redis+sentinel": "semel.stores.redis:from_url",
    "rediss+sentinel": "semel.stores.redis:from_url",
    "valkey": "semel.stores.redis:from_url",
    "valkeys": "semel.stores.redis:from_url",
    "postgresql": "semel.stores.postgres:from_url",
    "postgres": "semel.stores.postgres:from_url",
    "http": "semel.stores.http:from_url",
    "https": "semel.stores.http:from_url",
    "tiered": "semel.stores.tiered:from_url",
    "migrating": "semel.stores.migrating:from_url",
}

_named: dict[str, MemoryStore] = {}
_named_lock = Lock()


def store_for(url: str) -> AnyStore:
    """Return the store for a URL, not yet connected. Raises `StoreUnknown`; the message says what to do."""
    scheme, colon, _ = url.partition(":")
    if not colon:
        raise StoreUnknown(f"{url!r} is not a store URL; for a file write sqlite:///{url}")
    return _maker(scheme)(url)


def memory(url: str) -> MemoryStore:
    """Return a new store for `memory:`; for `memory:name`, the same store each time within this process."""
    from semel.runtime.urls import read_options

    store = MemoryStore(**read_options(url, {"records_max": int, "compact": bool}))
    name = url.partition(":")[2].partition("?")[0].removeprefix("//")
    if not name:
        return store
    with _named_lock:
        return _named.setdefault(name, store)


def _maker(scheme: str) -> Callable[[str], AnyStore]:
    if scheme in _BUILT_IN:
        module, _, function = _BUILT_IN[scheme].partition(":")
        return getattr(import_module(module), function)  # type: ignore[no-any-return]
    from importlib.metadata import entry_points  # slow to import, and rarely needed

    for point in entry_points(group="semel.stores", name=scheme):
        return point.load()  # type: ignore[no-any-return]
    known = ", ".join(f"{name}:" for name in _BUILT_IN)
    raise StoreUnknown(
        f"no store answers to {scheme}: here; known are {known} and those of installed plug-ins"
    )
