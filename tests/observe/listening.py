"""A hook that remembers, and clients to listen to in either colour."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import semel
from semel.observe import events


class Heard:
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.all: list[events.HookEvent] = []

    def __call__(self, happening: events.HookEvent) -> None:
        self.all.append(happening)

    def names(self) -> list[str]:
        """The kinds of what happened to deliveries, in order."""
        return [each.name for each in self.all if isinstance(each, events.DeliveryEvent)]

    def only(self, kind: type[Any]) -> Any:
        """The one event of this kind."""
        (found,) = [each for each in self.all if isinstance(each, kind)]
        return found

    def of(self, kind: type[Any]) -> list[Any]:
        return [each for each in self.all if isinstance(each, kind)]


class Plainly:
    """An async client used as one that blocks: what both do is told alike."""

    def __init__(self, url: Any, **options: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._client = semel.aopen(url, **options)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._client, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            args = tuple(_awaited(each) for each in args)
            return self._loop.run_until_complete(found(*args, **kwargs))

        return call

    @property
    def records(self) -> Any:
        return _Facade(self._client.records, self._loop)

    def end(self) -> None:
        self._loop.run_until_complete(self._client.close())
        self._loop.close()


class _Facade:
    def __init__(self, facade: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._facade, self._loop = facade, loop

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self._loop.run_until_complete(
            getattr(self._facade, name)(*args, **kwargs)
        )


def _awaited(argument: Any) -> Any:
    """A handler as an async client wants it."""
    if not callable(argument) or isinstance(argument, type):
        return argument

    async def handler(*args: Any, **kwargs: Any) -> Any:
        return argument(*args, **kwargs)

    handler.__qualname__ = argument.__qualname__
    return handler


Opened = Callable[..., Any]


@contextmanager
def listened(colour: str, url: Any, **options: Any) -> Iterator[tuple[Any, Heard]]:
    """A client of this colour and what it tells."""
    heard = Heard()
    options = {"consumer": "billing", "hooks": [heard], **options}
    if colour == "sync":
        with semel.open(url, **options) as once:
            yield once, heard
        return
    client = Plainly(url, **options)
    try:
        yield client, heard
    finally:
        client.end()
