"""The audit: every act of a person or a token is an entry that nobody can change; damage is shown."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from semel.codec import encode
from semel.core.commands import Claim, Granted, Scan, Settle
from semel.runtime import audit
from semel.server.dashboard.auth import COOKIE
from semel.server.settings import ServeSettings
from semel.stores.sqlite import SqliteStore
from tests.cli.processes import semel
from tests.server.tools import Running, serving, session_of, token_for

LOGIN = {"sec-fetch-site": "same-origin", "content-type": "application/x-www-form-urlencoded"}


class Town:
    """A service with two admins: one of a tenant, one of all."""

    def __init__(self, running: Running, store: SqliteStore, folder: Path) -> None:
        self.running, self.store, self.folder = running, store, folder
        self.acme, self.acme_token = token_for(store, "acme", "admin")
        self.all, self.all_token = token_for(store, None, "admin")
        self.seen = len(self.entries())

    def entries(self) -> list[audit.AuditEntry]:
        (page,) = self.store.send((Scan(audit.TENANT, audit.CONSUMER, limit=1000),))
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


@pytest.fixture
def town(tmp_path: Path) -> Iterator[Town]:
    store = SqliteStore(tmp_path / "semel.db", synchronous="NORMAL")
    store.open()
    with serving(ServeSettings(store=f"sqlite:///{tmp_path}/semel.db?synchronous=normal", port=0)) as running:
        yield Town(running, store, tmp_path)
    store.close()


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
    from semel.errors import StoreUnavailable

    def broken(*_: Any, **__: Any) -> Any:
        raise StoreUnavailable("the store gave no answer")

    town.claim("k")
    monkeypatch.setattr(audit, "note", broken)
    assert town.api(town.acme, "DELETE", "/v1/records/orders/k?force=true") == 503
    monkeypatch.undo()
    assert town.api(town.acme, "GET", "/v1/records/orders/k") == 200
