"""A Django project in one file, run as a program with the engine, name, host, port and user of its database."""

import sys
from contextlib import suppress
from typing import Any

import django  # type: ignore[import-untyped]
import pytest
from django.conf import settings  # type: ignore[import-untyped]
from django.http import HttpRequest, JsonResponse, StreamingHttpResponse  # type: ignore[import-untyped]
from django.urls import path  # type: ignore[import-untyped]

ENGINE, NAME, HOST, PORT, USER = (*sys.argv[1:], "", "", "")[:5]
charged: list[str] = []


def charge(request: HttpRequest, order: str) -> JsonResponse:
    charged.append(order)
    return JsonResponse({"charged": len(charged)}, status=201)


def stream(request: HttpRequest) -> StreamingHttpResponse:
    return StreamingHttpResponse(iter([b"a", b"b"]))


def rest(request: HttpRequest) -> Any:
    from rest_framework.decorators import api_view
    from rest_framework.response import Response

    @api_view(["POST"])  # type: ignore[untyped-decorator]
    def view(inner: Any) -> Any:
        charged.append(inner.data["order"])
        return Response({"order": inner.data["order"]})

    return view(request)


urlpatterns = [path("charge/<order>", charge), path("stream", stream), path("rest", rest)]


def configure() -> None:
    settings.configure(
        DATABASES={
            "default": {
                "ENGINE": f"django.db.backends.{ENGINE}",
                "NAME": NAME,
                "HOST": HOST,
                "PORT": PORT,
                "USER": USER,
            }
        },
        INSTALLED_APPS=["semel.integrations.django"],
        MIDDLEWARE=["semel.integrations.django.middleware.IdempotencyMiddleware"],
        REST_FRAMEWORK={"DEFAULT_AUTHENTICATION_CLASSES": [], "UNAUTHENTICATED_USER": None},
        ROOT_URLCONF="tests.integrations.django_shop",
        ALLOWED_HOSTS=["testserver"],
        SECRET_KEY="test",
        SEMEL={"CONSUMER": "shop"},
    )
    django.setup()


def check_requests() -> None:
    from django.test import Client  # type: ignore[import-untyped]

    client, headers = Client(), {"Authorization": "Bearer ada", "Idempotency-Key": "k1"}
    first = client.post("/charge/7", {}, "application/json", headers=headers)
    again = client.post("/charge/7", {}, "application/json", headers=headers)
    assert (
        (first.status_code, first.content) == (again.status_code, again.content) == (201, b'{"charged": 1}')
    )
    assert again["Idempotent-Replayed"] == "true"
    assert again["Content-Type"] == "application/json"
    assert "Idempotent-Replayed" not in first
    assert client.post("/charge/8", {}, "application/json", headers=headers).status_code == 422
    assert client.post("/charge/7", headers={"Idempotency-Key": "k1"}).status_code == 401
    assert client.post("/charge/9", {}, "application/json").json() == {"charged": 2}
    headers["Idempotency-Key"] = "k2"
    assert client.post("/stream", headers=headers).getvalue() == b"ab"
    assert client.post("/stream", headers=headers).status_code == 409
    headers["Idempotency-Key"] = "k3"
    bodies = [
        client.post("/rest", {"order": "r"}, "application/json", headers=headers).json() for _ in range(2)
    ]
    assert bodies == [{"order": "r"}] * 2
    assert charged == ["7", "9", "r"]


def check_transactions() -> None:
    from django.db import connection, transaction  # type: ignore[import-untyped]

    import semel
    from semel.errors import NoTransaction
    from semel.integrations.django import first, publish

    def on_payment(event: str, *, fails: bool = False) -> bool:
        with transaction.atomic():
            if not first(event):
                return False
            with connection.cursor() as cursor:
                cursor.execute("UPDATE wallet SET balance = balance + 5")
            publish(semel.Message("wallet.credited", {"event": event}))
            if fails:
                raise ZeroDivisionError
            return True

    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE wallet (balance int)")
        cursor.execute("INSERT INTO wallet VALUES (0)")
    with suppress(ZeroDivisionError):
        on_payment("e1", fails=True)
    assert [on_payment("e1"), on_payment("e1"), on_payment("e2")] == [True, False, True]
    with connection.cursor() as cursor:
        cursor.execute("SELECT balance FROM wallet")
        assert cursor.fetchone() == (10,)
    with pytest.raises(NoTransaction):
        first("outside")


def check_checks() -> None:
    from django.core.checks import run_checks  # type: ignore[import-untyped]
    from django.test import override_settings

    def found(**changed: Any) -> list[str]:
        with override_settings(**changed):
            return [each.id for each in run_checks(tags=["semel"])]

    assert found() == []
    assert found(SEMEL={"STORES": "x"}) == ["semel.E001"]
    assert found(SEMEL={"STORE": "memory:"}) == ["semel.E002"]
    ours, theirs = settings.MIDDLEWARE[0], "django.contrib.auth.middleware.AuthenticationMiddleware"
    assert found(MIDDLEWARE=[ours, theirs]) == ["semel.W001"]
    assert found(MIDDLEWARE=[theirs, ours]) == []


if __name__ == "__main__":
    sys.modules["tests.integrations.django_shop"] = sys.modules["__main__"]
    configure()
    check_transactions()
    check_requests()
    check_checks()
    from semel.integrations.django import close

    close()
    sys.stdout.write("fine\n")
