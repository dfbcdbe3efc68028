"""The start checks of a store: find the masters, and find out what they could lose."""

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
"""The first version whose scripts may write after a TIME command."""
SHEBANG_OLDEST = (7, 0)
"""The first version whose scripts can declare that they also run at the memory limit."""
WAITAOF_OLDEST = (7, 2)


class ClusterMap(Struct, frozen=True):
    """Which master has which bucket."""

    masters: tuple[Address, ...]
    buckets: tuple[Address, ...]


class ServerFacts(Struct, frozen=True, kw_only=True):
    """Facts about the servers of a store, and what they mean for its guarantee."""

    version: str
    masters: int
    eviction: str
    """The policy at the memory limit; every one except `noeviction` may drop records."""
    persistence: str
    """`aof`, `rdb` or `none`: where records survive when the server is killed."""
    fsync: str = ""
    """`always`, `everysec` or `no`: when the append-only file is synced to disk; empty: this user may not read it."""
    replicas: int
    """The number of replicas of the master that has the fewest."""
    cluster: str = ""
    """The cluster's state as its masters report it, `ok` or `fail`; empty: no cluster."""
    costs: tuple[str, ...] = ()
    """What this means for the guarantee, a sentence each; empty: only a disk failure loses records."""

    @property
    def durable(self) -> bool:
        """Whether an answered write survives a killed server process, and a full memory."""
        return self.persistence == "aof" and self.eviction == "noeviction"


def locate(place: RedisTarget, known: ClusterMap | None) -> Steps:
    """Find the masters. Raises `StoreUnavailable` if there are none."""
    if place.topology == "server":
        address = place.addresses[0]
        return ClusterMap((address,), (address,) * encoding.BUCKETS)
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
        raise StoreRefused(
            f"{place.name} is not a cluster, or refuses CLUSTER SLOTS to this user: {trouble}"
        ) from trouble
    raise StoreUnavailable(f"{place.name}: no node knows the masters of all slots") from trouble


def _read_slots(reply: Any, seed: Address) -> ClusterMap | None:
    owner: list[Address | None] = [None] * SLOTS
    for first, last, master, *_ in reply:
        host = master[0].decode() if master[0] else seed[0]
        owner[first : last + 1] = [(host, master[1])] * (last + 1 - first)
    found = [owner[slot_of(bucket)] for bucket in range(encoding.BUCKETS)]
    buckets = tuple(address for address in found if address is not None)
    if len(buckets) < encoding.BUCKETS:
        return None
    return ClusterMap(tuple(dict.fromkeys(address for address in owner if address is not None)), buckets)


def slot_of(bucket: int) -> int:
    """Return the slot of a bucket: CRC16 (XMODEM) of the hash tag in the braces."""
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
            continue  # a failover is under way, or this sentinel does not know of it yet
        return ClusterMap((address,), (address,) * encoding.BUCKETS)
    raise StoreUnavailable(f"{place.name}: no sentinel names a working master") from trouble


def look(place: RedisTarget, masters: Sequence[Address], options: RedisOptions) -> Steps:
    """Read the masters' INFO and settings, and check them. Raises `StoreRefused` if they must not be used."""
    commands: list[list[bytes | int]] = [
        [b"INFO"],
        [b"CONFIG", b"GET", b"appendfsync"],
        [b"CONFIG", b"GET", b"save"],
    ]
    if place.topology == "cluster":
        commands.append([b"CLUSTER", b"INFO"])
    replies = iter(
        (yield RedisQuery([RedisCall(command, node=node) for node in masters for command in commands]))
    )
    infos: list[dict[str, str]] = []
    for _ in masters:
        info, *settings = (next(replies) for _ in commands)
        if isinstance(info, Exception):
            if kind_of(info) == "wait":
                raise StoreUnavailable(f"{place.name} is not ready: {info}") from info
            raise to_store_error(info, place.name) from info
        infos.append(parse_info(info))
        for reply in settings:  # optional details: many users may not read them
            if isinstance(reply, list) and len(reply) == 2:  # noqa: PLR2004 - a name and its value
                infos[-1][reply[0].decode()] = reply[1].decode()
            elif isinstance(reply, bytes):
                infos[-1].update(parse_info(reply))
    return judge(place, infos, options)


def facts_of_masters(masters: Sequence[Address]) -> Steps:
    """Read the current INFO and clock of each master. Raises `StoreUnavailable` if one does not answer."""
    calls = [RedisCall(command, node=node) for node in masters for command in ([b"INFO"], [b"TIME"])]
    replies = yield RedisQuery(calls)
    infos: list[dict[str, str]] = []
    for info, instant in zip(replies[::2], replies[1::2], strict=True):
        for reply in (info, instant):
            if isinstance(reply, Exception):
                raise StoreUnavailable(f"a server did not answer INFO or TIME: {reply}") from reply
        infos.append({**parse_info(info), "time_us": str(int(instant[0]) * 10**6 + int(instant[1]))})
    return infos


def parse_info(reply: bytes) -> dict[str, str]:
    """Return the lines of an INFO reply by name."""
    lines = (line.partition(":") for line in reply.decode(errors="replace").splitlines())
    return {name: value for name, colon, value in lines if colon}


