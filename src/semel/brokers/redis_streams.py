"""Redis Streams: consumer groups, and what dead consumers had in hand.

A message that a consumer has in hand grows idle; the heartbeat sets its idle time back, and one that nobody speaks
for is taken over by whoever asks next. To give a message back is to make it look idle: no queue beside the stream.
"""

import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from time import monotonic
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import msgspec
from redis.asyncio import Redis
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)

from semel.brokers.dead_letters import DeadLetter, headers_of
from semel.brokers.source import Arrival, DeadLetterInfo
from semel.errors import PolicyInvalid, SemelError, SourceRefused, SourceUnavailable
from semel.runtime.urls import struct_options

__all__ = ["RedisStream", "RedisStreamsOptions", "from_url"]

CONNECT_S = 10.0
BODY = "data"
"""The field that holds the body; the others are headers. Without it the fields together are the body, as JSON."""

# Only for messages that are still this consumer's: to claim another's would take it out of that one's hands.
SAY = """
local gone = {}
for i = 4, #ARGV do
  local held = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[i], ARGV[i], 1)
  if held[1] and held[1][2] == ARGV[2] then
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[i], 'IDLE', ARGV[3], 'JUSTID')
  else
    gone[#gone + 1] = ARGV[i]
  end
end
return gone
"""

# Before `low` no group has anything in hand or still to come: of each group the oldest entry that is pending, or where
# there is none the last that it was given; of those the lowest. Ids are compared as text: their parts may exceed what
# a number here can hold.
LOWEST = """
local function before(a, b)
  local am, as = string.match(a, '(%d+)-(%d+)')
  local bm, bs = string.match(b, '(%d+)-(%d+)')
  if am == bm then am, bm = as, bs end
  if #am ~= #bm then return #am < #bm end
  return am < bm
end
local low
for _, said in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  local group = {}
  for i = 1, #said, 2 do group[said[i]] = said[i + 1] end
  local at = group['last-delivered-id']
  if group['pending'] > 0 then
    local oldest = redis.call('XPENDING', KEYS[1], group['name'])[2]
    if before(oldest, at) then at = oldest end
  end
  if not low or before(at, low) then low = at end
end
"""
TRIM = f"""{LOWEST}
if not low then return 0 end
return redis.call('XTRIM', KEYS[1], 'MINID', '~', low, 'LIMIT', ARGV[1])
"""
TRIM_MAX = 10_000
"""Entries that are removed in one go: the server does nothing else meanwhile."""


class RedisStreamsOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the URL says beside where the server is."""

    stream: str
    group: str
    consumer: str = ""
    """This consumer's name within the group; by default one of its own."""
    deadline_s: float = 30.0
    """After so long without a heartbeat a message is taken over by another consumer."""
    dead: str = ""
    """The stream for dead letters; by default the stream's name with `.dead`."""
    start: str = "0"
    """Where a new group begins: `0` with the oldest message, `$` with the next."""
    delete: bool = False
    """Remove messages from the stream once acknowledged: only where this group is the only one."""
    trim_s: float = 0.0
    """How often to remove what every group of the stream has acknowledged; 0: never. Who reads without a group is not
    waited for."""

    def __post_init__(self) -> None:
        if not self.stream or not self.group:
            raise PolicyInvalid("a stream and a group are needed: redis://host/0?stream=orders&group=billing")
        if not 0.1 <= self.deadline_s <= 86400:  # noqa: PLR2004 - bounds
            raise PolicyInvalid(f"deadline_s is {self.deadline_s:g}; it must lie between 0.1 and 86400")
        if self.trim_s < 0:
            raise PolicyInvalid(f"trim_s is {self.trim_s:g}; it must be 0 (never) or more")


def from_url(url: str) -> "RedisStream":
    """The source that `redis://host/0?stream=orders&group=billing` names."""
    return RedisStream(*place_of(url))


def place_of(url: str) -> tuple[str, RedisStreamsOptions]:
    """Where the server is, as its driver spells it, and what else a URL says. Raises `UsageError`."""
    parts = urlsplit(url)
    scheme = parts.scheme.replace("valkeys", "rediss").replace("valkey", "redis")
    return urlunsplit((scheme, parts.netloc, parts.path, "", "")), struct_options(url, RedisStreamsOptions)


