"""The rules of a cache in front of the truth, written once for sync and async.

`Tier.carry_out` is a generator: it yields steps for the cache or the truth (`ReadCopies`, `AskStore`, `Write`,
`Invalidate`, `Clear`, `ReadCounts`), receives their results, and returns the answers. An error of the cache is
received as a value, never thrown.

    claim ──► Look ──► a copy of `done`: answered
                └────► no copy, or any other: Ask the truth ──► Write what it committed

Only the truth answers "new". The cache answers "done", only for what the truth has committed, and only as long as the
truth would. A forget is answered only after both have forgotten the key.
"""

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from threading import Lock
from typing import Any, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from semel.core.commands import (
    Answer,
    Claim,
    Count,
    Forget,
    Granted,
    Item,
    Known,
    Mark,
    Marked,
    Resolve,
    Settle,
    SetWindow,
)
from semel.core.ids import digest
from semel.errors import StoreError, StoreUnavailable
from semel.stores.tiered.protocols import SEEN, Breaker, Copy, CopyWrite, Filter, Stamp
from semel.types import Absent, Completed, Forgotten, Id, Stats, Unavailable

__all__ = ["AskStore", "Clear", "Invalidate", "ReadCopies", "ReadCounts", "Step", "Tier", "Write"]

COPY_BYTES_MAX = 64 * 1024
"""Larger values are not copied: a batch of them would keep the cache from serving other clients."""
NOTES_MAX = 100_000
"""The most running claims whose fingerprint and first-seen time are kept, so that their completion can be copied."""

_log = logging.getLogger("semel")


class ReadCopies(Struct):
    """Read copies from the cache. Result: the copies, or a `StoreError`."""

    digests: list[bytes]
    counts: dict[str, int]


class AskStore(Struct):
    """Send items to the truth. Result: the answers, or `StoreUnavailable`."""

    items: list[Item]


class Write(Struct):
    """Write copies to the cache. Result: how many it accepted, or a `StoreError`."""

    puts: list[CopyWrite]
    counts: dict[str, int]


class Invalidate(Struct):
    """Make the cache forget keys. Result: `None`, or a `StoreError`."""

    digests: list[tuple[bytes, int]]


class Clear(Struct):
    """Make the cache forget all keys. Result: `None`, or a `StoreError`."""


class ReadCounts(Struct):
    """Read all counts from the cache. Result: the counts, or a `StoreError`."""


Step: TypeAlias = ReadCopies | AskStore | Write | Invalidate | Clear | ReadCounts


class ClaimFields(Struct, frozen=True, gc=False):
    """Fields of a claimed record that its completion does not contain."""

    fence: int
    first_seen: int
    fingerprint: bytes | None
    over_at: int
    """When a sliding record expires, by the truth's clock; 0: it does not slide; -1: unknown here."""


class CommittedAnswer(Struct, frozen=True, gc=False):
    """A committed answer of the truth, and how long it holds from then on."""

    digest: bytes
    copy: Copy
    rest_us: int


class WantedKey(Struct, gc=False):
    """A key that the cache may be able to answer."""

    position: int
    digest: bytes
    place: int = -1
    """Its place among the keys of a mark."""
    maybe: bool = True
    """The filter's answer."""
    copy: Copy | None = None


