"""`Policy(on_unavailable=...)`: refuse while the store cannot be reached, or run without a claim, by choice."""

from typing import Any

import pytest

import semel
from semel import Delivery, Done, Errored, Unavailable
from semel.core.commands import Admit, Claim, Item, Mark, ReadSettings, Settle
from semel.observe import events
from tests.client.clients import Either, Place, down, in_thread, only_sqlite

pytestmark = pytest.mark.anyio

RUN = semel.Policy(on_unavailable="run", wait_s=0)
UNGUARDED: Any = {"kept": False, "recorded": False, "guarded": False}


@pytest.fixture(params=["first use", "claim"])
def away(request: pytest.FixtureRequest, place: Place) -> Any:
    """A client whose store is away: before it was ever opened, or from some moment on."""

    async def client(**options: Any) -> Either:
        made = place.open(**{"policy": RUN, **options})
        if request.param == "claim":
            await made.run("warm", lambda: None)
            place.spy.before = down(Mark if options.get("mode") == "mark" else Claim)
        else:
            place.spy.before = down(Admit)
        return made

    return client


@pytest.mark.parametrize("mode", ["lease", "quarantine", "mark"])
async def test_by_choice_the_handler_runs_without_a_claim(away: Any, place: Place, mode: Any) -> None:
    client = await away(mode=mode)
    ran: list[str] = []

    def handler(body: str) -> str:
        ran.append(body)
        return semel.current().key

    assert await client.run("k", handler, "a") == Done("k", **UNGUARDED)
    assert await client.run("k", handler, "b") == Done("k", **UNGUARDED), "nothing knows the first one"
    assert ran == ["a", "b"]
    assert client.kept == {}
    place.spy.before = lambda _items: None
    assert await client.run("k", handler, "c") == Done("k", kept=mode != "mark")


async def test_by_default_it_is_refused(place: Place) -> None:
    client = place.open(policy=semel.Policy(wait_s=0))
    place.spy.before = down(Admit)
    with pytest.raises(semel.errors.StoreUnavailable):
        await client.run("k", lambda: pytest.fail("it ran"))
    place.spy.before = lambda _items: None
    await client.run("warm", lambda: None)
    place.spy.before = down(Claim)
    assert isinstance(await client.run("k", lambda: pytest.fail("it ran")), Unavailable)


async def test_an_error_of_the_handler_is_an_outcome(away: Any) -> None:
    client = await away()
    error = ValueError("no")

    def handler() -> None:
        raise error

    assert await client.run("k", handler) == Errored(error, 1)


async def test_a_batch_runs_without_claims_too(away: Any) -> None:
    client = await away()
    ran: list[int] = []
    given = [Delivery(key=f"k{at % 2}", body=at) for at in range(3)]

    def handler(body: int) -> int:
        ran.append(body)
        return body

    first, second, copy = await client.run_many(given, handler)
    assert (first, second) == (Done(0, **UNGUARDED), Done(1, **UNGUARDED))
    assert copy == Done(0, replayed=True, **UNGUARDED)
    assert sorted(ran) == [0, 1]


async def test_a_guarded_function_returns_its_value(away: Any) -> None:
    client = await away()
    guarded = client.inner.guard(key="order")(client.handler(charge))
    value = await (in_thread(guarded, "o1") if client.sync else guarded("o1"))
    assert value == "receipt of o1"


def charge(order: str) -> str:
    return f"receipt of {order}"


async def test_the_store_is_tried_for_as_long_as_a_duplicate_would_wait(place: Place) -> None:
    client = place.open(policy=semel.Policy(on_unavailable="run", wait_s=10))
    await client.run("warm", lambda: None)
    left = [3]

    def strike(items: list[Item]) -> None:
        if left[0] and any(isinstance(item, Claim) for item in items):
            left[0] -= 1
            raise semel.errors.StoreUnavailable("out of reach")

    place.spy.before = strike
    assert await client.run("k", lambda: 1) == Done(1)


async def test_a_store_that_vanishes_after_the_claim_is_as_ever(place: Place) -> None:
    """The effect is there and not recorded: that is no choice, and a source must send the event again."""
    client = place.open(policy=RUN, lease="200ms")  # so long is the completion tried
    await client.run("warm", lambda: None)
    place.spy.before = down(Settle)
    assert await client.run("k", lambda: 1) == Done(1, recorded=False, guarded=True)


