"""A runner with a probe, and a runner without its store."""

from typing import Any

import pytest

import semel
from semel import CannotTell, DidNotHappen, Happened, Inquiry
from semel.brokers import Route, Runner, RunnerLimits
from semel.core.commands import Admit, Claim, Item
from semel.stores import MemoryStore
from semel.testing.queue import Queue
from tests.brokers.test_runner import Paid, send, working
from tests.client.clients import Spy, down
from tests.waiting import until

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def queue() -> Queue:
    return Queue(deadline_s=10)


class Bank:
    """Charges, answers the first call too late, and can be asked."""

    def __init__(self, *, charges_first: bool, tells: bool = True) -> None:
        self.charged: list[str] = []
        self.asked: list[Inquiry] = []
        self._breaks = True
        self._charges_first = charges_first
        self._tells = tells

    async def charge(self, paid: Paid) -> None:
        self._charge(paid)

    async def charge_all(self, many: list[Paid]) -> None:
        for paid in many:
            self._charge(paid)

    def _charge(self, paid: Paid) -> None:
        breaks, self._breaks = self._breaks, False
        if not breaks or self._charges_first:
            self.charged.append(paid.order)
        if breaks:
            raise TimeoutError("no answer in time")

    def find(self, inquiry: Inquiry) -> Any:
        self.asked.append(inquiry)
        (paid,) = inquiry.args
        assert isinstance(paid, Paid), "the message as the handler gets it"
        if not self._tells:
            return CannotTell("closed")
        return Happened(None) if paid.order in self.charged else DidNotHappen()


def client(mode: Any, probe: Any) -> semel.AsyncSemel:
    policy = semel.Policy(retry_delay_s=0.02, probe=probe)
    return semel.aopen("memory:", consumer="billing", mode=mode, policy=policy)


@pytest.mark.parametrize("charges_first", [True, False])
@pytest.mark.parametrize("colour", ["def", "async def"])
@pytest.mark.parametrize(("mode", "batch"), [("lease", False), ("lease", True), ("quarantine", False)])
async def test_a_runner_asks_with_the_message_that_the_handler_gets(
    queue: Queue, mode: str, *, batch: bool, colour: str, charges_first: bool
) -> None:
    bank = Bank(charges_first=charges_first)

    async def afind(inquiry: Inquiry) -> Any:
        return bank.find(inquiry)

    once = client(mode, bank.find if colour == "def" else afind)
    route = Route(bank.charge_all if batch else bank.charge, once=once, batch=batch)
    send(queue, "k1")
    await working(Runner(queue.source(), [route]), lambda: until(lambda: len(queue) == 0))
    assert bank.charged == ["k1"]
    assert [(asked.key, asked.args) for asked in bank.asked] == [("k1", (Paid("k1"),))]
    record = await once.records.lookup("k1")
    assert isinstance(record, semel.Record)
    assert record.state == "done"


async def test_what_nobody_can_tell_goes_to_the_dead_letters(queue: Queue) -> None:
    bank = Bank(charges_first=True, tells=False)
    once = client("quarantine", bank.find)
    send(queue, "k1")
    runner = Runner(queue.source(), bank.charge, once=once)
    await working(runner, lambda: until(lambda: len(queue) == 0))
    assert (runner.counts.dead_lettered, bank.charged) == (1, ["k1"])


@pytest.mark.parametrize("at", [Admit, Claim])
async def test_by_choice_a_runner_runs_and_acknowledges_without_its_store(
    queue: Queue, at: type[Item]
) -> None:
    ran: list[str] = []

    async def charge(paid: Paid) -> None:
        ran.append(paid.order)

    spy = Spy(MemoryStore())
    spy.before = down(at)
    once = semel.aopen(spy, consumer="billing", policy=semel.Policy(on_unavailable="run", wait_s=0))
    send(queue, "k1", "k2")
    runner = Runner(queue.source(), charge, once=once)
    await working(runner, lambda: until(lambda: len(queue) == 0))
    assert sorted(ran) == ["k1", "k2"]
    assert (runner.counts.unguarded, runner.counts.acked) == (2, 2)
    await once.close()


async def test_by_default_a_runner_waits_for_its_store(queue: Queue) -> None:
    ran: list[str] = []

    async def charge(paid: Paid) -> None:
        ran.append(paid.order)

    spy = Spy(MemoryStore())
    spy.before = down(Claim)
    once = semel.aopen(spy, consumer="billing", policy=semel.Policy(wait_s=0))
    send(queue, "k1")
    runner = Runner(queue.source(), charge, once=once, pace=RunnerLimits())

    async def scene() -> None:
        await until(lambda: runner.counts.parked >= 1)
        assert (ran, runner.counts.acked) == ([], 0)
        spy.before = lambda _items: None
        await until(lambda: len(queue) == 0)

    await working(runner, scene)
    assert (ran, runner.counts.unguarded) == (["k1"], 0)
    await once.close()
