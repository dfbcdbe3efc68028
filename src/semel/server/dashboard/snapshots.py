"""Snapshots of a tenant's records for all pages: counts, and the claims, failures and undecided events at one time."""

import time
from collections.abc import Callable
from typing import Literal, TypeAlias, get_args

from msgspec import Struct
from msgspec.structs import replace

from semel.core.commands import Count, Page, Scan
from semel.core.ids import is_own
from semel.observe.formatting import claim_of, error_of
from semel.server.dashboard.refreshed import Refreshed, pause_s
from semel.server.dashboard.store_reader import StoreReader
from semel.types import Id, Record, State, Stats

__all__ = ["Case", "CaseStatus", "Snapshot", "Snapshots", "case_of"]

CaseStatus: TypeAlias = Literal["running", "silent", "waiting", "journaled", "failed", "unknown"]
"""Of records that are not done: a claim runs; its worker went silent; it waits for its next try; it is journaled and
nobody runs it; it failed for good; nobody knows whether its effect happened."""
CASE_STATUSES: tuple[CaseStatus, ...] = get_args(CaseStatus)
ROWS_MAX = 2000
"""The most records of one state in a snapshot. Of more, the count is known and these are shown."""
TENANTS_MAX = 30
"""The most tenants with a snapshot."""
EVERY_S = 2.0
JOURNAL_LATE_US = 60 * 10**6
"""A journaled event that waits longer than this after its time is run by nobody: recovery looks every few seconds."""
MESSAGE_CHARS_MAX = 300
LISTED: tuple[State, ...] = ("claimed", "failed", "unknown")
NOT_KEPT = "error not kept"
SILENT = "its worker went silent"
NOT_RUN = "no receiver runs it"


class Case(Struct, frozen=True, gc=False):
    """What lists show of a record that is not done, without its value and payload."""

    id: Id
    status: CaseStatus
    fence: int
    owner: bytes
    until_us: int
    """The end of the lease; while it waits, its next time."""
    attempt: int
    first_us: int
    """Its first error; without one, its first delivery."""
    last_us: int
    """Its last error; without one, its last change."""
    kind: str = ""
    """The kind of its last error; empty: it has none."""
    message: str = ""
    worker: str = ""
    event_type: str = ""
    is_journaled: bool = False
    renewed_us: int = 0
    """When its claim was granted."""

    @property
    def is_failing(self) -> bool:
        """Whether a person should see it among the failures."""
        return self.status != "running" and (self.status != "waiting" or bool(self.kind))


class Snapshot(Struct, frozen=True):
    """The records of a tenant, or of all, at one time."""

    taken_us: int
    """By the store's clock."""
    stats: Stats
    cases: tuple[Case, ...] = ()
    sampled: frozenset[State] = frozenset()
    """States of which there are more than `ROWS_MAX`: their cases are some of them."""
    took_s: float = 0.0
    """How long counting and listing took."""

    @property
    def every_s(self) -> float:
        """The time from this snapshot to the next, while somebody looks."""
        return max(EVERY_S, self.took_s + pause_s(self.took_s))

    def is_bounded(self, status: CaseStatus) -> bool:
        """Whether only some of the records of this status are listed: counts of cases are then the least."""
        return (status if status in ("failed", "unknown") else "claimed") in self.sampled

    def of(self, *statuses: CaseStatus) -> list[Case]:
        """Return the cases of these statuses."""
        return [case for case in self.cases if case.status in statuses]

    def count(self, status: CaseStatus) -> int:
        """Return how many records have this status; at least that many, if there are too many claims to list."""
        if status in ("failed", "unknown"):
            return self.stats.states.get(status, 0)
        return len(self.of(status))

    @property
    def failing(self) -> int:
        """How many events need a person."""
        listed = sum(case.is_failing and case.status not in ("failed", "unknown") for case in self.cases)
        return listed + self.count("failed") + self.count("unknown")

    @property
    def running(self) -> int:
        """How many claims run."""
        return self.count("running")


