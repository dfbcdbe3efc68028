"""The scenes to explore: the mode, the deliveries, how many faults of each kind may strike, and which a move costs."""

from typing import Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from semel.testing._simulation.modes import MODES, Mode

EventKind = Literal["fine", "permanent", "poison", "killer"]


class Bounds(Struct, frozen=True, kw_only=True):
    """How much may happen in one schedule. Every schedule within these bounds is explored."""

    deliveries: int = 2
    """Deliveries of each message, by as many workers."""
    kills: int = 1
    """Workers that die, at any step."""
    lost: int = 1
    """Requests or replies that are lost."""
    late: int = 1
    """Requests, renewals or effects that arrive at any later time, even after their sender's death."""
    ticks: int = 2
    """How often a whole lease passes."""
    stalls: int = 1
    """Workers that do not renew their claim while a lease passes, or stall between their last look and the effect."""
    errors: int = 0
    """Handlers that raise, before or after their effect."""
    sweeps: int = 0
    """Sweeps for journaled claims without an owner."""
    purges: int = 0
    flushes: int = 0
    """How often the store loses all its data."""
    steps_back: int = 0
    """How often the store's clock steps back by half a lease."""
    forgets: int = 0
    """How often an operator forgets the record, by force or not."""
    resolves: int = 0
    """How often an operator resolves an unknown record while workers run."""


BUDGETS = ("kills", "lost", "late", "ticks", "stalls", "errors", "purges", "flushes", "steps_back", "forgets", "resolves")  # fmt: skip # noqa: E501
"""The bounds that are used up one by one."""


class ExploredScene(Struct, frozen=True, kw_only=True):
    """A mode, the events and deliveries in it, and the bounds."""

    name: str
    mode: Mode
    about: str
    bounds: Bounds = Bounds()
    """For a run of seconds."""
    wide: Bounds = Bounds(errors=1)
    """For a run of minutes."""
    wait_s: float = 0.0
    kind: EventKind = "fine"
    fingerprints: tuple[bytes | None, ...] = (None,)
    """One message of each: messages with one key and different payloads."""
    keys: int = 1
    together: bool = False
    """One worker handles a delivery of every key at a time, settles them in one request, and dies with them all."""


_QUICK = Bounds()
_SMALL = Bounds(late=0)
_WIDE = Bounds(errors=1, purges=1)
_LEASE = MODES["lease-plain"]
_ONE_FAULT = Bounds(late=0, ticks=0, stalls=0)

