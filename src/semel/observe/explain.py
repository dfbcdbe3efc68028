"""Say what a mode on a store really guarantees, and what weakens it."""

from msgspec import Struct

from semel.core.ports import AsyncStore, Store
from semel.errors import PolicyInvalid
from semel.observe.guarantees import Cell, Sink, cells, holds_at_least
from semel.stores.tiered import AsyncTieredStore, TieredStore
from semel.types import Mode

__all__ = ["Explanation", "Weakness", "explain"]

_HOW: dict[str, str] = {
    "inbox": "The mark is in the same transaction as the effect: both happen, or neither.",
    "lease": "Claim, effect, completion. A crash in between makes the event run again: an effect may repeat, at most"
    " once per crash, and happens once where the called system honours the idempotency key.",
    "quarantine": "As lease, but an event whose attempt vanished is never run again unasked: it is unknown until"
    " somebody decides.",
    "mark": "The mark first, then the effect: an effect never repeats, and a crash in between loses it.",
    "transaction": "Kafka to Kafka: outputs and offsets commit together, the record is completed after that. A"
    " redelivery never produces twice; a copy that the producer sent may, where a process dies in between, unless marks"
    " are kept in a compacted topic.",
    "observe": "Duplicates are counted and run all the same: nothing is suppressed.",
}

_DAY_US = 86400 * 10**6


class Weakness(Struct, frozen=True):
    """Something that makes the guarantee weaker; `breaks`: the table does not hold because of it."""

    what: str
    breaks: bool = False


class Explanation(Struct, frozen=True, kw_only=True):
    """What holds, for one mode on one store."""

    mode: Mode
    store: str
    sink: Sink
    how: str
    windows: dict[str, Cell | None]
    weaknesses: tuple[Weakness, ...]

    @property
    def holds(self) -> bool:
        """Whether the table holds as it stands."""
        return not any(weakness.breaks for weakness in self.weaknesses)

    def satisfies(self, required: Mode) -> bool:
        """Whether this is as good as `required`, which is taken with a system that honours nothing."""
        if required == "observe":
            return True
        return self.holds and holds_at_least(self.windows, cells(required, "plain"))


def explain(
    store: Store | AsyncStore, mode: Mode, *, window_us: int, lease_us: int, sink: Sink = "plain"
) -> Explanation:
    """What `mode` on `store` guarantees. Raises `PolicyInvalid` where the two cannot work together. No I/O."""
    if mode not in _HOW:
        raise PolicyInvalid(f"mode {mode!r} has no tested guarantees here; choose one of {', '.join(_HOW)}")
    if mode == "inbox" and not store.capabilities.transactional:
        raise PolicyInvalid(
            f"{store.name} cannot hold an inbox: no transaction of yours reaches it; use sqlite: or postgresql:"
        )
    return Explanation(
        mode=mode,
        store=store.name,
        sink=sink,
        how=_HOW[mode],
        windows=cells(mode, sink),
        weaknesses=tuple(_weaknesses(store, mode, window_us, lease_us)),
    )


def _of_tiers(store: TieredStore | AsyncTieredStore) -> list[Weakness]:
    """What a cache in front changes: nothing in a crash, something in forgetting."""
    lasting_s = store.cache_window_us / 1e6
    if not store.cache.shared:
        return [
            Weakness(
                f"The cache is in each process's own memory: what another process forgets, this one may call done for"
                f" up to {lasting_s:g} s."
            )
        ]
    return [
        Weakness(
            f"What is forgotten by a client that does not know the cache {store.cache.name} may be called done for up"
            f" to {lasting_s:g} s: use the same tiers everywhere."
        )
    ]


def _weaknesses(store: Store | AsyncStore, mode: Mode, window_us: int, lease_us: int) -> list[Weakness]:
    powers = store.capabilities
    found: list[Weakness] = []
    if mode == "observe":
        return found
    if window_us == 0:
        found.append(Weakness("The window is off: every duplicate runs.", breaks=True))
    elif window_us < lease_us:
        found.append(
            Weakness(
                "The window is shorter than the lease: a duplicate that waited for a dead attempt's lease may find"
                " the key forgotten, and runs."
            )
        )
    if not powers.durable:
        found.append(
            Weakness(
                f"{store.name} forgets all when its process ends: a redelivery after that runs again.",
                breaks=True,
            )
        )
    if not powers.shared:
        found.append(
            Weakness("Other processes do not see its records: each of them runs the event.", breaks=True)
        )
    if not powers.exact:
        found.append(
            Weakness(f"{store.name} guesses: a new event may be taken for a duplicate.", breaks=True)
        )
    if isinstance(store, TieredStore | AsyncTieredStore):
        found += _of_tiers(store)
        store = store.truth
    if getattr(store, "synchronous", "FULL") == "NORMAL":
        found.append(
            Weakness(
                "synchronous=NORMAL: when the power fails, the last commits may be lost, as if never made."
            )
        )
    found += [Weakness(f"{each}.") for each in getattr(store, "weaknesses", ())]
    if 0 < window_us < _DAY_US:
        found.append(
            Weakness(
                "The window is shorter than a day: what its source sends again later than that runs again."
            )
        )
    if mode == "mark":
        found.append(Weakness("A crash between mark and effect loses the event, and nothing tells of it."))
    return found
