"""The settings of a chaos run, and its errors."""

from typing import Any

import msgspec
from msgspec import Struct

from semel.errors import PolicyInvalid, UsageError
from semel.observe.guarantees import Sink
from semel.runtime.process import load_object
from semel.testing.chaos.plan import FAULT_KINDS
from semel.types import Mode

__all__ = ["CHAOS_MODES", "ChaosFailed", "ChaosSettings", "Sample"]

CHAOS_MODES: tuple[Mode, ...] = ("lease", "quarantine", "inbox", "mark")
SEED_MAX = 2**32
WORKERS_MAX = 32
EVENTS_MAX = 10_000
ROUNDS_MAX = 100_000
MINUTES_MAX = 24 * 60.0
LEASE_MIN_S, LEASE_MAX_S = 0.2, 600.0


class ChaosFailed(Exception):
    """The run itself failed: a worker cannot start, or nothing moves on. `usable`: whether its settings can be used."""

    def __init__(self, message: str, *, usable: bool = True) -> None:
        super().__init__(message)
        self.usable: bool = usable


class ChaosSettings(Struct, frozen=True, kw_only=True):
    """What to run, where, and how long.

    `handler`: `module:function`. `store`: a URL, or `module:function` that returns a store. `source`: the URL of a
    broker; empty: a queue of its own. `sink`: what the system that the handler calls supports, as in `semel explain`.
    `effects`: `module:function` or `sql:SELECT ...`; empty: the runs of the handler are counted. `sample`: the body of
    an event, `module:function` or JSON with `{key}` and `{number}`. `rounds`: how many; 0: as many as begin within
    `minutes`.
    """

    handler: str
    store: str
    mode: Mode = "lease"
    sink: Sink = "plain"
    source: str = ""
    effects: str = ""
    sample: str = ""
    seed: int = 0
    minutes: float = 1.0
    rounds: int = 0
    events: int = 40
    """How many events a round has."""
    workers: int = 3
    concurrency: int = 2
    """How many handlers a worker runs at once."""
    lease_s: float = 2.0
    window_s: float = 86400.0
    faults: tuple[str, ...] = ()
    """Only faults of these kinds: kill, pause, store cut off, reply lost, ack lost; by default all."""
    force: bool = False
    """Whether to use a store or a source that is not empty."""
    store_is_new: bool = False
    """Whether the store was made for this run alone: then a command that repeats the plan makes another."""

    def __post_init__(self) -> None:
        if self.mode not in CHAOS_MODES:
            raise PolicyInvalid(f"chaos knows the modes {', '.join(CHAOS_MODES)}, not {self.mode!r}")
        unknown = [kind for kind in self.faults if kind not in FAULT_KINDS]
        if unknown:
            raise PolicyInvalid(f"there is no fault {unknown[0]!r}; there are {', '.join(FAULT_KINDS)}")
        bounds: list[tuple[str, float, float, float]] = [
            ("seed", self.seed, 0, SEED_MAX),
            ("minutes", self.minutes, 0, MINUTES_MAX),
            ("rounds", self.rounds, 0, ROUNDS_MAX),
            ("events", self.events, 1, EVENTS_MAX),
            ("workers", self.workers, 1, WORKERS_MAX),
            ("concurrency", self.concurrency, 1, WORKERS_MAX),
            ("lease_s", self.lease_s, LEASE_MIN_S, LEASE_MAX_S),
        ]
        for name, value, least, most in bounds:
            if not least <= value <= most:
                raise PolicyInvalid(f"{name} is {value:g}; it must lie between {least:g} and {most:g}")
        if self.sink == "keyed" and not self.effects:
            raise PolicyInvalid(
                "a sink that honours the key takes a call twice and has its effect once: name --effects, which counts"
                " effects, because the ledger counts calls"
            )

    @property
    def consumer(self) -> str:
        """The consumer of the run's records: one for each mode, because a store keeps the mode of a consumer."""
        return f"semel-chaos-{self.mode}"

    @property
    def visibility_s(self) -> float:
        """After how long without an answer the own queue delivers again."""
        return max(0.5, self.lease_s / 2)


class Sample:
    """Makes the body of an event."""

    def __init__(self, sample: str) -> None:
        self._template = sample if not sample or sample.lstrip().startswith(("{", "[")) else None
        self._make: Any = None if self._template is not None else load_object(sample)
        self("key", 0)

    def __call__(self, key: str, number: int) -> str:
        """Return the body as JSON. Raises `UsageError` if there is none."""
        if self._make is not None:
            return msgspec.json.encode(self._make(key, number)).decode()
        if not self._template:
            return msgspec.json.encode({"id": key, "number": number}).decode()
        body = self._template.replace("{key}", key).replace("{number}", str(number))
        try:
            msgspec.json.decode(body)
        except msgspec.DecodeError as error:
            raise UsageError(f"--sample is no JSON: {error}") from error
        return body
