"""Wait for what sends no signal: look again and again, for a limited time."""

import asyncio
import inspect
import threading
import time
from collections.abc import Callable

LOOK_S = 0.005
ASK_S = 0.02
"""Between looks that have to be awaited: they ask a server."""
WITHIN_S = 60.0
"""Much longer than anything takes on a busy computer."""


def await_true(condition: Callable[[], object], wait_s: float = WITHIN_S) -> bool:
    """Look until the condition holds or the time is over; for threads."""
    between_looks = threading.Event()  # never set
    give_up_at = time.monotonic() + wait_s
    while not condition():
        if time.monotonic() >= give_up_at:
            return False
        between_looks.wait(LOOK_S)
    return True


async def until(condition: Callable[[], object], wait_s: float = WITHIN_S) -> None:
    """Look until the condition holds, and fail when the time is over; what it returns is awaited where it can be."""
    give_up_at = time.monotonic() + wait_s
    while True:
        held = condition()
        if asks := inspect.isawaitable(held):
            held = await held
        if held:
            return
        assert time.monotonic() < give_up_at, f"it did not become so within {wait_s:g} s"
        await asyncio.sleep(ASK_S if asks else LOOK_S)
