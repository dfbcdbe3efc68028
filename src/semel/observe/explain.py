"""Explain what a mode on a store guarantees, and what weakens it."""

from collections.abc import Sequence

from msgspec import Struct

from semel.core.protocols import AsyncStore, Store
from semel.errors import PolicyInvalid
from semel.observe.advise import BYTES
from semel.observe.guarantees import GuaranteeCell, Sink, Weakness, cells, holds_at_least
from semel.observe.probes import SourceProbe, of_circumstances
from semel.policy import OnUnavailable, check_fits
from semel.stores.tiered import AsyncTieredStore, TieredStore
from semel.types import Mode
from semel.windows import is_endless

__all__ = ["Explanation", "explain", "of_store"]

_HOW: dict[str, str] = {
    "inbox": "The mark is in the same transaction as the effect: both happen, or neither.",
    "lease": "Claim, effect, completion. A crash in between makes the event run again: an effect may repeat, at most"
    " once per crash, and happens once where the called system honours the idempotency key.",
    "quarantine": "As lease, but an event whose attempt died does not run again by itself: it is unknown until"
    " somebody decides.",
    "mark": "The mark first, then the effect: an effect never repeats, and a crash in between loses it.",
    "transaction": "Kafka to Kafka: outputs and offsets commit together, the record is completed after that. A"
    " redelivery never produces twice; a copy that the producer sent may, where a process dies in between, unless marks"
    " are kept in a compacted topic.",
    "observe": "Duplicates are counted and run all the same: nothing is suppressed.",
}

_KEYS = (
    " A key is the consumer's: run, run_many and claim share its record. A guarded function has its own record, under"
    " NAME::KEY, where NAME is its module and qualified name unless name= was given: a renamed function starts anew."
)
"""Which calls share a record, in the modes that have `guard`."""
_GUARDING: frozenset[str] = frozenset(("lease", "quarantine", "mark", "observe"))
_PROBED: dict[str, str] = {
    "lease": " Before it runs again, the probe asks the called system: what has happened is not repeated, as far as the"
    " probe tells the truth; where it cannot tell, the event runs again.",
    "quarantine": " First the probe asks the called system; a person decides only where it cannot tell.",
}

_PARTITIONS: dict[str, str] = {
    "lease": " Declare ids='uuid7' (or ulid, ksuid, snowflake) where ids contain their time, and purging drops whole"
    " partitions instead of rows.",
    "inbox": " Declare ids='uuid7' (or ulid, ksuid, snowflake) where ids contain their time, and purging drops whole"
    " partitions instead of rows; ids too old to be looked up are then late, never run.",
    "mark": " Declare ids='opaque', or 'uuid7' and the like where ids contain their time, and marks are in partitions"
    " by their arrival: purging drops whole partitions instead of rows.",
}
"""How partitions are switched on, where the store has them."""

_DAY_US = 86400 * 10**6