class RedisStream:
    """One consumer of a group on a stream."""

    redelivers: bool = True

    def __init__(self, server: str, options: RedisStreamsOptions) -> None:
        self._server = server
        self._options = options
        self._me = options.consumer or f"{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}"
        self._redis: Any = None
        self._looked_at = -1e9
        self._cursor = "0-0"
        self._trimmed_at = -1e9

    @property
    def name(self) -> str:
        """The stream and the group, without credentials."""
        host = urlsplit(self._server).hostname or "localhost"
        return f"redis://{host}/{self._options.stream}?group={self._options.group}"

    @property
    def deadline_s(self) -> float:
        """When a message without a heartbeat is taken over."""
        return self._options.deadline_s

    async def open(self) -> None:
        """Connect, and make the group where there is none."""
        if self._redis is None:
            self._redis = Redis.from_url(
                self._server,
                decode_responses=False,
                health_check_interval=10,
                socket_connect_timeout=CONNECT_S,
            )
        try:
            await self._redis.xgroup_create(
                self._options.stream, self._options.group, id=self._options.start, mkstream=True
            )
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise self._error(error) from error
        except (RedisError, OSError) as error:
            raise self._error(error) from error

    def _error(self, error: BaseException) -> SemelError:
        """The error to raise: what time may heal is `SourceUnavailable`."""
        if isinstance(error, ResponseError) and not _may_heal(error):
            return SourceRefused(f"{self.name} cannot be used: {error}")
        if isinstance(error, AuthenticationError | AuthorizationError):
            return SourceRefused(f"{self.name} refuses these credentials: {error}")
        return SourceUnavailable(str(error))

    async def _ask(self, *command: Any, **options: Any) -> Any:
        if self._redis is None:
            raise SourceUnavailable("not open")
        try:
            return await self._redis.execute_command(*command, **options)
        except ResponseError as error:
            if "NOGROUP" in str(error):  # the stream was removed, or the server came back empty
                await self.open()
                raise SourceUnavailable(f"the group was gone: {error}") from error
            raise self._error(error) from error
        except (RedisError, OSError) as error:
            raise self._error(error) from error

    async def receive(self, limit: int, wait_s: float) -> Sequence[Arrival]:
        """What others left behind, if it is time to look; else what is new."""
        if self._options.trim_s and monotonic() - self._trimmed_at >= self._options.trim_s:
            await self._trim()
        if monotonic() - self._looked_at > self.deadline_s / 10:
            left = await self._claim_abandoned(limit)
            if left:
                return left
        block = ("BLOCK", max(1, round(wait_s * 1000))) if wait_s > 0 else ()
        options = self._options
        found = await self._ask(
            "XREADGROUP", "GROUP", options.group, self._me, "COUNT", limit, *block, "STREAMS", options.stream, ">"
        )  # fmt: skip
        entries = found[0][1] if isinstance(found, list) and found else _first(found)
        return [self._arrival(id_, fields, 1) for id_, fields in entries if fields]

    async def _claim_abandoned(self, limit: int) -> list[Arrival]:
        """Messages that nobody has spoken for within the deadline, in the order of the stream."""
        options = self._options
        answer = await self._ask(
            "XAUTOCLAIM", options.stream, options.group, self._me, round(self.deadline_s * 1000), self._cursor,
            "COUNT", limit,
        )  # fmt: skip
        self._cursor = answer[0].decode() if isinstance(answer[0], bytes) else str(answer[0])
        if self._cursor == "0-0":
            self._looked_at = monotonic()
        found = [(id_, fields) for id_, fields in answer[1] if fields]
        if not found:
            return []
        held = await self._ask(
            "XPENDING", options.stream, options.group, found[0][0], found[-1][0], 10 * limit, self._me,
            parse_detail=True,
        )  # fmt: skip
        counts = {entry["message_id"]: int(entry["times_delivered"]) for entry in held}
        return [self._arrival(id_, fields, counts.get(id_, 2)) for id_, fields in found]

    def _arrival(self, id_: bytes, fields: Any, deliveries: int) -> Arrival:
        headers = {name.decode("utf-8", "replace"): value for name, value in _pairs(fields)}
        body = headers.pop(BODY, None)
        if body is None:
            body = msgspec.json.encode(
                {name: value.decode("utf-8", "replace") for name, value in headers.items()}
            )
        return Arrival(
            headers=headers,
            body=body,
            position=f"{self._options.stream}/{id_.decode()}",
            transport="redis streams",
            deliveries=deliveries,
            handle=id_,
        )

    async def ack(self, arrivals: Sequence[Arrival]) -> None:
        """Acknowledge them to the group; with `delete`, take them out of the stream too."""
        ids = [arrival.handle for arrival in arrivals]
        if not ids:
            return
        await self._ask("XACK", self._options.stream, self._options.group, *ids)
        if self._options.delete:
            await self._ask("XDEL", self._options.stream, *ids)

    async def _trim(self) -> None:
        """Remove what no group needs any more; the server leaves up to one node of the stream (100 entries) of it."""
        self._trimmed_at = monotonic()
        while await self._ask("EVAL", TRIM, 1, self._options.stream, TRIM_MAX) >= TRIM_MAX:
            continue

    async def nack(self, arrivals: Sequence[Arrival], delay_s: float) -> None:
        """Make them look as idle as leaves `delay_s` until somebody may take them over."""
        await self._say(arrivals, max(0.0, self.deadline_s - delay_s))
        self._looked_at = min(self._looked_at, monotonic() + delay_s - self.deadline_s / 10)

    async def extend(self, arrivals: Sequence[Arrival]) -> Sequence[Arrival]:
        """Set their idle time back to nothing."""
        return await self._say(arrivals, 0.0)

    async def _say(self, arrivals: Sequence[Arrival], idle_s: float) -> Sequence[Arrival]:
        options = self._options
        ids = [arrival.handle for arrival in arrivals]
        if not ids:
            return []
        gone = await self._ask(
            "EVAL", SAY, 1, options.stream, options.group, self._me, round(idle_s * 1000), *ids
        )
        return [arrival for arrival in arrivals if arrival.handle in gone] if gone else []

    async def dead_letter(self, arrival: Arrival, letter: DeadLetterInfo) -> None:
        """Add a copy, with its story, to the stream of dead letters."""
        headers = {**arrival.headers, **headers_of(letter)}  # type: ignore[dict-item]  # ours, so a mapping
        await self._add(self._dead_stream, headers.items(), arrival.body)

    async def look(self, limit: int) -> Sequence[DeadLetter]:
        """The oldest dead letters."""
        found = []
        for id_, fields in await self._ask("XRANGE", self._dead_stream, "-", "+", "COUNT", limit):
            headers = {name.decode(): value for name, value in _pairs(fields)}
            body = headers.pop(BODY, b"")
            texts = {name: value.decode("utf-8", "replace") for name, value in headers.items()}
            found.append(DeadLetter.from_message(id_.decode(), texts, body))
        return found

    async def republish(self, headers: Mapping[str, str], body: bytes) -> None:
        """Add a message to the stream itself."""
        await self._add(self._options.stream, headers.items(), body)

    async def remove(self, dead: DeadLetter) -> None:
        """Delete a dead letter."""
        await self._ask("XDEL", self._dead_stream, dead.id)

    @property
    def _dead_stream(self) -> str:
        return self._options.dead or f"{self._options.stream}.dead"

    async def _add(self, stream: str, headers: Iterable[tuple[Any, Any]], body: Any) -> None:
        fields = [part for pair in headers for part in pair]
        await self._ask("XADD", stream, "*", *fields, BODY, body)

    async def close(self) -> None:
        """Let go. The consumer stays known to the group while it has messages: to remove it would lose them."""
        if self._redis is not None:
            redis, self._redis = self._redis, None
            await redis.aclose()


def _may_heal(error: ResponseError) -> bool:
    """Whether the server may take the same command later: it is loading, full, a replica, or cannot save."""
    passing = ("LOADING", "MISCONF", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "BUSY ", "NOREPLICAS")
    return isinstance(error, OutOfMemoryError | ReadOnlyError) or str(error).startswith(passing)


def _pairs(fields: Any) -> Iterable[tuple[bytes, bytes]]:
    """Names and values of an entry, however the protocol spells them."""
    return fields.items() if isinstance(fields, dict) else zip(fields[::2], fields[1::2], strict=True)


def _first(found: Any) -> Any:
    """The entries of the one stream in a reply of the newer protocol, or none."""
    return next(iter(found.values()))[0] if found else []
