"""What a client sees of the middleware, on a real server."""

import json
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest

import semel
from semel.core.commands import Scan
from semel.http import Preset, Rules
from semel.http.asgi import AsgiIdempotency, by_authorization
from semel.stores import MemoryStore
from tests.http.apps import WAIT_S, Shop
from tests.http.conftest import House

Build = Callable[..., House]


def problem(response: httpx2.Response) -> tuple[int, str]:
    assert response.headers["content-type"] == "application/problem+json"
    document = json.loads(response.text)
    assert document["status"] == response.status_code
    assert document["title"]
    assert document["detail"]
    return response.status_code, document["type"].rpartition(":")[2]


# --- replay ---


def test_a_retry_gets_status_headers_and_body_of_the_first(house: Build) -> None:
    shop = house()
    first = shop.post("/charges", {"cents": 500})
    retry = shop.post("/charges", {"cents": 500})
    assert (first.status_code, retry.status_code) == (201, 201)
    assert first.json() == retry.json() == {"number": 1}
    assert first.headers["x-number"] == retry.headers["x-number"] == "1"
    assert "idempotent-replayed" not in first.headers
    assert retry.headers["idempotent-replayed"] == "true"
    assert shop.shop.ran.total() == 1


def test_the_window_is_published(house: Build) -> None:
    shop = house(window="2h")
    assert shop.post("/charges").headers["idempotency-key-max-age"] == "7200"
    assert shop.post("/charges").headers["idempotency-key-max-age"] == "7200"


def test_without_a_key_every_request_runs(house: Build) -> None:
    shop = house()
    for number in (1, 2):
        assert shop.post("/charges", key=None).json() == {"number": number}


@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_other_methods_pass_even_with_a_key(house: Build, method: str) -> None:
    shop = house(Rules(required=True))
    for number in (1, 2):
        answer = shop.request(method, "/charges", headers={"Idempotency-Key": "k1"})
        assert answer.json() == {"number": number}
        assert "idempotency-key-max-age" not in answer.headers


def test_patch_is_guarded_too(house: Build) -> None:
    shop = house()
    for _ in range(2):
        shop.request("PATCH", "/charges", headers={"Idempotency-Key": "k1"})
    assert shop.shop.ran == {"PATCH /charges": 1}


def test_the_application_reads_the_body_as_it_was_sent(house: Build) -> None:
    shop = house()
    text = "grüße, 世界 \0 \U0001f600".encode()
    shop.request("POST", "/charges", content=text, headers={"Idempotency-Key": "k1"})
    shop.request(
        "POST", "/charges", content=iter([b"a", b"b" * 70_000, b"c"]), headers={"Idempotency-Key": "k2"}
    )
    assert shop.shop.bodies == [text, b"a" + b"b" * 70_000 + b"c"]


def test_cookies_dates_and_headers_of_the_connection_are_not_kept(house: Build) -> None:
    shop = house()
    first, retry = shop.post("/cookie"), shop.post("/cookie")
    assert "session=secret" in first.headers["set-cookie"]
    assert "set-cookie" not in retry.headers
    assert "x-hop" not in retry.headers
    assert retry.headers["x-kept"] == "yes"
    assert retry.headers.get_list("x-twice") == ["a", "b"]
    assert retry.headers.get_list("date") != []
    assert len(retry.headers.get_list("date")) == 1, "the server's own, of now"
    assert shop.shop.ran["cookie"] == 1


def test_a_handler_knows_the_claim_it_runs_under(house: Build) -> None:
    shop = house()
    shop.shop.status = 500
    assert shop.post("/current").json() == {"attempt": 1}
    assert shop.post("/current").json() == {"attempt": 2}
    assert len(shop.shop.keys) == 2
    assert len(set(shop.shop.keys)) == 1, "what other systems are given is the same on every attempt"


# --- what makes two requests the same ---


def test_another_body_path_or_query_under_one_key_is_refused(house: Build) -> None:
    shop = house()
    shop.post("/charges", {"cents": 1})
    assert problem(shop.post("/charges", {"cents": 2})) == (422, "key-reused")
    assert problem(shop.post("/charges?expand=1", {"cents": 1})) == (422, "key-reused")
    assert shop.shop.ran.total() == 1


