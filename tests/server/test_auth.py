"""Authentication is never inferred: closed stores, first tokens, proxies, sessions, expiry, rotation, last use."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from websockets.exceptions import ConnectionClosedError
from websockets.sync.client import connect

from semel.core.commands import Item, Lookup, Scan
from semel.errors import PolicyInvalid
from semel.server import tokens
from semel.server.app import create_app
from semel.server.dashboard.auth import COOKIE
from semel.server.limits import AnswerCache
from semel.server.problems import HttpProblem
from semel.server.service import LOG_INS_BURST, LOG_INS_PER_S, TOKEN_LIVE_S, Service
from semel.server.settings import Limits, ServeSettings
from semel.stores.memory.store import MemoryStore
from semel.stores.sqlite import SqliteStore
from tests.cli.processes import SEMEL, Terminal, semel
from tests.server.stores import KINDS, store_url
from tests.server.tools import Running, carry_out, process, serving, session_of, token_for
from tests.waiting import await_true

DAY_US = 86400 * 10**6
LOGIN = {"sec-fetch-site": "same-origin", "content-type": "application/x-www-form-urlencoded"}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    made = SqliteStore(tmp_path / "semel.db", synchronous="NORMAL")
    made.open()
    yield made
    made.close()


def settings(folder: Path, **more: Any) -> ServeSettings:
    return ServeSettings(store=f"sqlite:///{folder}/semel.db?synchronous=normal", port=0, **more)


# --- a closed store -----------------------------------------------------------------------------


def test_a_store_stays_closed_when_its_last_token_is_revoked(tmp_path: Path, store: SqliteStore) -> None:
    _, token = token_for(store, None, "admin")
    assert carry_out(store, tokens.revoke(token.id)) is True
    assert carry_out(store, tokens.tokens()) == []
    with serving(settings(tmp_path)) as running:
        assert running.client.get("/v1/stats").status_code == 401
        assert running.client.get("/ui/").headers["location"] == "/ui/login"


@pytest.mark.anyio
@pytest.mark.parametrize("kind", KINDS)
async def test_no_authentication_is_refused_on_a_store_that_had_a_token(kind: str, tmp_path: Path) -> None:
    place = store_url(kind, tmp_path)
    first = Service(ServeSettings(store=place, auth="none"))
    await first.open()
    assert not first.needs_token
    token, _ = await first.ask(tokens.create("ann", None, "admin"))
    await first.ask(tokens.revoke(token.id))
    await first.close()
    again = Service(ServeSettings(store=place, auth="none"))
    with pytest.raises(PolicyInvalid, match="has had tokens, so it needs tokens"):
        await again.open()
    await again.close()


def test_a_server_without_authentication_closes_when_the_store_gets_a_token(tmp_path: Path) -> None:
    now = [100.0]
    with serving(settings(tmp_path, auth="none")) as running:
        running.app.state.service._closed = AnswerCache(TOKEN_LIVE_S, 1, lambda: now[0])
        address = f"ws://127.0.0.1:{running.port}/v1/events"
        assert running.client.get("/v1/stats").status_code == 200
        assert running.client.get("/ui/").status_code == 200
        with connect(address, proxy=None) as socket:
            made = semel("token", "create", "ann", "--all-tenants", "--json", cwd=tmp_path)
            text = json.loads(made.stdout)["token"]
            now[0] += TOKEN_LIVE_S
            assert running.client.get("/v1/stats").status_code == 401
            assert running.client.get("/ui/").headers["location"] == "/ui/login"
            with pytest.raises(ConnectionClosedError, match="no longer valid"):
                socket.recv(30)
        allowed = {"authorization": f"Bearer {text}"}
        assert running.client.get("/v1/stats", headers=allowed).status_code == 200


def test_the_command_says_so(tmp_path: Path) -> None:
    assert semel("token", "create", "ann", cwd=tmp_path).returncode == 0
    ended = semel("serve", "--auth", "none", "--port", "0", cwd=tmp_path)
    assert ended.returncode == 78
    assert b"it needs tokens" in ended.stderr
    assert b"Traceback" not in ended.stderr


def test_a_fresh_store_is_closed_too(tmp_path: Path) -> None:
    with process(tmp_path, "--auth", "tokens") as (_, address):
        stranger = Running(address)
        assert stranger.client.get("/v1/stats").status_code == 401
        stranger.client.close()


@pytest.mark.anyio
async def test_a_fresh_store_gets_its_first_token_once() -> None:
    store = MemoryStore()
    first = Service(ServeSettings(first_token=True), store)
    await first.open()
    token = await first.token(first.first_token)
    assert token is not None
    assert (token.role, token.tenant) == ("admin", None)
    second = Service(ServeSettings(first_token=True), store)
    await second.open()
    assert second.first_token == ""
    beyond = Service(ServeSettings(first_token=True, host="0.0.0.0"), MemoryStore())
    await beyond.open()
    assert beyond.first_token == ""
    assert beyond.needs_token


def test_a_person_at_a_terminal_is_shown_the_first_token(tmp_path: Path) -> None:
    def started() -> str:
        terminal = Terminal([*SEMEL, "serve", "--port", "0"], tmp_path)
        assert await_true(lambda: "Log in with it" in terminal.said or "Callers need" in terminal.said)
        found = re.search(r"at (http://\S+) ", terminal.said)
        shown = re.search(r"semel_[0-9a-f]{16}_[A-Za-z0-9_-]{43}", terminal.said)
        assert found is not None
        if shown is not None:
            known = Running(found[1], shown[0])
            assert known.client.get("/v1/stats").status_code == 200
            known.client.close()
        terminal.process.terminate()
        assert terminal.wait() == 0
        return shown[0] if shown is not None else ""

    assert started()
    assert started() == ""


# --- proxies ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header",
    ["forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip", "X-Forwarded-Port",
     "x-forwarded-server", "x-client-ip", "true-client-ip", "cf-connecting-ip"],
)  # fmt: skip
def test_what_a_proxy_sends_is_refused_without_tokens(service: Running, header: str) -> None:
    assert service.client.get("/v1/stats").status_code == 200
    for path in ("/v1/stats", "/ui/"):
        assert service.client.get(path, headers={header: "127.0.0.1", "host": "localhost"}).status_code == 403


@pytest.mark.parametrize("proxy", ["*", "0.0.0.0/0", "::/0", "proxy.example", "10.0.0.1/24"])
def test_a_proxy_is_named_by_its_address(proxy: str) -> None:
    with pytest.raises(PolicyInvalid, match="--proxy"):
        ServeSettings(proxies=(proxy,))


def test_a_proxy_without_tokens_is_refused() -> None:
    with pytest.raises(PolicyInvalid, match="behind a proxy"):
        ServeSettings(auth="none", proxies=("127.0.0.1",))


@pytest.mark.parametrize(
    ("proxies", "headers", "secure"),
    [
        ((), {"x-forwarded-proto": "https"}, False),
        (("127.0.0.1",), {"x-forwarded-proto": "https"}, True),
        (("192.0.2.1",), {"x-forwarded-proto": "https"}, False),
        (("127.0.0.1",), {}, False),
        ((), {"origin": "https://semel.example"}, True),
    ],
)
def test_cookies_are_secure_behind_tls(
    tmp_path: Path, store: SqliteStore, proxies: tuple[str, ...], headers: dict[str, str], secure: bool
) -> None:
    text, _ = token_for(store, None, "admin")
    with serving(settings(tmp_path, proxies=proxies)) as running:
        answer = running.client.post("/ui/login", content=f"token={text}", headers=LOGIN | headers)
        cookie = answer.headers["set-cookie"]
        assert ("; secure" in cookie.lower()) is secure
        assert "httponly" in cookie.lower()
        assert "samesite=strict" in cookie.lower()


def test_forwarded_addresses_count_for_named_proxies_only(tmp_path: Path, store: SqliteStore) -> None:
    token_for(store)
    seen: list[str] = []
    for proxies in ((), ("127.0.0.1",)):
        with serving(settings(tmp_path, proxies=proxies)) as running:
            service = running.app.state.service
            service.pace = seen.append
            running.client.get("/v1/stats", headers={"x-forwarded-for": "198.51.100.7, 203.0.113.9"})
    assert seen == ["peer 127.0.0.1", "peer 203.0.113.9"]


@pytest.mark.anyio
@pytest.mark.parametrize("what", ["token", "cookie"])
async def test_guesses_of_a_stranger_do_not_reach_the_store_beyond_a_rate(what: str) -> None:
    class Asked(MemoryStore):
        def send(self, items: Any, /) -> Any:
            seen.extend(items)
            return super().send(items)

    seen: list[Item] = []
    app = create_app(ServeSettings(limits=Limits(rate_per_s=1)), store=Asked())
    service = app.state.service
    await service.open()
    _, valid = await service.ask(tokens.create("ann", None, "read"))
    guesses = [f"semel_{at:016x}_{'x' * 43}" if what == "token" else f"{at:043d}" for at in range(50)]
    transport = httpx2.ASGITransport(app, client=("203.0.113.9", 1))
    async with httpx2.AsyncClient(transport=transport, base_url="http://semel.example") as client:

        async def ask(text: str) -> int:
            if what == "token":
                return (
                    await client.get("/v1/store", headers={"authorization": f"Bearer {text}"})
                ).status_code
            return (await client.get("/ui/", headers={"cookie": f"{COOKIE}={text}"})).status_code

        if what == "token":
            assert await ask(valid) == 200
        seen.clear()
        statuses = [await ask(guess) for guess in guesses]
        assert statuses.count(429) > 40
        assert sum(isinstance(item, Lookup) for item in seen) < 10
        if what == "token":
            assert await ask(valid) == 200, (
                "a token that was in use is not kept out by who shares its address"
            )
    await service.close()


# --- sessions -----------------------------------------------------------------------------------


def test_the_cookie_is_no_token_and_ends_with_the_log_out(tmp_path: Path, store: SqliteStore) -> None:
    text, token = token_for(store, None, "admin")
    with serving(settings(tmp_path)) as running:
        session = session_of(running, text)
        assert text.split("_", 2)[2] not in session
        assert token.id not in session
        cookie = {"cookie": f"{COOKIE}={session}"}
        bearer = {"authorization": f"Bearer {session}"}
        assert running.client.get("/ui/", headers=cookie).status_code == 200
        assert running.client.get("/ui/", headers={"cookie": f"{COOKIE}={text}"}).status_code == 303
        assert running.client.get("/v1/stats", headers=bearer).status_code == 401
        with serving(settings(tmp_path)) as other:
            assert other.client.get("/ui/", headers=cookie).status_code == 200, "instances share sessions"
        out = running.client.post("/ui/logout", headers=LOGIN | cookie)
        assert out.headers["location"] == "/ui/login"
        assert running.client.get("/ui/", headers=cookie).status_code == 303
        with serving(settings(tmp_path)) as other:
            assert other.client.get("/ui/", headers=cookie).status_code == 303, "everywhere"
    (page,) = store.send((Scan(tokens.TENANT, "sessions"),))
    assert session not in str(page)


@pytest.mark.anyio
@pytest.mark.parametrize("kind", KINDS)
async def test_log_ins_of_one_token_are_limited(kind: str, tmp_path: Path) -> None:
    """The store keeps each session for a week."""
    now = [100.0]
    service = Service(ServeSettings(store=store_url(kind, tmp_path)), clock=lambda: now[0])
    await service.open()
    often, _ = await service.ask(tokens.create("often", "acme", "read"))
    other, _ = await service.ask(tokens.create("other", "acme", "read"))
    sessions = [await service.log_in(often) for _ in range(LOG_INS_BURST)]
    with pytest.raises(HttpProblem, match="logged in too often") as refused:
        await service.log_in(often)
    assert refused.value.status == 429
    assert refused.value.headers["Retry-After"]
    assert await service.session(await service.log_in(other)) == other, "each token has its own limit"
    assert await service.session(sessions[0]) == often, "open sessions go on"
    page = (await service.send((Scan(tokens.TENANT, "sessions", limit=100),)))[0]
    assert len(page.records) == LOG_INS_BURST + 1, "a refused log-in is not stored"
    now[0] += 1 / LOG_INS_PER_S
    assert await service.session(await service.log_in(often)) == often
    await service.close()


def test_a_log_in_that_is_refused_says_when_to_come_back(tmp_path: Path, store: SqliteStore) -> None:
    text, _ = token_for(store, "acme", "read")
    with serving(settings(tmp_path)) as running:
        for _ in range(LOG_INS_BURST):
            session_of(running, text)
        answer = running.client.post("/ui/login", content=f"token={text}", headers=LOGIN)
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) > 0
        assert "set-cookie" not in answer.headers
        assert "logged in too often" in answer.text


# --- expiry, rotation, last use -----------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.parametrize("kind", KINDS)
async def test_a_token_expires(kind: str, tmp_path: Path) -> None:
    now = [100.0]
    service = Service(ServeSettings(store=store_url(kind, tmp_path)), clock=lambda: now[0])
    await service.open()
    lasting, text = await service.ask(tokens.create("ann", "", "read", DAY_US))
    assert lasting.expires_at == lasting.created_at + DAY_US
    assert await service.token(text) is not None
    _, short = await service.ask(tokens.create("bob", "", "read", 1))
    deadline = time.monotonic() + 30
    while await service.token(short) is not None:
        assert time.monotonic() < deadline
        now[0] += TOKEN_LIVE_S
    await service.close()


@pytest.mark.anyio
@pytest.mark.parametrize("kind", KINDS)
async def test_two_tokens_are_valid_while_one_is_rotated(kind: str, tmp_path: Path) -> None:
    now = [100.0]
    service = Service(ServeSettings(store=store_url(kind, tmp_path)), clock=lambda: now[0])
    await service.open()
    old, old_text = await service.ask(tokens.create("ann", "acme", "write", 90 * DAY_US))
    new, new_text = await service.ask(tokens.rotate(old, grace_us=DAY_US))
    assert (new.name, new.tenant, new.role) == ("ann", "acme", "write")
    assert new.expires_at - new.created_at == 90 * DAY_US
    kept = await service.token(old_text)
    assert kept is not None
    assert kept.expires_at < old.expires_at, "the old one ends with its grace"
    assert await service.token(new_text) is not None
    await service.ask(tokens.rotate(old, grace_us=0))
    now[0] += TOKEN_LIVE_S
    assert await service.token(old_text) is None
    assert await service.token(new_text) is not None
    await service.close()


@pytest.mark.anyio
@pytest.mark.parametrize("kind", KINDS)
async def test_the_use_of_a_token_is_written_once_a_minute(kind: str, tmp_path: Path) -> None:
    place = store_url(kind, tmp_path)
    first, second = (Service(ServeSettings(store=place)) for _ in range(2))
    await first.open()
    await second.open()
    token, text = await first.ask(tokens.create("ann", None, "read"))
    assert await first.ask(tokens.last_uses()) == {}
    for service in (first, first, second):
        assert await service.token(text) is not None
        for task in tuple(service._noting):
            await task
    (page,) = await first.send((Scan(tokens.TENANT, tokens.USED),))
    (record,) = page.records
    assert (await first.ask(tokens.last_uses())) == {token.id: record.settled_at_us}
    late_us = record.settled_at_us + tokens.USE_EVERY_US
    await first.ask(tokens.note_use(token.id, late_us - 1))
    (page,) = await first.send((Scan(tokens.TENANT, tokens.USED),))
    assert page.records == [record], "within the minute nothing is written"
    await first.ask(tokens.note_use(token.id, late_us))
    assert (await first.ask(tokens.last_uses()))[token.id] > record.settled_at_us
    await first.close()
    await second.close()


def test_the_command_line_shows_expiry_and_use(tmp_path: Path, store: SqliteStore) -> None:
    made = semel("token", "create", "ann", "--expires", "90d", "--all-tenants", "--json", cwd=tmp_path)
    token = json.loads(made.stdout)
    assert token["expires_at"] is not None
    with serving(settings(tmp_path), token["token"]) as running:
        assert running.client.get("/v1/stats").status_code == 200
        assert await_true(lambda: carry_out(store, tokens.last_uses()), 30)
    (listed,) = json.loads(semel("token", "list", "--json", cwd=tmp_path).stdout)["tokens"]
    assert listed["last_used_at"] is not None
    assert listed["expires_at"] == token["expires_at"]
    rotated = semel("token", "rotate", token["id"], "--grace", "1h", "--json", cwd=tmp_path)
    assert json.loads(rotated.stdout)["id"] != token["id"]
    both = json.loads(semel("token", "list", "--json", cwd=tmp_path).stdout)["tokens"]
    assert len(both) == 2
    assert both[0]["expires_at"] < both[1]["expires_at"]
    rows = semel("token", "list", cwd=tmp_path).stdout.decode().splitlines()
    assert [len(row.split("\t")) for row in rows] == [7, 7]


def test_every_answer_says_nosniff(service: Running) -> None:
    static = next(part for part in service.client.get("/ui/").text.split('"') if part.endswith("semel.js"))
    for path in ("/livez", "/readyz", "/metrics", "/docs", "/openapi.json", "/v1/stats", "/v1/nowhere", "/nowhere",
                 "/ui/", "/ui/nowhere", static, "/v1/records/a/b", "/"):  # fmt: skip
        answer = service.client.get(path)
        assert answer.headers.get_list("x-content-type-options") == ["nosniff"], path
