"""What is nearly right works, or says what to write."""

from datetime import timedelta
from functools import partial, wraps
from typing import Any

import pytest

import semel
from semel import Delivery, Done, Policy
from semel.observe.events import Received
from tests.client.clients import Either, Place

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("duration", ["90s", "1m30s", timedelta(seconds=90), 90, 90.0])
def test_durations(duration: Any) -> None:
    policy = Policy(
        lease_s=duration,
        window_s=duration,
        wait_s=duration,
        lock_wait_s=duration,
        run_max_s=duration,
        retry_delay_s=duration,
    )
    assert (policy.lease_s, policy.window_s, policy.wait_s) == (90, 90, 90)
    assert (policy.lock_wait_s, policy.run_max_s, policy.retry_delay_s) == (90, 90, 90)
    with semel.open("memory:", consumer="billing", window=duration, lease=duration) as once:
        claim = once.claim("a")
        assert isinstance(claim, semel.Claimed)
        assert (claim.claim.window_us, claim.claim.lease_us) == (90_000_000, 90_000_000)
        assert isinstance(once.release(claim, delay_s=duration), semel.Completed)


@pytest.mark.parametrize(
    "wrong",
    [
        {"lease_s": "soon"},
        {"lease_s": True},
        {"wait_s": -1},
        {"wait_s": timedelta(seconds=-1)},
        {"wait_s": [5]},
        {"max_attempts": "3"},
        {"value_bytes_max": 1.5},
        {"permanent": ("ValueError",)},
        {"permanent": KeyboardInterrupt},
        {"fingerprint": b"bytes"},
    ],
    ids=str,
)
def test_a_wrong_setting_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(semel.errors.PolicyInvalid, match=f"Policy.{next(iter(wrong))}"):
        Policy(**wrong)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("lease", "did you mean lease_s?"),
        ("window", "did you mean window_s?"),
        ("ttl", "did you mean window_s?"),
        ("retries", "did you mean max_attempts?"),
        ("keep_values", "did you mean keep_value?"),
        ("mode", "it belongs to open"),
        ("colour", "it takes lease_s, window_s, "),
    ],
)
def test_an_unknown_option_of_a_policy_is_explained(wrong: str, said: str) -> None:
    with pytest.raises(semel.errors.PolicyInvalid) as raised:
        Policy(**{wrong: 1})  # type: ignore[arg-type]
    assert str(raised.value).startswith(f"{wrong} is no option of Policy")
    assert said in str(raised.value)


def test_options_of_a_policy_have_names_and_a_policy_is_no_dict() -> None:
    with pytest.raises(semel.errors.PolicyInvalid, match=r"by name, like Policy\(lease_s=30\)"):
        Policy(30)  # type: ignore[call-arg]
    with pytest.raises(semel.errors.PolicyInvalid, match=r"policy is a dict; write policy=semel\.Policy"):
        semel.open("memory:", consumer="billing", policy={"lease_s": 30})  # type: ignore[arg-type]
    with (
        semel.open("memory:", consumer="billing") as once,
        pytest.raises(semel.errors.PolicyInvalid, match="policy is a dict"),
    ):
        once.using({"lease_s": 30})  # type: ignore[arg-type]


@pytest.mark.parametrize("window", [None, [], True, timedelta(days=-1), "24 hours"])
def test_a_wrong_window_is_refused(window: Any) -> None:
    with pytest.raises(semel.errors.PolicyInvalid):
        semel.open("memory:", consumer="billing", window=window)


@pytest.mark.parametrize("permanent", [ValueError, [ValueError], (ValueError,)])
def test_one_permanent_error_needs_no_tuple(permanent: Any) -> None:
    assert Policy(permanent=permanent).permanent == (ValueError,)


async def test_pairs_are_deliveries(client: Either) -> None:
    pairs: list[Any] = [("a", 1), Delivery(key="b", body=2), ["c", 3]]
    assert await client.run_many(pairs, lambda body: body) == [Done(1), Done(2), Done(3)]
    assert await client.run_many((pair for pair in pairs[:1]), lambda body: body) == [Done(1, replayed=True)]


@pytest.mark.parametrize(
    "wrong", ["ab", {"a": 1}, Delivery(key="a", body=1), ["a"], [(1, 2)], [("a", 1, 2)], [5]]
)
async def test_what_is_no_delivery_is_refused(client: Either, wrong: Any) -> None:
    with pytest.raises(semel.errors.UsageError, match="deliver"):
        await client.run_many(wrong, lambda body: body)


@pytest.mark.parametrize("wrong", ["ab", Delivery(key="a", body=1), [("a", 1)], [5]])
async def test_what_cannot_be_claimed_is_refused(client: Either, wrong: Any) -> None:
    with pytest.raises(semel.errors.UsageError, match="claim_many"):
        await client.claim_many(wrong)


