"""Carry out the commands of flows, blocking and awaiting. Flows decide; executors do."""

import time
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from msgspec.structs import replace

from semel.core.backoff import backoff_s
from semel.core.commands import (
    Ask,
    Claim,
    Command,
    Flow,
    Granted,
    Invoke,
    Lookup,
    Pause,
    Raised,
    Ran,
    Returned,
    Settle,
    Sleep,
    Unwatch,
    Watch,
)
from semel.core.settlement import answer_of
from semel.errors import ClaimLost, NotApplied, StoreClosed, StoreError
from semel.policy import Policy
from semel.runtime.channel import Channel
from semel.runtime.context import HandlerRun, check_own, held_owners, running
from semel.runtime.engine import SETTINGS_LIVE_S, Runtime
from semel.runtime.generators import adrive, drive
from semel.runtime.handlers import UNFINISHED, refuse_unfinished
from semel.runtime.keeper import Keeper, LiveClaim, LoopKeeper
from semel.runtime.process import asyncio, inspect, logging
from semel.runtime.send_queue import give_back, post_quietly, recall
from semel.runtime.waiting import Watches
from semel.types import CannotTell, Unavailable

__all__ = ["AsyncExecutor", "Executor"]

T = TypeVar("T")

BACKOFF_FIRST_S = 0.02
BACKOFF_MAX_S = 1.0


class ExecutorBase:
    """The base of both executors."""

    def __init__(
        self, runtime: Runtime, keeper: Any, policy: Policy, window_us: Callable[[str], int]
    ) -> None:
        self.runtime: Runtime = runtime
        self.channel: Channel = runtime.channel
        self.keeper: Any = keeper
        self.drop: Callable[[bytes, None], LiveClaim | None] = keeper.kept.pop
        """Stops renewing a claim: `drop(owner, None)`. A method of the dict itself, which Ctrl-C cannot interrupt."""
        self.watches: Watches = runtime.watches
        self.run_max_s: float = policy.run_max_s
        self.value_bytes_max: int = policy.value_bytes_max
        self.window_us: Callable[[str], int] = window_us
        """Returns the window in force for an event type, as last read from the store."""
        self.steady_s: Callable[[], float] = time.monotonic

    def abandon(self, owners: Iterable[bytes]) -> None:
        """Drop the claims of interrupted flows, and release those whose handlers did not start."""
        if not self.keeper.kept:
            return  # as after nearly every batch
        dropped = [self.drop(owner, None) for owner in owners]
        idle = [kept for kept in dropped if kept is not None and not kept.started]
        post_quietly(self.channel, [give_back(kept.claim, kept.fence) for kept in idle])

    def begin(self, claim: Claim, granted: Granted | None) -> HandlerRun | None:
        """Begin a run of the handler; `None` if the claim is already lost. Without `granted` there is no claim."""
        if granted is None:
            return self._unclaimed_run(claim)
        kept = self.keeper.kept.get(claim.owner)
        if kept is None or kept.lost:
            return None
        return HandlerRun(kept, granted, self, self.value_bytes_max)

    def _unclaimed_run(self, claim: Claim) -> HandlerRun:
        """Return a run without a claim: the handler can read its key, and it is the first attempt."""
        nothing = Granted(fence=0, attempt=1, lease_until_us=0, first_seen_us=0)
        kept = LiveClaim.since(claim, nothing, self.steady_s(), self.run_max_s)
        return HandlerRun(kept, nothing, self, 0, unclaimed=True)

    def window_may_have_changed(self, settle: Settle) -> bool:
        """Whether the claim is old enough that its window may have changed since."""
        kept = self.keeper.kept.get(settle.owner)
        return (
            kept is not None
            and not settle.sliding
            and self.steady_s() - (kept.ends - self.run_max_s) > SETTINGS_LIVE_S
        )

    def with_current_window(self, settle: Settle) -> Settle:
        """Return the settle with the current window: a change while the handler ran applies to its completion."""
        kept = self.keeper.kept.get(settle.owner)
        return settle if kept is None else replace(settle, window_us=self.window_us(kept.claim.event_type))

    def pause_s(self, command: Pause) -> float | None:
        """Return how long to back off; `None` if there is no time left for another try."""
        from semel.runtime.jitter import spread_s  # seldom needed, and it loads half a dozen modules

        waits = [backoff_s(each, BACKOFF_FIRST_S, BACKOFF_MAX_S) for each in range(command.tries + 1)]
        delay = spread_s(waits.pop())
        if command.owner:
            kept = self.keeper.kept.get(command.owner)
            left = kept.deadline - self.steady_s() if kept is not None else 0.0
        else:
            left = command.wait_s - sum(waits)
        return delay if delay < left else None


