"""Random calls on every store against the model: whatever one answers, the other does."""

import shutil
import tempfile
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from semel.core.commands import (
    Claim,
    Count,
    Forget,
    Granted,
    Item,
    Known,
    Lookup,
    Mark,
    Marked,
    Purge,
    Renew,
    Resolve,
    Settle,
)
from semel.core.protocols import Store
from semel.testing import ManualClock
from semel.types import (
    FOREVER,
    Absent,
    Busy,
    Completed,
    Forgotten,
    Late,
    Lost,
    Mismatch,
    Record,
    Renewed,
    Unknown,
)
from tests.contract import model
from tests.contract.model import Answer, Model, Name
from tests.contract.stores import KINDS, SLOTS, Kind
from tests.server import places as servers

S = 1_000_000
CONSUMERS = ("lease", "careful", "sliding", "timed")
NAMES: list[Name] = [("", consumer, key) for consumer in CONSUMERS for key in ("a", "b")] + [
    ("other", "lease", "a")
]
OWNERS = [bytes([number]) * 16 for number in range(1, 5)]
PRINTS = [None, None, b"\1one", b"\1two", b"\2one"]
VALUES = [None, b"", b"r1", b"r2"]
MARK_KEYS = ["a", "b", "c", "d"]

names = st.sampled_from(NAMES)
owners = st.sampled_from(OWNERS)
leases = st.sampled_from([S, 5 * S, 30 * S])
windows = st.sampled_from([0, 10 * S, 60 * S, 3600 * S])
values = st.sampled_from(VALUES)
slips = st.sampled_from([0, 0, 0, 0, 0, -1, 1])
tickets = st.integers(0, 30)


class Ticket(NamedTuple):
    """A claim that was granted at some time, perhaps long lost."""

    name: Name
    owner: bytes
    fence: int
    lease: int
    window: int
    sliding: bool
    moment: int | None = None


def plain(answer: Any) -> Answer:
    """A store's answer in the model's words."""
    match answer:
        case Granted():
            return ("granted", answer.fence, answer.attempt, answer.lease_until_us, answer.first_seen_us, answer.steps, answer.journal)  # fmt: skip # noqa: E501
        case Known():
            return (
                "known",
                answer.state,
                answer.value,
                answer.fence,
                answer.settled_at_us,
                answer.first_seen_us,
            )
        case Busy():
            return ("busy", round(answer.retry_after_s * S), answer.recoverable)
        case Late():
            return ("late", round(answer.age_s * S))
        case Unknown():
            return ("unknown", answer.since_us)
        case Renewed():
            return ("renewed", answer.lease_until_us)
        case Completed():
            word = "already" if answer.already else "recreated" if answer.recreated else "completed"
            return (word, answer.at_us)
        case Marked():
            return ("marked", answer.firsts)
        case Record():
            return record_plain(answer)
        case Lost() | Mismatch() | Absent() | Forgotten():
            return (type(answer).__name__.lower(),)
        case _:
            raise AssertionError(f"an answer that the model has no word for: {answer!r}")


def record_plain(record: Record) -> Answer:
    if record.consumer == "marks":
        return ("mark", record.expires_at_us)
    return (
        record.state,
        record.owner,
        record.fence,
        record.attempt,
        record.first_seen_us,
        model.NEVER if record.expires_at_us == FOREVER else record.expires_at_us,
        record.lease_until_us if record.state == "claimed" else None,
        record.value,
        record.fingerprint,
        record.steps,
        record.journal,
        record.anchor_us,
    )


