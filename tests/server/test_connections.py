"""Connections that go on: WebSockets and live pages; and what a request's head may not say."""

import resource
import socket
import stat
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from semel.core.commands import Admit
from semel.server import tokens
from semel.server.dashboard.auth import COOKIE
from semel.server.dashboard.state import LIVE_PER_TOKEN_MAX
from semel.server.serving import FILES_SPARE, connections_max
from semel.server.settings import Limits, ServeSettings
from semel.stores.sqlite import SqliteStore
from tests.server.tools import Running, serving, session_of, token_for
from tests.waiting import await_true


def test_a_websocket_outlives_the_time_for_a_head(tmp_path: Path) -> None:
    limits = Limits(head_wait_s=0.2)
    settings = ServeSettings(auth="none", store=f"sqlite:///{tmp_path}/semel.db", port=0, limits=limits)
    with serving(settings) as running, connect(f"ws://127.0.0.1:{running.port}/v1/events") as socket:
        with pytest.raises(TimeoutError):
            socket.recv(timeout=1)  # it is quiet, and stays open
        socket.send('{"id": "w1"}')
        assert "accepted" in str(socket.recv(timeout=10))


def test_a_websocket_whose_client_does_not_read_is_cut(tmp_path: Path) -> None:
    settings = ServeSettings(
        auth="none", store=f"sqlite:///{tmp_path}/semel.db", port=0, limits=Limits(write_wait_s=0.3)
    )
    upgrade = (
        b"GET /v1/events HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
        b"sec-websocket-version: 13\r\nsec-websocket-key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n\r\n"
    )
    body = b"[" + b",".join([b"{}"] * 1000) + b"]"  # each is answered as invalid, at some length
    message = b"\x81\xfe" + len(body).to_bytes(2, "big") + b"\0\0\0\0" + body
    with serving(settings) as running, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", running.port))
        connection.sendall(upgrade)
        assert connection.recv(12) == b"HTTP/1.1 101"
        connection.settimeout(30)
        with pytest.raises(OSError, match=r"reset|pipe"):
            connection.sendall(message * 10_000)


def test_a_websocket_ends_when_its_token_is_revoked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("semel.server.service.TOKEN_LIVE_S", 0.2)
    monkeypatch.setattr("semel.server.routes.events.TOKEN_LIVE_S", 0.2)
    store = SqliteStore(tmp_path / "semel.db")
    store.open()
    text, token = token_for(store)
    token_for(store)  # another one, so that the store is never without any
    headers = {"authorization": f"Bearer {text}"}
    with (
        serving(ServeSettings(store=f"sqlite:///{tmp_path}/semel.db", port=0)) as running,
        connect(f"ws://127.0.0.1:{running.port}/v1/events", additional_headers=headers) as socket,
    ):
        socket.send('{"id": "w1"}')
        assert "accepted" in str(socket.recv(timeout=10))
        asking, answer = tokens.revoke(token.id), None
        with suppress(StopIteration):
            while True:
                (answer,) = store.send((asking.send(answer),))
        with pytest.raises(ConnectionClosed, match="no longer valid"):
            socket.recv(timeout=20)
    store.close()


