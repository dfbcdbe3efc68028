"""Move a consumer from one store to another: both are asked and both are written until the old window is over."""

from semel.core.protocols import HasAsyncTwin, Store
from semel.errors import PolicyInvalid
from semel.runtime.urls import check_names, option_texts
from semel.stores.migrating.store import MigratingStore
from semel.stores.migrating.store_async import AsyncMigratingStore
from semel.stores.registry import store_for

__all__ = ["AsyncMigratingStore", "MigratingStore", "from_url", "migrating"]


class MigratingStoreWithTwin(MigratingStore):
    """A migrating store of two stores with native async twins."""

    def twin(self) -> "AsyncMigratingStore":
        """Return the same store for an event loop, not yet connected."""
        assert isinstance(self.old, HasAsyncTwin)
        assert isinstance(self.new, HasAsyncTwin)
        return AsyncMigratingStore(self.old.twin(), self.new.twin())


def migrating(*, old: str | Store, new: str | Store) -> MigratingStore:
    """Return a store that asks and writes both `old` and `new`, for the time of a move. Does no I/O.

    Start all processes with it while some still use `old` alone; when none does, run `semel move close`. After the
    longest window run `semel move finish`, and start processes with `new` alone. A process that uses one of the
    stores alone too late or too early gets `StoreMoved`.
    """
    first, second = _side(old, "old"), _side(new, "new")
    if first is second or first.name == second.name:
        raise PolicyInvalid(f"old and new are both {first.name}; a move needs two stores")
    both_have_twins = isinstance(first, HasAsyncTwin) and isinstance(second, HasAsyncTwin)
    return (MigratingStoreWithTwin if both_have_twins else MigratingStore)(first, second)


def _side(given: str | Store, side: str) -> Store:
    store = store_for(given) if isinstance(given, str) else given
    if not isinstance(store, Store):
        raise PolicyInvalid(
            f"{store.name} serves event loops only; give its blocking form as the {side} store"
        )
    if isinstance(store, MigratingStore):
        raise PolicyInvalid(f"the {side} store is a move itself; finish one move before the next")
    if not store.capabilities.exact:
        raise PolicyInvalid(f"{store.name} guesses, so it cannot be the {side} store; use an exact store")
    if store.capabilities.audits:
        raise PolicyInvalid(
            f"{store.name} is a service, and only its own process can move its records: start it with"
            " semel serve --store 'migrating:?old=...&new=...'"
        )
    return store


def from_url(url: str) -> MigratingStore:
    """Return the store for `migrating:?old=...&new=...`; its parts are percent-encoded URLs."""
    given = option_texts(url)
    check_names("migrating", given, ("old", "new"))
    if url.partition("?")[0] != "migrating:" or given.keys() != {"old", "new"}:
        raise PolicyInvalid("write a migrating store as migrating:?old=redis://...&new=postgresql://...")
    return migrating(**given)
