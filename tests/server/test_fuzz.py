"""Whatever is sent, on every route: never an answer of 500. The same seed sends the same requests."""

import asyncio
import base64
import json
import os
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pytest
from starlette.routing import Mount, Route

from semel.server.app import create_app
from semel.server.settings import Limits, ServeSettings

SEED = 1507
REQUESTS = int(os.environ.get("SEMEL_FUZZ_REQUESTS", "20000"))
ALL_AT_ONCE = 8
UNAVAILABLE = (503,)
"""The one status of its kind that a caller can meet: the service says when to ask again."""
LIMITS = Limits(rate_per_s=0, items_per_s=0, bytes_per_s=0, store_share=0, scan_share=0)
KINDS = ("application/json", "application/vnd.semel.items.v1+json", "application/vnd.semel.items.v1+msgpack",
         "application/cloudevents+json", "application/cloudevents-batch+json", "application/x-www-form-urlencoded",
         "text/plain", "")  # fmt: skip
DIGITS = "1" * 5000
TEXTS = ("", "k", "k1", "billing", "events", "semel.audit", "semel.tokens", "\x00", "a\nb", "\x85", "\u2028", "\u00fc",
         "\ud800", "x" * 200, "x" * 600, "24h", "30s", "off", "-1s", "1e9h", "9" * 30, DIGITS, "NaN", "'; --", "%00",
         "..", "{}", "[[", "0" * 32, "f" * 32)  # fmt: skip
NUMBERS = (
    0,
    1,
    -1,
    1.5,
    -0.0,
    10**6,
    10**7,
    2**31,
    2**53,
    2**63 - 1,
    2**63,
    2**64,
    2**70,
    1e300,
    10**18,
    0.1,
)
VALUES = (b"", b"o[[[", b"o{", b"jnull", b"j[1", b"j" + b"9" * 5000, b"m", b"m\xc1", b"m\x81\x01\x02", b"p\x91\xc0",
          b"xno", b"r", b"r{}", b"\xff\xfe", b"m\xdd\xff\xff\xff\xff", b"o" + b"[" * 5000,
          b"j" + b"[" * 5000 + b"]" * 5000,
          b"m" + msgspec.msgpack.encode(msgspec.msgpack.Ext(10, msgspec.msgpack.encode([hex(10**5000)]))),
          b"p" + msgspec.msgpack.encode(msgspec.msgpack.Ext(10, msgspec.msgpack.encode([hex(10**5000)]))),
          b"m" + msgspec.msgpack.encode(msgspec.msgpack.Ext(5, msgspec.msgpack.encode(["x", 2, "../etc"]))),
          b"m" + msgspec.msgpack.encode(msgspec.msgpack.Ext(2, msgspec.msgpack.encode([[1]]))),
          b'{"a": 1}', b"\x80\x81")  # fmt: skip
FIELDS = ("key", "consumer", "claims", "claim", "value", "error", "delay_s", "window", "lease", "event_type",
          "event_time", "journal", "owner", "fingerprint", "existing", "limit", "dry_run", "id", "type", "data",
          "to", "fence", "count_attempt", "token", "force", "state", "cursor", "q", "tenant", "range", "what",
          "prefix", "done")  # fmt: skip
CONSUMER = "fuzz"
KEYS = ("k", "k1", "k2")
ENDS = ("done", "done", "failed", "released", "unknown", "absent", "claimed")
ITEM_TYPES = ("claim", "claim", "claim", "settle", "settle",
              "renew", "settle", "mark", "lookup", "forget", "resolve", "scan", "purge", "count",
              "read_settings", "set_window", "admit", "switch_mode", "nothing")  # fmt: skip


