"""Carry out a batch: which calls to send, and how to handle each reply. Written once for sync and async.

`RedisExchange.carry_out` is a generator: it yields steps (`RedisQuery`, `Ahead`, `RedisPause`, `Refresh`, `Nodes`),
receives their results, and returns the answers. `Pipeline` and `AsyncPipeline` perform the steps.
"""

import logging
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

from semel.core.backoff import backoff_s
from semel.core.commands import Answer, Claim, Granted, Item, Mark, Marked, Settle
from semel.core.ids import digests_of
from semel.errors import KeyInvalid, RecordCorrupt, SemelError, StoreRefused, StoreUnavailable
from semel.stores.redis import encoding, errors
from semel.stores.redis import marks as redis_marks
from semel.stores.redis.calls import (
    AHEAD_ITEMS,
    REPLY_BYTES_MAX,
    Address,
    Ahead,
    CallPart,
    KeyLayout,
    PartKind,
    RedisCall,
    RedisPause,
    RedisQuery,
    Refresh,
    Script,
    Scripts,
    Step,
    Steps,
    cut,
    pieces,
    queue_unfinished,
    refuse,
    repeatable,
    runs,
    select,
    split_by_key,
    take_marks,
)
from semel.stores.redis.errors import to_store_error
from semel.stores.redis.settings import RedisOptions
from semel.stores.redis.waiting import Waits
from semel.types import Busy, Completed, Forgotten, Id, Unavailable

PAUSE_FIRST_S, PAUSE_MAX_S = 0.01, 0.25
HOPS_MAX = 3
"""Redirections that are followed at once; after that the call pauses, so that the nodes can agree."""

_FAULTS = (SemelError, UnicodeEncodeError, OverflowError, ValueError, IndexError)
"""Errors of an item that cannot be encoded."""

_log = logging.getLogger("semel")


