"""Inject a fault into a flow or a store at a chosen point, to test what survives a crash there.

`Driver` runs flows on a real store and counts their yields; a `Strike` names a yield and the fault to inject there.
`TrapStore` wraps a store and calls a function at named points, so that a test can kill a real process there.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

from msgspec import Struct

from semel.core.commands import (
    Answer,
    Ask,
    Claim,
    Flow,
    Granted,
    Invoke,
    Item,
    Mark,
    Pause,
    Raised,
    Ran,
    Returned,
    Settle,
    Sleep,
    Unwatch,
    Watch,
)
from semel.core.protocols import Store, StoreWrapper
from semel.errors import StoreUnavailable
from semel.runtime.generators import drive
from semel.testing import ManualClock
from semel.types import Unavailable

__all__ = ["FAULTS", "Died", "Driver", "Fault", "Point", "Strike", "TrapStore"]

T = TypeVar("T")

Fault: TypeAlias = Literal["not_sent", "reply_lost", "late", "after_reply", "stalled"]
FAULTS: tuple[Fault, ...] = ("not_sent", "reply_lost", "late", "after_reply", "stalled")
"""The faults that can be injected at a yield.

- `not_sent`: the process dies before the command leaves it.
- `reply_lost`: the command is carried out, its reply is lost, and the flow continues.
- `late`: no answer comes, the flow continues, and the command is carried out afterwards.
- `after_reply`: the process dies after it received the reply.
- `stalled`: the process stops before the command, others run past its lease, then it continues.
"""

Point: TypeAlias = Literal["before_claim", "after_claim", "before_complete", "after_complete"]
PAUSE_S = 0.01


class Died(BaseException):
    """Raised where the simulated process dies. No handler catches it."""


class Strike(Struct, frozen=True):
    """One fault at one yield, counted from zero."""

    at: int
    fault: Fault


class Driver:
    """One simulated process that runs flows on one store.

    Waiting advances the clock. `granted` is the claim under which the handler runs.
    """

    def __init__(
        self,
        store: Store,
        clock: ManualClock,
        strike: Strike | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._clock = clock
        self._strike = strike
        self._meanwhile = meanwhile
        self._patient = True
        self.commands: list[str] = []
        """Names of the commands that the flow has yielded so far."""
        self.granted: Granted | None = None
        self.late: list[Callable[[], Any]] = []
        """Commands still in flight; `land` carries them out."""

    def run(self, flow: Flow[T]) -> T:
        """Run a flow to its end. Raises `Died` if the strike kills the process."""
        return drive(flow, self._apply_strike)

    def land(self) -> None:
        """Carry out the late commands."""
        late, self.late = self.late, []
        for call in late:
            call()

    def _apply_strike(self, command: Any) -> Any:
        number = len(self.commands)
        self.commands.append(type(command).__name__)
        if self._strike is None or self._strike.at != number:
            return self._perform(command)
        match self._strike.fault:
            case "not_sent":
                raise Died
            case "late":
                self._patient = False
                self.late.append(self._bind(command))
                return _silence(command)
            case "reply_lost":
                answer = self._perform(command)
                return _silence(command, answer)
            case "after_reply":
                self._perform(command)
                raise Died
            case "stalled":
                self._meanwhile()
                return self._perform(command)

    def _bind(self, command: Any) -> Callable[[], Any]:
        granted = self.granted if not isinstance(command, Invoke) else command.granted or self.granted

        def call() -> Any:
            self.granted = granted
            return self._perform(command)

        return call

    def _perform(self, command: Any) -> Any:
        match command:
            case Invoke():
                return self._invoke(command)
            case Ask():
                return Returned(command.probe(command.inquiry))
            case Watch():
                return self._clock.steady_s() + command.wait_s
            case Sleep():
                left_s = command.watch - self._clock.steady_s()
                self._clock.advance(max(0.0, min(left_s, command.retry_after_s + PAUSE_S)))
                return left_s > 0
            case Unwatch():
                return None
            case Pause():
                self._clock.advance(PAUSE_S)
                return self._patient
            case _:
                return self._store.send([command])[0]

    def _invoke(self, command: Invoke) -> Ran:
        if command.granted is not None:
            self.granted = command.granted
        try:
            return Returned(command.call())
        except Exception as error:  # noqa: BLE001  # the flow decides how to handle it
            return Raised(error)


def _silence(command: Any, answer: Any = None) -> Any:
    """Return the answer that a process gets for a command without a reply."""
    if isinstance(command, Invoke | Ask):
        return Raised(ConnectionError("the sink did not answer"))
    if isinstance(command, Watch | Sleep | Unwatch | Pause):
        return answer
    return Unavailable(StoreUnavailable("no answer"))


class TrapStore(StoreWrapper):
    """A store that calls `trap(point)` before and after claims and marks, and before and after settles."""

    def __init__(self, store: Store, trap: Callable[[Point], None]) -> None:
        super().__init__(store)
        self._trap = trap

    def send(self, items: Sequence[Item], /) -> list[Answer]:
        """Send to the wrapped store, and call `trap` before and after."""
        claims = any(isinstance(item, Claim | Mark) for item in items)
        settles = any(isinstance(item, Settle) for item in items)
        if claims:
            self._trap("before_claim")
        if settles:
            self._trap("before_complete")
        answers = self._store.send(items)
        if claims:
            self._trap("after_claim")
        if settles:
            self._trap("after_complete")
        return answers
