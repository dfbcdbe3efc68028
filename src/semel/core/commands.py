"""The commands of flows and their answers: one small frozen struct each.

*Items* go to a store, many in one round trip, each atomic on its own. The other commands are for
the driver that runs the flow. `answer = yield from command` is typed: a command knows its answer.
"""

from collections.abc import Callable, Generator
from typing import Any, Generic, Literal, NoReturn, TypeAlias, TypeVar

from msgspec import Struct

from semel.core.ids import OWN, is_own
from semel.errors import StoreError, StoreUnavailable
from semel.types import (
    Absent,
    Busy,
    Completed,
    ErrorInfo,
    Forgotten,
    Id,
    Inquiry,
    Late,
    Lost,
    Mismatch,
    Mode,
    Probe,
    Record,
    Renewed,
    SettleAnswer,
    State,
    Stats,
    Unavailable,
    Unknown,
)

R = TypeVar("R")
T = TypeVar("T")

Flow: TypeAlias = Generator["Command[Any]", Any, T]
"""A piece of protocol: yields commands, receives their answers, returns its result."""


class Command(Struct, Generic[R], frozen=True, gc=False):
    """A command of a flow, answered with an `R`."""

    def __iter__(self) -> Generator["Command[R]", R, R]:
        return (yield self)


# --- answers of a store -------------------------------------------------------------------------


class Granted(
    Struct, frozen=True, gc=False, rename={"lease_until_us": "lease_until", "first_seen_us": "first_seen"}
):
    """The claim is yours: run, then settle with this fence and your owner."""

    fence: int
    attempt: int
    lease_until_us: int
    first_seen_us: int
    steps: tuple[tuple[str, bytes | None], ...] = ()
    journal: bytes | None = None


class Known(
    Struct, frozen=True, gc=False, rename={"settled_at_us": "settled_at", "first_seen_us": "first_seen"}
):
    """The key is settled: the answer to a duplicate."""

    state: Literal["done", "failed"]
    value: bytes | None
    fence: int
    settled_at_us: int
    first_seen_us: int
    rest_us: int = 0
    """How much longer it is remembered; 0: the store does not say."""


class Marked(Struct, frozen=True, gc=False):
    """For each key of the mark, in order: was this the first time?"""

    firsts: list[bool]


class Page(Struct, frozen=True, gc=False):
    """Some records, and the cursor of the next page (`None` after the last)."""

    records: list[Record]
    cursor: str | None = None


class Purged(Struct, frozen=True, gc=False):
    """How many expired records were removed, and how long the oldest had been waiting for it."""

    count: int
    lag_s: float = 0.0
    more: bool = False
    partitions: int = 0
    """How many partitions were removed, with all that was in them; their records are not counted."""
    cleaner: str = ""
    """The name of another running cleaner, so that nothing was done here; empty: we cleaned."""


class StoreSettings(Struct, frozen=True, gc=False):
    """The store's own settings: windows and modes by (tenant, consumer)."""

    windows: dict[tuple[str, str, str], int]
    """(tenant, consumer, event type; empty: any) -> microseconds, 0: off."""
    modes: dict[tuple[str, str], Mode]
    ids: dict[tuple[str, str], str] = {}
    """The kind of ids of the consumers that declared one."""
    live_us: int = 0
    """How long records of consumers with `ids` are kept, counted from the time in the id; 0: as long as they stand."""


ClaimAnswer: TypeAlias = Granted | Known | Busy | Mismatch | Late | Unknown | Unavailable
RenewAnswer: TypeAlias = Renewed | Lost[Any] | Unavailable


# --- items: commands for a store ----------------------------------------------------------------