class Fuzz:
    """Makes requests up; some are almost right, so that they get far."""

    def __init__(self, routes: list[tuple[str, str]]) -> None:
        self.chance = random.Random(SEED)
        self.routes = routes
        self.weights = [6 if path.startswith("/v1") else 1 for _, path in routes]
        """Pages take longer than the rest."""
        self.held: list[str] = ["bad", "AAAA"]
        self.fences: dict[str, int] = {}

    def text(self) -> str:
        return self.chance.choice(TEXTS)

    def name(self) -> str:
        return self.chance.choice((*KEYS, CONSUMER, "events")) if self.chance.random() < 0.7 else self.text()

    def coded(self) -> str:
        return base64.b64encode(self.chance.choice(VALUES)).decode()

    def any(self, depth: int = 0) -> Any:
        chance = self.chance
        match chance.randrange(9 if depth < 3 else 6):
            case 0:
                return self.text()
            case 1:
                return chance.choice(NUMBERS)
            case 2:
                return chance.choice((None, True, False))
            case 3:
                return self.coded()
            case 4:
                return self.name()
            case 5:
                return chance.choice(self.held)
            case 6:
                return [self.any(depth + 1) for _ in range(chance.randrange(4))]
            case _:
                return {chance.choice(FIELDS): self.any(depth + 1) for _ in range(chance.randrange(5))}

    def item(self) -> Any:
        """Mostly right: of a few keys, by their owner, with the fence that the server gave out."""
        chance = self.chance
        key = chance.choice(KEYS)
        item: dict[str, Any] = {
            "type": chance.choice(ITEM_TYPES), "id": ["", CONSUMER, key], "owner": "AAECAwQFBgcICQoLDA0ODw==",
            "lease_us": chance.choice((10**6, 10**8)), "window_us": 10**8, "to": chance.choice(ENDS),
            "fence": self.fences.get(key, 1), "value": self.coded(), "tenant": "", "consumer": CONSUMER,
            "mode": "lease", "keys": [self.name()], "limit": 10,
        }  # fmt: skip
        extra: dict[str, Any] = {
            "journal": self.coded(), "meta": self.coded(), "event_type": self.text(),
            "step": [self.name(), self.coded()],
            "fingerprint": self.coded(), "event_time_us": chance.choice(NUMBERS), "cursor": self.text(),
            "prefix": self.text(), "orphaned": True, "ids": self.text(), "force": True,
        }  # fmt: skip
        for name in chance.sample(sorted(extra), chance.randrange(4)):
            item[name] = extra[name]
        if chance.random() < 0.2:
            item[chance.choice(sorted(item))] = self.any()
        return item

    def learn(self, got: bytes) -> None:
        """Remember handles and fences that were given out."""
        if b'"claim":"' in got:
            self.held.append(got.partition(b'"claim":"')[2].partition(b'"')[0].decode())
            del self.held[2:-20]
        for found in re.finditer(rb'"id":\["","fuzz","(k.?)"\].{0,200}?"fence":([0-9]+)', got):
            self.fences[found[1].decode()] = int(found[2])

    def body(self, path: str) -> bytes:
        chance = self.chance
        if path.endswith("/items") and chance.random() < 0.8:
            made: Any = [self.item() for _ in range(chance.randrange(1, 4))]
            made += [{"type": "lookup", "id": ["", CONSUMER, key]} for key in KEYS]  # to learn their fences
        elif path.endswith("/claims") and chance.random() < 0.8:
            claims = [{"key": self.name()} | ({"journal": self.any()} if chance.random() < 0.3 else {})
                      for _ in range(chance.randrange(1, 4))]  # fmt: skip
            made = {"consumer": self.name(), "claims": claims}
        elif "/claims/" in path and chance.random() < 0.8:
            ending = {"claim": chance.choice(self.held)} | (
                {"value": self.any()} if chance.random() < 0.5 else {}
            )
            made = {"claims": [ending]}
        else:
            made = self.any()
        whole = json.dumps(made).encode()
        if chance.random() < 0.1:
            at = chance.randrange(len(whole) + 1)
            whole = whole[:at] + chance.choice((b"", b"\xff", b"[", DIGITS.encode(), b'"')) + whole[at:]
        if chance.random() < 0.1:
            try:
                return msgspec.msgpack.encode(made)
            except (OverflowError, UnicodeEncodeError):
                return b"\xc1"
        return whole

    def request(self) -> tuple[str, bytes, bytes, list[tuple[bytes, bytes]], bytes]:
        """Method, path, query, headers and body."""
        chance = self.chance
        ((method, path),) = chance.choices(self.routes, self.weights)
        for part, good in (
            ("consumer", (CONSUMER,)),
            ("key", KEYS),
            ("key:path", KEYS),
            ("name", KEYS),
            ("digest", KEYS),
        ):
            said = chance.choice(good) if chance.random() < 0.8 else self.name()
            path = path.replace("{" + part + "}", said)
        names = [
            f"{chance.choice(FIELDS)}={quote(self.text(), errors='replace')}"
            for _ in range(chance.randrange(3))
        ]
        body = b"" if method in ("GET", "DELETE") else self.body(path)
        form = "/ui/" in path and method == "POST"
        if form and chance.random() < 0.9:
            pairs = {
                "to": "done",
                "fence": chance.choice((DIGITS, self.text())),
                "window": self.text(),
                "consumer": self.name(),
            }
            body = "&".join(f"{name}={value}" for name, value in pairs.items()).encode(
                "utf-8", "surrogatepass"
            )
        kind = KINDS[5] if form else chance.choice(KINDS[:3] if chance.random() < 0.9 else KINDS)
        headers = [
            (b"host", b"localhost"),
            (b"content-type", kind.encode()),
            (b"sec-fetch-site", b"same-origin"),
        ]
        if chance.random() < 0.05:
            name = chance.choice(
                (b"content-length", b"semel-tenant", b"ce-id", b"ce-time", b"hx-request", b"origin")
            )
            headers.append((name, self.text().encode("utf-8", "replace")[:600]))
        return method, path.encode("utf-8", "replace"), "&".join(names).encode(), headers, body


