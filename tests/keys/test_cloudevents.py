"""A CloudEvent is its source and id together, in every mode and on every transport."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel import keys
from semel.errors import KeyInvalid, KeyMissing
from semel.keys import Envelope
from semel.keys.identity import compose

STRUCTURED = {
    "specversion": "1.0",
    "source": "/shop",
    "id": "e-1",
    "type": "paid",
    "data": {"id": "other", "x": [1.5]},
}
MESSAGES = {
    "http": Envelope(headers={"CE-Id": "e-1", "CE-Source": "/shop"}),
    "http quoted": Envelope(headers={"ce-id": '"e-1"', "ce-source": "%2Fshop"}),
    "kafka": Envelope(headers=[("ce_id", b"e-1"), ("ce_source", b"/shop"), ("ce_type", b"paid")]),
    "amqp": Envelope(headers={"cloudEvents:id": "e-1", "cloudEvents:source": "/shop"}),
    "amqp underscore": Envelope(headers={"cloudEvents_id": "e-1", "cloudEvents_source": "/shop"}),
    "structured bytes": Envelope(body=json.dumps(STRUCTURED).encode()),
    "structured object": Envelope(body=STRUCTURED),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_one_event_has_one_key_in_every_mode(name: str) -> None:
    assert keys.cloudevent()(MESSAGES[name]) == "ce:5:/shop:e-1"
    assert keys.find(MESSAGES[name]).origin == "cloudevents"


def test_bare_mapping_is_a_structured_event() -> None:
    assert keys.cloudevent()(STRUCTURED) == "ce:5:/shop:e-1"


@pytest.mark.parametrize(
    "message",
    [
        Envelope(),
        Envelope(headers={"ce-id": "e-1"}),
        Envelope(headers={"ce-source": "/shop"}),
        Envelope(headers={"ce-id": "e-1", "ce_source": "/shop"}),
        Envelope(headers={"ce-id": "", "ce-source": "/shop"}),
        Envelope(body=b'{"source":"/shop","id":"e-1"}'),
        Envelope(body=b'{"specversion":"1.0","source":"/shop"}'),
        Envelope(body=b'{"specversion":"1.0","source":"/shop","id":7}'),
        Envelope(body=b'{"specversion":"1.0","source":"","id":"e-1"}'),
        Envelope(body=b'{"data":{"specversion":"1.0","source":"/shop","id":"e-1"}}'),
        Envelope(body=b'[{"specversion":"1.0","source":"/shop","id":"e-1"}]'),
        Envelope(body=b'{"specversion"'),
        {"specversion": "1.0", "id": "e-1"},
        object(),
    ],
)
def test_half_an_identity_is_none(message: Any) -> None:
    with pytest.raises(KeyMissing, match="CloudEvent"):
        keys.cloudevent()(message)


def test_source_and_id_do_not_run_together() -> None:
    pairs = [("a", "b:c"), ("a:b", "c"), ("1:a", "b"), ("", "a:b"), ("a:b:", "c"), ("a:b", ":c")]
    assert len({compose(*pair) for pair in pairs}) == len(pairs)


visible = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1)


@given(visible, visible, visible, visible)
def test_different_pairs_have_different_keys(
    source: str, event_id: str, source_2: str, event_id_2: str
) -> None:
    assert (compose(source, event_id) == compose(source_2, event_id_2)) == (
        (source, event_id) == (source_2, event_id_2)
    )


@pytest.mark.parametrize("source", ["s" * 600, "é" * 300])
def test_long_source_becomes_a_digest_instead_of_an_error(source: str) -> None:
    key = compose(source, "e-1")
    assert keys.check(key) == key
    assert key.startswith("ce:v1.")
    assert key != compose(source, "e-2")


def test_percent_signs_are_decoded_only_where_the_binding_encodes() -> None:
    http = Envelope(headers={"ce-id": "a%20b%C3%A9", "ce-source": "/s"})
    kafka = Envelope(headers={"ce_id": "a%20b", "ce_source": "/s"})
    assert keys.cloudevent()(http) == "ce:2:/s:a bé"
    assert keys.cloudevent()(kafka) == "ce:2:/s:a%20b"
    quoted = Envelope(headers={"ce-id": r'"a\"\\b"', "ce-source": "/s"})
    assert keys.cloudevent()(quoted) == 'ce:2:/s:a"\\b'


def test_broken_encoding_is_refused() -> None:
    with pytest.raises(KeyInvalid, match="percent-encoded"):
        keys.cloudevent()(Envelope(headers={"ce-id": "%FF", "ce-source": "/s"}))
    with pytest.raises(KeyInvalid, match="control character"):
        keys.cloudevent()(Envelope(headers={"ce-id": "a%0Ab", "ce-source": "/s"}))
