"""`Policy(probe=...)`: the other system is asked before a handler runs again, and before a person is."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import semel
from semel import CannotTell, Delivery, DidNotHappen, Done, Errored, Failed, Happened, Inquiry, Unknown
from semel.core.commands import Lookup, Resolve
from semel.core.ids import idempotency_key
from semel.types import Unavailable
from tests.client.clients import Either, Place, down, in_thread, only_async, only_sync

pytestmark = pytest.mark.anyio

MODES = ("lease", "quarantine")


class Charges:
    """A system that counts what was charged, and can be asked."""

    def __init__(self, answer: Any = None) -> None:
        self.charged: list[str] = []
        self.asked: list[Inquiry] = []
        self.answer = answer

    def charge(self, order: str) -> str:
        self.charged.append(order)
        return f"receipt of {order}"

    def charge_and_break(self, order: str) -> str:
        self.charge(order)
        raise TimeoutError("no answer in time")

    def break_before(self, order: str) -> str:
        raise TimeoutError(f"{order} was not sent")

    def charge_and_die(self, order: str) -> str:
        self.charge(order)
        raise SystemExit(9)

    def die_before(self, _order: str) -> str:
        raise SystemExit(9)

    def probe(self, inquiry: Inquiry) -> Any:
        self.asked.append(inquiry)
        if isinstance(self.answer, BaseException):
            raise self.answer
        if self.answer is not None:
            return self.answer
        (order,) = inquiry.args
        return Happened(f"receipt of {order}") if order in self.charged else DidNotHappen()

    async def aprobe(self, inquiry: Inquiry) -> Any:
        await asyncio.sleep(0)
        return self.probe(inquiry)


def client_of(place: Place, mode: Any, probe: Any, **policy: Any) -> Either:
    return place.open(mode=mode, policy=semel.Policy(probe=probe, wait_s=0, **policy))


async def dies(run: Any) -> None:
    """The attempt ends with its process, and says nothing."""
    try:
        await run
    except SystemExit:
        return
    pytest.fail("it went on")


@pytest.mark.parametrize("mode", MODES)
async def test_what_happened_is_not_run_again(place: Place, mode: str) -> None:
    charges = Charges()
    client = client_of(place, mode, charges.probe)
    await dies(client.run("k", charges.charge_and_die, "o1"))
    assert await client.run("k", charges.charge, "o1") == Done("receipt of o1")
    assert charges.charged == ["o1"]
    assert await client.run("k", charges.charge, "o1") == Done("receipt of o1", replayed=True)
    (asked,) = charges.asked
    assert (asked.tenant, asked.consumer, asked.key) == place.record("k").id  # type: ignore[union-attr]
    assert asked.idempotency_key == idempotency_key(place.record("k").id)  # type: ignore[union-attr]
    assert asked.attempt == (2 if mode == "lease" else 1)
    assert asked.args == ("o1",)
    assert asked.first_seen_us == place.record("k").first_seen_us  # type: ignore[union-attr]
    assert client.kept == {}


@pytest.mark.parametrize("mode", MODES)
async def test_what_did_not_happen_runs_with_the_next_attempt(place: Place, mode: str) -> None:
    charges = Charges()
    client = client_of(place, mode, charges.probe)
    await dies(client.run("k", charges.die_before, "o1"))

    def handler(order: str) -> tuple[str, int]:
        return charges.charge(order), semel.current().attempt

    assert await client.run("k", handler, "o1") == Done(("receipt of o1", 2))
    assert (charges.charged, len(charges.asked)) == (["o1"], 1)


@pytest.mark.parametrize("mode", MODES)
async def test_a_first_attempt_asks_nobody(place: Place, mode: str) -> None:
    charges = Charges()
    client = client_of(place, mode, charges.probe)
    assert await client.run("k", charges.charge, "o1") == Done("receipt of o1")
    assert await client.run("k", charges.charge, "o1") == Done("receipt of o1", replayed=True)
    assert charges.asked == []


@pytest.mark.parametrize(
    "answer",
    [CannotTell("the bank is closed"), ConnectionError("no line"), "yes", None.__class__],
    ids=["cannot tell", "raises", "a wrong answer", "a class"],
)
async def test_lease_runs_again_where_nobody_can_tell(place: Place, answer: Any) -> None:
    charges = Charges(answer)
    client = client_of(place, "lease", charges.probe)
    await dies(client.run("k", charges.charge_and_die, "o1"))
    assert await client.run("k", charges.charge, "o1") == Done("receipt of o1")
    assert (charges.charged, len(charges.asked)) == (["o1", "o1"], 1)


@pytest.mark.parametrize("answer", [CannotTell(), ConnectionError("no line"), 1], ids=repr)
async def test_quarantine_stays_unknown_where_nobody_can_tell(place: Place, answer: Any) -> None:
    charges = Charges(answer)
    client = client_of(place, "quarantine", charges.probe)
    await dies(client.run("k", charges.charge_and_die, "o1"))
    unknown = Unknown(place.record("k").settled_at_us)  # type: ignore[union-attr]
    assert await client.run("k", charges.charge, "o1") == unknown
    assert place.record("k").state == "unknown"  # type: ignore[union-attr]
    charges.answer = None  # the next delivery asks again
    assert await client.run("k", charges.charge, "o1") == Done("receipt of o1")
    assert (charges.charged, len(charges.asked)) == (["o1"], 2)


async def test_a_probe_that_fails_is_reported(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    charges = Charges(ConnectionError("no line"))
    client = client_of(place, "lease", charges.probe)
    await dies(client.run("k", charges.die_before, "o1"))
    await client.run("k", charges.charge, "o1")
    assert (
        "the probe of consumer 'billing' could not tell: the probe raised ConnectionError('no line')"
        in caplog.text
    )
    charges.answer = "yes"
    await dies(client.run("l", charges.die_before, "o1"))
    await client.run("l", charges.charge, "o1")
    assert "it must return Happened(value), DidNotHappen() or CannotTell()" in caplog.text


@pytest.mark.parametrize("mode", MODES)
async def test_an_answer_by_choice_is_not_reported(
    place: Place, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    charges = Charges(CannotTell("closed"))
    client = client_of(place, mode, charges.probe)
    await dies(client.run("k", charges.die_before, "o1"))
    await client.run("k", charges.charge, "o1")
    assert len(charges.asked) == 1
    assert caplog.text == ""


@only_async
@pytest.mark.parametrize("mode", MODES)
async def test_an_async_probe_is_awaited(place: Place, mode: str) -> None:
    charges = Charges()
    client = client_of(place, mode, charges.aprobe)
    await dies(client.run("k", charges.charge_and_die, "o1"))
    assert await client.run("k", charges.charge, "o1") == Done("receipt of o1")
    assert charges.charged == ["o1"]


@only_async
async def test_a_probe_that_blocks_does_not_block_the_loop(place: Place) -> None:
    loop = asyncio.get_running_loop()
    went_on: asyncio.Future[None] = loop.create_future()

    def probe(_inquiry: Inquiry) -> Any:
        asyncio.run_coroutine_threadsafe(note(), loop).result(10)
        return Happened("found")

    async def note() -> None:
        went_on.set_result(None)

    client = client_of(place, "lease", probe)
    await dies(client.run("k", Charges().die_before, "o1"))
    assert await client.run("k", Charges().charge, "o1") == Done("found")
    assert went_on.done()


@only_sync
async def test_a_sync_client_refuses_an_async_probe_before_anything_is_claimed(place: Place) -> None:
    charges = Charges()
    client = client_of(place, "lease", charges.aprobe)
    calls: list[Callable[[], Any]] = [
        lambda: client.run("k", charges.charge, "o1"),
        lambda: client.run_many([Delivery(key="k", body="o1")], charges.charge),
        lambda: client.sweep(charges.charge),
    ]
    for call in calls:
        with pytest.raises(semel.errors.UsageError, match="async def"):
            await call()
    assert place.record("k") is None
    assert charges.charged == []


@pytest.mark.parametrize("mode", MODES)
async def test_in_a_batch_each_is_asked_about_alone(place: Place, mode: str) -> None:
    charges = Charges()
    client = client_of(place, mode, charges.probe)
    given = [Delivery(key=f"k{at}", body=f"o{at}") for at in range(4)]
    await dies(client.run("k0", charges.charge_and_die, "o0"))
    await dies(client.run("k1", charges.charge_and_die, "o1"))
    await dies(client.run("k2", charges.die_before, "o2"))
    assert await client.run_many(given, charges.charge) == [Done(f"receipt of o{at}") for at in range(4)]
    assert sorted(charges.charged) == ["o0", "o1", "o2", "o3"]
    assert sorted(asked.key for asked in charges.asked) == ["k0", "k1", "k2"]


@pytest.mark.parametrize("mode", MODES)
async def test_a_guarded_function_is_asked_about_with_its_arguments(place: Place, mode: str) -> None:
    charges = Charges()
    client = client_of(place, mode, charges.probe)

    def charge(order: str, *, well: bool) -> str:
        return charges.charge(order) if well else charges.charge_and_die(order)

    guarded = client.inner.guard(key=lambda order, **_: order)(client.handler(charge))

    async def call(*args: Any, **kwargs: Any) -> Any:
        return await (in_thread(guarded, *args, **kwargs) if client.sync else guarded(*args, **kwargs))

    await dies(call("o1", well=False))
    assert await call("o1", well=True) == "receipt of o1"
    (asked,) = charges.asked
    assert (asked.args, asked.kwargs) == (("o1",), {"well": True})
    assert charges.charged == ["o1"]


async def test_a_handler_that_raises_in_quarantine_is_asked_about_at_once(place: Place) -> None:
    charges = Charges()
    client = client_of(place, "quarantine", charges.probe, retry_delay_s=0.001)
    assert await client.run("k", charges.charge_and_break, "o1") == Done("receipt of o1")
    assert place.record("k").state == "done"  # type: ignore[union-attr]
    late = await client.run("l", charges.break_before, "o2")
    assert isinstance(late, Errored)
    assert (late.attempt, late.retry_after_s) == (1, 0.001)
    charges.answer = CannotTell()
    outcome = await client.run("m", charges.charge_and_break, "o3")
    assert isinstance(outcome, Unknown)
    assert isinstance(outcome.error, TimeoutError)
    assert [asked.attempt for asked in charges.asked] == [1, 1, 1]
    assert charges.charged == ["o1", "o3"]
    assert client.kept == {}


async def test_in_lease_a_handler_that_raises_is_asked_about_by_the_next_attempt(place: Place) -> None:
    charges = Charges()
    client = client_of(place, "lease", charges.probe)
    assert isinstance(await client.run("k", charges.charge_and_break, "o1"), Errored)
    assert charges.asked == []
    assert await client.run("k", charges.charge, "o1") == Done("receipt of o1")
    assert charges.charged == ["o1"]


async def test_the_last_attempt_is_asked_about_before_it_is_given_up(place: Place) -> None:
    charges = Charges()
    client = client_of(place, "lease", charges.probe, max_attempts=2)
    await dies(client.run("k", charges.die_before, "o1"))
    await dies(client.run("k", charges.charge_and_die, "o1"))
    assert await client.run("k", charges.charge, "o1") == Done("receipt of o1")
    assert charges.charged == ["o1"]


@pytest.mark.parametrize("answer", [DidNotHappen(), CannotTell()], ids=repr)
async def test_attempts_end_although_a_probe_is_asked(place: Place, answer: Any) -> None:
    charges = Charges(answer)
    client = client_of(place, "lease", charges.probe, max_attempts=2)
    await dies(client.run("k", charges.die_before, "o1"))
    await dies(client.run("k", charges.die_before, "o1"))
    outcome = await client.run("k", charges.charge, "o1")
    assert isinstance(outcome, Failed)
    assert isinstance(outcome.error, semel.errors.AttemptsExhausted)
    assert charges.charged == []


async def test_in_quarantine_attempts_are_counted_through_the_probe(place: Place) -> None:
    charges = Charges()
    client = client_of(place, "quarantine", charges.probe, max_attempts=2)
    for _ in range(2):
        await dies(client.run("k", charges.die_before, "o1"))
    outcome = await client.run("k", charges.charge, "o1")
    assert isinstance(outcome, Failed)
    assert isinstance(outcome.error, semel.errors.AttemptsExhausted)
    assert charges.charged == []


async def test_steps_noted_in_quarantine_are_not_repeated(place: Place) -> None:
    sent: list[str] = []

    def handler(well: bool) -> str:
        semel.step("mail", sent.append, "mail")
        if not well:
            raise TimeoutError("before the charge")
        return "done"

    async def ahandler(well: bool) -> str:
        async def send(what: str) -> None:
            sent.append(what)

        await semel.step("mail", send, "mail")
        if not well:
            raise TimeoutError("before the charge")
        return "done"

    charges = Charges(DidNotHappen())
    client = client_of(place, "quarantine", charges.probe)
    await client.run("k", handler if client.sync else ahandler, False)
    assert await client.run("k", handler if client.sync else ahandler, True) == Done("done")
    assert sent == ["mail"]
    assert charges.asked[0].steps == ("mail",)


async def test_a_value_that_cannot_be_kept_is_given_to_the_caller(place: Place) -> None:
    value = object()
    client = client_of(place, "quarantine", lambda _inquiry: Happened(value))
    await dies(client.run("k", Charges().die_before, "o1"))
    with pytest.warns(RuntimeWarning, match="is not kept"):
        outcome = await client.run("k", Charges().charge, "o1")
    assert isinstance(outcome, Done)
    assert (outcome.value, outcome.kept, outcome.recorded) == (value, False, True)
    assert "cannot be stored" in outcome.reason


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)], ids=repr)
async def test_an_interrupt_of_the_probe_goes_on_its_way(
    place: Place, mode: str, error: BaseException
) -> None:
    charges = Charges()
    client = client_of(place, mode, charges.probe)
    await dies(client.run("k", charges.charge_and_die, "o1"))
    charges.answer = error
    caught: list[BaseException] = []
    try:
        await client.run("k", charges.charge, "o1")
    except BaseException as raised:  # noqa: BLE001 - a loop would be ended by it
        caught.append(raised)
    assert [type(each) for each in caught] == [type(error)]
    assert client.kept == {}
    charges.answer = None
    assert await client.run("k", charges.charge, "o1") == Done("receipt of o1")
    assert charges.charged == ["o1"]


async def test_a_handler_that_was_interrupted_is_asked_about(place: Place) -> None:
    charges = Charges()
    client = client_of(place, "lease", charges.probe)

    def interrupted(order: str) -> str:
        charges.charge(order)
        raise KeyboardInterrupt

    caught = []
    try:
        await client.run("k", interrupted, "o1")
    except BaseException as raised:  # noqa: BLE001 - a loop would be ended by it
        caught.append(type(raised))
    assert caught == [KeyboardInterrupt]
    assert await client.run("k", charges.charge, "o1") == Done("receipt of o1")
    assert charges.charged == ["o1"]


async def test_of_two_who_ask_at_once_one_decides(place: Place) -> None:
    """While one asks, another has asked, run and finished: the first takes what came of it."""
    charges = Charges()
    other = client_of(place, "quarantine", charges.probe)
    answers: list[Any] = []

    async def meanwhile() -> None:
        answers.append(await other.run("k", charges.charge, "o1"))

    loop = asyncio.get_running_loop()

    def slow_probe(_inquiry: Inquiry) -> Any:
        asyncio.run_coroutine_threadsafe(meanwhile(), loop).result(10)
        return DidNotHappen()

    client = client_of(place, "quarantine", slow_probe)
    await dies(client.run("k", charges.die_before, "o1"))
    assert await client.run("k", charges.charge, "o1") == Done("receipt of o1", replayed=True)
    assert answers == [Done("receipt of o1")]
    assert charges.charged == ["o1"]


async def test_another_event_of_the_same_content_is_not_asked_about(place: Place) -> None:
    from tests.client.test_event_time import BY_TIME, event

    charges = Charges(Happened("wrong"))
    client = client_of(place, "quarantine", charges.probe)
    first, later = (BY_TIME.delivery(event(minutes)) for minutes in (0, 6))
    await dies(client.run_many([first], charges.die_before))
    assert isinstance((await client.run_many([later], charges.charge))[0], Unknown)
    assert charges.asked == []


async def test_without_an_answer_of_the_store_nothing_is_asked(place: Place) -> None:
    charges = Charges()
    client = client_of(place, "quarantine", charges.probe)
    await dies(client.run("k", charges.charge_and_die, "o1"))
    place.spy.before = down(Lookup)
    assert isinstance(await client.run("k", charges.charge, "o1"), Unavailable)
    assert charges.asked == []


@pytest.mark.parametrize("happened", [True, False])
async def test_an_answer_that_the_store_does_not_hear_is_not_acknowledged(
    place: Place,
    happened: bool,
) -> None:
    charges = Charges()
    client = client_of(place, "quarantine", charges.probe)
    await dies(client.run("k", charges.charge_and_die if happened else charges.die_before, "o1"))
    place.spy.before = down(Resolve)
    outcome = await client.run("k", charges.charge, "o1")
    if happened:
        assert outcome == Done("receipt of o1", recorded=False)
    else:
        assert isinstance(outcome, Unavailable)
    assert place.record("k").state == "unknown"  # type: ignore[union-attr]
    place.spy.before = lambda _items: None
    assert await client.run("k", charges.charge, "o1") == Done("receipt of o1")
    assert charges.charged == ["o1"]


@pytest.mark.parametrize("mode", ["inbox", "mark", "transaction"])
def test_a_mode_without_unknown_outcomes_refuses_a_probe(mode: Any) -> None:
    with pytest.raises(semel.errors.PolicyInvalid, match="lease or quarantine"):
        semel.open("sqlite:///unused.db", consumer="c", mode=mode, policy=semel.Policy(probe=Charges().probe))


def test_a_probe_must_be_callable() -> None:
    with pytest.raises(semel.errors.PolicyInvalid, match="Inquiry"):
        semel.Policy(probe=Happened(1))  # type: ignore[arg-type]
