"""Random batches of items: every verb of the protocol, on few keys, mostly about claims that were really granted."""

import random
from collections.abc import Sequence
from typing import Any

from semel.core.commands import (
    Answer,
    Claim,
    Forget,
    Granted,
    Item,
    Lookup,
    Mark,
    Purge,
    Renew,
    Resolve,
    Settle,
)
from semel.types import Forgotten, Id

S = 1_000_000
CONSUMERS = ("lease", "lease", "careful", "sliding", "timed", "journal")
KEYS = ("a", "b", "c", "d")
LEASES = (S, 5 * S, 30 * S)
WINDOWS = (0, 10 * S, 60 * S, 3600 * S)
VALUES = (None, b"", b"r1", b"r2")
ENDS: tuple[Any, ...] = ("done", "done", "done", "failed", "released", "released", "unknown")
VERBS = ("claim", "claim", "claim", "claim", "settle", "settle", "settle", "renew", "renew", "resolve", "forget",
         "lookup", "lookup", "mark", "purge")  # fmt: skip
BATCH_MAX = 24
RECENT = 12
"""So many of the last claims are renewed and settled; older ones are lost by then."""


class Script:
    """Makes up batches; it hears the answers, so that claims are settled with their fences."""

    def __init__(self, seed: str) -> None:
        self.chance = random.Random(seed)
        self._granted: list[tuple[Claim, int]] = []
        self._owners = 0

    def batch(self, now_us: int) -> list[Item]:
        """The next items, each of another record: those of one batch may be carried out in any order.

        One comes alone in every third batch, and takes a store's short way.
        """
        count = 1 if self.chance.random() < 0.3 else self.chance.randint(2, BATCH_MAX)
        items: dict[object, Item] = {}
        for _ in range(count):
            item = self._item(now_us)
            items.setdefault(getattr(item, "id", type(item)), item)
        return list(items.values())

    def hear(self, items: Sequence[Item], answers: Sequence[Answer]) -> None:
        for item, answer in zip(items, answers, strict=True):
            if isinstance(item, Claim) and isinstance(answer, Granted):
                self._granted.append((item, answer.fence))
            elif isinstance(item, Resolve) and isinstance(answer, Forgotten) and item.to == "claimed":
                claim = Claim(item.id, item.owner, item.lease_us, item.window_us)
                self._granted.append((claim, answer.fence))
        del self._granted[:-RECENT]

    def _item(self, now_us: int) -> Item:
        verb = self.chance.choice(VERBS)
        if verb in ("settle", "renew", "resolve") and not self._granted:
            verb = "claim"
        make: Any = getattr(self, f"_{verb}")
        made: Item = make(now_us)
        return made

    def _id(self) -> Id:
        tenant = "other" if self.chance.random() < 0.1 else ""
        return tenant, self.chance.choice(CONSUMERS), self.chance.choice(KEYS)

    def _owner(self) -> bytes:
        self._owners += 1
        return self._owners.to_bytes(16, "big")

    def _claim(self, now_us: int) -> Item:
        pick = self.chance.choice
        if self._granted and self.chance.random() < 0.15:
            return pick(self._granted)[0]  # sent again, because its reply was lost
        record_id = self._id()
        consumer = record_id[1]
        window, gap = pick(WINDOWS), 0
        happened: int | None = None
        if consumer == "timed":
            gap = pick((1, 10 * S, 60 * S))
            window = gap + pick((0, 60 * S, 3600 * S))
            happened = now_us - pick((0, 0, 1, 10 * S, 60 * S, 7200 * S, -20 * S, -400 * S))
        elif self.chance.random() < 0.2:
            happened = now_us - pick((0, 30 * S, 7200 * S))
        return Claim(
            record_id,
            self._owner(),
            pick(LEASES),
            window,
            fingerprint=pick((None, None, b"\1one", b"\1two", b"\2one")),
            event_type=pick(("", "", "order")),
            event_time_us=happened,
            refuse_late=self.chance.random() < 0.5,
            journal=pick((b"", b"p1", b"p2")) if consumer == "journal" else None,
            meta=pick((None, None, b"note")),
            quarantine=consumer == "careful",
            sliding=consumer in ("sliding", "timed"),
            apart_us=gap,
            refresh=self.chance.random() < 0.25,
        )

    def _ticket(self) -> tuple[Claim, int]:
        claim, fence = self.chance.choice(self._granted)
        return claim, fence + self.chance.choice((0,) * 9 + (1, -1))

    def _renew(self, _now_us: int) -> Item:
        claim, fence = self._ticket()
        step = self.chance.choice((None, None, ("s1", b"j1"), ("s1", b"j2"), ("s2", None)))
        return Renew(claim.id, claim.owner, fence, self.chance.choice(LEASES), step)

    def _settle(self, _now_us: int) -> Item:
        claim, fence = self._ticket()
        to = self.chance.choice(ENDS)
        if to in ("done", "failed"):
            return Settle(
                claim.id,
                claim.owner,
                fence,
                to,
                self.chance.choice(VALUES),
                claim.window_us,
                claim.lease_us,
                claim.sliding,
                event_time_us=claim.event_time_us if claim.apart_us else None,
            )
        delay = self.chance.choice((0, 3 * S)) if to == "released" else 0
        return Settle(
            claim.id,
            claim.owner,
            fence,
            to,
            delay_us=delay,
            count_attempt=to != "released" or self.chance.random() < 0.7,
        )

    def _resolve(self, _now_us: int) -> Item:
        claim, fence = self._ticket()
        to: Any = self.chance.choice(("done", "absent", "claimed"))
        if to == "claimed":
            return Resolve(claim.id, fence, to, owner=self._owner(), lease_us=self.chance.choice(LEASES))
        value = self.chance.choice(VALUES) if to == "done" else None
        return Resolve(claim.id, fence, to, value, self.chance.choice(WINDOWS))

    def _forget(self, _now_us: int) -> Item:
        if self._granted and self.chance.random() < 0.4:
            claim, fence = self._ticket()
            return Forget(
                claim.id, force=True, fence=fence, state=self.chance.choice((None, "done", "claimed"))
            )
        return Forget(self._id(), force=self.chance.random() < 0.3)

    def _lookup(self, _now_us: int) -> Item:
        return Lookup(self._id())

    def _mark(self, _now_us: int) -> Item:
        keys = self.chance.sample(("a", "b", "c", "d"), self.chance.randint(1, 3))
        return Mark("", "marks", keys, self.chance.choice((10 * S, 60 * S)), self.chance.random() < 0.3)

    def _purge(self, _now_us: int) -> Item:
        return Purge(self.chance.choice((1, 1000)), dry_run=self.chance.random() < 0.2)