def test_the_same_key_on_another_method_or_route_is_another_request(house: Build) -> None:
    shop = house()
    shop.post("/charges")
    shop.post("/refunds")
    shop.request("PATCH", "/charges", headers={"Idempotency-Key": "k1"})
    assert shop.shop.ran == {"POST /charges": 1, "POST /refunds": 1, "PATCH /charges": 1}


def test_by_its_route_the_path_belongs_to_the_fingerprint(serve: Any) -> None:
    client = semel.aopen(MemoryStore(), consumer="shop")
    app = AsgiIdempotency(Shop().app, client, caller=None, route=lambda scope: "/orders/{number}/pay")
    url = serve(app).url
    with httpx2.Client(base_url=url, headers={"Idempotency-Key": "k1"}, trust_env=False) as http:
        assert http.post("/orders/1/pay").status_code == 201
        assert problem(http.post("/orders/2/pay")) == (422, "key-reused")
        assert http.post("/orders/1/pay").headers["idempotent-replayed"] == "true"


def test_callers_do_not_share_keys_and_strangers_are_refused(house: Build) -> None:
    shop = house(caller=by_authorization)
    ann = shop.post("/charges", headers={"Authorization": "Bearer ann"})
    bob = shop.post("/charges", headers={"Authorization": "Bearer bob"})
    again = shop.post("/charges", headers={"Authorization": "Bearer ann"})
    assert (ann.json(), bob.json(), again.json()) == ({"number": 1}, {"number": 2}, {"number": 1})
    stranger = shop.post("/charges")
    assert problem(stranger) == (401, "caller-unknown")
    assert stranger.headers["www-authenticate"]
    assert shop.shop.ran.total() == 2


@pytest.mark.parametrize(("status", "kept"), [(401, 0), (403, 0), (400, 1)])
def test_a_caller_whom_the_application_refuses_leaves_no_record(house: Build, status: int, kept: int) -> None:
    store = MemoryStore()
    shop = house(caller=by_authorization, store=store)
    shop.shop.status = status
    assert shop.post("/charges", headers={"Authorization": "Bearer forged"}).status_code == status
    (page,) = store.send((Scan(),))
    assert len(page.records) == kept


def test_a_caller_who_is_refused_later_keeps_what_there_was(house: Build) -> None:
    store = MemoryStore()
    shop = house(caller=by_authorization, store=store)
    for status in (500, 401):
        shop.shop.status = status
        assert shop.post("/charges", headers={"Authorization": "Bearer ann"}).status_code == status
    (page,) = store.send((Scan(),))
    assert len(page.records) == 1


def test_a_caller_may_be_awaited(house: Build) -> None:
    async def who(scope: Any) -> str | None:
        return dict(scope["headers"]).get(b"x-user", b"").decode() or None

    shop = house(caller=who)
    assert shop.post("/charges", headers={"X-User": "ann"}).json() == {"number": 1}
    assert shop.post("/charges", headers={"X-User": "bob"}).json() == {"number": 2}
    assert shop.post("/charges").status_code == 401


def test_a_caller_that_fails_runs_nothing(house: Build) -> None:
    def who(scope: Any) -> str:
        raise LookupError("no such table")

    shop = house(caller=who)
    assert shop.post("/charges").status_code == 500
    assert shop.shop.ran.total() == 0


# --- the header ---


def test_a_required_key_is_asked_for_with_a_link_to_the_docs(house: Build) -> None:
    shop = house(Rules(required=True, docs="https://shop.example/keys"))
    answer = shop.post("/charges", key=None)
    assert answer.status_code == 400
    assert answer.json()["type"] == "https://shop.example/keys#key-missing"
    assert answer.headers["link"] == '<https://shop.example/keys>; rel="help"'
    assert shop.shop.ran.total() == 0


def test_quoted_and_bare_spell_one_key(house: Build) -> None:
    shop = house()
    assert shop.post("/charges", key='"8e03"').json() == shop.post("/charges", key="8e03").json()
    assert shop.shop.ran.total() == 1


