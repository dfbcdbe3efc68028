"""What both colours of the store are made of: all but the connections."""

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
from semel.stores.redis.server_checks import Map, ServerFacts
from semel.stores.redis.settings import RedisOptions, RedisTarget, parse
from semel.types import Id

__all__ = ["RedisState", "RedisStoreBase", "link_options", "pack"]

WAITING_MAX = 100_000
"""Records that somebody of this process waits for; more than that are found by polling alone."""


_pack: Callable[[Any], bytes] = pack_command


def pack(calls: Iterable[RedisCall]) -> bytes:
    """The calls as they go over the wire."""
    return b"".join(
        _ASKING + _pack(tuple(call.command)) if call.asking else call.packed or _pack(tuple(call.command))
        for call in calls
    )


_ASKING = b"*1\r\n$6\r\nASKING\r\n"


class RedisState:
    """A store without its connections: where it is, what is known of it, and who listens."""

    def __init__(self, url: str, clock: Clock | None, options: dict[str, Any]) -> None:
        place, given = parse(url, options)
        self.place: RedisTarget = place
        self.options: RedisOptions = given
        self.name: str = self.place.name
        self.url: str = url
        self.given: dict[str, Any] = options
        self.clock = clock
        self.map: Map | None = None
        self.facts: ServerFacts | None = None
        """What the start checks have found; `None`: they are to be run."""
        self.found: ServerFacts | None = None
        """The same, also after `close`."""
        self.closed = False
        self.exchange: RedisExchange = RedisExchange(
            name=self.name,
            layout=KeyLayout(self.options.prefix, f"{self.options.prefix}:ended:{self.place.db}"),
            cluster=self.place.topology == "cluster",
            options=self.options,
            new_token=lambda: os.urandom(8).hex().encode(),
            where=self.address,
        )
        self.after_fork()

    def after_fork(self) -> None:
        """Nobody of the parent listens in the child."""
        self.lock: Lock = Lock()
        self.listeners: tuple[Listener, ...] = ()
        self.waiting: dict[bytes, Id] = {}

    def __repr__(self) -> str:
        return f"<store {self.name}>"

    @property
    def capabilities(self) -> Capabilities:
        """What it can promise; whether it is durable is known once it is open, and hoped for until then."""
        durable = self.found is None or self.found.durable
        return Capabilities(durable=durable, shared=True, notifies=True)

    @property
    def weaknesses(self) -> tuple[str, ...]:
        """What weakens the promise, as far as it is known, a sentence each without its full stop."""
        found = () if self.found is None else self.found.costs
        if self.options.marks == "compact":
            found = (*found, marks.COLLISIONS)
        return found

    def opening(self) -> Steps:
        """Find the masters and look at them."""
        self.map = yield from server_checks.locate(self.place, self.map)
        self.facts = self.found = yield from server_checks.look(self.place, self.map.masters, self.options)
        self.exchange.scripts = scripts_for(
            shebang=server_checks.numbers(self.facts.version) >= server_checks.SHEBANG_OLDEST
        )

    def locating(self) -> Steps:
        """Find the masters anew."""
        self.map = yield from server_checks.locate(self.place, self.map)

    def nodes(self) -> list[Address]:
        """All masters."""
        assert self.map is not None
        return list(self.map.masters)

    def address(self, call: RedisCall) -> Address:
        """Where a call goes."""
        if call.node is not None:
            return call.node
        assert self.map is not None
        return self.map.buckets[call.bucket]

    def carry_out(self, items: Sequence[Item]) -> Steps:
        """Answer the items."""
        now = b"" if self.clock is None else b"%d" % self.clock.now_us()
        return self.exchange.carry_out(items, now)

    def closed_error(self) -> StoreClosed:
        """What a call gets after `close`."""
        return StoreClosed(f"{self.name} is closed; open() it again to use it")

    # --- who waits ---

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Remember a listener; returns what forgets it."""
        with self.lock:
            self.listeners = (*self.listeners, listener)

        def stop() -> None:
            with self.lock:
                self.listeners = tuple(each for each in self.listeners if each is not listener)
                if not self.listeners:
                    self.waiting.clear()

        return stop

    def notify(self, items: Sequence[Item], answers: Sequence[Answer]) -> None:
        """Notify the listeners of records that this object has ended, and remember the records they wait for."""
        if not self.listeners:
            return
        waiting = self.waiting
        for record_id in busy_ids(items, answers):
            if len(waiting) < WAITING_MAX:
                waiting[digest(record_id)] = record_id
        self._tell(list(ended_ids(items, answers)))

    def on_message(self, message: bytes) -> None:
        """Notify the listeners of records that others have ended: digests, one after the other."""
        waiting = self.waiting
        if waiting:
            found = (
                waiting.pop(message[at : at + DIGEST_BYTES], None)
                for at in range(0, len(message), DIGEST_BYTES)
            )
            self._tell([record_id for record_id in found if record_id is not None])

    def subscribe_call(self) -> RedisCall:
        """What a listener says first."""
        return RedisCall([b"SUBSCRIBE", self.exchange.layout.channel])

    def is_subscribed(self, reply: Any) -> bool:
        """Whether a listener was told that it is heard from now on; passes on what else it was told."""
        if isinstance(reply, Exception):
            raise reply
        if reply[0] == b"message":
            self.on_message(reply[2])
        return bool(reply[0] == b"subscribe")

    def on_resubscribed(self) -> None:
        """Wake all waiters: messages may have been missed before the new subscription."""
        self._tell(list(self.waiting.values()))

    def _tell(self, ids: list[Id]) -> None:
        for record_id in ids:
            for listener in self.listeners:
                listener(record_id)


class RedisStoreBase:
    """What the stores of both colours show of what they have in common."""

    _core: RedisState

    @property
    def core(self) -> RedisState:
        """What a cache in the same servers needs to know of them."""
        return self._core

    def __repr__(self) -> str:
        return repr(self._core)

    @property
    def capabilities(self) -> Capabilities:
        """What it can promise; whether it is durable is known once it is open, and hoped for until then."""
        return self._core.capabilities

    @property
    def weaknesses(self) -> tuple[str, ...]:
        """What weakens the promise, a sentence each without its full stop; more is known once it was open."""
        return self._core.weaknesses

    @property
    def stores_lost(self) -> int:
        """How often the server had lost its records under this object."""
        return self._core.exchange.stores_lost

    @property
    def unreplicated(self) -> int:
        """How many settled records did not reach `wait_replicas` replicas in time."""
        return self._core.exchange.unreplicated

    @property
    def unsynced(self) -> int:
        """How many settled records were not on the disks asked for (`wait_disk`, `wait_replica_disks`) in time."""
        return self._core.exchange.unsynced


def link_options(core: RedisState, address: Address) -> dict[str, Any]:
    """What a connection to this address is made with; the same for both colours."""
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