async def test_a_known_key_is_answered_from_the_store(place: Place) -> None:
    client = place.open(policy=RUN)
    await client.run("k", lambda: 1)
    assert await client.run("k", lambda: 2) == Done(1, replayed=True)


async def test_a_closed_client_and_a_wrong_mode_are_no_outages(place: Place) -> None:
    client = place.open(policy=RUN)
    await client.run("k", lambda: 1)
    with pytest.raises(semel.errors.ModeMismatch):
        await place.open(policy=RUN, mode="quarantine").run("k", lambda: pytest.fail("it ran"))
    await client.close()
    with pytest.raises(semel.errors.StoreClosed):
        await client.run("k", lambda: pytest.fail("it ran"))


@only_sqlite
async def test_a_record_that_does_not_read_is_no_outage(place: Place) -> None:
    """There is an answer, and it says that the key was used."""
    import sqlite3

    client = place.open(policy=RUN)
    await client.run("k", lambda: 1)
    await client.close()
    with sqlite3.connect(place.path) as connection:
        connection.execute("UPDATE semel_records SET value = x'7a00'")
    connection.close()
    again = place.open(store=place.elsewhere(), policy=RUN)
    with pytest.raises(semel.errors.RecordCorrupt):
        await again.run("k", lambda: pytest.fail("it ran"))
    again.inner.store.close()


async def test_verbs_that_only_ask_the_store_raise_as_ever(place: Place) -> None:
    client = place.open(policy=RUN)
    place.spy.before = down(ReadSettings)
    with pytest.raises(semel.errors.StoreUnavailable):
        await client.claim("k")
    with pytest.raises(semel.errors.StoreUnavailable):
        await client.sweep(lambda _payload: pytest.fail("it ran"))


async def test_it_is_counted_and_logged(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    from prometheus_client import CollectorRegistry

    from semel.observe.logging import LogHook
    from semel.observe.prometheus import PrometheusHook

    seen: list[events.HookEvent] = []
    registry = CollectorRegistry()
    client = place.open(policy=RUN, hooks=[seen.append, LogHook(), PrometheusHook(registry)])
    place.spy.before = down(Admit)
    await client.run("k", charge, "o1")
    assert [each.name for each in seen if isinstance(each, events.DeliveryEvent)] == [
        "received",
        "began",
        "ended",
        "unguarded",
    ]
    handler = f"{__name__}.charge"
    labels = {"consumer": "billing", "handler": handler, "event_type": "", "source": ""}
    assert registry.get_sample_value("semel_events_unguarded_total", labels) == 1
    assert registry.get_sample_value("semel_events_processed_total", labels) is None
    logged = [record for record in caplog.records if record.getMessage().startswith("unguarded")]
    assert [record.levelname for record in logged] == ["ERROR"]


@pytest.mark.parametrize("mode", ["inbox", "transaction"])
def test_where_mark_and_effect_commit_together_it_is_refused(mode: Any) -> None:
    with pytest.raises(semel.errors.PolicyInvalid, match="commit together"):
        semel.open("sqlite:///unused.db", consumer="c", mode=mode, policy=RUN)


def test_the_choice_has_two_words() -> None:
    with pytest.raises(semel.errors.PolicyInvalid, match="refuse or run"):
        semel.Policy(on_unavailable="ignore")  # type: ignore[arg-type]


async def test_a_permanent_error_is_not_stored_anywhere(away: Any) -> None:
    client = await away(policy=semel.Policy(on_unavailable="run", wait_s=0, permanent=(LookupError,)))

    def handler() -> None:
        raise LookupError("no such account")

    assert isinstance(await client.run("k", handler), Errored)


@pytest.mark.parametrize(
    "url", ["redis://127.0.0.1:1/0", "postgresql://127.0.0.1:1/app", "http://127.0.0.1:1"]
)
async def test_a_server_that_is_not_there_is_an_outage(url: str) -> None:
    once = semel.open(url, consumer="c", policy=RUN)
    aonce = semel.aopen(url, consumer="c", policy=RUN)

    async def acharge(order: str) -> str:
        return charge(order)

    assert await in_thread(once.run, "k", charge, "o1") == Done("receipt of o1", **UNGUARDED)
    assert await aonce.run("k", acharge, "o1") == Done("receipt of o1", **UNGUARDED)
    once.close()
    await aonce.close()
