"""The protocol for people with curl."""

import os

import pytest

from tests.server.tools import JSON, Running


def test_a_claim_is_granted_once_and_its_value_replayed(anywhere: Running) -> None:
    first = anywhere.claim("evt_1")
    assert first["outcome"] == "claimed"
    assert (first["attempt"], len(first["idempotency_key"])) == (1, 32)
    busy = anywhere.claim("evt_1")
    assert busy["outcome"] == "busy"
    assert 0 < busy["retry_after_s"] <= 30
    assert anywhere.end("complete", first["claim"], value={"receipt": 7}) == {"outcome": "completed"}
    again = {"outcome": "completed", "already": True}
    assert anywhere.end("complete", first["claim"], value={"receipt": 7}) == again
    assert anywhere.end("complete", first["claim"], value={"receipt": 8}) == {**again, "kept": False}
    assert anywhere.claim("evt_1")["value"] == {"receipt": 7}


@pytest.mark.parametrize(
    "value",
    [None, 0, "", [], {}, False, "\u00fc\x00\ud83d\udd11".encode("utf-16", "surrogatepass").decode("utf-16")],
)
def test_values_come_back_as_they_went_in(anywhere: Running, value: object) -> None:
    key = f"value {value!r}"
    anywhere.end("complete", anywhere.claim(key)["claim"], value=value)
    again = anywhere.claim(key)
    assert (again["outcome"], again.get("value")) == ("done", value)


def test_a_lost_reply_is_answered_again_for_its_owner(anywhere: Running) -> None:
    owner = os.urandom(16).hex()
    first = anywhere.claim("lost reply", owner=owner)
    assert anywhere.claim("lost reply", owner=owner)["fence"] == first["fence"]
    assert anywhere.claim("lost reply", owner=os.urandom(16).hex())["outcome"] == "busy"


def test_a_failure_is_kept_and_replayed(anywhere: Running) -> None:
    anywhere.end("fail", anywhere.claim("bad")["claim"], error="no such card")
    again = anywhere.claim("bad")
    assert (again["outcome"], again["error"]["message"]) == ("failed", "no such card")


def test_a_release_lets_the_next_one_try(anywhere: Running) -> None:
    first = anywhere.claim("released")
    assert anywhere.end("renew", first["claim"]) == {"outcome": "renewed", "lease_s": 30.0}
    assert anywhere.end("release", first["claim"]) == {"outcome": "completed"}
    second = anywhere.claim("released")
    assert (second["outcome"], second["attempt"]) == ("claimed", 2)
    assert anywhere.end("complete", first["claim"])["outcome"] == "lost"
    assert anywhere.end("complete", second["claim"])["outcome"] == "completed"


def test_an_error_is_kept_in_the_record_bounded_and_escaped(anywhere: Running) -> None:
    first = anywhere.claim("erring")
    ugly = "<script>\x1b[2J\u202e" + "x" * 4000
    assert anywhere.end("release", first["claim"], error=ugly, kind="Refused", worker="php-7") == {
        "outcome": "completed"
    }
    anywhere.end("release", anywhere.claim("erring")["claim"])
    anywhere.end("fail", anywhere.claim("erring")["claim"], error="no such card", traceback="charge.php:7")
    record = anywhere.client.get("/v1/records/billing/erring").json()
    kept, last = record["errors"]
    assert (kept["attempt"], kept["kind"], kept["worker"]) == (1, "Refused", "php-7")
    assert kept["message"].startswith("<script>\\x1b[2J\\u202exxx")
    assert len(kept["message"].encode()) == 1000
    assert (last["attempt"], last["kind"], last["message"]) == (3, "reported", "no such card")
    assert last["traceback"] == "charge.php:7"


def test_another_payload_is_a_mismatch_that_shows_nothing(anywhere: Running) -> None:
    first = anywhere.claim("printed", fingerprint="one")
    anywhere.end("complete", first["claim"], value="secret")
    other = anywhere.claim("printed", fingerprint="two")
    assert other["outcome"] == "mismatch"
    assert "secret" not in str(other)


def test_a_batch_answers_in_order_and_a_copy_is_busy(anywhere: Running) -> None:
    keys = ["b1", "b2", "b1", "b3"]
    said = {"consumer": "billing", "claims": [{"key": key} for key in keys]}
    found = anywhere.post("/v1/claims", said).json()["outcomes"]
    assert [(each["key"], each["outcome"]) for each in found] == [
        ("b1", "claimed"),
        ("b2", "claimed"),
        ("b1", "busy"),
        ("b3", "claimed"),
    ]


def test_a_value_too_large_is_completed_without_it(anywhere: Running) -> None:
    first = anywhere.claim("large")
    assert anywhere.end("complete", first["claim"], value="x" * 330_000) == {
        "outcome": "completed",
        "kept": False,
    }
    again = anywhere.claim("large")
    assert (again["outcome"], again["kept"], again.get("value")) == ("done", False, None)


def test_a_window_changed_meanwhile_applies_to_the_completion(anywhere: Running) -> None:
    first = anywhere.claim("windowed", event_type="short")
    answer = anywhere.client.put(
        "/v1/windows",
        json={"consumer": "billing", "event_type": "short", "window": "off"},
        headers=JSON,
    )
    assert answer.status_code == 200
    anywhere.end("complete", first["claim"], value=1)
    assert anywhere.claim("windowed", event_type="short")["outcome"] == "claimed"


@pytest.mark.parametrize("lease", ["1h", "10ms", "soon", "-1s"])
def test_a_lease_out_of_bounds_is_refused(anywhere: Running, lease: str) -> None:
    said = {"consumer": "billing", "claims": [{"key": "long"}], "lease": lease}
    answer = anywhere.post("/v1/claims", said)
    refused = [each["outcome"] for each in answer.json().get("outcomes", [])]
    assert answer.status_code == 422 or refused == ["refused"]
    assert anywhere.client.get("/v1/records/billing/long").status_code == 404


@pytest.mark.parametrize("claim", ["", "x", "bm9uc2Vuc2U=", "l6diaWxsaW5n", "\u00fc"])
def test_a_handle_that_was_never_given_out_is_invalid(anywhere: Running, claim: str) -> None:
    assert anywhere.post("/v1/claims/complete", {"claims": [{"claim": claim}]}).status_code == 422


def test_a_consumer_that_marks_has_no_claims(anywhere: Running) -> None:
    item = {"type": "admit", "tenant": "", "consumer": "marks", "mode": "mark"}
    assert anywhere.post("/v1/items", [item]).json() == [{"mode": "mark"}]
    answer = anywhere.post("/v1/claims", {"consumer": "marks", "claims": [{"key": "k"}]})
    assert (answer.status_code, answer.json()["type"]) == (409, "urn:semel:mode-mismatch")
