"""Shared parts of the sync and async store: everything except the connections."""

import os
from collections.abc import Callable, Iterable, Sequence
from threading import Lock
from typing import Any

from hiredis import pack_command

from semel.clock import Clock
from semel.core.commands import Answer, Item
from semel.core.ids import DIGEST_BYTES, digest
from semel.core.protocols import Capabilities, Listener
from semel.errors import StoreClosed
from semel.stores.redis import marks, server_checks
from semel.stores.redis.calls import Address, KeyLayout, RedisCall, Steps, scripts_for
from semel.stores.redis.exchange import RedisExchange, busy_ids, ended_ids
from semel.stores.redis.server_checks import ClusterMap, ServerFacts
from semel.stores.redis.settings import RedisOptions, RedisTarget, parse
from semel.stores.redis.single import RedisSingleCall, RedisSingleItems
from semel.types import Id

__all__ = ["RedisState", "RedisStoreBase", "link_options", "pack"]

WAITING_MAX = 100_000
"""The most records that waiters of this process are notified about; waiters for more records only poll."""


_pack: Callable[[Any], bytes] = pack_command


def pack(calls: Iterable[RedisCall]) -> bytes:
    """Return the calls as bytes for the wire."""
    return b"".join(
        _ASKING + _pack(tuple(call.command)) if call.asking else call.packed or _pack(tuple(call.command))
        for call in calls
    )


_ASKING = b"*1\r\n$6\r\nASKING\r\n"


