"""Shared parts of the sync and async migrating store. `rules` decides which store is asked and written when."""

from collections.abc import Callable
from contextlib import ExitStack
from urllib.parse import urlencode

from semel.core.protocols import AsyncStore, Capabilities, Listener, Store
from semel.errors import StoreClosed
from semel.runtime.process import restart_after_fork
from semel.stores.migrating.rules import Pair

__all__ = ["MigratingStoreBase"]


class MigratingStoreBase:
    """The two stores, and the rules between them; for sync and async."""

    def __init__(self, old: Store | AsyncStore, new: Store | AsyncStore) -> None:
        self.old = old
        self.new = new
        parts = {"old": old.name, "new": new.name}
        self.name: str = "migrating:?" + urlencode(parts, safe=":/@,[]?=")
        self._pair = Pair(old.name, new.name)
        self._closed = False
        restart_after_fork(self)

    def __repr__(self) -> str:
        return f"<store {self.name}>"

    @property
    def capabilities(self) -> Capabilities:
        """What both stores guarantee. There is no inbox: its marks never pass through this store."""
        old, new = self.old.capabilities, self.new.capabilities
        return Capabilities(
            durable=old.durable and new.durable,
            fenced=old.fenced and new.fenced,
            shared=old.shared and new.shared,
            single_writer=old.single_writer or new.single_writer,
            notifies=old.notifies,
            endless=old.endless and new.endless,
        )

    def watch(self, listener: Listener, /) -> Callable[[], None]:
        """Notify `listener` of the changes in both stores."""
        ends = ExitStack()
        ends.callback(self.old.watch(listener))
        ends.callback(self.new.watch(listener))
        return ends.close

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed(f"{self.name} is closed; open() it again to use it")

    def after_fork(self) -> None:
        """Drop the state of calls that are pending in the parent process."""
        self._pair.after_fork()
