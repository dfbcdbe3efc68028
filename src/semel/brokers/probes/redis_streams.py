"""Probe a Redis stream and its group: idle time, persistence, eviction, time to live."""

from collections.abc import Iterator
from math import inf
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from semel.brokers.redis_streams import RedisStream, RedisStreamsOptions, place_of
from semel.brokers.source import no_answer
from semel.observe.guarantees import Weakness
from semel.observe.probes import SourceFacts
from semel.stores.redis.server_checks import version_text


async def look(url: str) -> SourceFacts:
    """Read the facts with one connection; the group is not created."""
    server, options = place_of(url)
    source = RedisStream(server, options)
    line = Redis.from_url(server, decode_responses=True)
    try:
        return await _look(line, source.name, options)
    except (RedisError, OSError) as error:
        raise no_answer(source.name, source.error_of(error)) from error
    finally:
        await line.aclose()


async def _look(line: Any, name: str, options: RedisStreamsOptions) -> SourceFacts:
    info = await line.info()
    lasting_ms = await line.pttl(options.stream)
    notes: list[str] = []
    waiting = in_hand = None
    try:
        groups = {each["name"]: each for each in await line.xinfo_groups(options.stream)}
        waiting = await line.xlen(options.stream)
    except ResponseError:
        notes.append(f"the stream {options.stream} does not exist yet: semel consume makes it")
    else:
        group = groups.get(options.group)
        if group is None:
            notes.append(f"the group {options.group} does not exist yet: semel consume makes it")
        else:
            in_hand = int(group["pending"])
            waiting = int(group.get("lag") or 0)
    return SourceFacts(
        name=name,
        version=version_text(info),
        deadline_s=options.deadline_s,
        deadline_name="the idle time before it is taken over, deadline_s in the URL",
        horizon_s=lasting_ms / 1000 if lasting_ms > 0 else inf,
        horizon_name="the life of a pending entry",
        durable=info.get("aof_enabled") == 1 and not _evicts(info, lasting_ms),
        weaknesses=tuple(_of_server(name, info, lasting_ms)),
        notes=tuple(notes),
        waiting=waiting,
        in_hand=in_hand,
    )


def _evicts(info: dict[str, Any], lasting_ms: int) -> bool:
    """Whether a full server may drop the stream; volatile policies drop keys with a time to live."""
    policy = str(info.get("maxmemory_policy", "noeviction"))
    return policy.startswith("allkeys") or (policy.startswith("volatile") and lasting_ms > 0)


def _of_server(name: str, info: dict[str, Any], lasting_ms: int) -> Iterator[Weakness]:
    if _evicts(info, lasting_ms):
        yield Weakness(
            f"The broker {name} evicts keys when its memory is full ({info['maxmemory_policy']}), the stream among"
            " them: events that wait there are lost and never run.",
            breaks=True,
            fix="CONFIG SET maxmemory-policy noeviction, and enough memory",
        )
    if info.get("aof_enabled") != 1:
        yield Weakness(
            f"The broker {name} has no append-only file: when it is killed, events that came since its last snapshot,"
            " or all, are lost and never run.",
            breaks=True,
            fix="CONFIG SET appendonly yes",
        )
    if lasting_ms > 0:
        yield Weakness(
            f"The stream of {name} has a time to live: in {lasting_ms / 1000:.0f} s it is gone with all that waits.",
            breaks=True,
            fix="PERSIST the stream, and trim it with XTRIM MINID instead",
        )
    if int(info.get("connected_slaves", 0)):
        yield Weakness(
            f"Replicas of the broker {name} follow behind: a failover forgets acks, so that what was done comes again,"
            " and events that had not reached the new master.",
            fix="WAIT 1 after XADD in producers; the record stops what comes again",
        )
