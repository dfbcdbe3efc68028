"""What is asked of a server before it is used: where its masters are, and what they would lose."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from semel.errors import StoreRefused, StoreUnavailable
from semel.stores.redis import encoding
from semel.stores.redis.calls import Address, RedisCall, RedisQuery, Steps
from semel.stores.redis.errors import kind_of, to_store_error
from semel.stores.redis.settings import RedisOptions, RedisTarget

SLOTS = 16_384
VERSION_OLDEST = (5, 0)
"""The first server whose scripts may write after asking for the time."""
SHEBANG_OLDEST = (7, 0)
"""The first whose scripts may say that they run at the memory limit too."""
WAITAOF_OLDEST = (7, 2)


class Map(Struct, frozen=True):
    """Which master has which bucket."""

    masters: tuple[Address, ...]
    buckets: tuple[Address, ...]


class ServerFacts(Struct, frozen=True, kw_only=True):
    """What a store found out about its servers, and what each of it costs."""

    version: str
    masters: int
    eviction: str
    """The policy at the memory limit; all but `noeviction` may drop records."""
    maxmemory_bytes: int
    persistence: str
    """`aof`, `rdb` or `none`: what is still there after the server was killed."""
    fsync: str = ""
    """`always`, `everysec` or `no`: when the append-only file reaches the disk; empty: this user may not know."""
    replicas: int
    """Of the master that has fewest."""
    cluster: str = ""
    """`ok` or `fail`, as its masters see their cluster; empty: there is none."""
    costs: tuple[str, ...] = ()
    """What this means for the promise, a sentence each; empty: nothing is lost but by the disk."""

    @property
    def durable(self) -> bool:
        """An answered write survives the death of the server's process, and a full memory."""
        return self.persistence == "aof" and self.eviction == "noeviction"


def locate(place: RedisTarget, known: Map | None) -> Steps:
    """Find the masters. Raises `StoreUnavailable` where none is to be found."""
    if place.topology == "server":
        address = place.addresses[0]
        return Map((address,), (address,) * encoding.BUCKETS)
    if place.topology == "sentinel":
        return (yield from _by_sentinels(place))
    seeds = dict.fromkeys((*(known.masters if known else ()), *place.addresses))
    trouble: Exception | None = None
    for seed in seeds:
        (reply,) = yield RedisQuery([RedisCall([b"CLUSTER", b"SLOTS"], node=seed)])
        if isinstance(reply, Exception):
            trouble = reply
            continue
        found = _read_slots(reply, seed)
        if found is not None:
            return found
    if trouble is not None and kind_of(trouble) in ("other", "refused"):
        raise StoreRefused(f"{place.name} is no cluster that this user may ask: {trouble}") from trouble
    raise StoreUnavailable(f"{place.name}: no node knows where all slots are") from trouble


def _read_slots(reply: Any, seed: Address) -> Map | None:
    owner: list[Address | None] = [None] * SLOTS
    for first, last, master, *_ in reply:
        host = master[0].decode() if master[0] else seed[0]
        owner[first : last + 1] = [(host, master[1])] * (last + 1 - first)
    found = [owner[slot_of(bucket)] for bucket in range(encoding.BUCKETS)]
    buckets = tuple(address for address in found if address is not None)
    if len(buckets) < encoding.BUCKETS:
        return None
    return Map(tuple(dict.fromkeys(address for address in owner if address is not None)), buckets)


def slot_of(bucket: int) -> int:
    """The slot of a bucket: CRC16 (XMODEM) of what stands in the braces."""
    crc = 0
    for byte in b"%d" % bucket:
        crc ^= byte << 8
        for _ in range(8):
            crc = (crc << 1 ^ 0x1021 if crc & 0x8000 else crc << 1) & 0xFFFF
    return crc % SLOTS


def _by_sentinels(place: RedisTarget) -> Steps:
    trouble: Exception | None = None
    for sentinel in place.addresses:
        command = [b"SENTINEL", b"GET-MASTER-ADDR-BY-NAME", place.service.encode()]
        (reply,) = yield RedisQuery([RedisCall(command, node=sentinel)])
        if isinstance(reply, Exception) or not reply:
            trouble = reply if isinstance(reply, Exception) else trouble
            continue
        address = (reply[0].decode(), int(reply[1]))
        (role,) = yield RedisQuery([RedisCall([b"ROLE"], node=address)])
        if isinstance(role, Exception) or role[0] != b"master":
            trouble = role if isinstance(role, Exception) else trouble
            continue  # a failover is under way, or this sentinel has not heard of it
        return Map((address,), (address,) * encoding.BUCKETS)
    raise StoreUnavailable(f"{place.name}: no sentinel names a master that is one") from trouble


def look(place: RedisTarget, masters: Sequence[Address], options: RedisOptions) -> Steps:
    """Read what the masters say of themselves. Raises `StoreRefused` where they must not be used."""
    asked: list[list[bytes | int]] = [
        [b"INFO"],
        [b"CONFIG", b"GET", b"appendfsync"],
        [b"CONFIG", b"GET", b"save"],
    ]
    if place.topology == "cluster":
        asked.append([b"CLUSTER", b"INFO"])
    replies = iter(
        (yield RedisQuery([RedisCall(command, node=node) for node in masters for command in asked]))
    )
    told: list[dict[str, str]] = []
    for _ in masters:
        info, *settings = (next(replies) for _ in asked)
        if isinstance(info, Exception):
            if kind_of(info) == "wait":
                raise StoreUnavailable(f"{place.name} is not ready: {info}") from info
            raise to_store_error(info, place.name) from info
        told.append(parse_info(info))
        for reply in settings:  # these only make it more precise, and many users may not ask for them
            if isinstance(reply, list) and len(reply) == 2:  # noqa: PLR2004 - a name and its value
                told[-1][reply[0].decode()] = reply[1].decode()
            elif isinstance(reply, bytes):
                told[-1].update(parse_info(reply))
    return judge(place, told, options)


