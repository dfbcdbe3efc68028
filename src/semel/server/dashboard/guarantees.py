"""What holds for a consumer, as `semel explain` says it, with the weaknesses that the store's servers show."""

import asyncio
from typing import Any

from semel.core.protocols import AsyncStore, Store
from semel.observe.explain import Explanation, explain
from semel.observe.guarantees import Weakness
from semel.observe.probes import weaknesses
from semel.server.dashboard.refreshed import Refreshed
from semel.server.service import Service
from semel.stores.registry import store_for
from semel.types import Mode

__all__ = ["Explainer"]

LEASE_US = 30 * 10**6
PROBE_EVERY_S = 60.0
NOT_ASKED = Weakness("The store's servers have not answered yet, so their settings are not included here.")


class Explainer:
    """Explains consumers. The store's servers are asked at most once a minute."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._probed: Refreshed[tuple[Any, list[Weakness]]] = Refreshed(self._probe, PROBE_EVERY_S)

    async def close(self) -> None:
        """Cancel a running probe."""
        await self._probed.close()

    async def explain(self, mode: Mode, window_us: int, *, with_servers: bool = True) -> Explanation:
        """Explain a mode with a window. `with_servers`: include what only operators of the whole store may see."""
        store, live = self._service.runtime.store, list[Weakness]()
        if with_servers:
            store, live = await self._probed.first() or (store, [NOT_ASKED])
        return explain(store, mode, window_us=window_us, lease_us=LEASE_US, live=live)

    async def _probe(self) -> tuple[Any, list[Weakness]]:
        return await asyncio.to_thread(_probe_store, self._service)


def _probe_store(service: Service) -> tuple[Store | AsyncStore, list[Weakness]]:
    """Return the store and the weaknesses that its servers show; a remote server is queried on its own connection."""
    used = service.runtime.store
    if isinstance(used, Store):
        return used, weaknesses(used)
    store = store_for(service.settings.store)
    if not isinstance(store, Store):
        return used, []
    store.open()
    try:
        return store, weaknesses(store)
    finally:
        store.close()
