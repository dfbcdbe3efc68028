"""Clients as they are: one that makes keys and retries by itself, one on the command line, many at once."""

import asyncio
import json
import os
import subprocess
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
import stripe

from semel.http import Rules
from semel.http.asgi import by_authorization
from semel.stores import MemoryStore
from tests.http.apps import WAIT_S
from tests.http.conftest import House, Served
from tests.services import postgres, redis
from tests.services.programs import program

Build = Callable[..., House]
SOAK = bool(os.environ.get("SEMEL_SOAK"))
STORM = 2_000 if SOAK else 200
PLACES: dict[str, Callable[[Any], str | None]] = {
    "memory": lambda folder: None,
    "sqlite": lambda folder: f"sqlite:///{folder}/keys.db",
    "redis": redis.place,
    "postgres": postgres.place,
}


class Bank:
    """Speaks as much of Stripe's API as a charge takes, and loses its first answers."""

    def __init__(self, lose: int) -> None:
        self.charges: list[bytes] = []
        self.lose = lose
        self.keys: list[bytes] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        self.charges.append(body)
        answer = json.dumps({"id": f"ch_{len(self.charges)}", "object": "charge", "amount": 500}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(answer))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    def behind(self, guarded: Any) -> Any:
        """What a broken network does: the request arrives, the answer does not."""

        async def network(scope: Any, receive: Any, send: Any) -> None:
            self.keys += [value for name, value in scope["headers"] if name == b"idempotency-key"]
            if self.lose:
                self.lose -= 1

                async def nowhere(message: Any) -> None:
                    """Lost on the way."""

                await guarded(scope, receive, nowhere)
                busy = {"type": "http.response.start", "status": 503, "headers": [(b"content-length", b"0")]}
                await send(busy)
                await send({"type": "http.response.body", "body": b""})
                return
            await guarded(scope, receive, send)

        return network


def test_stripes_own_client_retries_and_charges_once(serve: Callable[..., Served]) -> None:
    import semel
    from semel.http.asgi import AsgiIdempotency

    bank = Bank(lose=2)
    client = semel.aopen(MemoryStore(), consumer="bank")
    guarded = AsgiIdempotency(bank, client, caller=by_authorization, rules=Rules(preset="stripe-v1"))
    url = serve(bank.behind(guarded)).url
    customer = stripe.StripeClient("sk_test_x", base_addresses={"api": url}, max_network_retries=3)
    charge = customer.v1.charges.create({"amount": 500, "currency": "eur", "source": "tok_visa"})
    assert charge.id == "ch_1"
    assert len(bank.keys) == 3, "two answers were lost"
    assert len(set(bank.keys)) == 1, "the client sent its own key each time"
    assert bank.charges == [b"amount=500&currency=eur&source=tok_visa"]
    assert charge.last_response is not None
    assert charge.last_response.headers["idempotent-replayed"] == "true"
    assert customer.v1.charges.create({"amount": 500, "currency": "eur"}).id == "ch_2", "another key"


def test_curl_retries_and_runs_once(house: Build) -> None:
    shop = house()
    command = [
        program("curl"), "--silent", "--show-error", "--noproxy", "*", "--include",
        "--header", 'Idempotency-Key: "8e03"', "--json", '{"cents": 500}', f"{shop.url}/charges",
    ]  # fmt: skip
    answers = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(2)]
    assert all(answer.startswith("HTTP/1.1 201 Created") for answer in answers)
    assert all(answer.endswith('{"number":1}') for answer in answers)
    assert ["idempotent-replayed: true" in answer for answer in answers] == [False, True]
    assert shop.shop.bodies == [b'{"cents": 500}']


@pytest.mark.parametrize("wait_s", [0.0, WAIT_S])
@pytest.mark.parametrize("kind", ["memory", "sqlite", "redis", "postgres"])
def test_a_storm_on_one_key_runs_once(house: Build, tmp_path: Any, wait_s: float, kind: str) -> None:
    store = PLACES[kind](tmp_path)
    shop = house(Rules(wait_s=wait_s), store=store)

    async def storm() -> Counter[tuple[int, str]]:
        limits = httpx2.Limits(max_connections=STORM, max_keepalive_connections=STORM)
        async with httpx2.AsyncClient(
            base_url=shop.url, limits=limits, timeout=10 * WAIT_S, trust_env=False
        ) as http:
            headers = {"Idempotency-Key": "storm"}
            waiting = [http.post("/charges", headers=headers, json={"cents": 1}) for _ in range(STORM)]
            return Counter(
                (answer.status_code, answer.headers.get("idempotent-replayed", ""))
                for answer in await asyncio.gather(*waiting)
            )

    seen = asyncio.run(storm())
    assert shop.shop.ran.total() == 1
    assert seen[201, ""] == 1
    if wait_s:
        assert seen[201, "true"] == STORM - 1
    else:
        assert seen[201, "true"] + seen[409, ""] == STORM - 1