@pytest.mark.parametrize("concurrency", [0, -1])
async def test_no_handler_at_a_time_is_refused(client: Either, concurrency: int) -> None:
    with pytest.raises(semel.errors.UsageError, match="from 1"):
        await client.run_many([("a", 1)], lambda body: body, concurrency=concurrency)


async def test_one_text_is_not_many_marks(place: Place) -> None:
    client = place.open(mode="mark")
    with pytest.raises(semel.errors.UsageError, match="use mark"):
        await client.mark_many("ab")


async def test_a_fingerprint_is_bytes(place: Place) -> None:
    client = place.open(policy=Policy(fingerprint=lambda: "text"))  # type: ignore[arg-type,return-value]
    with pytest.raises(semel.errors.UsageError, match="bytes"):
        await client.run("a", lambda: 1)
    assert place.record("a") is None


# --- event types and metadata ---


async def test_run_and_claim_keep_type_and_metadata(client: Either, place: Place) -> None:
    await client.windows("set", "1h", event_type="payment")
    meta = {"shop": "1"}
    await client.run("run", lambda: 1, event_type="payment", meta=meta)
    await client.claim("claim", event_type="payment", meta=meta)
    await client.run_many([Delivery(key="many", body=1, event_type="payment", meta=meta)], lambda body: body)
    for key in ("run", "claim", "many"):
        record = place.record(key)
        assert record is not None
        assert (record.event_type, record.meta) == ("payment", b'{"shop":"1"}')
    run = place.record("run")
    assert run is not None
    assert run.expires_at_us - run.settled_at_us == 3600 * 10**6


async def test_a_guard_keeps_type_and_metadata(client: Either, place: Place) -> None:
    def charge(order: str) -> int:
        return 1

    for name, meta in (("given", {"order": "a"}), ("made", lambda order: {"order": order})):
        guard = client.inner.guard(key="order", name=name, event_type="payment", meta=meta)
        outcome = guard(client.handler(charge)).call("a")
        assert (outcome if client.sync else await outcome) == Done(1)
        record = place.record(f"{name}::a")
        assert record is not None
        assert (record.event_type, record.meta) == ("payment", b'{"order":"a"}')


@pytest.mark.parametrize("meta", ["text", {"a": 1}, {1: "a"}, 5, {"a": "x" * 5000}])
async def test_metadata_is_text_and_short(client: Either, place: Place, meta: Any) -> None:
    with pytest.raises(semel.errors.UsageError, match="metadata"):
        await client.run("a", lambda: 1, meta=meta)
    assert place.record("a") is None


@pytest.mark.parametrize("hooked", [False, True])
async def test_a_mark_of_a_type_has_its_window(place: Place, hooked: bool) -> None:
    told: list[Any] = []
    client = place.open(mode="mark", hooks=[told.append] if hooked else [])
    await client.windows("set", "off", event_type="noise")
    for _ in range(2):
        assert await client.mark("n", event_type="noise", meta={"shop": "1"})
    assert [await client.mark("a", event_type="payment") for _ in range(2)] == [True, False]
    assert [await client.mark("a"), await client.mark("b")] == [False, True]
    assert await client.mark_many(["b", "c"], event_type="payment") == [False, True]
    if hooked:
        received = [event for event in told if isinstance(event, Received)]
        assert (received[0].event_type, received[0].meta) == ("noise", {"shop": "1"})


async def test_hooks_are_told_type_and_metadata(place: Place) -> None:
    told: list[Any] = []
    client = place.open(hooks=[told.append])
    await client.run("a", lambda: 1, event_type="payment", meta={"shop": "1"})
    await client.claim("b", event_type="payment", meta={"shop": "1"})
    received = [event for event in told if isinstance(event, Received)]
    assert [(event.event_type, event.meta) for event in received] == [("payment", {"shop": "1"})] * 2


# --- options in the wrong place, or under another name ---

LOST_OPTIONS: dict[str, tuple[Any, str]] = {
    "lease_s": (30, r"lease_s belongs to Policy: {verb}\(\.\.\., policy=Policy\(lease_s=30\)\)"),
    "max_attempts": (3, r"max_attempts belongs to Policy: .*Policy\(max_attempts=3\)"),
    "fingerprint": (len, r"fingerprint belongs to Policy: .*Policy\(fingerprint=\.\.\.\)"),
    "ttl": (60, "ttl is no option of {verb}: .*window='24h'"),
    "expire": (60, "expire is no option of {verb}: .*window='24h'"),
    "timeout": (5, "timeout is no option of {verb}: .*lease='30s'.*wait_s.*run_max_s"),
    "retries": (5, "max_attempts"),
    "windows": ("24h", "did you mean window?"),
    "nonsense": (1, "nonsense is no option of {verb}: It takes consumer, hooks"),
}


@pytest.mark.parametrize("name", LOST_OPTIONS)
@pytest.mark.parametrize("verb", ["open", "aopen"])
def test_a_lost_option_of_open_says_where_it_belongs(verb: str, name: str) -> None:
    given, told = LOST_OPTIONS[name]
    with pytest.raises(semel.errors.UsageError, match=told.format(verb=verb)):
        getattr(semel, verb)("memory:", consumer="c", **{name: given})