class Snapshots:
    """The last snapshot of each tenant. Taken in the background, while somebody looks."""

    def __init__(self, looks: StoreReader, clock: Callable[[], float]) -> None:
        self._looks = looks
        self._clock = clock
        """The store's clock, in seconds."""
        self._known: dict[str | None, Refreshed[Snapshot]] = {}

    async def close(self) -> None:
        """Cancel running ones."""
        for each in self._known.values():
            await each.close()

    def age_s(self, snapshot: Snapshot) -> float:
        """Return how long ago it was taken."""
        return max(0.0, self._clock() - snapshot.taken_us / 1e6)

    def of(self, tenant: str | None) -> Refreshed[Snapshot]:
        """Return the snapshot of a tenant (`None`: of all)."""
        known = self._known.get(tenant)
        if known is None:
            if len(self._known) >= TENANTS_MAX:
                idle = [name for name, each in self._known.items() if not each.is_reading]
                for name in idle[:1]:  # the one that was first asked for
                    del self._known[name]
            known = self._known[tenant] = Refreshed(lambda: self._read(tenant), EVERY_S)
        return known

    def expire(self) -> None:
        """Take new snapshots when they are next asked for."""
        for each in self._known.values():
            each.expire()

    async def _read(self, tenant: str | None) -> Snapshot:
        began = time.monotonic()
        stats: Stats = await self._looks.in_background(Count(tenant))
        cases: list[Case] = []
        sampled: set[State] = set()
        states = dict(stats.states)
        for state in LISTED:
            if not states.get(state) and (state != "claimed" or not states.get("released")):
                continue  # some stores list one state as slowly as they count all
            now_us = round(1e6 * self._clock())
            found, more = await self._cases(tenant, state, now_us)
            cases += found
            if more:
                sampled.add(state)
            elif state == "claimed":
                states["released"] = sum(not case.owner for case in found)
                states["claimed"] = len(found) - states["released"]
            else:
                states[state] = len(found)
        return Snapshot(
            round(1e6 * self._clock()),
            replace(stats, states=states),
            tuple(cases),
            frozenset(sampled),
            time.monotonic() - began,
        )

    async def _cases(self, tenant: str | None, state: State, now_us: int) -> tuple[list[Case], bool]:
        """Return the cases of a state, and whether there are more."""
        cases: list[Case] = []
        cursor = None
        while True:
            page: Page = await self._looks.in_background(
                Scan(tenant, None, state, cursor=cursor, limit=ROWS_MAX)
            )
            cases += [
                case_of(each, now_us) for each in page.records if not is_own(each.tenant, each.consumer)
            ]
            cursor = page.cursor
            if cursor is None or len(cases) >= ROWS_MAX:
                return cases, cursor is not None


def case_of(record: Record, now_us: int) -> Case:
    """Return the case of a record that is not done."""
    status, kind, message, worker = _status(record, now_us), "", "", ""
    first_us, last_us = record.first_seen_us, record.settled_at_us or record.lease_until_us
    if record.errors:
        error = record.errors[-1]
        kind, message, worker = error.kind.removeprefix("builtins."), error.message, error.worker
        first_us, last_us = record.errors[0].at_us, error.at_us
    elif status == "failed":
        failure = error_of(record.value)
        kind, message = failure["kind"].removeprefix("builtins."), failure["message"]
    elif status == "silent":
        kind = SILENT
    elif status == "journaled":
        kind = NOT_RUN
    elif status == "unknown" or (status == "waiting" and record.attempt):
        kind = NOT_KEPT
    return Case(
        id=record.id,
        status=status,
        fence=record.fence,
        owner=record.owner,
        until_us=record.lease_until_us,
        attempt=record.attempt,
        first_us=first_us,
        last_us=last_us,
        kind=kind,
        message=message[:MESSAGE_CHARS_MAX],
        worker=worker,
        event_type=record.event_type,
        is_journaled=record.journal is not None,
        renewed_us=max(record.fence, record.first_seen_us),  # a fence is a time, unless clocks went back
    )


def _status(record: Record, now_us: int) -> CaseStatus:
    if record.state != "claimed":
        return "failed" if record.state == "failed" else "unknown"
    claim = claim_of(record, now_us)
    if claim == "running":
        return "running"
    if record.journal is not None and record.lease_until_us + JOURNAL_LATE_US < now_us:
        return "journaled"
    return "waiting" if claim == "released" else "silent"
