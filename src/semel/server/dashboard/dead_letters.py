"""Dead letters of the brokers that the service or its workers name: read, group, replay."""

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any, Literal

from msgspec import Struct

from semel.brokers import source_for
from semel.brokers.dead_letters import DeadLetter, DeadLetterQueue, replay
from semel.client.client_async import AsyncSemel
from semel.client.items import ItemBuilder
from semel.errors import SemelError, UsageError
from semel.observe.formatting import now_us, redact
from semel.observe.workers import SeenWorker
from semel.policy import Policy
from semel.server.auth import Caller
from semel.server.dashboard.known_sources import sort_sources
from semel.server.problems import HttpProblem
from semel.server.service import Service
from semel.types import Mode

__all__ = ["DeadLetterReader", "Letters", "SourceLetters"]

LETTERS_MAX = 500
"""The most letters of a source that are looked at, and that one press replays."""
LOOK_S = 10.0
"""How long a broker has to answer."""
KEYS_SHOWN = 20
EXHAUSTED = re.compile(r"^AttemptsExhausted: attempt \d+ of \d+ failed: ")
REPLAYABLE = ("failed", "late", "unknown")
"""Reasons whose letters may run again under their own key. `unknown`: once it is resolved."""


class SourceLetters(Struct, frozen=True):
    """The dead letters of one source."""

    number: int
    """Its place among the sources."""
    name: str
    groups: tuple[dict[str, Any], ...] = ()
    events: frozenset[tuple[str, str]] = frozenset()
    """Consumers and keys."""
    count: int = 0
    has_more: bool = False
    trouble: str = ""
    """Why it could not be read; empty: it could."""


class Letters(Struct, frozen=True):
    """The dead letters of all sources at one time."""

    taken_us: int
    sources: tuple[SourceLetters, ...] = ()
    missing: tuple[str, ...] = ()
    """URLs of sources that workers have and that cannot be read from here, without their passwords."""

    @property
    def events(self) -> frozenset[tuple[str, str]]:
        """Consumers and keys of the events that have a letter."""
        return frozenset(event for source in self.sources for event in source.events)

    @property
    def number(self) -> int:
        """How many letters need a person."""
        return sum(source.count for source in self.sources)

    @property
    def has_more(self) -> bool:
        """Whether a source has more letters than are looked at."""
        return any(source.has_more for source in self.sources)