class Tier:
    """The state and decisions of a tiered store, for sync and async. Thread-safe; does no I/O and reads no clock."""

    def __init__(
        self,
        stamp: Callable[[bytes], Stamp | None],
        *,
        cache_name: str,
        cache_window_us: int,
        breaker: Breaker,
        filter: Filter | None = None,  # noqa: A002 - as users write it
        affine: bool = False,
    ) -> None:
        self._stamp = stamp
        self._cache_name = cache_name
        self._cache_window_us = cache_window_us
        self._breaker = breaker
        self._filter = filter
        self._affine = affine
        self.counts: dict[str, int] = {}
        """Counts that were not yet reported to the cache."""
        self._notes: dict[Id, ClaimFields] = {}
        self.after_fork()

    def after_fork(self) -> None:
        """Replace the lock, which another thread of the parent may have held; drop the parent's claims and counts."""
        self._lock = Lock()
        self._breaker.after_fork()
        self._notes.clear()
        self.counts = {}

    def carry_out(self, items: Sequence[Item]) -> Generator[Step, Any, list[Answer]]:
        """Answer the items by position."""
        answers: list[Answer] = [None] * len(items)
        wanted = self._cacheable_keys(items)
        if wanted:
            yield from self._look(wanted)
        rest, positions, asked = self._rest(items, wanted, answers)
        stamps = self._stamps(
            items, wanted
        )  # before the truth is asked: a later forget must win over the copy
        if rest:
            yield from self._ask(rest, positions, asked, answers)
        self._fold_marks(items, wanted, answers)
        puts = self._learn(items, wanted, answers, stamps)
        if puts and self._breaker.allows():
            counts = self._counts_to_send()
            written = self._note_cache_answer((yield Write(puts, counts)), counts)
            if not isinstance(written, StoreError):
                self._count("copies", written)
        yield from self._forget(items, answers)
        yield from self._add_counts(items, answers)
        return answers

    # --- before the truth ---

    def _cacheable_keys(self, items: Sequence[Item]) -> list[WantedKey]:
        """Return the keys that the cache may answer; not those that another item of the batch is about."""
        if len(items) > 1:
            others = {item.id for item in items if type(item) is not Claim and hasattr(item, "id")}
            if any(type(item) is SetWindow for item in items):
                return []
        else:
            others = set()
        found: list[WantedKey] = []
        for position, item in enumerate(items):
            if type(item) is Claim:
                # Events that are distinguished by their own times go to the truth: a copy has no event time.
                # So do sightings that start a window again: only the truth can do that.
                if not item.apart_us and not item.refresh and item.id not in others and _is_text(item.id[2]):
                    found.append(WantedKey(position, digest(item.id)))
            elif type(item) is Mark and not item.refresh:
                found += [
                    WantedKey(position, digest((item.tenant, item.consumer, key)), place)
                    for place, key in enumerate(item.keys)
                    if _is_text(key) and (item.tenant, item.consumer, key) not in others
                ]
        if self._filter is not None and found:
            try:
                maybes = self._filter.maybe_many([each.digest for each in found])
            except StoreError:
                self._count("filter_errors", 1)
                return found
            for each, maybe in zip(found, maybes, strict=True):
                each.maybe = maybe
        return found

    def _look(self, wanted: list[WantedKey]) -> Generator[Step, Any, None]:
        chosen = [each for each in wanted if each.maybe or not self._affine]
        self._count("filter_skipped", len(wanted) - len(chosen))
        if not chosen:
            return
        if not self._breaker.allows():
            self._count("cache_skipped", len(chosen))
            return
        counts = self._counts_to_send()
        copies = self._note_cache_answer((yield ReadCopies([each.digest for each in chosen], counts)), counts)
        if isinstance(copies, StoreError):
            self._count("cache_skipped", len(chosen))
            return
        for each, copy in zip(chosen, copies, strict=True):
            each.copy = copy

    def _rest(
        self, items: Sequence[Item], wanted: list[WantedKey], answers: list[Answer]
    ) -> tuple[list[Item], list[int], int]:
        """Answer from copies; returns the items left for the truth, their positions, and their number of keys."""
        seen: dict[int, set[int]] = {}
        for each in wanted:
            copy, item = each.copy, items[each.position]
            if copy is None:
                continue
            if type(item) is Claim:
                # Only for the copy's own fingerprint: the truth decides whether another one is a mismatch.
                if copy.kind == "done" and (not item.fingerprint or item.fingerprint == copy.fingerprint):
                    answers[each.position] = Known(
                        "done", copy.value, copy.fence, copy.settled_at, copy.first_seen
                    )
                    continue
            elif copy.kind == "seen":
                seen.setdefault(each.position, set()).add(each.place)
                continue
            each.copy = None
        rest: list[Item] = []
        positions: list[int] = []
        for position, item in enumerate(items):
            if answers[position] is not None:
                continue
            if position in seen:
                assert type(item) is Mark
                known = seen[position]
                left = [key for place, key in enumerate(item.keys) if place not in known]
                if not left:
                    answers[position] = Marked([])
                    continue
                item = Mark(item.tenant, item.consumer, left, item.window_us)  # noqa: PLW2901
            rest.append(item)
            positions.append(position)
        hits = sum(each.copy is not None for each in wanted)
        self._count("cache_hits", hits)
        return rest, positions, len(wanted) - hits

    def _stamps(self, items: Sequence[Item], wanted: list[WantedKey]) -> dict[bytes, Stamp]:
        digests = [each.digest for each in wanted if each.copy is None]
        digests += [digest(item.id) for item in items if type(item) is Settle and item.id in self._notes]
        stamps = {each: self._stamp(each) for each in digests}
        return {each: stamp for each, stamp in stamps.items() if stamp is not None}

    def _ask(
        self, rest: list[Item], positions: list[int], asked: int, answers: list[Answer]
    ) -> Generator[Step, Any, None]:
        replies = yield AskStore(rest)
        if isinstance(replies, StoreUnavailable):
            if len(rest) == len(answers):
                raise replies
            replies = [Unavailable(replies)] * len(rest)  # the cache's answers still count
        self._count("truth_asked", asked)
        for position, reply in zip(positions, replies, strict=True):
            answers[position] = reply

    def _fold_marks(self, items: Sequence[Item], wanted: list[WantedKey], answers: list[Answer]) -> None:
        """Merge the truth's answers for the rest of a mark with the keys that the cache answered."""
        seen = {(each.position, each.place) for each in wanted if each.copy is not None and each.place >= 0}
        for position in {position for position, _ in seen}:
            item, answer = items[position], answers[position]
            assert type(item) is Mark
            if isinstance(answer, Marked):
                firsts = iter(answer.firsts)
                answers[position] = Marked(
                    [(position, place) not in seen and next(firsts) for place in range(len(item.keys))]
                )

    # --- after the truth ---

    def _learn(
        self,
        items: Sequence[Item],
        wanted: list[WantedKey],
        answers: Sequence[Answer],
        stamps: dict[bytes, Stamp],
    ) -> list[CopyWrite]:
        """Return the copies of what the truth has committed; adds their ids to the filter."""
        facts = [fact for each in wanted if (fact := self._fact(each, items, answers)) is not None]
        for item, answer in zip(items, answers, strict=True):
            if type(item) is Settle and (settled := self._copy_of_settled(item, answer)) is not None:
                facts.append(settled)
        if facts and self._filter is not None:
            try:
                self._filter.add_many([fact.digest for fact in facts])
            except StoreError:
                self._count("filter_errors", 1)
        return [
            CopyWrite(fact.digest, fact.copy, stamps[fact.digest], min(fact.rest_us, self._cache_window_us))
            for fact in facts
            if fact.digest in stamps
            and fact.rest_us > 0
            and (fact.copy.value is None or len(fact.copy.value) <= COPY_BYTES_MAX)
        ]

    def _fact(
        self, each: WantedKey, items: Sequence[Item], answers: Sequence[Answer]
    ) -> CommittedAnswer | None:
        """Return the committed fact in the answer for this key, if there is one."""
        item, answer = items[each.position], answers[each.position]
        if each.copy is not None:
            self._judge_filter(each, known=True)
        elif type(item) is Claim and type(answer) is Granted:
            self._judge_filter(each, known=False)
            self._note(item, answer)
        elif type(item) is Claim and type(answer) is Known and answer.state == "done":
            self._judge_filter(each, known=True)
            self._count("truth_known", 1)
            print_ = item.fingerprint or None
            copy = Copy(
                "done", answer.fence, answer.settled_at_us, answer.first_seen_us, answer.value, print_
            )
            return CommittedAnswer(each.digest, copy, answer.rest_us)
        elif type(item) is Mark and isinstance(answer, Marked):
            won = answer.firsts[each.place]
            self._judge_filter(each, known=not won)
            self._count("truth_known", not won)
            if won:  # the expiry of an older mark is unknown here
                return CommittedAnswer(each.digest, SEEN, item.window_us)
        return None

    def _note(self, item: Claim, granted: Granted) -> None:
        fresh = granted.first_seen_us == granted.fence
        over_at = 0
        if item.sliding:  # a takeover keeps the first claim's expiry, which the answer does not contain
            over_at = granted.first_seen_us + item.window_us if fresh else -1
        note = ClaimFields(granted.fence, granted.first_seen_us, item.fingerprint or None, over_at)
        with self._lock:
            self._notes[item.id] = note
            if len(self._notes) > NOTES_MAX:
                del self._notes[next(iter(self._notes))]

    def _copy_of_settled(self, item: Settle, answer: Answer) -> CommittedAnswer | None:
        """Return the fact of a completion committed by this call; an earlier one may have another value."""
        if isinstance(answer, Unavailable):
            return None  # the settle will be sent again
        with self._lock:
            note = self._notes.get(item.id)
            if note is None or note.fence != item.fence:
                return None
            del self._notes[item.id]
        if (
            note.over_at < 0
            or item.to != "done"
            or not isinstance(answer, Completed)
            or answer.already
            or answer.recreated
        ):
            return None
        rest_us = item.window_us
        if note.over_at:
            rest_us = min(note.over_at, note.first_seen + item.window_us) - answer.at_us
        copy = Copy("done", item.fence, answer.at_us, note.first_seen, item.value, note.fingerprint)
        return CommittedAnswer(digest(item.id), copy, rest_us)

    def _judge_filter(self, each: WantedKey, *, known: bool) -> None:
        """Count a wrong answer of the filter."""
        if self._filter is not None and each.maybe != known:
            self._count("filter_missed" if known else "filter_false", 1)

    def _forget(self, items: Sequence[Item], answers: list[Answer]) -> Generator[Step, Any, None]:
        """Make the cache forget what the truth has forgotten, before the caller gets the answer."""
        places: list[int] = []
        invalidated: list[tuple[bytes, int]] = []
        moved: list[int] = []
        for position, (item, answer) in enumerate(zip(items, answers, strict=True)):
            if type(item) in (Forget, Resolve) and isinstance(answer, Forgotten | Absent):
                # Absent: an earlier call may have reached the truth but not the cache.
                places.append(position)
                invalidated.append((digest(item.id), answer.fence if isinstance(answer, Forgotten) else 0))  # type: ignore[union-attr]
            elif type(item) is SetWindow and item.existing and answer is None:
                moved.append(position)
        for chosen, step in ((places, Invalidate(invalidated)), (moved, Clear())):
            if chosen:
                reply = self._note_cache_answer((yield step))
                if isinstance(reply, StoreError):
                    error = StoreUnavailable(
                        f"the cache {self._cache_name} did not forget what the truth has forgotten;"
                        f" do it again: {reply}"
                    )
                    for position in chosen:
                        answers[position] = Unavailable(error)

    def _add_counts(self, items: Sequence[Item], answers: list[Answer]) -> Generator[Step, Any, None]:
        for position, (item, answer) in enumerate(zip(items, answers, strict=True)):
            if type(item) is Count and isinstance(answer, Stats):
                counts = self._note_cache_answer((yield ReadCounts()))
                answers[position] = _with_tiers(
                    answer, {} if isinstance(counts, StoreError) else counts, self
                )

    # --- counting ---

    def _note_cache_answer(self, reply: Any, counts: Mapping[str, int] | None = None) -> Any:
        """Note whether the cache answered. If not, its counts are kept and reported later."""
        if not isinstance(reply, StoreError):
            self._breaker.record_success()
            return reply
        for name, number in (counts or {}).items():
            self._count(name, number)
        self._count("cache_errors", 1)
        if self._breaker.record_failure():
            _log.warning(
                "the cache %s does not answer, so the truth is asked for everything: %s",
                self._cache_name,
                reply,
            )
        return reply

    def _count(self, name: str, number: int) -> None:
        if number:
            with self._lock:
                self.counts[name] = self.counts.get(name, 0) + number

    def note_cache_error(self, error: StoreError) -> None:
        """Note that the cache is unavailable."""
        self._note_cache_answer(error)

    def flush_counts(self) -> Generator[Step, Any, None]:
        """Report the remaining counts to the cache, before the store closes."""
        if self.counts and not self._breaker.is_open:
            yield Write([], self._counts_to_send())

    def _counts_to_send(self) -> dict[str, int]:
        """Take the counts to report to the cache now."""
        with self._lock:
            counts, self.counts = self.counts, {}
        return counts

    def filter_counts(self) -> dict[str, float]:
        """Return how full this process's filter is."""
        if self._filter is None:
            return {}
        try:
            full = self._filter.fullness()
        except StoreError:
            return {}
        return {
            "filter_fill_ratio": round(full.fill_ratio, 6),
            "filter_false_positive_ratio": round(full.false_positive_ratio, 9),
        }