class Explanation(Struct, frozen=True, kw_only=True):
    """The guarantees of one mode on one store."""

    mode: Mode
    store: str
    sink: Sink
    how: str
    windows: dict[str, GuaranteeCell | None]
    weaknesses: tuple[Weakness, ...]
    probe: bool = False
    """Whether the policy's probe is asked about unknown outcomes."""
    on_unavailable: OnUnavailable = "refuse"
    horizon_known: bool = False
    """Whether the source's redelivery time is known; if not, the window may be too short."""

    @property
    def holds(self) -> bool:
        """Whether the table holds without exceptions."""
        return not any(weakness.breaks for weakness in self.weaknesses)

    def satisfies(self, required: Mode) -> bool:
        """Whether this is at least as good as mode `required` with a plain sink."""
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
    around: SourceProbe | None = None,
    live: Sequence[Weakness] = (),
    probe: bool = False,
    on_unavailable: OnUnavailable = "refuse",
) -> Explanation:
    """Return what `mode` on `store` guarantees. Raises `PolicyInvalid` if the two do not fit. No I/O.

    `around`: where deliveries come from. `live`: the weaknesses that `probes.weaknesses` found. `probe` and
    `on_unavailable`: the policy's settings.
    """
    around = around or SourceProbe()
    if mode not in _HOW:
        raise PolicyInvalid(f"mode {mode!r} has no tested guarantees here; choose one of {', '.join(_HOW)}")
    if mode == "inbox" and not store.capabilities.transactional:
        raise PolicyInvalid(
            f"{store.name} cannot hold an inbox: your transactions cannot write to it; use sqlite: or postgresql:"
        )
    store.capabilities.check_window(window_us, store.name)
    check_fits(mode, probe=probe, on_unavailable=on_unavailable)
    probe = probe and mode in _PROBED
    return Explanation(
        mode=mode,
        store=store.name,
        sink=sink,
        how=_HOW[mode]
        + (_PROBED[mode] if probe else "")
        + (_KEYS if mode in _GUARDING else "")
        + (_PARTITIONS.get(mode, "") if store.name.startswith("postgresql:") else ""),
        windows=cells(mode, sink, probe=probe),
        probe=probe,
        on_unavailable=on_unavailable,
        horizon_known=around.horizon_known or mode == "observe" or is_endless(window_us),
        weaknesses=(
            *_of_policy(mode, probe=probe, on_unavailable=on_unavailable),
            *_weaknesses(store, mode, window_us, lease_us, around),
            *(() if mode == "observe" else (*of_circumstances(around, mode, window_us, lease_us), *live)),
        ),
    )


def _of_policy(mode: Mode, *, probe: bool, on_unavailable: OnUnavailable) -> list[Weakness]:
    found: list[Weakness] = []
    if on_unavailable == "run" and mode != "observe":
        found.append(
            Weakness(
                "While the store cannot be reached, handlers run without a claim: every duplicate runs, and nothing is"
                " recorded.",
                breaks=True,
                fix="Policy(on_unavailable='refuse')",
            )
        )
    if probe:
        found.append(
            Weakness(
                "The probe is believed: one that answers DidNotHappen while an earlier call is still under way costs a"
                " second effect."
            )
        )
    return found


def _of_tiers(store: TieredStore | AsyncTieredStore) -> list[Weakness]:
    """Yield the weaknesses of a cache: it changes nothing in a crash, but delays `forget`."""
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
"""How to fix a weakness, by the beginning of the store's message."""


def of_store(store: Store | AsyncStore) -> list[Weakness]:
    """Yield the weaknesses that the store reports. A store that may lose records breaks the table."""
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


def _cost_of_forever(store: Store | AsyncStore) -> Weakness:
    """Say what a window without end takes. It breaks nothing: no source sends again after it."""
    behind: Store | AsyncStore = getattr(store, "truth", store)
    bytes_each = BYTES.get(behind.name.partition(":")[0])
    size = f", about {bytes_each} bytes each without its value and readable key" if bytes_each else ""
    return Weakness(
        f"The window is forever: every finished key stays until somebody forgets it{size}. No purge makes room: `semel"
        " advise --rate` shows how the store grows."
    )


_CLAIMING: frozenset[str] = frozenset(("lease", "transaction"))
"""The modes whose claims may be answered before they are on disk. Those of quarantine are always waited for."""
_FORGETTING = (
    "eviction",
    "no persistence",
    "snapshots only",
    "synchronous_commit",
    "fsync",
    "full_page_writes",
)


def _weaknesses(
    store: Store | AsyncStore, mode: Mode, window_us: int, lease_us: int, around: SourceProbe
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
    if is_endless(window_us):
        found.append(_cost_of_forever(store))
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
    if mode in _CLAIMING and not getattr(store, "durable_claims", True):
        found.append(
            Weakness(
                "durable_claims=False: when the store's power fails, the last claims may be lost, as if never made. An"
                " event whose handler still runs may then run a second time beside it, before its lease is over."
                " Completions are not lost."
            )
        )
    found += of_store(store)
    if 0 < window_us < _DAY_US and not around.horizon_known:
        found.append(
            Weakness(
                "The window is shorter than a day: what its source sends again later than that runs again."
            )
        )
    if mode == "mark":
        found.append(Weakness("A crash between mark and effect loses the event, and nothing tells of it."))
    return found