@pytest.mark.parametrize("key", ["", "a" * 256, '"open', '""', "a\tb"])
def test_what_is_no_key_is_refused(house: Build, key: str) -> None:
    shop = house()
    assert problem(shop.post("/charges", key=key)) == (400, "key-malformed")
    assert shop.shop.ran.total() == 0


def raw(url: str, head: bytes, body: bytes = b"") -> bytes:
    """Speak to the server without a client that would keep us from being wrong."""
    where = urlsplit(url)
    with socket.create_connection((where.hostname, where.port), WAIT_S) as wire:
        wire.sendall(head + b"Connection: close\r\n\r\n" + body)
        answer = b""
        while part := wire.recv(65536):
            answer += part
    return answer


@pytest.mark.parametrize(
    "lines",
    [
        b"Idempotency-Key: k1\r\nIdempotency-Key: k2\r\n",
        b"Idempotency-Key: gr\xc3\xbc\xc3\x9fe\r\n",
        b"Idempotency-Key: " + b"k" * 20_000 + b"\r\n",
        b"Idempotency-Key: k1\rX-Injected: 1\r\n",
        b"Idempotency-Key: k1\x00\r\n",
    ],
    ids=["twice", "unicode", "giant", "injection", "nul"],
)
def test_a_hostile_header_runs_nothing(house: Build, lines: bytes) -> None:
    shop = house()
    answer = raw(shop.url, b"POST /charges HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n" + lines)
    assert answer.split(b" ")[1] == b"400"
    assert b"X-Injected" not in answer
    assert shop.shop.ran.total() == 0


def test_strict_takes_structured_strings_alone(house: Build) -> None:
    shop = house(Rules(strict=True))
    assert problem(shop.post("/charges", key="8e03")) == (400, "key-malformed")
    assert problem(shop.post("/charges", key="token")) == (400, "key-malformed")
    assert shop.post("/charges", key='"8e03"').status_code == 201


def test_a_body_over_the_limit_is_refused(house: Build) -> None:
    shop = house(Rules(request_bytes_max=10))
    headers = {"Idempotency-Key": "k1"}
    declared = shop.request("POST", "/charges", content=b"x" * 11, headers=headers)
    chunked = shop.request("POST", "/charges", content=iter([b"x" * 6, b"x" * 5]), headers=headers)
    assert problem(declared) == problem(chunked) == (413, "body-too-large")
    assert shop.shop.ran.total() == 0
    assert shop.request("POST", "/charges", content=b"x" * 10, headers=headers).status_code == 201
    assert shop.request("POST", "/charges", content=b"x" * 11).status_code == 201, "without a key it passes"


# --- concurrent duplicates ---


def test_a_duplicate_of_a_running_request_is_told_when_to_come_back(house: Build) -> None:
    shop = house(lease="30s")
    with ThreadPoolExecutor() as pool:
        first = pool.submit(shop.post, "/slow")
        assert shop.shop.entered.wait(WAIT_S)
        duplicate = shop.post("/slow")
        assert problem(duplicate) == (409, "still-running")
        assert 20 <= int(duplicate.headers["retry-after"]) <= 30
        shop.shop.gate.set()
        assert first.result().status_code == 201
    assert shop.post("/slow").headers["idempotent-replayed"] == "true"
    assert shop.shop.ran["slow"] == 1


def test_a_duplicate_that_waits_gets_the_response(house: Build) -> None:
    shop = house(Rules(wait_s=WAIT_S))
    with ThreadPoolExecutor() as pool:
        first = pool.submit(shop.post, "/slow")
        assert shop.shop.entered.wait(WAIT_S)
        duplicate = pool.submit(shop.post, "/slow")
        shop.shop.gate.set()
        assert first.result().json() == duplicate.result().json() == {"slow": 1}
    assert duplicate.result().headers["idempotent-replayed"] == "true"
    assert shop.shop.ran["slow"] == 1


