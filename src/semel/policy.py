"""Settings of a client for its deliveries: frozen, keyword-only, checked when made."""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from msgspec import Struct, StructMeta
from msgspec.structs import force_setattr

from semel.errors import PolicyInvalid
from semel.types import ErrorInfo, Mode, Probe
from semel.windows import FOREVER_US, WINDOW_LONGEST_S, duration_us

__all__ = [
    "LEASE_MAX_S",
    "LEASE_MIN_S",
    "VALUE_BYTES_LIMIT",
    "InboxColumns",
    "InboxTable",
    "OnUnavailable",
    "Policy",
    "check_fits",
]

LEASE_MIN_S = 0.02
"""A shorter lease would end during its own renewal."""
LEASE_MAX_S = 12 * 3600.0
"""The hard cap: as long as a forgotten key keeps its fence."""
VALUE_BYTES_LIMIT = 1024 * 1024
WAIT_MAX_S = 3600.0
ATTEMPTS_LIMIT = 1_000_000
DURATIONS = ("lease_s", "window_s", "wait_s", "lock_wait_s", "run_max_s", "retry_delay_s")


PROBED_MODES: tuple[Mode, ...] = ("lease", "quarantine", "observe")
"""Modes that allow a probe; observe accepts the policy of a later mode."""
TRANSACTION_MODES: tuple[Mode, ...] = ("inbox", "transaction")

OnUnavailable: TypeAlias = Literal["refuse", "run"]


_NAME = re.compile(r"[a-z_][a-z0-9_]{0,62}", re.ASCII)


class InboxColumns(Struct, frozen=True, kw_only=True):
    """Column names of an existing table of processed events; empty: there is no such column.

    `processed_events (id UNIQUE, processed_at DEFAULT now())` is `InboxColumns(event_id="id")`.
    """

    event_id: str = "event_id"
    tenant: str = ""
    consumer: str = ""

    def __post_init__(self) -> None:
        for field in ("event_id", "tenant", "consumer"):
            name = getattr(self, field)
            if (name or field == "event_id") and not _NAME.fullmatch(name):
                raise PolicyInvalid(
                    f"{name!r} is not a valid name for the column {field}; use a-z, 0-9 and _"
                )

    @property
    def names(self) -> tuple[str, ...]:
        """The written columns, the id first. They must be unique together."""
        return tuple(name for name in (self.event_id, self.tenant, self.consumer) if name)


class InboxTable(Struct, frozen=True):
    """An existing table of processed events that an inbox writes its marks to, instead of semel's own.

    Its rows stay until you remove them: they have no window, and no value or fingerprint.
    """

    name: str
    columns: InboxColumns = InboxColumns()

    def __post_init__(self) -> None:
        if not all(_NAME.fullmatch(part) for part in self.name.split(".", 1)):
            raise PolicyInvalid(f"{self.name!r} is not a valid name for a table; use a-z, 0-9 and _")


_OF_OPEN = frozenset(("consumer", "tenant", "mode", "ids", "hooks"))
_OTHER_NAMES = {
    **dict.fromkeys(("ttl", "ttl_s", "expire", "expires", "expiry", "expire_s", "retention"), "window_s"),
    **dict.fromkeys(("retries", "max_retries", "attempts", "attempts_max"), "max_attempts"),
    **dict.fromkeys(("timeout", "timeout_s"), "wait_s, lease_s or run_max_s"),
    **dict.fromkeys(("delay", "backoff"), "retry_delay_s"),
}
"""Names that users of other libraries try, and the option that they mean."""


class _ExplainsOptions(StructMeta):
    """Raises `PolicyInvalid` with the right name for an option that there is not. Python's error names nothing."""

    if not TYPE_CHECKING:  # type checkers know the options from the fields

        def __call__(cls, *args: Any, **options: Any) -> Any:  # noqa: N805 - of a metaclass that msgspec makes
            """Check the names, then make it."""
            unknown = options.keys() - cls.__struct_fields__
            if args or unknown:
                raise PolicyInvalid(_advice(min(unknown, default=""), cls.__struct_fields__))
            return super().__call__(**options)