class RedisExchange:
    """The protocol of one store object with its servers, and its state; without the connections."""

    def __init__(
        self, *, name: str, layout: KeyLayout, cluster: bool, options: RedisOptions, new_token: Callable[[], bytes],
        where: Callable[[RedisCall], Address],
    ) -> None:  # fmt: skip
        self.name = name
        self.layout = layout
        self.cluster = cluster
        self.readable_keys: bool = options.readable_keys
        self.retry_s: float = options.retry_s
        self.scripts: Scripts
        self._on_lost = b"s" if options.on_store_lost == "fail" else b""
        self.waits: Waits | None = Waits.of(options)
        self._where = where
        self._channel: bytes = layout.channel if cluster else b"?" + layout.channel
        self._new_token = new_token
        self.token: bytes = new_token()
        self.bins_wanted: int = (
            redis_marks.bins_for(options.marks_expected) if options.marks == "compact" else 0
        )
        """How many sets a new consumer's compact marks get; 0: marks are plain keys."""
        self._plain_marks_only: bool = not (cluster or self.bins_wanted or self._on_lost)
        """Whether marks need no script."""
        self.epochs: dict[int, bytes] = {}
        self.scopes: set[tuple[str, str]] = set()
        """Consumers whose tag is recorded in the store."""
        self.bins: dict[tuple[str, str], int] = {}
        """The number of sets of consumers that have another number than `bins_wanted`."""
        self.stores_lost: int = 0
        self.unreplicated: int = 0
        self.unsynced: int = 0
        self.recreated: int = 0

    # --- records and marks ---

    def carry_out(self, items: Sequence[Item], now: bytes = b"") -> Generator[Step, Any, list[Answer]]:
        """Answer the items by position. `now` replaces the server's time, for tests."""
        from semel.stores.redis import admin

        answers: list[Answer] = [None] * len(items)
        parts: list[CallPart] = []
        sent = 0
        yield from self._record_tags(items)
        if not now and self._plain_marks_only and redis_marks.serves(items):
            yield from redis_marks.carry_out(self, items, answers)  # type: ignore[arg-type]  # it serves only marks
            return answers
        for start, kind, run in runs(items):
            if kind == "admin":
                yield from self.ask_all(parts, answers, now, sent)
                parts, sent = [], 0
                answers[start] = yield from self._answer_errors(admin.carry_out(self, run[0], now))
                continue
            for more in self._pieces(kind, start, run, answers):
                parts += more
                if len(more) == 1 and len(more[0].keys) >= AHEAD_ITEMS and not self.cluster:
                    yield Ahead(self._calls(parts[sent:], now))
                    sent = len(parts)
        yield from self.ask_all(parts, answers, now, sent)
        if self.bins_wanted:
            yield from redis_marks.look_again(self, items, answers, now)
        return answers

    def carry_out_again(self, item: Claim | Settle, now: bytes) -> Generator[Step, Any, list[Answer]]:
        """Answer an item whose connection broke once: as every call it is sent only once more."""
        answers: list[Answer] = [None]
        parts = list(self._parts("claim" if type(item) is Claim else "end", 0, [item], answers))
        for part in parts:
            part.cuts = 1
        yield Refresh()
        yield from self.ask_all(parts, answers, now)
        return answers

    def _pieces(
        self, kind: Any, start: int, run: Sequence[Any], answers: list[Answer]
    ) -> Iterable[list[CallPart]]:
        """Yield the parts of a run; on one server in pieces, so that the first is sent before the last is encoded."""
        if kind == "mark":
            answers[start] = Marked([False] * len(run[0].keys))
            try:
                for part in self._mark_parts(start, run[0]):
                    yield [part]
            except UnicodeEncodeError as error:
                answers[start] = Unavailable(KeyInvalid(f"a key is not valid text: {error}"))
        elif self.cluster:
            yield list(self._parts(kind, start, run, answers))
        else:
            for piece in pieces(len(run)):
                yield list(self._parts(kind, start + piece.start, run[piece], answers))

    def _answer_errors(self, steps: Steps) -> Steps:
        """Run the steps; an error of the store or of a record becomes the answer."""
        try:
            return (yield from steps)
        except RecordCorrupt as error:
            return Unavailable(error)
        except StoreUnavailable as error:
            return Unavailable(error)

    def _parts(
        self, kind: PartKind, start: int, run: Sequence[Any], answers: list[Answer]
    ) -> Iterable[CallPart]:
        try:
            encoded = self._encode(kind, run)
        except _FAULTS:
            good: list[tuple[int, Any]] = []
            for at, item in enumerate(run, start):  # find the bad items; only they get an error
                try:
                    self._encode(kind, [item])
                    good.append((at, item))
                except _FAULTS as error:
                    fault = error if isinstance(error, SemelError) else RecordCorrupt(f"{item.id!r}: {error}")
                    answers[at] = Unavailable(fault)
            for at, item in good:
                yield from self._parts(kind, at, [item], answers)
            return
        records = self.layout.records
        for common, which, digests, args in encoded:
            whole = len(which) == len(run)
            items = run if whole else [run[at] for at in which]
            places = [start + at for at in which]
            if self.cluster:
                yield from self._by_bucket(CallPart(kind, places, items, digests, args, common=common))
            else:
                keys = [records[each[0] & 63] + each for each in digests]
                yield from cut(CallPart(kind, places, items, keys, args, common=common))

    def _encode(self, kind: PartKind, run: Sequence[Any]) -> list[encoding.Encoded]:
        return encoding.claims(run, readable=self.readable_keys) if kind == "claim" else encoding.ends(run)

    def _by_bucket(self, whole: CallPart) -> Iterable[CallPart]:
        """Yield a part for each bucket; `whole` has digests instead of keys."""
        places: dict[int, list[int]] = {}
        for at, each in enumerate(whole.keys):
            places.setdefault(each[0] & 63, []).append(at)
        for bucket, which in places.items():
            part = select(whole, which)
            part.bucket = bucket
            part.keys = [self.layout.records[bucket] + each for each in part.keys]
            yield from cut(part)

    def _mark_parts(self, at: int, item: Mark) -> Iterable[CallPart]:
        if self.bins_wanted:
            for piece in pieces(len(item.keys)):
                places = list(range(piece.start, piece.stop))
                yield redis_marks.part_of(self, at, item, places, item.keys[piece])
            return
        tag = encoding.tag_of(item.tenant, item.consumer)
        marks, args = (
            [head + tag for head in self.layout.marks],
            [b"%d" % item.window_us, b"r" if item.refresh else b""],
        )
        if not self.cluster:
            yield from self.plain_marks(at, item)
            return
        digests = digests_of(item.tenant, item.consumer, item.keys)
        keys = [marks[each[0] & 63] + each[:12] for each in digests]
        buckets: dict[int, CallPart] = {}
        for place, (each, key) in enumerate(zip(digests, keys, strict=True)):
            bucket = each[0] & 63
            part = buckets.setdefault(bucket, CallPart("mark", [], [item], [], args, bucket, at))
            part.places.append(place)
            part.keys.append(key)
        yield from buckets.values()

    def plain_marks(self, at: int, item: Mark) -> Iterable[CallPart]:
        """Yield the parts of a mark on one server; the first one is small."""
        tag = encoding.tag_of(item.tenant, item.consumer)
        marks, args = (
            [head + tag for head in self.layout.marks],
            [b"%d" % item.window_us, b"r" if item.refresh else b""],
        )
        for piece in pieces(len(item.keys)):
            digests = digests_of(item.tenant, item.consumer, item.keys[piece])
            keys = [marks[each[0] & 63] + each[:12] for each in digests]
            yield CallPart("mark", list(range(piece.start, piece.stop)), [item], keys, args, mark=at)

    def _record_tags(self, items: Sequence[Item]) -> Steps:
        """Record in the store, once per consumer, which consumer the tag in its marks' keys means."""
        for item in items:
            if type(item) is not Mark or (item.tenant, item.consumer) in self.scopes:
                continue
            scope = (item.tenant, item.consumer)
            field = encoding.tag_of(*scope)
            call = RedisCall([b"HSET", self.layout.scopes, field, encoding.scope_name(*scope)])
            (reply,) = yield RedisQuery([call])
            if not isinstance(reply, Exception):
                self.scopes.add(scope)

    # --- asking ---

    def ask_all(self, parts: list[CallPart], answers: list[Answer], now: bytes, sent: int = 0) -> Steps:
        """Send the parts, with retries, until each has its answers. `sent`: how many are already sent."""
        waited_s, pauses = 0.0, 0
        while parts:
            calls = self._calls(parts[sent:], now)
            sent = 0
            if self.waits is None:
                replies = yield RedisQuery(calls)
            else:
                replies = yield from self._ask_and_wait(self.waits, calls, parts)
            again: list[CallPart] = []
            later: list[CallPart] = []
            refresh = False
            for part, reply in zip(parts, replies, strict=True):
                if isinstance(reply, Exception):
                    refresh |= self._redirect(part, reply, again, later, answers)
                else:
                    self._take(part, reply, answers, again, later)
            if refresh:
                yield Refresh()
            if later and waited_s < self.retry_s:
                pause_s = backoff_s(pauses, PAUSE_FIRST_S, PAUSE_MAX_S)
                yield RedisPause(pause_s)
                waited_s, pauses = waited_s + pause_s, pauses + 1
                again += later
            elif later:
                error = StoreUnavailable(
                    f"{self.name} is not ready: its keys are being moved, or it has no master"
                )
                for part in later:
                    refuse(part, error, answers)
            parts = again

    def _calls(self, parts: list[CallPart], now: bytes) -> list[RedisCall]:
        return [RedisCall(self._command(part, now), part.bucket, part.node, part.asking) for part in parts]

    def _ask_and_wait(self, waits: Waits, calls: list[RedisCall], parts: list[CallPart]) -> Steps:
        """Send the calls, then wait on each node until its settles reach replicas and disks. One wait per node."""
        ends: dict[Address, list[CallPart]] = {}
        for part in parts:
            if part.kind == "end":
                ends.setdefault(self._where(RedisCall((), part.bucket, part.node)), []).append(part)
        more = [RedisCall(command, node=node) for node in ends for command in waits.commands]
        replies = yield RedisQuery(calls + more)
        kept, wait_replies = replies[: len(parts)], iter(replies[len(parts) :])
        answered = {
            id(part) for part, reply in zip(parts, kept, strict=True) if not isinstance(reply, Exception)
        }
        for theirs in ends.values():
            settled = sum(len(part.items) for part in theirs if id(part) in answered)
            copied, synced = waits.read_replies(wait_replies)
            self.unreplicated += 0 if copied else settled
            self.unsynced += 0 if synced else settled
            if settled and not (copied and synced):
                _log.warning(
                    "%s: %d settled records did not reach %s in time",
                    self.name, settled, waits.describe_missing(copied=copied, synced=synced),
                )  # fmt: skip
        return kept

    def _command(self, part: CallPart, now: bytes) -> list[bytes | int]:
        script = self._script(part)
        bucket = part.bucket if self.cluster else 0
        return [
            *((b"EVAL", script.text) if part.as_text else (b"EVALSHA", script.sha)),
            len(part.keys) + 1,
            part.keys[0] if part.bare else self.layout.epochs[bucket],
            *part.keys,
            now,
            self.epochs.get(bucket, b""),
            self.token,
            b"b" if part.bare else self._on_lost,
            self._channel if part.kind == "end" else b"",
            REPLY_BYTES_MAX,
            *((part.common, *part.args) if part.kind in ("claim", "end") else part.args),
        ]

    def _script(self, part: CallPart) -> Script:
        if part.kind == "claim":
            return self.scripts.claim
        if part.kind == "end":
            return self.scripts.settle
        return self.scripts.mark if part.kind == "mark" else self.scripts.compact

    def _redirect(
        self,
        part: CallPart,
        error: Exception,
        again: list[CallPart],
        later: list[CallPart],
        answers: list[Answer],
    ) -> bool:
        """Decide how to go on with a part that was not carried out; returns whether to find the masters again."""
        kind = errors.kind_of(error)
        part.node, part.asking = None, False
        match kind:
            case "text" if not part.as_text:
                part.as_text = True
                again.append(part)
            case "moved" | "ask" if part.hops < HOPS_MAX:
                part.hops += 1
                part.node, part.asking = errors.other_node(error), kind == "ask"
                again.append(part)
                return kind == "moved"
            case "moved" | "ask":
                part.hops = 0
                later.append(part)
                return True
            case "split" if part.bare or len(part.keys) == 0:
                later.append(part)
            case "split":
                again += split_by_key(part)
            case "wait":
                later.append(part)
                return True
            case "unsent" | "cut" if not part.cuts and (kind == "unsent" or repeatable(part)):
                part.cuts += 1
                again.append(part)
                return True
            case "refused":
                raise to_store_error(error, self.name) from error
            case _:
                refuse(part, to_store_error(error, self.name), answers)
                return kind in ("cut", "unsent")
        return False

    # --- replies ---

    def _take(
        self, part: CallPart, reply: Any, answers: list[Answer], again: list[CallPart], later: list[CallPart]
    ) -> None:
        self.note_epoch(part.bucket if self.cluster else 0, reply[1])
        if len(reply) < 3:  # noqa: PLR2004 - the script stopped and carried out nothing
            raise StoreRefused(
                f"{self.name} has lost its records since this client opened it (a flush, or a failover to an empty"
                " server); nothing was written. Close it and open it again to go on"
            )
        now, letters, details = reply[0], reply[2], iter(reply[3:])
        if part.kind == "mark":
            take_marks(part, letters, answers)
        elif part.kind == "compact":
            other = redis_marks.take(self, part, now, letters, details, answers)
            again += [] if other is None else [other]
        elif part.kind == "claim":
            self._take_claims(part, now, letters, details, answers, again, later)
        else:
            self._take_ends(part, now, letters, details, answers, again, later)

    def _take_claims(
        self, part: CallPart, now: int, letters: bytes, details: Any, answers: list[Answer],
        again: list[CallPart], later: list[CallPart],
    ) -> None:  # fmt: skip
        first = part.items[0]  # all items of a part have the same lease
        granted = Granted(now, 1, now + first.lease_us, now) if first.journal is None else None
        left: list[int] = []
        for at, (place, item, letter) in enumerate(zip(part.places, part.items, letters, strict=True)):
            if letter == 70 and granted is not None:  # noqa: PLR2004 - F
                answers[place] = granted
            elif letter in encoding.AGAIN:
                left.append(at)
            else:
                detail = next(details) if letter in encoding.CLAIM_DETAILED else b""
                try:
                    answers[place] = encoding.claim_answer(chr(letter), detail, item, now)
                except RecordCorrupt as error:
                    answers[place] = Unavailable(error)
        queue_unfinished(part, left, letters, again, later)

    def _take_ends(
        self, part: CallPart, now: int, letters: bytes, details: Any, answers: list[Answer],
        again: list[CallPart], later: list[CallPart],
    ) -> None:  # fmt: skip
        completed = Completed(at_us=now)
        left: list[int] = []
        unnamed: list[int] = []
        for at, (place, item, letter) in enumerate(zip(part.places, part.items, letters, strict=True)):
            if letter == 67:  # noqa: PLR2004 - C
                answers[place] = completed
            elif letter == 110:  # noqa: PLR2004 - n
                unnamed.append(at)
            elif letter in encoding.AGAIN:
                left.append(at)
            else:
                detail = next(details) if letter in encoding.END_DETAILED else b""
                try:
                    answers[place] = encoding.end_answer(chr(letter), detail, item, now)
                except RecordCorrupt as error:
                    answers[place] = Unavailable(error)
                if letter == 82:  # noqa: PLR2004 - R
                    self.recreated += 1
        if unnamed:
            named = select(part, unnamed)
            named.common = b""
            named.args = [
                encoding.settle(item, encoding.name_of(item.id, readable=self.readable_keys))
                for item in named.items
            ]
            again.append(named)
        queue_unfinished(part, left, letters, again, later)

    def note_epoch(self, bucket: int, epoch: bytes) -> None:
        """Note the epoch of a bucket; another epoch than before means that the store lost its records."""
        known = self.epochs.get(bucket)
        if known == epoch or not epoch:
            return
        self.epochs[bucket] = epoch
        if epoch == self.token:  # we wrote it; the next one must differ, or a second loss would go unnoticed
            self.token = self._new_token()
            _log.info("%s: the store is new or was emptied; bucket %d starts empty", self.name, bucket)
        if known is None:
            return
        self.stores_lost += 1
        self.scopes.clear()
        self.bins.clear()
        _log.warning(
            "%s has lost its records (a flush, or a failover to an empty server): earlier effects may happen again",
            self.name,
            extra={"event": "store_lost", "bucket": bucket},
        )


def busy_ids(items: Sequence[Item], answers: Sequence[Answer]) -> Iterable[Id]:
    """Yield the busy records that callers may now wait for."""
    for item, answer in zip(items, answers, strict=True):
        if type(answer) is Busy and type(item) is Claim:
            yield item.id


def ended_ids(items: Sequence[Item], answers: Sequence[Answer]) -> Iterable[Id]:
    """Yield the records that these items settled, released or forgot."""
    for item, answer in zip(items, answers, strict=True):
        if (type(answer) is Completed and not answer.already) or type(answer) is Forgotten:
            yield item.id  # type: ignore[union-attr]  # only items on a record are answered so
