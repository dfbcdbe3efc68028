"""The extension in a real Flask application."""

import flask
import pytest

import semel
from semel.errors import UsageError
from semel.integrations.flask import Idempotency, by_authorization

WHO = {"Authorization": "Bearer ada"}


def shop(**config: object) -> tuple[flask.Flask, list[str]]:
    app = flask.Flask("shop")
    app.config.update(config)
    charged: list[str] = []

    @app.post("/orders/<order>/charge")
    def charge(order: str) -> tuple[dict[str, int], int]:
        charged.append(order)
        return {"charged": len(charged)}, 201

    return app, charged


def test_a_retry_gets_the_first_response() -> None:
    app, charged = shop(SEMEL_STORE="memory:", SEMEL_WINDOW="1h")
    Idempotency(caller=by_authorization).init_app(app)
    client = app.test_client()
    answers = [
        client.post("/orders/7/charge", headers={**WHO, "Idempotency-Key": "k"}, json={}) for _ in range(2)
    ]
    assert [(each.status_code, each.json) for each in answers] == [(201, {"charged": 1})] * 2
    assert answers[1].headers["Idempotent-Replayed"] == "true"
    assert charged == ["7"]
    other = client.post("/orders/8/charge", headers={**WHO, "Idempotency-Key": "k"}, json={})
    assert other.status_code == 422  # the same route and key, another request
    assert client.post("/orders/7/charge", headers={"Idempotency-Key": "k"}, json={}).status_code == 401
    app.extensions["semel"].close()


def test_wrong_uses_are_refused() -> None:
    app, _ = shop()
    with pytest.raises(UsageError, match="SEMEL_STORE"):
        Idempotency(caller=None).init_app(app)
    with semel.open("memory:", consumer="shop") as once:
        Idempotency(once, caller=None, app=app)
        with pytest.raises(UsageError, match="already"):
            Idempotency(once, caller=None, app=app)