class Executor(ExecutorBase):
    """Carry out commands, blocking."""

    keeper: Keeper

    def __call__(self, command: Command[Any]) -> Any:
        """Execute one command and return its answer."""
        kind = type(command)
        if kind is Claim:
            return self._claim(command)  # type: ignore[arg-type]
        if kind is Invoke:
            return self.invoke(command)  # type: ignore[arg-type]
        if kind is Settle:
            if self.window_may_have_changed(command):  # type: ignore[arg-type]
                self.refresh()
                command = self.with_current_window(command)  # type: ignore[arg-type]
            try:
                answer = self.channel.send((command,))[0]  # type: ignore[arg-type]
            except StoreClosed as error:
                answer = Unavailable(error)
                self.drop(command.owner, None)  # type: ignore[attr-defined]  # nothing is left to repeat it on
            if type(answer) is not Unavailable:
                self.drop(command.owner, None)  # type: ignore[attr-defined]
            return answer
        return self._rarely(command)

    def _claim(self, claim: Claim) -> Any:
        sent_at = self.steady_s()
        try:
            answer = self.channel.send((claim,))[0]
            if type(answer) is Granted:
                self.keeper.keep(LiveClaim.since(claim, answer, sent_at, self.run_max_s))
        except Exception:
            raise
        except BaseException:  # the claim may be granted, and nothing renews it yet
            recall(self.channel, (claim,))
            raise
        return answer

    def _rarely(self, command: Command[Any]) -> Any:
        match command:
            case Watch():
                if owners := held_owners(command.id):
                    check_own(self.channel.send((Lookup(command.id),))[0], owners)
                return self.watches.enter(command.id, command.wait_s)
            case Sleep():
                try:
                    return self.watches.sleep(command.watch, command.retry_after_s)
                except BaseException:
                    command.watch.leave()
                    raise
            case Unwatch():
                return command.watch.leave()
            case Pause():
                delay_s = self.pause_s(command)
                if delay_s is not None:
                    time.sleep(delay_s)
                return delay_s is not None
            case Ask():
                return _report_probe_error(command, _call(partial(command.probe, command.inquiry), None))
            case _:
                return self.channel.send((command,))[0]  # type: ignore[arg-type]

    def invoke(self, command: Invoke) -> Ran:
        """Call the handler. Returns its value or its error."""
        claim, granted = command.claim, command.granted
        if claim is None:
            return _call(command.call, None)
        run = self.begin(claim, granted)
        if run is None:
            return _claim_lost_error()
        outer = run.outer = running.get()
        try:
            running.set(run)
            return _call(command.call, run)
        finally:
            run.kept.ended = True
            running.set(outer)

    def refresh(self) -> None:
        """Read the windows in force, if they are due and the store can be reached."""
        if self.steady_s() < self.runtime.fresh_until:
            return  # as after nearly every handler
        with suppress(StoreError):
            self.runtime.refresh()

    def step(self, flow: Flow[Any]) -> Any:
        """Run a step's flow inside a handler."""
        return drive(flow, self)

    def astep(self, _flow: Flow[Any]) -> Any:
        """Raise `TypeError`: a blocking handler has no loop to await in."""
        raise TypeError("an async step needs an async handler; make the handler async def, or the step def")


def _call(call: Callable[[], Any], run: HandlerRun | None) -> Ran:
    try:
        if run is not None:
            run.kept.started = True  # from here on a release counts the attempt
        value = call()
        return Returned(value) if type(value) not in UNFINISHED else _unfinished_error(value)
    except BaseException as error:  # noqa: BLE001 - the flow decides what becomes of it
        return _check_raised(error, run)


def _unfinished_error(value: Any) -> Raised:
    """Return the error of a handler that returned a coroutine or generator: it has not run, so no attempt counts."""
    return Raised(refuse_unfinished(value), interrupted=True)


def _check_raised(error: BaseException, run: HandlerRun | None) -> Raised:
    """Return a handler's error. A `ClaimLost` of an inner claim says nothing about this handler's claim."""
    return Raised(
        error,
        interrupted=isinstance(error, KeyboardInterrupt),
        lost=run is not None and run.kept.lost and isinstance(error, ClaimLost),
    )


def _claim_lost_error() -> Raised:
    """Return the error of a claim that was lost before its handler started: nothing has happened."""
    return Raised(NotApplied("the claim was lost before the handler started"), interrupted=True, lost=True)


