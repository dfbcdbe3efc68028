"""Who a webhook is from: the real signatures pass, anything altered is refused, nothing raises."""

import base64
from collections.abc import Callable
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from semel.errors import PolicyInvalid
from semel.ingest import webhooks
from semel.ingest.webhook_schemes import headers_of
from semel.ingest.webhooks import Challenge, Scheme, Verified, WebhookRefused
from tests.ingest import signed
from tests.ingest.signed import BODY, NOW, OTHER, SECRET

SLACK_BODY = b'{"event_id":"Ev1","type":"event_callback","event":{"type":"message"}}'

Case = tuple[Scheme, Callable[..., dict[str, str]], bytes, Verified]
CASES: dict[str, Case] = {
    "standard": (webhooks.standard(SECRET), signed.standard, BODY, Verified("msg_1", "order.paid")),
    "stripe": (
        webhooks.stripe("whsec_a-rather-plain-secret"),
        signed.stripe,
        BODY,
        Verified("evt_1", "order.paid"),
    ),
    "github": (
        webhooks.github("a-rather-plain-secret"),
        signed.github,
        BODY,
        Verified("72d3162e-cc78-11e3-81ab-4c9367dc0958", "push"),
    ),
    "shopify": (
        webhooks.shopify("a-rather-plain-secret"),
        signed.shopify,
        BODY,
        Verified("b54557e4-bdd9-4b37-8a5f-bf7d70bcd043", "orders/create"),
    ),
    "slack": (webhooks.slack("a-rather-plain-secret"), signed.slack, SLACK_BODY, Verified("Ev1", "message")),
}
TIMED = ["standard", "stripe", "slack"]
every = pytest.mark.parametrize("name", CASES)


@every
def test_what_is_signed_is_verified(name: str) -> None:
    scheme, sign, body, expected = CASES[name]
    assert scheme.verify(sign(body), body, NOW) == expected


@every
def test_another_body_is_refused(name: str) -> None:
    scheme, sign, body, _ = CASES[name]
    answer = scheme.verify(sign(body), body + b" ", NOW)
    assert isinstance(answer, WebhookRefused)
    assert answer.status == 401


@every
def test_another_secret_is_refused(name: str) -> None:
    scheme, sign, body, _ = CASES[name]
    secret = OTHER if name == "standard" else "another"
    answer = scheme.verify(sign(body, secret=secret), body, NOW)
    assert isinstance(answer, WebhookRefused)
    assert answer.status == 401


@every
def test_no_headers_at_all_are_refused(name: str) -> None:
    scheme, _, body, _ = CASES[name]
    answer = scheme.verify({}, body, NOW)
    assert isinstance(answer, WebhookRefused)
    assert answer.status == 401


@pytest.mark.parametrize("name", TIMED)
@pytest.mark.parametrize(("off_s", "passes"), [(300, True), (-300, True), (301, False), (-301, False)])
def test_replays_are_tolerated_for_five_minutes_either_way(name: str, off_s: int, passes: bool) -> None:
    scheme, sign, body, expected = CASES[name]
    answer = scheme.verify(sign(body, at=NOW + off_s), body, NOW)
    assert answer == expected if passes else isinstance(answer, WebhookRefused)


@pytest.mark.parametrize("header", ["webhook-id", "webhook-timestamp"])
def test_id_and_time_are_signed_too(header: str) -> None:
    headers = signed.standard() | {header: {"webhook-id": "msg_2"}.get(header, str(NOW + 1))}
    answer = webhooks.standard(SECRET).verify(headers, BODY, NOW)
    assert isinstance(answer, WebhookRefused)
    assert answer.status == 401


def test_an_id_with_a_dot_is_refused_even_if_signed() -> None:
    # `a.1.b` + `.c` and `a` + `.1.b.c` would be signed alike: whoever may choose ids could move bytes between fields.
    answer = webhooks.standard(SECRET).verify(signed.standard(message_id="msg.1"), BODY, NOW)
    assert isinstance(answer, WebhookRefused)


def test_secrets_can_be_changed() -> None:
    both = webhooks.standard([SECRET, OTHER])
    assert isinstance(both.verify(signed.standard(secret=OTHER), BODY, NOW), Verified)
    headers = signed.standard(secret=OTHER)
    headers["webhook-signature"] += " " + signed.standard()["webhook-signature"]
    assert isinstance(webhooks.standard(SECRET).verify(headers, BODY, NOW), Verified)
    for name, make in (("stripe", webhooks.stripe), ("github", webhooks.github)):
        secret = "whsec_a-rather-plain-secret" if name == "stripe" else "a-rather-plain-secret"
        assert isinstance(
            make(["an-older-plain-secret", secret]).verify(CASES[name][1](BODY), BODY, NOW), Verified
        )


