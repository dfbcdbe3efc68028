"""A Django project in one file, run as a program with the engine, name, host, port and user of its database."""

import os
import sys
import threading
from contextlib import suppress
from typing import Any

import django  # type: ignore[import-untyped]
import pytest
import redis
from django.conf import settings  # type: ignore[import-untyped]
from django.http import HttpRequest, JsonResponse, StreamingHttpResponse  # type: ignore[import-untyped]
from django.urls import path  # type: ignore[import-untyped]

from tests.http import agentic

ENGINE, NAME, HOST, PORT, USER = (*sys.argv[1:], "", "", "")[:5]
SINK = os.environ["SINK"]
CONTRIB = [f"django.contrib.{name}" for name in ("admin", "auth", "contenttypes", "sessions", "messages")]
CONTEXT = [
    "django.template.context_processors.request",
    "django.contrib.auth.context_processors.auth",
    "django.contrib.messages.context_processors.messages",
]
SESSION = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
charged: list[str] = []
checkouts: list[str] = []


def charge(request: HttpRequest, order: str) -> JsonResponse:
    charged.append(order)
    return JsonResponse({"charged": len(charged)}, status=201)


def checkout(request: HttpRequest, number: str) -> JsonResponse:
    checkouts.append(number)
    return JsonResponse({"ran": len(checkouts)}, status=201)


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


urlpatterns = [
    path("charge/<order>", charge),
    path("stream", stream),
    path("rest", rest),
    path("checkouts/<number>", checkout),
]


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
        INSTALLED_APPS=[*CONTRIB, "semel.integrations.django"],
        MIDDLEWARE=["semel.integrations.django.middleware.IdempotencyMiddleware"],
        TEMPLATES=[
            {
                "BACKEND": "django.template.backends.django.DjangoTemplates",
                "APP_DIRS": True,
                "OPTIONS": {"context_processors": CONTEXT},
            }
        ],
        USE_TZ=True,
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


def check_outbox_on_commit() -> None:
    """A commit publishes what earlier transactions left in the outbox too; a rollback starts nothing."""
    from django.db import transaction
    from django.test import override_settings

    import semel
    from semel.integrations.django import close, publish

    def relays() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name == "semel-relay"]

    with override_settings(SEMEL={"CONSUMER": "shop", "SINK": SINK}), redis.Redis.from_url(SINK) as broker:
        with suppress(ZeroDivisionError), transaction.atomic():
            publish(semel.Message("wallet.credited", {"event": "rolled back"}))
            raise ZeroDivisionError
        assert relays() == []
        with transaction.atomic():
            publish(semel.Message("wallet.credited", {"event": "e3"}))
            assert relays() == []
        published: list[bytes] = []
        last = "0"
        while len(published) < 3:
            ((_, entries),) = broker.xread({"wallet.credited": last}, block=30_000)
            last = entries[-1][0]
            published += [fields[b"data"] for _, fields in entries]
        assert published == [b'{"event":"e1"}', b'{"event":"e2"}', b'{"event":"e3"}']
        assert relays() == ["semel-relay"]
        close()
    assert relays() == []


def check_agentic_commerce() -> None:
    from django.test import Client, override_settings

    def post(path: str, body: Any, key: str | None) -> tuple[int, dict[str, str], Any]:
        headers = {"Authorization": "Bearer ada", **({} if key is None else {"Idempotency-Key": key})}
        answer = Client().post(path, body, "application/json", headers=headers)
        return answer.status_code, {name.lower(): value for name, value in answer.items()}, answer.json()

    with override_settings(SEMEL={"CONSUMER": "shop", "PRESET": "acp"}):
        agentic.check(post, checkouts)


def check_admin() -> None:
    from django.contrib import admin  # type: ignore[import-untyped]
    from django.contrib.auth.models import Permission, User  # type: ignore[import-untyped]
    from django.core.management import call_command  # type: ignore[import-untyped]
    from django.test import Client, override_settings

    call_command("migrate", verbosity=0)
    urlpatterns.append(path("admin/", admin.site.urls))
    ada = User.objects.create_user("ada", is_staff=True)
    with override_settings(MIDDLEWARE=[*SESSION, *settings.MIDDLEWARE]):
        browser = Client()
        browser.force_login(ada)
        page = "/admin/semel/djangorecord/"
        assert browser.get(page).status_code == 403
        ada.user_permissions.add(Permission.objects.get(codename="view_djangorecord"))
        text = browser.get(page).content.decode()
        assert "POST charge/&lt;order&gt;" in text or "POST charge/%3Corder%3E" in text
        assert "k1" in text
        assert "k1" not in browser.get(page, {"state": "unknown"}).content.decode()
        assert "k1" not in browser.get(page, {"prefix": "PATCH"}).content.decode()
        assert browser.get(page + "add/").status_code == 403
        assert browser.get(page + "1/change/").status_code == 302
        assert "/admin/semel/djangorecord/" in browser.get("/admin/").content.decode()
        with override_settings(SEMEL={"STORES": "x"}):
            assert "SEMEL has no setting" in browser.get(page).content.decode()


def check_checks() -> None:
    from django.core.checks import run_checks  # type: ignore[import-untyped]
    from django.test import override_settings

    def found(**changed: Any) -> list[str]:
        with override_settings(**changed):
            return [each.id for each in run_checks(tags=["semel"])]

    assert found() == []
    assert found(SEMEL={"STORES": "x"}) == ["semel.E001"]
    assert found(SEMEL={"PRESET": "x"}) == ["semel.E001"]
    assert found(SEMEL={"SINK": "x"}) == ["semel.E001"]
    assert found(SEMEL={"STORE": "memory:"}) == ["semel.E002"]
    ours, theirs = settings.MIDDLEWARE[0], "django.contrib.auth.middleware.AuthenticationMiddleware"
    assert found(MIDDLEWARE=[ours, theirs]) == ["semel.W001"]
    assert found(MIDDLEWARE=[theirs, ours]) == []


if __name__ == "__main__":
    sys.modules["tests.integrations.django_shop"] = sys.modules["__main__"]
    configure()
    check_transactions()
    check_outbox_on_commit()
    check_requests()
    check_agentic_commerce()
    if ENGINE == "sqlite3":
        check_admin()
    check_checks()
    from semel.integrations.django import close

    close()
    sys.stdout.write("fine\n")