class AsyncExecutor(ExecutorBase):
    """Carry out commands, awaiting."""

    keeper: LoopKeeper
    loop: "asyncio.AbstractEventLoop | None" = None
    """The loop of the handlers: a step inside a handler in a thread runs its flow there."""

    def __call__(self, command: Command[Any]) -> Coroutine[Any, Any, Any]:
        """Execute one command; await its answer."""
        kind = type(command)
        if kind is Claim:
            return self._claim(command)  # type: ignore[arg-type]
        if kind is Invoke:
            return self.invoke(command)  # type: ignore[arg-type]
        if kind is Settle:
            return self._settle(command)  # type: ignore[arg-type]
        return self._rarely(command)

    async def _claim(self, claim: Claim) -> Any:
        sent_at = self.steady_s()
        answer = (await self.channel.asend((claim,)))[0]
        if type(answer) is Granted:
            self.keeper.keep(LiveClaim.since(claim, answer, sent_at, self.run_max_s))
        return answer

    async def _settle(self, settle: Settle) -> Any:
        if self.window_may_have_changed(settle):
            await self.refresh()
            settle = self.with_current_window(settle)
        # Cancelled or not, the result of a handler must reach the store: the item is queued by then.
        try:
            answer = (await self.channel.asend((settle,)))[0]
        except StoreClosed as error:
            answer = Unavailable(error)
            self.drop(settle.owner, None)  # nothing is left to repeat it on
        if type(answer) is not Unavailable:
            self.drop(settle.owner, None)
        return answer

    async def _rarely(self, command: Command[Any]) -> Any:
        match command:
            case Watch():
                if owners := held_owners(command.id):
                    check_own((await self.channel.asend((Lookup(command.id),)))[0], owners)
                return self.watches.enter(command.id, command.wait_s)
            case Sleep():
                try:
                    return await self.watches.asleep(command.watch, command.retry_after_s)
                except BaseException:
                    command.watch.leave()
                    raise
            case Unwatch():
                return command.watch.leave()
            case Pause():
                delay_s = self.pause_s(command)
                if delay_s is not None:
                    await asyncio.sleep(delay_s)
                return delay_s is not None
            case Ask():
                return _report_probe_error(command, await _acall(partial(_ask, command)))
            case _:
                return (await self.channel.asend((command,)))[0]  # type: ignore[arg-type]

    async def invoke(self, command: Invoke) -> Ran:
        """Await the handler. Returns its value or its error; a lost claim cancels it."""
        claim, granted = command.claim, command.granted
        if claim is None:
            return await _acall(command.call)
        run = self.begin(claim, granted)
        if run is None:
            return _claim_lost_error()
        self.loop = asyncio.get_running_loop()
        task, kept = asyncio.current_task(), run.kept
        assert task is not None
        cancelling = task.cancelling()
        outer = run.outer = running.get()
        try:
            running.set(run)
            kept.on_lost = task.cancel
            kept.started = True
            value = await command.call()  # finished, lost or not: the store decides whose result counts
            return Returned(value) if type(value) not in UNFINISHED else _unfinished_error(value)
        except asyncio.CancelledError as error:
            if kept.stopped and task.cancelling() == cancelling + 1:  # only the keeper has cancelled it
                return Raised(
                    ClaimLost("another attempt took over, or the store could not be reached"), lost=True
                )
            return Raised(error, interrupted=True)
        except BaseException as error:  # noqa: BLE001 - the flow decides what becomes of it
            return _check_raised(error, run)
        finally:
            kept.on_lost = None
            kept.ended = True
            running.set(outer)
            if kept.stopped:
                task.uncancel()

    async def refresh(self) -> None:
        """Read the windows in force, if they are due and the store can be reached."""
        if self.steady_s() < self.runtime.fresh_until:
            return  # as after nearly every handler
        with suppress(StoreError):
            await self.runtime.arefresh()

    def step(self, flow: Flow[Any]) -> Any:
        """Run a step's flow inside a handler that a runner called in a thread."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return drive(flow, self._from_thread)
        raise TypeError("in an async handler a step must be async def too")  # it would stop the loop

    def _from_thread(self, command: Command[Any]) -> Any:
        if isinstance(command, Invoke):
            return _call(command.call, None)
        assert self.loop is not None
        return asyncio.run_coroutine_threadsafe(self(command), self.loop).result()

    async def astep(self, flow: Flow[Any]) -> Any:
        """Run a step's flow inside a handler."""
        return await adrive(flow, self)


async def _ask(command: Ask) -> Any:
    """Await a probe; a blocking one runs in a thread, not in the loop."""
    probe = command.probe
    if inspect.iscoroutinefunction(probe):
        return await probe(command.inquiry)
    answer = await asyncio.to_thread(probe, command.inquiry)
    return await answer if inspect.isawaitable(answer) else answer


def _report_probe_error(command: Ask, ran: Ran) -> Ran:
    """Log a probe that failed: it counts as `CannotTell`, and its error is shown nowhere else."""
    answer = answer_of(ran)
    if isinstance(answer, CannotTell) and (isinstance(ran, Raised) or ran.value is not answer):
        error = ran.error if isinstance(ran, Raised) else None
        logging.getLogger("semel").warning(
            "the probe of consumer %r could not tell: %s",
            command.inquiry.consumer,
            answer.reason,
            exc_info=error,
        )
    return ran


async def _acall(call: Callable[[], Any]) -> Ran:
    """Await a call that is not under a claim."""
    try:
        value = await call()
        return Returned(value) if type(value) not in UNFINISHED else _unfinished_error(value)
    except asyncio.CancelledError as error:
        return Raised(error, interrupted=True)
    except BaseException as error:  # noqa: BLE001 - the flow decides what becomes of it
        return _check_raised(error, None)
