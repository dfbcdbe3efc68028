"""Every route of the endpoints and of the pages, with every role, against one literal table."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any, cast

import httpx2
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from semel.core.commands import Count, Lookup, Scan
from semel.core.protocols import Store
from semel.server import tokens
from semel.server.auth import Caller
from semel.server.dashboard.auth import COOKIE
from semel.server.dashboard.store_reader import StoreReader
from semel.server.limits import PAYER
from semel.server.problems import HttpProblem
from semel.server.settings import Limits, ServeSettings
from semel.stores.registry import store_for
from semel.types import Id
from tests.server.stores import store_url
from tests.server.tools import Running, carry_out, serving, session_of, token_for

WHO: dict[str, tuple[str | None, tokens.Role] | None] = {
    "nobody": None,
    "read": ("acme", "read"),
    "write": ("acme", "write"),
    "admin": ("acme", "admin"),
    "all read": (None, "read"),
    "all write": (None, "write"),
    "all admin": (None, "admin"),
}
"""The columns of the table: a tenant's tokens, then those of all tenants."""

ITEMS: list[Any] = [{"type": "lookup", "id": ["", "orders", "k"]}]
FORGET: list[Any] = [{"type": "forget", "id": ["", "orders", "k"]}]
CLAIM = {"consumer": "orders", "claims": [{"key": "k"}]}
ENDS: dict[str, Any] = {"claims": []}
WINDOW = {"consumer": "orders", "window": "1h"}

TABLE: dict[tuple[str, str], tuple[str, Any]] = {
    # method, path: who is let in (a column each: + or -), what is sent
    ("GET", "/openapi.json"): ("+++++++", None),
    ("GET", "/docs"): ("+++++++", None),
    ("GET", "/livez"): ("+++++++", None),
    ("GET", "/readyz"): ("+++++++", None),
    ("GET", "/"): ("+++++++", None),
    ("GET", "/ui"): ("+++++++", None),
    ("GET", "/metrics"): ("----+++", None),
    ("POST", "/v1/items"): ("-++++++", ITEMS),
    ("POST", "/v1/items forget"): ("---+--+", FORGET),
    ("GET", "/v1/store"): ("-++++++", None),
    ("POST", "/v1/claims"): ("--++-++", CLAIM),
    ("POST", "/v1/claims/complete"): ("--++-++", ENDS),
    ("POST", "/v1/claims/renew"): ("--++-++", ENDS),
    ("POST", "/v1/claims/release"): ("--++-++", ENDS),
    ("POST", "/v1/claims/fail"): ("--++-++", ENDS),
    ("POST", "/v1/events"): ("--++-++", {"id": "e"}),
    ("WEBSOCKET", "/v1/events"): ("--++-++", None),
    ("GET", "/v1/records/{consumer}/{key:path}"): ("-++++++", None),
    ("DELETE", "/v1/records/{consumer}/{key:path}"): ("---+--+", None),
    ("GET", "/v1/records"): ("---+--+", None),
    ("GET", "/v1/windows"): ("-++++++", None),
    ("PUT", "/v1/windows"): ("---+--+", WINDOW),
    ("GET", "/v1/stats"): ("-++++++", None),
    ("POST", "/v1/purge"): ("------+", {}),
    ("GET", "/ui/static/{digest}/{name}"): ("+++++++", None),
    ("GET", "/ui/login"): ("+++++++", None),
    ("POST", "/ui/login"): ("-------", "token=semel_wrong"),
    ("POST", "/ui/logout"): ("-------", ""),  # leads to the login, whoever asks
    ("GET", "/ui/"): ("-++++++", None),
    ("GET", "/ui/parts/consumers"): ("-++++++", None),
    ("GET", "/ui/parts/held"): ("-++++++", None),
    ("GET", "/ui/data"): ("-++++++", None),
    ("GET", "/ui/live"): ("-++++++", None),
    ("GET", "/ui/failures"): ("-++++++", None),
    ("GET", "/ui/parts/failures"): ("-++++++", None),
    ("POST", "/ui/failures"): ("---+--+", "verb=forget&status=failed&consumer=orders&as_of=1"),
    ("POST", "/ui/dead-letters"): ("------+", "source=redis://nowhere"),
    ("GET", "/ui/consumer/{consumer:path}"): ("-++++++", None),
    ("GET", "/ui/parts/workers/{consumer:path}"): ("-++++++", None),
    ("GET", "/ui/events"): ("-++++++", None),
    ("GET", "/ui/parts/tail"): ("-++++++", None),
    ("GET", "/ui/event/{consumer}/{key:path}"): ("-++++++", None),
    ("POST", "/ui/forget/{consumer}/{key:path}"): ("---+--+", ""),
    ("POST", "/ui/replay/{consumer}/{key:path}"): ("---+--+", "fence=1"),
    ("POST", "/ui/decide/{consumer}/{key:path}"): ("---+--+", "to=done&fence=1"),
    ("POST", "/ui/release/{consumer}/{key:path}"): ("---+--+", "fence=1&force=yes"),
    ("GET", "/ui/flight"): ("-++++++", None),
    ("GET", "/ui/parts/flight"): ("-++++++", None),
    ("GET", "/ui/windows"): ("-++++++", None),
    ("POST", "/ui/windows"): ("---+--+", "consumer=orders&window=1h"),
    ("GET", "/ui/outbox"): ("----+++", None),
    ("POST", "/ui/outbox"): ("------+", "verb=retry"),
    ("GET", "/ui/streams"): ("----+++", None),
    ("GET", "/ui/parts/streams"): ("----+++", None),
    ("GET", "/ui/stores"): ("-++++++", None),
    ("POST", "/ui/purge"): ("------+", ""),
    ("GET", "/ui/observe"): ("-++++++", None),
    ("GET", "/ui/check"): ("----+++", None),
    ("GET", "/ui/parts/doctor"): ("----+++", None),
    ("GET", "/ui/audit"): ("---+--+", None),
}

