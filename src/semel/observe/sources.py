"""Where deliveries come from, as its broker says: what of it is too long or too short for lease and window."""

from collections.abc import Iterator
from math import inf
from typing import Literal, TypeAlias

from msgspec import Struct

from semel.observe.guarantees import Weakness
from semel.types import Mode
from semel.windows import exact_text

__all__ = ["SourceProbe", "Keys", "SourceFacts", "of_circumstances", "of_patience", "of_windows"]

Keys: TypeAlias = Literal["given", "content", "position"]
"""What makes the key: the producer's own id, a hash of the content, or the place in the source."""

ATTEMPTS = 10
"""After so many semel gives an event up by itself, unless the policy says another number."""
_DAY_S = 86400.0


class SourceFacts(Struct, frozen=True, kw_only=True):
    """What a broker says about one source. What it does not say is `None`; what never ends is `math.inf`."""

    name: str = "the source"
    version: str = ""
    deadline_s: float | None = None
    """How long it waits for an ack or a heartbeat before it delivers again."""
    deadline_name: str = "the visibility timeout"
    """The setting behind it, as the broker calls it."""
    horizon_s: float | None = None
    """How long after the first delivery it may still deliver again."""
    horizon_name: str = "the retention"
    redrive_s: float | None = None
    """How long after the first delivery a dead letter of it may be put back."""
    redrive_name: str = "the retention of the dead letters"
    deliveries_max: int | None = None
    """After so many deliveries the broker itself gives a message up; `None`: never."""
    buries: str = ""
    """Where it then puts the message; empty: nowhere."""
    dedupe_s: float | None = None
    """How long the broker itself drops what a producer sends twice; `None`: it does not."""
    content_ids: bool = False
    """Whether the broker makes ids from the content of messages that came without."""
    durable: bool | None = None
    """Whether a message that a producer was told is taken survives the end of the broker's process."""
    weaknesses: tuple[Weakness, ...] = ()
    """What else of its settings weakens the promise."""
    notes: tuple[str, ...] = ()
    """What is worth knowing and weakens nothing."""
    waiting: int | None = None
    in_hand: int | None = None


class SourceProbe(Struct, frozen=True, kw_only=True):
    """What is around the store: where deliveries come from, and what their keys are."""

    sources: tuple[SourceFacts, ...] = ()
    keys: Keys = "given"
    tenants: bool = False
    """Whether several tenants use the same consumer."""
    tenant: str = ""
    consumer: str = ""

    @property
    def horizon_known(self) -> bool:
        """Whether anybody said how long deliveries may be repeated."""
        return any(source.horizon_s is not None for source in self.sources)


def of_circumstances(around: SourceProbe, mode: Mode, window_us: int, lease_us: int) -> Iterator[Weakness]:
    """What the sources, the keys and the tenants do to the promise."""
    yield from of_windows(around, window_us)
    for source in around.sources:
        yield from of_patience(source, lease_us if mode in ("lease", "quarantine") else 0)
        yield from source.weaknesses
    if around.keys == "content" or any(source.content_ids for source in around.sources):
        yield Weakness(
            "Keys are hashes of the content: two different events with equal content are taken for one, and the"
            " second has no effect.",
            breaks=True,
            fix="a key that the producer chose for the event",
        )
    elif around.keys == "position":
        yield Weakness(
            "Keys are positions in the source: an event that its producer sends twice has two, and runs twice.",
            fix="a key that the producer chose for the event",
        )
    if around.tenants and not around.tenant:
        yield Weakness(
            "Several tenants share the consumer and none is named: equal keys of two tenants are taken for one"
            " event, and the second has no effect.",
            breaks=True,
            fix="open(..., tenant=...) with the caller's own",
        )


def of_windows(around: SourceProbe, window_us: int) -> Iterator[Weakness]:
    """Sources that may send again after the window; a window that is off ends before everything, and is named once."""
    if window_us:
        for source in around.sources:
            yield from _too_short(source, window_us, around.consumer or "CONSUMER")


def of_patience(source: SourceFacts, lease_us: int) -> Iterator[Weakness]:
    """What the broker's patience does: a lease that outlasts it, and a limit on deliveries. `lease_us` 0: no lease."""
    yield from _too_long(source, lease_us)
    yield from _given_up(source)


def _too_short(source: SourceFacts, window_us: int, consumer: str) -> Iterator[Weakness]:
    """A window that ends before its source does."""
    for lasting_s, name, who in (
        (source.horizon_s, source.horizon_name, f"{source.name} may send again"),
        (source.redrive_s, source.redrive_name, f"dead letters of {source.name} may be put back"),
    ):
        if lasting_s is None or window_us >= lasting_s * 1e6:
            continue
        text = exact_text(window_us)
        if lasting_s == inf:
            yield Weakness(
                f"The window of {text} ends, but {who} for ever ({name} has no end): what was done and not acknowledged"
                " when everything stopped, and comes after the window, runs again.",
                breaks=True,
                fix="a window longer than your longest outage, and --redelivers-for with the length of that",
            )
        else:
            longer = exact_text(_longer_us(lasting_s))
            yield Weakness(
                f"The window of {text} is shorter than the {exact_text(round(lasting_s * 1e6))} for which {who}"
                f" ({name}): what comes after the window runs again.",
                breaks=True,
                fix=f"semel window set {consumer} {longer} (that and a tenth)",
            )


def _too_long(source: SourceFacts, lease_us: int) -> Iterator[Weakness]:
    """A lease that outlasts the source's patience."""
    deadline_s = source.deadline_s
    if deadline_s is None or lease_us <= deadline_s * 1e6:
        return
    spent = source.deliveries_max is not None and source.deliveries_max * deadline_s * 1e6 <= lease_us
    end = (
        f"and {source.name} gives up after {source.deliveries_max} deliveries, all of them within the lease: the event"
        " is given up without having run."
        if spent
        else "is turned away, and may use up the deliveries that the source allows without having run."
    )
    yield Weakness(
        f"The lease of {exact_text(lease_us)} is longer than the {exact_text(round(deadline_s * 1e6))} after"
        f" which {source.name} sends again ({source.deadline_name}): after a crash the event comes back while the dead"
        f" attempt's lease still runs, {end}",
        breaks=spent,
        fix=f"--lease {exact_text(round(deadline_s * 1e6))} or shorter, or a longer time for {source.deadline_name}",
    )


def _given_up(source: SourceFacts) -> Iterator[Weakness]:
    """A broker that loses patience before semel does."""
    if source.deliveries_max is None:
        return
    told = f"{source.name} gives a message up after {source.deliveries_max} deliveries"
    if not source.buries:
        yield Weakness(
            f"{told} and puts it nowhere: an event whose workers were killed, or were busy, that often is lost.",
            breaks=source.deliveries_max <= ATTEMPTS,
            fix="no limit at the broker (semel counts attempts itself), or a place for dead letters there",
        )
    elif source.deliveries_max <= ATTEMPTS:
        yield Weakness(
            f"{told}, not more than the {ATTEMPTS} attempts after which semel does: it goes to {source.buries} without"
            " semel's account of why.",
            fix=f"more deliveries than max_attempts ({ATTEMPTS} unless said otherwise)",
        )


def _longer_us(lasting_s: float) -> int:
    """A tenth more, in whole hours, or minutes below a day."""
    unit = 3600 if lasting_s >= _DAY_S else 60
    return -int(-lasting_s * 1.1 // unit) * unit * 10**6
