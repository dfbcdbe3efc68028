"""Redis Streams: consumer groups, and the messages of dead consumers.

The idle time of a pending message grows; the heartbeat resets it, and the next consumer takes over a message without
a heartbeat. To return a message is to raise its idle time: no queue beside the stream is needed.
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
from semel.runtime.urls import parse_url, struct_options

__all__ = ["RedisStream", "RedisStreamsOptions", "from_url"]

CONNECT_S = 10.0
BODY = "data"
"""The field that holds the body; the others are headers. Without it the fields together are the body, as JSON."""

# Only for messages that this consumer still holds: to claim another's message would take it from that consumer.
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

# Before `low` no group has a pending or undelivered entry: for each group its oldest pending entry, or if there is
# none its last delivered one; of those the lowest. Ids are compared as text: their parts may exceed the range of a
# Lua number.
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
"""The most entries that are removed in one command: the server does nothing else meanwhile."""


class RedisStreamsOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options in the URL."""

    stream: str
    group: str
    consumer: str = ""
    """This consumer's name within the group; by default a new one."""
    deadline_s: float = 30.0
    """The time without a heartbeat after which another consumer takes a message over."""
    dead: str = ""
    """The stream for dead letters; by default the stream's name with `.dead`."""
    start: str = "0"
    """Where a new group begins: `0` with the oldest message, `$` with the next."""
    delete: bool = False
    """Remove messages from the stream once acknowledged: only if this group is the only one."""
    trim_s: float = 0.0
    """How often to remove entries that every group of the stream has acknowledged; 0: never. Does not wait for readers
    without a group."""

    def __post_init__(self) -> None:
        if not self.stream or not self.group:
            raise PolicyInvalid("a stream and a group are needed: redis://host/0?stream=orders&group=billing")
        if not 0.1 <= self.deadline_s <= 86400:  # noqa: PLR2004 - bounds
            raise PolicyInvalid(f"deadline_s is {self.deadline_s:g}; it must lie between 0.1 and 86400")
        if self.trim_s < 0:
            raise PolicyInvalid(f"trim_s is {self.trim_s:g}; it must be 0 (never) or more")


def from_url(url: str) -> "RedisStream":
    """Return the source of a URL such as `redis://host/0?stream=orders&group=billing`."""
    return RedisStream(*place_of(url))


def place_of(url: str) -> tuple[str, RedisStreamsOptions]:
    """Parse a URL into the driver's URL of the server and the options. Raises `UsageError`."""
    parts = parse_url(url)
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
        parts = urlsplit(self._server)
        place = f"{parts.netloc.rpartition('@')[2] or 'localhost'}/{parts.path.strip('/') or '0'}"
        return f"{parts.scheme}://{place}?stream={self._options.stream}&group={self._options.group}"

    @property
    def deadline_s(self) -> float:
        """The time after which a message without a heartbeat is taken over."""
        return self._options.deadline_s

    @property
    def keeps_acked(self) -> bool:
        """Whether the stream keeps acknowledged messages, as far as this consumer decides it."""
        return not (self._options.delete or self._options.trim_s)

    async def open(self) -> None:
        """Connect, and create a missing group."""
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
                raise self.error_of(error) from error
        except (RedisError, OSError) as error:
            raise self.error_of(error) from error

    def error_of(self, error: BaseException) -> SemelError:
        """Return the error to raise: `SourceUnavailable` if a retry may help."""
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
            if "NOGROUP" in str(error):  # the stream was removed, or the server restarted without data
                await self.open()
                raise SourceUnavailable(f"the group was gone: {error}") from error
            raise self.error_of(error) from error
        except (RedisError, OSError) as error:
            raise self.error_of(error) from error

    async def receive(self, limit: int, wait_s: float) -> Sequence[Arrival]:
        """Return abandoned messages of other consumers, if a check is due; else new ones."""
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
        """Take over messages without a heartbeat within the deadline, in the order of the stream."""
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
        """Acknowledge messages to the group; with `delete`, remove them from the stream too."""
        ids = [arrival.handle for arrival in arrivals]
        if not ids:
            return
        await self._ask("XACK", self._options.stream, self._options.group, *ids)
        if self._options.delete:
            await self._ask("XDEL", self._options.stream, *ids)

    async def _trim(self) -> None:
        """Remove entries that no group needs; the server may keep up to one node of the stream (100 entries)."""
        self._trimmed_at = monotonic()
        while await self._ask("EVAL", TRIM, 1, self._options.stream, TRIM_MAX) >= TRIM_MAX:
            continue

    async def nack(self, arrivals: Sequence[Arrival], delay_s: float) -> None:
        """Set the idle time so that another consumer may take the messages over after `delay_s`."""
        await self._set_idle(arrivals, max(0.0, self.deadline_s - delay_s))
        self._looked_at = min(self._looked_at, monotonic() + delay_s - self.deadline_s / 10)

    async def extend(self, arrivals: Sequence[Arrival]) -> Sequence[Arrival]:
        """Reset the idle time of messages."""
        return await self._set_idle(arrivals, 0.0)

    async def _set_idle(self, arrivals: Sequence[Arrival], idle_s: float) -> Sequence[Arrival]:
        options = self._options
        ids = [arrival.handle for arrival in arrivals]
        if not ids:
            return []
        gone = await self._ask(
            "EVAL", SAY, 1, options.stream, options.group, self._me, round(idle_s * 1000), *ids
        )
        return [arrival for arrival in arrivals if arrival.handle in gone] if gone else []

    async def dead_letter(self, arrival: Arrival, letter: DeadLetterInfo) -> None:
        """Add a copy with its information to the dead-letter stream."""
        headers = {**arrival.headers, **headers_of(letter)}  # type: ignore[dict-item]  # ours, so a mapping
        await self._add(self._dead_stream, headers.items(), arrival.body)

    async def look(self, limit: int) -> Sequence[DeadLetter]:
        """Return the oldest dead letters."""
        found = []
        for id_, fields in await self._ask("XRANGE", self._dead_stream, "-", "+", "COUNT", limit):
            headers = {name.decode(): value for name, value in _pairs(fields)}
            body = headers.pop(BODY, b"")
            texts = {name: value.decode("utf-8", "replace") for name, value in headers.items()}
            found.append(DeadLetter.from_message(id_.decode(), texts, body))
        return found

    async def republish(self, headers: Mapping[str, str], body: bytes | None) -> None:
        """Add a message to the stream itself."""
        await self._add(self._options.stream, headers.items(), body or b"")

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
        """Close the connection. A consumer with pending messages stays in the group: its removal would lose them."""
        if self._redis is not None:
            redis, self._redis = self._redis, None
            await redis.aclose()


def _may_heal(error: ResponseError) -> bool:
    """Whether the server may accept the same command later: it is loading, full, a replica, or cannot save."""
    passing = ("LOADING", "MISCONF", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "BUSY ", "NOREPLICAS")
    return isinstance(error, OutOfMemoryError | ReadOnlyError) or str(error).startswith(passing)


def _pairs(fields: Any) -> Iterable[tuple[bytes, bytes]]:
    """Return names and values of an entry, in either version of the protocol."""
    return fields.items() if isinstance(fields, dict) else zip(fields[::2], fields[1::2], strict=True)


def _first(found: Any) -> Any:
    """Return the entries of the one stream in a reply of the newer protocol, or none."""
    return next(iter(found.values()))[0] if found else []