OWN: tuple[Id, ...] = (
    ("semel.tokens", "tokens", "{token}"),
    ("semel.tokens", "marker", "closed"),
    ("semel.tokens", "sessions", "x"),
    ("semel.audit", "semel.audit", "x"),
    ("semel.rollups", "other", "x"),
    ("", "semel.audit", "x"),
    ("", "semel.tokens", "x"),
)
"""Records of semel itself, and places that look like them: nobody writes there."""


class Town:
    """A service, and how each of them asks it."""

    def __init__(self, running: Running, store: Store) -> None:
        self.running, self.store = running, store
        self.tokens: dict[str, str] = {}
        self.cookies: dict[str, str] = {}
        for who, about in WHO.items():
            if about is not None:
                self.tokens[who], token = token_for(store, *about)
                self.cookies[who] = session_of(running, self.tokens[who])
                self.token_id = token.id

    def ask(self, who: str, method: str, path: str, sent: Any, **more: str) -> httpx2.Response:
        headers = dict(more)
        if path.startswith("/ui"):
            headers |= {"sec-fetch-site": "same-origin", "content-type": "application/x-www-form-urlencoded"}
            if who in self.cookies:
                headers["cookie"] = f"{COOKIE}={self.cookies[who]}"
            content = sent
        else:
            headers |= {"content-type": "application/json"}
            if who in self.tokens:
                headers["authorization"] = f"Bearer {self.tokens[who]}"
            content = None if sent is None else json.dumps(sent)
        with self.running.client.stream(method, path, content=content, headers=headers) as answer:
            if path != "/ui/live" or answer.status_code != 200:
                answer.read()
            return answer


@pytest.fixture(
    scope="module",
    params=[
        "sqlite",
        pytest.param("redis", marks=pytest.mark.service),
        pytest.param("postgres", marks=pytest.mark.service),
    ],
)
def town(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Town]:
    place = store_url(request.param, tmp_path_factory.mktemp("town"))
    store = store_for(place)
    assert isinstance(store, Store)
    store.open()
    with serving(ServeSettings(store=place, port=0, limits=Limits(rate_per_s=0))) as running:
        yield Town(running, store)
    store.close()


def routes(found: Any, before: str = "") -> Iterator[tuple[str, str]]:
    """All routes of an application with their methods."""
    for each in found:
        if hasattr(each, "original_router"):
            yield from routes(each.original_router.routes, before)
        elif getattr(each, "routes", None):
            yield from routes(each.routes, before + each.path)
        else:
            methods = getattr(each, "methods", None) or {"WEBSOCKET"}
            yield from ((method, before + each.path) for method in methods if method != "HEAD")


def is_let_in(answer: httpx2.Response) -> bool:
    return answer.status_code not in (401, 403) and answer.headers.get("location") != "/ui/login"


def is_socket_open(town: Town, who: str) -> bool:
    headers = {"authorization": f"Bearer {town.tokens[who]}"} if who in town.tokens else {}
    address = town.running.address.replace("http://", "ws://")
    try:
        with connect(f"{address}/v1/events", additional_headers=headers):
            return True
    except InvalidStatus:
        return False


def test_every_route_is_in_the_table(town: Town) -> None:
    assert {(method, path.partition(" ")[0]) for method, path in TABLE} == set(
        routes(town.running.app.routes)
    )


@pytest.mark.parametrize(("method", "path"), TABLE)
def test_every_role_on_every_route(town: Town, method: str, path: str) -> None:
    expected, sent = TABLE[method, path]
    real = path.partition(" ")[0].replace("{consumer}", "orders").replace("{key:path}", "nothing")
    real = real.replace("{consumer:path}", "orders")
    found = ""
    for who in WHO:
        if who in town.tokens and path == "/ui/logout":
            town.cookies[who] = session_of(town.running, town.tokens[who])
        if method == "WEBSOCKET":
            found += "+" if is_socket_open(town, who) else "-"
        else:
            found += "+" if is_let_in(town.ask(who, method, real, sent)) else "-"
        if who in town.tokens and path == "/ui/logout":
            town.cookies[who] = session_of(town.running, town.tokens[who])
    assert found == expected


