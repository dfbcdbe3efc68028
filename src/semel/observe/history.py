"""An append-only history of deliveries, kept longer than any window: one JSON line each, one file a day.

It is for people only: no outcome depends on it.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from threading import Lock
from typing import Any

import msgspec

from semel.core.ids import digest
from semel.observe import events
from semel.runtime.process import restart_after_fork
from semel.windows import Duration, duration_us

__all__ = ["HistoryHook", "HistoryLine", "read"]

PREFIX, SUFFIX = "semel-", ".jsonl"
_KEPT: tuple[type[events.DeliveryEvent], ...] = (
    events.CompletedEvent, events.Duplicate, events.Expired, events.FailedEvent, events.LateArrivalEvent,
    events.LostEvent, events.MarkedEvent,
    events.Quarantined, events.Released, events.Unguarded, events.Unrecorded,
)  # fmt: skip
"""Only the ends of deliveries; earlier events would multiply the size."""


class HistoryLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of the history."""

    at_us: int
    """The time of writing, by this computer's clock: microseconds since 1970."""
    event: str
    consumer: str
    key: str
    tenant: str = ""
    handler: str = ""
    source: str = ""
    reason: str = ""
    state: str = ""
    lag_s: float | None = None
    ran: bool = False
    """For a duplicate: it ran, in mode observe."""
    error: str = ""


class HistoryHook:
    """A hook that appends to a folder. Several processes of one computer may share it: a line is one write.

    `keep`: files older than this are removed when a new day begins. `hashed`: keys are written as digests, by
    which they can still be found. Written lines survive the end of the process, but not a power failure.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, keep: Duration = "90d", hashed: bool = False
    ) -> None:
        self.folder: Path = Path(folder)
        self._keep = timedelta(microseconds=duration_us(keep))
        self._hashed = hashed
        self._day: date | None = None
        self._file = -1
        self._encode = msgspec.json.Encoder().encode
        self.after_fork()
        restart_after_fork(self)

    def after_fork(self) -> None:
        """Keep the parent's file: both processes append to it."""
        self._lock = Lock()

    def __call__(self, happening: events.HookEvent) -> None:
        """Write the event if it ends a delivery."""
        if not isinstance(happening, _KEPT):
            return
        now = datetime.now(UTC)
        line = self._encode(_line(happening, now, hashed=self._hashed)) + b"\n"
        with self._lock:  # the lock keeps the file open: a closed descriptor could be reused before the write
            if self._day != now.date():
                self._turn(now.date())
            os.write(self._file, line)

    def close(self) -> None:
        """Close the file; the next event opens it again."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
            self._file, self._day = -1, None

    def _turn(self, today: date) -> None:
        """Open the file of a new day, and remove old files."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{PREFIX}{today.isoformat()}{SUFFIX}"
        opened = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        before, self._file, self._day = self._file, opened, today
        if before >= 0:
            os.close(before)
        for old, day in _files(self.folder):
            if day < today - self._keep:
                with suppress(FileNotFoundError):  # another process removed it first
                    old.unlink()


def _line(event: Any, now: datetime, *, hashed: bool) -> HistoryLine:
    error = getattr(event, "error", None)
    return HistoryLine(
        at_us=round(now.timestamp() * 1e6),
        event=event.name,
        consumer=event.consumer,
        key=digest_of_key(event.tenant, event.consumer, event.key) if hashed else event.key,
        tenant=event.tenant,
        handler=event.handler,
        source=event.source,
        reason=getattr(event, "reason", ""),
        state=getattr(event, "state", ""),
        lag_s=getattr(event, "lag_s", None),
        ran=not getattr(event, "suppressed", True),
        error="" if not error else error if isinstance(error, str) else type(error).__name__,
    )


def digest_of_key(tenant: str, consumer: str, key: str) -> str:
    """Return the digest that is written instead of a key."""
    return digest((tenant, consumer, key)).hex()[:32]


def _files(folder: Path) -> list[tuple[Path, date]]:
    """Return the files of a history and their days, oldest first."""
    found: list[tuple[Path, date]] = []
    for path in folder.glob(f"{PREFIX}*{SUFFIX}"):
        with suppress(ValueError):
            found.append((path, date.fromisoformat(path.name.removeprefix(PREFIX).removesuffix(SUFFIX))))
    return sorted(found, key=lambda each: each[1])


def read(
    place: str | os.PathLike[str],
    *,
    consumer: str | None = None,
    key: str | None = None,
    since_us: int = 0,
) -> Iterator[HistoryLine]:
    """Yield the lines of a history folder or file, oldest first. Skips a last line that a crash cut short.

    `key` finds plain and hashed lines alike. It reads every file that may contain a match.
    """
    path = Path(place)
    since = datetime.fromtimestamp(since_us / 1e6, UTC).date()
    paths = [each for each, day in _files(path) if day >= since] if path.is_dir() else [path]
    decode = msgspec.json.Decoder(HistoryLine).decode
    for each in paths:
        with each.open("rb") as file:
            for text in file:
                try:
                    line = decode(text)
                except msgspec.MsgspecError:
                    continue
                if line.at_us < since_us or consumer not in (None, line.consumer):
                    continue
                if key is None or line.key in (key, digest_of_key(line.tenant, line.consumer, key)):
                    yield line
