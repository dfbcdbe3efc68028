"""What one tenant costs is bounded: its values, its answers, its counts and scans, what it makes the store keep."""

import asyncio
import base64
import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import pytest
from msgspec.msgpack import Ext
from msgspec.structs import replace

import semel
from semel.codec import encode
from semel.core.commands import Admit, Answer, Claim, Count, Item, Lookup, Renew, Settle
from semel.errors import RecordCorrupt, StoreRefused
from semel.ingest.intake import Event
from semel.observe import formatting
from semel.observe.events import Hooks
from semel.observe.formatting import readable
from semel.observe.packed_limits import HASHED_MAX, check_packed
from semel.runtime.channel import Coalescer, Direct, LoopCoalescer
from semel.runtime.process import new_owner
from semel.server.auth import Caller
from semel.server.dashboard.auth import COOKIE
from semel.server.growth import RENEWED_MAX, RenewalLimit
from semel.server.limits import PAYER, Costs, LiveClaims
from semel.server.problems import HttpProblem
from semel.server.routes.health import READY_LIVE_S, Readiness
from semel.server.service import Service
from semel.server.settings import Limits, ServeSettings
from semel.server.slow_lane import SlowLane
from semel.stores.http.store import HttpStore
from semel.stores.memory.store import MemoryStore
from semel.stores.sqlite import SqliteStore
from semel.testing import ManualClock
from semel.types import Busy, Lost, Record, Renewed, Unavailable
from tests.server.tools import Running, serving, session_of, token_for
from tests.waiting import await_true, until

DAY_US = 86400 * 10**6
S = TypeVar("S", bound=SqliteStore | HttpStore)
pack = msgspec.msgpack.encode


def url(folder: Path) -> str:
    return f"sqlite:///{folder}/semel.db?synchronous=normal"


def opened(store: S) -> S:
    """The same, ready."""
    store.open()
    return store


def keep(store: Any, key: str, value: bytes, consumer: str = "billing") -> None:
    """A finished record."""
    owner, place = new_owner(), ("", consumer, key)
    (granted,) = store.send((Claim(place, owner, 30_000_000, DAY_US),))
    store.send((Settle(place, owner, granted.fence, "done", value, DAY_US, 30_000_000),))


# --- decoding ---


