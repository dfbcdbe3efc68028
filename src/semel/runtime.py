"""What the clients of one store share: its channel, keepers, waits and settings."""

import asyncio
import time
from collections.abc import Callable
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

from semel.coalesce import Channel, LoopCoalescer, channel_for
from semel.core.commands import Admit, ReadSettings, Settings
from semel.core.ports import AsyncStore, Store
from semel.errors import ModeMismatch, StoreClosed, StoreUnavailable
from semel.forks import restart_after_fork
from semel.keeper import Keeper, LoopKeeper
from semel.types import Mode, Unavailable
from semel.waiting import Watches

__all__ = ["Runtime"]

SETTINGS_LIVE_S = 5.0
"""How long settings are used before they are read again: a changed window applies well within 10 s."""


class Runtime:
    """The machinery behind a client and everything made from it by `using` or `guard`."""

    def __init__(self, store: Store | AsyncStore, *, owned: bool) -> None:
        self.store = store
        self._owned = owned
        self.channel: Channel = channel_for(store)
        self.keeper = Keeper(self.channel, time.monotonic)
        self.watches = Watches(store.capabilities, store.watch, time.monotonic)
        self._loop_keepers: WeakKeyDictionary[Any, LoopKeeper] = WeakKeyDictionary()
        self.windows: dict[tuple[str, str, str], int] = {}
        self.fresh_until = 0.0
        """Until when `windows` may be used without asking, and the client is known to be open."""
        self._admitted: set[tuple[str, str, str]] = set()
        self._opened = False
        self._closed = False
        self.after_fork()
        restart_after_fork(self)

    def after_fork(self) -> None:
        """Another thread of the parent may have held the lock."""
        self._lock = Lock()
        self._loop_keepers = WeakKeyDictionary()

    def loop_keeper(self) -> LoopKeeper:
        """The keeper of the running event loop."""
        loop = asyncio.get_running_loop()
        keeper = self._loop_keepers.get(loop)
        if keeper is None:
            keeper = self._loop_keepers[loop] = LoopKeeper(self.channel, time.monotonic)
        return keeper

    def connect(self, tenant: str, consumer: str, mode: Mode) -> None:
        """Open the store, and hold the consumer to its one mode. Cheap when it was done before."""
        if self._closed:
            raise StoreClosed(f"this client of {self.store.name} is closed; open a new one")
        if (tenant, consumer, mode) in self._admitted:
            return
        assert isinstance(self.store, Store)
        with self._lock:
            if not self._opened:
                self.store.open()
                self._opened = True
        self._hold(self.channel.send((Admit(tenant, consumer, mode),))[0], tenant, consumer, mode)

    async def aconnect(self, tenant: str, consumer: str, mode: Mode) -> None:
        """The same, awaited."""
        if self._closed:
            raise StoreClosed(f"this client of {self.store.name} is closed; open a new one")
        if (tenant, consumer, mode) in self._admitted:
            return
        if not self._opened:
            if isinstance(self.store, Store):
                self.store.open()
            else:
                await self.store.aopen()
            self._opened = True
        answer = (await self.channel.asend((Admit(tenant, consumer, mode),)))[0]
        self._hold(answer, tenant, consumer, mode)

    def _hold(self, recorded: Any, tenant: str, consumer: str, mode: Mode) -> None:
        if isinstance(recorded, Unavailable):
            raise StoreUnavailable(f"{self.store.name} gave no answer") from recorded.error
        if recorded != mode:
            raise ModeMismatch(
                f"consumer {consumer!r} works in mode {recorded!r}, not {mode!r}; open it with mode={recorded!r},"
                f" or change it with: semel consumer set-mode {consumer} {mode}"
            )
        self._admitted.add((tenant, consumer, mode))

    def refresh(self) -> None:
        """Read the stored windows again; an unreachable store leaves the last known."""
        self.fresh_until = time.monotonic() + SETTINGS_LIVE_S
        self._note(self.channel.send((ReadSettings(),))[0])

    async def arefresh(self) -> None:
        """The same, awaited."""
        self.fresh_until = time.monotonic() + SETTINGS_LIVE_S
        self._note((await self.channel.asend((ReadSettings(),)))[0])

    def expire_settings(self) -> None:
        """Have the settings read again at the next use."""
        self.fresh_until = 0.0

    def _note(self, settings: Settings | Unavailable) -> None:
        if isinstance(settings, Settings):
            self.windows = settings.windows

    def close(self) -> None:
        """Stop renewing, send what is queued, close the store if it is ours. Idempotent."""
        if self._start_closing():
            self.keeper.close()
            self.channel.close()
            if self._owned and isinstance(self.store, Store):
                self.store.close()

    async def aclose(self) -> None:
        """The same, awaited: the loop goes on while the last batch is sent."""
        if not self._start_closing():
            return
        if isinstance(self.channel, LoopCoalescer):
            await self.channel.aclose()
        else:
            await _in_thread(self.channel.close)
        self.keeper.close()
        if self._owned:
            if isinstance(self.store, Store):
                self.store.close()
            else:
                await self.store.aclose()

    def _start_closing(self) -> bool:
        with self._lock:
            if self._closed:
                return False
            self._closed = True
            self.fresh_until = 0.0
        for keeper in list(self._loop_keepers.values()):
            keeper.close()
        self.watches.close()
        return True


async def _in_thread(function: Callable[[], None]) -> None:
    await asyncio.get_running_loop().run_in_executor(None, function)