def _advice(name: str, fields: tuple[str, ...]) -> str:
    """Return what to write instead of an option that there is not; empty: one was given without its name."""
    if not name:
        return "options of Policy are given by name, like Policy(lease_s=30)"
    if name in _OF_OPEN:
        return f"{name} is no option of Policy: it belongs to open, as open(..., {name}=...)"
    meant = f"{name}_s" if f"{name}_s" in fields else _OTHER_NAMES.get(name, "")
    if not meant:
        from difflib import get_close_matches  # needed only for a mistyped option

        meant = next(iter(get_close_matches(name, fields, n=1)), "")
    rest = f"did you mean {meant}?" if meant else f"it takes {', '.join(fields)}"
    return f"{name} is no option of Policy; {rest}"


class Policy(Struct, frozen=True, kw_only=True, metaclass=_ExplainsOptions):
    """Options of `run`, `run_many` and `guard`; give it to `open` or to `once.using(policy)`.

    Durations are seconds; text like `"30s"` and a `timedelta` are understood, and become seconds.
    """

    lease_s: float | None = None
    """How long a claim lasts without renewal; `None`: the client's."""
    window_s: float | None = None
    """How long a finished key is remembered; `None`: the client's. A window stored for the event type wins.

    `"forever"`: until somebody forgets it; on stores that keep records without end.
    """
    refresh_on_sight: bool = False
    """The window starts again at every sighting of a finished key: a burst counts once, until it pauses for a window.

    Each duplicate then writes to the store. A key that is seen again and again is never new.
    """
    wait_s: float = 10.0
    """How long a concurrent duplicate waits for the first one; 0: `Busy` at once."""
    lock_wait_s: float = 2.0
    """How long the inbox waits for a transaction that has marked the same key, or holds SQLite's lock."""
    run_max_s: float = 900.0
    """After this time a handler's lease is not renewed, so that a hung handler frees its key."""
    max_attempts: int = 10
    """The most attempts: if the last one fails, the event fails for good; so does a claim after that many crashes."""
    retry_delay_s: float = 0.0
    """The delay before a retry after a transient failure, doubled with each attempt up to 5 min."""
    permanent: tuple[type[Exception], ...] = ()
    """Permanent errors: stored, and replayed to every duplicate."""
    late: Literal["run", "hold", "reject"] = "run"
    """What to do with an event older than its window: run it, or answer `Late`."""
    keep_value: bool = True
    """`False`: the value is not stored; duplicates get `None`."""
    value_bytes_max: int = 256 * 1024
    """The largest encoded value that is stored. A larger one is not: `Done.kept` is `False`."""
    keep_errors: bool = True
    """`False`: records keep no errors of attempts. Of a failure for good and of a dead letter only the kind is kept."""
    redact_error: Callable[[ErrorInfo], ErrorInfo] | None = None
    """Called with what would be kept of an error; returns what may be kept, in records, failures and dead letters.

    If it raises, or returns anything else, only the kind is kept. It must not block.
    """
    event_type: str = ""
    """The type of the events: it may have a window of its own, and metrics name it."""
    fingerprint: Callable[..., bytes] | None = None
    """Called with the handler's arguments; two deliveries of one key must agree on it."""
    probe: Probe | None = None
    """Asks the other system whether an effect has happened, before a handler runs again or a person is asked.

    Given a `semel.Inquiry`, it answers `Happened(value)`, `DidNotHappen()` or `CannotTell()`. For modes lease and
    quarantine. A sync client needs a `def`; an async client takes both.
    """
    on_unavailable: OnUnavailable = "refuse"
    """When the store cannot be reached at the claim: refuse (`Unavailable`), or run the handler without a claim.

    A run without a claim is not recorded: every duplicate runs too, until the store is back.
    """

    inbox_table: InboxTable | None = None
    """For mode inbox: an existing table of processed events to write the marks to, instead of semel's own."""

    def __post_init__(self) -> None:
        self._read_near_misses()
        bounds: list[tuple[str, Any, float, float]] = [
            ("lease_s", self.lease_s, LEASE_MIN_S, LEASE_MAX_S),
            ("window_s", None if self.window_s == FOREVER_US / 1e6 else self.window_s, 0, WINDOW_LONGEST_S),
            ("wait_s", self.wait_s, 0, WAIT_MAX_S),
            ("lock_wait_s", self.lock_wait_s, 0, WAIT_MAX_S),
            ("run_max_s", self.run_max_s, LEASE_MIN_S, LEASE_MAX_S),
            ("max_attempts", self.max_attempts, 1, ATTEMPTS_LIMIT),
            ("retry_delay_s", self.retry_delay_s, 0, LEASE_MAX_S),
            ("value_bytes_max", self.value_bytes_max, 0, VALUE_BYTES_LIMIT),
        ]
        for name, setting, low, high in bounds:
            if setting is not None and not low <= setting <= high:
                raise PolicyInvalid(f"Policy.{name} is {setting}; it must be between {low:g} and {high:g}")
        if self.late not in ("run", "hold", "reject"):
            raise PolicyInvalid(f"Policy.late is {self.late!r}; it must be run, hold or reject")
        if self.probe is not None and not callable(self.probe):
            raise PolicyInvalid(
                f"Policy.probe is {self.probe!r}; it must be a function that takes a semel.Inquiry"
            )
        if self.redact_error is not None and not callable(self.redact_error):
            raise PolicyInvalid(
                f"Policy.redact_error is {self.redact_error!r}; it must be a function of one ErrorInfo"
            )
        if self.on_unavailable not in ("refuse", "run"):
            raise PolicyInvalid(f"Policy.on_unavailable is {self.on_unavailable!r}; it must be refuse or run")
        if self.lease_s is not None and self.run_max_s < self.lease_s:
            raise PolicyInvalid(
                f"Policy.run_max_s {self.run_max_s:g} is shorter than the lease {self.lease_s:g}; raise it"
            )

    def _read_near_misses(self) -> None:
        """Convert accepted forms: durations as text, one error instead of a tuple."""
        for name in DURATIONS:
            duration = getattr(self, name)
            if name == "window_s" and duration == "forever":
                duration = FOREVER_US / 1e6
                force_setattr(self, name, duration)
            if duration is not None and (type(duration) not in (int, float) or duration < 0):
                try:
                    force_setattr(self, name, duration_us(duration) / 1e6)
                except PolicyInvalid as error:
                    raise PolicyInvalid(f"Policy.{name}: {error}") from None
        for name in ("max_attempts", "value_bytes_max"):
            if type(getattr(self, name)) is not int:
                raise PolicyInvalid(f"Policy.{name} is {getattr(self, name)!r}; it must be a whole number")
        given: Any = self.permanent
        kinds: Any = (given,) if isinstance(given, type) else tuple(given)
        if not all(isinstance(kind, type) and issubclass(kind, Exception) for kind in kinds):
            raise PolicyInvalid(f"Policy.permanent is {given!r}; give classes of errors, like (ValueError,)")
        force_setattr(self, "permanent", kinds)
        if self.fingerprint is not None and not callable(self.fingerprint):
            raise PolicyInvalid(
                f"Policy.fingerprint is {self.fingerprint!r}; give a function that makes bytes of the arguments"
            )


def check_fits(
    mode: Mode, *, probe: bool, on_unavailable: OnUnavailable, refresh_on_sight: bool = False
) -> None:
    """Raise `PolicyInvalid` for settings that the mode does not support."""
    if probe and mode not in PROBED_MODES:
        raise PolicyInvalid(
            f"Policy.probe is for mode lease or quarantine, not {mode!r}: there no outcome is left to ask about"
        )
    if refresh_on_sight and mode == "inbox":
        raise PolicyInvalid(
            "Policy.refresh_on_sight does not go with mode 'inbox': a duplicate would write in your transaction, and"
            " wait for others; use mode 'lease' or 'mark'"
        )
    if on_unavailable == "run" and mode in TRANSACTION_MODES:
        raise PolicyInvalid(
            f"Policy.on_unavailable='run' does not go with mode {mode!r}: mark and effect commit together or not at"
            " all; leave it at 'refuse'"
        )