@pytest.mark.parametrize(
    "value",
    [
        {1, 2},
        {1: "a"},
        {"a": [1, (2, 3)]},
        10**30,
        b"x" * 300,
        "x" * 70_000,
        list(range(500)),
        1.5,
        {"é": None},
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_the_codec_writes_is_shown(value: Any) -> None:
    packed = encode((value,))
    check_packed(packed[1:])
    assert readable(packed) == (repr((value,)), "repr")


def test_values_that_would_take_long_to_decode_are_not_decoded() -> None:
    many = list(range(HASHED_MAX + 1))
    for packed in (
        pack({1: 2}),
        pack({None: 2}),
        pack(Ext(2, pack(many))),
        pack([Ext(3, pack(many[:600])), Ext(11, pack([[at, at] for at in range(600)]))]),
        b"\x91" * 200 + b"\xc0",
        pack([None] * 200_000),
        b"\xdd\xff\xff\xff\xff",
        b"\xc1",
        b"\xde",
        b"",
    ):
        with pytest.raises(RecordCorrupt):
            check_packed(packed)
        assert readable(b"m" + packed)[1] == "undecodable"


def test_what_may_collide_is_bounded_before_anything_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """To hash numbers that collide costs the square of their number: a value may have a thousand of them, together."""
    decoded: list[bytes] = []
    monkeypatch.setattr(formatting, "decode", decoded.append)
    colliding = [Ext(10, pack([hex(at * (2**61 - 1))])) for at in range(1, 1002)]
    sets = [Ext(2, pack(colliding[at : at + 100])) for at in range(0, 1000, 100)]
    for value in (
        Ext(2, pack(colliding)),
        Ext(3, pack(colliding)),
        Ext(11, pack([[each, None] for each in colliding])),
        [*sets, Ext(2, pack(colliding[:1]))],
        Ext(11, pack([[Ext(3, pack(colliding[:500])), None], [Ext(3, pack(colliding[500:])), None]])),
    ):
        assert readable(b"m" + pack(value))[1] == "undecodable"
    assert decoded == []
    readable(b"m" + pack(Ext(2, pack(colliding[:1000]))))
    readable(b"m" + pack(sets))
    assert len(decoded) == 2


@pytest.mark.parametrize("state", ["done", "failed"])
def test_numbers_that_collide_do_not_stop_the_service(
    tmp_path: Path, state: Literal["done", "failed"]
) -> None:
    """A value with as many colliding keys as fit: decoding it took the whole interpreter half a minute."""
    colliding = [at * (2**61 - 1) for at in range(1, 9000)]
    assert {hash(number) for number in colliding} == {0}
    members = [Ext(10, pack([hex(number)])) for number in colliding]
    with serving(ServeSettings(auth="none", store=url(tmp_path), port=0)) as running:
        place, owner = ["", "billing", "k"], base64.b64encode(bytes(range(16))).decode()
        claim = {"type": "claim", "id": place, "owner": owner, "lease_us": 10**7, "window_us": 10**9}
        granted = running.post("/v1/items", [claim]).json()[0]["granted"]
        value = base64.b64encode(b"m" + pack(Ext(2, pack(members)))).decode()
        settle = {"type": "settle", "to": state, "fence": granted["fence"], "value": value}
        began = time.monotonic()
        running.post("/v1/items", [{**claim, **settle}]).raise_for_status()
        claims = {"consumer": "billing", "claims": [{"key": "k"}] * 28}
        assert len(json.dumps(claims)) < 452
        outcomes = running.post("/v1/claims", claims).json()["outcomes"]
        assert {each["outcome"] for each in outcomes} == {state}
        shown = running.client.get("/v1/records/billing/k").json()
        if state == "done":
            assert "too many to show" in outcomes[0]["value"]
            assert shown["value_form"] == "undecodable"
        else:
            assert outcomes[0]["error"]["kind"] == shown["error"]["kind"] == "undecodable"
        assert time.monotonic() - began < 10


@pytest.mark.parametrize("ask", ["claims", "records", "dashboard"])
def test_the_time_of_decoding_is_charged_to_the_tenant_like_the_stores(tmp_path: Path, ask: str) -> None:
    """A thousand numbers that collide may be shown, and an answer has room for hundreds of such values."""
    members = [Ext(10, pack([hex(at * (2**61 - 1))])) for at in range(1, HASHED_MAX + 1)]
    with closing(opened(SqliteStore(tmp_path / "semel.db"))) as store:
        keep(store, "k", b"m" + pack(Ext(2, pack(members))))
        token, _ = token_for(store, "", "admin")
    with serving(ServeSettings(store=url(tmp_path), port=0), token) as running:
        paid: list[float] = []
        cookie = {"cookie": f"{COOKIE}={session_of(running, token)}"}
        asking: dict[str, Callable[[], Any]] = {
            "claims": lambda: running.claim("k"),
            "records": lambda: running.client.get("/v1/records/billing/k"),
            "dashboard": lambda: running.client.get("/ui/event/billing/k", headers=cookie),
        }
        asking[ask]()
        running.app.state.service.costs.charge_store = paid.append  # the store's own time has another way
        asking[ask]()
        assert max(paid, default=0) > 0


# --- answers ---


def test_an_answer_is_bounded_and_the_rest_is_asked_for_again(tmp_path: Path) -> None:
    value = b"r" + b"v" * 200_000
    with closing(opened(SqliteStore(tmp_path / "semel.db"))) as store:
        keep(store, "k", value)
    with serving(ServeSettings(auth="none", store=url(tmp_path), port=0)) as running:
        absent, large = ({"type": "lookup", "id": ["", "billing", key]} for key in ("absent", "k"))
        answer = running.post("/v1/items", [absent] * 100 + [large] * 900)
        assert len(answer.content) < (8 * 2**20 + 200_000) * 4 / 3 + 200_000
        kinds = [next(iter(each)) for each in answer.json()][100:]
        assert kinds == ["record"] * kinds.count("record") + ["refused"] * kinds.count("refused")
        assert 0 < kinds.count("record") < 900
        assert answer.json()[-1]["refused"]["title"] == "answer-full"


def test_the_http_store_asks_again_for_what_did_not_fit(tmp_path: Path) -> None:
    values = [b"r" + bytes([at]) * 200_000 for at in range(100)]
    with closing(opened(SqliteStore(tmp_path / "semel.db"))) as store:
        for at, value in enumerate(values):
            keep(store, str(at), value)
    limits = Limits(answer_bytes_max=2**20)
    with (
        serving(ServeSettings(auth="none", store=url(tmp_path), port=0, limits=limits)) as running,
        closing(opened(HttpStore(running.address))) as far,
    ):
        answers: Any = far.send([Lookup(("", "billing", str(at))) for at in range(100)])
        assert [answer.value for answer in answers] == values
        claims = [Claim(("", "billing", str(at)), new_owner(), 30_000_000, DAY_US) for at in range(120)]
        mixed = [claims[at // 2 if at % 2 else 100 + at // 2] for at in range(40)]
        answers = far.send(mixed)
        assert [answer.value for answer in answers[1::2]] == values[:20]
        assert {type(answer).__name__ for answer in answers[::2]} == {"Granted"}


def test_a_scan_gives_as_much_as_fits_and_a_cursor(tmp_path: Path) -> None:
    with closing(opened(SqliteStore(tmp_path / "semel.db"))) as store:
        for at in range(150):
            keep(store, str(at), b"r" + b"v" * 100_000)
    limits = Limits(answer_bytes_max=2**20)
    with serving(ServeSettings(auth="none", store=url(tmp_path), port=0, limits=limits)) as running:
        found: list[str] = []
        cursor: str | None = None
        pages = 0
        while cursor is not None or not found:
            asked = {"limit": "1000"} | ({"cursor": cursor} if cursor else {})
            page = running.client.get("/v1/records", params=asked).json()
            found += [record["key"] for record in page["records"] if record["consumer"] == "billing"]
            cursor, pages = page["cursor"], pages + 1
        assert sorted(found, key=int) == [str(at) for at in range(150)]
        assert pages > 1


def test_a_client_that_does_not_read_its_answer_is_let_go(tmp_path: Path) -> None:
    with closing(opened(SqliteStore(tmp_path / "semel.db"))) as store:
        keep(store, "k", b"r" + b"v" * 200_000)
    limits = Limits(write_wait_s=0.3)
    with serving(ServeSettings(auth="none", store=url(tmp_path), port=0, limits=limits)) as running:
        body = json.dumps([{"type": "lookup", "id": ["", "billing", "k"]}] * 40).encode()
        head = "POST /v1/items HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", running.port))
            connection.sendall(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
            connection.recv(1)
            # The request that asks is one; the one whose answer nobody reads is over.
            assert await_true(
                lambda: "semel_http_requests_in_flight 1.0" in running.client.get("/metrics").text
            )


# --- counts and scans ---


class Stuck(MemoryStore):
    """Counts take as long as the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = threading.Event()
        self.counting = threading.Event()
        self.counted: list[str | None] = []
        self.capabilities = replace(self.capabilities, instant=False)

    def send(self, items: Any, /) -> Any:
        for item in items:
            if isinstance(item, Count):
                self.counted.append(item.tenant)
                self.counting.set()
                assert self.let_go.wait(30)
        return super().send(items)


@pytest.mark.anyio
async def test_counts_run_one_at_a_time_in_turn_by_tenant() -> None:
    store = Stuck()
    store.open()
    lane = SlowLane(store, "", Hooks(()), 2**20)
    async with asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(lane.ask("loud", Count("loud")))
        await asyncio.sleep(0)
        group.create_task(lane.ask("quiet", Count("quiet")))
        await asyncio.to_thread(store.counting.wait, 30)
        assert store.counted == ["loud"]
        store.let_go.set()
    assert store.counted[:2] == ["loud", "quiet"]


@pytest.mark.anyio
async def test_who_has_too_many_counts_waiting_is_told_so() -> None:
    store = Stuck()
    store.open()
    lane = SlowLane(store, "", Hooks(()), 2**20)
    asking = [asyncio.create_task(lane.ask("loud", Count("loud"))) for _ in range(16)]
    await asyncio.to_thread(store.counting.wait, 30)
    with pytest.raises(HttpProblem) as refused:
        await lane.ask("loud", Count("loud"))
    assert refused.value.status == 429
    store.let_go.set()
    await asyncio.gather(*asking)


@pytest.mark.anyio
async def test_a_count_that_takes_long_is_used_again() -> None:
    store = Stuck()
    store.open()
    lane = SlowLane(store, "", Hooks(()), 2**20)
    first = asyncio.create_task(lane.ask("a", Count("t")))
    second = asyncio.create_task(lane.ask("b", Count("t")))
    await asyncio.to_thread(store.counting.wait, 30)
    await asyncio.sleep(0.2)  # how long the count takes
    store.let_go.set()
    await first
    assert (await second)[1] == 0.0
    assert store.counted == ["t"]


def test_claims_go_on_while_a_count_runs(tmp_path: Path) -> None:
    """On a store of its own connection, however long the count takes."""
    store = SqliteStore(tmp_path / "semel.db")
    store.open()
    with serving(ServeSettings(auth="none", store=url(tmp_path), port=0)) as running:
        threads = [
            threading.Thread(target=running.post, args=("/v1/items", [{"type": "count"}] * 50))
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        assert running.claim("quick")["outcome"] == "claimed"
        for thread in threads:
            thread.join(60)
    store.close()


# --- pacing ---


def test_what_was_spent_is_paid_back_with_time_by_the_tenant() -> None:
    now = [0.0]
    limits = Limits(items_per_s=10, bytes_per_s=1000, store_share=0.5, scan_share=0.5)
    costs = Costs(limits, lambda: now[0])
    mine, same, other = (
        Caller("token a", "t1", "write"),
        Caller("token b", "t1", "read"),
        Caller("token c", "t2", "read"),
    )
    PAYER.set(mine)
    spendings: list[tuple[Callable[[], None], Callable[[Caller], None]]] = [
        (lambda: costs.charge(mine, items=30), costs.check),
        (lambda: costs.charge(mine, size_bytes=3000), costs.check),
        (lambda: costs.charge_store(1.5), costs.check),
        (lambda: costs.charge_scan(1.5), costs.check_scan),
    ]
    for spend, check in spendings:
        costs.check(mine)
        costs.check_scan(mine)
        spend()
        with pytest.raises(HttpProblem, match="too many") as refused:
            check(same)
        assert (refused.value.status, int(refused.value.headers["Retry-After"])) == (429, 2)
        costs.check(other)
        costs.check_scan(other)
        now[0] += 10
    PAYER.set(None)
    costs.charge_store(100)  # nobody's request


def test_counts_that_cost_too_much_are_refused_and_claims_are_not(tmp_path: Path) -> None:
    """A tenant whose people look at large lists goes on with its work."""
    store = SqliteStore(tmp_path / "semel.db", synchronous="NORMAL")
    store.open()
    text, _ = token_for(store, "shop", "admin")
    settings = ServeSettings(store=url(tmp_path), port=0, limits=Limits(store_share=0))
    with serving(settings, text) as running:
        PAYER.set(Caller("somebody", "shop", "read"))
        running.app.state.service.costs.charge_scan(3600)
        PAYER.set(None)
        assert running.claim("k")["outcome"] == "claimed"
        for path in ("/v1/stats", "/v1/records"):
            answer = running.client.get(path)
            assert (answer.status_code, answer.json()["type"]) == (429, "urn:semel:too-costly"), path
            assert int(answer.headers["retry-after"]) > 1000
        items = [{"type": "lookup", "id": ["", "billing", "k"]}, {"type": "scan", "orphaned": True}]
        (found, refused) = running.post("/v1/items", items).json()
        assert (list(found), list(refused)) == (["record"], ["refused"])
        session = session_of(running, text)
        assert running.client.get("/ui/events", headers={"cookie": f"{COOKIE}={session}"}).status_code == 429
    store.close()


class SlowSqlite(SqliteStore):
    """Each batch with an item of the tenant `loud` takes a while."""

    _hurry = threading.Event()

    def send(self, items: Any, /) -> Any:
        if any("loud" in (getattr(item, "tenant", ""), *getattr(item, "id", ())) for item in items):
            self._hurry.wait(0.05)
        return super().send(items)


@pytest.mark.parametrize("ask", ["claims", "items", "events", "dashboard"])
def test_the_store_time_of_every_request_is_charged_to_its_tenant(tmp_path: Path, ask: str) -> None:
    store = opened(SlowSqlite(tmp_path / "semel.db"))
    (loud, _), (quiet, _) = token_for(store, "loud", "admin"), token_for(store, "quiet", "admin")
    limits = Limits(store_share=0.001)  # which is 1 s of the store at once
    settings = ServeSettings(store=url(tmp_path), port=0, limits=limits)
    with serving(settings, loud, store=store) as running:
        lookups = [{"type": "lookup", "id": ["", "c", key]} for key in "ab"]
        page = {"cookie": f"semel_session={session_of(running, loud)}"}
        asking: dict[str, Callable[[], Any]] = {
            "claims": lambda: running.post("/v1/claims", {"consumer": "c", "claims": [{"key": "k"}]}),
            "items": lambda: running.post("/v1/items", lookups),
            "events": lambda: running.post("/v1/events", {"id": "1"}),
            "dashboard": lambda: running.client.get("/ui/events?q=k", headers=page),
        }
        statuses = [asking[ask]().status_code for _ in range(40)]
        assert statuses[:3] == [200] * 3
        assert 429 in statuses
        calm = Running(running.address, quiet)
        assert calm.claim("k")["outcome"] == "claimed"
        calm.client.close()


def test_an_operator_of_the_whole_store_sees_pages_while_the_store_is_slow(tmp_path: Path) -> None:
    store = opened(SlowSqlite(tmp_path / "semel.db"))
    store.send((Admit("loud", "c", "lease"),))
    operator, _ = token_for(store, None, "admin")
    settings = ServeSettings(store=url(tmp_path), port=0, limits=Limits(store_share=0.001))
    with serving(settings, operator, store=store) as running:
        page = {"cookie": f"semel_session={session_of(running, operator)}"}
        asked = [running.client.get("/ui/events?q=k", headers=page) for _ in range(30)]
    assert {answer.status_code for answer in asked} == {200}


@pytest.mark.anyio
async def test_the_time_of_a_shared_batch_is_divided_by_its_items() -> None:
    store = Stuck()
    store.open()
    channel = Coalescer(store)
    paid: dict[int, float] = {}
    count_of_caller: ContextVar[int] = ContextVar("count_of_caller")
    channel.on_store_time = lambda took_s: paid.update({count_of_caller.get(): took_s})

    async def ask(*items: Any) -> None:
        count_of_caller.set(len(items))
        await channel.asend(items)

    lookups = [Lookup(("", "c", str(at))) for at in range(40)]
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(ask(Count("t")))
            await asyncio.to_thread(store.counting.wait, 30)
            group.create_task(ask(*lookups[:30]))
            group.create_task(ask(*lookups[30:]))
            await asyncio.sleep(0)  # both are queued while the first batch is under way
            store.let_go.set()
    finally:
        channel.close()
    assert paid[30] == pytest.approx(3 * paid[10])
    assert 0 < paid[30] + paid[10] < 30


class FromLoop:
    """A store in memory that is awaited."""

    name = "memory"

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    async def asend(self, items: Any, /) -> Any:
        return self._store.send(items)


@pytest.mark.anyio
@pytest.mark.parametrize("kind", [Direct, Coalescer, LoopCoalescer])
async def test_what_is_posted_is_charged_with_its_items(kind: Any) -> None:
    """Settles of batches and renewals: no request waits for them."""
    store = MemoryStore()
    store.open()
    channel = kind(FromLoop(store) if kind is LoopCoalescer else store)
    paid: list[tuple[Any, float]] = []
    channel.on_posted_time = lambda items, took_s: paid.append((items, took_s))
    settles = [Settle(("loud", "c", str(at)), new_owner(), 1, "released") for at in range(3)]
    answered: list[Any] = []
    channel.post(settles, answered.extend)
    await until(lambda: len(answered) == 3)
    channel.close()
    ((items, took_s),) = paid
    assert (items, took_s > 0) == (settles, True)


async def hang(_event: Event) -> None:
    """The handler of the test below: the service renews its claim as long as it runs."""
    await asyncio.Event().wait()


class SlowRenewals(SqliteStore):
    """RenewalLimit take a while, and are counted."""

    _hurry = threading.Event()
    renewals = 0

    def send(self, items: Any, /) -> Any:
        if any(isinstance(item, Renew) for item in items):
            self.renewals += 1
            self._hurry.wait(0.4)
        return super().send(items)


def test_renewals_of_the_service_are_charged_to_the_tenant_of_the_event(tmp_path: Path) -> None:
    store = SlowRenewals(tmp_path / "semel.db")
    store.open()
    (loud, _), (quiet, _) = token_for(store, "loud"), token_for(store, "quiet")
    handler = f"{__name__}:{hang.__name__}"
    limits = Limits(store_share=0.001)
    settings = ServeSettings(
        port=0, handler=handler, events_lease="1s", drain_s=0.1, limits=limits, dashboard=False
    )
    with serving(settings, loud, store=store) as running:
        assert running.post("/v1/events", {"id": "e"}).json()["events"][0]["status"] == "accepted"
        calm = Running(running.address, quiet)
        # No request in between: it would be charged, too.
        assert await_true(lambda: store.renewals > 4)
        assert running.client.get("/v1/windows").status_code == 429
        assert calm.client.get("/v1/windows").status_code == 200
        calm.client.close()


def test_a_tenant_that_costs_too_much_waits_and_another_does_not(tmp_path: Path) -> None:
    with closing(opened(SqliteStore(tmp_path / "semel.db"))) as store:
        (loud, _), (quiet, _) = token_for(store, "loud"), token_for(store, "quiet")
    limits = Limits(bytes_per_s=1000)
    with serving(ServeSettings(store=url(tmp_path), port=0, limits=limits), loud) as running:
        body = json.dumps([{"type": "lookup", "id": ["", "c", "k" * 500]}] * 10)
        headers = {"content-type": "application/json"}
        statuses = [
            running.client.post("/v1/items", content=body, headers=headers).status_code for _ in range(3)
        ]
        assert statuses == [200, 429, 429]
        calm = Running(running.address, quiet)
        assert calm.claim("k")["outcome"] == "claimed"
        calm.client.close()


# --- growth ---


def test_renewals_leave_nothing_behind() -> None:
    live = LiveClaims(10, lambda: 0.0)
    for at in range(10_000):
        live.hold("a", ("", "c", "1"), 10**6 + at)
        live.hold("a", ("", "c", f"settled {at}"), 10**6)
        live.drop("a", ("", "c", f"settled {at}"))
    assert len(live._ends["a"]) < 100
    assert live.room("a") == 9


def test_renewals_are_items_and_too_many_are_answered_429(tmp_path: Path) -> None:
    limits = Limits(items_per_s=5)
    with serving(ServeSettings(auth="none", store=url(tmp_path), port=0, limits=limits)) as running:
        claim = {"claim": running.claim("k")["claim"]}
        answers = [running.post("/v1/claims/renew", {"claims": [claim] * 5}) for _ in range(5)]
        assert answers[0].status_code == 200
        assert (answers[-1].status_code, answers[-1].json()["type"]) == (429, "urn:semel:too-costly")
        assert "items" in answers[-1].json()["detail"]


def test_renewals_of_one_claim_are_bounded_by_its_lease(tmp_path: Path) -> None:
    limits = Limits(renewals_max=20)
    with (
        serving(ServeSettings(auth="none", store=url(tmp_path), port=0, limits=limits)) as running,
        closing(opened(HttpStore(running.address))) as far,
    ):
        mine, other = ({"claim": running.claim(key)["claim"]} for key in ("mine", "other"))
        lease_us = 900 * 10**6  # of the other one: long enough for this test on any computer
        outcomes = running.post("/v1/claims/renew", {"claims": [mine] * 30}).json()["outcomes"]
        assert [each["outcome"] for each in outcomes] == ["renewed"] * 20 + ["refused"] * 10
        assert "'mine' was renewed 20 times within its lease of 30 s" in outcomes[-1]["detail"]
        assert outcomes[-1]["retry_after_s"] >= 1
        assert running.end("renew", other["claim"])["outcome"] == "renewed"
        assert running.end("complete", mine["claim"])["outcome"] == "completed"

        owner, place = new_owner(), ("", "billing", "long")
        again = Claim(place, owner, lease_us, DAY_US)
        granted = [type(answer).__name__ for answer in far.send([again] * 30)]
        assert granted == ["Granted"] * 20 + ["Unavailable"] * 10, "a claim that is repeated is a renewal"
        (record,) = far.send((Lookup(place),))
        assert isinstance(record, Record)
        renew = Renew(place, owner, record.fence, lease_us)
        assert [type(answer) for answer in far.send([renew] * 20)] == [Renewed] * 20
        headers = {"content-type": "application/vnd.semel.items.v1+msgpack"}
        answer = running.client.post("/v1/items", content=pack([renew]), headers=headers)
        assert (answer.status_code, answer.json()["type"]) == (429, "urn:semel:renewed-too-often")
        assert 1 <= int(answer.headers["retry-after"]) <= 46
        # Nobody else can use up what a claim has left, nor get it back by renewals that fail.
        stranger = Renew(place, new_owner(), record.fence, lease_us)
        assert [type(answer) for answer in far.send([stranger] * 20)] == [Lost] * 20
        assert isinstance(far.send((renew,))[0], Unavailable)
        far.send((Renew(place, owner, record.fence + 1, lease_us),))
        assert isinstance(far.send((renew,))[0], Unavailable)


def test_what_a_claim_may_be_renewed_comes_back_with_time() -> None:
    now = [0.0]
    renewals = RenewalLimit(Limits(renewals_max=20), lambda: now[0])
    place, owner = ("", "c", "k"), b"o" * 16
    renew, claim = Renew(place, owner, 1, 10**7), Claim(place, owner, 10**7, DAY_US)
    for _ in range(20):
        renewals.take(renew)
    with pytest.raises(HttpProblem, match=r"come back in 0\.5 s"):
        renewals.take(renew)
    now[0] = 0.5
    renewals.take(renew)
    for _ in range(1000):  # one that waits for another's claim asks as often as it likes
        renewals.take(claim)
        renewals.settle(claim, Busy(1.0))
    for _ in range(20):  # the keeper of a client repeats a renewal without an answer at a tenth of the lease
        now[0] += 1.0
        for _ in range(2):
            renewals.take(renew)
            renewals.settle(renew, Renewed(0))
    for at in range(RENEWED_MAX + 10):
        renewals.take(Renew(("", "c", f"k{at}"), owner, 1, 10**7))
    assert len(renewals._taken_until) == RENEWED_MAX


def test_a_keeper_over_http_is_never_refused(tmp_path: Path) -> None:
    """The shortest lease, the lowest limit that can be set, and more renewals than it allows for one lease."""

    class Slow(MemoryStore):
        def send(self, items: Any, /) -> Any:
            answers = super().send(items)
            seen.extend(
                answer for item, answer in zip(items, answers, strict=True) if isinstance(item, Renew)
            )
            return answers

    seen: list[Any] = []
    limits = Limits(renewals_max=20, lease_min_us=50_000)
    settings = ServeSettings(auth="none", port=0, limits=limits, dashboard=False)
    standing = Slow(clock=ManualClock())  # a busy computer does not end the lease
    with serving(settings, store=standing) as running:
        with semel.open(running.address, consumer="billing", lease="100ms") as once:
            outcome = once.run("k", lambda: await_true(lambda: len(seen) > 25))
        page = running.client.get("/metrics").text
    assert isinstance(outcome, semel.Done)
    assert outcome.value is True
    assert 'semel_http_requests_total{route="/v1/items",status="429"}' not in page


def test_steps_of_a_record_are_bounded(tmp_path: Path) -> None:
    limits = Limits(steps_max=5, value_bytes_max=1000)
    with (
        serving(ServeSettings(auth="none", store=url(tmp_path), port=0, limits=limits)) as running,
        closing(opened(HttpStore(running.address))) as far,
    ):
        owner, place = new_owner(), ("", "billing", "k")
        (granted,) = far.send((Claim(place, owner, 30_000_000, DAY_US),))

        def step(name: str, size: int) -> str:
            renew = Renew(place, owner, granted.fence, 30_000_000, step=(name, b"r" * size))
            (answer,) = far.send((renew,))
            return str(answer.error) if isinstance(answer, Unavailable) else "kept"

        assert [step(f"s{at}", 10) for at in range(5)] == ["kept"] * 5
        assert "5 steps" in step("s5", 10)
        (record,) = far.send((Lookup(place),))
        assert isinstance(record, Record)
        assert len(record.steps) == 5
        place = ("", "billing", "large")
        (granted,) = far.send((Claim(place, owner, 30_000_000, DAY_US),))
        assert [step(f"s{at}", 1000) for at in range(4)] == ["kept"] * 4
        assert "4000 bytes" in step("s4", 1000)


@pytest.mark.parametrize("together", [True, False])
def test_steps_that_arrive_together_are_bounded_too(tmp_path: Path, together: bool) -> None:
    """In one request, or in many at once: none of them is in the store when the others are checked."""
    limits = Limits(steps_max=100, value_bytes_max=1000)
    place, owner = ("", "billing", "k"), new_owner()
    with (
        serving(ServeSettings(auth="none", store=url(tmp_path), port=0, limits=limits)) as running,
        closing(opened(HttpStore(running.address))) as far,
        ThreadPoolExecutor(8) as threads,
    ):
        (granted,) = far.send((Claim(place, owner, 30_000_000, DAY_US),))

        def send(names: list[int]) -> None:
            steps = [
                Renew(place, owner, granted.fence, 30_000_000, step=(f"s{name}", b"r" * 1000))
                for name in names
            ]
            with suppress(StoreRefused):
                far.send(steps)

        if together:
            send(list(range(24)))
        else:
            list(threads.map(send, [[name] for name in range(24)]))
        (record,) = far.send((Lookup(place),))
        assert isinstance(record, Record)
        assert len(record.steps) == 4
        assert running.app.state.service._growth._pending == {}


def test_consumers_and_windows_of_a_tenant_are_bounded(tmp_path: Path) -> None:
    limits = Limits(consumers_max=3)
    with closing(opened(SqliteStore(tmp_path / "semel.db"))) as store:
        (mine, _), (other, _) = token_for(store, "mine", "admin"), token_for(store, "other", "admin")
    with serving(ServeSettings(store=url(tmp_path), port=0, limits=limits), mine) as running:

        def claim(consumer: str) -> int:
            return running.post("/v1/claims", {"consumer": consumer, "claims": [{"key": "k"}]}).status_code

        assert [claim(f"c{at}") for at in (0, 1, 2, 3, 0)] == [200, 200, 200, 409, 200]
        place, owner = ["", "c9", "k"], "AAECAwQFBgcICQoLDA0ODw=="
        for item in (
            {"type": "admit", "tenant": "", "consumer": "c9", "mode": "lease"},
            {"type": "claim", "id": place, "owner": owner, "lease_us": 10**7, "window_us": DAY_US},
            {"type": "mark", "tenant": "", "consumer": "c9", "keys": ["k"], "window_us": DAY_US},
            {"type": "settle", "id": place, "owner": owner, "fence": time.time_ns() // 1000, "to": "done"},
        ):
            answer = running.post("/v1/items", [item])
            assert (answer.status_code, answer.json()["type"]) == (409, "urn:semel:too-many-consumers"), item
        windows = [
            running.client.put("/v1/windows", json={"consumer": f"c{at}", "window": "1h"}) for at in range(4)
        ]
        assert [each.status_code for each in windows] == [200, 200, 200, 409]
        elsewhere = Running(running.address, other)
        assert elsewhere.claim("k")["outcome"] == "claimed"
        elsewhere.client.close()


def test_whether_it_is_ready_costs_the_same_however_many_consumers_there_are() -> None:
    class Asked(MemoryStore):
        def send(self, items: Any, /) -> Any:
            seen.extend(type(item).__name__ for item in items)
            return super().send(items)

    from starlette.testclient import TestClient

    from semel.server.app import create_app

    seen: list[str] = []
    app = create_app(ServeSettings(auth="none", dashboard=False), store=Asked())
    with TestClient(app, base_url="http://localhost") as client:
        seen.clear()
        assert client.get("/readyz").status_code == 200
        assert seen == ["Lookup"]
        assert client.get("/openapi.json").json() is not None
        assert app.openapi() is app.openapi()


@pytest.mark.anyio
async def test_strangers_who_ask_whether_it_is_ready_cost_one_round_trip_a_second() -> None:
    now, service = [100.0], Service(ServeSettings(auth="none", dashboard=False), MemoryStore())
    await service.open()
    sent: list[Item] = []
    is_up = True
    channel = service.runtime.channel
    carry_out = channel.asend

    async def counted(items: Sequence[Item]) -> list[Answer]:
        sent.extend(items)
        await asyncio.sleep(0)  # the others come meanwhile
        return await carry_out(items) if is_up else [Unavailable(StoreRefused("no room"))]

    channel.asend = counted  # type: ignore[method-assign]
    readiness = Readiness(lambda: now[0])
    assert await asyncio.gather(*(readiness.ask(service) for _ in range(100))) == [True] * 100
    assert len(sent) == 1
    is_up = False
    assert await readiness.ask(service), "within the second"
    now[0] += READY_LIVE_S
    assert await asyncio.gather(*(readiness.ask(service) for _ in range(100))) == [False] * 100
    assert len(sent) == 2
    is_up = True
    now[0] += READY_LIVE_S
    assert await readiness.ask(service), "it notices that the store is back"
    await service.close()
