"""The audit: every act of a person or a token is an entry that nobody can change; damage is shown."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import connect

from semel.codec import encode
from semel.core.commands import Answer, Claim, Granted, Item, Renew, Scan, Settle
from semel.errors import StoreUnavailable
from semel.runtime import audit
from semel.server.dashboard.auth import COOKIE
from semel.server.settings import ServeSettings
from semel.stores.sqlite import SqliteStore
from semel.types import Unavailable
from tests.cli.processes import semel
from tests.server.tools import Running, serving, session_of, token_for
from tests.waiting import await_true

LOGIN = {"sec-fetch-site": "same-origin", "content-type": "application/x-www-form-urlencoded"}


class Town:
    """A service with two admins: one of a tenant, one of all."""

    def __init__(self, running: Running, store: SqliteStore, folder: Path) -> None:
        self.running, self.store, self.folder = running, store, folder
        self.acme, self.acme_token = token_for(store, "acme", "admin")
        self.all, self.all_token = token_for(store, None, "admin")
        self.seen = len(self.entries())

    def entries(self, consumer: str = audit.CONSUMER) -> list[audit.AuditEntry]:
        (page,) = self.store.send((Scan(audit.TENANT, consumer, limit=1000),))
        return sorted(map(audit.entry_of, page.records), key=lambda entry: entry.at_us)

    def new(self) -> list[tuple[str, str, str]]:
        """Tenant, action and actor of what was written since the last time."""
        found = self.entries()
        fresh, self.seen = found[self.seen :], len(found)
        return [(each.tenant, each.action, each.actor) for each in fresh]

    def api(self, who: str, method: str, path: str, sent: Any = None) -> int:
        headers = {"authorization": f"Bearer {who}"}
        return self.running.client.request(method, path, json=sent, headers=headers).status_code

    def page(self, who: str, path: str, form: str | None = None) -> str:
        headers = LOGIN | {"cookie": f"{COOKIE}={session_of(self.running, who)}"}
        method = "GET" if form is None else "POST"
        return self.running.client.request(method, f"/ui/{path}", content=form, headers=headers).text

    def claim(self, key: str) -> None:
        sent = {"consumer": "orders", "claims": [{"key": key}]}
        assert self.api(self.acme, "POST", "/v1/claims", sent) == 200


@contextmanager
def town_in(folder: Path, **settings: Any) -> Iterator[Town]:
    store = SqliteStore(folder / "semel.db", synchronous="NORMAL")
    store.open()
    url = f"sqlite:///{folder}/semel.db?synchronous=normal"
    with serving(ServeSettings(store=url, port=0, **settings)) as running:
        yield Town(running, store, folder)
    store.close()


@pytest.fixture
def town(tmp_path: Path) -> Iterator[Town]:
    with town_in(tmp_path) as made:
        yield made


def test_every_act_over_the_api_is_written(town: Town) -> None:
    town.claim("k")
    assert town.new() == [], "to claim is no act of an operator"
    acme, everybody = (f"test (token {each.id})" for each in (town.acme_token, town.all_token))
    window = {"consumer": "orders", "window": "1h"}
    item = {"type": "forget", "id": ["", "orders", "k2"], "force": True}
    resolve = {"type": "resolve", "id": ["", "orders", "k3"], "fence": 1, "to": "absent"}
    mode = {"type": "switch_mode", "tenant": "", "consumer": "later", "mode": "mark"}
    for who, method, path, sent, entry in (
        (town.acme, "DELETE", "/v1/records/orders/k?force=true", None, ("acme", "forget --force", acme)),
        (town.acme, "PUT", "/v1/windows", window, ("acme", "window set", acme)),
        (town.acme, "POST", "/v1/items", [item], ("acme", "forget --force", acme)),
        (town.acme, "POST", "/v1/items", [resolve], ("acme", "resolve to absent", acme)),
        (town.acme, "POST", "/v1/items", [mode], ("acme", "mode switch", acme)),
        (town.all, "POST", "/v1/purge", {}, ("", "purge", everybody)),
        (town.all, "POST", "/v1/items", [{"type": "purge"}], ("", "purge", everybody)),
    ):
        assert town.api(who, method, path, sent) == 200, path
        assert town.new() == [entry]


def test_every_act_on_a_page_is_written(town: Town) -> None:
    actor = f"test (token {town.acme_token.id})"
    town.claim("k")
    town.page(town.acme, "forget/orders/k", "force=yes")
    town.page(town.acme, "windows", "consumer=orders&window=2h")
    assert town.new() == [("acme", "forget --force", actor), ("acme", "window set", actor)]
    town.page(town.all, "purge", "")
    town.page(town.all, "outbox", "verb=retry")
    assert [action for _, action, _ in town.new()] == ["purge", "outbox retry"]


def test_every_act_on_the_command_line_is_written(town: Town) -> None:
    town.claim("k")
    for command, action in (
        (("forget", "k", "--tenant", "acme", "--force", "--yes"), "forget --force"),
        (("window", "set", "orders", "3h", "--tenant", "acme"), "window set"),
        (("window", "unset", "orders", "--tenant", "acme"), "window set"),
        (("consumer", "set-mode", "orders", "quarantine", "--tenant", "acme"), "mode switch"),
        (("purge",), "purge"),
        (("token", "create", "bob", "--tenant", "acme"), "token create"),
        (("token", "revoke", town.acme_token.id, "--yes"), "token revoke"),
    ):
        ended = semel(*command, cwd=town.folder)
        assert ended.returncode == 0, (command, ended.stderr)
        ((tenant, done, actor),) = town.new()
        assert done == action
        assert "@" in actor
        assert tenant == ("" if action == "purge" else "acme")
    ended = semel("token", "rotate", town.all_token.id, cwd=town.folder)
    assert ended.returncode == 0
    assert [action for _, action, _ in town.new()] == ["token create", "token rotate"]


def test_the_command_line_changes_no_entry(town: Town) -> None:
    (page,) = town.store.send((Scan(audit.TENANT, audit.CONSUMER),))
    key = page.records[0].key
    before = town.entries()
    for command in (
        ("forget", key, "--consumer", "semel.audit", "--force", "--yes"),
        ("window", "set", "semel.audit", "off", "--tenant", "semel.audit", "--existing", "--yes"),
        ("window", "set", "tokens", "off", "--tenant", "semel.tokens", "--existing", "--yes"),
        ("consumer", "set-mode", "semel.audit", "mark"),
    ):
        assert semel(*command, cwd=town.folder).returncode == 2, command
    assert town.entries() == before


def test_a_tenant_sees_its_own_entries(town: Town) -> None:
    town.claim("secret-of-acme")
    town.page(town.acme, "forget/orders/secret-of-acme", "force=yes")
    rival, _ = token_for(town.store, "rival", "admin")
    assert "secret-of-acme" in town.page(town.acme, "audit")
    assert "secret-of-acme" in town.page(town.all, "audit")
    assert "secret-of-acme" not in town.page(rival, "audit")
    assert "token create" in town.page(rival, "audit")


@pytest.mark.parametrize(
    "value",
    [None, b"", b"o[[[", b"z", encode("text"), encode({"action": "x"}), encode({"action": 1, "actor": "a"})],
)
def test_a_damaged_entry_is_shown_as_damaged(town: Town, value: bytes | None) -> None:
    place, owner = (audit.TENANT, audit.CONSUMER, audit.prefix_of("acme") + "ab"), b"o" * 16
    (granted,) = town.store.send((Claim(place, owner, 10**7, 10**12),))
    assert isinstance(granted, Granted)
    town.store.send((Settle(place, owner, granted.fence, "done", value, 10**12, 10**7),))
    shown = town.page(town.acme, "audit")
    assert "damaged" in shown
    assert "token create" in shown, "the others are there"
    listed = semel("list", "--internal", "--limit", "0", cwd=town.folder).stdout.decode()
    (line,) = [each for each in listed.splitlines() if each.startswith(place[2])]
    assert "(damaged)" in line
    assert listed.count("(damaged)") == 1


def test_an_entry_moved_to_another_tenant_is_damaged(town: Town) -> None:
    place, owner = (audit.TENANT, audit.CONSUMER, audit.prefix_of("rival") + "ab"), b"o" * 16
    (granted,) = town.store.send((Claim(place, owner, 10**7, 10**12),))
    assert isinstance(granted, Granted)
    value = encode({"action": "forget", "actor": "ann", "tenant": "acme"})
    town.store.send((Settle(place, owner, granted.fence, "done", value, 10**12, 10**7),))
    assert sum(entry.damaged for entry in town.entries()) == 1


def test_nothing_is_done_where_the_audit_cannot_be_written(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise StoreUnavailable("the store gave no answer")

    town.claim("k")
    monkeypatch.setattr(audit, "note", broken)
    assert town.api(town.acme, "DELETE", "/v1/records/orders/k?force=true") == 503
    monkeypatch.undo()
    assert town.api(town.acme, "GET", "/v1/records/orders/k") == 200


# --- every write of a token, if that is asked for ---


def test_every_request_that_writes_is_an_entry_if_all_are_asked_for(tmp_path: Path) -> None:
    with town_in(tmp_path, audit="all") as town:
        acme, everybody = (f"test (token {each.id})" for each in (town.acme_token, town.all_token))
        seen: list[audit.AuditEntry] = []

        def new() -> list[tuple[str, str, str, Any]]:
            fresh = [each for each in town.entries(audit.WRITES) if each not in seen]
            seen.extend(fresh)
            return [(each.tenant, each.actor, each.details["route"], each.details["items"]) for each in fresh]

        town.claim("k")
        assert new() == [
            ("acme", acme, "POST /v1/claims", {"admit": {"orders": 1}}),
            ("acme", acme, "POST /v1/claims", {"claim": {"orders": 1}}),
        ]
        place, owner = ["acme", "orders", "k2"], "AAECAwQFBgcICQoLDA0ODw=="
        claim = {"type": "claim", "id": place, "owner": owner, "lease_us": 10**7, "window_us": 10**9}
        mark = {"type": "mark", "tenant": "other", "consumer": "m", "keys": ["a", "b"], "window_us": 10**9}
        lookup = {"type": "lookup", "id": place}
        forget = {"type": "forget", "id": ["acme", "orders", "k9"]}
        assert town.api(town.all, "POST", "/v1/items", [claim, mark, lookup, lookup, forget]) == 200
        assert sorted(new()) == [
            ("acme", everybody, "POST /v1/items", {"claim": {"orders": 1}}),
            ("other", everybody, "POST /v1/items", {"mark": {"m": 2}}),
        ]
        assert town.api(town.all, "POST", "/v1/items", [lookup]) == 200
        assert town.api(town.acme, "GET", "/v1/stats") == 200
        assert new() == [], "to read is no write"
        assert town.api(town.acme, "POST", "/v1/events", [{"id": "e1"}, {"id": "e2"}]) == 200
        assert new() == [("acme", acme, "POST /v1/events", {"event": {"events": 2}})]
        headers = {"authorization": f"Bearer {town.acme}"}
        with connect(f"ws://127.0.0.1:{town.running.port}/v1/events", additional_headers=headers) as socket:
            socket.send('{"id": "e3"}')
            assert '"accepted"' in socket.recv()
        assert new() == [("acme", acme, "WEBSOCKET /v1/events", {"event": {"events": 1}})]

        town.seen = len(town.entries())
        shown = town.page(town.acme, "audit")
        assert town.new() == [("acme", "log in", acme)]
        assert "WEBSOCKET /v1/events" in shown
        assert "1 claim orders" in shown
        assert "2 mark m" not in shown, "of another tenant"
        assert "2 mark m" in town.page(town.all, "audit?tenant=other")
        assert "2 mark m" not in town.page(town.all, "audit?tenant=other&at=2020-01-01")
        listed = semel("list", "--consumer", "semel.audit.writes", "--limit", "0", cwd=town.folder)
        assert len(listed.stdout.splitlines()) == len(seen)
        assert b"(damaged)" not in listed.stdout
        assert semel("forget", "k", "--consumer", "semel.audit.writes", cwd=town.folder).returncode != 0


class Recorded(SqliteStore):
    """Remembers what it was sent, and does not write the audit while it is told so."""

    sent: list[Item]
    is_full = False

    def send(self, items: Sequence[Item], /) -> list[Answer]:
        self.sent += items
        if self.is_full and any(isinstance(item, Claim) and item.id[1] == audit.WRITES for item in items):
            return [Unavailable(StoreUnavailable("no room")) for _ in items]
        return super().send(items)


def test_a_request_is_written_down_before_it_is_carried_out_or_not_at_all(tmp_path: Path) -> None:
    store = Recorded(tmp_path / "semel.db", synchronous="NORMAL")
    store.sent = []
    store.open()
    token, _ = token_for(store, "acme", "admin")
    settings = ServeSettings(port=0, audit="all", dashboard=False)
    with serving(settings, token, store=store) as running:
        held = running.claim("k")["claim"]
        store.sent.clear()
        assert running.end("renew", held)["outcome"] == "renewed"
        assert await_true(lambda: len(store.sent) == 3)
        assert isinstance(store.sent[0], Claim)
        assert store.sent[0].id[1] == audit.WRITES
        assert {type(item) for item in store.sent[1:]} == {Settle, Renew}, "one round trip more, and no other"
        store.is_full = True
        assert running.post("/v1/claims/complete", {"claims": [{"claim": held}]}).status_code == 503
        assert running.post("/v1/events", {"id": "e"}).status_code == 503
        headers = {"authorization": f"Bearer {token}"}
        with connect(f"ws://127.0.0.1:{running.port}/v1/events", additional_headers=headers) as socket:
            socket.send('{"id": "e"}')
            assert '"busy"' in socket.recv()
        assert running.client.get("/v1/records/events/e").status_code == 404
        assert running.client.get("/v1/records/billing/k").json()["state"] == "claimed"


def test_an_entry_about_a_request_is_readable_before_it_is_completed(town: Town) -> None:
    """As after a crash between the two."""
    writes = {"acme": {"claim": Counter({f"c{at}": 1 for at in range(150)} | {"most": 9})}}
    (claim,) = audit.claims_of_writes("ann", "POST /v1/items", writes, time.time_ns() // 1000)
    town.store.send((claim,))
    (entry,) = town.entries(audit.WRITES)
    assert (entry.damaged, entry.actor, entry.tenant) == (False, "ann", "acme")
    counts = entry.details["items"]["claim"]
    assert (counts["most"], counts["(51 others)"], len(counts)) == (9, 51, 101)
    assert "POST /v1/items" in town.page(town.acme, "audit")
    place = (audit.TENANT, audit.WRITES, audit.prefix_of("acme") + audit.minute_of(time.time_ns() // 1000))
    town.store.send((Claim(place, b"o" * 16, 10**7, 10**12, meta=b"\xff"),))
    assert sum(entry.damaged for entry in town.entries(audit.WRITES)) == 1
    assert "damaged" in town.page(town.acme, "audit")
