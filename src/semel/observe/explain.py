"""Say what a mode on a store really guarantees, and what weakens it."""

from collections.abc import Sequence
from typing import Literal, TypeAlias

from msgspec import Struct

from semel.core.ports import AsyncStore, Store
from semel.errors import PolicyInvalid
from semel.observe.guarantees import Cell, Sink, cells, holds_at_least
from semel.stores.tiered import AsyncTieredStore, TieredStore
from semel.types import Mode

__all__ = ["Circumstances", "Explanation", "Keys", "Weakness", "explain"]

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


Keys: TypeAlias = Literal["given", "content", "position"]
"""What makes the key: the producer's own id, a hash of the content, or the place in the source."""


class Weakness(Struct, frozen=True):
    """Something that makes the guarantee weaker; `breaks`: the table does not hold because of it."""

    what: str
    breaks: bool = False
    fix: str = ""
    """What to change, if it is known."""


class Circumstances(Struct, frozen=True, kw_only=True):
    """What is around the store: where deliveries come from, and what their keys are."""

    visibility_us: int | None = None
    """How long the source waits for an ack before it sends again (visibility timeout, ack wait)."""
    horizon_us: int | None = None
    """How long after the first delivery the source may still send again: its retention."""
    redrive_us: int | None = None
    """How long after the first delivery somebody may put it back from the dead letters."""
    keys: Keys = "given"
    tenants: bool = False
    """Whether several tenants use the same consumer."""
    tenant: str = ""


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
    store: Store | AsyncStore,
    mode: Mode,
    *,
    window_us: int,
    lease_us: int,
    sink: Sink = "plain",
    around: Circumstances | None = None,
    live: Sequence[Weakness] = (),
) -> Explanation:
    """What `mode` on `store` guarantees. Raises `PolicyInvalid` where the two cannot work together. No I/O.

    `around`: where deliveries come from. `live`: what `probing.weaknesses` found on the servers.
    """
    around = around or Circumstances()
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
        weaknesses=(
            *_weaknesses(store, mode, window_us, lease_us, around),
            *(() if mode == "observe" else (*_of_source(around, mode, window_us, lease_us), *live)),
        ),
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


def _of_source(around: Circumstances, mode: Mode, window_us: int, lease_us: int) -> list[Weakness]:
    """What the source, the keys and the tenants do to it."""
    found: list[Weakness] = []
    for lasting_us, what, who in (
        (around.horizon_us, "the source may send again", "horizon"),
        (around.redrive_us, "dead letters may be put back", "redrive"),
    ):
        if lasting_us is not None and 0 < window_us < lasting_us:
            found.append(
                Weakness(
                    f"The window of {_text(window_us)} is shorter than the {_text(lasting_us)} for which {what}: what"
                    " comes after the window runs again.",
                    breaks=True,
                    fix=f"semel window set CONSUMER {_text(_longer(lasting_us))} (the {who} and a tenth)",
                )
            )
    if (
        around.visibility_us is not None
        and mode in ("lease", "quarantine")
        and lease_us > around.visibility_us
    ):
        found.append(
            Weakness(
                f"The lease of {_text(lease_us)} is longer than the {_text(around.visibility_us)} after which the"
                " source sends again: after a crash the event comes back while the dead attempt's lease still runs, is"
                " turned away, and may use up the source's deliveries and be a dead letter without having run.",
                fix="a lease shorter than the visibility timeout, or a longer visibility timeout",
            )
        )
    if around.keys == "content":
        found.append(
            Weakness(
                "Keys are hashes of the content: two different events with equal content are taken for one, and the"
                " second has no effect.",
                breaks=True,
                fix="a key that the producer chose for the event",
            )
        )
    elif around.keys == "position":
        found.append(
            Weakness(
                "Keys are positions in the source: an event that its producer sends twice has two, and runs twice.",
                fix="a key that the producer chose for the event",
            )
        )
    if around.tenants and not around.tenant:
        found.append(
            Weakness(
                "Several tenants share the consumer and none is named: equal keys of two tenants are taken for one"
                " event, and the second has no effect.",
                breaks=True,
                fix="open(..., tenant=...) with the caller's own",
            )
        )
    return found


def _longer(us: int) -> int:
    """A tenth more, in whole hours, or minutes below a day."""
    unit = 3600 * 10**6 if us >= _DAY_US else 60 * 10**6
    return -(-us * 11 // (10 * unit)) * unit


def _text(us: int) -> str:
    for unit, size in (("d", _DAY_US), ("h", 3600 * 10**6), ("m", 60 * 10**6), ("s", 10**6)):
        if us % size == 0:
            return f"{us // size}{unit}"
    return f"{us / 1e6:g}s"


_FIXES: tuple[tuple[str, str], ...] = (
    ("eviction", "CONFIG SET maxmemory-policy noeviction, and enough memory"),
    ("no persistence", "CONFIG SET appendonly yes"),
    ("snapshots only", "CONFIG SET appendonly yes"),
    ("replicas follow behind", "open the store with wait_replicas=1"),
    ("synchronous_commit is off", "ALTER ROLE ... SET synchronous_commit = on"),
    ("fsync is off", "fsync = on in postgresql.conf"),
    ("full_page_writes is off", "full_page_writes = on in postgresql.conf"),
    ("partitions reach only", "run semel purge as the owner of the partitions"),
)
"""What to change, by how a store's own sentence begins."""


def of_store(store: Store | AsyncStore) -> list[Weakness]:
    """What the store itself says. Where it may forget, what makes it forget breaks the table."""
    told: tuple[str, ...] = getattr(store, "weaknesses", ())
    durable = store.capabilities.durable
    found = []
    for each in told:
        fix = next((fix for begins, fix in _FIXES if each.startswith(begins)), "")
        loses = each.startswith(_FORGETTING)
        found.append(Weakness(f"{each}.", breaks=loses and not durable, fix=fix))
    if not durable and not any(weakness.breaks for weakness in found):
        found.insert(
            0,
            Weakness(
                f"{store.name} forgets all when its process ends: a redelivery after that runs again.",
                breaks=True,
                fix="a store that lasts: sqlite:, postgresql:, or redis: with an append-only file",
            ),
        )
    return found


_FORGETTING = (
    "eviction",
    "no persistence",
    "snapshots only",
    "synchronous_commit",
    "fsync",
    "full_page_writes",
)


def _weaknesses(
    store: Store | AsyncStore, mode: Mode, window_us: int, lease_us: int, around: Circumstances
) -> list[Weakness]:
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
    found += of_store(store)
    if 0 < window_us < _DAY_US and around.horizon_us is None:
        found.append(
            Weakness(
                "The window is shorter than a day: what its source sends again later than that runs again."
            )
        )
    if mode == "mark":
        found.append(Weakness("A crash between mark and effect loses the event, and nothing tells of it."))
    return found
