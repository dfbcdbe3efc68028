"""Ask how far a settled record has come: to how many replicas, and onto which disks."""

from collections.abc import Iterator
from typing import Any

from semel.stores.redis.settings import RedisOptions

__all__ = ["Waits"]


class Waits:
    """What a connection is asked after its settles. It narrows what a failover or a power failure can forget."""

    def __init__(self, options: RedisOptions) -> None:
        self._replicas = options.wait_replicas
        self._local = int(options.wait_disk)
        self._disks = options.wait_replica_disks
        self.commands: list[list[bytes | int]] = []
        """For each node, in this order."""
        if self._replicas:
            self.commands.append([b"WAIT", self._replicas, round(options.wait_replicas_s * 1000)])
        if options.waits_for_disks:
            self.commands.append([b"WAITAOF", self._local, self._disks, round(options.wait_disk_s * 1000)])

    @classmethod
    def of(cls, options: RedisOptions) -> "Waits | None":
        """`None`: there is nothing to wait for."""
        made = cls(options)
        return made if made.commands else None

    def replicas_reached(self, told: Iterator[Any]) -> tuple[bool, bool]:
        """Whether enough replicas, and enough disks, have what was written; no answer means no."""
        copied = synced = True
        for command in self.commands:
            reply = next(told)
            if command[0] == b"WAIT":
                copied = isinstance(reply, int) and reply >= self._replicas
            else:
                synced = isinstance(reply, list) and reply[0] >= self._local and reply[1] >= self._disks
        return copied, synced

    def describe_missing(self, *, copied: bool, synced: bool) -> str:
        """What was not reached, in words."""
        parts = [] if copied else [f"{self._replicas} replicas"]
        if not synced:
            parts += ["the disk"] * self._local + [f"the disks of {self._disks} replicas"] * bool(self._disks)
        return " and ".join(parts)