def routes_of(app: Any) -> list[tuple[str, str]]:
    """Method and path of each route of the API and of the pages."""
    found = {
        (method.upper(), path) for path, operations in app.openapi()["paths"].items() for method in operations
    }
    found |= {("GET", "/docs"), ("GET", "/openapi.json"), ("GET", "/"), ("GET", "/ui")}
    for mount in (each for each in app.routes if isinstance(each, Mount)):
        for route in mount.routes:
            assert isinstance(route, Route)
            if not route.path.endswith("/live"):  # it does not end
                found |= {(method, mount.path + route.path) for method in route.methods or {"GET"}}
    return sorted(found)


async def ask(
    app: Any, method: str, path: bytes, query: bytes, headers: Any, body: bytes
) -> tuple[int, bytes]:
    """One request, without a network."""
    text = path.decode("utf-8", "replace")
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
             "path": text, "raw_path": path, "query_string": query, "root_path": "", "headers": headers,
             "client": ("127.0.0.1", 1), "server": ("localhost", 80), "state": {}}  # fmt: skip
    came = [{"type": "http.request", "body": body, "more_body": False}]
    status, got = 0, b""

    async def receive() -> Any:
        return came.pop() if came else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        nonlocal status, got
        status = message.get("status", status)
        got += message.get("body", b"")

    await app(scope, receive, send)
    return status, got


@pytest.mark.timeout(600)
@pytest.mark.anyio
async def test_no_request_is_answered_by_a_failure(tmp_path: Path) -> None:
    settings = ServeSettings(
        auth="none",
        audit="all",
        store=f"sqlite:///{tmp_path}/semel.db?synchronous=normal",
        port=0,
        limits=LIMITS,
    )
    app = create_app(settings)
    async with app.router.lifespan_context(app):
        fuzz = Fuzz(routes_of(app))
        assert len(fuzz.routes) > 30
        statuses: Counter[int] = Counter()
        failures: list[tuple[str, Any]] = []

        async def worker(count: int) -> None:
            for _ in range(count):
                request = fuzz.request()
                try:
                    status, got = await ask(app, *request)
                except Exception as error:  # noqa: BLE001 - a server answers 500 for whatever is raised
                    failures.append((repr(error), request))
                    continue
                if status >= 500 and status not in UNAVAILABLE:
                    failures.append((got.decode(), request))
                statuses[status] += 1
                fuzz.learn(got)

        async with asyncio.TaskGroup() as group:
            for _ in range(ALL_AT_ONCE):
                group.create_task(worker(REQUESTS // ALL_AT_ONCE))
    assert failures == []
    assert statuses[200] > REQUESTS / 20
    assert statuses[503] < REQUESTS / 100
