"""Connect to a source of events, and again whenever the connection ends."""

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from time import monotonic
from typing import TYPE_CHECKING

from msgspec import Struct

from semel.errors import PolicyInvalid, SourceRefused
from semel.extras import install_command
from semel.intake import Event, Intake
from semel.outage_log import OutageLog
from semel.sockets.message import Fields, Invalid

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

__all__ = ["Backoff", "ListenerCounters", "Listener"]

_log = logging.getLogger("semel")

KEEPALIVE_S = 20.0
"""A source that does not answer a ping for so long is taken for gone."""
OPEN_S = 10.0
CLOSE_S = 2.0
GOING_AWAY = 1001
REFUSED_STATUS = (401, 403, 404)
"""What no time heals, unless the source has let us in before."""
QUEUE_MAX = 16
"""Messages that are read ahead; then the source is left waiting."""
LISTENER_IN_FLIGHT_MAX = 100
"""Events that wait for the store."""
STOP_S = 10.0
"""How long a stop waits for events that were received to be journaled."""
STEADY_S = 10.0
"""A connection that lasted so long was a good one: the next attempt comes soon."""


class Backoff(Struct, frozen=True, kw_only=True):
    """How long to wait before connecting again: doubled each time, and spread: a fleet must not return as one."""

    first_s: float = 0.2
    max_s: float = 30.0

    def delay_s(self, tries: int, chance: float) -> float:
        """Before attempt `tries` + 1; `chance` lies between 0 and 1."""
        return min(self.max_s, self.first_s * float(1 << min(tries, 30))) * (0.5 + chance / 2)


class ListenerCounters(Struct):
    """What a listener has seen."""

    connected: int = 0
    received: int = 0
    accepted: int = 0
    duplicates: int = 0
    invalid: int = 0


class Listener:
    """Hands the events of a source to an intake. It never sends again: nothing is let go before it is journaled.

    While the store does not answer, events are held and the socket is not read any further: the source is slowed
    down, or closes the connection, which is made again.
    """

    def __init__(
        self,
        url: str,
        intake: Intake,
        *,
        fields: Fields | None = None,
        backoff: Backoff | None = None,
        headers: Mapping[str, str] | None = None,
        chance: Callable[[], float] = random.random,
    ) -> None:
        if not url.startswith(("ws://", "wss://")):
            raise PolicyInvalid("a source is ws://host/path or wss://host/path")
        if find_spec("websockets") is None:
            raise PolicyInvalid(
                f"to listen needs websockets; install the extra: {install_command('websocket')}"
            )
        self._url = url
        self._intake = intake
        self._fields = fields or Fields()
        self._backoff = backoff or Backoff()
        self._headers = dict(headers or {})
        self._chance = chance
        self._stopping = asyncio.Event()
        self._taking: set[asyncio.Task[None]] = set()
        self.counts: ListenerCounters = ListenerCounters()

    def stop(self) -> None:
        """Have `run` close the connection and end, once what was received is journaled."""
        self._stopping.set()

    async def run(self) -> None:
        """Listen until told to stop."""
        running = asyncio.create_task(self._listen_on())
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (running, stopping):
                task.cancel()
            await asyncio.gather(running, stopping, return_exceptions=True)
            if self._taking:
                _, unanswered = await asyncio.wait(self._taking, timeout=STOP_S)
                for task in unanswered:  # the intake goes on with them until it is drained
                    task.cancel()
        if not running.cancelled():
            running.result()

    async def _listen_on(self) -> None:
        from websockets.asyncio.client import connect
        from websockets.exceptions import InvalidHandshake, InvalidStatus, InvalidURI, WebSocketException

        outage = OutageLog(_log, "the source")
        tries = 0
        while True:
            connected_at = None
            try:
                async with connect(
                    self._url,
                    additional_headers=self._headers,
                    open_timeout=OPEN_S,
                    close_timeout=CLOSE_S,
                    ping_interval=KEEPALIVE_S,
                    ping_timeout=KEEPALIVE_S,
                    max_size=self._intake.body_bytes_max,
                    max_queue=QUEUE_MAX,
                ) as connection:
                    connected_at = monotonic()
                    outage.end()
                    self.counts.connected += 1
                    _log.info("connected as %s", self._intake.instance)
                    try:
                        await self._read(connection)
                    except asyncio.CancelledError:
                        await connection.close(GOING_AWAY)
                        raise
                why = "the source closed the connection"
            except InvalidURI as error:
                raise PolicyInvalid(str(error)) from error
            except InvalidStatus as error:
                if error.response.status_code in REFUSED_STATUS and not self.counts.connected:
                    raise SourceRefused(
                        f"the source answers {error.response.status_code}: check its URL, and the headers that it wants"
                        " (--header-file)"
                    ) from error
                why = str(error)
            except (InvalidHandshake, WebSocketException, OSError, TimeoutError) as error:
                why = f"{type(error).__name__}: {error}"
            if connected_at is not None and monotonic() - connected_at >= STEADY_S:
                tries = 0
            delay_s = self._backoff.delay_s(tries, self._chance())
            outage.report(why)
            await asyncio.sleep(delay_s)
            tries += 1

    async def _read(self, connection: "ClientConnection") -> None:
        room = asyncio.Semaphore(LISTENER_IN_FLIGHT_MAX)
        async for message in connection:
            self.counts.received += 1
            event = self._fields.read(message, self._intake.body_bytes_max)
            if isinstance(event, Invalid):
                self.counts.invalid += 1
                _log.warning("a message is no event: %s", event.reason)
                continue
            await room.acquire()
            task = asyncio.create_task(self._take(event))
            self._taking.add(task)
            task.add_done_callback(self._taking.discard)
            task.add_done_callback(lambda _task: room.release())

    async def _take(self, event: Event) -> None:
        try:
            receipt = await self._intake.take(event, hold_s=None)
        except Exception:  # noqa: BLE001 - one event must not end the socket
            _log.exception("event %r could not be taken", event.id)
            return
        match receipt.status:
            case "accepted":
                self.counts.accepted += 1
            case "duplicate":
                self.counts.duplicates += 1
            case "refused":
                self.counts.invalid += 1
                _log.warning("event %r is refused: %s", event.id, receipt.reason)
            case "busy":
                _log.error("event %r was not taken: %s", event.id, receipt.reason)
