"""The state that the clients of one store share: its channel, keepers, waits and settings."""

import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any

from semel.core.commands import Admit, ReadSettings, StoreSettings
from semel.core.moves import check_moves
from semel.core.protocols import AsyncStore, HasAsyncTwin, Store
from semel.errors import (
    EventLoopBlocked,
    IdsMismatch,
    ModeMismatch,
    SemelError,
    StoreClosed,
    StoreError,
    StoreMoved,
    StoreUnavailable,
)
from semel.runtime.channel import Channel, Coalescer, LoopCoalescer, channel_for
from semel.runtime.keeper import Keeper, LoopKeeper
from semel.runtime.process import asyncio, restart_after_fork
from semel.runtime.reporter import Reporter
from semel.runtime.waiting import Watches
from semel.types import Mode, Unavailable

if TYPE_CHECKING:
    from semel.observe.events import Hooks

__all__ = ["Runtime"]

SETTINGS_LIVE_S = 5.0
"""How long settings are used before they are read again: a changed window applies well within 10 s."""


class Runtime:
    """The shared state of a client and of all clients and functions made from it by `using` or `guard`."""

    def __init__(self, store: Store | AsyncStore, *, owned: bool, hooks: "Hooks | None" = None) -> None:
        self.store: Store | AsyncStore = store
        self._owned = owned
        self.hooks: Hooks | None = hooks
        self.reporter: Reporter = Reporter() if hooks is None else _hook_reporter(hooks)
        """Reports to the hooks; without hooks it does nothing."""
        self.instrumented: Store | AsyncStore = self.reporter.instrument(store)
        """The store, which reports its round trips to the hooks; opened and closed with it."""
        self.channel: Channel = channel_for(self.instrumented)
        if isinstance(self.channel, Coalescer):
            self.channel.before_send = self.warn_in_loop
        self.keeper: Keeper = Keeper(self.channel, time.monotonic, self.reporter.report_expired)
        self.watches: Watches = Watches(store.capabilities, store.watch, time.monotonic)
        self.windows: dict[tuple[str, str, str], int] = {}
        self.fresh_until: float = 0.0
        """Until when `windows` may be used without reading them again, and the client is known to be open."""
        self.live_us: int = 0
        """How long records of ids with a time are kept, counted from that time; 0: no bound."""
        self._ids: dict[tuple[str, str], str] = {}
        self._admitted: set[tuple[str, str, str, str]] = set()
        self._twin: Runtime | None = None
        self._opened = False
        self._open_error: StoreUnavailable | None = None
        self._open_failures = 0
        self._closed = False
        self._read = False
        self.after_fork()
        restart_after_fork(self)

    def after_fork(self) -> None:
        """Replace the locks: another thread of the parent may have held them."""
        self._lock = Lock()
        self._reading = Lock()
        """Held while the settings are read in the background."""
        self._connecting = Lock()
        """Held while the store is opened in the background."""
        self._loop_states: dict[asyncio.AbstractEventLoop, LoopState] = {}

    def twin(self) -> "Runtime":
        """The runtime of the async clients of the same store: this one, if the store serves sync and async."""
        with self._lock:
            if self._twin is None:
                self._twin = (
                    Runtime(self.store.twin(), owned=True, hooks=self.hooks)
                    if isinstance(self.store, HasAsyncTwin)
                    else self
                )
            return self._twin

    def loop_keeper(self) -> LoopKeeper:
        """Return the keeper of the running event loop."""
        return self._loop_state().keeper

    def _loop_state(self) -> "LoopState":
        loop = asyncio.get_running_loop()
        state = self._loop_states.get(loop)
        if state is None:
            with self._lock:  # a program may run a loop per call: states of closed loops are dropped
                self._loop_states = {
                    each: state for each, state in self._loop_states.items() if not each.is_closed()
                }
                state = self._loop_states[loop] = LoopState(self.channel, self.reporter)
        return state

    def warn_in_loop(self) -> None:
        """Warn once that a blocking client is used inside a running event loop, where it holds up all tasks.

        Called with each batch that a thread with a running event loop sends to a blocking store.
        """
        channel = self.channel
        if not isinstance(channel, Coalescer) or channel.before_send is None or "asyncio" not in sys.modules:
            return
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return
        channel.before_send = None
        warnings.warn(
            f"a sync client of {self.store.name} is used inside a running event loop and blocks it with each call;"
            " use semel.aopen() and await its verbs, or call it in a thread (asyncio.to_thread)",
            EventLoopBlocked,
            stacklevel=_callers_level(),
        )

    def connect(self, tenant: str, consumer: str, mode: Mode, ids: str) -> None:
        """Open the store, and check the consumer's recorded mode and kind of ids. Cheap after the first call."""
        if self._closed:
            raise StoreClosed(f"this client of {self.store.name} is closed; open a new one")
        if (tenant, consumer, mode, ids) in self._admitted:
            return
        self._open(mode)
        if self._only_reads(mode):
            self._expect(self.channel.send((ReadSettings(),))[0], tenant, consumer, ids)
            return
        self._hold(self.channel.send((Admit(tenant, consumer, mode, ids),))[0], consumer, mode)
        self._note(self.channel.send((ReadSettings(),))[0], needed=(tenant, consumer))
        self._hold_ids(self._ids.get((tenant, consumer), ""), consumer, ids)
        self._admitted.add((tenant, consumer, mode, ids))

    def _open(self, mode: Mode) -> None:
        """Open the store. The first caller opens; the others wait for it, and share its error."""
        assert isinstance(self.store, Store)
        failures = self._open_failures
        with self._lock:
            if self._opened:
                return
            if self._open_error is not None and failures != self._open_failures:  # it failed during the wait
                raise self._open_error
            try:
                self.store.open()
            except StoreUnavailable as error:
                self._open_error = _first_use_error(error, mode)
                self._open_failures += 1
                raise self._open_error from error.__cause__
            self._opened, self._open_error = True, None

    def _only_reads(self, mode: Mode) -> bool:
        """Whether writing the mode now could wait for the caller's own transaction, which may hold the store's lock."""
        return mode == "inbox" and self.store.capabilities.single_writer

    def _expect(self, settings: StoreSettings | Unavailable, tenant: str, consumer: str, ids: str) -> None:
        """Check recorded mode and ids without writing: the first mark writes them, in the caller's transaction."""
        if isinstance(settings, Unavailable):
            self._hold(settings, consumer, "inbox")
        elif (tenant, consumer) in settings.modes:
            check_moves(settings.windows, [(tenant, consumer)])
            self._hold(settings.modes[tenant, consumer], consumer, "inbox")
            self._hold_ids(settings.ids.get((tenant, consumer), ""), consumer, ids)
            self._admitted.add((tenant, consumer, "inbox", ids))

    async def aconnect(self, tenant: str, consumer: str, mode: Mode, ids: str) -> None:
        """Do the same, awaited."""
        if self._closed:
            raise StoreClosed(f"this client of {self.store.name} is closed; open a new one")
        state = self._loop_state()
        while (tenant, consumer, mode, ids) not in self._admitted:
            if state.opening is not None:  # the first one opens; the others wait for it, and share its error
                await asyncio.shield(state.opening)
                continue
            state.opening = opening = asyncio.get_running_loop().create_future()
            try:
                await self._aopen(tenant, consumer, mode, ids)
                return
            except Exception as error:
                opening.set_exception(error)
                opening.exception()  # there may be no waiter to retrieve it
                raise
            finally:
                state.opening = None
                if not opening.done():
                    opening.set_result(None)

    async def _aopen(self, tenant: str, consumer: str, mode: Mode, ids: str) -> None:
        if not self._opened:
            try:
                if not isinstance(self.store, Store):
                    await self.store.aopen()
                elif self.store.capabilities.instant:
                    self.store.open()
                else:  # it may wait for a lock or a disk, and the loop must not
                    await _in_thread(self.store.open, "semel-opener")
            except StoreUnavailable as error:
                raise _first_use_error(error, mode) from error.__cause__
            self._opened = True
        if self._only_reads(mode):
            self._expect((await self.channel.asend((ReadSettings(),)))[0], tenant, consumer, ids)
            return
        self._hold((await self.channel.asend((Admit(tenant, consumer, mode, ids),)))[0], consumer, mode)
        self._note((await self.channel.asend((ReadSettings(),)))[0], needed=(tenant, consumer))
        self._hold_ids(self._ids.get((tenant, consumer), ""), consumer, ids)
        self._admitted.add((tenant, consumer, mode, ids))

    def connect_behind(self, tenant: str, consumer: str, mode: Mode, ids: str) -> bool:
        """Return whether `connect` was done; else do it in the background, for callers that may hold every connection.

        Errors are left to the callers: they use the database too, and one of them will connect.
        """
        if self._closed or (tenant, consumer, mode, ids) in self._admitted:
            return True
        if not self._connecting.locked():
            given = (tenant, consumer, mode, ids)
            Thread(target=self._connect_now, args=given, name="semel-opener", daemon=True).start()
        return False

    def _connect_now(self, tenant: str, consumer: str, mode: Mode, ids: str) -> None:
        with self._connecting, suppress(SemelError):
            self.connect(tenant, consumer, mode, ids)

    def aconnect_behind(self, tenant: str, consumer: str, mode: Mode, ids: str) -> bool:
        """Do the same, in a task of the running loop."""
        if self._closed or (tenant, consumer, mode, ids) in self._admitted:
            return True
        state = self._loop_state()
        if state.connecting is None or state.connecting.done():
            state.connecting = asyncio.create_task(self._aconnect_now(tenant, consumer, mode, ids))
        return False

    async def _aconnect_now(self, tenant: str, consumer: str, mode: Mode, ids: str) -> None:
        with suppress(SemelError):
            await self.aconnect(tenant, consumer, mode, ids)

    def _hold(self, recorded: Any, consumer: str, mode: Mode) -> None:
        if isinstance(recorded, Unavailable):
            if isinstance(recorded.error, StoreMoved):  # a service refuses the consumer
                raise recorded.error
            raise StoreUnavailable(f"{self.store.name} gave no answer") from recorded.error
        if recorded != mode:
            raise ModeMismatch(
                f"consumer {consumer!r} works in mode {recorded!r}, not {mode!r}; open it with mode={recorded!r},"
                f" or change it with: semel consumer set-mode {consumer} {mode}"
            )

    def _hold_ids(self, recorded: str, consumer: str, ids: str) -> None:
        if recorded != ids:
            raise IdsMismatch(
                f"consumer {consumer!r} is recorded with ids={recorded or None!r}, not {ids or None!r}; its records are"
                " laid out by that, so it is never changed: open it as recorded, or give the new one another name"
            )

    def refresh(self) -> None:
        """Read the stored windows again if they are due; an unreachable store leaves the last known ones."""
        if self._is_stale():
            self._note(self.channel.send((ReadSettings(),))[0])

    async def arefresh(self) -> None:
        """Do the same, awaited."""
        if self._is_stale():
            self._note((await self.channel.asend((ReadSettings(),)))[0])

    def refresh_behind(self) -> None:
        """Do the same in the background: the caller continues, as it may hold the last connection of a pool.

        If the windows were never read, they are read now.
        """
        if not self._read:
            self.refresh()
        elif self._is_stale() and not self._reading.locked():
            Thread(target=self._read_behind, name="semel-settings", daemon=True).start()

    def _read_behind(self) -> None:
        with self._reading, suppress(StoreError):
            self._note(self.channel.send((ReadSettings(),))[0])

    async def arefresh_behind(self) -> None:
        """Do the same, in a task of the running loop."""
        state = self._loop_state()
        if not self._read:
            await self.arefresh()
        elif self._is_stale() and state.reading is None:
            state.reading = asyncio.create_task(self._aread_behind(state))

    async def _aread_behind(self, state: "LoopState") -> None:
        try:
            with suppress(StoreError):
                self._note((await self.channel.asend((ReadSettings(),)))[0])
        finally:
            state.reading = None

    def _is_stale(self) -> bool:
        """Whether the caller must read the settings: every caller until they are known, then one for all."""
        now = time.monotonic()
        if now < self.fresh_until:
            return False
        if self._read and not self._closed:
            self.fresh_until = now + SETTINGS_LIVE_S
        return True

    def expire_settings(self) -> None:
        """Make the next use read the settings first: this client changed them."""
        with self._lock:
            self.fresh_until, self._read = 0.0, False

    def _note(self, settings: StoreSettings | Unavailable, *, needed: tuple[str, str] | None = None) -> None:
        if isinstance(settings, StoreSettings):
            self.windows = settings.windows
            self.live_us = settings.live_us
            self._ids = settings.ids
            self._refuse_moved(settings, needed)
        elif needed:
            raise StoreUnavailable(f"{self.store.name} gave no answer") from settings.error
        with self._lock:
            self._read = True
            if not self._closed:
                self.fresh_until = time.monotonic() + SETTINGS_LIVE_S

    def _refuse_moved(self, settings: StoreSettings, needed: tuple[str, str] | None) -> None:
        """Raise `StoreMoved` if a consumer must not use this store alone, now and in every later call."""
        scopes = {(tenant, consumer) for tenant, consumer, _, _ in self._admitted}
        try:
            check_moves(settings.windows, scopes if needed is None else {*scopes, needed})
        except StoreMoved:
            self._admitted.clear()
            self.expire_settings()
            raise

    def close(self) -> None:
        """Stop renewing, send queued items, close the store if this runtime owns it. Idempotent."""
        if self._start_closing():
            self._finish_closing()
            if self._twin not in (None, self):
                self._twin.close_from_outside()

    def close_from_outside(self) -> None:
        """Close a store of an event loop: soon, in that loop, if the loop is running, else now."""
        running = [loop for loop in self._loop_states if loop.is_running()]
        if running:
            asyncio.run_coroutine_threadsafe(self.aclose(), running[-1])
        elif self._opened:
            closer = Thread(target=lambda: asyncio.run(self.aclose()), name="semel-closer")
            closer.start()  # in a thread, because this one may be running another loop
            closer.join()
        else:
            self._start_closing()

    def _finish_closing(self) -> None:
        self.keeper.close()
        self.channel.close()
        if self._owned and isinstance(self.store, Store):
            self.store.close()

    async def aclose(self) -> None:
        """Do the same, awaited: the loop continues while the last batch is sent."""
        if not self._start_closing():
            return
        if not isinstance(self.channel, LoopCoalescer):
            await _in_thread(self._finish_closing, "semel-closer")
            return
        try:
            await self.channel.aclose()
        finally:
            if self._owned and not isinstance(self.store, Store):
                await self.store.aclose()

    def _start_closing(self) -> bool:
        with self._lock:
            if self._closed:
                return False
            self._closed = True
            self.fresh_until = 0.0
            states = list(self._loop_states.values())
        for state in states:
            state.keeper.close()
            for task in (state.reading, state.connecting):
                if task is not None:
                    task.cancel()
        self.watches.close()
        return True


