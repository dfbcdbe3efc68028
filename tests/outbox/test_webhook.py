"""The webhook sink: signed, to public addresses only, patient with nobody."""

import asyncio
import base64
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import standardwebhooks
from msgspec.structs import replace

from semel.core.relay_flow import NotPublished, Published, PublishRefused
from semel.errors import PolicyInvalid
from semel.outbox import Retrying
from semel.outbox.sinks.webhook import CALLS_MAX, Allowed, WebhookSink, is_public
from tests.outbox.brokers import rows
from tests.outbox.targets import Target, certificate, status, target
from tests.outbox.tools import Place, drain
from tests.waiting import until

pytestmark = pytest.mark.anyio

SECRET = "whsec_" + base64.b64encode(b"s" * 24).decode()
OLDER = "whsec_" + base64.b64encode(b"o" * 24).decode()


@pytest.fixture
async def there() -> AsyncIterator[Target]:
    async with target() as made:
        yield made


async def published(url: str, given: Any, **options: Any) -> list[Any]:
    sink = WebhookSink(url, [SECRET, OLDER], **{"private": True, **options})
    await sink.open()
    try:
        return await sink.publish(given)
    finally:
        await sink.close()


async def test_a_call_carries_the_row_and_both_signatures(there: Target) -> None:
    (row,) = rows(1, "ignored")
    row = replace(row, subject="ü b", traceparent="00-" + "a" * 32 + "-" + "b" * 16 + "-01")
    assert await published(there.url(), [row]) == [Published()]
    (call,) = there.calls
    assert (call.path, call.body) == ("/hooks/orders?a=1", row.payload)
    assert call.headers["host"] == f"localhost:{there.port}"
    assert call.headers["content-type"] == "application/json"
    assert call.headers["webhook-id"] == call.headers["ce-id"] == row.id
    assert call.headers["ce-subject"] == "%C3%BC%20b"
    assert call.headers["traceparent"] == row.traceparent
    assert call.headers["tenant"] == "acme"
    for secret in (SECRET, OLDER):
        standardwebhooks.Webhook(secret).verify(call.body.decode(), call.headers)
    with pytest.raises(standardwebhooks.WebhookVerificationError):
        standardwebhooks.Webhook(SECRET).verify('{"n": 1}', call.headers)


async def test_by_choice_a_call_is_signed_so_that_its_receiver_can_only_verify(there: Target) -> None:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    private = Ed25519PrivateKey.generate()
    secret = "whsk_" + base64.b64encode(private.private_bytes_raw()).decode()
    sink = WebhookSink(there.url(), [secret, SECRET], private=True)
    await sink.open()
    assert await sink.publish(rows(1, "x")) == [Published()]
    await sink.close()
    (call,) = there.calls
    asymmetric, symmetric = call.headers["webhook-signature"].split()
    scheme, _, signature = asymmetric.partition(",")
    signed = f"{call.headers['webhook-id']}.{call.headers['webhook-timestamp']}.".encode() + call.body
    assert scheme == "v1a"
    private.public_key().verify(base64.b64decode(signature), signed)
    with pytest.raises(InvalidSignature):
        private.public_key().verify(base64.b64decode(signature), signed + b" ")
    assert symmetric.startswith("v1,")
    standardwebhooks.Webhook(SECRET).verify(call.body.decode(), call.headers)


@pytest.mark.parametrize("code", [300, 301, 302, 307, 401, 404, 410, 429, 500, 503])
async def test_other_answers_are_refusals_of_the_target(there: Target, code: int) -> None:
    there.answer = status(code, b"why not", b"location: http://127.0.0.1:1/elsewhere")
    (answer,) = await published(there.url(), rows(1, "x"))
    assert answer == PublishRefused(f"answered {code}: why not")
    assert len(there.calls) == 1  # no redirect is followed


async def test_an_answer_may_be_about_the_message(there: Target) -> None:
    there.answer = status(422, b"odd")
    (answer,) = await published(there.url(), rows(1, "x"))
    assert answer == PublishRefused("answered 422: odd", of_message=True)


