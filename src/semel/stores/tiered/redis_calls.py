"""The calls of a cache to Redis or Valkey and the parsing of their replies, for sync and async."""

import os
import time
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from hashlib import sha1
from importlib.resources import files
from struct import Struct as Form
from typing import Any

import msgspec

from semel.errors import StoreUnavailable
from semel.stores.redis import encoding
from semel.stores.redis.base import RedisState
from semel.stores.redis.calls import RedisCall, RedisQuery, Refresh, Script, Step
from semel.stores.redis.errors import kind_of, to_store_error
from semel.stores.tiered.protocols import Copy, CopyWrite, Counts, Stamp

__all__ = ["CacheCalls"]

REPLY_BYTES_MAX = 4 * 1024 * 1024
"""The most bytes of copies in one reply; the truth answers the other keys."""
PUT_BYTES_MAX = 4 * 1024 * 1024
"""The most bytes of copies in one call; the others are not copied."""

_PUT = Form(">32sdd")
_COPY = msgspec.msgpack.Decoder(Copy)
_pack_copy = msgspec.msgpack.Encoder().encode


@lru_cache(maxsize=1)
def _script() -> Script:
    text = (files("semel.stores.tiered") / "copies.lua").read_bytes()
    return Script("copies", text, sha1(text, usedforsecurity=False).hexdigest().encode())