class DeadLetterReader:
    """Reads and replays the dead letters of the sources in the settings, and of those that heartbeats name.

    Each use opens a connection of its own. `workers` returns the workers seen lately.
    """

    def __init__(
        self, service: Service, workers: Callable[[], Awaitable[Sequence[SeenWorker] | None]]
    ) -> None:
        self._service = service
        self._workers = workers
        self._urls = list(service.settings.dead_letters)
        for url in self._urls:
            source_for(url)  # a wrong one is refused at the start
        self._lock = asyncio.Lock()
        """One connection at a time: SQS hides what another one looks at."""

    async def read(self) -> Letters:
        """Look at every source. A source that does not answer is reported, and the others are read."""
        more, missing = sort_sources(await self._workers() or (), self._urls, self._service.settings.store)
        self._urls += more
        found = [await self._read_one(number, url) for number, url in enumerate(self._urls)]
        return Letters(now_us(), tuple(found), tuple(missing))

    async def _read_one(self, number: int, url: str) -> SourceLetters:
        name = redact(url)
        try:
            async with self._open_queue(url) as queue:
                letters = await queue.look(LETTERS_MAX)
        except TimeoutError:
            return SourceLetters(number, name, trouble=f"no answer within {LOOK_S:g} s")
        except Exception as error:  # noqa: BLE001 - one broker's trouble must not hide the others
            return SourceLetters(number, name, trouble=redact(str(error)) or type(error).__name__)
        return SourceLetters(
            number,
            name,
            tuple(_groups(letters)),
            frozenset((dead.letter.consumer, dead.letter.key) for dead in letters if dead.letter.key),
            len(letters),
            len(letters) >= LETTERS_MAX,
        )

    @asynccontextmanager
    async def _open_queue(self, url: str) -> AsyncIterator[DeadLetterQueue]:
        async with self._lock, asyncio.timeout(LOOK_S):
            source: Any = source_for(url)
            try:
                await getattr(source, "visit", source.open)()  # creates nothing at the broker, where it can
                yield source
            finally:
                await source.close()

    async def replay(
        self, caller: Caller, name: str, group: tuple[str, str, str], modes: dict[tuple[str, str], Mode]
    ) -> tuple[int, int]:
        """Replay the letters of a source's group. Returns how many were published again, and how many were refused.

        Each is written into the audit first. Raises `HttpProblem` if the source is not known or does not answer.
        """
        return await self._act(caller, name, group, modes, "replay")

    async def drop(
        self, caller: Caller, name: str, group: tuple[str, str, str], modes: dict[tuple[str, str], Mode]
    ) -> tuple[int, int]:
        """Remove the letters of a source's group: their messages are lost. Returns as `replay` does."""
        return await self._act(caller, name, group, modes, "drop")

    async def _act(
        self,
        caller: Caller,
        name: str,
        group: tuple[str, str, str],
        modes: dict[tuple[str, str], Mode],
        verb: Literal["replay", "drop"],
    ) -> tuple[int, int]:
        url = next((each for each in self._urls if redact(each) == name), None)
        if url is None:  # another instance may have found it: the next look finds it here
            raise HttpProblem(422, "invalid", "choose a source; load the page again if it was listed")
        done = refused = 0
        try:
            async with self._open_queue(url) as queue:
                for dead in await queue.look(LETTERS_MAX):
                    if _group_of(dead) != group:
                        continue
                    try:
                        await self._act_on(caller, queue, dead, modes, redact(url), verb)
                    except UsageError:  # it was settled since, runs again, or is not decided yet
                        refused += 1
                    else:
                        done += 1
        except SemelError:
            raise
        except TimeoutError as error:
            raise HttpProblem(
                503, "unavailable", f"the broker was too slow; {done} letters were done with, the others stay"
            ) from error
        return done, refused

    async def _act_on(
        self,
        caller: Caller,
        queue: DeadLetterQueue,
        dead: DeadLetter,
        modes: dict[tuple[str, str], Mode],
        url: str,
        verb: Literal["replay", "drop"],
    ) -> None:
        consumer, key = dead.letter.consumer, dead.letter.key
        tenants = [place[0] for place in modes if place[1] == consumer]
        details = {"consumer": consumer, "key": key, "letter": dead.id, "source": url}
        if verb == "drop":
            await self._service.note(caller, tenants[0] if len(tenants) == 1 else "", "dlq drop", **details)
            await queue.remove(dead)
            return
        if len(tenants) != 1:
            raise UsageError("the letter names no consumer of one tenant; use semel dlq replay --tenant")
        await self._service.note(caller, tenants[0], "dlq replay", **details)
        plan = ItemBuilder(
            consumer=consumer,
            tenant=tenants[0],
            window="24h",
            lease="30s",
            mode=modes[tenants[0], consumer],
            policy=Policy(),
        )
        await replay(queue, dead, AsyncSemel(plan, self._service.runtime))


def _group_of(dead: DeadLetter) -> tuple[str, str, str]:
    """Return what the letters of a group share: consumer, reason, and the kind of error."""
    return dead.letter.consumer, dead.letter.reason, _kind(dead)


def _kind(dead: DeadLetter) -> str:
    """The class of the error, which comes before its message."""
    kind, colon, _ = _error(dead).partition(":")
    return kind if colon and " " not in kind else ""


def _error(dead: DeadLetter) -> str:
    """The last attempt's own error, without the words that it was the last one."""
    return EXHAUSTED.sub("", dead.letter.error)


def _groups(letters: Sequence[DeadLetter]) -> list[dict[str, Any]]:
    found: dict[tuple[str, str, str], list[DeadLetter]] = {}
    for dead in letters:
        found.setdefault(_group_of(dead), []).append(dead)
    return sorted((_group(*name, each) for name, each in found.items()), key=lambda group: -group["last_us"])


def _group(consumer: str, reason: str, kind: str, letters: list[DeadLetter]) -> dict[str, Any]:
    times = [at for at in (_time_us(dead.letter.at) for dead in letters) if at]
    latest = max(letters, key=lambda dead: dead.letter.at)
    return {
        "consumer": consumer,
        "reason": reason,
        "kind": kind,
        "message": _error(latest).removeprefix(f"{kind}: "),
        "count": len(letters),
        "first_us": min(times, default=0),
        "last_us": max(times, default=0),
        "workers": [
            name for name, _ in Counter(dead.letter.worker for dead in letters).most_common(3) if name
        ],
        "keys": [(dead.id, dead.letter.key) for dead in letters[:KEYS_SHOWN]],
        "replayable": reason in REPLAYABLE,
    }


def _time_us(text: str) -> int:
    try:
        return round(1e6 * datetime.fromisoformat(text).timestamp())
    except (ValueError, OverflowError, OSError):
        return 0