async def test_a_target_that_never_answers_is_given_up(there: Target) -> None:
    async def silent(_call: Any, _writer: Any) -> None:
        await asyncio.Event().wait()

    there.answer = silent
    (answer,) = await published(there.url(), rows(1, "x"), wait_s=0.1)
    assert isinstance(answer, PublishRefused)
    assert "no answer within" in answer.reason
    assert len(there.calls) == 1  # it may have been accepted: the next attempt has the same id


async def test_a_target_that_drips_is_given_up(there: Target) -> None:
    async def drips(_call: Any, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n")
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.02)  # each part well within `wait_s`

    there.answer = drips
    (answer,) = await published(there.url(), rows(1, "x"), wait_s=1.0, call_max_s=0.3)
    assert isinstance(answer, PublishRefused)
    assert "no whole answer" in answer.reason


async def test_a_long_answer_is_not_read(there: Target) -> None:
    there.answer = status(200, b"x" * 10_000_000)
    assert await published(there.url(), rows(1, "x")) == [Published()]


async def test_a_target_that_is_unwell_is_not_asked_again_and_again(there: Target) -> None:
    there.answer = status(500)
    answers = await published(there.url(), rows(50, "x"))
    assert len(there.calls) <= CALLS_MAX
    assert isinstance(answers[0], PublishRefused)
    assert isinstance(answers[-1], NotPublished)


async def test_nobody_there_is_a_refusal() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        (answer,) = await published(f"http://127.0.0.1:{taken.getsockname()[1]}/", rows(1, "x"))
    assert isinstance(answer, PublishRefused)


async def test_tls_checks_the_name_although_it_calls_an_address(tmp_path: Path) -> None:
    server, client = certificate(tmp_path)
    async with target(server) as there:
        assert await published(there.url("https"), rows(1, "x"), ssl_context=client) == [Published()]
    other, trusting = certificate(tmp_path, "elsewhere.example")
    async with target(other) as there:
        (answer,) = await published(there.url("https"), rows(1, "x"), ssl_context=trusting)
        assert isinstance(answer, PublishRefused)
        assert "certificate" in answer.reason.lower()
        assert there.calls == []


# --- where it must not go -----------------------------------------------------------------------

HOSTILE = [
    "127.0.0.1", "127.1.2.3", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254",
    "100.64.0.1", "224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1", "fd00::1", "ff02::1",
    "::ffff:10.0.0.1", "::ffff:169.254.169.254", "2002:a00:1::", "2002:7f00:1::", "64:ff9b::a00:1",
    "2001:0:4136:e378:8000:63bf:f5ff:fffe", "fe80::1%eth0", "192.0.2.1", "198.18.0.1", "240.0.0.1",
    "192.0.0.9", "192.31.196.1", "192.52.193.1", "192.88.99.1", "192.175.48.1", "::8.8.8.8", "64:ff9b:1::808:808",
    "100::1", "2001:20::1", "2001:db8::1", "2620:4f:8000::1", "3fff::1", "5f00::1", "fec0::1",
    "2001:0:a00:1:8000:63bf:f7f7:f7f7",
]  # fmt: skip


@pytest.mark.parametrize("address", HOSTILE)
def test_addresses_inside_are_refused(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["1.1.1.1", "93.184.216.34", "2606:4700::1111", "64:ff9b::101:101"])
def test_addresses_outside_are_not(address: str) -> None:
    assert is_public(address)


async def test_a_name_that_leads_inside_is_refused(there: Target) -> None:
    (answer,) = await published(there.url("https"), rows(1, "x"), private=False)
    assert isinstance(answer, PublishRefused)
    assert "not a public address" in answer.reason
    assert there.calls == []


