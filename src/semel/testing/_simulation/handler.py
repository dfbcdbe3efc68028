"""The handler of a simulated event as a flow: its effects, its steps, and its end."""

from collections.abc import Callable, Generator
from functools import partial
from typing import Any

from semel.core.commands import Claim, Command, Flow, Granted, Invoke, Raised, Ran
from semel.errors import ClaimLost
from semel.runtime.context import HandlerRun
from semel.runtime.keeper import LiveClaim
from semel.testing._simulation.referee import WHOLE, SimEvent

VALUE_BYTES_MAX = 1000
Handler = Callable[[Claim | None, Granted | None], Generator[Any, Any, Ran]]


class Leave(Command[Ran], frozen=True):
    """Return from the handler with this value; the answer says whether it returned or raised."""

    value: Any


def have_effect(part: str) -> str:
    """Stand in for the effect of one part, which the world carries out itself. Returns the name of the part."""
    return part


def part_of(command: Invoke) -> str:
    """Return the part whose effect an `Invoke` stands for; empty if it is the whole handler."""
    call = command.call
    return call.args[0] if isinstance(call, partial) and call.func is have_effect else ""


def handle(
    parts: tuple[str, ...], value: str, claim: Claim | None, granted: Granted | None
) -> Generator[Any, Any, Ran]:
    """Have the effect of every part, then return `value`. No parts: the effect belongs to a transaction."""
    if parts == WHOLE:
        ran: Ran = yield Invoke(partial(have_effect, ""))
        if isinstance(ran, Raised):
            return ran
    elif parts:
        assert claim is not None
        assert granted is not None
        failed = yield from _run_steps(parts, claim, granted)
        if failed is not None:
            return failed
    left: Ran = yield Leave(value)
    return left


def _run_steps(parts: tuple[str, ...], claim: Claim, granted: Granted) -> Flow[Raised | None]:
    """Run each part as a real step of the runtime: one that an earlier attempt recorded is not run again."""
    live = LiveClaim(claim, granted.fence, claim.lease_us / 1e6, 0.0, 0.0, 0.0)
    run = HandlerRun(live, granted, None, VALUE_BYTES_MAX)
    for part in parts:
        run.begin_step(part)
        if part in run.steps:
            continue
        ran, answer = yield from run.step_flow(part, partial(have_effect, part), None)
        if isinstance(ran, Raised):
            return ran
        try:
            run.step_value(part, (ran, answer))
        except ClaimLost as error:
            return Raised(error, lost=True)
        except Exception as error:  # noqa: BLE001  # as a handler raises it
            return Raised(error)
    return None


def handler_of(event: SimEvent, *, in_transaction: bool = False) -> Handler:
    """Return the handler of an event. Each attempt returns another value."""

    def handler(claim: Claim | None, granted: Granted | None) -> Generator[Any, Any, Ran]:
        value = f"{event.payload} with {0 if granted is None else granted.fence}"
        return handle(() if in_transaction else event.parts, value, claim, granted)

    return handler


def play(flow: Generator[Any, Any, Any], handler: Handler) -> Generator[Any, Any, Any]:
    """Drive a flow; where it calls its handler, the handler's own commands come instead."""
    answer = None
    while True:
        try:
            command = flow.send(answer)
        except StopIteration as end:
            return end.value
        if type(command) is Invoke:
            answer = yield from handler(command.claim, command.granted)
        else:
            answer = yield command
