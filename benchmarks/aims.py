"""What single calls and batches should cost, and what they cost in the stored figures."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from benchmarks.growth import Point

__all__ = ["OBSTACLES", "aims_table"]

OBSTACLES = """
What stands in the way:

- **SQLite, `run`.** A first event is two durable transactions. They write two and a half times
  the bytes of the version by hand: besides the row and its key, the index by which old records
  are found, and the store's time in each transaction. In a profile by statement, 495 us in all,
  the two commits took 212, the seven other statements 98; 185 were Python, in the store and above
  it. A duplicate is one `SELECT`: 10 us of 28 in that profile.
- **PostgreSQL, `run`, first.** The server does the work of by hand on a wider row with a second
  index, on pages that are left half empty so that the settle touches no index. Hence the bytes,
  too.
- **Inbox, one event.** The table at the top was measured before the last change: since then a
  session's database is checked once and not for each event, which took 50 of the server's 350 us.
  In turns on a busy computer the cost relative to by hand was 2.1 before, and is now 1.3 to 1.8
  for a first event; for a duplicate it was 2.8, and is 1.8 to 2.6. What is left in the server,
  the least of eight blocks, with the commit: by hand 214 us, the same `INSERT` into the table of
  records 232, the function around it 300. The function looks up the consumer, reads the record,
  sets a bound on waiting, and opens a savepoint, so that waiting in vain leaves the caller's
  transaction usable. In the client, `first` makes 157 calls, the driver's included, where by hand
  makes 71.
- **`run_many`.** On memory, where the store takes least, two thirds of a first event and nearly
  all of a replay are above the store: 110 calls for a first event, 35 for a replay. They build
  the claim, advance the flow, keep the lease, encode the value. A loop that skips the flow in the
  plain case would write the protocol a second time.
- **Against idemkit.** One event at a time, the version by hand on Redis has 1.8 times its rate,
  so 2.5 times is out of reach there: what is left is the round trips and the server.
- **p99.** The calls that miss the bound take 6 to 19 us: any interrupt of the process is a
  multiple of that. By hand on SQLite p99 is four times the median.
- **Awaited replay on PostgreSQL.** In turns with the blocking call it was 1.34 (a first event
  1.07), in earlier runs 1.02 to 1.26. The server takes the same; the client takes 142 us instead
  of 92, for the event loop and the coroutines.
- **Growth.** Why the curves bend, and the aims that compare with the bare servers: [ratios to raw
  limits](../../benchmarks/README.md#growth-of-marks).
"""
"""Written by hand, from profiles. Change it when the profile changes."""


class Measured(Protocol):
    """A row of the figures."""

    @property
    def place(self) -> tuple[str, str, str, str]:
        """Store, shape, contender and phase."""

    @property
    def rate(self) -> float:
        """Events per second."""

    @property
    def ratio(self) -> float | None:
        """Processor time relative to by hand."""

    @property
    def cpu_us(self) -> float:
        """Processor time of client and server."""

    @property
    def p50_us(self) -> float | None:
        """The median time of a call."""

    @property
    def p99_us(self) -> float | None:
        """The time that one call in a hundred exceeds."""


Rows = dict[tuple[str, str, str, str], Measured]
SINGLE, ONE_TASK, TASKS, BATCHES = "one by one", "one task", "50 tasks", "batches of 500"


class Aim(NamedTuple):
    """A bound, and the figure that it bounds."""

    what: str
    bound: float
    figure: Callable[[Rows], float]
    least: bool = False
    """The bound is the least that the figure should be; else the most."""


def _ratio(store: str, phase: str) -> Callable[[Rows], float]:
    return lambda rows: rows[store, SINGLE, "semel", phase].ratio or 0.0


def _cost(store: str, phase: str) -> Callable[[Rows], float]:
    return lambda rows: rows[store, BATCHES, "semel", phase].cpu_us


def _awaited(store: str, phase: str) -> Callable[[Rows], float]:
    return lambda rows: (
        rows[store, ONE_TASK, "semel", phase].cpu_us / rows[store, SINGLE, "semel", phase].cpu_us
    )


def _beside_idemkit(store: str, shape: str, beside: str) -> Callable[[Rows], float]:
    return lambda rows: (
        rows[store, shape, "semel", "first"].rate / rows[store, beside, "idemkit", "first"].rate
    )


def _tail(store: str, phase: str) -> Callable[[Rows], float]:
    def figure(rows: Rows) -> float:
        row = rows[store, SINGLE, "semel", phase]
        return (row.p99_us or 0.0) / (row.p50_us or 1.0)

    return figure


def _inbox(rows: Rows) -> float:
    place = ("postgresql", "inbox, one event")
    return rows[*place, "semel", "first"].rate / rows[*place, "by hand", "first"].rate


GROWTH = {
    ("sqlite", 2_000_000): 0.5,
    ("redis", 10_000_000): 0.8,
    ("postgresql", 1_000_000): 0.8,
    ("postgresql", 10_000_000): 0.8,
}
PHASES = ("first", "replay")
RATIOS = {"redis": (1.1, 1.1), "postgresql": (1.25, 0.8), "sqlite": (1.9, 1.7)}
COSTS = {"memory": (11, 3), "redis": (24, 12), "postgresql": (38, 11), "sqlite": (27, 10)}
AIMS = (
    *(Aim(f"{store}, `run`, {phase}: cost relative to by hand", bound, _ratio(store, phase))
      for store, bounds in RATIOS.items() for phase, bound in zip(PHASES, bounds, strict=True)),
    *(Aim(f"{store}, awaited `run`, {phase}: cost relative to the blocking one", 1.3, _awaited(store, phase))
      for store in ("redis", "postgresql") for phase in PHASES),
    Aim("inbox, one event: rate relative to by hand", 0.85, _inbox, least=True),
    *(Aim(f"{store}, `run_many` of 500, {phase}: us per event", bound, _cost(store, phase))
      for store, bounds in COSTS.items() for phase, bound in zip(PHASES, bounds, strict=True)),
    *(Aim(f"{store}: rate relative to idemkit, {name}", bound, _beside_idemkit(store, shape, beside), least=True)
      for store in ("redis", "postgresql")
      for name, shape, beside, bound in (
          ("singly", SINGLE, ONE_TASK, 2.5), ("50 tasks", TASKS, TASKS, 10),
          ("batches, idemkit singly", BATCHES, ONE_TASK, 40),
      )),
    *(Aim(f"{store}, `run`, {phase}: p99 relative to the median", 3, _tail(store, phase))
      for store in ("redis", "postgresql", "sqlite", "memory") for phase in PHASES),
)  # fmt: skip


def aims_table(measured: Sequence[Measured], points: Sequence[Point]) -> Iterator[str]:
    """Yield a table of the aims; one without figures is left out."""
    rows: Rows = {row.place: row for row in measured}
    yield "| what | aim | measured | reached |"
    yield "|---" * 4 + "|"
    for aim in AIMS:
        try:
            found = aim.figure(rows)
        except KeyError:
            continue
        yield _line(aim.what, aim.bound, found, least=aim.least)
    kept = {(point.store, point.held): point.kept for point in points}
    for (store, held), bound in GROWTH.items():
        if (store, held) in kept:
            what = f"{store}, marks at {held:,}: speed kept from 10,000"
            yield _line(what, bound, kept[store, held], least=True)


def _line(what: str, bound: float, found: float, *, least: bool) -> str:
    reached = found >= bound if least else found <= bound
    return (
        f"| {what} | {'>=' if least else '<='} {bound:g} | {found:.3g} | {'yes' if reached else '**no**'} |"
    )
