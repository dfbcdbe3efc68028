"""What comes from outside is bounded, and answered, whatever it is."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from semel.server.settings import Limits, ServeSettings
from semel.testing.contract.payloads import KEYS
from tests.server.tools import JSON, Running, serving


def url(folder: Path) -> str:
    return f"sqlite:///{folder}/semel.db?synchronous=normal"


def items(key: str = "k", **more: Any) -> list[dict[str, Any]]:
    owner = "AAECAwQFBgcICQoLDA0ODw=="
    claim = {
        "type": "claim",
        "id": ["", "billing", key],
        "owner": owner,
        "lease_us": 10**7,
        "window_us": 10**7,
    }
    return [{**claim, **more}]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nul",
        b"[1,",
        b"\xff\xfe",
        b'"\xed\xa0\x80"',
        b"[" * 100_000,
        b'{"a":' * 5000,
        b"\x00" * 10,
    ],
)
@pytest.mark.parametrize(
    "path", ["/v1/items", "/v1/claims", "/v1/claims/complete", "/v1/events", "/v1/purge"]
)
def test_malformed_json(service: Running, path: str, body: bytes) -> None:
    answer = service.client.post(path, content=body, headers=JSON)
    assert answer.status_code in (400, 422)
    assert answer.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\xdd\xff\xff\xff\xff", b"\x91" * 5000, b"\x80"])
def test_malformed_msgpack(service: Running, body: bytes) -> None:
    headers = {"content-type": "application/vnd.semel.items.v1+msgpack"}
    assert service.client.post("/v1/items", content=body, headers=headers).status_code in (400, 422)


@pytest.mark.parametrize(
    "kind",
    [
        "",
        "text/plain",
        "application/xml",
        "multipart/form-data",
        "application/vnd.semel.items.v2+json",
        "application/json;\x01",
    ],
)
def test_wrong_content_types(service: Running, kind: str) -> None:
    for path in ("/v1/items", "/v1/claims", "/v1/events"):
        answer = service.client.post(
            path, content=b"[]", headers={"content-type": kind} if kind and kind.isprintable() else {}
        )
        assert answer.status_code == 415


def test_packed_bodies_are_refused(service: Running) -> None:
    answer = service.client.post("/v1/items", content=b"[]", headers={**JSON, "content-encoding": "gzip"})
    assert answer.status_code == 415


@pytest.mark.parametrize(
    "key", ["a\x00b", "a\nb", "a\r\nset-cookie: x", "\x7f", "", "k" * 513, "\u00fc" * 257]
)
def test_keys_that_no_producer_means_are_refused(anywhere: Running, key: str) -> None:
    for path, body in (
        ("/v1/items", items(key)),
        ("/v1/claims", {"consumer": "billing", "claims": [{"key": key}]}),
        ("/v1/events", {"id": key}),
    ):
        answer = anywhere.post(path, body)
        assert answer.status_code == 422, path
        assert "set-cookie" not in answer.headers


@pytest.mark.parametrize("key", [key for key in KEYS if key.isprintable()], ids=ascii)
def test_every_other_key_is_its_own(anywhere: Running, key: str) -> None:
    claim = anywhere.claim(key)
    assert anywhere.end("complete", claim["claim"], value=key)["outcome"] == "completed"
    assert anywhere.claim(key)["value"] == key
    assert (
        anywhere.post("/v1/items", [{"type": "lookup", "id": ["", "billing", key]}]).json()[0]["record"][
            "id"
        ][2]
        == key
    )


@pytest.mark.parametrize(
    "more",
    [
        {"lease_us": 0},
        {"lease_us": 10**15},
        {"lease_us": -1},
        {"window_us": 10**18},
        {"window_us": -5},
        {"owner": "AAEC"},
        {"event_time_us": 2**60},
        {"event_type": "x\x00"},
        {"event_type": "x" * 129},
        {"fingerprint": "A" * 200},
        {"id": ["", "", "k"]},
        {"id": ["", "c" * 129, "k"]},
        {"id": ["", "billing"]},
        {"id": "billing"},
        {"lease_us": 2**70},
        {"lease_us": 1.5},
        {"type": "claims"},
        {"type": None},
    ],
    ids=str,
)
def test_items_out_of_bounds(anywhere: Running, more: dict[str, Any]) -> None:
    assert anywhere.post("/v1/items", items("bounded", **more)).status_code in (413, 422)
    assert anywhere.client.get("/v1/records/billing/bounded").status_code == 404


@pytest.mark.parametrize(
    "cursor", ["x", "-1", "999999999999999999999", "d", "s0.0.", '["a"]', "\u00fc", "0:0:0"]
)
def test_a_cursor_that_was_never_given_out(anywhere: Running, cursor: str) -> None:
    assert anywhere.client.get("/v1/records", params={"cursor": cursor}).status_code in (200, 422)
    assert anywhere.post("/v1/items", [{"type": "scan", "cursor": cursor}]).status_code in (200, 422)


def test_a_mark_with_a_copy_is_refused(service: Running) -> None:
    mark = {"type": "mark", "tenant": "", "consumer": "m", "keys": ["a", "a"], "window_us": 1}
    assert service.post("/v1/items", [mark]).status_code == 422


def test_oversized_bodies_and_batches(service: Running) -> None:
    assert service.client.post("/v1/items", content=b" " * (4 * 2**20 + 1), headers=JSON).status_code == 413
    assert service.post("/v1/items", items() * 1001).status_code == 413
    claims = {"consumer": "billing", "claims": [{"key": str(at)} for at in range(1001)]}
    assert service.post("/v1/claims", claims).status_code == 413
    assert service.post("/v1/events", [{"id": str(at)} for at in range(1001)]).status_code == 413
    assert service.post("/v1/events", {"id": "big", "data": "x" * 330_000}).status_code == 422


def test_a_chunked_body_is_counted_as_it_comes(service: Running) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(100):
            yield b" " * 100_000

    assert service.client.post("/v1/items", content=pieces(), headers=JSON).status_code == 413


def head(path: str, *lines: str) -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", "host: localhost", *lines, "", ""]).encode("latin-1")


def test_header_injection_and_nonsense(service: Running) -> None:
    for sent in (
        b"GARBAGE\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        head("/v1/items", "content-type: application/json", "content-length: -1"),
        head("/v1/items", "content-length: 5", "content-length: 6"),
        head("/v1/items", "x" * 20_000),
        head("/v1/items\r\nx-injected: 1", "content-length: 0"),
        b"GET /v1/records/a%0d%0aset-cookie:%20x=1/k HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n",
        b"GET /v1/records/billing/a%00b HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n",
        b"GET /v1/records/billing/%ff%fe HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n",
    ):
        got = service.raw(sent, half_close=True)
        assert got.startswith(b"HTTP/1.1 4") or got == b"", got[:80]
        assert b"set-cookie" not in got.partition(b"\r\n\r\n")[0].lower()
    assert service.client.get("/livez").status_code == 200


def test_no_value_of_a_caller_becomes_a_header(anywhere: Running) -> None:
    """What comes back in an answer comes back in its body, escaped."""
    odd = {"id": "inject", "type": "a\r\nset-cookie: x=1", "n": "\x00"}
    answers = [
        anywhere.post("/v1/events", odd),
        anywhere.post("/v1/events", {"id": "x\r\nset-cookie: x=1"}),
        anywhere.post("/v1/claims", {"consumer": "b\r\nset-cookie: x=1", "claims": [{"key": "k"}]}),
        anywhere.client.get("/v1/records/billing/k%0d%0aset-cookie:%20x=1"),
        anywhere.client.get("/v1/records", params={"consumer": "a\r\nset-cookie: x"}),
    ]
    assert [answer.status_code // 100 for answer in answers] == [2, 4, 4, 4, 4]
    assert not any("set-cookie" in answer.headers for answer in answers)


def test_half_closed_sockets_are_answered(service: Running) -> None:
    body = json.dumps(items("half closed")).encode()
    sent = (
        head(
            "/v1/items", "content-type: application/json", f"content-length: {len(body)}", "connection: close"
        )
        + body
    )
    assert b"granted" in service.raw(sent, half_close=True)


def test_a_body_that_ends_early_changes_nothing(service: Running) -> None:
    body = json.dumps(items("cut short")).encode()
    sent = head("/v1/items", "content-type: application/json", f"content-length: {len(body) + 10}") + body
    service.raw(sent, half_close=True)
    assert service.client.get("/v1/records/billing/cut short").status_code == 404


def test_slow_clients_are_let_go(tmp_path: Path) -> None:
    limits = Limits(head_wait_s=0.2, body_wait_s=0.2)
    with serving(ServeSettings(auth="none", store=url(tmp_path), port=0, limits=limits)) as running:
        assert running.raw(b"POST /v1/items HT", hangs_up=True) == b""
        slow = head("/v1/items", "content-type: application/json", "content-length: 100") + b"["
        assert running.raw(slow).startswith(b"HTTP/1.1 408")
        # A second request on the connection has no more time for its head than the first.
        first = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n"
        assert running.raw(first + b"GET /li", hangs_up=True).count(b"HTTP/1.1 200") == 1


def test_many_slow_clients_keep_nobody_else_waiting(tmp_path: Path) -> None:
    with serving(
        ServeSettings(auth="none", store=url(tmp_path), port=0, limits=Limits(body_wait_s=1))
    ) as running:
        slow = head("/v1/items", "content-type: application/json", "content-length: 100") + b"["
        threads = [threading.Thread(target=running.raw, args=(slow,)) for _ in range(30)]
        for thread in threads:
            thread.start()
        assert running.claim("quick")["outcome"] == "claimed"
        for thread in threads:
            thread.join(30)


def test_who_asks_too_often_is_slowed_down(tmp_path: Path) -> None:
    limits = Limits(rate_per_s=2)
    with serving(ServeSettings(auth="none", store=url(tmp_path), port=0, limits=limits)) as running:
        answers = [running.client.get("/v1/store") for _ in range(8)]
        assert {answer.status_code for answer in answers} == {200, 429}
        late = next(answer for answer in answers if answer.status_code == 429)
        assert int(late.headers["retry-after"]) >= 1
        assert running.client.get("/livez").status_code == 200


def test_who_holds_too_many_claims_completes_some_first(tmp_path: Path) -> None:
    limits = Limits(live_claims_max=3)
    with serving(ServeSettings(auth="none", store=url(tmp_path), port=0, limits=limits)) as running:
        held = [running.claim(f"k{at}") for at in range(3)]
        assert [each["outcome"] for each in held] == ["claimed"] * 3
        answer = running.post("/v1/claims", {"consumer": "billing", "claims": [{"key": "k3"}]})
        assert (answer.status_code, answer.json()["type"]) == (429, "urn:semel:too-many-claims")
        running.end("complete", held[0]["claim"])
        assert running.claim("k3")["outcome"] == "claimed"


@pytest.mark.parametrize(
    "headers", [{"host": "evil.example"}, {"origin": "https://evil.example"}, {"origin": "null"}]
)
def test_without_tokens_other_sites_are_kept_out(service: Running, headers: dict[str, str]) -> None:
    assert service.client.get("/v1/store", headers=headers).status_code == 403
    assert service.client.get("/v1/store").status_code == 200


def test_methods_and_paths_that_are_not_there(service: Running) -> None:
    assert service.client.get("/v1/items").status_code == 405
    assert service.client.get("/v1/nothing").status_code == 404
    assert service.client.get("/v1/nothing").headers["content-type"] == "application/problem+json"