def test_a_duplicate_that_waits_takes_over_when_the_first_fails(house: Build) -> None:
    shop = house(Rules(wait_s=WAIT_S))
    shop.shop.status = 503
    with ThreadPoolExecutor() as pool:
        first = pool.submit(shop.post, "/slow")
        assert shop.shop.entered.wait(WAIT_S)
        duplicate = pool.submit(shop.post, "/slow")
        shop.shop.gate.set()
        assert first.result().json() == {"slow": 1}
        assert duplicate.result().json() == {"slow": 2}
    assert shop.shop.ran["slow"] == 2


def test_a_handler_longer_than_its_lease_keeps_its_claim(house: Build) -> None:
    shop = house(lease="1s")
    ticking = threading.Event()
    with ThreadPoolExecutor() as pool:
        first = pool.submit(shop.post, "/slow")
        assert shop.shop.entered.wait(WAIT_S)
        for _ in range(5):
            ticking.wait(0.4)
            assert shop.post("/slow").status_code == 409
        shop.shop.gate.set()
        assert first.result().status_code == 201
    assert shop.shop.ran["slow"] == 1


# --- presets ---

KEPT = {
    "ietf": {200: 1, 201: 1, 302: 1, 404: 1, 409: 1, 422: 1, 400: 2, 401: 2, 403: 2, 429: 2, 500: 2, 503: 2},
    "stripe-v1": {200: 1, 201: 1, 404: 1, 400: 2, 401: 2, 429: 2, 500: 1, 503: 1},
    "stripe-v2": {200: 1, 302: 1, 400: 2, 402: 2, 404: 2, 409: 2, 500: 2},
}
"""How often two requests with one key run, by status."""


@pytest.mark.parametrize("preset", KEPT)
def test_a_preset_keeps_what_it_says(house: Build, preset: str) -> None:
    shop = house(Rules(preset=preset))
    for status, runs in KEPT[preset].items():
        shop.shop.status = status
        shop.shop.ran.clear()
        answers = [shop.post("/charges", key=f"{preset}-{status}") for _ in range(2)]
        assert [answer.status_code for answer in answers] == [status, status]
        assert (status, shop.shop.ran.total()) == (status, runs)


@pytest.mark.parametrize(("preset", "age"), [("ietf", 3600), ("stripe-v1", 86_400), ("stripe-v2", 2_592_000)])
def test_a_preset_remembers_for_at_least_its_window(house: Build, preset: str, age: int) -> None:
    shop = house(Rules(preset=preset), window="1h")
    assert shop.post("/charges").headers["idempotency-key-max-age"] == str(age)


def test_a_preset_of_ones_own(house: Build) -> None:
    shop = house(Rules(preset=Preset("teapots", lambda status: status == 418)))
    for status, runs in ((418, 1), (200, 2)):
        shop.shop.status = status
        shop.shop.ran.clear()
        for _ in range(2):
            shop.post("/charges", key=str(status))
        assert shop.shop.ran.total() == runs


def test_an_exception_runs_again_or_is_kept_by_preset(house: Build) -> None:
    shop = house()
    assert [shop.post("/boom").status_code for _ in range(2)] == [500, 500]
    assert shop.shop.ran["boom"] == 2
    stripe = house(Rules(preset="stripe-v1"))
    first, retry = stripe.post("/boom"), stripe.post("/boom")
    assert problem(first) == problem(retry) == (500, "handler-failed")
    assert first.content == retry.content
    assert stripe.shop.ran["boom"] == 1


def test_around_the_whole_application_its_own_error_page_is_kept(serve: Any) -> None:
    shop, client = Shop(), semel.aopen(MemoryStore(), consumer="shop")
    url = serve(AsgiIdempotency(shop.app, client, caller=None, rules=Rules(preset="stripe-v1"))).url
    headers = {"Idempotency-Key": "k1"}
    first, retry = (httpx2.post(f"{url}/boom", headers=headers, trust_env=False) for _ in range(2))
    assert (
        (first.status_code, first.text) == (retry.status_code, retry.text) == (500, "Internal Server Error")
    )
    assert retry.headers["idempotent-replayed"] == "true"
    assert shop.ran["boom"] == 1


