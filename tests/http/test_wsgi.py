"""The middleware for WSGI, on a real server, with the frameworks as they are used."""

import socketserver
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import httpx2
import pytest

import semel
from semel.core.commands import Scan
from semel.http import Rules
from semel.http.wsgi import WsgiIdempotency, by_authorization
from semel.stores import MemoryStore
from tests.http.apps import WAIT_S


class Threaded(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = False
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up are the point of some tests."""


class Quiet(WSGIRequestHandler):
    def log_message(self, *args: Any) -> None:
        """Not in a test's output."""

    def get_stderr(self) -> Any:
        import io

        return io.StringIO()


@pytest.fixture
def serve() -> Iterator[Callable[[Any], str]]:
    running: list[tuple[Threaded, threading.Thread]] = []

    def start(app: Any) -> str:
        server = make_server("127.0.0.1", 0, app, Threaded, Quiet)
        assert isinstance(server, Threaded)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        running.append((server, thread))
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server, thread in running:
        server.shutdown()
        thread.join(WAIT_S)
        server.server_close()


class Shop:
    """A plain WSGI application whose paths show what a middleware can get wrong."""

    def __init__(self) -> None:
        self.ran: Counter[str] = Counter()
        self.status = "201 Created"
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.closed = threading.Event()
        self.bodies: list[bytes] = []

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        self.ran[path] += 1
        if path == "/slow":
            self.entered.set()
            self.gate.wait(WAIT_S)
        if path == "/boom":
            raise LookupError("boom")
        if path in ("/stream", "/lazy"):
            return self._parts(start_response)
        if path == "/write":
            write = start_response(self.status, [("Content-Type", "text/plain")])
            write(b"written ")
            return [b"returned"]
        self.bodies.append(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"] or 0)))
        size = int(environ["QUERY_STRING"] or 0) if path == "/large" else 0
        body = b"x" * size or b"%d" % self.ran.total()
        start_response(self.status, [("Content-Type", "text/plain"), ("Content-Length", str(len(body)))])
        return [body]

    def _parts(self, start_response: Any) -> Iterator[bytes]:
        start_response(self.status, [("Content-Type", "text/event-stream")])
        try:
            yield b"one\n"
            self.gate.wait(WAIT_S)
            yield b"two\n"
        finally:
            self.closed.set()


class Fixture:
    def __init__(self, serve: Callable[[Any], str], rules: Rules | None = None, **options: Any) -> None:
        self.shop = Shop()
        caller = options.pop("caller", None)
        self.client = semel.open(options.pop("store", None) or MemoryStore(), consumer="shop", **options)
        self.url = serve(WsgiIdempotency(self.shop, self.client, caller=caller, rules=rules))

    def post(
        self, path: str, content: bytes = b"", key: str | None = "k1", **headers: str
    ) -> httpx2.Response:
        if key is not None:
            headers["Idempotency-Key"] = key
        return httpx2.post(self.url + path, content=content, headers=headers, timeout=WAIT_S, trust_env=False)


Serve = Callable[[Any], str]


def kind(answer: httpx2.Response) -> tuple[int, str]:
    assert answer.headers["content-type"] == "application/problem+json"
    return answer.status_code, answer.json()["type"].removeprefix("urn:semel:")


def test_a_retry_gets_the_response_of_the_first(serve: Serve) -> None:
    shop = Fixture(serve)
    first, retry = shop.post("/charges", b"5"), shop.post("/charges", b"5")
    assert (first.status_code, first.text, first.reason_phrase) == (201, "1", "Created")
    assert (retry.status_code, retry.text) == (201, "1")
    assert retry.headers["idempotent-replayed"] == "true"
    assert retry.headers["idempotency-key-max-age"] == "86400"
    assert shop.shop.bodies == [b"5"]


def test_refusals(serve: Serve) -> None:
    shop = Fixture(serve, Rules(required=True, request_bytes_max=10), caller=by_authorization)
    assert kind(shop.post("/charges", key=None, Authorization="a")) == (400, "key-missing")
    assert kind(shop.post("/charges", key='"open', Authorization="a")) == (
        400,
        "key-malformed",
    )
    assert kind(shop.post("/charges")) == (401, "caller-unknown")
    assert kind(shop.post("/charges", b"x" * 11, Authorization="a")) == (413, "body-too-large")
    assert shop.shop.ran.total() == 0
    assert shop.post("/charges", b"1", Authorization="a").text == "1"
    assert kind(shop.post("/charges", b"2", Authorization="a")) == (422, "key-reused")
    assert shop.post("/charges", b"2", Authorization="b").text == "2"
    assert shop.post("/refunds", b"2", Authorization="a").text == "3"


def test_a_get_passes(serve: Serve) -> None:
    shop = Fixture(serve, Rules(required=True))
    for text in ("1", "2"):
        assert (
            httpx2.get(shop.url + "/charges", headers={"Idempotency-Key": "k"}, trust_env=False).text == text
        )


def test_a_duplicate_of_a_running_request(serve: Serve) -> None:
    shop = Fixture(serve)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(shop.post, "/slow")
        assert shop.shop.entered.wait(WAIT_S)
        assert kind(shop.post("/slow")) == (409, "still-running")
        shop.shop.gate.set()
        assert first.result().status_code == 201


def test_a_storm_on_one_key_runs_once(serve: Serve) -> None:
    shop = Fixture(serve, Rules(wait_s=WAIT_S))
    with httpx2.Client(timeout=WAIT_S, trust_env=False) as http, ThreadPoolExecutor(50) as pool:
        send = partial(http.post, f"{shop.url}/charges", headers={"Idempotency-Key": "k1"})
        answers = list(pool.map(lambda _: send(), range(200)))
    assert {(answer.status_code, answer.text) for answer in answers} == {(201, "1")}
    assert shop.shop.ran.total() == 1


def test_failures_run_again_or_are_kept_by_preset(serve: Serve) -> None:
    shop = Fixture(serve)
    shop.shop.status = "503 Away"
    assert [shop.post("/charges").text for _ in range(2)] == ["1", "2"]
    assert [shop.post("/boom").status_code for _ in range(2)] == [500, 500]
    assert shop.shop.ran["/boom"] == 2
    stripe = Fixture(serve, Rules(preset="stripe-v1"))
    assert [kind(stripe.post("/boom")) for _ in range(2)] == [(500, "handler-failed")] * 2
    assert stripe.shop.ran["/boom"] == 1


def test_a_stream_passes_as_it_comes_and_is_not_kept(serve: Serve) -> None:
    shop = Fixture(serve)
    headers = {"Idempotency-Key": "k1"}
    with (
        httpx2.Client(timeout=WAIT_S, trust_env=False) as http,
        http.stream("POST", shop.url + "/stream", headers=headers) as answer,
    ):
        lines = answer.iter_lines()
        assert next(lines) == "one"
        assert kind(shop.post("/stream")) == (409, "still-running")
        shop.shop.gate.set()
        assert list(lines) == ["two"]
    assert kind(shop.post("/stream")) == (409, "response-not-kept")
    assert shop.shop.closed.is_set()
    assert shop.shop.ran["/stream"] == 1


def test_a_large_response_passes_and_is_not_kept(serve: Serve) -> None:
    shop = Fixture(serve)
    assert len(shop.post("/large?300000").content) == 300_000
    assert kind(shop.post("/large?300000")) == (409, "response-not-kept")


def test_what_is_written_is_kept_too(serve: Serve) -> None:
    shop = Fixture(serve)
    assert [shop.post("/write").text for _ in range(2)] == ["written returned"] * 2
    assert shop.shop.ran["/write"] == 1


def test_a_store_out_of_reach(serve: Serve) -> None:
    from tests.http.test_asgi import Down

    shut = Fixture(serve, store=Down("Admit"))
    assert kind(shut.post("/charges")) == (503, "store-unavailable")
    assert shut.shop.ran.total() == 0
    ajar = Fixture(serve, Rules(fail_open=True), store=Down("Admit"))
    assert ajar.post("/charges", b"body").text == "1"
    assert ajar.shop.bodies == [b"body"]
    unrecorded = Fixture(serve, store=Down("Settle Renew"), lease="600ms")  # so long is it tried
    assert kind(unrecorded.post("/charges")) == (503, "not-recorded")


def runs_once(url: str) -> None:
    headers = {"Idempotency-Key": "k1"}
    first, retry = (
        httpx2.post(url + "/charges", headers=headers, json={"cents": 5}, trust_env=False) for _ in range(2)
    )
    assert (first.status_code, first.json()) == (201, {"number": 1, "cents": 5})
    assert (retry.status_code, retry.json()) == (201, {"number": 1, "cents": 5})
    assert retry.headers["idempotent-replayed"] == "true"


def test_flask(serve: Serve) -> None:
    from flask import Flask, request

    app, ran = Flask(__name__), list[int]()

    @app.post("/charges")
    def charge() -> tuple[dict[str, int], int]:
        ran.append(1)
        return {"number": len(ran), "cents": request.json["cents"]}, 201

    client = semel.open(MemoryStore(), consumer="shop")
    app.wsgi_app = WsgiIdempotency(app.wsgi_app, client, caller=None)  # type: ignore[method-assign]
    runs_once(serve(app))


DJANGO = """
import sys, json
from django.conf import settings
settings.configure(ALLOWED_HOSTS=["*"], ROOT_URLCONF=__name__, SECRET_KEY="x", MIDDLEWARE=[])
import django
django.setup()
from django.core.wsgi import get_wsgi_application
from django.http import JsonResponse
from django.urls import path
import semel
from semel.stores import MemoryStore
from semel.wsgi import IdempotencyMiddleware

ran = []

def charge(request):
    ran.append(1)
    return JsonResponse({"number": len(ran), "cents": json.loads(request.body)["cents"]}, status=201)

urlpatterns = [path("charges", charge)]
client = semel.open(MemoryStore(), consumer="shop")
from wsgiref.simple_server import make_server
server = make_server("127.0.0.1", 0, IdempotencyMiddleware(get_wsgi_application(), client, caller=None))
print(server.server_port, flush=True)
server.serve_forever()
"""


def test_django() -> None:
    """In a process of its own: its settings are of the process."""
    import subprocess

    command = [sys.executable, "-c", DJANGO]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline().strip()
            assert line, process.stderr
            runs_once(f"http://127.0.0.1:{line}")
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("status", "kept"), [("401 Unauthorized", 0), ("403 Forbidden", 0), ("400 Bad Request", 1)]
)
def test_a_caller_whom_the_application_refuses_leaves_no_record(
    serve: Callable[[Any], str], status: str, kept: int
) -> None:
    store, shop = MemoryStore(), Shop()
    shop.status = status
    with semel.open(store, consumer="shop") as client:
        url = serve(WsgiIdempotency(shop, client, caller=by_authorization))
        headers = {"Idempotency-Key": "k", "Authorization": "Bearer forged"}
        answer = httpx2.post(f"{url}/charges", headers=headers, trust_env=False)
        assert answer.status_code == int(status[:3])
        (page,) = store.send((Scan(),))
        assert len(page.records) == kept