def test_asymmetric_signatures() -> None:
    private = Ed25519PrivateKey.from_private_bytes(b"k" * 32)
    public = "whpk_" + base64.b64encode(private.public_key().public_bytes_raw()).decode()
    signature = base64.b64encode(private.sign(f"msg_1.{NOW}.".encode() + BODY)).decode()
    headers = signed.standard() | {"webhook-signature": f"v1a,{signature}"}
    scheme = webhooks.standard(public)
    assert scheme.verify(headers, BODY, NOW) == Verified("msg_1", "order.paid")
    assert isinstance(scheme.verify(headers, BODY + b" ", NOW), WebhookRefused)
    # The public key is known to everybody: it must never serve as a shared secret.
    forged = signed.standard(secret="whsec_" + public.removeprefix("whpk_"))
    assert isinstance(scheme.verify(forged, BODY, NOW), WebhookRefused)
    confused = {"webhook-signature": forged["webhook-signature"].replace("v1,", "v1a,")}
    assert isinstance(scheme.verify(forged | confused, BODY, NOW), WebhookRefused)
    assert isinstance(webhooks.standard(SECRET).verify(headers, BODY, NOW), WebhookRefused)


def test_at_most_eight_signatures_are_looked_at() -> None:
    good = signed.standard()
    for wrong, expected in ((7, Verified), (8, WebhookRefused)):
        signatures = ["v1," + base64.b64encode(bytes([n]) * 32).decode() for n in range(wrong)]
        headers = good | {"webhook-signature": " ".join([*signatures, good["webhook-signature"]])}
        assert isinstance(webhooks.standard(SECRET).verify(headers, BODY, NOW), expected)


def test_a_header_that_comes_twice_verifies_nothing() -> None:
    raw = [(name.upper().encode(), value.encode()) for name, value in signed.standard().items()]
    once, twice = headers_of(raw), headers_of([*raw, (b"webhook-id", b"msg_2")])
    assert once is not None
    assert twice is not None
    assert isinstance(webhooks.standard(SECRET).verify(once, BODY, NOW), Verified)
    assert isinstance(webhooks.standard(SECRET).verify(twice, BODY, NOW), WebhookRefused)


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"id":7}', b'{"id":""}', b"\xff", b"[" * 100_000])
def test_a_signed_body_without_an_id_is_a_bad_request(body: bytes) -> None:
    answer = webhooks.stripe("whsec_a-rather-plain-secret").verify(signed.stripe(body), body, NOW)
    assert isinstance(answer, WebhookRefused)
    assert answer.status == 400


def test_slack_is_told_its_challenge() -> None:
    body = b'{"type":"url_verification","challenge":"3eZbrw1a"}'
    assert webhooks.slack("a-rather-plain-secret").verify(signed.slack(body), body, NOW) == Challenge(
        b"3eZbrw1a"
    )
    assert isinstance(webhooks.slack("a-rather-plain-secret").verify({}, body, NOW), WebhookRefused)


@given(
    name=st.sampled_from(sorted(CASES)),
    values=st.lists(st.one_of(st.text(), st.from_regex(r"(v1|v1a|t|v0|sha256)[,=][ -~]*")), min_size=3),
    body=st.binary(),
)
def test_nothing_that_is_sent_raises_or_passes(name: str, values: list[str], body: bytes) -> None:
    scheme, sign, good, _ = CASES[name]
    headers = dict(zip(sign(good), values, strict=False))
    assert isinstance(scheme.verify(headers, body, NOW), WebhookRefused)


@pytest.mark.parametrize("secret", ["whsec_short", "whsec_!", "whpk_AAAA"])
def test_bad_secrets_are_refused_at_once(secret: str) -> None:
    with pytest.raises(PolicyInvalid):
        webhooks.standard(secret)


@pytest.mark.parametrize("secrets", ["", " ", [], [""], ["a"] * 9])
def test_no_secret_and_too_many_are_refused_by_all(secrets: str | list[str]) -> None:
    for make in (webhooks.standard, webhooks.stripe, webhooks.github, webhooks.shopify, webhooks.slack):
        with pytest.raises(PolicyInvalid):
            make(secrets)


def test_secrets_are_not_shown() -> None:
    assert "a-rather-plain-secret" not in repr(webhooks.github("a-rather-plain-secret"))


@pytest.mark.parametrize("preset", [webhooks.stripe, webhooks.github, webhooks.shopify, webhooks.slack])
def test_a_secret_that_can_be_guessed_is_refused(preset: Any) -> None:
    preset("x" * 16)
    for short in ("x" * 15, f"whsec_{'x' * 15}", f"{'x' * 10}{' ' * 10}", ["x" * 16, "y"]):
        with pytest.raises(PolicyInvalid, match="can be guessed"):
            preset(short)