def test_in_quarantine_an_exception_is_not_run_again_unasked(house: Build) -> None:
    shop = house(Rules(preset="stripe-v1"), mode="quarantine")
    assert shop.post("/boom").status_code == 500
    retry = shop.post("/boom")
    assert problem(retry) == (409, "outcome-unknown")
    assert "retry-after" not in retry.headers
    assert shop.shop.ran["boom"] == 1


def test_in_quarantine_a_refusal_runs_again_and_a_server_error_does_not(house: Build) -> None:
    shop = house(mode="quarantine")
    shop.shop.status = 429
    assert [shop.post("/charges").status_code for _ in range(2)] == [429, 429]
    shop.shop.status = 502
    assert shop.post("/charges", key="k2").status_code == 502
    assert problem(shop.post("/charges", key="k2")) == (409, "outcome-unknown")


# --- what passes through ---


@pytest.mark.parametrize("path", ["/stream", "/large?bytes=300000"])
def test_a_response_that_is_not_kept_is_not_run_again(house: Build, path: str) -> None:
    shop = house()
    first = shop.post(path)
    assert len(first.content) == (300_000 if "large" in path else len("part 0;part 1;part 2;"))
    assert problem(shop.post(path)) == (409, "response-not-kept")
    assert shop.shop.ran.total() == 1


def test_a_streamed_failure_runs_again(house: Build) -> None:
    shop = house()
    shop.shop.status = 500
    assert [shop.post("/stream").text for _ in range(2)] == ["part 0;part 1;part 2;"] * 2
    assert shop.shop.ran["stream"] == 2


def test_a_response_at_the_limit_is_kept_and_one_over_it_is_not(house: Build) -> None:
    shop = house(Rules(response_bytes_max=4096))
    assert len(shop.post("/large?bytes=4096", key="a").content) == 4096
    assert shop.post("/large?bytes=4096", key="a").headers["idempotent-replayed"] == "true"
    assert len(shop.post("/large?bytes=4097", key="b").content) == 4097
    assert problem(shop.post("/large?bytes=4097", key="b")) == (409, "response-not-kept")


def test_events_pass_as_they_happen(house: Build) -> None:
    shop = house()
    with (
        httpx2.Client(base_url=shop.url, timeout=WAIT_S, trust_env=False) as http,
        http.stream("POST", "/events", headers={"Idempotency-Key": "k1"}) as answer,
    ):
        lines = answer.iter_lines()
        assert next(lines) == "data: one"
        assert problem(shop.post("/events")) == (409, "still-running")
        shop.shop.gate.set()
        assert [line for line in lines if line] == ["data: two"]
    assert problem(shop.post("/events")) == (409, "response-not-kept")
    assert shop.shop.ran["events"] == 1


@pytest.mark.parametrize("size", [100, 1_000_000])
def test_files_pass(house: Build, tmp_path: Path, size: int) -> None:
    shop = house()
    shop.shop.file = tmp_path / "receipt"
    shop.shop.file.write_bytes(b"f" * size)
    assert shop.post("/file").content == b"f" * size
    retry = shop.post("/file")
    assert shop.shop.ran["file"] == 1
    if size == 100:
        assert retry.content == b"f" * size
    else:
        assert problem(retry) == (409, "response-not-kept")


def test_what_runs_behind_the_response_does_not_delay_it(house: Build) -> None:
    shop = house()
    assert shop.post("/background").json() == {"queued": True}
    assert not shop.shop.behind.is_set()
    assert shop.post("/background").headers["idempotent-replayed"] == "true"
    shop.shop.gate.set()
    assert shop.shop.behind.wait(WAIT_S)
    assert shop.shop.ran["background"] == 1


# --- disconnects ---


def hang_up(shop: House, path: str) -> None:
    where = urlsplit(shop.url)
    with socket.create_connection((where.hostname, where.port), WAIT_S) as wire:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nIdempotency-Key: k1\r\n\r\n"
        wire.sendall(head.encode())
        if path == "/slow":
            assert shop.shop.entered.wait(WAIT_S)
        else:
            wire.recv(1)