class RedisState:
    """A store without its connections: its target, the facts about its servers, and its listeners."""

    def __init__(self, url: str, clock: Clock | None, options: dict[str, Any]) -> None:
        place, given = parse(url, options)
        self.place: RedisTarget = place
        self.options: RedisOptions = given
        self.name: str = self.place.name
        self.url: str = url
        self.given: dict[str, Any] = options
        self.clock = clock
        self.map: ClusterMap | None = None
        self.facts: ServerFacts | None = None
        """The result of the start checks; `None`: they have to run."""
        self.found: ServerFacts | None = None
        """The same; kept after `close`."""
        self.closed = False
        self.exchange: RedisExchange = RedisExchange(
            name=self.name,
            layout=KeyLayout(self.options.prefix, f"{self.options.prefix}:ended:{self.place.db}"),
            cluster=self.place.topology == "cluster",
            options=self.options,
            new_token=lambda: os.urandom(8).hex().encode(),
            where=self.address,
        )
        self.single: RedisSingleItems = RedisSingleItems(self.exchange)
        self.after_fork()

    def after_fork(self) -> None:
        """Drop the lock, the listeners and the waiters of the parent process."""
        self.lock: Lock = Lock()
        self.listeners: tuple[Listener, ...] = ()
        self.waiting: dict[bytes, Id] = {}

    def __repr__(self) -> str:
        return f"<store {self.name}>"

    @property
    def capabilities(self) -> Capabilities:
        """The store's capabilities. `durable` is known after `open`; until then it is assumed."""
        durable = self.found is None or self.found.durable
        return Capabilities(durable=durable, shared=True, notifies=True, endless=durable, refreshes=True)

    @property
    def weaknesses(self) -> tuple[str, ...]:
        """Known weaknesses of the guarantee, a sentence each without its full stop."""
        found = () if self.found is None else self.found.costs
        if self.options.marks == "compact":
            found = (*found, marks.COLLISIONS)
        return found

    def open_steps(self) -> Steps:
        """Find the masters and run the start checks on them."""
        self.map = yield from server_checks.locate(self.place, self.map)
        self.facts = self.found = yield from server_checks.look(self.place, self.map.masters, self.options)
        self.exchange.scripts = scripts_for(
            shebang=server_checks.numbers(self.facts.version) >= server_checks.SHEBANG_OLDEST
        )

    def locate_steps(self) -> Steps:
        """Find the masters again."""
        self.map = yield from server_checks.locate(self.place, self.map)

    def nodes(self) -> list[Address]:
        """Return the addresses of all masters."""
        assert self.map is not None
        return list(self.map.masters)

    def address(self, call: RedisCall) -> Address:
        """Return the address of the node for this call."""
        if call.node is not None:
            return call.node
        assert self.map is not None
        return self.map.buckets[call.bucket]

    def carry_out(self, items: Sequence[Item]) -> Steps:
        """Answer the items."""
        return self.exchange.carry_out(items, self._now())

    def carry_out_again(self, call: RedisSingleCall) -> Steps:
        """Answer an item whose connection broke once."""
        return self.exchange.carry_out_again(call.item, self._now())

    def single_call(self, call: RedisSingleCall, *, as_text: bool = False) -> RedisCall:
        """Return the call of the fast path for the server."""
        return RedisCall(self.single.command_of(call, self._now(), as_text=as_text))

    def _now(self) -> bytes:
        """Return the time that replaces the server's; empty: the server's time counts."""
        return b"" if self.clock is None else b"%d" % self.clock.now_us()

    def closed_error(self) -> StoreClosed:
        """Error for calls made after `close()`."""
        return StoreClosed(f"{self.name} is closed; open() it again to use it")

    # --- listeners and waiters ---

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Add a listener; returns a function that removes it."""
        with self.lock:
            self.listeners = (*self.listeners, listener)

        def stop() -> None:
            with self.lock:
                self.listeners = tuple(each for each in self.listeners if each is not listener)
                if not self.listeners:
                    self.waiting.clear()

        return stop

    def notify_listeners(self, items: Sequence[Item], answers: Sequence[Answer]) -> None:
        """Notify the listeners of the records that these items ended, and note the busy records to wait for."""
        if not self.listeners:
            return
        waiting = self.waiting
        for record_id in busy_ids(items, answers):
            if len(waiting) < WAITING_MAX:
                waiting[digest(record_id)] = record_id
        self._notify(list(ended_ids(items, answers)))

    def handle_message(self, message: bytes) -> None:
        """Notify the listeners of records that other clients ended. The message is a row of digests."""
        waiting = self.waiting
        if waiting:
            found = (
                waiting.pop(message[at : at + DIGEST_BYTES], None)
                for at in range(0, len(message), DIGEST_BYTES)
            )
            self._notify([record_id for record_id in found if record_id is not None])

    def subscribe_call(self) -> RedisCall:
        """Return the call that subscribes a connection to the channel of ended records."""
        return RedisCall([b"SUBSCRIBE", self.exchange.layout.channel])

    def is_subscribed(self, reply: Any) -> bool:
        """Whether this reply confirms the subscription. Passes messages on to the listeners; raises errors."""
        if isinstance(reply, Exception):
            raise reply
        if reply[0] == b"message":
            self.handle_message(reply[2])
        return bool(reply[0] == b"subscribe")

    def notify_all_waiting(self) -> None:
        """Notify the listeners of all awaited records: after a gap in the subscription any of them may have ended."""
        self._notify(list(self.waiting.values()))

    def _notify(self, ids: list[Id]) -> None:
        for record_id in ids:
            for listener in self.listeners:
                listener(record_id)


class RedisStoreBase:
    """Properties that the sync and async stores share."""

    _core: RedisState

    @property
    def core(self) -> RedisState:
        """The state without the connections; a cache in the same servers uses it."""
        return self._core

    def __repr__(self) -> str:
        return repr(self._core)

    @property
    def capabilities(self) -> Capabilities:
        """The store's capabilities. `durable` is known after `open`; until then it is assumed."""
        return self._core.capabilities

    @property
    def weaknesses(self) -> tuple[str, ...]:
        """Known weaknesses of the guarantee, a sentence each without its full stop; more are known after `open`."""
        return self._core.weaknesses

    @property
    def stores_lost(self) -> int:
        """How often the server lost its records while this object used it."""
        return self._core.exchange.stores_lost

    @property
    def unreplicated(self) -> int:
        """How many settled records did not reach `wait_replicas` replicas in time."""
        return self._core.exchange.unreplicated

    @property
    def unsynced(self) -> int:
        """How many settled records were not on the disks of `wait_disk` and `wait_replica_disks` in time."""
        return self._core.exchange.unsynced


def link_options(core: RedisState, address: Address) -> dict[str, Any]:
    """Return the driver's options for a connection to this address, sync or async."""
    place, options = core.place, core.options
    sentinel = place.topology == "sentinel" and address in place.addresses
    found: dict[str, Any] = {
        "host": address[0],
        "port": address[1],
        "db": 0 if sentinel else place.db,
        "username": (options.sentinel_username if sentinel else place.username) or None,
        "password": (options.sentinel_password if sentinel else place.password) or None,
        "socket_timeout": options.answer_s,
        "socket_connect_timeout": options.connect_s,
        "socket_keepalive": True,
        "protocol": 2,
        "driver_info": None,
    }
    if place.tls:
        found["ssl_cert_reqs"] = "required" if options.verify else "none"
        found["ssl_check_hostname"] = options.verify
        if options.ca_file:
            found["ssl_ca_certs"] = options.ca_file
        if options.cert_file:
            found["ssl_certfile"], found["ssl_keyfile"] = options.cert_file, options.key_file
    return found