@pytest.mark.parametrize(
    ("allow", "goes"),
    [
        (["127.0.0.0/8", "::1"], True),
        (["localhost", "127.0.0.0/8", "::1/128"], True),
        (["10.0.0.0/8"], False),
        (["localhost"], False),  # its address is private all the same
        (["example.com", "127.0.0.0/8", "::1"], False),
    ],
)
async def test_only_targets_that_are_allowed_are_called(tmp_path: Path, allow: list[str], goes: bool) -> None:
    server, client = certificate(tmp_path)
    async with target(server) as there:
        (answer,) = await published(
            there.url("https"), rows(1, "x"), private=False, allow=allow, ssl_context=client
        )
        assert isinstance(answer, Published if goes else PublishRefused)
        assert len(there.calls) == goes


@pytest.mark.parametrize(
    ("host", "named"),
    [
        ("hooks.example.com", True),
        ("HOOKS.example.com.", True),
        ("a.partner.example", True),
        ("partner.example", False),
        ("evil-partner.example", False),
        ("hooks.example.com.evil.example", False),
    ],
)
def test_hosts_are_allowed_by_name(host: str, named: bool) -> None:
    assert Allowed.of(["hooks.example.com", "*.partner.example"]).names_host(host) is named


@pytest.mark.parametrize("allow", ["", "*", "10.0.0.0/33", "a b", "10.1.2.3/8", "https://x", "1.2.3"])
def test_what_cannot_be_allowed_is_refused(allow: str) -> None:
    with pytest.raises(PolicyInvalid, match="valid target"):
        WebhookSink("https://example.com/", [SECRET], allow=[allow])


async def test_one_private_address_among_several_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()

    async def resolve(_host: str, port: int, **_more: Any) -> list[Any]:
        return [(0, 0, 0, "", (address, port)) for address in ("1.1.1.1", "10.0.0.1")]

    monkeypatch.setattr(loop, "getaddrinfo", resolve)
    (answer,) = await published("https://both.example/", rows(1, "x"), private=False)
    assert isinstance(answer, PublishRefused)
    assert "10.0.0.1" in answer.reason


async def test_the_address_that_was_checked_is_the_one_that_is_called(
    there: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that resolves to something else the second time is asked only once."""
    loop = asyncio.get_running_loop()
    asked: list[str] = []

    async def resolve(host: str, port: int, **_more: Any) -> list[Any]:
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(loop, "getaddrinfo", resolve)
    assert await published(f"http://rebinds.example:{there.port}/", rows(1, "x")) == [Published()]
    assert asked.count("rebinds.example") == 1
    assert there.calls[0].headers["host"] == f"rebinds.example:{there.port}"


@pytest.mark.parametrize(
    "url", ["http://example.com/", "https://user@example.com/", "https:///x", "ftp://x/", "https://h/#f"]
)
def test_urls_that_are_refused(url: str) -> None:
    with pytest.raises(PolicyInvalid):
        WebhookSink(url, [SECRET])


@pytest.mark.parametrize(
    "secrets", [[], ["whsec_short"], ["whsec_c2hvcnQ="], [SECRET] * 9, ["whsk_c2hvcnQ="], ["whsk_?"]]
)
def test_secrets_that_are_refused(secrets: list[str]) -> None:
    with pytest.raises(PolicyInvalid):
        WebhookSink("https://example.com/", secrets)


async def test_accepted_but_not_answered_is_sent_again_under_the_same_id(
    there: Target, sqlite_place: Place
) -> None:
    """The first answer comes too late for the relay; the receiver sees the id twice and drops one."""
    (written,) = sqlite_place.orders(1, 1)

    async def late_once(_call: Any, writer: asyncio.StreamWriter) -> None:
        if len(there.calls) == 1:
            await until(lambda: len(there.calls) > 1)
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")

    there.answer = late_once

    async def published_at_last() -> bool:
        sink = WebhookSink(there.url(), [SECRET], private=True, wait_s=0.1 if not there.calls else 10.0)
        await drain(sqlite_place, sink, retrying=Retrying(first_s=0.01))
        return [entry.state for entry in await sqlite_place.entries()] == ["published"]

    await until(published_at_last)
    assert [call.headers["webhook-id"] for call in there.calls] == [written] * 2