SCENES: dict[str, ExploredScene] = {
    scene.name: scene
    for scene in (
        ExploredScene(
            name="inbox",
            mode=MODES["inbox"],
            about="mark and effect in one transaction",
            bounds=_WIDE,
            wide=replace(_WIDE, deliveries=3, kills=2, lost=2),
        ),
        ExploredScene(
            name="lease-keyed",
            mode=MODES["lease-keyed"],
            about="a sink that honours the idempotency key",
            bounds=replace(_SMALL, errors=1),
            wide=replace(_WIDE, flushes=1),
        ),
        ExploredScene(
            name="lease-fenced",
            mode=MODES["lease-fenced"],
            about="a sink that refuses old fences",
            bounds=_QUICK,
            wide=_WIDE,
        ),
        ExploredScene(
            name="lease-plain",
            mode=_LEASE,
            about="a sink that takes everything",
            bounds=_QUICK,
            wide=replace(_WIDE, deliveries=3),
        ),
        ExploredScene(
            name="quarantine",
            mode=MODES["quarantine"],
            about="never again unasked; an operator resolves",
            bounds=replace(_SMALL, resolves=1),
            wide=replace(_WIDE, resolves=1),
        ),
        ExploredScene(
            name="lease-probe",
            mode=MODES["lease-probe"],
            about="a probe before another run",
            bounds=_QUICK,
            wide=_WIDE,
        ),
        ExploredScene(
            name="quarantine-probe",
            mode=MODES["quarantine-probe"],
            about="a probe before a person",
            bounds=_SMALL,
            wide=_WIDE,
        ),
        ExploredScene(
            name="mark",
            mode=MODES["mark"],
            about="mark, then run",
            bounds=_WIDE,
            wide=replace(_WIDE, deliveries=3, kills=2, lost=2),
        ),
        ExploredScene(
            name="observe", mode=MODES["observe"], about="run in any case", bounds=_SMALL, wide=_WIDE
        ),
        ExploredScene(
            name="journal",
            mode=MODES["journal"],
            about="sent once; a sweep takes over",
            bounds=replace(_SMALL, deliveries=1, sweeps=2),
            wide=replace(_WIDE, sweeps=2),
        ),
        ExploredScene(
            name="steps", mode=MODES["steps"], about="a handler with two steps", bounds=_SMALL, wide=_WIDE
        ),
        ExploredScene(
            name="waiting",
            mode=_LEASE,
            about="duplicates that wait for the first",
            wait_s=2.5,
            bounds=_SMALL,
            wide=_WIDE,
        ),
        ExploredScene(
            name="permanent",
            mode=_LEASE,
            about="an event that fails for good",
            kind="permanent",
            bounds=_QUICK,
            wide=_WIDE,
        ),
        ExploredScene(
            name="poison",
            mode=_LEASE,
            about="an event whose handler always raises",
            kind="poison",
            bounds=_SMALL,
            wide=_WIDE,
        ),
        ExploredScene(
            name="killer",
            mode=_LEASE,
            about="an event that kills every worker",
            kind="killer",
            bounds=_SMALL,
            wide=replace(_WIDE, deliveries=3),
        ),
        ExploredScene(
            name="fingerprints",
            mode=_LEASE,
            about="one key with two payloads",
            fingerprints=(b"\1one", b"\1two"),
            bounds=replace(_QUICK, deliveries=1),
            wide=_WIDE,
        ),
        ExploredScene(
            name="forget",
            mode=_LEASE,
            about="an operator forgets, a purge runs",
            bounds=replace(_SMALL, kills=0, forgets=1, purges=1),
            wide=replace(_WIDE, forgets=1),
        ),
        ExploredScene(
            name="flush",
            mode=MODES["lease-keyed"],
            about="the store loses all its data",
            bounds=replace(_SMALL, kills=0, flushes=1),
            wide=replace(_WIDE, flushes=1),
        ),
        ExploredScene(
            name="clock",
            mode=_LEASE,
            about="the store's clock steps back",
            bounds=replace(_SMALL, lost=0, steps_back=1),
            wide=replace(_WIDE, steps_back=1),
        ),
        ExploredScene(
            name="two-keys",
            mode=_LEASE,
            about="two keys in one worker, settled in one request",
            keys=2,
            together=True,
            bounds=_ONE_FAULT,
            wide=replace(_ONE_FAULT, late=1),
        ),
    )
}
"""By name."""


BATCHES = ("lose both requests", "lose both replies", "lose the second", "send both late")


OPERATOR_MOVES = ("forget", "forget by force", "resolve")
"""Their number is that of the event, not of a worker."""


class Move(NamedTuple):
    """One step: what happens, to which worker, and with which others."""

    kind: str
    seat: int = -1
    others: tuple[int, ...] = ()


COSTS: dict[str, tuple[str, ...]] = {
    "lose the request": ("lost",),
    "lose the reply": ("lost",),
    "send late": ("late",),
    "die": ("kills",),
    "die after sending": ("kills",),
    "die, send late": ("kills", "late"),
    "stall": ("stalls",),
    "raise before": ("errors",),
    "refuse before": ("errors",),
    "raise after": ("errors",),
    "lose the sink's reply": ("lost",),
    "reach the sink late": ("late",),
    "no answer of the probe": ("lost",),
    "renew late": ("late",),
    "lose both requests": ("lost",),
    "lose both replies": ("lost",),
    "lose the second": ("lost",),
    "send both late": ("late",),
    "tick": ("ticks",),
    "purge": ("purges",),
    "flush": ("flushes",),
    "step back": ("steps_back",),
    "forget": ("forgets",),
    "forget by force": ("forgets",),
    "resolve": ("resolves",),
}
"""What a fault uses up; the other moves are free."""


class Barred(dict[tuple[bool, ...], frozenset[str]]):
    """The kinds of moves that cannot be paid, by which of the budgets are left."""

    def __missing__(self, left: tuple[bool, ...]) -> frozenset[str]:
        empty = {name for name, some in zip(BUDGETS, left, strict=True) if not some}
        self[left] = found = frozenset(kind for kind, costs in COSTS.items() if empty & set(costs))
        return found


BARRED = Barred()
