"""Redis: commands packed by hand and sent in pipelines, under a prefix of their own."""

import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis

from semel.cli.bench.measure import Job, Scratch, new_name, with_options
from semel.errors import StoreUnavailable
from semel.stores.redis.settings import RedisOptions, RedisTarget, parse

__all__ = ["RawRedis", "scratch"]

SINGLES = 100
ROWS_MAX = 1_000
KEEP_MS = 600_000
"""Keys expire after this time, in case the cleanup is interrupted."""
SCAN_COUNT = 1000


class RawRedis:
    """Raw operations of one connection: SET NX PX of 16-byte keys, packed before the measured time."""

    def __init__(self, connection: Any, prefix: bytes) -> None:
        self._connection = connection
        self._prefix = prefix + b":raw:{1}:"

    def pipelines(self, count: int, size: int) -> Job:
        """Send batches of commands, each in one write, and read each reply."""
        packed: list[bytes] = []

        def fresh() -> None:
            packed[:] = [b"".join(self._command() for _ in range(size)) for _ in range(max(1, count // size))]

        def run() -> None:
            send, read = self._connection.send_packed_command, self._connection.read_response
            for batch in packed:
                send([batch], check_health=False)
                for _ in range(size):
                    read()

        return Job(run, max(1, count // size) * size, fresh)

    def _command(self) -> bytes:
        key = self._prefix + os.urandom(16)
        return b"*6\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$1\r\n1\r\n$2\r\nNX\r\n$2\r\nPX\r\n$6\r\n%d\r\n" % (
            len(key), key, KEEP_MS,
        )  # fmt: skip


@contextmanager
def scratch(url: str) -> Iterator[Scratch]:
    """Open a prefix in the same database; its keys are removed at the end."""
    name = new_name()
    place, options = parse(url, {})
    client = _client(place, options)
    try:
        node = client.get_node_from_key("{1}").redis_connection if place.topology == "cluster" else client
        connection = node.connection_pool.get_connection()
        try:
            raw = RawRedis(connection, name.encode())
            yield Scratch(
                kind="redis",
                target=with_options(url, prefix=name),
                single_limit="SET NX PX",
                single=lambda: raw.pipelines(SINGLES, 1),
                batch_limit="SET NX PX packed by {size}",
                batch=lambda size: raw.pipelines(min(ROWS_MAX, SINGLES * size), size),
            )
        finally:
            connection.disconnect()  # an interrupt may have left replies unread
            node.connection_pool.release(connection)
            _remove(client, f"{name}*")
    except redis.RedisError as error:
        raise StoreUnavailable(f"{place.name} gave no answer: {error}") from error
    finally:
        client.close()


def _remove(client: Any, pattern: str) -> None:
    """Remove all keys that match, in batches."""
    some: list[bytes] = []
    for key in client.scan_iter(match=pattern, count=SCAN_COUNT):
        some.append(key)
        if len(some) == SCAN_COUNT:
            _unlink(client, some)
    _unlink(client, some)


def _unlink(client: Any, keys: list[bytes]) -> None:
    with client.pipeline(transaction=False) as pipeline:
        for key in keys:
            pipeline.unlink(key)
        pipeline.execute()
    keys.clear()


def _client(place: RedisTarget, options: RedisOptions) -> Any:
    """Return the driver's client for the same server."""
    more: dict[str, Any] = {
        "username": place.username or None,
        "password": place.password or None,
        "socket_timeout": options.answer_s,
        "socket_connect_timeout": options.connect_s,
    }
    if place.tls:
        more |= {
            "ssl": True,
            "ssl_cert_reqs": ssl.CERT_REQUIRED if options.verify else ssl.CERT_NONE,
            "ssl_check_hostname": options.verify,
            "ssl_ca_certs": options.ca_file or None,
        }
    driver: Any = redis  # the driver is partly untyped
    if place.topology == "cluster":
        nodes = [driver.cluster.ClusterNode(*address) for address in place.addresses]
        return driver.cluster.RedisCluster(startup_nodes=nodes, **more)
    if place.topology == "sentinel":
        login = {
            "username": options.sentinel_username or None,
            "password": options.sentinel_password or None,
            **({"ssl": True} if place.tls else {}),
        }
        sentinels = driver.sentinel.Sentinel(place.addresses, sentinel_kwargs=login)
        return sentinels.master_for(place.service, db=place.db, **more)
    host, port = place.addresses[0]
    return redis.Redis(host=host, port=port, db=place.db, **more)
