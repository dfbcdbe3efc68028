"""Tokens, roles and tenants: nobody sees, claims or collides with what is another's."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import semel
from semel.core.commands import Scan
from semel.errors import StoreRefused
from semel.server import tokens
from semel.server.service import TOKEN_LIVE_S, Service
from semel.server.settings import ServeSettings
from semel.stores.http.store import HttpStore
from semel.stores.sqlite import SqliteStore
from tests.server.tools import Running, serving, token_for


class Town:
    """One service, and a caller for each kind of token."""

    def __init__(self, address: str, texts: dict[str, str]) -> None:
        self.address = address
        self.texts = texts
        self.callers: dict[str, Running] = {}

    def __getitem__(self, name: str) -> Running:
        if name not in self.callers:
            self.callers[name] = Running(self.address, self.texts.get(name, name))
        return self.callers[name]


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Town]:
    path = tmp_path_factory.mktemp("town") / "semel.db"
    store = SqliteStore(path, synchronous="NORMAL")
    store.open()
    texts = {
        "a": token_for(store, "a", "write")[0],
        "a reads": token_for(store, "a", "read")[0],
        "a rules": token_for(store, "a", "admin")[0],
        "b": token_for(store, "b", "write")[0],
        "none": token_for(store, "", "write")[0],
        "all": token_for(store, None, "admin")[0],
        "all read": token_for(store, None, "read")[0],
    }
    store.close()
    with serving(ServeSettings(store=f"sqlite:///{path}?synchronous=normal", port=0)) as running:
        town = Town(running.address, texts)
        yield town
        for caller in town.callers.values():
            caller.client.close()


def lookup(key: str, tenant: str = "") -> dict[str, Any]:
    return {"type": "lookup", "id": [tenant, "billing", key]}


@pytest.mark.parametrize(
    "authorization",
    [
        "",
        "Bearer",
        "Bearer x",
        "Basic eDp5",
        f"Bearer semel_{'0' * 16}_{'A' * 43}",
        "Bearer \u00fc".encode("latin-1").decode("latin-1"),
    ],
)
def test_a_stranger_is_refused(town: Town, authorization: str) -> None:
    stranger = town[""]
    headers = {b"authorization": authorization.encode("latin-1")} if authorization else {}
    for path in ("/v1/store", "/v1/stats", "/metrics", "/v1/records/billing/x"):
        answer = stranger.client.get(path, headers=headers)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"].startswith("Bearer")
    assert stranger.client.get("/livez").text == "alive\n"
    assert stranger.client.get("/readyz").text == "ready\n"


def test_half_of_a_token_is_worth_nothing(town: Town) -> None:
    text = town.texts["a"]
    wrong = text[:-1] + ("A" if text[-1] != "A" else "B")
    assert town[wrong].client.get("/v1/store").status_code == 401
    assert town["a"].client.get("/v1/store").status_code == 200


def test_a_stranger_is_told_before_the_body_is_read(town: Town) -> None:
    head = b"POST /v1/items HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 1000000\r\n\r\n"
    assert town[""].raw(head).startswith(b"HTTP/1.1 401")


def test_equal_keys_of_two_tenants_are_two_keys(town: Town) -> None:
    a, b = town["a"], town["b"]
    first = a.claim("shared")
    assert first["outcome"] == "claimed"
    second = b.claim("shared")
    assert second["outcome"] == "claimed"
    a.end("complete", first["claim"], value="of a")
    assert b.claim("shared")["outcome"] == "busy"
    assert b.client.get("/v1/records/billing/shared").json()["state"] == "claimed"
    assert b.end("complete", first["claim"], value="forged")["outcome"] == "lost"
    b.end("complete", second["claim"], value="of b")
    assert a.claim("shared")["value"] == "of a"
    assert town["none"].client.get("/v1/records/billing/shared").status_code == 404


def test_a_tenant_cannot_name_another(town: Town) -> None:
    town["b"].claim("private")
    for tenant in ("b", "a", "semel.tokens"):
        answer = town["a"].post("/v1/items", [lookup("private", tenant)])
        assert answer.status_code == 403
    headers = {"semel-tenant": "b"}
    assert town["a"].client.get("/v1/records/billing/private", headers=headers).status_code == 403
    assert town["a"].post("/v1/items", [lookup("private")]).json() == [{"absent": {}}]


def test_one_refused_item_leaves_the_others(town: Town) -> None:
    found = town["a"].post("/v1/items", [lookup("x"), lookup("x", "b"), {"type": "purge"}]).json()
    assert [list(each) for each in found] == [["absent"], ["refused"], ["refused"]]


def test_a_tenants_settings_and_records_are_its_own_and_nameless(town: Town) -> None:
    town["a"].claim("mine")
    found = (
        town["a rules"].post("/v1/items", [{"type": "read_settings"}, {"type": "scan", "limit": 500}]).json()
    )
    modes, page = found[0]["settings"]["modes"], found[1]["page"]
    assert modes == [["", "billing", "lease"]]
    assert {record["id"][0] for record in page["records"]} == {""}
    assert "mine" in {record["id"][2] for record in page["records"]}
    assert "private" not in {record["id"][2] for record in page["records"]}
    stats = town["a"].client.get("/v1/stats").json()
    assert set(stats) == {"states", "consumers", "marks"}


@pytest.mark.parametrize(
    ("who", "item", "allowed"),
    [
        ("a reads", lookup("x"), True),
        ("a reads", {"type": "count"}, True),
        ("a reads", {"type": "mark", "tenant": "", "consumer": "m", "keys": ["k"], "window_us": 1}, False),
        ("a", {"type": "mark", "tenant": "", "consumer": "m", "keys": ["k"], "window_us": 1}, True),
        ("a", {"type": "scan"}, False),
        ("a", {"type": "scan", "orphaned": True}, True),
        ("a", {"type": "forget", "id": ["", "billing", "x"]}, False),
        (
            "a",
            {"type": "set_window", "tenant": "", "consumer": "billing", "event_type": "", "window_us": 1},
            False,
        ),
        ("a", {"type": "switch_mode", "tenant": "", "consumer": "billing", "mode": "mark"}, False),
        ("a", {"type": "admit", "tenant": "", "consumer": "semel.audit", "mode": "lease"}, False),
        ("a rules", {"type": "forget", "id": ["", "billing", "x"]}, True),
        ("a rules", {"type": "purge"}, False),
        ("all", {"type": "purge"}, True),
        ("all", lookup("x", "b"), True),
        ("all", lookup("x", "semel.tokens"), False),
        ("all", {"type": "scan", "tenant": "semel.tokens"}, False),
        ("all", {"type": "lookup", "id": ["semel.rollups", "hours", "0"]}, False),
        ("all", {"type": "forget", "id": ["semel.rollups", "hours", "0"]}, False),
        ("all", {"type": "scan", "tenant": "semel.rollups"}, False),
        ("all", {"type": "count", "tenant": "semel.rollups"}, False),
        ("all read", {"type": "purge"}, False),
    ],
)
def test_roles(town: Town, who: str, item: dict[str, Any], allowed: bool) -> None:
    assert (town[who].post("/v1/items", [item]).status_code == 200) is allowed


def test_the_endpoints_ask_for_their_roles(town: Town) -> None:
    claim = {"consumer": "billing", "claims": [{"key": "k"}]}
    assert town["a reads"].post("/v1/claims", claim).status_code == 403
    assert town["a reads"].post("/v1/events", {"id": "e"}).status_code == 403
    assert town["a"].client.get("/v1/records").status_code == 403
    assert town["a"].client.delete("/v1/records/billing/k").status_code == 403
    assert town["a"].client.get("/metrics").status_code == 403
    assert town["a rules"].post("/v1/purge", {}).status_code == 403
    assert town["all read"].client.get("/metrics").status_code == 200


def test_no_secret_is_ever_shown(town: Town) -> None:
    everything = (
        town["all"].post("/v1/items", [{"type": "scan", "limit": 1000}, {"type": "read_settings"}]).text
    )
    for text in town.texts.values():
        token_id = text.split("_")[1]
        assert token_id not in everything
    assert "semel.tokens" not in everything
    assert "semel.rollups" not in everything


def test_an_operator_names_whom_it_acts_for(town: Town) -> None:
    town["b"].claim("of b")
    operator = town["all"]
    assert operator.client.get("/v1/records/billing/of b").status_code == 404
    answer = operator.client.get("/v1/records/billing/of b", headers={"semel-tenant": "b"})
    assert answer.json()["state"] == "claimed"
    forced = operator.client.delete("/v1/records/billing/of b", headers={"semel-tenant": "b"})
    assert forced.status_code == 409
    forced = operator.client.delete("/v1/records/billing/of b?force=true", headers={"semel-tenant": "b"})
    assert forced.json() == {"forgotten": "of b"}


def test_the_client_is_one_like_any_other(town: Town) -> None:
    address = town.address.replace("://", f"://:{town.texts['a']}@")
    with semel.open(address, consumer="orders") as once:
        assert once.run("o1", lambda: 5) == semel.Done(5)
        assert once.run("o1", lambda: 6) == semel.Done(5, replayed=True)
        assert town.texts["a"] not in repr(once)
    other = town.address.replace("://", f"://:{town.texts['b']}@")
    with semel.open(other, consumer="orders") as once:
        assert once.run("o1", lambda: 7) == semel.Done(7)


def test_windows_of_the_tenant_are_found_by_its_client(town: Town) -> None:
    assert (
        town["a rules"].client.put("/v1/windows", json={"consumer": "short", "window": "off"}).status_code
        == 200
    )
    address = town.address.replace("://", f"://:{town.texts['a']}@")
    with semel.open(address, consumer="short") as once:
        assert [once.run("k", lambda: 1).replayed, once.run("k", lambda: 1).replayed] == [False, False]  # type: ignore[union-attr]


def test_the_wrong_token_is_refused_when_the_store_is_opened(town: Town) -> None:
    store = HttpStore(town.address, token=f"semel_{'0' * 16}_{'A' * 43}")
    with pytest.raises(StoreRefused, match="401"):
        store.open()
    store.close()


def test_only_digests_are_kept(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "semel.db")
    store.open()
    text, token = token_for(store, "a")
    (page,) = store.send((Scan(tokens.TENANT),))
    store.close()
    secret = text.split("_", 2)[2]
    assert token.matches(secret)
    assert secret not in str(page)
    for file in tmp_path.iterdir():
        assert secret.encode() not in file.read_bytes()


@pytest.mark.anyio
async def test_a_revoked_token_is_refused_within_seconds(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "semel.db")
    store.open()
    text, token = token_for(store)
    now = [100.0]
    service = Service(ServeSettings(), store, clock=lambda: now[0])
    await service.open()
    assert service.needs_token
    assert await service.token(text) == token
    await service.ask(tokens.revoke(token.id))
    assert await service.token(text) == token  # as long as it is believed
    now[0] += TOKEN_LIVE_S
    assert await service.token(text) is None
    await service.close()
