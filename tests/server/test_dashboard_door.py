"""Who sees which page, and which forms are believed: without a browser, as an attacker has none of its manners."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

import semel
from semel.core.commands import Count
from semel.server import tokens
from semel.server.dashboard.auth import COOKIE
from semel.server.settings import Limits, ServeSettings
from semel.stores.sqlite import SqliteStore
from tests.server.tools import Running, carry_out, serving, session_of, token_for

PAGES = ("", "events", "flight", "windows", "outbox", "stores", "observe", "check", "audit")
OURS = {"sec-fetch-site": "same-origin", "content-type": "application/x-www-form-urlencoded"}


class House:
    """A service with tokens: one for each role, and one for another tenant."""

    def __init__(self, running: Running, tokens: dict[str, str]) -> None:
        self.running, self.tokens = running, tokens
        self.sessions: dict[str, str] = {}

    def get(self, path: str, who: str = "", **headers: str) -> httpx2.Response:
        return self.running.client.get(f"/ui/{path}", headers=self._headers(who) | headers)

    def post(self, path: str, who: str, form: str = "", **headers: str) -> httpx2.Response:
        return self.running.client.post(
            f"/ui/{path}", content=form, headers=self._headers(who) | (headers or OURS)
        )

    def _headers(self, who: str) -> dict[str, str]:
        if who and who not in self.sessions:
            self.sessions[who] = session_of(self.running, self.tokens[who])
        return {"cookie": f"{COOKIE}={self.sessions[who]}"} if who else {}

    def take(self, who: str, key: str) -> dict[str, Any]:
        """Claim an event for a tenant, and complete it where it is new."""
        found: dict[str, Any] = self._ask(who, "", {"consumer": "events", "claims": [{"key": key}]})[
            "outcomes"
        ][0]
        if found["outcome"] == "claimed":
            self._ask(who, "/complete", {"claims": [{"claim": found["claim"], "value": f"value of {key}"}]})
        return found

    def _ask(self, who: str, verb: str, document: Any) -> Any:
        headers = {"authorization": f"Bearer {self.tokens[who]}", "content-type": "application/json"}
        answer = self.running.client.post(f"/v1/claims{verb}", content=json.dumps(document), headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    path = tmp_path_factory.mktemp("house") / "semel.db"
    store = SqliteStore(path, synchronous="NORMAL")
    store.open()
    tokens = {
        "read": token_for(store, "acme", "read")[0],
        "write": token_for(store, "acme", "write")[0],
        "admin": token_for(store, "acme", "admin")[0],
        "rival": token_for(store, "rival", "admin")[0],
        "all": token_for(store, None, "admin")[0],
        "watch": token_for(store, None, "read")[0],
    }
    store.close()
    limits = Limits(store_share=0, scan_share=0)  # a slow computer would refuse requests of these tests
    with serving(ServeSettings(store=f"sqlite:///{path}", port=0, limits=limits)) as running:
        yield House(running, tokens)


def test_nobody_sees_anything_without_a_token(house: House) -> None:
    for path in (*PAGES, "event/events/a", "parts/held"):
        answer = house.get(path)
        assert (answer.status_code, answer.headers["location"]) == (303, "/ui/login"), path
    assert house.get("data").status_code == 401
    assert house.get("live").status_code == 401
    assert house.get("login").status_code == 200
    for path in ("forget/events/a", "decide/events/a", "windows", "outbox", "purge"):
        assert house.post(path, "").headers["location"] == "/ui/login", path


def test_every_answer_keeps_foreign_things_out(house: House) -> None:
    for path in ("", "login", "event/events/none", "nowhere"):
        headers = house.get(path, "all").headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"


def test_pages_hold_nothing_inline_and_static_files_may_be_kept(house: House) -> None:
    for path in PAGES:
        text = house.get(path, "all").text
        assert "<script>" not in text
        assert " style=" not in text
        assert "<style" not in text
        assert " onclick" not in text
        assert "//" not in "".join(part for part in text.split('"') if part.startswith("http"))
    static = next(part for part in house.get("", "all").text.split('"') if part.endswith("semel.js"))
    answer = house.running.client.get(static)
    assert answer.status_code == 200
    assert "immutable" in answer.headers["cache-control"]
    assert house.get("static/x/../app.py", "all").status_code == 404


def test_a_tenant_sees_its_own_and_nothing_else(house: House) -> None:
    house.take("write", "of-acme")
    house.take("write", "of-acme")
    assert "value of of-acme" in house.get("event/events/of-acme", "read").text
    assert house.get("event/events/of-acme", "rival").status_code == 404
    assert house.get("event/events/of-acme?tenant=acme", "rival").status_code == 404
    assert house.get("event/events/of-acme", "all").status_code == 404
    assert "value of of-acme" in house.get("event/events/of-acme?tenant=acme", "watch").text
    assert "of-acme" not in house.get("events?state=done", "rival").text
    assert "of-acme" not in house.get("parts/tail", "rival").text
    assert house.get("data", "rival").json()["totals"]["received"] == 0
    assert house.get("data", "read").json()["totals"]["received"] >= 2
    assert any(each is not None for each in house.get("data", "watch").json()["columns"]["p50"])
    assert all(each is None for each in house.get("data", "read").json()["columns"]["p50"])
    for path in ("outbox", "check", "parts/doctor"):
        assert house.get(path, "admin").status_code == 403, path
        assert house.get(path, "watch").status_code == 200, path


def test_what_semel_itself_keeps_is_never_shown(house: House) -> None:
    for tenant in ("semel.tokens", "semel.rollups"):
        assert house.get(f"event/tokens/x?tenant={tenant}", "all").status_code == 403
    listed = house.get("events?state=done", "all").text + house.get("stores", "all").text
    assert "semel.tokens" not in listed
    assert "semel.rollups" not in listed
    assert ">tokens<" not in listed  # the consumer of the tokens, which is in the store's statistics
    assert "By consumer" in listed


def test_who_only_reads_changes_nothing_and_lists_no_keys(house: House) -> None:
    house.take("write", "kept")
    for path, form in (
        ("forget/events/kept", ""),
        ("decide/events/kept", "to=done&fence=1"),
        ("windows", "consumer=events&window=1h"),
    ):
        for who in ("read", "write"):
            assert house.post(path, who, form).status_code == 403, path
    assert house.get("audit", "read").status_code == 403
    assert "kept" not in house.get("events?state=done", "read").text
    assert ">kept<" not in house.get("parts/tail", "read").text
    assert house.take("write", "kept")["outcome"] == "done"


def test_a_form_from_elsewhere_is_refused(house: House) -> None:
    house.take("write", "stays")
    host = house.running.address.partition("://")[2]
    for headers in (
        {"sec-fetch-site": "cross-site", "origin": f"http://{host}"},
        {"sec-fetch-site": "same-site"},
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"x-nothing": "said"},
    ):
        assert house.post("forget/events/stays", "admin", **headers).status_code == 403, headers
    assert house.take("write", "stays")["outcome"] == "done"
    assert house.post("forget/events/stays", "admin", origin=f"http://{host}").status_code == 303
    assert house.take("write", "stays")["outcome"] == "claimed"


def test_a_cookie_opens_no_endpoint(house: House) -> None:
    headers = {"cookie": f"{COOKIE}={session_of(house.running, house.tokens['all'])}"}
    assert house.running.client.get("/v1/stats", headers=headers).status_code == 401


def test_a_running_claim_is_taken_away_only_by_force(house: House) -> None:
    claim = {"consumer": "billing", "claims": [{"key": "running"}]}
    headers = {"authorization": f"Bearer {house.tokens['write']}"}
    house.running.post("/v1/claims", claim, **headers)
    assert house.post("forget/billing/running", "admin").status_code == 409
    assert house.post("forget/billing/running", "admin", "force=yes").status_code == 303
    assert "forget --force" in house.get("audit", "admin").text
    assert "forget --force" not in house.get("audit", "rival").text


def test_hostile_addresses_and_keys_are_answered_in_words(house: House) -> None:
    key = "<script>alert(1)</script>&\"'"
    assert house.take("write", key)["outcome"] == "claimed"
    found = house.get("events?q=%3Cscript%3Ealert(1)%3C%2Fscript%3E%26%22'", "admin").text
    assert "<script>alert" not in found
    assert "&lt;script&gt;alert" in found
    for path in (
        "event/events/" + "x" * 600,
        "events?q=" + "y" * 600,
        "events?state=done&cursor=;--",
        "events?q=%00",
    ):
        assert house.get(path, "all").status_code in (200, 404, 422), path


def test_two_instances_and_a_worker_add_up(tmp_path: Path) -> None:
    import semel
    from semel.observe.rollups import RollupHook

    url = f"sqlite:///{tmp_path}/semel.db?synchronous=normal"
    with serving(ServeSettings(auth="none", store=url, port=0)) as first:
        for number in range(3):
            first.post("/v1/events", {"id": f"a{number}"})
    with serving(ServeSettings(auth="none", store=url, port=0)) as second:
        second.post("/v1/events", {"id": "a0"})
        hook = RollupHook(url)
        with semel.open(url, consumer="events", hooks=[hook]) as once:
            once.run("a1", int)
            once.run("b", int)
        hook.close()
    with serving(ServeSettings(auth="none", store=url, port=0)) as third:
        totals = third.client.get("/ui/data?range=1h").json()["totals"]
        assert (totals["received"], totals["processed"], totals["duplicates"]) == (6, 4, 2)


def test_without_the_dashboard_there_are_no_pages_and_no_rollups(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/semel.db?synchronous=normal"
    with serving(ServeSettings(auth="none", store=url, port=0, dashboard=False)) as running:
        assert running.post("/v1/events", {"id": "a"}).status_code == 200
        assert running.client.get("/ui/").status_code == 404
        assert running.client.get("/").status_code == 404
    store = SqliteStore(tmp_path / "semel.db")
    store.open()
    (stats,) = store.send([Count("semel.rollups")])
    store.close()
    assert isinstance(stats, semel.Stats)
    assert stats.consumers == {}


def test_who_waits_and_asks_again_is_counted_once(house: House) -> None:
    headers = {"authorization": f"Bearer {house.tokens['write']}"}
    before = house.get("data", "read").json()["totals"]
    house.running.post("/v1/claims", {"consumer": "waits", "claims": [{"key": "k"}]}, **headers)
    again = {"consumer": "waits", "claims": [{"key": "k", "owner": "ab" * 16}]}
    for _ in range(5):
        answer = house.running.post("/v1/claims", again, **headers)
        assert answer.json()["outcomes"][0]["outcome"] == "busy"
    totals = house.get("data", "read").json()["totals"]
    assert totals["received"] - before["received"] == 2
    assert totals["race"] - before["race"] == 1


def test_a_revoked_token_hears_no_more(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "semel.db", synchronous="NORMAL")
    store.open()
    text, token = token_for(store, "", "read")
    with serving(ServeSettings(store=f"sqlite:///{tmp_path}/semel.db", port=0)) as running:
        headers = {"cookie": f"{COOKIE}={session_of(running, text)}"}
        with running.client.stream("GET", "/ui/live", headers=headers, timeout=20) as live:
            lines = live.iter_lines()
            assert next(lines) == "event: tick"
            assert carry_out(store, tokens.revoke(token.id)) is True
            assert "event: tick" not in list(lines)  # it ends by itself: nothing else would end this test
        assert running.client.get("/ui/", headers=headers).status_code == 303
    store.close()
