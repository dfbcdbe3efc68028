"""Warn when a window is shorter than a broker's horizon: what is delivered again after it runs again."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from semel.aclient import AsyncSemel
from semel.cli.output import redacted, say
from semel.errors import SemelError, StoreError
from semel.observe.sources import SourceProbe, SourceFacts, of_windows
from semel.windows import exact_text

__all__ = ["warn_of_short_windows"]

ASK_S = 10.0


async def warn_of_short_windows(once: AsyncSemel, urls: Sequence[str]) -> None:
    """Compare the window in force with what each broker says. One that does not answer is reported by its runner."""
    if once.mode == "observe":
        return
    with suppress(StoreError):  # then the client's own counts
        await once._runtime.arefresh()  # noqa: SLF001 - a look at the settings, which nobody is given
    window_us = once._window_known("")  # noqa: SLF001 - as above
    from semel.brokers.circumstances import look_at

    for url in urls:
        with suppress(SemelError, TimeoutError):
            facts = await asyncio.wait_for(look_at(url), ASK_S)
            for line in warnings(facts, window_us, once.consumer):
                say(redacted(f"warning: {line}"))


def warnings(facts: SourceFacts, window_us: int, consumer: str) -> list[str]:
    """What to say of one source and the window."""
    if facts.horizon_s is None:
        after = f"what comes after the window of {exact_text(window_us)} runs again"
        return [f"how long {facts.name} may deliver a message again is unknown: {after}"]
    around = SourceProbe(sources=(facts,), consumer=consumer)
    return [f"{each.what} Change: {each.fix}." for each in of_windows(around, window_us)]