def test_figures_are_added_by_writers_of_all_tenants_and_changed_by_nobody(town: Town) -> None:
    scope = {"tenant": "semel.rollups", "consumer": "semel.rollups"}
    record = ["semel.rollups", "semel.rollups", "figures"]
    owner = "AAECAwQFBgcICQoLDA0ODw=="
    claim = {"type": "claim", "id": record, "owner": owner, "lease_us": 10**7, "window_us": 10**9}
    window = {"type": "set_window", **scope, "event_type": "", "window_us": 0, "existing": True}
    expected = {
        "claim": "-----++",
        "admit": "-----++",
        "mark": "-------",
        "window": "-------",
        "forget": "-------",
    }
    items = {
        "claim": claim,
        "admit": {"type": "admit", **scope, "mode": "lease"},
        "mark": {"type": "admit", **scope, "mode": "mark"},
        "window": window,
        "forget": {"type": "forget", "id": record, "force": True},
    }
    for name, item in items.items():
        answers = [town.ask(who, "POST", "/v1/items", [item]) for who in WHO]
        assert "".join("+" if is_let_in(each) else "-" for each in answers) == expected[name], name


@pytest.mark.parametrize("place", OWN)
def test_nobody_writes_records_of_semel_itself(town: Town, place: Id) -> None:
    tenant, consumer, key = place[0], place[1], place[2].replace("{token}", town.token_id)
    record, scope = [tenant, consumer, key], {"tenant": tenant, "consumer": consumer}
    owner, long = "AAECAwQFBgcICQoLDA0ODw==", 10**9
    items: list[dict[str, Any]] = [
        {"type": "claim", "id": record, "owner": owner, "lease_us": 10**7, "window_us": long},
        {"type": "renew", "id": record, "owner": owner, "fence": 1, "lease_us": 10**7},
        {"type": "settle", "id": record, "owner": owner, "fence": 1, "to": "done", "window_us": long},
        {"type": "forget", "id": record, "force": True},
        {"type": "resolve", "id": record, "fence": 1, "to": "done"},
        {"type": "mark", **scope, "keys": ["k"], "window_us": long},
        {"type": "set_window", **scope, "event_type": "", "window_us": 0, "existing": True},
        {"type": "admit", **scope, "mode": "mark"},
        {"type": "switch_mode", **scope, "mode": "mark"},
    ]
    before = carry_out(town.store, tokens.tokens())
    for who in WHO:
        for item in items:
            assert town.ask(who, "POST", "/v1/items", [item]).status_code in (401, 403), (who, item)
        named = {"semel-tenant": tenant} if tenant else {}
        for method, path, sent in (
            ("PUT", "/v1/windows", {"consumer": consumer, "window": "off", "existing": True}),
            ("POST", "/v1/claims", {"consumer": consumer, "claims": [{"key": key}]}),
            ("DELETE", f"/v1/records/{consumer}/{key}?force=true", None),
        ):
            answer = town.ask(who, method, path, sent, **named)
            assert answer.status_code in (401, 403, 404), (who, path, answer.text)
        form = f"consumer={consumer}&tenant={tenant}&window=off&existing=yes"
        for path, filled in (
            ("/ui/windows", form),
            ("/ui/windows", f"{form}&remove=yes"),
            (f"/ui/forget/{consumer}/{key}?tenant={tenant}", "force=yes"),
            (f"/ui/decide/{consumer}/{key}?tenant={tenant}", "to=absent&fence=1"),
            (f"/ui/replay/{consumer}/{key}?tenant={tenant}", "fence=1"),
            (f"/ui/release/{consumer}/{key}?tenant={tenant}", "fence=1&force=yes"),
        ):
            answer = town.ask(who, "POST", path, filled)
            assert not is_let_in(answer) or answer.status_code == 404, (who, path, answer.status_code)
    assert carry_out(town.store, tokens.tokens()) == before
    assert carry_out(town.store, tokens.were_made())


@pytest.mark.parametrize(
    "item",
    [
        Lookup(("other", "orders", "k")),
        Lookup((tokens.TENANT, "tokens", "k")),
        Scan(None),
        Scan("other", "orders"),
        Count(None),
        Count(tokens.TENANT),
    ],
)
def test_a_page_reads_nothing_that_its_user_may_not_reach(item: Lookup | Scan | Count) -> None:
    """Whatever a page asks for: the reader of all pages compares it with the tenant of the request's user."""
    reader = StoreReader(service=cast("Any", None))  # never reached

    async def read() -> None:
        PAYER.set(Caller("token 1", "acme", "admin"))
        with pytest.raises(HttpProblem) as refused:
            await (reader.quick((item,)) if isinstance(item, Lookup) else reader.slow(item))
        assert refused.value.status == 403

    asyncio.run(read())