class StoreAgainstModel(RuleBasedStateMachine):
    kind: ClassVar[Kind]

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="semel-model-"))
        self.clock = ManualClock()
        self.model = Model()
        self.last_us = 0
        self.tickets: list[Ticket] = []

    @initialize()
    def start(self) -> None:
        self.store = self.connect()

    def connect(self) -> Store:
        make = servers.make_timed if self.kind.name == "http" else self.kind.make
        store = make(self.folder, self.clock)
        store.open()
        return store

    def teardown(self) -> None:
        try:
            if hasattr(self, "store"):
                self.store.close()
        finally:
            shutil.rmtree(self.folder)

    def agree(self, item: Item, verb: str, *args: Any, **more: Any) -> Any:
        """Ask both, and compare. The store's time comes with its answer: one call has one time."""
        answer, now_us = self.ask(item)
        assert now_us > self.last_us, "the store's time must go forward"
        self.last_us = now_us
        assert plain(answer) == getattr(self.model, verb)(now_us, *args, **more), item
        return answer

    def ask(self, item: Item) -> tuple[Any, int]:
        """The answer, and the store's time. A service counts beside the call: there the store behind it is asked."""
        if self.kind.name == "http":
            (answer,) = self.store.send([item])
            return answer, servers.time_of(item)
        answer, stats = self.store.send([item, Count()])
        return answer, stats.now_us

    def ticket(self, number: int) -> Ticket:
        """Mostly one of the last ones."""
        return self.tickets[-1 - number % len(self.tickets)]

    # --- rules ---

    @rule(
        name=names, owner=owners, lease=leases, window=windows, print_=st.sampled_from(PRINTS),
        age=st.sampled_from([None, None, 0, 30 * S, 7200 * S]), refuse_late=st.booleans(),
        payload=st.sampled_from([None, None, None, b"", b"p1", b"p2"]), refresh=st.booleans(),
    )  # fmt: skip
    def claim(
        self,
        name: Name,
        owner: bytes,
        lease: int,
        window: int,
        print_: bytes | None,
        age: int | None,
        refuse_late: bool,
        payload: bytes | None,
        refresh: bool,
    ) -> None:
        refresh = refresh and self.store.capabilities.refreshes and not self.kind.without >= SLOTS
        careful, sliding = name[1] == "careful", name[1] == "sliding"
        happened = None if age is None else self.clock.now_us() - age
        item = Claim(
            name, owner, lease, window, fingerprint=print_, event_time_us=happened, refuse_late=refuse_late,
            journal=payload, quarantine=careful, sliding=sliding, refresh=refresh,
        )  # fmt: skip
        answer = self.agree(
            item, "claim", name, owner, lease, window, print_=print_, happened=happened,
            refuse_late=refuse_late, payload=payload, careful=careful, sliding=sliding, refresh=refresh,
        )  # fmt: skip
        if isinstance(answer, Granted):
            self.tickets.append(Ticket(name, owner, answer.fence, lease, window, sliding))

    @rule(
        name=st.sampled_from([name for name in NAMES if name[1] in ("timed", "careful")]), owner=owners,
        lease=leases, gap=st.sampled_from([1, 10 * S, 60 * S]), lateness=st.sampled_from([0, 60 * S, 3600 * S]),
        age=st.sampled_from([0, 0, 1, 5 * S, 10 * S, 30 * S, 60 * S, 61 * S, 7200 * S, -20 * S, -299 * S, -400 * S]),
        print_=st.sampled_from(PRINTS), payload=st.sampled_from([None, None, None, b"p1"]),
    )  # fmt: skip
    def claim_by_time(
        self,
        name: Name,
        owner: bytes,
        lease: int,
        gap: int,
        lateness: int,
        age: int,
        print_: bytes | None,
        payload: bytes | None,
    ) -> None:
        careful, happened, window = name[1] == "careful", self.last_us - age, gap + lateness
        if not self.last_us:
            return  # the store's time is not known yet
        item = Claim(
            name, owner, lease, window, fingerprint=print_, event_time_us=happened, journal=payload,
            quarantine=careful, sliding=True, apart_us=gap,
        )  # fmt: skip
        answer = self.agree(
            item, "claim", name, owner, lease, window, print_=print_, happened=happened, payload=payload,
            careful=careful, sliding=True, gap=gap,
        )  # fmt: skip
        if isinstance(answer, Granted):
            self.tickets.append(Ticket(name, owner, answer.fence, lease, window, True, happened))

    @precondition(lambda self: self.tickets)
    @rule(
        number=tickets, slip=slips, lease=leases, step=st.sampled_from([None, "s1", "s2", "s3"]), value=values
    )
    def renew(self, number: int, slip: int, lease: int, step: str | None, value: bytes | None) -> None:
        ticket = self.ticket(number)
        note = None if step is None else (step, value)
        fence = ticket.fence + slip
        self.agree(
            Renew(ticket.name, ticket.owner, fence, lease, note),
            "renew",
            ticket.name,
            ticket.owner,
            fence,
            lease,
            note,
        )

    @precondition(lambda self: self.tickets)
    @rule(
        number=tickets,
        slip=slips,
        to=st.sampled_from(["done", "failed"]),
        value=values,
        stranger=st.booleans(),
    )
    def complete(self, number: int, slip: int, to: Any, value: bytes | None, stranger: bool) -> None:
        ticket = self.ticket(number)
        fence = ticket.fence + slip
        owner = OWNERS[0] if stranger else ticket.owner
        item = Settle(
            ticket.name, owner, fence, to, value, ticket.window, ticket.lease, ticket.sliding,
            event_time_us=ticket.moment,
        )  # fmt: skip
        self.agree(
            item, "complete", ticket.name, owner, fence, to, value,
            lease=ticket.lease, window=ticket.window, sliding=ticket.sliding, moment=ticket.moment,
        )  # fmt: skip

    @precondition(lambda self: self.tickets)
    @rule(number=tickets, slip=slips, delay=st.sampled_from([0, 0, 3 * S, 20 * S]), give_back=st.booleans())
    def release(self, number: int, slip: int, delay: int, give_back: bool) -> None:
        ticket = self.ticket(number)
        fence = ticket.fence + slip
        item = Settle(
            ticket.name, ticket.owner, fence, "released", delay_us=delay, count_attempt=not give_back
        )  # fmt: skip
        self.agree(
            item, "release", ticket.name, ticket.owner, fence, delay=delay, give_back=give_back
        )  # fmt: skip

    @precondition(lambda self: self.tickets)
    @rule(number=tickets, slip=slips)
    def quarantine(self, number: int, slip: int) -> None:
        ticket = self.ticket(number)
        fence = ticket.fence + slip
        item = Settle(ticket.name, ticket.owner, fence, "unknown")
        self.agree(item, "quarantine", ticket.name, ticket.owner, fence)

    @rule(name=names, force=st.booleans())
    def forget(self, name: Name, force: bool) -> None:
        self.agree(Forget(name, force), "forget", name, force=force)

    @precondition(lambda self: self.tickets)
    @rule(number=tickets, slip=slips, state=st.sampled_from([None, "claimed", "done", "failed", "unknown"]))
    def forget_that_one(self, number: int, slip: int, state: Any) -> None:
        ticket = self.ticket(number)
        fence = ticket.fence + slip
        item = Forget(ticket.name, force=True, fence=fence, state=state)
        self.agree(item, "forget", ticket.name, force=True, fence=fence, state=state)

    @precondition(lambda self: self.tickets)
    @rule(number=tickets, slip=slips, absent=st.booleans(), value=values, window=windows)
    def resolve(self, number: int, slip: int, absent: bool, value: bytes | None, window: int) -> None:
        ticket = self.ticket(number)
        fence = ticket.fence + slip
        item = Resolve(ticket.name, fence, "absent" if absent else "done", value, window)
        self.agree(item, "resolve", ticket.name, fence, absent=absent, value=value, window=window)

    @rule(
        keys=st.lists(st.sampled_from(MARK_KEYS), unique=True, max_size=4),
        window=windows,
        refresh=st.booleans(),
    )
    def mark(self, keys: list[str], window: int, refresh: bool) -> None:
        refresh = refresh and self.store.capabilities.refreshes and not self.kind.without >= SLOTS
        item = Mark("", "marks", keys, window, refresh)
        self.agree(item, "mark", ("", "marks"), keys, window, refresh=refresh)

    @rule(key=st.sampled_from(MARK_KEYS), gone=st.booleans())
    def look_at_a_mark(self, key: str, gone: bool) -> None:
        name = ("", "marks", key)
        self.agree(Forget(name) if gone else Lookup(name), "forget" if gone else "lookup", name)

    @rule(name=names)
    def lookup(self, name: Name) -> None:
        self.agree(Lookup(name), "lookup", name)

    @rule(us=st.sampled_from([1, S, S, 4 * S, 10 * S, 31 * S, 70 * S, 3700 * S, 13 * 3600 * S]))
    def advance(self, us: int) -> None:
        self.clock.advance(us=us)

    @rule(us=st.sampled_from([1, 2 * S, 100 * S, 7200 * S]))
    def step_back(self, us: int) -> None:
        self.clock.step_back(us=us)

    @rule(limit=st.sampled_from([1, 3, 1000]), dry_run=st.booleans())
    def purge(self, limit: int, dry_run: bool) -> None:
        self.store.send([Purge(limit, dry_run)])

    @rule()
    def reopen(self) -> None:
        if self.kind.lasts:
            # Only writes leave the time behind, and a look without a write may have seen a later one.
            self.store.send([Mark("", "ticks", [str(self.last_us)], 1)])
            self.store.close()
            self.store = self.connect()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.two_clocks], ids=lambda kind: kind.name)
def test_every_answer_is_the_models(kind: Kind) -> None:
    machine = type(f"On_{kind.name}", (StoreAgainstModel,), {"kind": kind})
    chosen = settings.default
    assert chosen is not None
    if kind.needs_service:  # a server takes ten times as long for each step, and more to make partitions
        share = 15 if kind.without >= SLOTS else 5
        chosen = settings(chosen, max_examples=max(10, chosen.max_examples // share))
    run_state_machine_as_test(machine, settings=chosen)


def test_the_model_knows_nothing_of_the_library() -> None:
    text = Path(model.__file__).read_text(encoding="utf-8")
    assert [line for line in text.splitlines() if "import" in line.split()] == ["from typing import Any"]
