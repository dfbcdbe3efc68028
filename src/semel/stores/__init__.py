"""Stores of records: one package for each store, chosen by URL in `registry`, and the types for a store of your own."""

from semel.core.commands import Purged, StoreSettings
from semel.core.protocols import AsyncStore, Capabilities, Store
from semel.stores.memory.store import MemoryStore
from semel.stores.registry import store_for

__all__ = ["AsyncStore", "Capabilities", "MemoryStore", "Purged", "Store", "StoreSettings", "store_for"]