class CacheCalls:
    """The cache's operations as generators that yield calls and receive replies; for sync and async."""

    def __init__(self, core: RedisState, cache_window_us: int) -> None:
        self._core = core
        self._window = b"%d" % cache_window_us
        self._steady_us: Callable[[], int] = _steady_us if core.clock is None else core.clock.now_us
        head = core.options.prefix.encode() + b":tier:"
        self._heads = [b"%b{%d}" % (head, bucket) for bucket in range(encoding.BUCKETS)]
        self._cluster: bool = core.place.topology == "cluster"
        self._worth_another = {"text", "moved", "wait"}
        if core.place.topology != "server":
            self._worth_another |= {"unsent", "cut"}  # another node may have taken over
        self._seen: dict[int, tuple[bytes, int, int]] = {}
        """By bucket: the epoch, the server's time, and our time when the reply came."""

    def look(self, digests: Sequence[bytes], counts: Counts) -> Generator[Step, Any, list[Copy | None]]:
        """Return the copies, by position."""
        copies: list[Copy | None] = [None] * len(digests)
        groups = self._groups(digests)
        for places, reply in (yield from self._ask(b"look", groups, digests, [b""] * len(digests), counts)):
            for place, body in zip(places, reply, strict=True):
                if body is not None:
                    copies[place] = _read(body)
        return copies

    def put(self, puts: Sequence[CopyWrite], counts: Counts) -> Generator[Step, Any, int]:
        """Write copies; returns how many were written."""
        args: list[bytes] = []
        size = 0
        for put in puts:
            over_at = put.stamp.at_us + put.rest_us
            body = _pack_copy(put.copy)
            size += len(body)
            if size > PUT_BYTES_MAX:
                break
            args.append(_PUT.pack(put.stamp.epoch, over_at, put.copy.fence) + body)
        digests = [put.digest for put in puts[: len(args)]]
        replies = yield from self._ask(b"put", self._groups(digests), digests, args, counts)
        return sum(sum(reply) for _, reply in replies)

    def invalidate(self, digests: Sequence[tuple[bytes, int]]) -> Generator[Step, Any, None]:
        """Drop all these copies. Raises a `StoreError` if one bucket did not answer."""
        keys = [key for key, _ in digests]
        yield from self._ask(
            b"invalidate", self._groups(keys), keys, [b"%d" % fence for _, fence in digests], {}
        )

    def clear(self) -> Generator[Step, Any, None]:
        """Drop the copies of all buckets. Raises a `StoreError` if one did not answer."""
        buckets = range(encoding.BUCKETS) if self._cluster else (0,)
        yield from self._ask(b"clear", {bucket: [] for bucket in buckets}, [], [], {})

    def read_counts(self) -> Generator[Step, Any, dict[str, int]]:
        """Return the sums of all counts that were ever reported."""
        buckets = range(encoding.BUCKETS) if self._cluster else (0,)
        replies = yield RedisQuery(
            [RedisCall([b"HGETALL", self._heads[bucket] + b"counts"], bucket) for bucket in buckets]
        )
        counts: dict[str, int] = {}
        for reply in replies:
            if isinstance(reply, Exception):
                raise to_store_error(reply, self._core.name) from reply
            pairs = iter(reply)
            for name, number in zip(pairs, pairs, strict=True):
                counts[name.decode()] = counts.get(name.decode(), 0) + int(number)
        return counts

    def stamp(self, digest: bytes) -> Stamp | None:
        """Return the last known state; the server's clock has advanced at least as much as ours since its reply."""
        seen = self._seen.get(digest[0] & 63 if self._cluster else 0)
        if seen is None:
            return None
        epoch, at_us, replied_us = seen
        return Stamp(epoch, at_us + max(0, self._steady_us() - replied_us))

    # --- inside ---

    def _groups(self, digests: Sequence[bytes]) -> dict[int, list[int]]:
        """Return the positions that share a call, by bucket; a single server gets all in one call."""
        if not self._cluster:
            return {0: list(range(len(digests)))}
        groups: dict[int, list[int]] = {}
        for at, each in enumerate(digests):
            groups.setdefault(each[0] & 63, []).append(at)
        return groups

    def _ask(
        self, what: bytes, groups: dict[int, list[int]], digests: Sequence[bytes], args: Sequence[bytes], counts: Counts
    ) -> Generator[Step, Any, list[tuple[list[int], list[Any]]]]:  # fmt: skip
        """Return each group's positions and replies. Raises a `StoreError` if a group got no reply."""
        now = b"" if self._core.clock is None else b"%d" % self._core.clock.now_us()
        counts_text = b" ".join(b"%b %d" % (name.encode(), number) for name, number in counts.items())
        waiting: list[tuple[int, list[int], bytes, bool]] = []
        for bucket, places in groups.items():
            waiting.append((bucket, places, counts_text, False))
            counts_text = b""  # only the first call reports the counts
        done: list[tuple[list[int], list[Any]]] = []
        for last in (False, True):
            calls = [
                self._call(what, bucket, [digests[at] for at in places], [args[at] for at in places],
                           now, text, as_text=as_text)
                for bucket, places, text, as_text in waiting
            ]  # fmt: skip
            replies = yield RedisQuery(calls)
            replied_us = self._steady_us()
            again: list[tuple[int, list[int], bytes, bool]] = []
            for (bucket, places, text, _), reply in zip(waiting, replies, strict=True):
                if isinstance(reply, Exception):
                    if last or kind_of(reply) not in self._worth_another:
                        raise to_store_error(reply, self._core.name) from reply
                    again.append((bucket, places, text, kind_of(reply) == "text"))
                    continue
                self._seen[bucket] = (reply[1], int(reply[0]), replied_us)
                done.append((places, reply[2:]))
            if not again:
                return done
            if not all(as_text for *_, as_text in again):
                yield Refresh()
            waiting = again
        raise StoreUnavailable(f"{self._core.name} gave no answer")

    def _call(
        self,
        what: bytes,
        bucket: int,
        digests: list[bytes],
        args: list[bytes],
        now: bytes,
        counts_text: bytes,
        *,
        as_text: bool,
    ) -> RedisCall:
        head, script = self._heads[bucket], _script()
        heads = self._heads
        return RedisCall(
            [
                *((b"EVAL", script.text) if as_text else (b"EVALSHA", script.sha)),
                len(digests) + 2,
                head + b"epoch",
                head + b"counts",
                *(b"%b:%b" % (heads[each[0] & 63], each) for each in digests),
                what,
                now,
                os.urandom(8).hex().encode(),
                self._window,
                b"%d" % REPLY_BYTES_MAX,
                counts_text,
                *args,
            ],
            bucket,
        )


def _read(body: bytes) -> Copy | None:
    try:
        return _COPY.decode(body)
    except msgspec.DecodeError:  # written by another version, or damaged: the truth answers
        return None


def _steady_us() -> int:
    return time.monotonic_ns() // 1000