def test_a_websocket_that_is_refused_writes_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else a token of the lowest role could fill the log."""
    store = SqliteStore(tmp_path / "semel.db")
    store.open()
    reader, writer = (f"Bearer {token_for(store, 'shop', role)[0]}" for role in ("read", "write"))
    store.close()
    callers: list[dict[str, str]] = [
        {"authorization": reader},
        {"authorization": writer, "semel-tenant": "other"},
        {"authorization": "Bearer semel_no"},
        {},
    ]
    with serving(ServeSettings(store=f"sqlite:///{tmp_path}/semel.db", port=0)) as running:
        for headers in callers:
            with pytest.raises(InvalidStatus, match="403"):
                connect(f"ws://127.0.0.1:{running.port}/v1/events", additional_headers=headers).__enter__()
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


def test_live_pages_are_bounded_by_token(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "semel.db")
    store.open()
    mine, other = (token_for(store, "shop", "read")[0] for _ in range(2))
    store.close()
    with ExitStack() as stack:
        running = stack.enter_context(serving(ServeSettings(store=f"sqlite:///{tmp_path}/semel.db", port=0)))

        def watch(token: str) -> tuple[int, str]:
            """Open a live page, which stays open; returns its status, and its first line."""
            cookie = {"cookie": f"{COOKIE}={sessions[token]}"}
            answer = stack.enter_context(running.client.stream("GET", "/ui/live", headers=cookie, timeout=30))
            return answer.status_code, next(answer.iter_lines()) if answer.status_code == 200 else ""

        sessions = {token: session_of(running, token) for token in (mine, other)}
        for _ in range(LIVE_PER_TOKEN_MAX):
            assert watch(mine) == (200, "event: tick")
        assert watch(mine)[0] == 429
        assert watch(other) == (200, "event: tick")


def test_a_request_of_two_lengths_is_refused(service: Running) -> None:
    body = b"0\r\n\r\nGET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n"
    head = (
        b"POST /v1/items HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\ntransfer-encoding: chunked\r\n\r\n" % len(body)
    )
    got = service.raw(head + body, hangs_up=True)
    assert got.startswith(b"HTTP/1.1 400")
    assert got.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("path", ["/ui", "/ui/events/", "/v1/store/", "/livez/"])
def test_no_redirect_leads_to_another_host(service: Running, path: str) -> None:
    answer = service.client.get(path, headers={"host": f"localhost:{service.port}"}, follow_redirects=False)
    assert answer.headers.get("location", "/ui/") == "/ui/"
    assert answer.status_code in (307, 404)


def test_there_are_no_more_connections_than_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (1024, 4096))
    assert connections_max(100) == 100
    assert connections_max(2000) == 1024 - FILES_SPARE
    monkeypatch.setattr(
        resource, "getrlimit", lambda _which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    )
    assert connections_max(2000) == 2000


def test_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    def modes() -> dict[str, int]:
        return {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}

    store = SqliteStore(tmp_path / "semel.db")
    store.open()
    store.send((Admit("", "c", "lease"),))
    assert modes() == dict.fromkeys(("semel.db", "semel.db-shm", "semel.db-wal"), 0o600)
    store.close()
    (tmp_path / "semel.db").chmod(0o660)  # the operator's choice is kept
    store = SqliteStore(tmp_path / "semel.db")
    store.open()
    store.send((Admit("", "d", "lease"),))
    assert modes() == dict.fromkeys(("semel.db", "semel.db-shm", "semel.db-wal"), 0o660)
    store.close()


def test_the_file_of_persisted_events_is_too(tmp_path: Path) -> None:
    settings = ServeSettings(
        auth="none",
        store=f"sqlite:///{tmp_path}/semel.db",
        port=0,
        persist=f"sqlite:///{tmp_path}/rows.db",
    )
    with serving(settings) as running:
        assert running.post("/v1/events", {"id": "e"}).status_code == 200
        assert await_true((tmp_path / "rows.db-wal").exists)
        for path in tmp_path.glob("rows.db*"):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def test_what_was_not_readable_is_shown_as_such(service: Running) -> None:
    """Values that ended requests with 500: numbers of 5,000 digits, journals and meta that do not decode."""
    big = "bYHHBP8="
    claim = {"type": "claim", "owner": "AAECAwQFBgcICQoLDA0ODw==", "lease_us": 10**7, "window_us": 10**7}
    for at, more in enumerate(({"journal": "b1tbWw=="}, {"meta": "//4="}, {"journal": big})):
        answer = service.post("/v1/items", [{**claim, "id": ["", "billing", f"odd {at}"], **more}])
        assert answer.status_code == 200
        assert service.client.get(f"/v1/records/billing/odd {at}").status_code == 200
        assert service.client.get(f"/ui/event/billing/odd {at}").status_code == 200
    number = "1" * 5000
    assert service.client.post(
        "/v1/events", content=f'{{"id": {number}}}', headers={"content-type": "application/json"}
    ).status_code in (400, 422)
    form = {"to": "done", "fence": number}
    ours = {"sec-fetch-site": "same-origin"}
    assert service.client.post("/ui/decide/billing/odd 0", data=form, headers=ours).status_code == 422
    for name in ("cursor", "q", "range"):
        params = {"state": "claimed", name: number}
        assert service.client.get("/ui/events", params=params).status_code in (200, 422)


@pytest.mark.parametrize("sent", [b"NONSENSE\r\n\r\n", b"GET / HTTP/1.1\r\nhost: a\r\nx: \x00\r\n\r\n"])
def test_what_is_no_request_is_answered_with_the_headers_of_every_answer(
    service: Running, sent: bytes
) -> None:
    head, _, body = service.raw(sent, hangs_up=True).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"x-content-type-options: nosniff" in head.lower()
    assert b"urn:semel:malformed" in body


def test_connections_beyond_the_limit_are_refused_and_closed(tmp_path: Path) -> None:
    settings = ServeSettings(
        auth="none", store=f"sqlite:///{tmp_path}/semel.db", port=0, limits=Limits(connections_max=1)
    )
    asked = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with serving(settings) as running:
        assert running.client.get("/livez").status_code == 200  # and its connection stays open
        head, _, body = running.raw(asked, hangs_up=True).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"x-content-type-options: nosniff" in head.lower()
        assert b"urn:semel:too-many-connections" in body
        with pytest.raises(InvalidStatus), connect(f"ws://127.0.0.1:{running.port}/v1/events"):
            pass
        running.client.close()
        assert await_true(lambda: running.raw(asked).startswith(b"HTTP/1.1 200 "))
