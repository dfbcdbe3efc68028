"""A rotating filter in a Redis server with the RedisBloom module. All instances share it; one round trip per call."""

import time
from collections.abc import Sequence
from math import log2
from typing import Any

from semel.errors import StoreRefused, StoreUnavailable, StoreUnknown
from semel.runtime.extras import install_command
from semel.stores.bloom.filter import BloomLayout, layout
from semel.stores.tiered.protocols import Fullness
from semel.windows import Duration

try:
    import redis
    from redis.exceptions import RedisError, ResponseError
except ModuleNotFoundError as _missing:
    raise StoreUnknown(
        f"RedisBloom needs the Redis driver; install the extra: {install_command('redis')}"
    ) from _missing

__all__ = ["RedisBloom"]

ANSWER_S = 2.0


class RedisBloom:
    """The same filter as `Bloom`, with `BF.*` commands. `open` raises `StoreRefused` if the server lacks the module.

    Each generation is reserved for its share of the capacity and does not grow (`NONSCALING`); when it is full, ids are
    left out and `full` counts them. The server expires old generations.
    """

    instant: bool = False

    def __init__(
        self,
        url: str,
        *,
        name: str,
        capacity: int,
        window: Duration = "24h",
        error_rate: float = 0.001,
        steps: int = 3,
        answer_s: float = ANSWER_S,
    ) -> None:
        self.layout: BloomLayout = layout(capacity, window, error_rate, steps)
        self.full: int = 0
        """How many ids were left out because a generation was full."""
        self._head = f"semel:bloom:{{{name}}}:".encode()
        self._client: Any = redis.Redis.from_url(
            url, protocol=2, socket_timeout=answer_s, socket_connect_timeout=answer_s
        )
        self._reserved: set[int] = set()
        self._opened: tuple[int, float] | None = None
        """The server's clock in microseconds and ours in seconds, at `open`."""

    def open(self) -> None:
        """Connect and check that the module is loaded; idempotent."""
        if self._opened is not None:
            return
        seconds, us = self._call(self._client.execute_command, "TIME")
        self._opened = (int(seconds) * 10**6 + int(us), time.monotonic())
        try:
            self._reserve(self._newest())
        except BaseException:
            self._opened = None
            raise

    def close(self) -> None:
        """Disconnect; idempotent."""
        self._opened = None
        self._reserved.clear()
        self._client.close()

    def add_many(self, digests: Sequence[bytes], /) -> None:
        """Add the ids to the current generation."""
        self.open()
        if not digests:
            return
        newest = self._newest()
        self._reserve(newest)
        added = self._call(self._client.execute_command, "BF.MADD", self._key(newest), *digests)
        self.full += sum(isinstance(each, Exception) for each in added)

    def maybe_many(self, digests: Sequence[bytes], /) -> list[bool]:
        """Return for each id whether any generation may contain it; asks all generations at once."""
        self.open()
        if not digests:
            return []
        newest = self._newest()
        # One generation more than needed: another instance's clock may be a little ahead.
        numbers = range(newest - self.layout.steps, newest + 2)
        replies = self._pipeline([("BF.MEXISTS", self._key(number), *digests) for number in numbers])
        return [any(each) for each in zip(*replies, strict=True)]

    def fullness(self) -> Fullness:
        """Return how full it is, from the server's counts; the fill ratio is computed from the number of ids."""
        self.open()
        newest = self._newest()
        numbers = range(newest - self.layout.steps, newest + 1)
        replies = self._pipeline(
            [("BF.INFO", self._key(number)) for number in numbers], missing_is_empty=True
        )
        ids: list[int] = []
        size = 0
        for reply in filter(None, replies):
            info = dict(zip(reply[::2], reply[1::2], strict=True))
            ids.append(int(info[b"Number of items inserted"]))
            size += int(info[b"Size"])
        fills = [1 - 0.5 ** (each / self.layout.generation_capacity) for each in ids]
        right = 1.0
        for fill in fills:
            right *= 1 - min(1.0, (2 * fill) ** _hashes(self.layout) * self.layout.generation_error_rate)
        return Fullness(
            ids=sum(ids),
            capacity=self.layout.capacity,
            fill_ratio=max(fills, default=0.0),
            false_positive_ratio=1 - right,
            bytes_used=size,
            generations=len(ids),
        )

    # --- inside ---

    def _newest(self) -> int:
        assert self._opened is not None
        at_us, steady_s = self._opened
        return self.layout.number(at_us + round((time.monotonic() - steady_s) * 1e6))

    def _key(self, number: int) -> bytes:
        return self._head + b"%d" % number

    def _reserve(self, number: int) -> None:
        if number in self._reserved:
            return
        key = self._key(number)
        rate, room = self.layout.generation_error_rate, self.layout.generation_capacity
        try:
            self._client.execute_command("BF.RESERVE", key, rate, room, "NONSCALING")
        except ResponseError as error:
            text = str(error).lower()
            if "unknown command" in text:
                raise StoreRefused(
                    "this Redis server has no RedisBloom module (it does not know BF.RESERVE); load the module, use"
                    " semel.stores.bloom.Bloom instead, or do without a filter: only speed depends on it"
                ) from error
            if "exists" not in text:
                raise StoreRefused(f"RedisBloom refuses to create the filter: {error}") from error
        except RedisError as error:
            raise StoreUnavailable(f"RedisBloom gave no answer: {error}") from error
        lives_ms = (self.layout.generations + 1) * self.layout.step_us // 1000 + 1
        self._call(self._client.execute_command, "PEXPIRE", key, lives_ms)
        self._reserved = {number}

    def _pipeline(self, commands: list[tuple[Any, ...]], *, missing_is_empty: bool = False) -> list[Any]:
        pipeline = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        replies: list[Any] = self._call(pipeline.execute, raise_on_error=False)
        for at, reply in enumerate(replies):
            if isinstance(reply, Exception):
                if not missing_is_empty or "not found" not in str(reply).lower():
                    raise StoreUnavailable(f"RedisBloom did not answer: {reply}") from reply
                replies[at] = None
        return replies

    def _call(self, call: Any, *args: Any, **more: Any) -> Any:
        try:
            return call(*args, **more)
        except (RedisError, OSError) as error:
            raise StoreUnavailable(f"RedisBloom gave no answer: {error}") from error


def _hashes(layout: BloomLayout) -> float:
    """Return how many hashes the server uses for this error rate."""
    return log2(1 / layout.generation_error_rate)
