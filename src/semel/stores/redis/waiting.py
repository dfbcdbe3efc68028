"""Wait until settled records reach replicas and disks (WAIT, WAITAOF)."""

from collections.abc import Iterator
from typing import Any

from semel.stores.redis.settings import RedisOptions

__all__ = ["Waits"]


class Waits:
    """The wait commands sent after settles. They reduce what a failover or a power failure can lose."""

    def __init__(self, options: RedisOptions) -> None:
        self._replicas = options.wait_replicas
        self._local = int(options.wait_disk)
        self._disks = options.wait_replica_disks
        self.commands: list[list[bytes | int]] = []
        """Sent to each node, in this order."""
        if self._replicas:
            self.commands.append([b"WAIT", self._replicas, round(options.wait_replicas_s * 1000)])
        if options.waits_for_disks:
            self.commands.append([b"WAITAOF", self._local, self._disks, round(options.wait_disk_s * 1000)])

    @classmethod
    def of(cls, options: RedisOptions) -> "Waits | None":
        """Return the waits that the options ask for; `None` if there are none."""
        waits = cls(options)
        return waits if waits.commands else None

    def read_replies(self, replies: Iterator[Any]) -> tuple[bool, bool]:
        """Return whether enough replicas, and whether enough disks, have the writes; an error reply means no."""
        copied = synced = True
        for command in self.commands:
            reply = next(replies)
            if command[0] == b"WAIT":
                copied = isinstance(reply, int) and reply >= self._replicas
            else:
                synced = isinstance(reply, list) and reply[0] >= self._local and reply[1] >= self._disks
        return copied, synced

    def describe_missing(self, *, copied: bool, synced: bool) -> str:
        """Return the replicas and disks that were not reached, for a log line."""
        parts = [] if copied else [f"{self._replicas} replicas"]
        if not synced:
            parts += ["the disk"] * self._local + [f"the disks of {self._disks} replicas"] * bool(self._disks)
        return " and ".join(parts)