def test_an_option_without_its_name_says_how_to_write_it() -> None:
    opening: Any = semel.open
    wrong: Any = semel.open("memory:", consumer="c")
    with pytest.raises(semel.errors.UsageError, match=r"by name: open\(consumer='billing'\)"):
        opening("memory:", "billing")
    with pytest.raises(semel.errors.UsageError, match=r"by name: guard\(key='order.id'\)"):
        wrong.guard("order.id")
    with pytest.raises(semel.errors.UsageError, match=r"by name: guard\(key=\.\.\.\)"):
        wrong.guard(test_an_option_without_its_name_says_how_to_write_it)  # as `@once.guard` does


async def test_a_lost_option_of_run_runs_nothing(client: Either, place: Place) -> None:
    def charge(order: int = 0) -> int:
        raise AssertionError("this must not run")

    for name, told in {
        "lease_s": r"lease_s belongs to Policy: once.using\(Policy\(lease_s=5\)\).run\(\.\.\.\) \(.*charge takes no",
        "ttl": "ttl is no option of run: .*window='24h'",
        "window": r"window belongs to open: semel.open\(\.\.\., window=5\)",
    }.items():
        with pytest.raises(semel.errors.UsageError, match=told):
            await client.run("a", charge, **{name: 5})
    assert place.record("a") is None


async def test_an_argument_of_the_function_is_not_an_option(client: Either) -> None:
    def wait(timeout: int) -> int:
        return timeout

    def take(**anything: int) -> int:
        return anything["ttl"]

    assert await client.run("a", wait, timeout=5) == Done(5)
    assert await client.run("b", take, ttl=6) == Done(6)


async def test_a_lost_option_of_guard_says_where_it_belongs(client: Either) -> None:
    with pytest.raises(semel.errors.UsageError, match=r"guard\(\.\.\., policy=Policy\(lease_s=5\)\)"):
        client.inner.guard(key="order", lease_s=5)
    with pytest.raises(semel.errors.UsageError, match=r"semel.open\(\.\.\., window='1h'\)"):
        client.inner.guard(key="order", window="1h")


class Till:
    def charge(self, order: int, cents: int = 0) -> int:
        raise AssertionError("this must not run")

    async def acharge(self, order: int, cents: int = 0) -> int:
        raise AssertionError("this must not run")


def _passing_on(fn: Any) -> Any:
    @wraps(fn)
    def passing_on(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    return passing_on


MISTYPED = {
    "event_typ": "charge takes no event_typ: did you mean event_type= of run",
    "fingerprnt": r"did you mean fingerprint\? fingerprint belongs to Policy: once.using\(Policy\(fingerprint=5\)\)",
    "cent": r"charge takes no cent: did you mean cents\?",
    "zzz": "charge takes no zzz: it takes order, cents",
}


@pytest.mark.parametrize("name", MISTYPED)
async def test_a_mistyped_keyword_of_run_costs_no_attempt(name: str) -> None:
    till: Any = Till()
    with semel.open("memory:", consumer="c") as once:
        handlers: list[Any] = [till.charge, partial(till.charge), Till.charge]
        for fn in handlers:
            with pytest.raises(semel.errors.UsageError, match=MISTYPED[name]):
                once.run("a", fn, 1, **{name: 5})
        assert once.records.lookup("a") is None
    async with semel.aopen("memory:", consumer="c") as aonce:
        with pytest.raises(semel.errors.UsageError, match=MISTYPED[name]):
            await aonce.run("a", till.acharge, 1, **{name: 5})
        assert await aonce.records.lookup("a") is None


def test_a_mistyped_option_of_run_is_found_behind_a_decorator_which_may_take_other_keywords() -> None:
    charge: Any = _passing_on(Till.charge)
    with semel.open("memory:", consumer="c") as once:
        for fn in (charge, partial(charge)):
            for name in ("event_typ", "fingerprnt", "ttl"):
                with pytest.raises(semel.errors.UsageError, match=f"charge takes no {name}"):
                    once.run("a", fn, Till(), 1, **{name: 5})
        assert once.records.lookup("a") is None
        assert isinstance(
            once.run("a", charge, Till(), 1, zzz=5), semel.Errored
        )  # the decorator may have taken it


def test_a_mistyped_keyword_of_a_guarded_function_costs_no_attempt() -> None:
    with semel.open("memory:", consumer="c") as once:

        @once.guard(key=lambda order, **_: order, name="charge")
        def charge(order: str, cents: int = 0) -> int:
            return cents

        wrong: Any = charge
        with pytest.raises(semel.errors.UsageError, match=r"charge takes no cent: did you mean cents\?"):
            wrong("a", cent=5)
        assert once.records.lookup(charge.key("a")) is None
        assert charge("a", cents=5) == 5