def _with_tiers(stats: Stats, counts: dict[str, int], tier: Tier) -> Stats:
    tiers: dict[str, float] = dict(counts)
    for name, number in tier.counts.items():
        tiers[name] = tiers.get(name, 0) + number
    return replace(stats, tiers={name: tiers.get(name, 0) for name in COUNTS} | tier.filter_counts())


COUNTS: dict[str, str] = {
    "cache_hits": "keys that the cache answered, without the truth",
    "truth_asked": "keys that were sent to the truth",
    "truth_known": "duplicates among those: the cache had no copy, or no longer",
    "copies": "copies that the cache accepted",
    "cache_errors": "calls that the cache did not answer",
    "cache_skipped": "keys for which the cache was skipped, because it had not answered",
    "filter_skipped": "keys for which the cache was not asked, because the filter had never seen them",
    "filter_false": "new keys for which the filter answered maybe",
    "filter_missed": "known keys that the filter had never seen",
    "filter_errors": "calls that the filter did not answer",
}
"""The counts by name, with their meaning; in keys, except where it says calls."""


def _is_text(key: str) -> bool:
    """Whether the key can be encoded for its digest. If not, the truth answers as it does for such keys."""
    return key.isascii() or _encodes(key)


def _encodes(key: str) -> bool:
    try:
        key.encode()
    except UnicodeEncodeError:
        return False
    return True