class Claim(Command[ClaimAnswer], frozen=True, gc=False, tag="claim"):
    """Claim the exclusive right to run, or get the answer for a duplicate. Safe to repeat with the same owner."""

    id: Id
    owner: bytes
    lease_us: int
    window_us: int
    fingerprint: bytes | None = None
    event_type: str = ""
    event_time_us: int | None = None
    refuse_late: bool = False
    journal: bytes | None = None
    meta: bytes | None = None
    quarantine: bool = False
    sliding: bool = False
    apart_us: int = 0
    """Not 0: equal keys whose event times lie this far apart are different events. The record is then remembered
    for `window_us` from the event's own time, and what is older than `window_us - apart_us` is late."""
    error: ErrorInfo | None = None
    """For a claim without an owner, which counts an attempt that has failed: its error."""
    refresh: bool = False
    """If the key is settled, its window starts again: it is remembered for `window_us` from now, unless it would be
    for longer."""


class Renew(Command[RenewAnswer], frozen=True, gc=False, tag="renew"):
    """Move the lease to now + `lease_us`; with a `step`, write (name, value) into the record too."""

    id: Id
    owner: bytes
    fence: int
    lease_us: int
    step: tuple[str, bytes | None] | None = None


class Settle(Command[SettleAnswer], frozen=True, gc=False, tag="settle"):
    """End a claim: complete, fail, release or quarantine it, iff fence and owner still match."""

    id: Id
    owner: bytes
    fence: int
    to: Literal["done", "failed", "released", "unknown"]
    value: bytes | None = None
    window_us: int = 0
    lease_us: int = 0
    """With `window_us`: the time from which a lost record's expiry is computed."""
    sliding: bool = False
    delay_us: int = 0
    count_attempt: bool = True
    event_time_us: int | None = None
    """The start of the window, if event times decide."""
    error: ErrorInfo | None = None
    """What the record keeps of the attempt's error."""


class Mark(Command[Marked | Unavailable], frozen=True, gc=False, tag="mark"):
    """Mark each key as done, at once. The keys are distinct; each is atomic on its own."""

    tenant: str
    consumer: str
    keys: list[str]
    window_us: int
    refresh: bool = False
    """The windows of known keys start again, as for a claim."""


class Lookup(Command[Record | Absent | Unavailable], frozen=True, gc=False, tag="lookup"):
    """Read the record; changes nothing."""

    id: Id


class Forget(
    Command[Forgotten | Absent | Busy | Lost[Any] | Unavailable], frozen=True, gc=False, tag="forget"
):
    """Make the key new again; `Busy` on a running claim unless forced, `Lost` if it is not that record."""

    id: Id
    force: bool = False
    fence: int | None = None
    state: State | None = None


class Resolve(Command[Completed | Forgotten | Lost[Any] | Unavailable], frozen=True, gc=False, tag="resolve"):
    """Resolve an unknown record, compare-and-set on its fence."""

    id: Id
    fence: int
    to: Literal["done", "absent", "claimed"]
    """`claimed`: by `owner`, as the next attempt; unlike `absent`, attempts and steps stay."""
    value: bytes | None = None
    window_us: int = 0
    owner: bytes = b""
    lease_us: int = 0


class Scan(Command[Page | Unavailable], frozen=True, gc=False, tag="scan"):
    """Records by tenant, consumer, state, key prefix and age, a page at a time, in a stable order."""

    tenant: str | None = None
    consumer: str | None = None
    state: State | None = None
    prefix: str = ""
    seen_before: int | None = None
    orphaned: bool = False
    """Only journaled claims whose lease is over, for `sweep`."""
    cursor: str | None = None
    limit: int = 100


class Purge(Command[Purged | Unavailable], frozen=True, gc=False, tag="purge"):
    """Remove up to `limit` records whose expiry and lease are over. It never changes an answer.

    A store also does its other maintenance here, such as creating and dropping partitions.
    """

    limit: int = 5000
    dry_run: bool = False