class LoopState:
    """The state of one event loop."""

    def __init__(self, channel: Channel, reporter: Reporter) -> None:
        self.keeper: LoopKeeper = LoopKeeper(channel, time.monotonic, reporter.report_expired)
        self.opening: asyncio.Future[None] | None = None
        """Done when the caller that opens the store has finished."""
        self.reading: asyncio.Task[None] | None = None
        """Reads the settings in the background."""
        self.connecting: asyncio.Task[None] | None = None
        """Opens the store in the background."""


def _callers_level() -> int:
    """Return how many frames up the code is that called semel, counted from the caller of this function."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "semel":
        level, frame = level + 1, frame.f_back
    return level


def _hook_reporter(hooks: "Hooks") -> Reporter:
    from semel.observe.reporter import HookReporter  # loaded only if there are hooks

    return HookReporter(hooks)


async def _in_thread(function: Callable[[], None], name: str) -> None:
    """Run a blocking function in a thread of its own and await it: the loop's executor may be full, or gone.

    It runs to its end even if the caller is cancelled.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def settle(error: BaseException | None) -> None:
        if not ended.done():
            ended.set_exception(error) if error is not None else ended.set_result(None)

    def run() -> None:
        error: BaseException | None = None
        try:
            function()
        except BaseException as raised:  # noqa: BLE001 - it belongs to the waiter
            error = raised
        with suppress(RuntimeError):  # the loop is closed, and its waiter with it
            loop.call_soon_threadsafe(settle, error)

    thread = Thread(target=run, name=name, daemon=True)
    thread.start()
    await ended
    thread.join()  # it has nothing left to do


def _first_use_error(error: StoreUnavailable, mode: Mode) -> StoreUnavailable:
    """Return the error of a failed first use; in mode inbox the callers themselves may hold every connection."""
    if mode != "inbox" or type(error) is not StoreUnavailable:
        return error
    hint = (
        "; if your transactions hold every connection of a pooler, connect before the first of them:"
        " `with semel.open(...) as client:`"
    )
    return StoreUnavailable(f"{error}{hint}")