def test_a_handler_goes_on_when_its_client_has_gone(house: Build) -> None:
    shop = house(Rules(wait_s=WAIT_S))
    hang_up(shop, "/slow")
    shop.shop.gate.set()
    retry = shop.post("/slow")
    assert retry.json() == {"slow": 1}
    assert retry.headers["idempotent-replayed"] == "true"
    assert shop.shop.ran["slow"] == 1


def test_an_endless_stream_ends_with_its_reader_and_counts_as_executed(house: Build) -> None:
    shop = house(Rules(wait_s=WAIT_S))
    hang_up(shop, "/endless")
    assert shop.shop.behind.wait(WAIT_S)
    assert problem(shop.post("/endless")) == (409, "response-not-kept")
    assert shop.shop.ran["endless"] == 1


# --- trouble with the store ---


class Down(MemoryStore):
    """Can be cut off: whatever is sent then gets no answer."""

    def __init__(self, items: str = "") -> None:
        super().__init__()
        self.items = items

    def send(self, items: Any) -> Any:
        if self.items and any(type(item).__name__ in self.items for item in items):
            return [semel.Unavailable(semel.errors.StoreUnavailable("cut off"))] * len(items)
        return super().send(items)


def test_a_store_out_of_reach_refuses_and_says_when_to_come_back(house: Build) -> None:
    store = Down()
    shop = house(store=store)
    shop.post("/charges", key="k0")
    store.items = "Claim"
    answer = shop.post("/charges")
    assert problem(answer) == (503, "store-unavailable")
    assert int(answer.headers["retry-after"]) >= 1
    assert shop.shop.ran.total() == 1
    store.items = ""
    assert shop.post("/charges").status_code == 201


def test_a_store_out_of_reach_from_the_start(house: Build) -> None:
    shop = house(store=Down("Admit"))
    assert problem(shop.post("/charges")) == (503, "store-unavailable")
    assert shop.shop.ran.total() == 0


def test_by_choice_requests_run_unguarded_meanwhile(house: Build) -> None:
    store = Down("Admit")
    shop = house(Rules(fail_open=True), store=store)
    for number in (1, 2):
        answer = shop.post("/charges", {"cents": number})
        assert answer.json() == {"number": number}
        assert "idempotency-key-max-age" not in answer.headers
    assert shop.shop.bodies[0] == b'{"cents":1}'


def test_what_ran_and_was_not_recorded_is_not_answered_as_done(house: Build) -> None:
    store = Down("Settle Renew")
    shop = house(store=store, lease="600ms")  # so long is it tried
    answer = shop.post("/charges")
    assert problem(answer) == (503, "not-recorded")
    assert int(answer.headers["retry-after"]) >= 1
    with pytest.raises(httpx2.RemoteProtocolError):
        shop.post("/stream")  # begun, so that it can only be cut off: it must not look whole


def test_a_handler_that_lost_its_claim_is_stopped(house: Build) -> None:
    store = MemoryStore()
    shop = house(store=store, lease="300ms")
    with ThreadPoolExecutor() as pool:
        first = pool.submit(shop.post, "/slow")
        assert shop.shop.entered.wait(WAIT_S)
        records = semel.open(store, consumer="shop").records
        assert isinstance(records.forget("POST /slow * k1", force=True), semel.Forgotten)
        shop.shop.gate.set()
        assert problem(first.result()) == (503, "claim-lost")


# --- wrong use ---


@pytest.mark.parametrize(
    "wrong", [{"preset": "paypal"}, {"response_bytes_max": 0}, {"request_bytes_max": -1}, {"docs": "a\r\nb"}]
)
def test_settings_are_checked_on_birth(wrong: dict[str, Any]) -> None:
    with pytest.raises(semel.errors.PolicyInvalid):
        Rules(**wrong)


def test_a_consumer_of_another_mode_is_refused() -> None:
    client = semel.aopen(MemoryStore(), consumer="shop", mode="mark")
    with pytest.raises(semel.errors.ModeMismatch):
        AsgiIdempotency(Shop().app, client, caller=None)