class Count(Command[Stats | Unavailable], frozen=True, gc=False, tag="count"):
    """Count the records of the store or of one tenant. Semel's own records count only if their tenant is named.

    `expired`, `purge_lag_s` and `bytes_used` cover the whole store.
    """

    tenant: str | None = None

    def covers(self, tenant: str, consumer: str) -> bool:
        """Whether records of this tenant and consumer are counted by state and consumer, or as marks."""
        if self.tenant is not None and self.tenant.startswith(OWN):
            return tenant == self.tenant
        return self.tenant in (None, tenant) and not is_own(tenant, consumer)


class ReadSettings(Command[StoreSettings | Unavailable], frozen=True, gc=False, tag="read_settings"):
    """All windows and modes."""


class SetWindow(Command[None | Unavailable], frozen=True, gc=False, tag="set_window"):
    """Store a window (0: off, `None`: remove); with `existing`, move stored expiries too."""

    tenant: str
    consumer: str
    event_type: str
    window_us: int | None
    existing: bool = False


class Admit(Command[Mode | Unavailable], frozen=True, gc=False, tag="admit"):
    """Record the consumer's mode if it has none; answers with the recorded one.

    A new consumer is recorded with its kind of ids too, which never changes;
    `ReadSettings` returns it.
    """

    tenant: str
    consumer: str
    mode: Mode
    ids: str = ""


class SwitchMode(Command[int | Unavailable], frozen=True, gc=False, tag="switch_mode"):
    """Change the consumer's mode; answers how many claims and unknown records forbid it (0: changed)."""

    tenant: str
    consumer: str
    mode: Mode


RecordItem: TypeAlias = Claim | Renew | Settle | Lookup | Forget | Resolve
"""Items on one record each, for `machine.decide`."""

Item: TypeAlias = RecordItem | Mark | Scan | Purge | Count | ReadSettings | SetWindow | Admit | SwitchMode
Answer: TypeAlias = Any
"""The answer of the item at the same position; its type is the item's own."""


# --- commands for the driver --------------------------------------------------------------------


class Returned(Struct, frozen=True):
    """The handler returned."""

    value: Any


class Raised(Struct, frozen=True):
    """The handler raised. `interrupted`: from outside (cancelled, Ctrl-C)."""

    error: BaseException
    interrupted: bool = False
    lost: bool = False
    """It was stopped because its claim was lost."""


Ran: TypeAlias = Returned | Raised


class Invoke(Command[Ran], frozen=True):
    """Call the handler. Never raises: the answer has the result.

    Without `granted` it runs without a claim; without `claim` it is a step of a handler.
    """

    call: Callable[[], Any]
    claim: Claim | None = None
    granted: Granted | None = None


class Ask(Command[Ran], frozen=True):
    """Ask the policy's probe about an earlier attempt. Never raises: the answer has the result."""

    probe: Probe
    inquiry: Inquiry


class Watch(Command[Any], frozen=True, gc=False):
    """Listen for changes of a record from now on, for at most `wait_s`. Answers with a handle."""

    id: Id
    wait_s: float


class Sleep(Command[bool], frozen=True):
    """Sleep until the watched record may have changed; `False` when `wait_s` is over."""

    watch: Any
    retry_after_s: float


class Unwatch(Command[None], frozen=True):
    """Stop listening."""

    watch: Any


class Pause(Command[bool], frozen=True, gc=False):
    """Back off before retrying an unreachable store; `False` when there is no time left.

    With an owner the time is that claim's own deadline; without, the policy's `wait_s`.
    """

    tries: int
    owner: bytes = b""
    wait_s: float = 0.0


def answer_or_raise(answer: T | Unavailable) -> T:
    """Return the answer. Raises `StoreError` if the store gave none."""
    return raise_unavailable(answer) if isinstance(answer, Unavailable) else answer


def raise_unavailable(answer: Unavailable) -> NoReturn:
    """Raise the store's failure as a `StoreError`."""
    if isinstance(answer.error, StoreError):
        raise answer.error
    raise StoreUnavailable(str(answer.error)) from answer.error