def version_text(info: Mapping[str, Any]) -> str:
    """Return the server's name and version. Valkey also reports the Redis version that it is compatible with."""
    if "valkey_version" in info:
        return f"Valkey {info['valkey_version']}"
    return f"Redis {info.get('redis_version', '?')}"


def judge(place: RedisTarget, infos: list[dict[str, str]], options: RedisOptions) -> ServerFacts:
    """Return the facts of the masters, each from the worst of them. Raises `StoreRefused` for unfit servers."""
    name = place.name
    version = min((each.get("redis_version", "0") for each in infos), key=numbers)
    if numbers(version) < VERSION_OLDEST:
        raise StoreRefused(
            f"{name} is version {version}; {'.'.join(map(str, VERSION_OLDEST))} or newer is needed"
        )
    _refuse_wrong_kind(place, infos)
    evicting = [
        each["maxmemory_policy"]
        for each in infos
        if each.get("maxmemory_policy", "noeviction") != "noeviction"
    ]
    if evicting and not options.allow_eviction:
        raise StoreRefused(
            f"{name} evicts keys when its memory is full (maxmemory-policy {evicting[0]}): effects would happen twice"
            " without notice. Set it to noeviction, or accept a weaker guarantee with allow_eviction=true"
        )
    aof = all(each.get("aof_enabled") == "1" for each in infos)
    rdb = all(map(_makes_snapshots, infos))
    if options.waits_for_disks and (numbers(version) < WAITAOF_OLDEST or not aof):
        raise StoreRefused(
            f"{name} cannot wait for a disk (wait_disk, wait_replica_disks): that needs an append-only file and"
            f" version {'.'.join(map(str, WAITAOF_OLDEST))}; it is {version} with{'' if aof else 'out'} such a file"
        )
    syncs = {each.get("appendfsync", "") for each in infos}
    states = {each.get("cluster_state", "") for each in infos}
    facts = ServerFacts(
        version=version,
        masters=len(infos),
        eviction=evicting[0] if evicting else "noeviction",
        persistence="aof" if aof else "rdb" if rdb else "none",
        fsync=next((sync for sync in ("no", "", "everysec", "always") if sync in syncs), "") if aof else "",
        replicas=min(int(each.get("connected_slaves", "0")) for each in infos),
        cluster=next((state for state in ("fail", "ok") if state in states), ""),
    )
    return replace(facts, costs=tuple(_costs(facts, options.replicas_awaited)))


def _refuse_wrong_kind(place: RedisTarget, infos: list[dict[str, str]]) -> None:
    if place.topology == "cluster":
        return
    if any(each.get("cluster_enabled") == "1" for each in infos):
        raise StoreRefused(f"{place.name} is a node of a cluster; open it with redis+cluster://")
    if any(each.get("role") == "slave" for each in infos):
        raise StoreRefused(f"{place.name} is a replica, which accepts no writes; open its master")


def _makes_snapshots(info: dict[str, str]) -> bool:
    """Whether the server makes snapshots; if the setting is unknown, whether it made one since its start."""
    if "save" in info:
        return bool(info["save"])
    return info.get("rdb_saves", info.get("rdb_last_bgsave_time_sec", "-1")) not in ("0", "-1")


def _costs(facts: ServerFacts, awaited: int) -> Iterable[str]:
    if facts.eviction != "noeviction":
        yield f"eviction ({facts.eviction}): at the memory limit records are dropped, and their effects happen again"
    if facts.persistence == "none":
        yield "no persistence: a server that stops loses all records, and their effects happen again"
    elif facts.persistence == "rdb":
        yield "snapshots only: a killed server loses all records since the last one, and their effects happen again"
    else:
        yield (
            f"append-only file: a killed server loses {_KILL.get(facts.fsync, 'nothing')}; a power failure loses"
            f" {_POWER_FAILURE[facts.fsync]}"
        )
    if facts.replicas and awaited:
        yield _failover_cost(facts.replicas, awaited)
    elif facts.replicas:
        yield "replicas follow behind: a failover loses the records that had not reached the new master"
    elif facts.cluster:
        yield "a master without a replica: while it is down, its part of the keys cannot be claimed"
    if facts.cluster == "fail":
        yield "the cluster is down: its nodes refuse to serve until all slots have a master again"


def _failover_cost(replicas: int, awaited: int) -> str:
    """Say what a failover still loses where settles wait for replicas. Nothing waits for claims."""
    number = "a replica" if awaited == 1 else f"{awaited} replicas"
    chosen = ", or if a replica without them becomes the master" if replicas > awaited else ""
    return (
        f"settles wait for {number}: a failover loses settled records only if they were logged as not replicated in"
        f" time{chosen}; it loses claims that had not reached the new master, and those events may run again"
    )


_KILL = {"everysec": "nothing, or two seconds if its disk is busy for longer than one"}
"""While a sync is under way, the server answers before it writes, for up to two seconds."""
_POWER_FAILURE = {
    "always": "nothing either, if the disk really syncs",
    "everysec": "the last second or two",
    "no": "the writes that the system had not yet put on the disk, up to half a minute",
    "": "the writes that were not yet on the disk",
}


def numbers(version: str) -> tuple[int, ...]:
    """Return the version's numbers, for comparison."""
    return tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