def facts_of_masters(masters: Sequence[Address]) -> Steps:
    """What each master says of itself now. Raises `StoreUnavailable` where one does not answer."""
    calls = [RedisCall(command, node=node) for node in masters for command in ([b"INFO"], [b"TIME"])]
    replies = yield RedisQuery(calls)
    told: list[dict[str, str]] = []
    for info, instant in zip(replies[::2], replies[1::2], strict=True):
        for reply in (info, instant):
            if isinstance(reply, Exception):
                raise StoreUnavailable(f"a server does not say how it is: {reply}") from reply
        told.append({**parse_info(info), "time_us": str(int(instant[0]) * 10**6 + int(instant[1]))})
    return told


def parse_info(reply: bytes) -> dict[str, str]:
    """The lines of INFO."""
    lines = (line.partition(":") for line in reply.decode(errors="replace").splitlines())
    return {name: value for name, colon, value in lines if colon}


def version_text(info: Mapping[str, Any]) -> str:
    """The server's own name and version; Valkey also gives the version of Redis that it is compatible with."""
    if "valkey_version" in info:
        return f"Valkey {info['valkey_version']}"
    return f"Redis {info.get('redis_version', '?')}"


def judge(place: RedisTarget, told: list[dict[str, str]], options: RedisOptions) -> ServerFacts:
    """What follows from it; the worst of all masters counts."""
    name = place.name
    version = min((each.get("redis_version", "0") for each in told), key=numbers)
    if numbers(version) < VERSION_OLDEST:
        raise StoreRefused(
            f"{name} is version {version}; {'.'.join(map(str, VERSION_OLDEST))} or newer is needed"
        )
    _refuse_wrong_kind(place, told)
    evicting = [
        each["maxmemory_policy"]
        for each in told
        if each.get("maxmemory_policy", "noeviction") != "noeviction"
    ]
    if evicting and not options.allow_eviction:
        raise StoreRefused(
            f"{name} evicts keys when its memory is full (maxmemory-policy {evicting[0]}): events would be done twice"
            " without a word. Set it to noeviction, or open the store with allow_eviction=true and a weaker promise"
        )
    aof = all(each.get("aof_enabled") == "1" for each in told)
    rdb = all(map(_saves, told))
    if options.waits_for_disks and (numbers(version) < WAITAOF_OLDEST or not aof):
        raise StoreRefused(
            f"{name} cannot wait for a disk (wait_disk, wait_replica_disks): that needs an append-only file and"
            f" version {'.'.join(map(str, WAITAOF_OLDEST))}, and it is {version} with{'' if aof else 'out'} one"
        )
    syncs = {each.get("appendfsync", "") for each in told}
    states = {each.get("cluster_state", "") for each in told}
    facts = ServerFacts(
        version=version,
        masters=len(told),
        eviction=evicting[0] if evicting else "noeviction",
        maxmemory_bytes=min(int(each.get("maxmemory", "0")) for each in told),
        persistence="aof" if aof else "rdb" if rdb else "none",
        fsync=next((sync for sync in ("no", "", "everysec", "always") if sync in syncs), "") if aof else "",
        replicas=min(int(each.get("connected_slaves", "0")) for each in told),
        cluster=next((state for state in ("fail", "ok") if state in states), ""),
    )
    return replace(facts, costs=tuple(_costs(facts)))


def _refuse_wrong_kind(place: RedisTarget, told: list[dict[str, str]]) -> None:
    if place.topology == "cluster":
        return
    if any(each.get("cluster_enabled") == "1" for each in told):
        raise StoreRefused(f"{place.name} is a node of a cluster; open it with redis+cluster://")
    if any(each.get("role") == "slave" for each in told):
        raise StoreRefused(f"{place.name} is a replica, which takes no writes; open its master")


def _saves(told: dict[str, str]) -> bool:
    """Whether it makes snapshots; where it does not say, whether one was made since it began."""
    if "save" in told:
        return bool(told["save"])
    return told.get("rdb_saves", told.get("rdb_last_bgsave_time_sec", "-1")) not in ("0", "-1")


def _costs(facts: ServerFacts) -> Iterable[str]:
    if facts.eviction != "noeviction":
        yield f"eviction ({facts.eviction}): at the memory limit records are dropped, and their events done again"
    if facts.persistence == "none":
        yield "no persistence: a server that ends forgets everything, and what was done is done again"
    elif facts.persistence == "rdb":
        yield "snapshots only: a server that is killed forgets all since the last one, and it is done again"
    else:
        yield f"append-only file: a killed server forgets nothing; a power failure {_POWER_FAILURE[facts.fsync]}"
    if facts.replicas:
        yield "replicas follow behind: a failover forgets what had not reached the new master"
    elif facts.cluster:
        yield "a master without a replica: while it is down, its part of the keys cannot be claimed"
    if facts.cluster == "fail":
        yield "the cluster is down: its nodes refuse to serve until all slots have a master again"


_POWER_FAILURE = {
    "always": "nothing either, as far as the disk keeps its word",
    "everysec": "the last second or two",
    "no": "whatever the system had not yet written to the disk, up to half a minute",
    "": "what was not yet on the disk",
}


def numbers(version: str) -> tuple[int, ...]:
    """As versions are compared."""
    return tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
