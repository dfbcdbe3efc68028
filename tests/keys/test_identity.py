"""The search for a key: one order, first hit wins, nothing is invented."""

from typing import Any, get_args

import pytest

from semel import keys
from semel.errors import KeyInvalid, KeyMissing
from semel.keys import Envelope, FoundKey, Identity, Origin

# One message that has everything; each entry removes the winner so that the next place is seen to win.
EVERYWHERE: dict[str, Any] = {
    "headers": {
        "ce_id": b"1",
        "ce_source": b"/shop",
        "Idempotency-Key": '"idem-1"',
        "Nats-Msg-Id": "nats-1",
        "message_id": b"mid-1",
        "event_id": "eid-1",
    },
    "body": {"order": {"id": "o-1"}, "own": "explicit-1"},
    "broker_id": "amqp-1",
}
STAGES: list[tuple[str | None, FoundKey]] = [
    (None, FoundKey("ce:5:/shop:1", "cloudevents", "headers ce_source and ce_id")),
    ("ce_id", FoundKey("idem-1", "idempotency-key", "header Idempotency-Key")),
    ("Idempotency-Key", FoundKey("amqp-1", "broker", "the broker's own field")),
    ("broker_id", FoundKey("nats-1", "broker", "header Nats-Msg-Id")),
    ("Nats-Msg-Id", FoundKey("mid-1", "header", "header message_id")),
    ("message_id", FoundKey("eid-1", "header", "header event_id")),
    ("event_id", FoundKey("o-1", "body", "order.id")),
]


@pytest.mark.parametrize("stage", range(len(STAGES)))
def test_places_are_searched_in_their_order(stage: int) -> None:
    removed = {name for name, _ in STAGES[: stage + 1]}
    headers = {name: value for name, value in EVERYWHERE["headers"].items() if name not in removed}
    broker_id = None if "broker_id" in removed else EVERYWHERE["broker_id"]
    message = Envelope(headers=headers, body=EVERYWHERE["body"], broker_id=broker_id)
    identity = Identity(body="order.id")
    assert identity.find(message) == STAGES[stage][1]
    assert identity(message) == STAGES[stage][1].key


def test_explicit_key_wins_over_all() -> None:
    message = Envelope(**EVERYWHERE)
    assert keys.find(message, key=keys.body("own")) == FoundKey("explicit-1", "explicit", "Body('own')")
    assert keys.find(message, key=lambda m: m.broker_id).key == "amqp-1"
    assert keys.find(message, key="body.own").key == "explicit-1"


def test_explicit_key_that_is_absent_is_not_replaced_by_another() -> None:
    with pytest.raises(KeyMissing):
        keys.find(Envelope(**EVERYWHERE), key=keys.body("absent"), body="order.id", content=True)


def test_message_without_a_key_gets_none() -> None:
    message = Envelope(body=b'{"id":"looks like one"}', position="topic/0/42", transport="kafka")
    with pytest.raises(KeyMissing, match=r"from kafka.*invents no key"):
        keys.find(message)


def test_delivery_id_is_a_key_only_by_choice() -> None:
    message = Envelope(position="topic/0/42")
    assert keys.find(message, key="position").key == "topic/0/42"


def test_content_is_hashed_only_when_asked_for() -> None:
    message = Envelope(body=b'{"a":1}')
    with pytest.raises(KeyMissing):
        keys.find(message)
    assert keys.find(message, content=True) == FoundKey(keys.content()(message), "content", "Content()")
    chosen = keys.content("a", namespace="shop")
    assert keys.find(message, content=chosen).key == chosen(message)


def test_content_is_the_last_resort() -> None:
    assert keys.find(Envelope(headers={"event-id": "e-1"}, body=b"{}"), content=True).origin == "header"
    assert keys.find(Envelope(body=b'{"id":"b-1"}'), body="id", content=True).origin == "body"
    assert keys.find(Envelope(body=b'{"no":"id"}'), body="id", content=True).origin == "content"


def test_configured_body_path_that_is_absent_is_missing() -> None:
    with pytest.raises(KeyMissing, match="id"):
        keys.find(Envelope(body=b'{"no":"id"}'), body="id")


@pytest.mark.parametrize("name", ["Message_ID", "message-id", "MESSAGE-ID", "event_id", "Event-Id"])
def test_header_is_known_in_every_spelling(name: str) -> None:
    assert keys.find(Envelope(headers={name: "m-1"})).key == "m-1"
    assert keys.find(Envelope(headers=[(name, b"m-1")])).origin == "header"


def test_empty_id_is_no_id() -> None:
    message = Envelope(headers={"Idempotency-Key": "", "message_id": b" ", "event_id": "e-1"}, broker_id="")
    assert keys.find(message).key == "e-1"


@pytest.mark.parametrize(
    ("sent", "key"),
    [
        ('"8e03978e"', "8e03978e"),
        ("8e03978e", "8e03978e"),
        (' "8e03978e" ', "8e03978e"),
        (r'"a\"b\\c"', 'a"b\\c'),
        ('"8e03978e";v=1', "8e03978e"),
        ('"unbalanced', '"unbalanced'),
    ],
)
def test_idempotency_key_is_one_key_quoted_or_bare(sent: str, key: str) -> None:
    assert keys.find(Envelope(headers={"idempotency-key": sent})).key == key


def test_empty_quoted_idempotency_key_is_missing() -> None:
    with pytest.raises(KeyMissing):
        keys.find(Envelope(headers={"idempotency-key": '""', "message_id": "m-1"}))


def test_contradictory_headers_are_refused_not_chosen_from() -> None:
    message = Envelope(headers=[("Idempotency-Key", "a"), ("idempotency-key", "b"), ("message_id", "m-1")])
    with pytest.raises(KeyInvalid, match="more than once"):
        keys.find(message)


def test_bad_key_is_refused_and_the_search_does_not_go_on() -> None:
    with pytest.raises(KeyInvalid, match="513 bytes"):
        keys.find(Envelope(headers={"message_id": "m" * 513, "event_id": "e-1"}))
    with pytest.raises(KeyInvalid, match="control character"):
        keys.find(Envelope(broker_id="a\x00b"))


def test_bare_mapping_is_a_body() -> None:
    assert keys.find({"id": "e-1", "headers": {"message_id": "no"}}, body="id") == FoundKey(
        "e-1", "body", "id"
    )


def test_foreign_message_object_will_do() -> None:
    class Foreign:
        headers = (("message_id", b"m-1"),)
        body = b""
        broker_id = None

    assert keys.find(Foreign()).key == "m-1"


def test_every_origin_is_reached() -> None:
    reached = {found.origin for _, found in STAGES} | {"explicit", "content"}
    assert reached == set(get_args(Origin))


def test_the_id_of_debeziums_outbox_event_router_is_a_key_on_kafka_alone() -> None:
    sent = Envelope(headers={"id": "0c7d", "eventType": "paid"}, body=b"{}", transport="kafka")
    assert Identity().find(sent) == FoundKey("0c7d", "header", "header id")
    both = Envelope(headers={"id": "0c7d", "message_id": "m"}, body=b"{}", transport="kafka")
    assert Identity()(both) == "m"
    with pytest.raises(KeyMissing):
        Identity()(Envelope(headers={"id": "0c7d"}, body=b"{}", transport="nats"))
